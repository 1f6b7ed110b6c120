"""Config of the GPT model: sizes, initialization, dropout, activation recomputation, float8 and compilation.

The fields have the names of Megatron-LM's flags. Properties and methods compute derived values (head size, feed-forward
size, padded vocabulary), which are never written back into the fields. This is one file of more than 300 lines, because
the config is one class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import Config, flag, spelling

RecomputeModule = Literal["core_attn", "layernorm", "mlp_act"]
ACTIVATIONS = ("swiglu", "squared_relu", "openai_gelu")  # flags of the MLP's activation, at most one; without one, GeLU
# The limit of --num-layers, and the words with which an error message explains it. There is a limit because a damaged
# model file may contain any number.
MOST_LAYERS = (10_000, "the most that is supported")


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """Model.

    The architecture, initialization, dropout, activation recomputation and compilation of a GPT model. A size that is
    None is not known yet: a checkpoint or another flag may set it later.

    Attributes:
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream, in channels.
        ffn_hidden_size: width of the MLP's hidden layer, in channels (default: 4 x --hidden-size; with --swiglu two
            thirds of that, rounded down to a multiple of 64).
        num_attention_heads: number of query heads.
        kv_channels: channels of each attention head (default: --hidden-size / --num-attention-heads).
        group_query_attention: let several query heads share each key and value head.
        num_query_groups: number of key and value heads with --group-query-attention.
        max_position_embeddings: longest sequence, in tokens, for which the model has positions.
        position_embedding_type: kind of position embeddings: a learned table, rotary embeddings, or none.
        use_rotary_position_embeddings: older name of --position-embedding-type rope.
        rotary_base: base of the rotary frequencies.
        rotary_percent: fraction of each head's channels that rotary embeddings rotate, above 0 and up to 1.
        no_rope_freq: layers without rotary embeddings: N for every Nth layer, or a list with 1 for each such layer and
            0 for each other layer, such as [0,0,0,1].
        use_rope_scaling: lower the low rotary frequencies as Llama 3.1 does, for sequences longer than
            --rope-scaling-original-length.
        rope_scaling_factor: divisor of the lowest rotary frequencies.
        rope_scaling_original_length: sequence length, in tokens, with which the model was trained before
            --use-rope-scaling.
        rotary_seq_len_interpolation_factor: divisor of the positions from which rotary angles are computed (position
            interpolation).
        rope_type: rotary frequencies for contexts that are --rotary-scaling-factor times longer: rope changes nothing;
            yarn divides low frequencies (YaRN); dynamic raises the base if a batch has a sequence longer than
            --max-position-embeddings (NTK-aware).
        rotary_scaling_factor: ratio of the new context length to the original one with --rope-type yarn or dynamic.
        yarn_original_max_position_embeddings: context length, in tokens, with which the model was trained before
            --rope-type yarn.
        yarn_beta_fast: turns over the original context at and above which YaRN keeps a frequency unchanged.
        yarn_beta_slow: turns over the original context at and below which YaRN divides a frequency in full.
        yarn_attention_factor: number by which the cosines and sines of the rotary angles are multiplied (default: 1 +
            0.1 ln --rotary-scaling-factor).
        window_size: sliding-window attention: numbers of earlier and later tokens that each token attends to, in
            addition to itself; LEFT is -1 for all earlier tokens.
        window_attn_skip_freq: layers that use --window-size: N for all layers but every Nth, or a list with 1 for each
            layer with a window and 0 for each other layer, such as [1,1,1,0] (default: all layers).
        num_experts: experts per layer: a mixture of experts replaces the MLP, and no token is dropped.
        moe_layer_freq: layers with experts in place of the MLP: every Nth layer from the first on, or a list with 1 for
            each such layer and 0 for each other layer, such as [0,1,1,1].
        moe_router_topk: number of experts that each token is sent to.
        moe_ffn_hidden_size: width of one expert's hidden layer, in channels (default: --ffn-hidden-size).
        moe_shared_expert_intermediate_size: width of the hidden layer, in channels, of an MLP that processes all tokens
            in addition to their experts.
        moe_shared_expert_gate: multiply the output of the shared MLP by a sigmoid gate.
        moe_router_score_function: function that turns the router's logits into scores of experts.
        moe_router_pre_softmax: weight experts' outputs by a softmax over all experts, computed before the choice,
            instead of a softmax over the chosen experts.
        moe_router_topk_scaling_factor: number by which the weights of the chosen experts' outputs are multiplied.
        moe_router_enable_expert_bias: choose experts by their scores plus a bias, which each step raises for experts
            with few tokens and lowers for the others; it balances the load without a loss.
        moe_router_bias_update_rate: change of each expert's bias per optimizer step; 0 keeps the biases constant.
        moe_router_load_balancing_type: loss that balances the load of experts: seq_aux_loss computes it in each
            sequence, so it does not depend on the number of ranks or the micro-batch size.
        moe_aux_loss_coeff: coefficient of the load-balancing loss.
        moe_z_loss_coeff: coefficient of the z-loss, the mean square of the log of the router's softmax denominators.
        make_vocab_size_divisible_by: pad the vocabulary to a multiple of this value times the tensor-parallel size.
        normalization: normalization of all norm layers.
        norm_epsilon: constant that norms add to the variance or mean square.
        qk_layernorm: normalize each head's queries and keys before rotary embeddings.
        qk_layernorm_all_heads: normalize the queries of all heads together, and likewise the keys, before rotary
            embeddings (RMSNorm, as in OLMo 2).
        norm_after_block: normalize the outputs of attention and MLP instead of their inputs.
        embedding_multiplier: number by which word embeddings are multiplied.
        residual_multiplier: number by which outputs of attention and MLP are multiplied before the residual stream adds
            them.
        attention_multiplier: number by which attention scores are multiplied before the softmax (default: 1 /
            sqrt(head's channels)).
        logits_scaling: divisor of the logits.
        apply_layernorm_1p: store the weight of a norm minus 1, so that weight decay pulls it towards 1.
        swiglu: use SwiGLU instead of GeLU in the MLP.
        squared_relu: use squared ReLU instead of GeLU in the MLP.
        openai_gelu: use the tanh approximation of GeLU in the MLP, as GPT-2 does.
        untie_embeddings_and_output_weights: give the output layer its own weight instead of the word embedding's.
        disable_bias_linear: remove the biases of all linear layers.
        add_qkv_bias: give the projection to queries, keys and values a bias even with --disable-bias-linear.
        init_method_std: standard deviation of the initial weights.
        hidden_dropout: dropout rate of the outputs of embedding, attention and MLP.
        attention_dropout: dropout rate of the attention probabilities.
        recompute_activations: short for --recompute-granularity selective.
        recompute_granularity: activations that backward recomputes instead of storing them: full recomputes each layer
            from its input; selective recomputes the modules of --recompute-modules, and stores the outputs of matrix
            products and attention.
        recompute_modules: modules that --recompute-granularity selective recomputes: layernorm, all norms whose output
            is the input of a matrix product; mlp_act, the activation of the MLP; core_attn, the attention core, which
            stores its scores only where no fused kernel computes it (default: layernorm mlp_act; Megatron-LM's default
            is core_attn).
        recompute_method: layers that --recompute-granularity full recomputes: uniform, each layer separately; block,
            only the first --recompute-num-layers layers (default: uniform).
        recompute_num_layers: number of layers to recompute with --recompute-method block.
        use_cpu_initialization: sample the initial weights on the CPU, so that they are the same on every kind of
            device.
        fp8_format: compute the matrix products of the layers' linear layers in float8, through torchao; needs --bf16
            and GPUs with compute capability 8.9 or later. e4m3 is used for all operands; hybrid uses e5m2 for
            gradients. Embedding, output layer, norms, adapters and communication do not change. Without --compile, each
            cast takes several passes over memory. With tensor parallelism, the collectives of backward do not
            overlap with matrix products.
        compile: apply torch.compile to each layer, in training and decoding, and to the computation of losses from
            logits. The first step takes longer and later steps take less time (default: on CUDA if its compilers are
            found).
    """

    num_layers: int | None = flag(None, common=True, must_be="positive", most=MOST_LAYERS, shape="layers")
    hidden_size: int | None = flag(None, common=True, must_be="positive", shape="hidden")
    ffn_hidden_size: int | None = flag(None, must_be="positive", shape="dense_ffn_size")
    num_attention_heads: int | None = flag(None, common=True, must_be="positive", shape="heads")
    kv_channels: int | None = flag(None, must_be="positive", shape="head_size")
    group_query_attention: bool = flag(False)
    num_query_groups: int = flag(1, needs="--group-query-attention", must_be="positive", shape="query_groups")
    max_position_embeddings: int | None = flag(None)
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag("learned_absolute", shape="positions")
    use_rotary_position_embeddings: bool = flag(False, shape="positions")
    rotary_base: float = flag(10000.0, must_be="positive")
    rotary_percent: float = flag(1.0, must_be="a share")
    no_rope_freq: str | None = flag(None, metavar="N|LIST", shape="unrotated")
    use_rope_scaling: bool = flag(False, shape="rope_scaling")
    rope_scaling_factor: float = flag(8.0, needs="--use-rope-scaling", must_be="at least one", shape="rope_scaling")
    rope_scaling_original_length: int = flag(8192, needs="--use-rope-scaling", must_be="positive")
    rotary_seq_len_interpolation_factor: float | None = flag(None, must_be="positive")
    rope_type: Literal["rope", "yarn", "dynamic"] = flag("rope")
    rotary_scaling_factor: float = flag(1.0, needs="--rope-type yarn dynamic", must_be="at least one")
    yarn_original_max_position_embeddings: int = flag(4096, needs="--rope-type yarn", must_be="positive")
    yarn_beta_fast: float = flag(32.0, needs="--rope-type yarn", must_be="positive")
    yarn_beta_slow: float = flag(1.0, needs="--rope-type yarn", must_be="positive")
    yarn_attention_factor: float | None = flag(None, needs="--rope-type yarn", must_be="positive")
    window_size: str | None = flag(None, metavar="LEFT,0", shape="attention_span")
    window_attn_skip_freq: str | None = flag(None, needs="--window-size", metavar="N|LIST", shape="attention_span")
    num_experts: int | None = flag(None, metavar="E", must_be="positive")
    moe_layer_freq: str = flag("1", needs="--num-experts", metavar="N|LIST", shape="expert_layers")
    moe_router_topk: int = flag(2, needs="--num-experts", must_be="positive")
    moe_ffn_hidden_size: int | None = flag(None, needs="--num-experts", must_be="positive", shape="expert_ffn_size")
    moe_shared_expert_intermediate_size: int | None = flag(None, needs="--num-experts", must_be="positive")
    moe_shared_expert_gate: bool = flag(False, needs="--moe-shared-expert-intermediate-size")
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", needs="--num-experts")
    moe_router_pre_softmax: bool = flag(False, needs="--num-experts")
    moe_router_topk_scaling_factor: float | None = flag(None, needs="--num-experts", must_be="positive")
    moe_router_enable_expert_bias: bool = flag(False, needs="--moe-router-score-function sigmoid")
    moe_router_bias_update_rate: float = flag(
        1e-3, needs="--moe-router-enable-expert-bias", must_be="not negative", shape=False
    )
    moe_router_load_balancing_type: Literal["seq_aux_loss", "none"] = flag(
        "seq_aux_loss", needs="--num-experts", shape=False
    )
    moe_aux_loss_coeff: float = flag(0.0, needs="--num-experts", must_be="not negative", shape=False)
    moe_z_loss_coeff: float = flag(0.0, needs="--num-experts", must_be="not negative", shape=False)
    make_vocab_size_divisible_by: int = flag(128, must_be="positive", shape=False)
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm")
    norm_epsilon: float = flag(1e-5, aliases=("--layernorm-epsilon",), must_be="positive")
    qk_layernorm: bool = flag(False)
    qk_layernorm_all_heads: bool = flag(False)
    norm_after_block: bool = flag(False)
    embedding_multiplier: float = flag(1.0, must_be="positive")
    residual_multiplier: float = flag(1.0, must_be="positive")
    attention_multiplier: float | None = flag(None, must_be="positive")
    logits_scaling: float = flag(1.0, must_be="positive")
    apply_layernorm_1p: bool = flag(False)
    swiglu: bool = flag(False)
    squared_relu: bool = flag(False)
    openai_gelu: bool = flag(False)
    untie_embeddings_and_output_weights: bool = flag(False, shape="tied")
    disable_bias_linear: bool = flag(False, shape="linear_bias")
    add_qkv_bias: bool = flag(False, shape="qkv_bias")
    init_method_std: float = flag(0.02, must_be="positive", shape=False)
    hidden_dropout: float = flag(0.1, must_be="below one", shape=False)
    attention_dropout: float = flag(0.1, must_be="below one", shape=False)
    recompute_activations: bool = flag(False, shape=False)
    recompute_granularity: Literal["full", "selective"] | None = flag(None, shape=False)
    recompute_modules: tuple[RecomputeModule, ...] | None = flag(None, shape=False)
    recompute_method: Literal["uniform", "block"] | None = flag(None, needs="--recompute-granularity full", shape=False)
    recompute_num_layers: int | None = flag(None, needs="--recompute-granularity full", must_be="positive", shape=False)
    use_cpu_initialization: bool = flag(False, shape=False)
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(None, shape=False)
    compile: bool | None = flag(None, shape=False)

    def __post_init__(self) -> None:
        """Raise ValueError for invalid or conflicting flags of the model; skip checks of sizes that are still None."""
        # ---- check that each flag, taken alone, is in its range
        super().__post_init__()
        too_small = f"--hidden-size {self.hidden_size} makes the MLP 0 channels wide: raise it or set --ffn-hidden-size"
        _require(self.hidden_size is None or self.ffn_size > 0, too_small)
        # ---- check the numbers of query heads, and of key and value heads
        groups = f"--num-query-groups {self.num_query_groups}"
        if (heads := self.num_attention_heads) is not None:
            hidden, given = self.hidden_size, f"--num-attention-heads {heads}"
            fits = self.kv_channels is not None or hidden is None or hidden % heads == 0
            _require(fits, f"--hidden-size {hidden} is not divisible by {given}: change one, or set --kv-channels")
            _require(heads % self.query_groups == 0, f"{given} is not divisible by {groups}: change one of them")
        # ---- check that at most one activation function is set; then check lists of layers, experts, norms, rotary
        # embeddings and activation recomputation
        chosen = [spelling(self, name) for name in ACTIVATIONS if getattr(self, name)]
        _require(len(chosen) < 2, f"{' and '.join(chosen)} exclude each other: choose one activation of the MLP")
        self._check_patterns()
        self._check_experts()
        self._check_blocks()
        self._check_rotary()
        self._check_recompute()

    def _check_patterns(self) -> None:
        """Raise ValueError for a malformed --window-size, and for a malformed list of layers.

        A list of layers must have one entry for each layer. The flags with such lists are --no-rope-freq,
        --window-attn-skip-freq and --moe-layer-freq.
        """
        _ = self.window  # parses --window-size, and raises an error if it is malformed
        for name in ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq"):
            given = f"{spelling(self, name)} {getattr(self, name)}"
            pattern = _pattern(given, getattr(self, name))
            fits = not isinstance(pattern, tuple) or self.num_layers in (None, len(pattern))
            _require(fits, f"{given} does not have one entry for each layer of --num-layers {self.num_layers}")
        rotated = self.no_rope_freq is None or self.positions == "rope"
        needed = "needs --position-embedding-type rope: it exempts layers from rotary embeddings"
        _require(rotated, f"--no-rope-freq {self.no_rope_freq} {needed}")

    def _check_experts(self) -> None:
        """Raise ValueError for invalid or conflicting flags of a mixture of experts (--num-experts)."""
        if (experts := self.num_experts) is None:
            return
        topk = f"--moe-router-topk {self.moe_router_topk}"
        _require(self.moe_router_topk <= experts, f"{topk} is more than --num-experts {experts}: lower it")
        _require(self.swiglu, f"--num-experts {experts} needs --swiglu: experts are gated MLPs")
        _require(self.disable_bias_linear, f"--num-experts {experts} needs --disable-bias-linear: experts have no bias")
        _require(not self.norm_after_block, f"--norm-after-block with --num-experts {experts} is not supported")
        pre = f"--moe-router-pre-softmax with --moe-router-score-function {self.moe_router_score_function}"
        softmax = not self.moe_router_pre_softmax or self.moe_router_score_function == "softmax"
        _require(softmax, f"{pre}: no softmax is computed; remove --moe-router-pre-softmax")
        balance = self.moe_router_load_balancing_type == "none" and self.moe_aux_loss_coeff > 0.0
        coefficient = f"--moe-aux-loss-coeff {self.moe_aux_loss_coeff:g}"
        _require(not balance, f"{coefficient} needs --moe-router-load-balancing-type seq_aux_loss, not none")

    def _check_blocks(self) -> None:
        """Raise ValueError for conflicting flags of query and key norms."""
        one_kind = not (self.qk_layernorm and self.qk_layernorm_all_heads)
        _require(one_kind, "--qk-layernorm and --qk-layernorm-all-heads exclude each other: choose one")
        rms = self.normalization == "RMSNorm" and not self.apply_layernorm_1p
        _require(
            not self.qk_layernorm_all_heads or rms,
            "--qk-layernorm-all-heads needs --normalization RMSNorm and excludes --apply-layernorm-1p",
        )

    def _check_rotary(self) -> None:
        """Raise ValueError for conflicting flags of rotary embeddings, and for a wrong number of rotated channels.

        The number is not checked as long as the model's sizes are unknown.
        """
        # ---- check that at most one of the flags that scale rotary frequencies is set
        kinds = {
            "--use-rope-scaling": self.use_rope_scaling,
            f"--rope-type {self.rope_type}": self.rope_type != "rope",
            f"--rotary-seq-len-interpolation-factor {self.rotary_seq_len_interpolation_factor}": (
                self.rotary_seq_len_interpolation_factor is not None
            ),
        }
        asked = [name for name, there in kinds.items() if there]
        _require(len(asked) < 2, f"{' and '.join(asked)} exclude each other: each changes the rotary frequencies")
        rope = "--position-embedding-type rope, whose frequencies it changes"
        _require(not asked or self.positions == "rope", f"{' '.join(asked)} needs {rope}")
        known = self.rope_type != "dynamic" or self.max_position_embeddings is not None
        _require(known, "--rope-type dynamic needs --max-position-embeddings, the context length without scaling")
        # ---- check the number of rotated channels
        if self.positions != "rope" or (
            self.kv_channels is None and None in (self.hidden_size, self.num_attention_heads)
        ):
            return
        rotated = int(self.head_size * self.rotary_percent)
        given = f"--rotary-percent {self.rotary_percent} of {self.head_size} channels per head is {rotated} channels"
        _require(rotated % 2 == 0 and rotated > 0, f"{given}, which is not a positive even number")

    def _check_recompute(self) -> None:
        """Raise ValueError for --recompute-... flags that conflict, or that --recompute-granularity does not use."""
        method, count = self.recompute_method, self.recompute_num_layers
        modules = f"--recompute-modules {' '.join(self.recompute_modules or ())}"
        selects = self.recompute_modules is None or self.recompute == "selective"
        _require(selects, f"{modules} needs --recompute-granularity selective, which recomputes single modules")
        given = f"--recompute-num-layers {count}"
        if method == "block":
            missing = "--recompute-method block needs --recompute-num-layers, the number of layers to recompute"
            _require(count is not None, missing)
            assert count is not None
            known = self.num_layers is not None
            _require(not known or count <= self.layers, f"{given} is not between 1 and --num-layers {self.num_layers}")
        elif self.recompute == "full":
            one = f"{given}: --recompute-method uniform recomputes layer by layer, so only 1 is supported"
            _require(count in (None, 1), one)

    # ---- values that are derived from the flags and are never stored in fields --------------------------------

    @property
    def layers(self) -> int:
        """Number of transformer layers; reading this property raises ValueError if --num-layers is not set."""
        return _given("--num-layers", self.num_layers)

    @property
    def hidden(self) -> int:
        """Channels of the residual stream; reading this property raises ValueError if --hidden-size is not set."""
        return _given("--hidden-size", self.hidden_size)

    @property
    def heads(self) -> int:
        """Number of query heads; reading this property raises ValueError if --num-attention-heads is not set."""
        return _given("--num-attention-heads", self.num_attention_heads)

    @property
    def ffn_size(self) -> int:
        """Channels of the MLP's hidden layer: --ffn-hidden-size, or a default that depends on --hidden-size."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 4 * self.hidden * 2 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden

    @property
    def dense_ffn_size(self) -> int | None:
        """Channels of the MLP's hidden layer in layers without experts; None if all layers have experts."""
        return None if self.num_experts is not None and len(self.expert_layers) == self.layers else self.ffn_size

    @property
    def expert_ffn_size(self) -> int:
        """Channels of one expert's hidden layer, in a mixture of experts."""
        return self.moe_ffn_hidden_size or self.ffn_size

    def has_experts(self, layer: int) -> bool:
        """Return True if layer `layer`, counted from 0, has a mixture of experts in place of its MLP."""
        pattern = _pattern("--moe-layer-freq", self.moe_layer_freq)
        if self.num_experts is None or pattern is None:
            return False
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the layers that have a mixture of experts in place of the MLP."""
        return tuple(layer for layer in range(self.layers) if self.has_experts(layer))

    @property
    def head_size(self) -> int:
        """Channels of each attention head: --kv-channels, by default --hidden-size / --num-attention-heads."""
        return self.kv_channels if self.kv_channels is not None else self.hidden // self.heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads; without grouped-query attention equal to the number of query heads."""
        return self.num_query_groups if self.group_query_attention else self.heads

    @property
    def positions(self) -> Literal["learned_absolute", "rope", "none"]:
        """Kind of position embeddings: --position-embedding-type, or rope with --use-rotary-position-embeddings."""
        return "rope" if self.use_rotary_position_embeddings else self.position_embedding_type

    @property
    def rope_scaling(self) -> float | None:
        """Divisor of the lowest rotary frequencies in Llama 3.1's scaling; None without --use-rope-scaling."""
        return self.rope_scaling_factor if self.use_rope_scaling else None

    @property
    def window(self) -> int | None:
        """Number of tokens that a token attends to in layers with a sliding window, itself included; None for no limit.

        Raises:
            ValueError: --window-size is not LEFT,0.
        """
        if self.window_size is None:
            return None
        sides = re.fullmatch(r"\(?(-1|\d+), *0\)?", self.window_size)
        _require(sides is not None, f"--window-size {self.window_size} is not LEFT,0 with LEFT >= 0, or -1 for all")
        assert sides is not None
        return None if sides[1] == "-1" else int(sides[1]) + 1

    def has_window(self, layer: int) -> bool:
        """Return True if the attention of layer `layer`, counted from 0, is limited to the window of --window-size."""
        pattern = _pattern("--window-attn-skip-freq", self.window_attn_skip_freq)
        return self.window is not None and (pattern is None or not _marked(pattern, layer, others=True))

    def rotates(self, layer: int) -> bool:
        """Return True if layer `layer`, counted from 0, applies rotary embeddings to queries and keys."""
        pattern = _pattern("--no-rope-freq", self.no_rope_freq)
        return self.positions == "rope" and (pattern is None or not _marked(pattern, layer))

    @property
    def attention_span(self) -> tuple[int | None, ...]:
        """For each layer, the number of tokens that a token attends to, itself included; None for no limit."""
        return tuple(self.window if self.has_window(layer) else None for layer in range(self.layers))

    @property
    def unrotated(self) -> tuple[int, ...]:
        """Indices, from 0, of the layers that --no-rope-freq excludes from rotary embeddings; () without rotation."""
        return tuple(layer for layer in range(self.layers) if self.positions == "rope" and not self.rotates(layer))

    @property
    def tied(self) -> bool:
        """True if the output layer uses the word embedding's weight instead of its own."""
        return not self.untie_embeddings_and_output_weights

    @property
    def linear_bias(self) -> bool:
        """True if linear layers have a bias; `qkv_bias` says this for the projection to queries, keys and values."""
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        """True if the projection to queries, keys and values has a bias."""
        return self.linear_bias or self.add_qkv_bias

    @property
    def recompute(self) -> Literal["full", "selective"] | None:
        """Granularity of activation recomputation: --recompute-granularity, or selective with --recompute-activations.

        None if backward recomputes nothing.
        """
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)

    def recomputes(self, module: RecomputeModule) -> bool:
        """Return True if --recompute-granularity is selective and includes modules of the kind `module`."""
        return self.recompute == "selective" and module in (self.recompute_modules or ("layernorm", "mlp_act"))

    def recomputes_layer(self, index: int) -> bool:
        """Return True if --recompute-granularity full covers layer `index`, counted from 0.

        Such a layer stores only its input, and backward runs its forward again.
        """
        if self.recompute != "full":
            return False
        return self.recompute_method != "block" or index < (self.recompute_num_layers or self.layers)

    def padded_vocab_size(self, vocab_size: int, tp_size: int) -> int:
        """Return `vocab_size` rounded up to a multiple of --make-vocab-size-divisible-by times `tp_size`.

        Every tensor-parallel rank then holds equally many rows of the embedding.
        """
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-vocab_size // multiple) * multiple


def _pattern(given: str, value: str | None) -> int | tuple[int, ...] | None:
    """Parse the value of a flag that selects layers, such as --moe-layer-freq.

    Args:
        given: flag and value, for the error message.
        value: "N" for every Nth layer, or a list such as "[0,1]" with a 0 or 1 for each layer; None if not set.

    Returns:
        The number N, the entries of the list, or None if `value` is None.

    Raises:
        ValueError: `value` is neither a positive number nor such a list.
    """
    if value is None:
        return None
    items = re.fullmatch(r"\[([01](?:, *[01])*)\]", value)
    _require(
        items is not None or re.fullmatch(r"[1-9]\d*", value) is not None,
        f"{given} is neither a positive number N nor a list such as [0,1]",
    )
    return tuple(map(int, items[1].split(","))) if items else int(value)


def _marked(pattern: int | tuple[int, ...], layer: int, *, others: bool = False) -> bool:
    """Return True if a pattern of layers from `_pattern` selects the layer with index `layer`, from 0.

    A number N selects the Nth, 2Nth, ... layer. A list selects the layers with a 1, or with `others` the layers with a
    0. For a number, `others` has no effect.
    """
    return (layer + 1) % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer]) != others


def _given(name: str, value: int | None) -> int:
    """Return `value`, the value of the flag `name`; raise ValueError if it is None, because the flag is not set."""
    if value is None:
        raise ValueError(f"{name} is required, because the model cannot be built without it: set {name}")
    return value


def _require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` if `condition` is False."""
    if not condition:
        raise ValueError(message)
