"""Weight patches: an anchor and what follows it are the weights of the next step, bit for bit."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.program import run_forked
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.small_run import ROOT, SMALL, check
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_step
from safetensors.torch import load_file

from megazpp.checkpoint.record import TrainingProgress
from megazpp.convert.huggingface import choose_architecture
from megazpp.convert.model import OUTPUT, WORDS, held, split_all
from megazpp.convert.patches import WeightPatches
from megazpp.zero.config import PrecisionConfig, ZeroConfig

BF16 = PrecisionConfig(bf16=True)
LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")


def train(case: Case, folder: Path, restart_after: int) -> list[dict[str, torch.Tensor]]:
    """By step the weights as a conversion of a checkpoint in 16 bits has them, as patches are written meanwhile."""
    step, dims = build_step(case)
    expected = []

    def new_patches() -> WeightPatches:
        return WeightPatches(folder, 4, step.model, step.sharding, dims)

    patches = new_patches()
    for index in range(case.steps):
        step(case.batches(index, dims), learning_rate=1e-3, weight_decay=0.01)
        patches.after_step(TrainingProgress(iteration=index + 1), last=False)
        ours = {name: p.full_tensor().detach().bfloat16() for name, p in step.model.named_parameters()}
        ours |= {name: ours[name][: step.model.vocab_size] for name in (WORDS, OUTPUT) if name in ours}
        pieces = choose_architecture(case.model).pieces(case.model)
        theirs = split_all(pieces, {name: held(tensor) for name, tensor in ours.items()})
        expected.append({name: entry.read() for name, entry in theirs.items()})
        if index + 1 == restart_after:
            patches = new_patches()
    return expected


def follow(folder: Path, last: int) -> dict[int, dict[str, np.ndarray]]:
    """By step the bits that come out of the newest anchor and the patches behind it."""
    weights: dict[str, np.ndarray] = {}
    found = {}
    for step in range(1, last + 1):
        anchor, patch = (folder / f"{kind}-{step:06d}.safetensors" for kind in ("anchor", "patch"))
        assert anchor.exists() != patch.exists()
        path = anchor if anchor.exists() else patch
        tensors = load_file(path)
        arrays = {
            name: x.view(torch.int16 if x.element_size() == 2 else x.dtype).numpy() for name, x in tensors.items()
        }
        if path == anchor:
            weights = {name: array.copy() for name, array in arrays.items()}
        for name in {name.rpartition(".")[0] for name in arrays} if path == patch else ():
            assert arrays[f"{name}.indices"].dtype == np.int32
            weights[name].reshape(-1)[arrays[f"{name}.indices"]] = arrays[f"{name}.values"]
        found[step] = {name: array.copy() for name, array in weights.items()}
    return found


CASES: list[Any] = [
    (2, {"nodes": 2, "zero": LOSSLESS, "model": LLAMA_STYLE}),
    slow(4, {"nodes": 2, "tp": 2, "zero": LOSSLESS, "model": GPT2_STYLE, "micro_batches": 2}),
    slow(4, {"tp": 2, "zero": ZeroConfig(), "model": LLAMA_STYLE}),
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_patches_on_an_anchor_are_the_next_weights_bit_for_bit(world, case, tmp_path):
    """And an anchor comes first, every so many iterations, and first again in a run that goes on."""
    expected = ranks(world).run(train, Case(**case, precision=BF16, steps=6), tmp_path, 5)[0]
    found = follow(tmp_path, 6)
    assert sorted(path.stem for path in tmp_path.glob("anchor*")) == ["anchor-000001", "anchor-000004", "anchor-000006"]
    for step, weights in enumerate(expected, 1):
        assert weights.keys() == found[step].keys()
        for name, weight in weights.items():
            assert np.array_equal(weight.contiguous().view(torch.int16).numpy(), found[step][name]), (step, name)


def test_weights_that_no_patch_can_say_are_refused_by_flag():
    def ask(flags: str) -> None:
        check(f"--save-weight-patches patches {flags}", nodes=2, ranks_per_node=2)

    rows = [
        ("", "--save-weight-patches needs --bf16 or --fp16"),
        ("--bf16 --zeropp", "--zero-weight-delta lossless"),
        ("--bf16 --diloco-steps 2", "--diloco-steps 2"),
        ("--bf16 --swiglu", "--swiglu"),
    ]
    assert not_refused(rows, ask) == []


@pytest.mark.slow
def test_a_run_writes_patches_as_flags_say(tmp_path):
    flags = "--bf16 --nproc 1 --save-weight-patches patches --weight-anchor-interval 3 --train-iters 4"
    words = shlex.split(f"{SMALL} {flags} --num-layers 1 --tokenizer-type NullTokenizer --vocab-size 256")
    code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *words, folder=tmp_path, cwd=tmp_path)
    assert code == 0, output
    kinds = sorted(path.stem for path in (tmp_path / "patches").iterdir())
    assert kinds == ["anchor-000001", "anchor-000003", "patch-000002", "patch-000004"]
