"""qgZ: gradients reduced in two hops, with partial sums that stay.

    gradients [N, L, S] --pack--> local all-to-all, sum over L --> partial sums [N, S], over all micro-batches of a step
    partial sums [N, S] --pack--> cross all-to-all, sum over N --> [S], once per optimizer step

N nodes (cross axis), L ranks of a node (local axis), S elements of a shard. Both hops only sum. NaN and Inf arrive as
NaN or Inf. With error feedback the cross hop adds what its last quantization has lost, so that nothing is lost for
good; what becomes of a step's gradients (clipped, skipped, in another loss scale) becomes of those errors too.
Source: ZeRO++ (arXiv 2306.10209) section 3.3, with the cross hop moved out of the micro-batch; the moving average is
LoCo's (arXiv 2407.04480).
"""

from __future__ import annotations

import functools

import torch

from megazpp.kernels.block_quant import Feedback
from megazpp.parallel.comm_queue import Work
from megazpp.zero.comms import CommContext, SummingReduce
from megazpp.zero.units import Unit


class TwoHopReduce(SummingReduce):
    """The reduce-scatter of one unit in two hops, in the place of FSDP2's (flat rank: cross rank x L + local rank)."""

    def __init__(self, unit: Unit, context: CommContext) -> None:
        super().__init__(unit, context)
        plan, zero = context.plan.reduce, context.zero
        assert plan is not None
        self._cross, self._local = context.cross, context.local
        self._cross_queue, self._local_queue = context.cross_queue, context.local_queue
        self._feedback, self._beta = zero.zero_error_feedback, zero.zero_error_feedback_beta
        self._every_micro_batch = zero.zero_cross_every_microbatch
        self._partial_dtype = torch.bfloat16 if zero.zero_accumulate_in_bf16 else torch.float32
        self._local_codec = context.codec(unit.trained_segments, plan.local, context.precision.reduce_dtype)
        self._cross_codec = context.codec(unit.trained_segments, plan.cross, self._partial_dtype)
        self._partial_sums: torch.Tensor | None = None  # touched by the local queue only
        self._errors: Feedback | None = None  # touched by the cross queue, and between backwards by `Sharding.end_step`
        self._last_micro_batch = True

    def begin_micro_batch(self, *, last: bool) -> None:
        """Call before each micro-batch; after the step's `last` one the partial sums cross."""
        self._last_micro_batch = last

    def start(self, gradients: torch.Tensor, result: torch.Tensor) -> Work[torch.Tensor] | None:
        size, planned = result.numel(), self._local_codec.layout.size
        if size != planned:
            raise RuntimeError(
                f"{self.unit.name}: gradients of {size} elements per rank, planned {planned}: a parameter got no "
                f"gradient, which quantized reduction needs torch 2.13 for (this is {torch.__version__})"
            )
        last = self._last_micro_batch and self.unit.in_last_backward
        cross = last or self._every_micro_batch
        inside = self._local_queue.submit(functools.partial(self._hop_inside, gradients, keep=not cross))
        self._schedule.sent(inside)
        if not cross:
            return None
        return self._cross_queue.submit(functools.partial(self._hop_across, inside, result), after=(inside,))

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of one shard's message inside a node and across nodes."""
        return self._local_codec.layout.message_bytes, self._cross_codec.layout.message_bytes

    @property
    def feeds_back(self) -> bool:
        """True if quantization errors are kept and added the next time."""
        return self._feedback and any(part.scales is not None for part in self._cross_codec.layout.ranges)

    def errors(self, device: torch.device) -> Feedback | None:
        """The errors of the cross hop's last quantization; None without feedback. Call while no backward is running."""
        if self._feedback and self._errors is None:
            self._errors = self._cross_codec.new_errors(self._cross.size, device=device)
        return self._errors

    @property
    def kept_errors(self) -> Feedback | None:
        """The `errors` of now; None also before the first quantization."""
        return self._errors

    def warm_up(self, device: torch.device) -> None:
        """Reduce zeros as two micro-batches do, to compile the kernels; nothing is sent and no state changes."""
        nodes, peers, inside, across = self._cross.size, self._local.size, self._local_codec, self._cross_codec
        size = inside.layout.size
        gradients = torch.zeros(nodes, peers, size, dtype=inside.dtype, device=device)
        messages = inside.empty(peers, nodes, device=device)
        inside.pack(gradients.transpose(0, 1), messages)
        sums = torch.zeros(nodes, size, dtype=self._partial_dtype, device=device)
        for accumulate in (False,) if self._every_micro_batch else (False, True):
            inside.unpack_sum(messages, sums, accumulate=accumulate)
        sent = across.empty(nodes, device=device)
        errors = across.new_errors(nodes, device=device) if self._feedback else None
        across.pack(sums, sent, errors=errors, beta=self._beta)
        across.unpack_sum(sent.unsqueeze(1), gradients[0, :1], accumulate=False)

    def _hop_inside(self, gradients: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """[N L S] in FSDP2's rank order -> [N, S]: the node's sum, added to that of earlier micro-batches."""
        num_nodes, num_local = self._cross.size, self._local.size
        codec, device = self._local_codec, gradients.device
        sent = codec.empty(num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent)
        received = self._local.all_to_all(sent, of=self.unit.name)  # [L, N, M]
        partial_sums = self._partial_sums
        if partial_sums is None:
            partial_sums = torch.empty(num_nodes, codec.layout.size, dtype=self._partial_dtype, device=device)
        codec.unpack_sum(received, partial_sums, accumulate=self._partial_sums is not None)
        self._partial_sums = partial_sums if keep else None
        return partial_sums

    def _hop_across(self, inside: Work[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        """[N, S] -> `result`, this rank's [S] summed over the nodes."""
        codec, partial_sums = self._cross_codec, inside.join()
        sent = codec.empty(self._cross.size, device=partial_sums.device)
        codec.pack(partial_sums, sent, errors=self.errors(partial_sums.device), beta=self._beta)
        received = self._cross.all_to_all(sent, of=self.unit.name)  # [N, M]
        codec.unpack_sum(received.unsqueeze(1), result.unsqueeze(0), accumulate=False)
        return result
