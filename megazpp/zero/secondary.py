"""ZeRO++'s secondary partition (hpZ): the weights of all nodes that a rank keeps until they change.

Two classes store it in different ways:

    Secondary    messages [N, M] uint8, as received in the cross-node hop
    Resident     resident weights R [N, S] in the compute dtype, with the same bits on every node

N: nodes (cross axis); L: ranks of a node (local axis); S: elements of a flat shard; M: bytes of its message.

With resident weights, nodes send changes as weight deltas d from R. Let w be a rank's flat shard [S] and `me` its node.
Each rank applies the weight delta of every node n, including its own:

    lossless     d encodes how R[me] becomes w, bit for bit (kernels/weight_delta); R[n] becomes w of node n
    4 bits       d = w - R[me], quantized; R[n] becomes round(R[n] + d[n])

So a change that was left out or rounded off is part of the next weight delta. 4-bit deltas are for the outer weights of
DiLoCo (diloco/outer.py). A keyframe replaces R[n] by w of node n. Keyframes are sent at the first use, and after
changes that are not an optimizer step.

R is a view of the elements in a keyframe's messages, which the intra-node hop sends. It takes 2 P / L bytes for P
parameters of 16 bits. Source of 4-bit deltas: SDP4Bit (arXiv 2410.15526), which keeps all weights on each rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.zero.wire import Codec, LosslessCodec


class Secondary:
    """The secondary partition (hpZ) of a sharding unit, stored as the messages of all nodes.

    `take_in` runs in the communication queue of the cross axis.

    Args:
        codec: codec that packs a flat shard into the message that both hops send.
        cross: axis across nodes.
        of: name of the unit, for the timeline of collectives.
    Attributes:
        messages: [N, M] uint8 messages of M bytes from N nodes, which the intra-node hop sends; None before `allocate`
            and after `free`.
    """

    sends_differences = False

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str) -> None:
        self.codec, self.cross, self._of = codec, cross, of
        self.messages: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocate `messages` with zeros on `device`, and return it: [N, M] uint8, M bytes for each node."""
        # An evaluation may allocate messages. Training could not write to them if they were inference tensors.
        with torch.inference_mode(False):
            self.messages = self.codec.empty(self.cross.size, device=device)
        return self.messages

    def free(self) -> None:
        """Free the received messages of the secondary partition; the unit's next use allocates them again."""
        self.messages = None

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop: send this rank's weights, and update `messages` to the weights of all nodes.

        Args:
            messages: [N, M] uint8 messages of the secondary partition.
            shard: [S] flat shard with this rank's current weights.
            keyframe: True to send whole weights, False to send a weight delta; the same on all ranks. This class always
                sends whole weights.
        """
        self.codec.pack(shard, messages[self.cross.rank])
        self._exchange(messages)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that this rank sends to each other node in one cross-node hop.

        Args:
            keyframe: True for a hop that sends whole weights, False for a hop that sends a weight delta. It has no
                effect here, because this class always sends whole weights; `Resident` sends both kinds.
        """
        return self.codec.message_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that the unit's secondary partition takes on this rank when it is allocated."""
        return self.cross.size * self.codec.message_bytes

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels that the cross-node hop needs for the flat shard `shard` [S]; no rank communicates."""
        self.codec.pack(shard, self.codec.empty(self.cross.size, device=shard.device)[self.cross.rank])

    def _exchange(self, messages: torch.Tensor) -> None:
        """All-gather `messages` between nodes in place: this rank sends one row and receives all other rows.

        Args:
            messages: [N, M] uint8, one row of M bytes per node.
        """
        self.cross.all_gather(messages[self.cross.rank].unsqueeze(0), out=messages, of=self._of)


class Resident(Secondary):
    """The secondary partition (hpZ) of a sharding unit, stored as resident weights R, which weight deltas update.

    `take_in` runs in the communication queue of the cross axis.

    Args:
        codec: codec that packs whole weights without quantization; R is a view of its messages.
        cross: axis across nodes.
        of: name of the unit, for the timeline of collectives.
        differences: codec that packs weight deltas into the messages that cross nodes.
    """

    sends_differences = True

    def __init__(self, codec: Codec, cross: MeshAxis, *, of: str, differences: Codec | LosslessCodec) -> None:
        super().__init__(codec, cross, of=of)
        self.differences = differences

    @property
    def weights(self) -> torch.Tensor:
        """The resident weights R [N, S] of all N nodes, a view of `messages`, which must be allocated."""
        assert self.messages is not None, "the resident weights are not allocated: call allocate() first"
        return self.codec.elements(self.messages)

    def take_in(self, messages: torch.Tensor, shard: torch.Tensor, *, keyframe: bool) -> None:
        """Run the cross-node hop, which updates R, the resident weights of all nodes.

        The arguments are those of `Secondary.take_in`. The hop sends whole weights if `keyframe`, otherwise weight
        deltas.
        """
        if keyframe:
            self.weights[self.cross.rank].copy_(shard)
            self._exchange(messages)
            return
        sent = self._add(shard, self.weights, self._exchange)
        if isinstance(self.differences, LosslessCodec):
            self.differences.learn(sent)

    def warm_up(self, shard: torch.Tensor) -> None:
        """Compile the kernels that pack and apply weight deltas of the flat shard `shard` [S], with temporary tensors.

        No rank communicates.
        """
        weights = self.codec.elements(self.codec.empty(self.cross.size, device=shard.device))
        self._add(shard, weights, lambda sent: None)

    def crossing_bytes(self, *, keyframe: bool) -> int:
        """Return the bytes that this rank sends to each other node in a cross-node hop.

        Args:
            keyframe: True for a hop that sends whole weights, False for a hop that sends a weight delta.
        """
        return (self.codec if keyframe else self.differences).message_bytes

    def _add(
        self, shard: torch.Tensor, weights: torch.Tensor, exchange: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Send this rank's weight delta, and apply the weight deltas of all nodes to `weights`.

        Args:
            shard: [S] flat shard with this rank's current weights.
            weights: [N, S] resident weights of N nodes, updated in place.
            exchange: function that all-gathers messages [N, M], M bytes from each node, between nodes in place.
        Returns:
            The messages [N, M] with the weight deltas of all nodes.
        """
        sent = self.differences.empty(self.cross.size, device=shard.device)
        self.differences.pack(shard, sent[self.cross.rank], base=weights[self.cross.rank])
        exchange(sent)
        self.differences.unpack_onto(sent, weights)
        return sent
