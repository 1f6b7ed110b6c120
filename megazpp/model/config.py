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
    use_rope_scaling: bool = flag(
        False, "slow down low rotary frequencies as Llama 3.1 does, for more than 8192 tokens"
    )
    rope_scaling_factor: float = flag(8.0, "how much slower the lowest frequencies are with --use-rope-scaling")
    window_size: str | None = flag(
        None,
        "tokens before and after its own that a token may look at; samples beyond the window are refused",
        metavar="LEFT,0",
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this x tensor-parallel size")
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "which norm")
    norm_epsilon: float = flag(1e-5, "added to the variance inside the norms", aliases=("--layernorm-epsilon",))
    qk_layernorm: bool = flag(False, "normalise queries and keys, each head by itself, before they are rotated")
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
        _ = self.window  # reads --window-size
        self._check_rotary()
        self._check_recompute()

    def _check_rotary(self) -> None:
        percent, factor = self.rotary_percent, self.rope_scaling_factor
        _require(0.0 < percent <= 1.0, f"--rotary-percent {percent} is not in (0, 1]")
        _require(factor == 8.0 or self.use_rope_scaling, f"--rope-scaling-factor {factor} needs --use-rope-scaling")
        if self.positions != "rope":
            _require(not self.use_rope_scaling, "--use-rope-scaling needs --position-embedding-type rope")
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


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"{name} is required")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
