"""The secondary partition (hpZ): the weights that a rank keeps between two changes, in either of two forms.

    Secondary    messages [N, M], the bytes in which the shards of the other nodes arrived
    Resident     weights R [N, S] in the compute dtype, the same bits on every node; what crosses is what has changed

With a resident partition a change crosses as a difference from what is there already, w the owner's shard [S]:

    d = w - R[me]                        quantized, 4 bits: every earlier rounding is inside d, so there is no feedback
    R[n] = round(R[n] + d[n])            on every rank for every n, its own row too

Parameters that travel exact are replaced. A keyframe replaces all of R by w: at first, and where more than the step of
an optimizer has changed the weights. A NaN or Inf in w makes a block of R NaN on all nodes, until the next keyframe.

    inside a node    kept                                                       bytes, P parameters of 16 bits
    16 bits          the messages of a keyframe; R is a view of their elements  2 P / L
    8 bits           these, and R's int8 messages, made once per change         3 P / L

N nodes (cross axis), L ranks of a node (local axis), S elements of a shard, M bytes of the message that is sent inside
a node. Source of the differences: SDP4Bit (arXiv 2410.15526), there from a whole copy of the weights on each rank.
"""

from __future__ import annotations

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.wire import Codec


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

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Bytes of one rank's message to the other nodes."""
        return self.codec.layout.message_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.cross.size * self.codec.layout.message_bytes

    def warm_up(self, shard: torch.Tensor) -> None:
        """Call the kernels of `take_in` once for [S] zeros, in buffers that are thrown away; nothing is sent."""
        self.codec.pack(shard, self.codec.empty(self.cross.size, device=shard.device)[self.cross.rank])

    def _exchange(self, messages: torch.Tensor) -> None:
        """messages [N, M]: each node's row to all nodes."""
        self.cross.all_gather(messages[self.cross.rank].unsqueeze(0), out=messages, of=self._of)


class Resident(Secondary):
    """The secondary partition as resident weights, to which differences are added.

    Args:
        codec: packs weights into the message that travels inside a node.
        exact: the same without quantization, in whose messages R is kept and keyframes travel.
        differences: packs differences into the message that crosses nodes.
    Attributes:
        weights: [N, S] R; None while nothing is kept.
    """

    sends_differences = True

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str, exact: Codec, differences: Codec) -> None:
        super().__init__(codec, cross, of=of)
        self._exact, self._differences = exact, differences
        self._kept: torch.Tensor | None = None  # R's messages
        self.weights: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        messages = kept = super().allocate(device)
        with torch.inference_mode(False):
            if self.quantizes_inside:
                kept = self._exact.empty(self.cross.size, device=device)
            self._kept, self.weights = kept, self._exact.elements(kept)
        return messages

    @property
    def quantizes_inside(self) -> bool:
        """True if the local hop sends a quantized form of R beside R itself."""
        return self.codec.layout.fmt is not None

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        assert self._kept is not None
        assert self.weights is not None
        own = self.weights[self.cross.rank]
        if keyframe:
            own.copy_(shard)
            self._exchange(self._kept)
        else:
            sent = self._differences.empty(self.cross.size, device=shard.device)
            self._differences.pack(shard, sent[self.cross.rank], base=own)
            self._exchange(sent)
            self._differences.unpack_onto(sent, self.weights)
        self._quantize(messages)

    def restore(self, messages: torch.Tensor, row: torch.Tensor) -> None:
        """Make R anew out of every rank's own row [S] of it, as a checkpoint has kept it."""
        assert self._kept is not None
        assert self.weights is not None
        self.weights[self.cross.rank].copy_(row)
        self._exchange(self._kept)
        self._quantize(messages)

    def warm_up(self, shard: torch.Tensor) -> None:
        nodes, device = self.cross.size, shard.device
        weights = self._exact.elements(self._exact.empty(nodes, device=device))
        sent = self._differences.empty(nodes, device=device)
        self._differences.pack(shard, sent[self.cross.rank], base=weights[self.cross.rank])
        self._differences.unpack_onto(sent, weights)
        if self.quantizes_inside:
            self.codec.pack(weights, self.codec.empty(nodes, device=device))

    @property
    def kept_bytes(self) -> int:
        beside = self.cross.size * self._exact.layout.message_bytes if self.quantizes_inside else 0
        return super().kept_bytes + beside

    def crossing_bytes(self, *, keyframe: bool) -> int:
        return (self._exact if keyframe else self._differences).layout.message_bytes

    def _quantize(self, messages: torch.Tensor) -> None:
        if self.quantizes_inside:
            assert self.weights is not None
            self.codec.pack(self.weights, messages)
