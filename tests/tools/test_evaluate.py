"""The tool as a user runs it: the training's own validation again, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import convert_checkpoint
import evaluate
import pytest
import torch
import transformers
from helpers.hf_models import file_tensors, make_llama, save, write_llama_tokenizer
from helpers.program import run_forked
from helpers.trained import Trained

from megazpp.base import run
from megazpp.base.run import Job


@pytest.mark.slow
def test_the_numbers_are_those_that_the_training_ended_with(trained: Trained):
    same = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--nproc", "2"]
    code, output = run_forked("tools/evaluate.py", "--load", str(trained.load), *same, folder=trained.home)
    assert code == 0, output
    lines = [line for line in trained.output.splitlines() if line.startswith(" validation loss at iteration 12")]
    assert len(lines) == 2
    assert "on test set" in lines[1]
    for line in lines:
        assert output.count(line) == 1, f"{line!r} in\n{output}"
    assert output.count(" bits per byte: ") == 2


def numbers(trained: Trained, *flags: str) -> tuple[list[str], list[float]]:
    """The lines of losses, and bits per byte on both held-out sets."""
    code, output = run_forked("tools/evaluate.py", "--load", str(trained.load), *flags, folder=trained.home)
    assert code == 0, output
    losses = [line for line in output.splitlines() if line.startswith(" validation loss at iteration 12")]
    per_byte = [float(line.split(":")[1].split()[0]) for line in output.splitlines() if "bits per byte:" in line]
    assert len(losses) == len(per_byte) == 2, output
    assert (" passes over the weights fetched " in output) == ("--weight-bits" in flags)
    return losses, per_byte


@pytest.mark.slow
def test_weights_on_disk_give_the_losses_of_resident_ones_in_the_same_bits(trained: Trained, tmp_path: Path):
    """8 bits change a byte's share by little, 4 bits by more, none by much."""
    _, exact = numbers(trained)
    off = {}
    for bits in ("8", "4"):
        packed = ["--weight-bits", bits]
        stored = ["--weights-on", "disk", "--weight-store", str(tmp_path / bits)]
        resident, per_byte = numbers(trained, *packed)
        assert numbers(trained, *packed, *stored) == (resident, per_byte)
        assert numbers(trained, *packed, *stored, "--tensor-model-parallel-size", "1", "--nproc", "1")[1] == per_byte
        off[bits] = max(abs(one - other) for one, other in zip(per_byte, exact, strict=True))
    assert off["8"] < 0.01
    assert off["8"] < off["4"] < 0.1


def test_a_cpu_has_one_process_per_tensor_parallel_rank_unless_nproc_says_more(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    jobs: list[Job] = []
    monkeypatch.setattr(run, "run_on_ranks", lambda prepare: jobs.append(prepare()))
    monkeypatch.setattr(run, "device_type", lambda: "cpu")
    for flags in ([], ["--tensor-model-parallel-size", "2"], ["--nproc", "3"]):
        evaluate.main(["--load", str(trained.load), *flags])
    assert [job.place.world_size for job in jobs] == [1, 2, 3]


def test_what_cannot_be_is_refused_in_one_line(trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    junk = tmp_path / "junk.idx"
    junk.write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe junk")
    for flags, message in (
        (("--load", trained.load, "--input", tmp_path / "empty.txt"), "--input empty.txt holds no text"),
        (("--load", trained.load, "--input", tmp_path / "binary.jsonl"), "binary.jsonl, line 1: not UTF-8"),
        ((), "--load is missing: the folder of checkpoints"),
        (("--load", tmp_path), f"--load {tmp_path} has no checkpoint"),
        (("--load", trained.load, "--input", "nowhere"), "--input nowhere is neither a text nor the prefix of"),
        (("--load", trained.load, "--input", tmp_path / "junk"), "junk.bin"),
        (("--load", trained.load, "--eval-iters", 0), "--eval-iters 0: nothing would be evaluated"),
    ):
        assert evaluate.main([str(word) for word in flags]) == 2
        error = capfd.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error
        assert "--text-path" not in error


@pytest.mark.slow
@pytest.mark.parametrize("more_rows", [5, -1])
def test_an_imported_model_has_the_loss_of_transformers_with_more_rows_than_ids_and_with_fewer(
    more_rows: int, tmp_path: Path
):
    """Every row counts, and no other: logits near -35 show a row that is left out or made up. <s> begins the text."""
    text = "Call me Ishmael. Some years ago never mind how long precisely having little or no money\n"
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    write_llama_tokenizer(theirs, text, pad_token="[PAD]")
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    tokenizer.save_pretrained(theirs)  # [PAD] in tokenizer.json
    model = make_llama(vocab_size=len(tokenizer) + more_rows, max_position_embeddings=64)
    with torch.no_grad():  # each logit minus 35: a channel that is the same everywhere is subtracted
        model.model.embed_tokens.weight[:, 0] = 30.0
        model.lm_head.weight[:, 0] = -7.0
    save(model, theirs)
    ids = torch.tensor([tokenizer("Call me money")["input_ids"] + [2]])
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss)
    assert convert_checkpoint.main(["--input", str(theirs), "--output", str(ours)]) == 0
    (tmp_path / "a.jsonl").write_text('{"text": "Call me money"}\n')
    flags = ("--load", str(ours), "--input", str(tmp_path / "a.jsonl"), "--tensor-model-parallel-size", "2")
    code, output = run_forked("tools/evaluate.py", *flags, "--data-cache-path", str(tmp_path / "c"), folder=tmp_path)
    assert code == 0, output
    found = float(output.split("lm loss value: ")[1].split()[0])
    assert abs(found - expected) < 1e-5
    (tmp_path / "b.jsonl").write_text('{"text": "[PAD] money"}\n')
    flags = ("--load", str(ours), "--input", str(tmp_path / "b.jsonl"), "--data-cache-path", str(tmp_path / "c"))
    code, output = run_forked("tools/evaluate.py", *flags, folder=tmp_path)
    assert (code == 0) == (more_rows > 0)
    assert (f"the id {len(tokenizer) - 1}, which the model's vocabulary of" in output) == (more_rows < 0)
    assert convert_checkpoint.main(["--input", str(ours), "--output", str(back)]) == 0
    kept, given = (file_tensors(folder)["model.embed_tokens.weight"] for folder in (back, theirs))
    assert torch.equal(kept, given)
    assert transformers.AutoTokenizer.from_pretrained(back)("[PAD] me").input_ids == tokenizer("[PAD] me").input_ids
