"""The secondary partition (hpZ): the weights that a rank keeps between two changes, in either of two forms.

    Secondary    messages [N, M], the bytes in which the shards of the other nodes arrived
    Resident     weights R [N, S] in the compute dtype, the same bits on every node; what crosses is what has changed

With a resident partition a change crosses as a difference from what is there already, w the owner's shard [S]:

    lossless     d = what turns R[me] into w, bit for bit (kernels/weight_delta); R[n] = w of node n
    4 bits       d = w - R[me], quantized; R[n] = round(R[n] + d[n]). Every earlier rounding is inside d

on every rank for every n, its own row too, so what was left out or rounded off is part of the next difference. 4 bits
are for the outer weights of local steps (diloco/outer.py). A keyframe replaces all of R by w: at first, and where more
than the step of an optimizer has changed the weights. R is a view of the elements in the messages of a keyframe, which
the local hop sends: 2 P / L bytes for P parameters of 16 bits.

N nodes (cross axis), L ranks of a node (local axis), S elements of a shard, M bytes of the message that is sent inside
a node. Source of 4-bit differences: SDP4Bit (arXiv 2410.15526), there from a whole copy of the weights on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.wire import Codec, LosslessCodec


class Secondary:
    """The secondary partition of a unit (`of`) as the messages that arrived.

    `take_in` and `restore` run in the cross queue.

    Args:
        codec: packs the shard into the message that travels on both hops.
    Attributes:
        messages: [N, M] uint8, what the local hop sends; None while nothing is kept.
    """

    sends_differences = False

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str) -> None:
        self.codec, self.cross, self._of = codec, cross, of
        self.messages: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Make the buffers; returns the messages."""
        with torch.inference_mode(False):  # they outlive the mode in which they are first made
            self.messages = self.codec.empty(self.cross.size, device=device)
        return self.messages

    def free(self) -> None:
        """Give the buffers up, because the next use starts anew."""
        self.messages = None

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Have `messages` hold the current weights of all nodes, this rank's [S] among them: the cross hop.

        With `keyframe`, the same on all ranks, whole weights are sent.
        """
        self.codec.pack(shard, messages[self.cross.rank])
        self._exchange(messages)

    def take_in_part(self, messages: torch.Tensor, shard: torch.Tensor, part: Sequence[tuple[int, int]]) -> None:
        """Replace only the bytes (first, the one after the last) of `part` by those of the current weights."""
        own = self.codec.empty(1, device=shard.device)
        self.codec.pack(shard, own[0])
        sent = torch.cat([own[:, start:stop] for start, stop in part], dim=1)
        received = self.cross.all_gather(sent, of=self._of).split([stop - start for start, stop in part], dim=1)
        torch._foreach_copy_([messages[:, start:stop] for start, stop in part], list(received))

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Bytes of one rank's message to the other nodes."""
        return self.codec.message_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.cross.size * self.codec.message_bytes

    def warm_up(self, shard: torch.Tensor) -> None:
        """Call the kernels of `take_in` once for [S] zeros, in buffers that are thrown away; nothing is sent."""
        self.codec.pack(shard, self.codec.empty(self.cross.size, device=shard.device)[self.cross.rank])

    def _exchange(self, messages: torch.Tensor) -> None:
        """messages [N, M]: each node's row to all nodes."""
        self.cross.all_gather(messages[self.cross.rank].unsqueeze(0), out=messages, of=self._of)


class Resident(Secondary):
    """The secondary partition as resident weights, to which differences are added.

    Args:
        codec: packs whole weights, without quantization; R is kept in its messages.
        differences: packs differences into the message that crosses nodes.
    Attributes:
        weights: [N, S] R; None while nothing is kept.
    """

    sends_differences = True

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str, differences: Codec | LosslessCodec) -> None:
        super().__init__(codec, cross, of=of)
        self.differences = differences
        self.weights: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        messages = super().allocate(device)
        self.weights = self.codec.elements(messages)
        return messages

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        assert self.weights is not None
        if keyframe:
            self.weights[self.cross.rank].copy_(shard)
            self._exchange(messages)
            return
        sent = self._add(shard, self.weights, self._exchange)
        if isinstance(self.differences, LosslessCodec):
            self.differences.learn(sent)

    def restore(self, messages: torch.Tensor, row: torch.Tensor) -> None:
        """Make R anew out of every rank's own row [S] of it, as a checkpoint has kept it."""
        assert self.weights is not None
        self.weights[self.cross.rank].copy_(row)
        self._exchange(messages)

    def warm_up(self, shard: torch.Tensor) -> None:
        weights = self.codec.elements(self.codec.empty(self.cross.size, device=shard.device))
        self._add(shard, weights, lambda sent: None)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        return (self.codec if keyframe else self.differences).message_bytes

    def _add(
        self, shard: torch.Tensor, weights: torch.Tensor, exchange: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Turn `weights` [N, S] into those of all nodes; returns the messages."""
        sent = self.differences.empty(self.cross.size, device=shard.device)
        self.differences.pack(shard, sent[self.cross.rank], base=weights[self.cross.rank])
        exchange(sent)
        self.differences.unpack_onto(sent, weights)
        return sent
