"""Test tools/generate.py: texts are equal for 1 and 2 tp ranks, and for packed weights in memory and on disk."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import convert_checkpoint
import pytest
from generate import GenerateConfig, Starts, read_prompts
from helpers.fork_python import forked_python
from helpers.hf_models import make_llama, save
from helpers.program import ROOT, run_program
from helpers.refusals import not_refused
from helpers.tiers import nightly, slow
from helpers.tool import run_tool

from megazpp.data.tokenizer import ByteTokenizer
from megazpp.inference.config import SampleConfig

PROMPTS = ["Call me", "S", "Some years ago"]
GREEDY = ["--temperature", 0]


BREAK = """
def continue_texts(*_, **__):
    raise ValueError("internal")
generate.continue_texts = continue_texts
raise SystemExit(generate.main())
"""


def run(load: Path, *flags: object, world: int = 1) -> str:
    code, output = run_tool("generate", "--load", load, *flags, "--tensor-model-parallel-size", world, world=world)
    assert code == 0, output
    return output


def texts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(tuple(PROMPTS))]


@pytest.fixture
def load(converted) -> Path:
    return converted / "ours"


@pytest.mark.slow
def test_texts_are_equal_for_1_and_2_tp_ranks_and_any_batch_size(load, tmp_path):
    alone = run(load, "--prompt", *PROMPTS, *GREEDY, "--sample-tokens", 25)
    assert re.search(r"with the cache: 75 tokens in .* s, then \S+ tokens/s", alone)
    assert len(texts(alone)) == 3
    # an empty line in a file of prompts is no prompt
    (tmp_path / "prompts").write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]))
    from_file = ["--prompt-file", tmp_path / "prompts", "--sample-tokens", 25, "--prompts-at-once"]
    split = run(load, *from_file, 2, *GREEDY, world=2)
    assert texts(split) == texts(alone)
    # three prompts with --prompts-at-once 2 are two batches, and the program prints this line for each batch
    assert split.count("with the cache: ") == 2
    assert split.count("loading weights") == 1
    drawn = [texts(run(load, *from_file, size, "--seed", 5)) for size in (1, 2, 3)]
    assert drawn[0] == drawn[1] == drawn[2] != texts(alone)
    assert texts(run(load, *from_file, 2, "--seed", 6)) != drawn[0]
    # an empty prompt: the text is generated without a beginning
    empty = run(load, "--prompt", "", *GREEDY, "--sample-tokens", 5)
    assert "with the cache: 5 tokens in" in empty


def peak_bytes(load: Path, *flags: str) -> int:
    """Run tools/generate.py with a checkpoint in a process of its own. Return the peak memory in bytes."""
    tool = [sys.executable, "tools/generate.py", "--load", str(load), "--prompt", "a", "--sample-tokens", "3", *flags]
    measure = f"subprocess.run({tool}, check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    code, output = run_program("-c", f"import resource, subprocess; {measure}", folder=load)
    assert code == 0, output
    return 1024 * int(output.split()[-1])


@pytest.mark.slow
def test_internal_error_has_a_traceback_and_a_users_mistake_has_none(load, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(f"import sys\nsys.path.append({str(ROOT / 'tools')!r})\nimport generate\n{BREAK}")
    for prompt, status, said in (("a", 1, "ValueError: internal\n"), ("a" * 300, 2, "error: prompt 1 has 300 tokens")):
        (tmp_path / "prompts").write_text(prompt)
        script = f"{forked_python()} {broken} --load {load} --sample-tokens 3 < {tmp_path}/prompts"
        code, output = run_program("-c", script, folder=tmp_path, python="sh")
        assert (code, said in output, "Traceback" in output) == (status, True, status == 1), output


@pytest.mark.slow
def test_weights_are_in_memory_once_in_the_compute_dtype(tmp_path):
    """Compare the peak memory of models with 1 and 9 layers, each with 4.3 million fp32 weights.

    The difference must be the weights in the compute dtype, once.
    """
    for layers in (1, 9):
        model = make_llama(vocab_size=300, hidden_size=512, intermediate_size=2304, num_hidden_layers=layers)
        places = ["--input", str(save(model, tmp_path / f"hf{layers}")), "--output", str(tmp_path / str(layers))]
        assert convert_checkpoint.main([*places, "--tokenizer-type", "NullTokenizer", "--vocab-size", "299"]) == 0
    small = peak_bytes(tmp_path / "1", "--no-bf16")
    for flags, num_bytes in (("--bf16", 2), ("--no-bf16 --tensor-model-parallel-size 2", 2)):
        assert peak_bytes(tmp_path / "9", *flags.split()) - small < 1.3 * num_bytes * 8 * 4_325_376, flags


@pytest.mark.slow
def test_damaged_checkpoint_falls_back_to_an_earlier_one_if_asked(load, tmp_path):
    spoilt = shutil.copytree(load, tmp_path / "load")
    (good,) = spoilt.glob("iter_*")
    record = shutil.copytree(good, spoilt / "iter_0000099") / "run.json"
    record.write_text(record.read_text().replace('"iteration": 0', '"iteration": 99'))
    (spoilt / "latest_checkpointed_iteration.txt").write_text("99\n")
    for where in ("device", "host"):
        flags = ["--prompt", PROMPTS[0], *GREEDY, "--sample-tokens", 5, "--weights-device", where]
        code, output = run_tool("generate", "--load", spoilt, *flags)
        assert (code, "run.json is damaged" in output) == (2, True), output
        output = run(spoilt, *flags, "--load-fallback")
        assert f"loading weights from {good}" in output
        assert texts(output) == texts(run(load, *flags))


@pytest.mark.parametrize("tp", [nightly(1), slow(2)])
def test_texts_from_a_disk_store_match_resident_packed_weights(load, tmp_path, tp):
    """Compare texts of packed weights from a store on disk with texts of packed weights in memory.

    With --prompts-at-once auto, as many prompts are continued at once as fit into memory.
    """
    flags = ["--prompt", *PROMPTS * 4, "--prompts-at-once", "auto", *GREEDY, "--sample-tokens", 12, "--weight-bits", 8]
    resident = run(load, *flags, "--weights-device", "device", world=tp)
    disk = [*flags, "--kv-cache-device", "host", "--weights-device", "disk", "--weight-store"]
    first, second = (run(load, *disk, tmp_path, world=tp) for _ in range(2))
    assert " 256 prompts at once" in first
    assert len(texts(resident)) == 12
    assert texts(first) == texts(second) == texts(resident)
    assert (first.count(" wrote "), second.count(" wrote ")) == (1, 0)
    (per_pass,) = re.findall(r"(\d+) bytes are fetched per pass", second)
    # 12 passes for 12 tokens, so all prompts were in one batch
    assert f" 12 passes fetched {12 * int(per_pass)} bytes; " in second
    assert len(list(tmp_path.glob("*.weights"))) == tp
    # If the store cannot be written, the error must name the flag --weight-store.
    code, output = run_tool("generate", "--load", load, *disk, "/proc/x", "--tensor-model-parallel-size", tp, world=tp)
    assert code == 2
    assert "--weight-store: cannot write /proc/x/" in output


ASKED = [{"role": "user", "content": "Who?"}]
TALK = [{"role": "system", "content": "Be brief."}, *ASKED]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ tone }}\n{% endfor %}{{ tools }}assistant:"


def starts(prompts: list[Any], *, length: int = 64, tokens: int = 8, **flags: Any) -> tuple[list[str], list[str]]:
    """Return for each prompt the text that generation would continue, and the notes in the log.

    The tokenizer encodes bytes.
    """
    sample = SampleConfig(sample_tokens=tokens)
    config: Any = SimpleNamespace(data=SimpleNamespace(seq_length=length), section=lambda kind: sample)
    notes, tokenizer = list[str](), ByteTokenizer()
    made = Starts(tokenizer, config, GenerateConfig(**flags), notes.append)
    return [bytes(each for each in made.make(prompt).ids if each < 256).decode() for prompt in prompts], notes


def test_chat_renders_prompts_and_messages_with_record_fields(tmp_path):
    (tmp_path / "t.jinja").write_text(CHAT_TEMPLATE)
    chat = {"chat": True, "chat_template": str(tmp_path / "t.jinja")}
    rows: list[tuple[Any, dict[str, Any], str]] = [
        ("Who?", {}, "user: Who?\nNoneassistant:"),
        ({"prompt": "Who?"}, {}, "user: Who?\nNoneassistant:"),
        ({"prompt": ASKED}, {"system_prompt": "Hm."}, "system: Hm.\nuser: Who?\nNoneassistant:"),
        ({"messages": TALK}, {"system_prompt": "Hm."}, "system: Be brief.\nuser: Who?\nNoneassistant:"),
        ("Who?", {"chat_template_kwargs": '{"tone": "!"}'}, "user: Who?!\nNoneassistant:"),
        ({"prompt": "Who?", "chat_template_kwargs": {"tone": "."}}, {}, "user: Who?.\nNoneassistant:"),
        ({"prompt": "Who?", "tools": '[{"a": 1}]'}, {}, "user: Who?\n[{'a': 1}]assistant:"),
    ]
    for prompt, flags, text in rows:
        assert starts([prompt], **chat, **flags) == ([text], []), prompt
    text, notes = starts(["Who?"], chat=True)
    assert text == ["<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"]
    assert notes == [
        "note: the tokenizer has no chat template, so --chat writes ChatML in plain text (--chat-template)"
    ]


def test_too_long_prompt_is_rejected_or_truncated_with_a_note():
    assert starts(["a" * 56], truncate_prompt=True) == (["a" * 56], [])
    cut = "note: prompt 2 is truncated from 70 tokens to its last 56"
    assert starts(["a", "b" * 14 + "c" * 56], truncate_prompt=True) == (["a", "c" * 56], [cut])
    assert starts(["ab"], tokens=90, truncate_prompt=True)[0] == ["b"]
    assert starts(["a" * 64])[1] == [
        "note: prompt 1 and its continuation exceed the model's 64 tokens, so each token attends only to the latest "
        "ones"
    ]
    rows = [
        (
            ["a" * 65],
            {},
            "prompt 1 has 65 tokens, and the model takes at most 64: --truncate-prompt removes its beginning",
        ),
        (["a" * 60], {"chat": True}, "has 110 tokens, and the model takes at most 64"),
        ([{"prompt": TALK}], {}, "prompt 1: the prompt is a list of messages; add --chat"),
        (["x", {"text": "a"}], {}, "prompt 2: there is no 'prompt', only 'text'"),
        (
            [{"prompt": [{"role": "assistant", "content": "a"}]}],
            {"chat": True},
            "prompt 1: the last message of 'prompt'",
        ),
        (["a"], {"system_prompt": "s"}, "--system-prompt s applies only to messages: add --chat"),
    ]
    assert not not_refused(rows, lambda prompts, flags: starts(prompts, **flags))


def test_json_prompt_files_hold_records(tmp_path):
    lines, whole, bad = tmp_path / "p.jsonl", tmp_path / "p.json", tmp_path / "bad.json"
    lines.write_text('{"prompt": "a"}\n\n{"messages": []}\n{"prompt": "b"}\n')
    assert list(read_prompts((), str(lines), 2)) == [[{"prompt": "a"}, {"messages": []}], [{"prompt": "b"}]]
    for value, records in ((TALK, [[{"prompt": TALK}]]), ({"messages": TALK}, [[{"messages": TALK}]])):
        whole.write_text(json.dumps(value))
        assert list(read_prompts((), str(whole), 2)) == records
    bad.write_text("[")
    lines.write_text("[1]\n")
    rows = [(bad, "bad.json is not JSON: "), (lines, "p.jsonl cannot be read: it is a JSON array")]
    assert not not_refused(rows, lambda path: list(read_prompts((), str(path), 2)))


@pytest.mark.slow
def test_chat_answer_equals_continuation_of_the_rendered_prompt(load, tmp_path):
    (tmp_path / "talk.json").write_text(json.dumps(ASKED))
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    flags = [*GREEDY, "--sample-tokens", 9]
    plain = run(load, "--prompt", "Who?", *flags)
    answer = re.search(r"Who\?(.*)\n", plain)[1]
    chat = ["--chat", "--chat-template", tmp_path / "t.jinja"]
    for given in (["--prompt", "Who?"], ["--prompt-file", tmp_path / "talk.json"]):
        said = run(load, *chat, *given, *flags)
        assert answer in said.splitlines()
    code, output = run_tool("generate", "--load", load, "--prompt", "a" * 300)
    assert (code, "takes at most 64: --truncate-prompt removes its beginning" in output) == (2, True), output
    assert "loading weights" not in output


def test_prompts_come_from_flag_file_stdin_or_terminal(tmp_path, monkeypatch):
    # the file begins with a byte order mark, which is no part of the first prompt
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfa\r\n\nb\nc")
    for given, batches in (
        (["p", "q\nq"], [["p", "q\nq"]]),
        ([""], [[""]]),
        (["p", "", "q"], [["p", ""], ["q"]]),
        ([], [["a", "b"], ["c"]]),
    ):
        assert list(read_prompts(given, str(tmp_path / "prompts"), 2)) == batches
    terminal = io.StringIO("x\ny\n")
    monkeypatch.setattr(sys, "stdin", terminal)
    assert list(read_prompts([], None, 2)) == [["x", "y"]]
    terminal.seek(0)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert next(read_prompts([], None, 2)) == ["x"]
    assert terminal.tell() == 2
