"""Muon on sharded matrices: the update of each matrix is its orthogonalized momentum (Jordan et al., 2024).

    W -= lr (s X + weight decay W),    X = Newton-Schulz(momentum-updated gradient [r, c]),    s = 0.2 sqrt(max(r, c))

The momentum-updated gradient is the gradient averaged with its running average (--muon-use-nesterov), or else the
running average alone. The formula has the scale s of the default flags; `MuonConfig.scale` computes it for all flags.

Each rank of a node (T tensor-parallel x L local ranks) holds contiguous rows of each matrix. If a copy of the model is
within one node, the node's ranks together hold the complete matrix. One of these ranks is the matrix's owner: it
gathers the matrix and orthogonalizes it alone. Owners are chosen so that all ranks have about equally many FLOPs. B
matrices of one shape are processed together:

    [a rank's rows, c] --all-to-all--> [B, r, c] at the owner --Newton-Schulz--> [B, r, c]
        --all-to-all--> [a rank's rows, c]

The communication for one shape overlaps with the computation for another.

If a copy of the model spans several nodes, each node orthogonalizes only the rows that its ranks hold, and no data
crosses nodes (block steps of MuonBP, arXiv 2510.16981). With --muon-full-interval N, every Nth step is a full step
instead: all nodes gather all rows in 8-bit blocks, orthogonalize the complete matrix, and each rank uses the rows of X
that it holds. The scale s depends on the shape of the orthogonalized rows. Queries, keys and values count as three
matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from megazpp.optim.config import MuonConfig
from megazpp.optim.muon_plan import LayerMatrix, MatrixBlock, block_cost, plan_blocks, rows_of_parts
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.topology.layout import Layout
from megazpp.zero.plan import block_format
from megazpp.zero.wire import Codec, own_rows, plan_message, plan_segments

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of Newton-Schulz's polynomial a x + b x^3 + c x^5
EPS = 1e-7  # lower bound of the norm by which Newton-Schulz divides a matrix, so that a zero matrix stays zero
FULL_STEP_BLOCKS = (8, 256)  # quantization of Muon's rows that cross nodes in full steps: bits, elements per block

NewtonSchulz = Callable[[torch.Tensor, int], torch.Tensor]


def newton_schulz(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Approximate the orthogonal polar factor of each matrix by Newton-Schulz iterations: x [B, r, c] -> [B, r, c].

    The singular values of the results are between about 0.7 and 1.2. The computation is in bf16 on CUDA and in fp32 on
    other devices.

    Args:
        x: batch of B matrices.
        steps: number of iterations, each with three matrix products.
    """
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp(min=EPS)).to(torch.bfloat16 if x.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def row_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which Muon communicates rows of matrices inside a node.

    The dtype is fp32 if the model computes in fp32, and otherwise bf16. fp16 is not used, because its range is too
    small for gradients.
    """
    return torch.float32 if compute_dtype == torch.float32 else torch.bfloat16


class Orthogonalizer:
    """The object that orthogonalizes Muon's updates of sharded matrices; the top of this file explains the steps.

    Args:
        parameters: parameters that hold the matrices, in the same order on all ranks.
        config: flags of Muon.
        layout: sizes of the mesh axes.
        node: axis of the ranks of a node that share a copy of the model, with the tensor-parallel index innermost.
        cross: axis of the nodes that a copy of the model spans.
        dtype: dtype in which rows are communicated inside the node.
        codec: class that packs rows into 8-bit messages between nodes; the planner passes a simulated class.
        iterate: function that runs the Newton-Schulz iterations on a batch of matrices; the planner passes a simulated
            function.
    """

    def __init__(
        self,
        parameters: Sequence[LayerMatrix],
        config: MuonConfig,
        layout: Layout,
        *,
        node: MeshAxis,
        cross: MeshAxis,
        dtype: torch.dtype,
        codec: Callable[..., Codec] = Codec,
        iterate: NewtonSchulz = newton_schulz,
    ) -> None:
        self.parameters, self._config, self._layout = tuple(parameters), config, layout
        self._node, self._cross, self._dtype, self._iterate = node, cross, dtype, iterate
        self._own, self._everyone = (cross.rank,), tuple(range(cross.size))
        # Blocks by the nodes whose rows are orthogonalized together: only this node, or in a full step all nodes
        self._groups = {nodes: plan_blocks(parameters, layout, nodes) for nodes in {self._own, self._everyone}}
        self._segments = plan_segments([(p.name, p.shape) for p in parameters], layout.shard)
        message = plan_message(self._segments, block_format(*FULL_STEP_BLOCKS), exact_itemsize=dtype.itemsize)
        self._codec = codec(message, dtype)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def is_full(self, iteration: int) -> bool:
        """Return True if the training step `iteration` is a full step, which gathers complete matrices over nodes."""
        interval = self._config.muon_full_interval
        return self._cross.size > 1 and interval > 0 and iteration % interval == 0

    def describe(self) -> str:
        """Return a line for `--plan`: the number of Muon's matrices, their split over nodes, and FLOPs per step.

        If a parameter has so few rows that the ranks of the last node hold none of them, the line names it.
        """
        matrices = [matrix for p in self.parameters for matrix in p.rows]
        each = "whole" if self._cross.size == 1 else f"in the rows of each of {self._cross.size} nodes"
        steps, work = self._config.muon_num_ns_steps, [0] * self._node.size
        for block in itertools.chain(*self._groups[self._own]):
            work[block.owner] += 2 * steps * block_cost(block.shape)
        text = f"Muon: {len(matrices)} matrices, {each}, {1e-9 * max(work):.3f} GFLOP per step on the busiest rank"
        last = (self._cross.size - 1) * self._layout.local
        thin = [p.name for p in self.parameters if not own_rows(p.shape[0], self._layout.shard, last)]
        return text + (f"; the last node holds no rows of {', '.join(thin)}" if thin else "")

    def buffer_bytes(self, iteration: int) -> int:
        """Return the bytes that Muon's buffers take on this rank in the training step `iteration`, for `--plan`.

        The buffers hold the rows that this rank sends and the matrices that it owns. In a full step they also hold the
        messages of all nodes, and the rows that are unpacked from them.
        """
        full, peer, layout = self.is_full(iteration), self._node.rank // self._layout.tp, self._codec.layout
        gathered = self._cross.size * (self._dtype.itemsize * layout.size + layout.message_bytes) if full else 0
        elements = 0
        for block in itertools.chain(*self._groups[self._everyone if full else self._own]):
            owned = block.owner == self._node.rank
            elements += sum(block.counts[peer]) * block.columns + owned * math.prod(block.shape)
        return gathered + self._dtype.itemsize * elements

    def __call__(self, updates: Sequence[torch.Tensor], *, iteration: int) -> list[torch.Tensor]:
        """Orthogonalize and scale Muon's updates of all matrices; all ranks call this together.

        Args:
            updates: for each parameter, this rank's fp32 shard of the momentum-updated gradient, [rows of this rank,
                columns].
            iteration: number of the training step, which decides whether it is a full step.

        Returns:
            This rank's shards of the orthogonalized and scaled matrices (s X in the formula at the top of this file),
            shaped like `updates`, in the dtype in which rows are communicated.
        """
        # ---- take this rank's shards of the updates. In a full step also gather the shards of its peers, the ranks
        # with the same local and tensor-parallel index on other nodes
        nodes: tuple[int, ...] = self._own
        shards = [[update] for update in updates]
        if self.is_full(iteration):
            nodes, shards = self._everyone, self._gathered(updates)
        local, tp, peers = self._node.rank // self._layout.tp, self._layout.tp, range(self._node.size)
        me = nodes.index(self._cross.rank)
        # ---- send rows to the ranks that own the matrices. Four lists have a number of elements for each rank of the
        # node. In this exchange, the rank sends `mine` to the owners, and receives `theirs` as an owner. In the
        # exchange after the orthogonalization it sends `back` as an owner, and receives `own`; both count only this
        # node's rows. The lists `under_way` and `coming` keep `sent` in memory during the exchanges
        under_way = []
        for group in self._groups[nodes]:
            by_owner = [[block for block in group if block.owner == peer] for peer in peers]
            owned = by_owner[self._node.rank]
            pieces = [piece.flatten() for block in group for piece in self._pieces(block, shards, nodes)]
            mine = [sum(sum(block.counts[local]) * block.columns for block in blocks) for blocks in by_owner]
            own = [sum(block.counts[local][me] * block.columns for block in blocks) for blocks in by_owner]
            theirs = [sum(sum(block.counts[peer // tp]) * block.columns for block in owned) for peer in peers]
            back = [sum(block.counts[peer // tp][me] * block.columns for block in owned) for peer in peers]
            sent = torch.cat(pieces).to(self._dtype)
            under_way.append((group, owned, theirs, back, own, sent, self._exchange(sent, mine, theirs)))
        # ---- orthogonalize the matrices that this rank owns, and send their rows back to the ranks that hold them
        coming = []
        for group, owned, theirs, back, own, _, work in under_way:
            sent = self._orthogonalized(work.wait(), owned, theirs, me)
            coming.append((group, sent, self._exchange(sent, back, own)))
        # ---- assemble this rank's shard of each parameter from the received rows
        results = [torch.empty_like(update, dtype=self._dtype) for update in updates]
        for group, _, work in coming:
            counts = [block.counts[local][me] for block in group]
            pieces = work.wait().split([rows * block.columns for rows, block in zip(counts, group, strict=True)])
            for rows, block, piece in zip(counts, group, pieces, strict=True):
                result, found = results[block.parameter], piece.view(rows, block.columns)
                index = self._index(block, self._cross.rank, result.device)
                result.copy_(found) if index is None else result.index_copy_(0, index, found)
        return results

    def _exchange(self, sent: torch.Tensor, send: list[int], receive: list[int]) -> Work[torch.Tensor]:
        """Start an all-to-all of Muon's rows inside the node, and return the work that yields the received elements.

        Args:
            sent: rows for all ranks of the node, rank after rank, flattened.
            send: number of elements that this rank sends to each rank.
            receive: number of elements that this rank receives from each rank.
        """
        return self._node.queue.submit(lambda: self._node.exchange(sent, send, receive, of="muon"))

    def _pieces(
        self, block: MatrixBlock, shards: Sequence[Sequence[torch.Tensor]], nodes: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Yield the rows of a block that this rank sends to the block's owner, node by node.

        A full step has gathered the shards of this rank's peers, the ranks with the same local and tensor-parallel
        index on other nodes. The rank sends the block's rows in these shards too.

        Args:
            block: rows of one matrix that are orthogonalized together.
            shards: for each parameter, one shard per node in `nodes`: this rank's shard, or its peer's shard there.
            nodes: indices of the nodes whose rows are orthogonalized together.
        """
        for node, shard in zip(nodes, shards[block.parameter], strict=True):
            index = self._index(block, node, shard.device)
            yield shard if index is None else shard[index]

    def _index(self, block: MatrixBlock, node: int, device: torch.device) -> torch.Tensor | None:
        """Return the indices of the rows of a parameter's shard that belong to one of its matrices; None for all rows.

        The result is int64 on `device`, and is cached. It is None if the parameter holds a single matrix.

        Args:
            block: block of rows of the matrix, which has the indices of the parameter and of the matrix.
            node: node whose shard is meant; its rank with this rank's local and tensor-parallel index holds the shard.
            device: device of the indices.
        """
        parameter = self.parameters[block.parameter]
        if len(parameter.rows) == 1:
            return None
        shard = node * self._layout.local + self._node.rank // self._layout.tp
        key = (block.parameter, block.part, shard)
        if key not in self._indices:
            rows = rows_of_parts(parameter.shape[0], self._layout.shard, shard, parameter.rows)[block.part]
            self._indices[key] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._indices[key]

    def _orthogonalized(
        self, received: torch.Tensor, owned: Sequence[MatrixBlock], theirs: Sequence[int], me: int
    ) -> torch.Tensor:
        """Orthogonalize the matrices of one shape that this rank owns, and return the rows that it sends back.

        Args:
            received: rows that the ranks of this node have sent, rank after rank, flattened.
            owned: blocks that this rank owns, each with the rows of one matrix.
            theirs: number of elements that each rank of this node has sent to this rank.
            me: index of this node among the nodes whose rows were sent.

        Returns:
            This node's rows of each orthogonalized and scaled matrix, rank after rank, flattened.
        """
        # ---- assemble each matrix that this rank owns from the received rows. Of the indices of a node's ranks, the
        # tensor-parallel index is the innermost, so `pieces[t::tp]` are the rows of tensor-parallel rank t
        tp, peers = self._layout.tp, range(self._node.size)
        if not owned:
            return received
        sent = [
            source.split([sum(block.counts[peer // tp]) * block.columns for block in owned])
            for peer, source in enumerate(received.split(list(theirs)))
        ]
        whole = []
        for index, block in enumerate(owned):
            pieces = [sent[peer][index].view(-1, block.columns) for peer in peers]
            whole.append(torch.cat([torch.cat(pieces[t::tp]) for t in range(tp)], dim=block.split))
        # ---- orthogonalize all matrices as one batch, and scale the results
        x = self._iterate(torch.stack(whole), self._config.muon_num_ns_steps)
        outputs, inputs = reversed(owned[0].shape) if owned[0].transposed else owned[0].shape
        x = (x * self._config.scale(outputs, inputs)).to(self._dtype)
        # ---- split each orthogonalized matrix into the rows that the ranks of this node hold
        back: list[list[torch.Tensor]] = [[] for _ in peers]
        for block, matrix in zip(owned, x, strict=True):
            for t, of_tp in enumerate(matrix.chunk(tp, dim=block.split)):
                pieces = of_tp.split([rows for counts in block.counts for rows in counts])
                for local in range(len(block.counts)):
                    back[local * tp + t].append(pieces[local * len(block.counts[0]) + me].flatten())
        return torch.cat([piece for source in back for piece in source])

    def _gathered(self, updates: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Gather the updates of this rank and its peers on all nodes, for a full step of Muon (`is_full`).

        A peer is the rank with the same local and tensor-parallel index on another node. The updates cross nodes in
        8-bit blocks. This rank's own shard is quantized too, so that all nodes orthogonalize equal rows.

        Args:
            updates: for each parameter, this rank's fp32 shard of the momentum-updated gradient.

        Returns:
            For each parameter a list with one shard per node, [rows of that node's rank, columns] in `self._dtype`.
        """
        # ---- pack this rank's shards into one message, and gather the messages of all nodes
        device, nodes, local = updates[0].device, self._cross.size, self._node.rank // self._layout.tp
        flat = torch.zeros(1, 1, self._codec.layout.size, dtype=self._dtype, device=device)
        for segment, update in zip(self._segments, updates, strict=True):
            flat[0, 0, segment.start : segment.start + update.numel()].copy_(update.flatten())
        message = self._codec.empty(1, 1, device=device)
        self._codec.pack(flat, message)
        messages = self._cross.queue.submit(lambda: self._cross.all_gather(message[0], of="muon")).wait()
        # ---- unpack the messages of all nodes, and split them into the shards of each parameter
        rows = torch.empty(1, nodes, self._codec.layout.size, dtype=self._dtype, device=device)
        self._codec.unpack(messages.unsqueeze(0), rows)
        found = []
        for segment, parameter in zip(self._segments, self.parameters, strict=True):
            counts = [own_rows(parameter.shape[0], self._layout.shard, node * self._layout.local + local)
                      for node in range(nodes)]  # fmt: skip
            parts = zip(rows[0, :, segment.start : segment.stop], counts, strict=True)
            found.append([part.view(-1, parameter.shape[1])[:count] for part, count in parts])
        return found


class JointOrthogonalizer:
    """Muon's orthogonalization of all matrices: one `Orthogonalizer` for dense matrices, one for experts.

    The two differ in the axes over which their matrices are sharded. The methods are the same as in `Orthogonalizer`.

    Args:
        parts: one or two orthogonalizers. An orthogonalizer that has no matrices is ignored.
    """

    def __init__(self, parts: Sequence[Orthogonalizer]) -> None:
        self._parts = [part for part in parts if part.parameters]
        self.parameters = tuple(matrix for part in self._parts for matrix in part.parameters)

    def is_full(self, iteration: int) -> bool:
        """Return True if the training step `iteration` is a full step for dense matrices or for experts."""
        return any(part.is_full(iteration) for part in self._parts)

    def describe(self) -> str:
        """Return a line for `--plan`: the number of dense matrices and of experts' matrices, and FLOPs per step."""
        return "; experts: ".join(part.describe() for part in self._parts)

    def buffer_bytes(self, iteration: int) -> int:
        """Return the bytes that Muon's buffers take on this rank in the training step `iteration`, for `--plan`.

        The buffers for dense matrices and the buffers for experts' matrices are not in use at the same time. So the
        result is the larger of the two sizes.
        """
        return max((part.buffer_bytes(iteration) for part in self._parts), default=0)

    def __call__(self, updates: Sequence[torch.Tensor], *, iteration: int) -> list[torch.Tensor]:
        """Orthogonalize dense matrices, then experts' matrices; arguments and result are as in `Orthogonalizer`.

        `updates` has one entry per item of `parameters`.
        """
        found, remaining = list[torch.Tensor](), list(updates)
        for part in self._parts:
            own, remaining = remaining[: len(part.parameters)], remaining[len(part.parameters) :]
            found += part(own, iteration=iteration)
        return found
