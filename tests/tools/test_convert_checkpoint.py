"""Test tools/convert_checkpoint.py: import a model, generate from it, train it, and export it."""

import itertools
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
from helpers.hf_models import file_tensors
from helpers.megatron_files import make_weights, write_megatron
from helpers.pretrain import Home
from helpers.program import run_forked
from helpers.tool import run_tool

from megazpp.checkpoint.folder import read_tokenizer
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.convert import safetensors_file
from megazpp.data.tokenizer import load_tokenizer
from megazpp.model.config import GPTConfig

BRIEF = "--sample-tokens 0 --eval-iters 0"


def convert(source: Path, output: Path, *flags: str) -> int:
    return convert_checkpoint.main(["--input", str(source), "--output", str(output), *flags])


def generate_there(folder: Path, prompt: str, count: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(model.generate(**ids, do_sample=False, max_new_tokens=count)[0], skip_special_tokens=True)


@pytest.mark.slow
def test_imported_model_generates_trains_and_exports_with_its_tokenizer(converted, tmp_path):
    theirs, ours, out = converted / "theirs", converted / "ours", tmp_path / "out"
    say = ["--prompt", "Call me", "--temperature", "0", "--sample-tokens", "12", "--tensor-model-parallel-size", "2"]
    code, output = run_tool("generate", "--load", ours, *say, world=2)
    assert code == 0, output
    assert generate_there(theirs, "Call me", 12) in output
    flags = "--finetune --use-checkpoint-args --hidden-dropout 0 --attention-dropout 0 --seq-length 16 --split 1,0,0"
    flags += f" --micro-batch-size 2 --train-iters 2 --lr 1e-3 --tensor-model-parallel-size 2 {BRIEF}"
    places = ["--load", str(ours), "--save", str(tmp_path / "save"), "--text-path", str(converted / "text.txt")]
    Home(tmp_path).pretrain(*flags.split(), *places, run="run")
    assert convert(tmp_path / "save", out, "--to", "huggingface") == 0
    before, after = file_tensors(theirs), file_tensors(out)
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in after.items()}
    change = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 1e-4 < change < 1e-2  # two steps of Adam change a weight by up to about 2 x --lr 1e-3
    assert generate_there(out, "Call me", 3).startswith("Call me")


@pytest.mark.slow
def test_checkpoint_of_the_first_run_works_on_another_machine(tmp_path):
    """Move a checkpoint to another place, as to another machine, and generate from it and export it.

    The run's tokenizer was trained on the shipped text and cached. The cache is removed, so the copy of the tokenizer
    beside the checkpoint must suffice.
    """
    flags = f"@configs/gpt_tiny.args --num-layers 1 --hidden-size 32 --train-iters 1 --save {tmp_path}/save {BRIEF}"
    Home(tmp_path).pretrain(*flags.split(), run="run")
    shutil.rmtree(tmp_path / "cache")
    there = (tmp_path / "save").rename(tmp_path / "elsewhere")
    (kept,) = there.glob("tokenizer-*")
    say = ("--prompt", "Call me", "--temperature", "0", "--sample-tokens", "3")
    code, output = run_forked("tools/generate.py", "--load", str(there), *say, folder=tmp_path)
    assert code == 0, output
    assert f"note: using the tokenizer of --load {there}: {kept.name}" in output
    assert not (tmp_path / "cache").exists()
    assert convert(there, tmp_path / "out") == 0
    ours = load_tokenizer(read_tokenizer(there, kept.name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(theirs) == ours.vocab_size == 2048
    for text in ("Call me", "  naïve\n🐳 <eod>", "Some years ago--never mind how long\n" * 9):
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert generate_there(tmp_path / "out", "Call me", 3) in output


def test_source_format_is_detected_or_given_and_iteration_is_chosen(tmp_path, capsys):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}
    config = GPTConfig(**sizes, openai_gelu=True)
    weights, ours, out = make_weights(config), tmp_path / "ours", tmp_path / "out"
    source = write_megatron(tmp_path / "megatron", weights, config, tp=2)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]
    padded = ["--input", str(source), "--output", str(ours), "--model-vocab-size"]
    assert convert_checkpoint.main([*padded, "999"]) == 2
    assert "--model-vocab-size 999: this flag removes the padding" in capsys.readouterr().err
    assert convert_checkpoint.main([*padded, "290"]) == 0
    assert "290 tokens" in capsys.readouterr().out
    shutil.rmtree(ours)
    assert convert(source, ours, "--from", "megatron", *null) == 0
    assert "ours holds the model as iteration 100: " in capsys.readouterr().out
    assert convert(ours, out, "--ckpt-step", "99") == 2
    assert "--ckpt-step 99: " in capsys.readouterr().err
    assert convert(ours, out, "--ckpt-step", "100", "--from", "megazpp") == 0
    found = json.loads((out / "config.json").read_text())
    assert (found["vocab_size"], found["eos_token_id"], found["activation_function"]) == (300, 299, "gelu_new")
    assert torch.equal(file_tensors(out)["transformer.wte.weight"], weights["embedding.word.weight"][:300])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def index_alone(folder: Path, text: str) -> None:
    """Replace the weights in `folder` by a shard index with the content `text`."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


# each entry: folder to copy, change of the copy (None for no change), flags, pattern of the expected error
BAD: list[tuple[str, Any, str, str]] = [
    ("theirs", None, "--output /usr", "is not empty"),
    ("theirs", shutil.rmtree, "", "--input .* does not exist"),
    ("theirs", lambda f: (shutil.rmtree(f), f.mkdir()), "", "is neither a Hugging Face model"),
    ("theirs", lambda f: (f / "config.json").unlink(), "--from huggingface", "config.json is miss"),
    ("theirs", lambda f: (f / "config.json").write_bytes(bytes(range(256))), "", "is not JSON"),
    ("theirs", lambda f: (f / "model.safetensors").unlink(), "", "model.safetensors is missing"),
    ("theirs", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "", "is damaged or contains more"),
    ("theirs", lambda f: truncate(f / "model.safetensors"), "", "is damaged or no safetensors file"),
    ("theirs", lambda f: index_alone(f, '{"weight_map": 3}'), "", "no weight_map"),
    ("theirs", lambda f: index_alone(f, '{"weight_map": {"a": "b"}}'), "", "b is missing"),
    ("theirs", lambda f: truncate(f / "tokenizer.json"), "", "transformers cannot read the tokenizer"),
    ("theirs", None, "--to huggingface", "--from huggingface --to huggingface: exactly one of the two"),
    ("theirs", None, "--ckpt-step 3", "is a single model without iterations"),
    ("theirs", None, "--from megatron", "has neither mp_rank_00 nor latest_checkpointed"),
    ("ours", lambda f: truncate(f / "iter_0000000/__0_3.distcp"), "", "__0_3.distcp is damaged"),
    ("ours", lambda f: (f / "iter_0000000/run.json").unlink(), "--from megazpp", "run.json cannot"),
    ("ours", None, "--tokenizer-type NullTokenizer", "the tokenizer has 257 tokens, but .* 300"),
    ("ours", None, "--model-vocab-size 290", "--model-vocab-size 290: .* 300 rows, none of which is padding"),
    ("theirs", None, "--model-vocab-size 290", "--model-vocab-size 290: .* 300 rows, none of which is padding"),
]
# fmt: on


def test_bad_input_gives_a_one_line_error_and_writes_nothing(converted, tmp_path, capsys):
    source = tmp_path / "source"
    for kind, spoil, flags, message in BAD:
        shutil.copytree(converted / kind, source)
        if spoil is not None:
            spoil(source)
        assert convert(source, tmp_path / "output", *flags.split()) == 2, message
        *notes, error = capsys.readouterr().err.splitlines()
        assert re.fullmatch(f"convert_checkpoint.py: error: .*{message}.*", error), (message, error)
        assert len(notes) <= 1, notes
        assert [entry.name for entry in tmp_path.iterdir()] == (["source"] if source.exists() else []), message
        shutil.rmtree(source, ignore_errors=True)


def test_interrupted_conversion_leaves_no_output(converted, tmp_path, monkeypatch, capsys):
    read, calls = torch.Tensor.contiguous, itertools.count(1)

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) % 6 == 0:
            raise failures[source]
        return read(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "contiguous", fail)
    failures = {"theirs": OSError(28, "No space left on device"), "ours": KeyboardInterrupt()}
    for source, said in (("theirs", "No space left"), ("ours", "interrupted")):
        assert convert(converted / source, tmp_path / "output") != 0
        assert said in capsys.readouterr().err.splitlines()[-1]
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "module", "name", "limit"),
    [("theirs", safetensors_file, "_read", 4), ("ours", SafeReader, "read_whole", 2)],
)
def test_conversion_keeps_few_tensors_in_memory(source, module, name, limit, converted, tmp_path, monkeypatch):
    """Count the source tensors in memory during a conversion.

    At most the sources of two target tensors may be in memory: of the current one (queries, keys, values), and of the
    previous one.
    """
    buffers, counts, read = [], [], getattr(module, name)

    def counted(*args: Any) -> torch.Tensor:
        # numpy frees this copy together with its last view, so the weak reference below shows whether it is in memory
        array = read(*args).numpy().copy()
        buffers.append(weakref.ref(array))
        counts.append(sum(buffer() is not None for buffer in buffers))
        return torch.from_numpy(array)

    monkeypatch.setattr(module, name, counted)
    assert convert(converted / source, tmp_path / "output") == 0
    assert len(counts) >= 17
    assert max(counts) <= limit
