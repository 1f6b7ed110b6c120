"""Test that every flag that a message or a help text names is defined by one of this project's programs."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORD = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
FOREIGN = {
    "--bind": "mount",
    "--mount": "unshare",
    "--net": "unshare",
    "--wd": "nsenter",
    "--gpus-per-task": "srun",
    "--ckpt-format": "Megatron-LM, whose checkpoints are read",
    "--dataset-impl": "Megatron-LM, refused",
    "--keep-sequential-samples": "Megatron-LM, refused",
    "--partitions": "Megatron-LM, refused",
    "--split-sentences": "Megatron-LM, refused",
    "--character_coverage": "SentencePiece, in the text that is replaced",
    "--elements": "benchmark_kernels.py",
    "--flag": "the example of a docstring of the parser",
    "--help": "argparse",
    "--help-all": "read before argparse",
    "--nproc-per-node": "torchrun",
    "--uts": "nsenter and unshare",
}
BEGINNINGS = ("--lr-decay-", "--lr-warmup-", "--lr-wsd-decay-", "--train-", "--no-", "--no-load-", "--no-save-")


def strings_of(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Return the line number and the text of every string in the code; docstrings are left out."""
    nodes = [*nodes]
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


def flags_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the flags that calls of `flag` and `add_argument` define, with their aliases and --no- forms."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            call, dashed = node.value, node.target.id.replace("_", "-")
            if isinstance(call.func, ast.Name) and call.func.id == "flag":
                found |= {f"--{dashed}", f"--no-{dashed}"}
                found |= {text for keyword in call.keywords for _, text in strings_of(ast.walk(keyword.value))}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {text for argument in node.args for _, text in strings_of(ast.walk(argument))}
    return found


def test_every_flag_named_in_a_message_exists_or_is_foreign():
    paths = [path for glob in ("megazpp/**/*.py", "tools/**/*.py", "pretrain_gpt.py") for path in ROOT.glob(glob)]
    nodes = {path: [*ast.walk(ast.parse(path.read_text()))] for path in paths}
    known = {*FOREIGN, *BEGINNINGS}.union(*map(flags_of, nodes.values()))
    assert {"--vocab-size", "--lr", "--no-overlap-grad-reduce", "--override-opt_param-scheduler"} <= known
    unknown = {
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path, found in nodes.items()
        for line, text in strings_of(found)
        for word in WORD.findall(text)
        if word not in known
    }
    assert unknown == set()
