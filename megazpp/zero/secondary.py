"""The secondary partition (hpZ): the weights of other nodes that a rank keeps until they change. It has two forms.

    Secondary    messages [N, M] uint8, as received in the cross-node hop
    Resident     weights R [N, S] in the compute dtype, with the same bits on every node

N: nodes (cross axis); L: ranks of a node (local axis); S: elements of a flat shard; M: bytes of its message.

With resident weights a change is sent between nodes as a difference d from R. Let w be the owner's flat shard [S] and
`me` its node. Each rank applies the difference of every node n, including its own:

    lossless     d encodes how R[me] becomes w, bit for bit (kernels/weight_delta); R[n] becomes w of node n
    4 bits       d = w - R[me], quantized; R[n] becomes round(R[n] + d[n])

So a change that was left out or rounded off is part of the next difference. 4-bit differences are for the outer
weights of local steps (diloco/outer.py). A keyframe replaces all of R by w. It is sent at first, and after changes
that are not an optimizer step.

R is a view of the elements in a keyframe's messages, which the intra-node hop sends. It takes 2 P / L bytes for P
parameters of 16 bits. Source of 4-bit differences: SDP4Bit (arXiv 2410.15526), which keeps all weights on each rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.wire import Codec, LosslessCodec


class Secondary:
    """The secondary partition of a unit as the received messages.

    `take_in` and `restore` run in the cross queue.

    Args:
        codec: packs a flat shard into the message that both hops send.
        cross: axis across nodes.
        of: name of the unit, for the timeline.
    Attributes:
        messages: [N, M] uint8, sent by the intra-node hop; None while nothing is kept.
    """

    sends_differences = False

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str) -> None:
        self.codec, self.cross, self._of = codec, cross, of
        self.messages: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocate the buffers and return the messages."""
        with torch.inference_mode(False):  # training also uses them if an evaluation allocates them first
            self.messages = self.codec.empty(self.cross.size, device=device)
        return self.messages

    def free(self) -> None:
        """Free the buffers; the next use allocates them again."""
        self.messages = None

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop: update `messages` to the current weights of all nodes.

        Args:
            messages: [N, M] uint8.
            shard: [S] this rank's current flat shard.
            keyframe: whether whole weights are sent, the same on all ranks.
        """
        self.codec.pack(shard, messages[self.cross.rank])
        self._exchange(messages)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that a rank sends to each other node in the cross-node hop."""
        return self.codec.message_bytes

    @property
    def kept_bytes(self) -> int:
        """The size of the buffers in bytes."""
        return self.cross.size * self.codec.message_bytes

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels of `take_in` for a shard [S] of zeros; nothing is communicated."""
        self.codec.pack(shard, self.codec.empty(self.cross.size, device=shard.device)[self.cross.rank])

    def _exchange(self, messages: torch.Tensor) -> None:
        """Gather the rows of messages [N, M] in place: each node sends its own row to all nodes."""
        self.cross.all_gather(messages[self.cross.rank].unsqueeze(0), out=messages, of=self._of)


class Resident(Secondary):
    """The secondary partition of a unit as resident weights R, which are updated by differences.

    Args:
        codec: packs whole weights without quantization; R is a view of its messages.
        cross: axis across nodes.
        of: name of the unit, for the timeline.
        differences: packs differences into the messages that cross nodes.
    """

    sends_differences = True

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str, differences: Codec | LosslessCodec) -> None:
        super().__init__(codec, cross, of=of)
        self.differences = differences

    @property
    def weights(self) -> torch.Tensor:
        """R [N, S], a view of the messages, which must be allocated."""
        assert self.messages is not None, "the resident weights are not allocated"
        return self.codec.elements(self.messages)

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop, with whole weights if `keyframe` and otherwise with a difference."""
        if keyframe:
            self.weights[self.cross.rank].copy_(shard)
            self._exchange(messages)
            return
        sent = self._add(shard, self.weights, self._exchange)
        if isinstance(self.differences, LosslessCodec):
            self.differences.learn(sent)

    def restore(self, messages: torch.Tensor, row: torch.Tensor) -> None:
        """Rebuild R from every rank's own row [S], as a checkpoint has stored it."""
        self.weights[self.cross.rank].copy_(row)
        self._exchange(messages)

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels that pack and apply a difference, with temporary buffers; nothing is communicated."""
        weights = self.codec.elements(self.codec.empty(self.cross.size, device=shard.device))
        self._add(shard, weights, lambda sent: None)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that a rank sends to each other node, for a keyframe or for a difference."""
        return (self.codec if keyframe else self.differences).message_bytes

    def _add(
        self, shard: torch.Tensor, weights: torch.Tensor, exchange: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Send this rank's difference, apply the differences of all nodes to `weights`, and return the messages.

        Args:
            shard: [S] this rank's current flat shard.
            weights: [N, S] resident weights, updated in place.
            exchange: gathers the rows of the messages in place.
        """
        sent = self.differences.empty(self.cross.size, device=shard.device)
        self.differences.pack(shard, sent[self.cross.rank], base=weights[self.cross.rank])
        exchange(sent)
        self.differences.unpack_onto(sent, weights)
        return sent
