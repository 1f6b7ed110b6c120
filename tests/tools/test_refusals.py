"""Test that tools reject bad input with a one-line error and without changing any file."""

import importlib
import shlex
from pathlib import Path

import pytest
import torch
from emulate_cluster import EmulatedCluster
from helpers.pairs import write_pair
from helpers.refusals import table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

DEFAULTS = {
    "preprocess_data": "--output-prefix x --tokenizer-type NullTokenizer",
    "train_tokenizer": "--output-prefix x --vocab-size 300",
    "plan": "@configs/gpt_tiny.args --vocab-size 512 --nodes 1",
    "benchmark_cluster": "--out x",
}
REFUSED = """
inspect_dataset --tokens 1 | --input is missing
inspect_dataset --input nothing | --input nothing: nothing.idx does not exist
inspect_dataset --input . | . is a folder: give the path of a .bin/.idx pair without .bin
inspect_dataset --input junk | not a Megatron index
inspect_dataset --input a --document 4 | --document 4 does not exist; the documents are 0 to 1
inspect_dataset --input a --tokens -1 | --tokens -1 is negative
inspect_dataset --input large --tokenizer-type NullTokenizer | has the ID 300, but the tokenizer has only 257 tokens
merge_datasets --output-prefix x | --input is missing
merge_datasets --input a | --output-prefix is missing
merge_datasets --input a wide --output-prefix x | a holds uint16 ids, but wide holds int32
merge_datasets --input a none --output-prefix x | --input none: none.idx does not exist
merge_datasets --input empty --output-prefix x | the folder has no .bin or .idx files
merge_datasets --input half --output-prefix x | half/x.idx does not exist
merge_datasets --input modes --output-prefix x | multimodal
merge_datasets --input a --output-prefix a --overwrite | a is one of the inputs
merge_datasets --input a --output-prefix wide | wide.bin exists
preprocess_data --input none.jsonl | --input: none.jsonl does not exist
preprocess_data --input junk.jsonl | junk.jsonl, line 1: not UTF-8
preprocess_data --input empty.jsonl | has no text in the field text
preprocess_data --input a.jsonl --tokenizer-type SentencePieceTokenizer --tokenizer-model y | y does not exist
preprocess_data --input a.jsonl --output-prefix there/x | there is not a directory
preprocess_data --input a.jsonl --json-keys body | a.jsonl, line 1: the field 'body' is missing
preprocess_data --input a.jsonl --json-keys text text | --json-keys text text names a field twice
preprocess_data --input a.jsonl --tokenizer-type none | --tokenizer-model is missing
preprocess_data --input a.jsonl --tokenizer-type none --tokenizer-model plain --append-eod | name one of its tokens by
preprocess_data --input a.jsonl --workers 0 | --workers 0 is not positive
preprocess_data --input a.jsonl --log-interval 0 | --log-interval 0 is not positive
preprocess_data --input a.jsonl --split-sentences | --split-sentences is a Megatron flag that is not supported
preprocess_data --input a.jsonl --dataset-impl lazy | only mmap
preprocess_data --inptu a.jsonl | --inptu is not a flag; did you mean --input?
generate --load x --tokens 9 | --tokens is not a flag; did you mean --eos-token or --sample-tokens?
preprocess_data --input a.jsonl --workers 1025 | --workers 1025 is more than 1024, the limit for processes
train_tokenizer --character-coverage 2 | --character-coverage 2.0 is not a fraction from 0.98 to 1
train_tokenizer --workers 1 | --input is missing: add it (JSON Lines, Parquet or text files
preprocess_data --workers 1 | --input is missing: add it
convert_checkpoint --input x | --output is missing: add it
train_tokenizer --input a.jsonl --output-prefix none/x | none is not a directory
train_tokenizer --input none.jsonl | none.jsonl does not exist
train_tokenizer --input empty.jsonl | holds no text
train_tokenizer --input junk.jsonl | junk.jsonl, line 1: not UTF-8
train_tokenizer --input a.jsonl --vocab-size 0 | --vocab-size 0 is not positive
train_tokenizer --input a.jsonl --workers 2000 | --workers 2000 is more than 1024, SentencePiece's limit
train_tokenizer --input a.jsonl --vocab-size 3000000000 | --vocab-size 3000000000 is more than 2147483647
train_tokenizer --input a.jsonl --output-prefix ./ | --output-prefix ./ is a folder: add the beginning of the files'
merge_datasets --input a --output-prefix there/ | --output-prefix there/ is a folder: add the beginning
preprocess_data --input a.jsonl --output-prefix . | --output-prefix . is a folder: add the beginning
preprocess_data --input a.jsonl --vocab-size 3000000000 | --vocab-size 3000000000 is more than 2147483647
generate --load x --max-new-tokens 9 | --max-new-tokens is not a flag: use --sample-tokens
train_tokenizer --input a.jsonl --output-prefix there | there.model exists (--overwrite replaces it)
convert_checkpoint --output x | --input
report none | none is not a folder
report junk_run | metrics.jsonl: no line is a JSON object
report run --output run/metrics.jsonl | metrics.jsonl exists and is not a report
report run --output none/r.html | none/r.html cannot be written: No such file or directory
evaluate | --load is missing
evaluate --load . | --load . has no checkpoint
evaluate --load ours --input empty.jsonl | --input empty.jsonl contains only empty documents
evaluate --load ours --input junk.jsonl | junk.jsonl, line 1: not UTF-8
evaluate --load ours --input nowhere | --input nowhere is neither a text nor the prefix of
evaluate --load ours --input lone | lone.bin
evaluate --load ours --input a.jsonl --eval-iters 1 | --eval-iters chooses from the data of the training, but all of
evaluate --load ours --input a.jsonl --data-path a | --data-path chooses
evaluate --load ours --input / | --input / is neither a text nor the prefix of
evaluate --load ours --nproc 99999 | --nproc 99999 is more than 1024, the limit for processes
evaluate --load ours --eval-iters 0 | --eval-iters 0
generate | --load is missing
generate --load ours --prompt-file nowhere | --prompt-file nowhere does not exist
generate --load ours --prompt-file blank | --prompt-file blank holds no prompt
generate --load ours --prompt-file junk | --prompt-file junk is not text in UTF-8:
generate --load ours --prompt-file nowhere --prompt x | --sample-prompt and --prompt-file exclude each other
generate --load ours --sample-tokens 0 | --sample-tokens 0 generates nothing
generate --load ours --prompts-at-once 0 | --prompts-at-once 0 is not positive
show_topology | --cluster-file FILE, or --nodes N
show_topology --nodes 2 | no cluster is given
show_topology --nodes 0 --ranks-per-node 2 | --nodes 0 is not positive
show_topology --nodes 2 --cluster-file x.yaml | --cluster-file x.yaml and --nodes 2 both
show_topology --cluster-file nowhere.yaml | --cluster-file nowhere.yaml cannot be read
show_topology --nodes 2 --ranks-per-node 4 --tensor-model-parallel-size 3 | --tensor-model-parallel-size 3
gpu_check --out run | --out run holds the results of another run
gpu_check --out 'a b' | a b has blanks in its path
gpu_check --out new --budget-minutes 0 | --budget-minutes 0.0 is not positive
gpu_check --out new --device cuda | --device cuda: torch finds no GPU
emulate_cluster -- no_such_program.py | give a Python program that exists
benchmark_cluster --rates fast | --rate fast is neither
benchmark_cluster --samples 0 | --samples 0 is not positive
benchmark_cluster --micro-batches 0 | --micro-batches 0 is not positive
benchmark_cluster --num-layers 0 | --num-layers 0 is not positive
benchmark_cluster --nodes 1 --variants zero3 diloco-10 | --diloco-steps 10 requires at least 2 nodes
"""


def make_bad_input(ours: Path) -> None:
    """Write the bad input files that `REFUSED` names into the current folder.

    `ours` is a good checkpoint. The folder gets a link to it, because commands of `REFUSED` load a good checkpoint and
    have another bad flag.
    """
    files = {"junk": b"\xff\xfe", "empty.jsonl": b"", "blank": b"\n\n", "there.model": b"mine", "half/x.bin": b"1"}
    files |= {f"junk{suffix}": b"\xff\xfe junk" for suffix in (".jsonl", ".bin", ".idx")}
    files |= {"lone.idx": bytes(range(256)), "junk_run/metrics.jsonl": b"\x00\xff junk", "run/results.json": b"{}"}
    files |= {"run/metrics.jsonl": b'{"iteration": 1, "lm_loss": 5.0}\n', "a.jsonl": b'{"text": "Call me Ishmael."}\n'}
    files["plain/tokenizer.json"] = Tokenizer(WordLevel({"[UNK]": 0}, "[UNK]")).to_str().encode()  # without eos_token
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    Path("empty").mkdir()
    Path("ours").symlink_to(ours)
    for name, ids, dtype in (("a", [1, 2], "<u2"), ("wide", [1], "<i4"), ("large", [300], "<u2")):
        write_pair(Path(name), [ids, [4]], dtype)
    write_pair(Path("modes"), [[5, 6, 7]])
    with Path("modes.idx").open("ab") as index:
        index.write(b"\x00")


def test_bad_input_is_rejected_in_one_line_and_changes_no_file(converted, run_main, monkeypatch):
    make_bad_input(converted / "ours")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        EmulatedCluster, "__enter__", lambda cluster: pytest.fail("a tool with bad input created an emulated cluster")
    )

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    before = content()
    for command, message in table(REFUSED):
        tool, _, flags = command.partition(" ")
        words = shlex.split(f"{DEFAULTS.get(tool, '')} {flags}")
        code, out, err = run_main(importlib.import_module(tool).main, *words)
        *progress, line = err.splitlines()
        assert code == 2, command
        assert not out or tool == "inspect_dataset", command
        assert not progress or tool == "train_tokenizer", command
        assert line.startswith(f"{tool}.py: error: "), command
        assert message in line
        # the error names the tool's own flag, and not --text-path, which only the library has
        assert "--text-path" not in line, command
        assert content() == before, command


@pytest.mark.parametrize("command", ["report ''", "report run --output=", "coordinate --folder ~no.such.user/a"])
def test_text_that_is_no_path_is_rejected_before_a_folder_is_used(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    tool, *words = shlex.split(command)
    with pytest.raises(SystemExit):
        importlib.import_module(tool).main(words)
    assert ("no such home folder" if "~" in command else "the value is empty: give a path") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
