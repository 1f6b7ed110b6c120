"""The tool as a user runs it: a model from outside is generated from, trained on, and goes out again."""

import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import convert_checkpoint
import pytest
import torch
import transformers
from helpers.hf_models import file_tensors, make_llama, save
from helpers.megatron_files import make_weights, write_megatron
from helpers.program import run_forked
from helpers.trained import run_tool

from megazpp.checkpoint.folder import read_tokenizer
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.convert import safetensors_file
from megazpp.data.tokenizer import load_tokenizer
from megazpp.model.config import GPTConfig

GPT = GPTConfig(num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=16, openai_gelu=True)


def generate_there(folder: Path, prompt: str, count: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(model.generate(**ids, do_sample=False, max_new_tokens=count)[0], skip_special_tokens=True)


@pytest.mark.slow
def test_a_model_from_outside_is_generated_from_and_trained_on_and_goes_out_with_its_tokenizer(converted, tmp_path):
    say = ["--prompt", "Call me", "--temperature", "0", "--sample-tokens", "12", "--tensor-model-parallel-size", "2"]
    code, output = run_tool("generate", "--load", converted / "ours", *say, world=2)
    assert code == 0, output
    assert generate_there(converted / "theirs", "Call me", 12) in output
    # fmt: off
    flags = [
        "--load", converted / "ours", "--finetune", "--use-checkpoint-args",
        "--hidden-dropout", "0", "--attention-dropout", "0", "--seq-length", "16", "--micro-batch-size", "2",
        "--train-iters", "2", "--lr", "1e-3", "--text-path", converted / "text.txt", "--split", "1,0,0",
        "--data-cache-path", tmp_path / "cache", "--run-dir", tmp_path / "run", "--save", tmp_path / "save",
        "--tensor-model-parallel-size", "2", "--nproc", "2", "--sample-tokens", "0",
    ]
    # fmt: on
    code, output = run_forked("pretrain_gpt.py", *map(str, flags), folder=tmp_path)
    assert code == 0, output
    out = tmp_path / "out"
    assert convert_checkpoint.main(["--input", f"{tmp_path}/save", "--output", str(out), "--to", "huggingface"]) == 0
    before, after = file_tensors(converted / "theirs"), file_tensors(out)
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in after.items()}
    change = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 1e-4 < change < 1e-2  # two steps of Adam
    assert generate_there(out, "Call me", 3).startswith("Call me")


@pytest.mark.slow
def test_a_checkpoint_of_the_first_run_is_all_that_another_machine_needs(tmp_path):
    """The tokenizer was trained on the shipped text and lay in a cache: neither is there now."""
    # fmt: off
    flags = [
        "@configs/gpt_tiny.args", "--num-layers", "1", "--hidden-size", "32", "--train-iters", "1", "--nproc", "2",
        "--eval-iters", "0", "--sample-tokens", "0", "--data-cache-path", tmp_path / "cache",
        "--run-dir", tmp_path / "run", "--save", tmp_path / "save",
    ]
    # fmt: on
    code, output = run_forked("pretrain_gpt.py", *map(str, flags), folder=tmp_path)
    assert code == 0, output
    shutil.rmtree(tmp_path / "cache")
    there = (tmp_path / "save").rename(tmp_path / "elsewhere")
    (kept,) = there.glob("tokenizer-*")
    say = ("--prompt", "Call me", "--temperature", "0", "--sample-tokens", "3")
    code, output = run_forked("tools/generate.py", "--load", str(there), *say, folder=tmp_path)
    assert code == 0, output
    assert f"note: the tokenizer is that of --load {there}: {kept.name}" in output
    assert not (tmp_path / "cache").exists()
    assert convert_checkpoint.main(["--input", str(there), "--output", str(tmp_path / "out")]) == 0
    ours = load_tokenizer(read_tokenizer(there, kept.name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ours is not None
    assert len(theirs) == ours.vocab_size == 2048
    for text in ("Call me", "  naïve\n🐳 <eod>", "Some years ago--never mind how long\n" * 9):
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert generate_there(tmp_path / "out", "Call me", 3) in output


def test_the_format_is_found_or_said_and_the_iteration_chosen(tmp_path, capsys):
    weights, source = make_weights(GPT), tmp_path / "megatron"
    write_megatron(source, weights, GPT, tp=2)
    flags = ["--input", str(source), "--from", "megatron", "--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]
    assert convert_checkpoint.main([*flags, "--output", str(tmp_path / "ours")]) == 0
    assert "ours holds the model as iteration 100: " in capsys.readouterr().out
    out = ["--input", str(tmp_path / "ours"), "--output", str(tmp_path / "out")]
    assert convert_checkpoint.main([*out, "--ckpt-step", "99"]) == 2
    assert "--ckpt-step 99: " in capsys.readouterr().err
    assert convert_checkpoint.main([*out, "--ckpt-step", "100", "--from", "megazpp"]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["activation_function"]) == (300, 299, "gelu_new")
    assert torch.equal(file_tensors(tmp_path / "out")["transformer.wte.weight"], weights["embedding.word.weight"][:300])


def test_rows_that_were_there_are_the_vocabulary_and_stay(tmp_path, converted):
    """A vocabulary that its makers have padded, 320 rows for 300 tokens, keeps its rows on the way back."""
    source = save(make_llama(vocab_size=320), tmp_path / "theirs")
    shutil.copy(converted / "theirs/tokenizer.json", source)
    for name, place in (("theirs", "ours"), ("ours", "back")):
        assert convert_checkpoint.main(["--input", str(tmp_path / name), "--output", str(tmp_path / place)]) == 0
    assert json.loads((tmp_path / "ours/iter_0000000/run.json").read_text())["vocab_size"] == 320
    assert len(file_tensors(tmp_path / "back")["model.embed_tokens.weight"]) == 320


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def index_of(text: str) -> Any:
    return lambda f: (f / "model.safetensors.index.json").write_text(text)


# What is done to a copy of theirs/ or ours/, the flags, and what is said.
# fmt: off
BAD: dict[str, tuple[str, Any, list[str], str]] = {
    "no flags": ("theirs", None, ["--output", "none"], r"--input\b.*"),
    "full output": ("theirs", None, ["--output", "/usr"], "is not empty"),
    "missing folder": ("theirs", shutil.rmtree, [], "--input .* does not exist"),
    "empty folder": ("theirs", lambda f: (shutil.rmtree(f), f.mkdir()), [], "is neither a Hugging Face model"),
    "no config": ("theirs", lambda f: (f / "config.json").unlink(), ["--from", "huggingface"], "config.json is miss"),
    "binary config": ("theirs", lambda f: (f / "config.json").write_bytes(bytes(range(256))), [], "is no JSON"),
    "no weights": ("theirs", lambda f: (f / "model.safetensors").unlink(), [], "model.safetensors is missing"),
    "pickled weights": (
        "theirs", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), [], "only safetensors are read"
    ),
    "cut weights": ("theirs", lambda f: truncate(f / "model.safetensors"), [], "is damaged or no safetensors file"),
    "no index": ("theirs", index_of('{"weight_map": 3}'), [], "no weight_map"),
    "index to nothing": ("theirs", index_of('{"weight_map": {"a": "b"}}'), [], "b is missing"),
    "damaged tokenizer": ("theirs", lambda f: truncate(f / "tokenizer.json"), [], "is not a usable tokenizer.json"),
    "out to out": ("theirs", None, ["--to", "huggingface"], "--from huggingface --to huggingface: one of the two"),
    "an iteration": ("theirs", None, ["--ckpt-step", "3"], "is one model, without iterations"),
    "wrong format": ("theirs", None, ["--from", "megatron"], "has neither mp_rank_00 nor latest_checkpointed"),
    "cut checkpoint": ("ours", lambda f: truncate(f / "iter_0000000/__0_3.distcp"), [], "__0_3.distcp is damaged"),
    "no record": ("ours", lambda f: (f / "iter_0000000/run.json").unlink(), ["--from", "megazpp"], "run.json cannot"),
    "tokenizer": ("ours", None, ["--tokenizer-type", "NullTokenizer"], "the tokenizer has 257 tokens, that of .* 300"),
    "flags": ("ours", None, ["--to", "megazpp"], "--from megazpp --to megazpp: one of the two"),
}
# fmt: on


def test_bad_input_gives_one_line_and_writes_nothing(converted, tmp_path, capsys):
    source, output = tmp_path / "source", tmp_path / "output"
    for case, (kind, spoil, flags, message) in BAD.items():
        shutil.copytree(converted / kind, source)
        if spoil is not None:
            spoil(source)
        given = ["--output", str(output), *flags] + (["--input", str(source)] if case != "no flags" else [])
        assert convert_checkpoint.main(given) == 2, case
        *notes, error = capsys.readouterr().err.splitlines()
        assert re.fullmatch(f"convert_checkpoint.py: error: .*{message}.*", error), (case, error)
        assert len(notes) <= 1, notes
        assert sorted(entry.name for entry in tmp_path.iterdir()) == (["source"] if source.exists() else []), case
        shutil.rmtree(source, ignore_errors=True)


def test_what_ends_half_way_leaves_nothing(converted, tmp_path, monkeypatch, capsys):
    read = torch.Tensor.contiguous
    full = OSError(28, "No space left on device")
    for source, failure, said in (("theirs", full, "No space left"), ("ours", KeyboardInterrupt(), "interrupted")):
        left = iter(range(5))

        def fail(*args: Any, left: Any = left, failure: BaseException = failure, **kwargs: Any) -> torch.Tensor:
            if next(left, None) is None:
                raise failure
            return read(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "contiguous", fail)
        assert convert_checkpoint.main(["--input", str(converted / source), "--output", str(tmp_path / "output")]) != 0
        assert said in capsys.readouterr().err.splitlines()[-1]
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "module", "name", "limit"),
    [("theirs", safetensors_file, "_read", 4), ("ours", SafeReader, "read_whole", 2)],
)
def test_few_tensors_are_in_memory_at_a_time(source, module, name, limit, converted, tmp_path, monkeypatch):
    """At most what makes one of ours (queries, keys and values), and the one before that a variable still names."""
    buffers, counts, read = [], [], getattr(module, name)

    def counted(*args: Any) -> torch.Tensor:
        array = read(*args).numpy().copy()  # lives as long as anything looks at its bytes
        buffers.append(weakref.ref(array))
        counts.append(sum(buffer() is not None for buffer in buffers))
        return torch.from_numpy(array)

    monkeypatch.setattr(module, name, counted)
    assert convert_checkpoint.main(["--input", str(converted / source), "--output", str(tmp_path / "output")]) == 0
    assert len(counts) >= 21
    assert max(counts) <= limit
