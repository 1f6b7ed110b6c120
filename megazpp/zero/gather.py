"""qwZ and hpZ: weights gathered in two hops, with a middle that stays.

    shard [S] --pack--> cross all-gather --> middle [N, M] --> local all-gather --> [L, N, M] --unpack--> [N, L, S]

N nodes (cross axis), L ranks of a node that share a tensor-parallel index (local axis), S elements of a shard, M bytes
of its message. The middle is hpZ's secondary partition, kept as the bytes it arrived in: every later use until the
weights change, forward or backward, repeats the local hop only and sees bit-identical weights (DeepSpeed quantizes
again for backward). Source: ZeRO++ (arXiv 2306.10209) sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.comms import AllGather, FreshBuffers
from megazpp.zero.wire import Codec

Fingerprint = tuple[object, ...]


class StaleWeightsError(RuntimeError):
    """The middle that is kept does not hold the weights that the shards hold."""


class TwoHopGather(FreshBuffers, AllGather):
    """FSDP2's all-gather of one unit.

    Args:
        cross, local: the two axes; FSDP2's flat rank is cross rank x L + local rank.
        codec: the unit's messages; its elements are FSDP2's compute dtype.
        keep: keep the middle for later uses (hpZ).
        fingerprint: changes when the weights do, equal on all ranks; read at every use.
        check: compare the middle with the shards at every use, on all ranks.
    """

    def __init__(
        self,
        *,
        cross: MeshAxis,
        local: MeshAxis,
        codec: Codec,
        keep: bool,
        fingerprint: Callable[[], Fingerprint],
        check: bool = False,
    ) -> None:
        self._cross, self._local, self._codec = cross, local, codec
        self._keep, self._fingerprint, self._check = keep, fingerprint, check
        self._middle: torch.Tensor | None = None
        self._made_from: Fingerprint | None = None

    def drop(self) -> None:
        """Forget the middle: the weights have changed, or its memory is wanted."""
        self._made_from = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        layout = self._codec.layout
        assert input_tensor.numel() == layout.size, f"a shard of {input_tensor.numel()} elements, planned {layout.size}"
        middle = self._fresh_middle(input_tensor)
        messages = middle.new_empty(self._local.size, *middle.shape)
        self._local.all_gather(middle, out=messages.flatten(0, 1))
        # [N L, S] in FSDP2's rank order, written through [L, N, S]
        shards = output_tensor.view(self._cross.size, self._local.size, -1).transpose(0, 1)
        self._codec.unpack(messages, shards)
        if not self._keep:
            self._middle = self._made_from = None

    def _fresh_middle(self, shard: torch.Tensor) -> torch.Tensor:
        now = self._fingerprint()
        if self._middle is None:
            self._middle = self._codec.empty(self._cross.size, device=shard.device)
            self._made_from = None
        if self._made_from != now:
            mine = self._middle[self._cross.rank]
            self._codec.pack(shard, mine)
            self._cross.all_gather(mine.unsqueeze(0), out=self._middle)
            self._made_from = now
        elif self._check:
            self._check_middle(self._middle, shard)
        return self._middle

    def _check_middle(self, middle: torch.Tensor, shard: torch.Tensor) -> None:
        packed = self._codec.empty(device=shard.device)
        self._codec.pack(shard, packed)
        stale = (packed != middle[self._cross.rank]).any().to(torch.int32)
        if int(self._local.max_(self._cross.max_(stale))):
            raise StaleWeightsError(
                "weights have changed since they were gathered, in a way that moves no version counter "
                "(parameter.data or a foreach operation): call Sharding.weights_changed() after such a write"
            )
