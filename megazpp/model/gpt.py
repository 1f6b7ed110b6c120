"""GPT model: embedding, transformer layers, final norm, output layer.

Letters: S sequence length, B batch size, H hidden size, V padded vocabulary size, T tensor-parallel (tp) ranks, C
context-parallel (cp) ranks. Activations are [S, B, H].

Only leaf modules own parameters, so FSDP2's order of parameters equals the order of `named_parameters()`. Column- and
row-parallel layers are in megazpp/tensor_parallel. This is one file of more than 300 lines, because `sharding_units`
names all its modules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megazpp.model.attention import (
    AttentionInputs,
    SelfAttention,
    config_angles,
    document_mask,
    shared_mask,
    window_mask,
)
from megazpp.model.config import GPTConfig
from megazpp.model.kv_cache import KVCache, LayerCache
from megazpp.model.layer_parts import MLP, Dropout, LayerSettings, Norm, compile_layer, mark_varying
from megazpp.model.moe import MoE
from megazpp.model.router import Kept
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.cross_entropy import linear_cross_entropy
from megazpp.tensor_parallel.layers import VocabParallelEmbedding
from megazpp.tensor_parallel.parameters import ParameterSpec, local, local_parameters, places_of
from megazpp.tensor_parallel.regions import collect_sequence, enter_region, reduce_from_region_

# Dropout masks of a layer, for the outputs of attention and of the MLP. A mask is None if dropout is off, or if torch's
# dropout samples the mask itself.
Masks = tuple[torch.Tensor | None, torch.Tensor | None]
# Type of a function that computes the result of the model's forward. Its arguments are the model, the hidden states
# [S/C, B, H] after the final norm, and each sequence's router losses [B] fp32, summed over layers and multiplied by
# their coefficients. The router losses are None in evaluation and without experts. There are B sequences of S tokens, C
# context-parallel ranks and H channels.
Head = Callable[["GPTModel", torch.Tensor, torch.Tensor | None], Any]


class GPTModel(nn.Module):
    """Decoder-only transformer with tensor parallelism (tp) and context parallelism (cp).

    Collectives on tp, in addition to those inside the layers:

    - Forward: 1 all-reduce after the embedding, and 2 small ones in the loss. Backward: 1 all-reduce of the gradient of
      the output layer's input.
    - With sequence parallelism, a reduce-scatter replaces the all-reduce after the embedding, and forward has 1
      all-gather before the output layer. In backward, each of these two collectives has its adjoint: an all-gather and
      a reduce-scatter, which replace the all-reduce. The loss has the same 2 small all-reduces.

    Collectives on cp, in addition to attention's: 1 all-gather of each output. All C cp ranks receive the same
    sequences of S tokens. Each rank computes S/C tokens of each sequence, and all ranks return the outputs of complete
    sequences. During generation, each rank computes complete sequences (see `evaluating` in inference/generate.py).

    Args:
        config: config of the model.
        settings: mesh axes and implementations that all layers share; None for one rank.
        vocab_size: number of tokens in the vocabulary, without padding.
        scalar_head: add a head that computes one number per token, for reward models and for the values of PPO.
    """

    def __init__(
        self, config: GPTConfig, settings: LayerSettings | None = None, *, vocab_size: int, scalar_head: bool = False
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.settings = settings = (settings or LayerSettings()).used_by(config)
        self.tp, self.cp, self.context_parallel = settings.tp, settings.cp, settings.cp.size > 1
        self.embedding = Embedding(config, settings, vocab_size=vocab_size)
        self.layers = nn.ModuleList(
            (MixtureLayer if config.has_experts(index) else TransformerLayer)(config, settings, index=index)
            for index in range(config.layers)
        )
        self.final_norm = Norm(config, config.hidden, tp=self.tp, split=settings.sequence_parallel)
        self.output = None if config.tied else OutputLayer(config, vocab_size, self.tp)
        self.scalar_head = ScalarHead(config, self.tp) if scalar_head else None
        kinds = [(config.has_window(index), config.rotates(index)) for index in range(config.layers)]
        self.kinds: list[tuple[bool, bool]] = kinds  # per layer: (has a sliding window, has rotary embeddings)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes; its parameters may be in host memory."""
        # Do not ask `self.parameters()` for a device, because a frozen model has no parameters.
        return self.settings.device or self.embedding.word.weight.device

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
        cache: KVCache | None = None,
        head: Head | None = None,
    ) -> Any:
        """Compute the losses of a batch with labels, the logits of a batch without, or the result of `head`.

        Args:
            tokens: [B, S] int64 token ids of B sequences of S tokens.
            labels: [B, S] int64, the token that follows each token; None for logits or for a head.
            position_ids: [B, S] int64 position of each token; None counts from 0 in every row.
            document_starts: [documents + 1] offsets of the documents in the B x S flattened tokens, int32 for the
                kernel of attention inside documents. Tokens then attend only to their own document.
            counted: [B, S] bool, True for tokens that the losses of routers include; None for all tokens.
            cache: key-value cache with the earlier tokens of each row, to which this forward adds its tokens, for
                generation. A cache is not supported with sequence parallelism, `position_ids` or `document_starts`.
            head: function that computes the result from the hidden states; it may call `token_losses`, `logits` and
                `values`. None for losses or logits.

        Returns:
            With a head, the head's result. Otherwise, with labels, the losses [B, S] fp32. Otherwise the logits
            [B, S, V/T] of this rank's slice of the padded vocabulary, which has V tokens and is split over T tp ranks.
        """
        # ---- compute the positions of the tokens, and take this cp rank's slice of each sequence
        (batch, seq), device = tokens.shape, tokens.device
        if cache is not None:
            position_ids = cache.positions(seq)
        elif position_ids is None:
            position_ids = torch.arange(seq, device=device).expand(batch, seq)
        if self.context_parallel:
            assert cache is None, "context parallelism does not support a key-value cache"
            tokens, position_ids = self._part(tokens), self._part(position_ids)
        # ---- make attention masks, rotary angles and offsets of documents for each kind of layer, and embed the tokens
        by_kind = self._attention_inputs(position_ids, document_starts, cache, counted, seq)
        x = self.embedding(tokens, position_ids)
        if cache is not None:
            by_kind = {
                kind: dataclasses.replace(inputs, mask=shared_mask(inputs.mask, x.dtype))
                for kind, inputs in by_kind.items()
            }
        # ---- run the layers, and collect the router losses of layers with experts
        router_losses = []
        for index, layer in enumerate(self.layers):
            x = layer(x, by_kind[self.kinds[index]], None if cache is None else cache.layers[index])
            if isinstance(x, tuple):
                router_losses.append(x[1])
                x = x[0]
        x = self.final_norm(x)
        x = enter_region(x, self.tp, sequence_parallel=self.settings.sequence_parallel)
        # ---- compute the result from the hidden states: the head's result, the logits, or the losses of the labels
        if head is not None:
            return head(self, x, self._summed(router_losses) if router_losses else None)
        return self.logits(x) if labels is None else self.token_losses(x, labels)[0]

    def token_losses(
        self, x: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the cross entropy of each label, and the entropy of the distribution that the model predicts for it.

        Args:
            x: [S/C, B, H] hidden states after the final norm, which `forward` passes to its head. There are B sequences
                of S tokens, H channels, and C context-parallel ranks.
            labels: [B, S] int64, the token that follows each token.
            temperature: divisor of the logits.
            with_entropy: True to compute entropies.

        Returns:
            The cross entropies and the entropies, [B, S] fp32 each, in nats. The entropies have no gradient, and are
            None without `with_entropy`.
        """
        compute = functools.partial(
            linear_cross_entropy,
            labels=self._part(labels).t(),
            tp=self.tp,
            vocab_size=self.vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            fuse=self.settings.fuse_loss,
        )
        losses, entropy = self._multiplied(x, compute)
        return self._by_rows(losses), None if entropy is None else self._whole(entropy).t()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits [B, S, V/T] of this tp rank's slice of the vocabulary from hidden states [S/C, B, H].

        x has the hidden states after the final norm, which `forward` passes to its head. There are B sequences of S
        tokens, H channels, V tokens in the padded vocabulary, T tp ranks and C cp ranks.
        """
        return self._by_rows(self._multiplied(x, F.linear))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs [B, S] fp32 of the scalar head (rewards or PPO's values) from hidden states [S/C, B, H].

        x has the hidden states after the final norm, which `forward` passes to its head. There are B sequences of S
        tokens, H channels, and C cp ranks.
        """
        assert self.scalar_head is not None, "the model was built without a scalar head, so it has no values"
        return self._by_rows(self.scalar_head(x))

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the slice of this rank, one of C context-parallel ranks, from B sequences: [B, S] -> [B, S/C]."""
        return x.chunk(self.cp.size, dim=1)[self.cp.rank] if self.context_parallel else x

    def _summed(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Sum the router losses of B sequences, [B] each, over layers, and over the partial sums of tp and cp ranks."""
        total = torch.stack(parts).sum(dim=0)
        for axis in (self.tp, self.cp):
            total = reduce_from_region_(total, axis) if axis.size > 1 else total
        return total

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the slices of a sequence of S tokens from all C context-parallel ranks: [S/C, ...] -> [S, ...]."""
        return collect_sequence(x, self.cp) if self.context_parallel else x

    def _by_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Gather an output of the model over C context-parallel ranks, and put the batch first.

        The shape changes from [S/C, B, ...] to [B, S, ...], for B sequences of S tokens. The result is a copy, not a
        view, because FSDP2 registers hooks on the tensors that its root module returns.
        """
        return self._whole(x).transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _multiplied(self, x: torch.Tensor, head: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        """Return head(x / s, weight) for hidden states x, s = --logits-scaling, and the weight of the output layer.

        The head computes logits or losses. With tied embeddings, the weight is the word embedding's.
        """
        if self.config.logits_scaling != 1.0:
            x = x / self.config.logits_scaling
        return head(x, local(self.embedding.word.weight)) if self.output is None else self.output(x, head)

    def sharding_units(self) -> list[list[nn.Module]]:
        """Return the sharding units (FSDP2's parameter groups) in the order of use.

        Each unit is a list of modules whose parameters are gathered together. Parameters outside all lists belong to
        the unit of the root module. These are a scalar head and, with tied embeddings, also the embedding and the final
        norm, because the embedding's weight is used at both ends of the model. In a model with a scalar head the output
        layer is a separate unit, because a forward that computes only values does not use it.
        """
        layers: list[list[nn.Module]] = [[layer] for layer in self.layers]
        if self.output is None:
            return layers
        if self.scalar_head is not None:
            return [[self.embedding], *layers, [self.final_norm], [self.output]]
        return [[self.embedding], *layers, [self.final_norm, self.output]]

    def expert_units(self) -> list[nn.Module]:
        """Return the experts of each layer with a mixture of experts; [] without experts.

        The experts of a layer are a separate sharding unit (FSDP2's parameter group), on the mesh axes of experts.
        """
        return [layer.mlp.experts for layer in self.layers if isinstance(layer, MixtureLayer)]

    def _attention_inputs(
        self,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None,
        cache: KVCache | None,
        counted: torch.Tensor | None,
        seq: int,
    ) -> dict[tuple[bool, bool], AttentionInputs]:
        """Return the inputs of attention for each kind of layer, which share them.

        The keys of the result are the kinds: (True with a sliding window, True with rotary embeddings).

        Args:
            position_ids: [B, S/C] int64 position of each token of B rows on this rank, one of C context-parallel ranks.
            starts: offsets of the documents, the argument `document_starts` of `forward`.
            cache: key-value cache of all layers, for generation; None without a cache.
            counted: [B, S] bool, True for tokens that the losses of routers include; None for all tokens.
            seq: number of tokens S per row, on all cp ranks together.
        """
        rotates = any(rotated for _, rotated in self.kinds)
        rotary = config_angles(self.config, position_ids) if rotates else None
        kinds = dict.fromkeys(self.kinds)
        limits = {windowed: self._limits(position_ids, starts, cache, seq, windowed) for windowed, _ in kinds}
        tokens = None if counted is None else (self._part(counted).t().float(), counted.sum(dim=1).clamp(min=1).float())
        return {
            (windowed, rotated): AttentionInputs(
                rotary=rotary if rotated else None,
                mask=limits[windowed][0],
                document_starts=limits[windowed][1],
                places=None if cache is None else position_ids,
                counted=tokens,
            )
            for windowed, rotated in kinds
        }

    def _limits(
        self, position_ids: torch.Tensor, starts: torch.Tensor | None, cache: KVCache | None, seq: int, windowed: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return an attention mask or the offsets of documents, which limit attention to documents or a window.

        The result is (mask, offsets). The mask has the form of `AttentionInputs.mask`. The offsets are for the kernel
        of attention inside documents. At least one of the two is None, and both are None for plain causal attention.
        With `windowed`, the sliding window of --window-size applies. See `_attention_inputs` for the other arguments.
        """
        window, batch, device = self.config.window if windowed else None, len(position_ids), position_ids.device
        if cache is not None:
            return cache.mask(position_ids, window), None
        window = None if window is not None and seq <= window else window
        if self.settings.document_kernel is not None:
            if window is not None and starts is None:
                # The document kernel applies the window itself, but requires offsets of documents. So each row of the
                # batch becomes one document.
                starts = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)
            return None, starts
        mask = None if starts is None else document_mask(starts, batch=batch, seq=seq)
        if window is not None:
            inside = window_mask(seq, window, device)
            mask = inside if mask is None else mask & inside
        return mask, None


class TransformerLayer(nn.Module):
    """Transformer layer, attention and MLP with residual connections: [S, B, H] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size. Norms precede attention and MLP, or follow them with
    --norm-after-block. With sequence parallelism over T ranks, input and output are [S/T, B, H].

    Collectives on tp: 2 all-reduces in forward and 2 in backward. With sequence parallelism an all-gather and a
    reduce-scatter replace each of them, and backward repeats the 2 all-gathers of the forward. Full recomputation
    repeats the collectives of the forward whose results backward needs.

    Args:
        config: config of the model.
        settings: mesh axes and implementations that all layers share.
        index: index of the layer, from 0.
    """

    mlp_class: type[nn.Module] = MLP

    def __init__(self, config: GPTConfig, settings: LayerSettings, *, index: int) -> None:
        super().__init__()
        # Megatron-LM's scaled initialization of output matrices: the residual stream is the sum of 2 x num_layers
        # outputs, so their variance is divided by this number.
        output_std = config.init_method_std / math.sqrt(2.0 * config.layers)
        self.recompute, self.settings = config.recomputes_layer(index), settings
        window = config.window if config.has_window(index) else None
        # The order in which these modules are created is the order of their parameters in ZeRO++'s messages.
        self.attention_norm = Norm(config, config.hidden, tp=settings.tp, split=settings.sequence_parallel)
        self.attention = SelfAttention(config, settings, output_std=output_std, window=window)
        self.mlp_norm = Norm(config, config.hidden, tp=settings.tp, split=settings.sequence_parallel)
        self.mlp = self.mlp_class(config, settings, output_std=output_std)
        self.dropout = Dropout(config.hidden_dropout, settings.generator)
        self.norm_after, self.multiplier = config.norm_after_block, config.residual_multiplier
        # Only `_run`, the computation of the layer, is compiled, because FSDP2's hooks and the activation checkpoint of
        # full recomputation must stay outside of compiled code.
        self.run = compile_layer(self._run) if settings.compiled else self._run

    def forward(self, x: torch.Tensor, inputs: AttentionInputs, cache: LayerCache | None = None) -> Any:
        """Run the layer on the residual stream, and return the residual stream after it.

        Args:
            x: [S, B, H] residual stream of B sequences of S tokens, with H channels; [S/T, B, H] with sequence
                parallelism over T ranks.
            inputs: attention mask, rotary angles and offsets of documents.
            cache: key-value cache of this layer, for generation; None in training.

        Returns:
            The residual stream after this layer, a tensor in the shape of x. In training, a `MixtureLayer` with router
            losses returns (residual stream, router losses [B]).
        """
        if cache is not None:
            # A forward without a mask reads prompts into an empty cache. Each cache has only one such forward, so
            # compiling for it does not pay. A compiled graph cannot contain a cache in host memory.
            eager = inputs.mask is None or cache.on_host
            return self._run(x, inputs, cache=cache) if eager else self._marked_and_run(x, inputs, cache)
        if not (self.recompute and self.training):
            return self._marked_and_run(x, inputs)
        shared = self.settings.generator
        contexts = noop_context_fn if shared is None else shared.checkpoint_contexts
        arguments = (x, inputs, None, *self._kept())
        return checkpoint(self._marked_and_run, *arguments, use_reentrant=False, context_fn=contexts)

    def _kept(self) -> tuple[Any, ...]:
        """Return further arguments of `_run` for full recomputation.

        In this class the result is (). `MixtureLayer` returns an empty `Kept`, in which the forward stores the router's
        decisions, and from which the recomputation in backward reads them.
        """
        return ()

    def _marked_and_run(
        self, x: torch.Tensor, inputs: AttentionInputs, cache: LayerCache | None = None, *kept: Any
    ) -> Any:
        """Sample the layer's two dropout masks, tell torch.compile which sizes vary, and run the layer.

        Compiled code cannot use the generator that tensor-parallel ranks share, so the masks are sampled outside of it.

        Args:
            x: residual stream before this layer, in the shape of `forward`.
            inputs: attention mask, rotary angles and offsets of documents.
            cache: key-value cache of this layer, for generation; None in training.
            kept: for full recomputation of a mixture of experts, a `Kept` with the router's decisions; otherwise none.

        Returns:
            The residual stream after the layer.
        """
        masks = self.dropout.draw(x), self.dropout.draw(x)
        if self.settings.compiled:
            mark_varying(inputs.document_starts, 0)  # the number of documents differs between micro-batches
        if self.settings.compiled and (self.settings.varying_sizes or cache is not None):
            inputs.mark_varying()
            for tensor in (x, *masks, *(cache.kept or () if cache is not None else ())):
                mark_varying(tensor, 0, 1)
        if self.places is None:
            return self.run(x, inputs, masks, cache, *kept)
        with local_parameters(self.places):
            return self.run(x, inputs, masks, cache, *kept)

    @functools.cached_property
    def places(self) -> list[tuple[dict[str, Any], str]] | None:
        """The DTensor parameters of this layer that compiled code must read as local tensors.

        Each item is the dict of the module that holds the parameter, and the parameter's name. `local_parameters`
        replaces these parameters by local tensors during the layer's run. None if the layer is not compiled, or if
        there is no tensor parallelism.
        """
        return places_of(self) if self.settings.compiled and self.settings.tp.size > 1 else None

    def _run(
        self, x: torch.Tensor, inputs: AttentionInputs, masks: Masks = (None, None), cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Compute the layer from the residual stream x: attention, then the MLP, each added to the residual stream."""
        before = (None, None) if self.norm_after else (self.attention_norm, self.mlp_norm)
        first = x + self._added(self.attention(x, inputs, cache, norm=before[0]), self.attention_norm, masks[0])
        return first + self._added(self.mlp(first, norm=before[1]), self.mlp_norm, masks[1])

    def _added(self, x: torch.Tensor, norm: Norm, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the summand that the output x of attention or MLP adds to the residual stream.

        Three steps are applied to x: the norm with --norm-after-block, the factor --residual-multiplier, and dropout
        with `mask` as the dropout mask.
        """
        if self.norm_after:
            x = norm(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.dropout(x, mask)


class MixtureLayer(TransformerLayer):
    """Transformer layer with a mixture of experts (`MoE`) in place of the MLP.

    In training with router losses, forward returns (residual stream, router losses). The router losses are [B] for B
    sequences; this rank has a partial sum of each. These losses must be an output, because FSDP2 registers its backward
    hooks on the outputs of a layer. --compile compiles only the attention with both norms, and the experts' gating.
    """

    mlp: MoE
    mlp_class = MoE

    def __init__(self, config: GPTConfig, settings: LayerSettings, *, index: int) -> None:
        super().__init__(config, settings, index=index)
        self.run = self._run
        self.attend = compile_layer(self._attend) if settings.compiled else self._attend

    @functools.cached_property
    def places(self) -> list[tuple[dict[str, Any], str]] | None:
        """The DTensor parameters of attention and norms that compiled code must read as local tensors.

        Each item is the dict of the module that holds the parameter, and the parameter's name. The experts are left
        out: they are another sharding unit, which FSDP2 gathers later. None if the layer is not compiled, or if there
        is no tensor parallelism.
        """
        if not (self.settings.compiled and self.settings.tp.size > 1):
            return None
        return [*places_of(self.attention_norm), *places_of(self.attention), *places_of(self.mlp_norm)]

    def _kept(self) -> tuple[Any, ...]:
        return (Kept(),)

    def _attend(
        self, x: torch.Tensor, inputs: AttentionInputs, mask: torch.Tensor | None, cache: LayerCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.attention(x, inputs, cache, norm=self.attention_norm)
        x = x + self._added(attended, self.attention_norm, mask)
        return x, self.mlp_norm(x)

    def _run(
        self,
        x: torch.Tensor,
        inputs: AttentionInputs,
        masks: Masks = (None, None),
        cache: LayerCache | None = None,
        kept: Kept | None = None,
    ) -> Any:
        x, normed = self.attend(x, inputs, masks[0], cache)
        y, router_loss = self.mlp(normed, kept=kept, counted=inputs.counted)
        x = x + self._added(y, self.mlp_norm, mask=masks[1])
        return x if router_loss is None else (x, router_loss)


class Embedding(nn.Module):
    """Sum of word and learned position embeddings, with dropout: tokens [B, S] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size. With sequence parallelism over T ranks the output is
    [S/T, B, H]. Collectives on tp: the collectives of VocabParallelEmbedding.
    """

    def __init__(self, config: GPTConfig, settings: LayerSettings, *, vocab_size: int) -> None:
        super().__init__()
        tp, sequence_parallel = settings.tp, settings.sequence_parallel
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
        self.dropout, self.multiplier = Dropout(config.hidden_dropout, settings.generator), config.embedding_multiplier

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t())
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(position_ids.t())
        return self.dropout(x)


class PositionEmbedding(nn.Module):
    """Learned position embedding: position_ids [S, B] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size. With sequence parallelism over T tensor-parallel
    ranks the result is [S/T, B, H].
    """

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
    """Output layer with its own weight, whose rows are split over tp ranks like the rows of the word embedding.

    `forward` calls the function `head`, which computes logits or losses from hidden states and the weight. FSDP2
    gathers the weight only for this module's forward, so logits and losses must be computed inside it.
    """

    def __init__(self, config: GPTConfig, vocab_size: int, tp: MeshAxis) -> None:
        super().__init__()
        rows = config.padded_vocab_size(vocab_size, tp.size)
        self.weight = nn.Parameter(torch.empty(rows // tp.size, config.hidden))
        self.specs = {"weight": ParameterSpec(split=0, std=config.init_method_std, rows=vocab_size)}

    def forward(self, x: torch.Tensor, head: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        return head(x, local(self.weight))


class ScalarHead(nn.Module):
    """Linear head that computes one fp32 number per token: [S, B, H] -> [S, B].

    S is the sequence length, B the batch size, H the hidden size. Reward models and PPO's values use this head. Every
    tp rank holds the complete weight, and multiplies its own slice of the channels. Collectives on tp: 1 all-reduce of
    the partial sums [S, B] in forward.
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
