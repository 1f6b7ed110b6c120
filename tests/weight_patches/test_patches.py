"""Test weight patches: an anchor file plus the patches after it equals each step's weights, bit for bit."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.program import run_forked
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.small_run import ROOT, SMALL, check
from helpers.tiers import slow
from helpers.training import BIASED_STYLE, GPT2_STYLE, LLAMA_STYLE, Case, build_step
from safetensors.torch import load_file

from megazpp.convert.huggingface import choose_architecture
from megazpp.convert.model import OUTPUT, WORDS, held, split_all
from megazpp.optim.schedule import TrainingProgress
from megazpp.weight_patches.patches import WeightPatches
from megazpp.zero.config import PrecisionConfig, ZeroConfig

LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
GLM = dataclasses.replace(BIASED_STYLE, moe_shared_expert_intermediate_size=20, moe_aux_loss_coeff=0.0)
Bits = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def train(case: Case, folder: Path, restart_after: int) -> list[Bits]:
    """Train and write patches. Return each step's weights as a checkpoint converted to 16 bits holds them."""
    step, dims = build_step(case)
    pieces, expected, patches = choose_architecture(case.model).pieces(case.model), [], None
    for index in range(case.steps):
        if patches is None or index == restart_after:
            patches = WeightPatches(folder, 4, step.model, step.sharding, dims)
        step(case.batches(index, dims), learning_rate=1e-3, weight_decay=0.01)
        patches.write(TrainingProgress(iteration=index + 1))
        ours = {name: p.full_tensor().detach().bfloat16() for name, p in step.model.named_parameters()}
        ours |= {name: buffer.clone() for name, buffer in step.model.named_buffers()}  # fp32, as in transformers
        ours |= {name: ours[name][: step.model.vocab_size] for name in (WORDS, OUTPUT) if name in ours}
        theirs = split_all(pieces, {name: held(tensor) for name, tensor in ours.items()})
        expected.append({name: bits_of(entry.read()) for name, entry in theirs.items()})
    return expected


def follow(folder: Path, steps: int) -> list[Bits]:
    """Return the weights at each step, rebuilt from the newest anchor and the patches after it."""
    weights, found = Bits(), []
    for step in range(1, steps + 1):
        anchor, patch = (folder / f"{kind}-{step:06d}.safetensors" for kind in ("anchor", "patch"))
        assert anchor.exists() != patch.exists()
        if anchor.exists():
            weights = load_file(anchor)
        else:
            changes = load_file(patch)
            for name, weight in weights.items():
                assert changes[f"{name}.indices"].dtype == torch.int32
                weight.view(-1)[changes[f"{name}.indices"]] = changes[f"{name}.values"]
        found.append({name: bits_of(weight).clone() for name, weight in weights.items()})
    return found


CASES: list[Any] = [
    (2, {"nodes": 2, "zero": LOSSLESS, "model": LLAMA_STYLE}),
    slow(4, {"nodes": 2, "tp": 2, "zero": LOSSLESS, "model": GPT2_STYLE, "micro_batches": 2}),
    (2, {"zero": ZeroConfig(), "model": GLM}),
    slow(4, {"tp": 2, "zero": ZeroConfig(), "model": LLAMA_STYLE}),
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_patches_after_an_anchor_rebuild_weights_bit_for_bit(world, case, tmp_path):
    """An anchor is written first, then at a fixed interval, and first again after a restart."""
    expected = ranks(world).run(train, Case(**case, precision=PrecisionConfig(bf16=True), steps=6), tmp_path, 5)[0]
    assert sorted(path.stem for path in tmp_path.glob("anchor*")) == ["anchor-000001", "anchor-000004", "anchor-000006"]
    torch.testing.assert_close(follow(tmp_path, 6), expected, rtol=0, atol=0)


def test_unsupported_weights_are_rejected_by_flag():
    rows = [
        ("", "--save-weight-patches needs --bf16 or --fp16"),
        ("--bf16 --zeropp --zero-weight-delta none", "--zero-weight-delta lossless"),
        ("--bf16 --diloco-steps 2", "--diloco-steps"),
        ("--bf16 --swiglu", "--swiglu"),
    ]
    flags = [(f"--save-weight-patches patches {flags}", message) for flags, message in rows]
    assert not_refused(flags, lambda flags: check(flags, nodes=2, ranks_per_node=2)) == []


@pytest.mark.slow
def test_run_writes_anchors_and_patches_at_the_interval(tmp_path):
    flags = "--bf16 --nproc 1 --save-weight-patches patches --weight-anchor-interval 3 --train-iters 4"
    words = shlex.split(f"{SMALL} {flags} --num-layers 1 --tokenizer-type NullTokenizer --vocab-size 256")
    code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *words, folder=tmp_path, cwd=tmp_path)
    assert code == 0, output
    kinds = sorted(path.stem for path in (tmp_path / "patches").iterdir())
    assert kinds == ["anchor-000001", "anchor-000003", "patch-000002", "patch-000004"]
