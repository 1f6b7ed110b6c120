"""The GPT: embedding, pre-norm transformer layers, final norm, output layer.

Parameters live on leaf modules only (FSDP2's flat order then equals `named_parameters()`), activations are
[S, B, H], and everything that varies with the parallel layout is in the layers of `tensor_parallel`. One file of more
than 300 lines, because `sharding_units` speaks of all its modules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megazpp.model.attention import AttentionInputs, SelfAttention, config_angles, document_mask, window_mask
from megazpp.model.backends import DocumentKernel, compile_layer, mark_varying, shared_mask
from megazpp.model.config import GPTConfig
from megazpp.model.dropout import Dropout, SharedGenerator
from megazpp.model.kv_cache import KVCache, LayerCache
from megazpp.model.mlp import MLP
from megazpp.model.norms import Norm
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.cross_entropy import linear_cross_entropy
from megazpp.tensor_parallel.layers import Product, VocabParallelEmbedding
from megazpp.tensor_parallel.parameters import ParameterSpec, local, local_parameters, places_of
from megazpp.tensor_parallel.regions import collect_sequence, enter_region, reduce_from_region_

Masks = tuple[torch.Tensor | None, torch.Tensor | None]  # of dropout


class TokenOutputs(NamedTuple):
    """Outputs of a forward where more than losses is asked for: [B, S] fp32 each; None what was not.

    The entropy is of the distributions that labels are drawn from, without a gradient; values are the scalar head's.
    """

    losses: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


class GPTModel(nn.Module):
    """A decoder-only transformer on one tp axis, and one cp axis.

    Collectives on tp, beside those of the layers: forward one all-reduce after the embedding and the loss's two small
    ones, backward one before the output layer; with sequence parallelism a reduce-scatter after the embedding and an
    all-gather before the output layer (each the other way round in backward). On cp, beside attention's:
    forward an all-gather of each of the outputs. All cp ranks are given the same tokens and have the outputs of all;
    each computes a C-th part of the sequence (in generation all of it: `evaluating` of inference/generate.py).

    Args:
        vocab_size: tokens that exist; the embedding is padded beyond.
        shared_generator: where tp ranks draw the dropout masks they must agree on; None when there is no dropout.
        document_kernel: computes attention inside documents; None for a mask.
        product: of the layers' linear layers; None for 16-bit products that hide tp's collectives.
        scalar_head: also have a head that gives each token one number: a reward model's, or the values of PPO.
        compiled: compile layers; None: only with --compile.
        varying_sizes: compile layers for batches and sequences of any size, and not for each of the first few.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        vocab_size: int,
        tp: MeshAxis,
        cp: MeshAxis | None = None,
        sequence_parallel: bool = False,
        shared_generator: SharedGenerator | None = None,
        document_kernel: DocumentKernel | None = None,
        product: Product | None = None,
        scalar_head: bool = False,
        compiled: bool | None = None,
        varying_sizes: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.tp, self.cp = config, vocab_size, tp, cp or MeshAxis("cp")
        self.document_kernel = document_kernel
        self.compiled = config.compile is True if compiled is None else compiled
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.context_parallel = self.cp.size > 1
        # tp ranks hold the same residual stream only without sequence parallelism
        shared = shared_generator if tp.size > 1 and not self.sequence_parallel else None
        self.shared_generator = shared
        self.embedding = Embedding(config, vocab_size, tp, self.sequence_parallel, shared)
        parts = (tp, self.cp, self.sequence_parallel, shared, document_kernel, product, self.compiled, varying_sizes)
        self.layers = nn.ModuleList(TransformerLayer(config, index, *parts) for index in range(config.layers))
        self.final_norm = Norm(config, config.hidden, tp=tp, split=self.sequence_parallel)
        self.output = None if config.tied else OutputLayer(config, vocab_size, tp)
        self.scalar_head = ScalarHead(config, tp) if scalar_head else None
        kinds = [(config.has_window(index), config.rotates(index)) for index in range(config.layers)]
        self.kinds: list[tuple[bool, bool]] = kinds  # of layers: with a window, with rotary positions

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
        cache: KVCache | None = None,
        logits_at: torch.Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_values: bool = False,
    ) -> torch.Tensor | TokenOutputs:
        """Logits or losses of a batch.

        Args:
            tokens, labels: [B, S] int64; labels are the next token of each position.
            position_ids: [B, S] int64; None counts from 0 in every row.
            document_starts: [D + 1] offsets into the flattened tokens, int32 for a document kernel; attention stays
                inside a document.
            cache: keys and values of the tokens before, to which those of `tokens` are added; for generation, without
                sequence parallelism, position_ids and document_starts.
            logits_at: [B] the place in each row whose logits are wanted; None for all.
            temperature: divisor of logits before losses and entropy.
            with_entropy, with_values: also give these; values need the scalar head.
        Returns:
            With labels: [B, S] fp32 losses. Without: [B, S, V/T] logits of this tp rank's part of the padded
            vocabulary ([B, 1, V/T] with logits_at). With entropy or values: TokenOutputs, without logits.
        """
        (batch, seq), device = tokens.shape, tokens.device
        if cache is not None:
            position_ids = cache.positions(seq)
        elif position_ids is None:
            position_ids = torch.arange(seq, device=device).expand(batch, seq)
        if self.context_parallel:
            assert cache is logits_at is None, "each rank has a part of the places"
            tokens, position_ids = (x.chunk(self.cp.size, dim=1)[self.cp.rank] for x in (tokens, position_ids))
            labels = None if labels is None else labels.chunk(self.cp.size, dim=1)[self.cp.rank]
        inputs = self._attention_inputs(position_ids, document_starts, cache, seq)
        by_kind = self._inputs_by_kind(inputs, position_ids, cache, seq)
        x = self.embedding(tokens, position_ids)
        if cache is not None:
            by_kind = {
                kind: dataclasses.replace(inputs, mask=shared_mask(inputs.mask, x.dtype))
                for kind, inputs in by_kind.items()
            }
        for index, layer in enumerate(self.layers):
            x = layer(x, by_kind[self.kinds[index]], None if cache is None else cache.layers[index])
        x = self.final_norm(x)
        x = enter_region(x, self.tp, sequence_parallel=self.sequence_parallel)
        if logits_at is not None:
            x = x[logits_at, torch.arange(batch, device=device)].unsqueeze(0)
        values = None
        if with_values:
            assert self.scalar_head is not None, "values need a scalar head"
            values = self._by_rows(self.scalar_head(x))
            if labels is None:
                return TokenOutputs(values=values)
        if labels is None:
            return self._by_rows(self._multiplied(x, F.linear))
        head = functools.partial(
            linear_cross_entropy,
            labels=labels.t(),
            tp=self.tp,
            vocab_size=self.vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            fuse=self.compiled,
        )
        losses, entropy = self._multiplied(x, head)
        if not (with_entropy or with_values):
            return self._by_rows(losses)
        entropy = None if entropy is None else self._whole(entropy).t()
        return TokenOutputs(self._by_rows(losses), entropy, values)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return collect_sequence(x, self.cp) if self.context_parallel else x

    def _by_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[S/C, B, ...] -> [B, S, ...]; a clone, not a view: FSDP2 hooks the tensor that its root module returns."""
        return self._whole(x).transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _multiplied(self, x: torch.Tensor, head: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        """Apply `head` to x and the weight of the output layer."""
        if self.config.logits_scaling != 1.0:
            x = x / self.config.logits_scaling
        return head(x, local(self.embedding.word.weight)) if self.output is None else self.output(x, head)

    def sharding_units(self) -> list[list[nn.Module]]:
        """Modules whose parameters are gathered together, in the order of use; the model itself takes the rest.

        Tied embeddings stay with the model, because their weight is used at both ends, and so does a scalar head; a
        forward that gives values alone uses no output layer, which is then a unit by itself.
        """
        layers: list[list[nn.Module]] = [[layer] for layer in self.layers]
        if self.output is None:
            return layers
        if self.scalar_head is not None:
            return [[self.embedding], *layers, [self.final_norm], [self.output]]
        return [[self.embedding], *layers, [self.final_norm, self.output]]

    def _attention_inputs(
        self, position_ids: torch.Tensor, starts: torch.Tensor | None, cache: KVCache | None, seq: int
    ) -> AttentionInputs:
        batch = len(position_ids)
        rotary = config_angles(self.config, position_ids) if self.config.positions == "rope" else None
        if cache is not None:
            return AttentionInputs(rotary=rotary, mask=cache.mask(position_ids), places=position_ids)
        if starts is not None and self.document_kernel is None:
            return AttentionInputs(rotary=rotary, mask=document_mask(starts, batch=batch, seq=seq))
        return AttentionInputs(rotary=rotary, mask=None, document_starts=starts)

    def _inputs_by_kind(
        self, inputs: AttentionInputs, position_ids: torch.Tensor, cache: KVCache | None, seq: int
    ) -> dict[tuple[bool, bool], AttentionInputs]:
        """Make the inputs of each kind of layer that the model has (`kinds`)."""
        found = {}
        for windowed, rotated in dict.fromkeys(self.kinds):
            own = self._windowed(inputs, position_ids, cache, seq) if windowed else inputs
            found[windowed, rotated] = own if rotated or own.rotary is None else dataclasses.replace(own, rotary=None)
        return found

    def _windowed(
        self, inputs: AttentionInputs, position_ids: torch.Tensor, cache: KVCache | None, seq: int
    ) -> AttentionInputs:
        """Return `inputs` of layers with a window."""
        window, batch, device = self.config.window, len(position_ids), position_ids.device
        assert window is not None
        if cache is not None:
            return dataclasses.replace(inputs, mask=cache.mask(position_ids, window))
        if seq <= window:
            return inputs
        if self.document_kernel is None:
            mask = window_mask(seq, window, device)
            return dataclasses.replace(inputs, mask=mask if inputs.mask is None else inputs.mask & mask)
        if inputs.document_starts is not None:
            return inputs
        rows = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)  # each is a document
        return dataclasses.replace(inputs, document_starts=rows)


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP around the residual stream: [S, B, H] -> [S, B, H] ([S/T, B, H] when split).

    Collectives on tp: forward 2 all-reduces, backward 2; with sequence parallelism each is an all-gather plus a
    reduce-scatter, and backward has the two all-gathers of the forward again. Full recomputation repeats the forward's.
    """

    def __init__(
        self,
        config: GPTConfig,
        index: int,
        tp: MeshAxis,
        cp: MeshAxis,
        sequence_parallel: bool,
        shared: SharedGenerator | None,
        document_kernel: DocumentKernel | None,
        product: Product | None,
        compiled: bool,
        varying_sizes: bool,
    ) -> None:
        super().__init__()
        # Megatron's scaled init: the residual stream sums 2 x layers outputs
        output_std = config.init_method_std / math.sqrt(2.0 * config.layers)
        self.recompute = config.recomputes_layer(index)
        self.shared = shared
        self.attention_norm = Norm(config, config.hidden, tp=tp, split=sequence_parallel)
        linear: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "product": product}
        window = config.window if config.has_window(index) else None
        parts: dict[str, Any] = {"cp": cp, "document_kernel": document_kernel, "window": window}
        self.attention = SelfAttention(config, output_std=output_std, **parts, **linear)
        self.mlp_norm = Norm(config, config.hidden, tp=tp, split=sequence_parallel)
        self.mlp = MLP(config, output_std=output_std, **linear)
        self.dropout = Dropout(config.hidden_dropout, shared)
        self.norm_after, self.multiplier = config.norm_after_block, config.residual_multiplier
        # compiled below FSDP2's hooks and around no checkpoint, hence the inner function
        self.run = compile_layer(self._run) if compiled else self._run
        self.tp, self.compiled, self.varying_sizes = tp, compiled, varying_sizes

    def forward(self, x: torch.Tensor, inputs: AttentionInputs, cache: LayerCache | None = None) -> torch.Tensor:
        if cache is not None:  # prompts are read once, and a cache on the host is no part of a graph for the device
            eager = inputs.mask is None or cache.on_host
            return self._run(x, inputs, cache=cache) if eager else self._marked_and_run(x, inputs, cache=cache)
        if not (self.recompute and self.training):
            return self._drawn_and_run(x, inputs)
        contexts = noop_context_fn if self.shared is None else self.shared.checkpoint_contexts
        return checkpoint(self._drawn_and_run, x, inputs, use_reentrant=False, context_fn=contexts)

    def _drawn_and_run(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        return self._marked_and_run(x, inputs, (self.dropout.draw(x), self.dropout.draw(x)))

    def _marked_and_run(
        self, x: torch.Tensor, inputs: AttentionInputs, masks: Masks = (None, None), cache: LayerCache | None = None
    ) -> torch.Tensor:
        if self.compiled:
            mark_varying(inputs.document_starts, 0)  # batches differ in their number of documents
        if self.compiled and (self.varying_sizes or cache is not None):
            inputs.mark_varying()
            for tensor in (x, *masks, *(cache.kept or () if cache is not None else ())):
                mark_varying(tensor, 0, 1)
        if self.places is None:
            return self.run(x, inputs, masks, cache)
        with local_parameters(self.places):
            return self.run(x, inputs, masks, cache)

    @functools.cached_property
    def places(self) -> list[tuple[dict[str, Any], str]] | None:
        """Places of the parameters that a compiled layer takes as local tensors; None: it takes them as they are."""
        return places_of(self) if self.compiled and self.tp.size > 1 else None

    def _run(
        self, x: torch.Tensor, inputs: AttentionInputs, masks: Masks = (None, None), cache: LayerCache | None = None
    ) -> torch.Tensor:
        before = (None, None) if self.norm_after else (self.attention_norm, self.mlp_norm)
        first = x + self._added(self.attention(x, inputs, cache, norm=before[0]), self.attention_norm, masks[0])
        return first + self._added(self.mlp(first, norm=before[1]), self.mlp_norm, masks[1])

    def _added(self, x: torch.Tensor, norm: Norm, mask: torch.Tensor | None) -> torch.Tensor:
        """Return what attention or MLP adds to the residual stream."""
        if self.norm_after:
            x = norm(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.dropout(x, mask)


class Embedding(nn.Module):
    """Words plus learned positions, then dropout: tokens [B, S] -> [S, B, H] ([S/T, B, H] with sequence parallelism).

    Collectives on tp: those of VocabParallelEmbedding.
    """

    def __init__(
        self, config: GPTConfig, vocab_size: int, tp: MeshAxis, sequence_parallel: bool, shared: SharedGenerator | None
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            config.padded_vocab_size(vocab_size, tp.size),
            config.hidden,
            vocab_size=vocab_size,
            tp=tp,
            std=config.init_method_std,
            sequence_parallel=sequence_parallel,
        )
        learned = config.positions == "learned_absolute"
        self.position = PositionEmbedding(config, tp, sequence_parallel) if learned else None
        self.dropout, self.multiplier = Dropout(config.hidden_dropout, shared), config.embedding_multiplier

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t())
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(position_ids.t())
        return self.dropout(x)


class PositionEmbedding(nn.Module):
    """A learned table of positions: position_ids [S, B] -> [S, B, H] ([S/T, B, H] with sequence parallelism)."""

    def __init__(self, config: GPTConfig, tp: MeshAxis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        assert config.max_position_embeddings is not None
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=sequence_parallel)}

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            position_ids = position_ids.chunk(self.tp.size)[self.tp.rank]
        return F.embedding(position_ids, local(self.weight))


class OutputLayer(nn.Module):
    """The untied output weight, its rows split over tp as the embedding's; `head` computes product or loss of it.

    That happens inside this module's forward, where FSDP2 has the weight gathered.
    """

    def __init__(self, config: GPTConfig, vocab_size: int, tp: MeshAxis) -> None:
        super().__init__()
        rows = config.padded_vocab_size(vocab_size, tp.size)
        self.weight = nn.Parameter(torch.empty(rows // tp.size, config.hidden))
        self.specs = {"weight": ParameterSpec(split=0, std=config.init_method_std, rows=vocab_size)}

    def forward(self, x: torch.Tensor, head: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        return head(x, local(self.weight))


class ScalarHead(nn.Module):
    """One number for each token, in fp32: [S, B, H] inside the region of the output layer -> [S, B].

    Every tp rank holds the weights and multiplies its slice of the channels. Collectives on tp: forward an all-reduce
    of the numbers.
    """

    def __init__(self, config: GPTConfig, tp: MeshAxis) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(1, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=tp.size > 1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        first, last = (rank * x.shape[-1] // self.tp.size for rank in (self.tp.rank, self.tp.rank + 1))
        part = F.linear(x[..., first:last].float(), weight[:, first:last].float())
        return (reduce_from_region_(part, self.tp) if self.tp.size > 1 else part).squeeze(-1)
