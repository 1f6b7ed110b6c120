"""qgZ: gradients reduced in two hops, with a middle that stays.

    gradients [N, L, S] --pack--> local all-to-all, sum over L --> middle [N, S], over all micro-batches of a step
    middle [N, S] --pack--> cross all-to-all, sum over N --> [S], once per optimizer step

N nodes (cross axis), L ranks of a node (local axis), S elements of a shard. Both hops only sum. NaN and Inf arrive as
NaN or Inf. With error feedback the cross hop adds what its last quantization lost, so that nothing is lost for good.
Source: ZeRO++ (arXiv 2306.10209) section 3.3, with the cross hop moved out of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.comms import FreshBuffers, ReduceScatter
from megazpp.zero.wire import Codec, Errors


class TwoHopReduce(FreshBuffers, ReduceScatter):
    """FSDP2's reduce-scatter of one unit.

    Args:
        cross, local: the two axes; FSDP2's flat rank is cross rank x L + local rank.
        local_codec, cross_codec: the unit's messages on each hop.
        middle_dtype: of the sums that wait for the cross hop.
        feedback: keep the cross hop's quantization errors and add them the next time.
        every_micro_batch: cross in every micro-batch: no middle to keep, k times the traffic.
    """

    def __init__(
        self,
        *,
        cross: MeshAxis,
        local: MeshAxis,
        local_codec: Codec,
        cross_codec: Codec,
        middle_dtype: torch.dtype,
        feedback: bool,
        every_micro_batch: bool,
    ) -> None:
        self._cross, self._local = cross, local
        self._local_codec, self._cross_codec = local_codec, cross_codec
        self._middle_dtype, self._feedback = middle_dtype, feedback
        self._every_micro_batch = every_micro_batch
        self._middle: torch.Tensor | None = None
        self._errors: Errors | None = None
        self.last_micro_batch = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"communication only sums, FSDP2 asked for {op}"
        size, planned = output_tensor.numel(), self._local_codec.layout.size
        if size != planned:
            raise RuntimeError(
                f"gradients of {size} elements per rank, planned {planned}: a parameter of this unit got no gradient, "
                "which quantized reduction needs torch 2.13 for"
            )
        middle = self._hop_inside(input_tensor)
        if self.last_micro_batch or self._every_micro_batch:
            self._middle = None
            self._hop_across(middle, output_tensor)
        else:
            self._middle = middle
            output_tensor.zero_()  # FSDP2 adds it to the gradient, whose sum so far waits in the middle

    def _hop_inside(self, gradients: torch.Tensor) -> torch.Tensor:
        """[N L S] in FSDP2's rank order -> [N, S]: the node's sum, added to the middle of earlier micro-batches."""
        num_nodes, num_local = self._cross.size, self._local.size
        codec, device = self._local_codec, gradients.device
        sent = codec.empty(num_local, num_nodes, device=device)
        codec.pack(gradients.view(num_nodes, num_local, -1).transpose(0, 1), sent)
        received = self._local.all_to_all(sent)  # [L, N, M]
        middle = self._middle
        if middle is None:
            middle = torch.empty(num_nodes, codec.layout.size, dtype=self._middle_dtype, device=device)
        codec.unpack_sum(received, middle, accumulate=self._middle is not None)
        return middle

    def _hop_across(self, middle: torch.Tensor, output: torch.Tensor) -> None:
        """[N, S] -> this rank's [S], summed over the nodes."""
        codec = self._cross_codec
        sent = codec.empty(self._cross.size, device=middle.device)
        if self._feedback and self._errors is None:
            self._errors = codec.new_errors(self._cross.size, device=middle.device)
        codec.pack(middle, sent, errors=self._errors)
        received = self._cross.all_to_all(sent)  # [N, M]
        codec.unpack_sum(received.unsqueeze(1), output.unsqueeze(0), accumulate=False)
