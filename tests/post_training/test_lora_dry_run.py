"""What LoRA sends between nodes, counted by the program on a cluster that is not there, beside all weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.formats import BlockFormat
from megazpp.arguments import parse_run_config
from megazpp.post_training.dry_run import dry_run_lora
from megazpp.post_training.lora import LoraConfig
from megazpp.topology.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-layers", "2", "--seq-length", "32", "--hidden-size", "256", "--num-attention-heads", "4"]


def test_a_small_model_sends_its_adapters_between_nodes_and_its_base_inside():
    flags = [
        "@configs/gpt_tiny.args",
        *SMALL,
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
        "--vocab-size",
        "99",
    ]
    config = parse_run_config([*flags, "--zeropp", "--bf16"], ROOT).config
    dry = dry_run_lora(config, LoraConfig(lora_r=2), Cluster(num_nodes=2, ranks_per_node=2), rank=1)
    adapters, everything = dry.sent("cross")
    assert 0 < adapters < 0.02 * everything
    # two micro-batches: forward every unit, backward the layers and the model's own
    assert dry.adapters["local", "frozen", "all_gather"] == (2 * (3 + 3), 2 * 2 * dry.base_bytes)
    assert dry.base_bytes == pytest.approx(2 * (2 * 12 * 256**2 + 32 * 256 + 128 * 256) / 2, rel=0.02)
    assert dry.trained == 2 * 2 * (256 + 3 * 256)
    assert dry.live_bytes < dry.everything_live_bytes
    packed = dry_run_lora(
        config, LoraConfig(lora_r=2), Cluster(num_nodes=2, ranks_per_node=2), rank=1, fmt=BlockFormat(8, 256)
    )
    assert packed.base_bytes == pytest.approx(dry.base_bytes * 0.504, rel=0.02)
    assert "parameters in adapters" in dry.describe()


@pytest.mark.slow
def test_gpt_1b3_with_rank_8_sends_at_most_one_percent_between_nodes():
    flags = ["@configs/gpt_1b3.args", "--vocab-size", "50257", "--global-batch-size", "64", "--zeropp"]
    config = parse_run_config(flags, ROOT).config
    dry = dry_run_lora(config, LoraConfig(lora_r=8), Cluster(num_nodes=2, ranks_per_node=8), rank=3)
    adapters, everything = dry.sent("cross")
    assert 0 < adapters < 0.01 * everything
