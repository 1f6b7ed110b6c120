"""Test tools/evaluate.py.

The tool repeats the validation of training, reads weights from disk, and agrees with transformers.
"""

from dataclasses import replace

import convert_checkpoint
import evaluate
import pytest
import torch
import transformers
from helpers.hf_models import file_tensors, make_llama, save, write_llama_tokenizer
from helpers.pretrain import Run
from helpers.program import run_forked
from helpers.tool import run_tool

from megazpp.inference import on_checkpoint
from megazpp.parallel.launch import detect_rank_info
from megazpp.parallel.store import RankInfo


def losses(output: str) -> list[str]:
    """Return the lines of `output` with the losses on the validation and test sets."""
    return [line for line in output.splitlines() if line.startswith(" validation loss at iteration 12")]


@pytest.mark.slow
def test_evaluation_repeats_the_final_losses_of_training(trained):
    same = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--nproc", "2"]
    code, output = run_forked("tools/evaluate.py", "--load", f"{trained.folder}/save", *same, folder=trained.folder)
    assert code == 0, output
    assert losses(output) == losses(trained.output)
    assert ["on test set" in line for line in losses(output)] == [False, True]
    assert output.count(" bits per byte: ") == 2


def numbers(trained: Run, *flags: object, world: int = 1) -> tuple[list[str], list[float]]:
    """Evaluate a trained run.

    Return the lines with its losses, and the bits per byte on the validation and test sets.
    """
    code, output = run_tool("evaluate", "--load", trained.folder / "save", *flags, world=world)
    assert code == 0, output
    per_byte = [float(line.split(":")[1].split()[0]) for line in output.splitlines() if "bits per byte:" in line]
    assert len(losses(output)) == len(per_byte) == 2, output
    assert (" passes over the weights fetched " in output) == ("--weight-bits" in flags)
    return losses(output), per_byte


@pytest.mark.slow
def test_weights_on_disk_give_the_losses_of_resident_weights(trained, tmp_path):
    """Compare evaluations with packed weights on disk and in memory.

    Packing to 8 bits changes bits per byte by less than 0.01. Packing to 4 bits changes them by more, but less than
    0.1.
    """
    exact, packed, coarse = (numbers(trained, *flags) for flags in ((), ("--weight-bits", 8), ("--weight-bits", 4)))
    stored = ["--weight-bits", 8, "--weights-device", "disk", "--weight-store", tmp_path]
    assert numbers(trained, *stored) == packed
    _, per_byte = numbers(trained, *stored, "--tensor-model-parallel-size", 2, world=2)
    # matrices that are split over two tp ranks have other quantization blocks
    assert per_byte == pytest.approx(packed[1], abs=0.01)
    fine, more = (max(abs(a - b) for a, b in zip(each[1], exact[1], strict=True)) for each in (packed, coarse))
    assert fine < 0.01
    assert fine < more < 0.1


def test_cpu_uses_one_process_per_tp_rank_unless_nproc_is_given(converted, monkeypatch):
    places: list[RankInfo] = []
    monkeypatch.setattr(on_checkpoint, "start_workers", lambda place, launch, main: places.append(place) or 0)
    monkeypatch.setattr(
        on_checkpoint, "detect_rank_info", lambda config: replace(detect_rank_info(config), started=False)
    )
    monkeypatch.setattr(on_checkpoint, "device_type", lambda: "cpu")
    for flags in ([], ["--tensor-model-parallel-size", "2"], ["--nproc", "3"]):
        evaluate.main(["--load", str(converted / "ours"), "--input", str(converted / "text.txt"), *flags])
    assert [place.world_size for place in places] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("more_rows", [5, -1])
def test_imported_model_has_the_loss_of_transformers_for_any_row_count(more_rows, tmp_path):
    """Evaluate a model whose embedding has more or fewer rows than the tokenizer has ids; compare with transformers.

    Logits are near -35, so an omitted or added row would change the loss. The text begins with <s>.
    """
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    text = "Call me Ishmael. Some years ago never mind how long precisely having little or no money\n"
    write_llama_tokenizer(theirs, text, pad_token="[PAD]")
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    tokenizer.save_pretrained(theirs)  # saving writes the token [PAD] to tokenizer.json
    model = make_llama(vocab_size=len(tokenizer) + more_rows, max_position_embeddings=64)
    ids = torch.tensor([tokenizer("Call me money")["input_ids"] + [2]])
    with torch.no_grad():  # shifts all logits by about -35: channel 0 of the embedding is the same for all tokens
        model.model.embed_tokens.weight[:, 0] = 30.0
        model.lm_head.weight[:, 0] = -7.0
        expected = float(model(ids, labels=ids).loss)
    save(model, theirs)
    for source, target in ((theirs, ours), (ours, back)):
        assert convert_checkpoint.main(["--input", str(source), "--output", str(target)]) == 0
    kept, given = (file_tensors(folder)["model.embed_tokens.weight"] for folder in (back, theirs))
    assert torch.equal(kept, given)
    assert transformers.AutoTokenizer.from_pretrained(back)("[PAD] me").input_ids == tokenizer("[PAD] me").input_ids

    def evaluated(text: str, tp: int) -> tuple[int, str]:
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n')
        flags = ["--input", tmp_path / "a.jsonl", "--data-cache-path", tmp_path, "--tensor-model-parallel-size", tp]
        return run_tool("evaluate", "--load", ours, *flags, world=tp)

    code, output = evaluated("Call me money", tp=2)
    assert code == 0, output
    assert abs(float(output.split("lm loss value: ")[1].split()[0]) - expected) < 1e-5
    code, output = evaluated("[PAD] money", tp=1)
    assert (code == 0) == (more_rows > 0)
    assert (f"the id {len(tokenizer) - 1}, which is beyond the model's vocabulary of" in output) == (more_rows < 0)
