"""What benchmark_cluster.py compares, and the model it trains: plain data that it and its ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megazpp.model.config import GPTConfig
from megazpp.zero.config import ZeroConfig


class Variant(NamedTuple):
    """One way to train.

    Attributes:
        label: for people.
        zero: None for FSDP2 as it is.
        hsdp: one sharded copy of the model per node.
    """

    label: str
    zero: ZeroConfig | None
    hsdp: bool = False


VARIANTS = {
    "fsdp2": Variant("FSDP2, gloo's collectives", None),
    "zero3": Variant("ZeRO-3, ring", ZeroConfig()),
    "zero3-overlap": Variant("ZeRO-3, ring, overlap", ZeroConfig(overlap_param_gather=True, overlap_grad_reduce=True)),
    "hsdp": Variant("FSDP2 HSDP", ZeroConfig(), hsdp=True),
    "qwz": Variant("+qwZ", ZeroConfig(zero_quantized_weights=True)),
    "hpz": Variant("+hpZ", ZeroConfig(zero_hpz_partition_size="auto")),
    "qgz": Variant("+qgZ", ZeroConfig(zero_quantized_gradients=True)),
    "zeropp": Variant(
        "--zeropp, no overlap", ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False)
    ),
    "zeropp-overlap": Variant("--zeropp", ZeroConfig(zeropp=True)),
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """What the ranks of one job build.

    Attributes:
        tp: tensor-parallel degree.
        variants: keys of VARIANTS.
        hidden_size, num_layers, vocab_size: of the model.
        seq_length, micro_batch_size: tokens of a sample and samples of a rank's micro-batch.
    """

    nodes: int
    ranks_per_node: int
    tp: int
    variants: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=max(self.hidden_size // 64, self.tp),
            max_position_embeddings=self.seq_length,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )


class Order(NamedTuple):
    """One optimizer step of one variant."""

    variant: str
    micro_batches: int
