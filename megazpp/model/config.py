"""The shape of a GPT and how it is initialised, recomputed and compiled.

The fields keep Megatron's names; what follows from them (head size, feed-forward size, padded vocabulary) is
computed by properties and never written back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import check_positive, check_words, flag, spelling

RecomputeModule = Literal["core_attn", "layernorm", "mlp_act"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Model.

    Shape, initialization, dropout and recomputation.
    """

    num_layers: int | None = flag(None, "transformer layers", common=True)
    hidden_size: int | None = flag(None, "width of the residual stream", common=True)
    ffn_hidden_size: int | None = flag(
        None, "width inside the MLP (default 4 x hidden, with --swiglu two thirds of that in steps of 64)"
    )
    num_attention_heads: int | None = flag(None, "query heads", common=True)
    kv_channels: int | None = flag(None, "width of one head (default hidden / heads)")
    group_query_attention: bool = flag(False, "share each key and value head among several query heads")
    num_query_groups: int = flag(1, "key and value heads, with --group-query-attention")
    max_position_embeddings: int | None = flag(None, "longest sequence in tokens that has positions")
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag(
        "learned_absolute", "how positions enter"
    )
    use_rotary_position_embeddings: bool = flag(False, "old spelling of --position-embedding-type rope")
    rotary_base: float = flag(10000.0, "base of the rotary frequencies")
    rotary_percent: float = flag(1.0, "share of each head that is rotated, 0 to 1")
    no_rope_freq: str | None = flag(
        None,
        "layers that rotate nothing: every Nth layer, or a list with a 1 for each such layer, as [0,0,0,1]",
        metavar="N|LIST",
    )
    use_rope_scaling: bool = flag(
        False, "slow down low rotary frequencies as Llama 3.1 does, for more tokens than --rope-scaling-original-length"
    )
    rope_scaling_factor: float = flag(8.0, "how much slower the lowest frequencies are with --use-rope-scaling")
    rope_scaling_original_length: int = flag(
        8192, "tokens of the training before --use-rope-scaling", needs="--use-rope-scaling"
    )
    rotary_seq_len_interpolation_factor: float | None = flag(None, "divisor of positions in rotary angles")
    rope_type: Literal["rope", "yarn", "dynamic"] = flag(
        "rope",
        "frequencies for contexts that are longer by --rotary-scaling-factor: yarn divides low ones (YaRN); dynamic "
        "raises the base with the longest sequence of a batch beyond --max-position-embeddings (NTK-aware)",
    )
    rotary_scaling_factor: float = flag(1.0, "how many times longer contexts become with --rope-type yarn or dynamic")
    yarn_original_max_position_embeddings: int = flag(4096, "tokens of the training before --rope-type yarn")
    yarn_beta_fast: float = flag(32.0, "turns in the original context from which on --rope-type yarn keeps a frequency")
    yarn_beta_slow: float = flag(1.0, "turns in the original context up to which --rope-type yarn divides a frequency")
    yarn_attention_factor: float | None = flag(
        None, "factor of the rotated channels with --rope-type yarn (default 1 + 0.1 ln --rotary-scaling-factor)"
    )
    window_size: str | None = flag(
        None,
        "tokens before and after its own that a token may look at, in layers with a window; -1 for all before it",
        metavar="LEFT,0",
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "layers with the window of --window-size: all but every Nth layer, or a list with a 1 for each such layer, as "
        "[1,1,1,0] (default: all layers)",
        metavar="N|LIST",
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this x tensor-parallel size")
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "which norm")
    norm_epsilon: float = flag(1e-5, "added to the variance inside the norms", aliases=("--layernorm-epsilon",))
    qk_layernorm: bool = flag(False, "normalise queries and keys, each head by itself, before they are rotated")
    qk_layernorm_all_heads: bool = flag(
        False, "normalize queries, and keys, of all heads together, before they are rotated (RMSNorm, as in OLMo 2)"
    )
    norm_after_block: bool = flag(False, "normalize the outputs of attention and MLP instead of their inputs")
    embedding_multiplier: float = flag(1.0, "factor of word embeddings")
    residual_multiplier: float = flag(1.0, "factor of the outputs of attention and MLP")
    attention_multiplier: float | None = flag(
        None, "factor of attention scores before the softmax (default 1 / sqrt(channels per head))"
    )
    logits_scaling: float = flag(1.0, "divisor of logits")
    apply_layernorm_1p: bool = flag(False, "norm weights are stored as w - 1, so that weight decay pulls to 1")
    swiglu: bool = flag(False, "SwiGLU instead of GeLU in the MLP")
    squared_relu: bool = flag(False, "squared ReLU instead of GeLU in the MLP")
    openai_gelu: bool = flag(False, "the tanh approximation of GeLU, as GPT-2 has it")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer its own weight")
    disable_bias_linear: bool = flag(False, "no bias in any linear layer")
    add_qkv_bias: bool = flag(False, "bias on the query, key and value projection even with --disable-bias-linear")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    hidden_dropout: float = flag(0.1, "dropout after embedding, attention and MLP")
    attention_dropout: float = flag(0.1, "dropout on the attention probabilities")
    recompute_activations: bool = flag(False, "short for --recompute-granularity selective")
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "full: keep only each layer's input; selective: keep what matrix products and attention give, and recompute "
        "what lies between them (other modules with --recompute-modules)",
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = flag(
        None,
        "what --recompute-granularity selective recomputes: layernorm, the norms, for the products that they are the "
        "input of; mlp_act, the MLP's activation; core_attn, the attention core, which keeps scores only where no "
        "fused kernel computes it (default layernorm mlp_act; Megatron's is core_attn)",
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "uniform: every layer by itself; block: the first --recompute-num-layers layers only"
    )
    recompute_num_layers: int | None = flag(None, "layers to recompute with --recompute-method block")
    use_cpu_initialization: bool = flag(
        False, "draw the initial weights on the CPU, so that runs on other kinds of devices start with the same ones"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        None,
        "products of the layers' linear layers take float8, through torchao, with --bf16 on GPUs from compute "
        "capability 8.9 on: e4m3; hybrid: gradients in e5m2. Embedding, output layer, norms, adapters and what crosses "
        "wires stay as they are. Casts cost passes over memory without --compile, and with tensor parallelism the "
        "collectives of backward no longer hide behind products",
    )
    compile: bool | None = flag(
        None,
        "torch.compile each layer, decoding too, and what is done with logits: the first step takes longer, the others "
        "less (default: on CUDA, where its compilers are found)",
    )

    def __post_init__(self) -> None:
        """Leave out checks of layers, hidden size and heads that are not known yet."""
        check_words(self)
        check_positive(self, "num_attention_heads", "num_layers", "hidden_size", "ffn_hidden_size", "kv_channels")
        check_positive(self, "num_query_groups", "make_vocab_size_divisible_by")
        check_positive(self, "norm_epsilon", "init_method_std", "rotary_base")
        too_small = f"--ffn-hidden-size 0: what follows from --hidden-size {self.hidden_size} is not positive"
        _require(self.hidden_size is None or self.ffn_size > 0, too_small)
        for name in ("hidden_dropout", "attention_dropout"):
            rate = getattr(self, name)
            _require(0.0 <= rate < 1.0, f"{spelling(self, name)} {rate} is not in [0, 1)")
        groups = f"--num-query-groups {self.num_query_groups}"
        _require(self.num_query_groups == 1 or self.group_query_attention, f"{groups} needs --group-query-attention")
        if (heads := self.num_attention_heads) is not None:
            hidden, given = self.hidden_size, f"--num-attention-heads {heads}"
            fits = self.kv_channels is not None or hidden is None or hidden % heads == 0
            _require(fits, f"--hidden-size {hidden} is not divisible by {given}")
            _require(heads % self.query_groups == 0, f"{given} is not divisible by {groups}")
        _require(not (self.swiglu and self.squared_relu), "--swiglu and --squared-relu exclude each other")
        others = self.swiglu or self.squared_relu
        _require(not (self.openai_gelu and others), "--openai-gelu excludes --swiglu and --squared-relu")
        self._check_patterns()
        self._check_blocks()
        self._check_rotary()
        self._check_recompute()

    def _check_patterns(self) -> None:
        window = self.window  # reads --window-size
        for name in ("no_rope_freq", "window_attn_skip_freq"):
            given = f"{spelling(self, name)} {getattr(self, name)}"
            pattern = _pattern(given, getattr(self, name))
            fits = not isinstance(pattern, tuple) or self.num_layers in (None, len(pattern))
            _require(fits, f"{given} is not a list of --num-layers {self.num_layers} numbers")
        skips = f"--window-attn-skip-freq {self.window_attn_skip_freq}"
        _require(self.window_attn_skip_freq is None or window is not None, f"{skips} needs --window-size")
        unrotated = f"--no-rope-freq {self.no_rope_freq}"
        _require(
            self.no_rope_freq is None or self.positions == "rope", f"{unrotated} needs --position-embedding-type rope"
        )

    def _check_blocks(self) -> None:
        check_positive(self, "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
        one_kind = not (self.qk_layernorm and self.qk_layernorm_all_heads)
        _require(one_kind, "--qk-layernorm and --qk-layernorm-all-heads exclude each other")
        rms = self.normalization == "RMSNorm" and not self.apply_layernorm_1p
        _require(not self.qk_layernorm_all_heads or rms, "--qk-layernorm-all-heads needs --normalization RMSNorm alone")

    def _check_rotary(self) -> None:
        percent, factor = self.rotary_percent, self.rope_scaling_factor
        check_positive(self, "rotary_seq_len_interpolation_factor", "rope_scaling_original_length", "yarn_beta_slow")
        check_positive(self, "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_attention_factor")
        kinds = {
            "--use-rope-scaling": self.use_rope_scaling,
            f"--rope-type {self.rope_type}": self.rope_type != "rope",
            f"--rotary-seq-len-interpolation-factor {self.rotary_seq_len_interpolation_factor}": (
                self.rotary_seq_len_interpolation_factor is not None
            ),
        }
        asked = [name for name, there in kinds.items() if there]
        _require(len(asked) < 2, f"{' and '.join(asked)} exclude each other")
        _require(not asked or self.positions == "rope", f"{' '.join(asked)} needs --position-embedding-type rope")
        scale = self.rotary_scaling_factor
        scaled = f"--rotary-scaling-factor {scale}"
        _require(1.0 <= scale < math.inf, f"{scaled} is not a number from 1 on")
        _require(scale == 1.0 or self.rope_type != "rope", f"{scaled} needs --rope-type yarn or dynamic")
        for name in (
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_attention_factor",
        ):
            given = f"{spelling(self, name)} {getattr(self, name)}"
            default = type(self).__dataclass_fields__[name].default
            _require(getattr(self, name) == default or self.rope_type == "yarn", f"{given} needs --rope-type yarn")
        known = self.rope_type != "dynamic" or self.max_position_embeddings is not None
        _require(known, "--rope-type dynamic needs --max-position-embeddings")
        _require(0.0 < percent <= 1.0, f"--rotary-percent {percent} is not in (0, 1]")
        _require(factor == 8.0 or self.use_rope_scaling, f"--rope-scaling-factor {factor} needs --use-rope-scaling")
        if self.positions != "rope":
            return
        _require(1.0 <= factor < math.inf, f"--rope-scaling-factor {factor} is not a number from 1 on")
        if self.kv_channels is None and None in (self.hidden_size, self.num_attention_heads):
            return
        rotated = int(self.head_size * percent)
        given = f"--rotary-percent {percent} of {self.head_size} channels per head is {rotated}"
        _require(rotated % 2 == 0 and rotated > 0, f"{given}, which is not a positive even number")

    def _check_recompute(self) -> None:
        method, count = self.recompute_method, self.recompute_num_layers
        modules = f"--recompute-modules {' '.join(self.recompute_modules or ())}"
        selects = self.recompute_modules is None or self.recompute == "selective"
        _require(selects, f"{modules} needs --recompute-granularity selective")
        given = f"--recompute-num-layers {count}"
        if self.recompute != "full":
            need = "--recompute-method and --recompute-num-layers need --recompute-granularity full"
            _require(method is None and count is None, need)
        elif method == "block":
            _require(count is not None, "--recompute-method block needs --recompute-num-layers")
            assert count is not None
            check_positive(self, "recompute_num_layers")
            known = self.num_layers is not None
            _require(not known or count <= self.layers, f"{given} is not between 1 and --num-layers {self.num_layers}")
        else:
            _require(count in (None, 1), f"{given}: --recompute-method uniform recomputes layer by layer here (1)")

    # ---- what follows from the fields -------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        return _given("--num-layers", self.num_layers)

    @property
    def hidden(self) -> int:
        return _given("--hidden-size", self.hidden_size)

    @property
    def heads(self) -> int:
        return _given("--num-attention-heads", self.num_attention_heads)

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 4 * self.hidden * 2 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden

    @property
    def head_size(self) -> int:
        return self.kv_channels if self.kv_channels is not None else self.hidden // self.heads

    @property
    def query_groups(self) -> int:
        """Key and value heads: `heads` for plain multi-head attention."""
        return self.num_query_groups if self.group_query_attention else self.heads

    @property
    def positions(self) -> Literal["learned_absolute", "rope", "none"]:
        return "rope" if self.use_rotary_position_embeddings else self.position_embedding_type

    @property
    def rope_scaling(self) -> float | None:
        """By how much the lowest rotary frequencies are slowed down; None for not at all."""
        return self.rope_scaling_factor if self.use_rope_scaling else None

    @property
    def window(self) -> int | None:
        """Tokens that a token may look at, its own and those before it; None for all."""
        if self.window_size is None:
            return None
        sides = re.fullmatch(r"\(?(-1|\d+), *0\)?", self.window_size)
        _require(sides is not None, f"--window-size {self.window_size} is not LEFT,0, with LEFT -1 for all tokens")
        assert sides is not None
        return None if sides[1] == "-1" else int(sides[1]) + 1

    def has_window(self, layer: int) -> bool:
        """True if attention of layer `layer`, counted from 0, looks back over the window alone."""
        pattern = _pattern("--window-attn-skip-freq", self.window_attn_skip_freq)
        return self.window is not None and (pattern is None or not _marked(pattern, layer, others=True))

    def rotates(self, layer: int) -> bool:
        """True if layer `layer`, counted from 0, rotates queries and keys."""
        pattern = _pattern("--no-rope-freq", self.no_rope_freq)
        return self.positions == "rope" and (pattern is None or not _marked(pattern, layer))

    @property
    def attention_span(self) -> tuple[int | None, ...]:
        """Tokens that a token of each layer may look at; None for all."""
        return tuple(self.window if self.has_window(layer) else None for layer in range(self.layers))

    @property
    def unrotated(self) -> tuple[int, ...]:
        """Layers without rotary positions, counted from 0."""
        return tuple(layer for layer in range(self.layers) if self.positions == "rope" and not self.rotates(layer))

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def linear_bias(self) -> bool:
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        return self.linear_bias or self.add_qkv_bias

    @property
    def recompute(self) -> Literal["full", "selective"] | None:
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)

    def recomputes(self, module: RecomputeModule) -> bool:
        """True if backward computes the outputs of these modules again."""
        return self.recompute == "selective" and module in (self.recompute_modules or ("layernorm", "mlp_act"))

    def recomputes_layer(self, index: int) -> bool:
        """True if layer `index` keeps only its input and is run again in backward."""
        if self.recompute != "full":
            return False
        return self.recompute_method != "block" or index < (self.recompute_num_layers or self.layers)

    def padded_vocab_size(self, vocab_size: int, tp_size: int) -> int:
        """`vocab_size` rounded up so that every tensor-parallel rank holds the same whole number of blocks."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-vocab_size // multiple) * multiple


def _pattern(given: str, value: str | None) -> int | tuple[int, ...] | None:
    """Read N or a list of 0 and 1, one for each layer; None is no pattern. Raises ValueError naming `given`."""
    if value is None:
        return None
    items = re.fullmatch(r"\[([01](?:, *[01])*)\]", value)
    _require(items is not None or re.fullmatch(r"[1-9]\d*", value) is not None, f"{given} is neither N nor [0,1,...]")
    return tuple(map(int, items[1].split(","))) if items else int(value)


def _marked(pattern: int | tuple[int, ...], layer: int, *, others: bool = False) -> bool:
    """True for every Nth layer, and for a layer with a 1 in the list (`others`: with a 0)."""
    return (layer + 1) % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer]) != others


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} is required")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
