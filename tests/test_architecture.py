"""Check the source by reading it: allowed imports, operations that only one file may use, and flags in messages."""

import ast
import graphlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.fork_python import OTHERS_MODULES, forked_python
from helpers.program import run_program
from helpers.tiers import chosen, slow
from mutations import read_changes

from megazpp.features import NEEDS

ROOT = Path(__file__).resolve().parent.parent
LAYERS = """
kernels
base
topology
parallel
tensor_parallel zero
model optim data
checkpoint
training
run
convert diloco drop_in host_states packed_weights report
elastic inference lora weight_patches
planner
post_training
"""  # folders of megazpp/ by layer, one layer per line, the lowest first
LAYER = {f"megazpp.{name}": layer for layer, names in enumerate(LAYERS.strip().splitlines()) for name in names.split()}
COLLECTIVES = re.compile(r"dist\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend|all_to_all)")
NEW_GROUPS = re.compile(r"dist\.(new_group|new_subgroups|split_group)")


class File(NamedTuple):
    """A source file with its syntax tree.

    Attributes:
        name: name of the module.
        text: source text.
        nodes: all nodes of the syntax tree, the module itself first.
        imports: (name of an imported module, node of the import).
    """

    name: str
    text: str
    nodes: list[ast.AST]
    imports: list[tuple[str, ast.AST]]

    @property
    def folder(self) -> str | None:
        return folder(self.name)

    @property
    def top_level(self) -> list[ast.stmt]:
        return self.nodes[0].body


def folder(module: str) -> str | None:
    found = ".".join(module.split(".")[:2])
    return found if found in LAYER else None


def read(path: Path) -> File:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    # a link makes the folder kernels/ the package megazpp.kernels
    name = f"megazpp.{name}" if path.is_relative_to(ROOT / "kernels") else name
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    imports = [(alias.name, node) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports += [(node.module, node) for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return File(name, text, nodes, imports)


@pytest.fixture(scope="module")
def product() -> list[File]:
    globs = ("megazpp/**/*.py", "kernels/**/*.py", "tools/**/*.py", "*.py")
    return [read(path) for glob in globs for path in ROOT.glob(glob)]


@pytest.fixture(scope="module")
def library(product) -> list[File]:
    """Return the source files of the package megazpp, including kernels/, but not pretrain_gpt.py and tools/."""
    return [file for file in product if file.name.startswith("megazpp")]


def test_file_imports_only_from_lower_layers_or_its_own_folder(library):
    assert len(library) > 30
    assert {file.name for file in library if file.folder is None} == {"megazpp", "megazpp.__main__", "megazpp.features"}
    for file in library:
        for target, _ in file.imports:
            if file.folder and target.startswith(("megazpp.", "pretrain_gpt", "tools", "tests")):
                mine, theirs = file.folder, folder(target)
                lower = theirs in LAYER and LAYER[theirs] < LAYER[mine]
                assert lower or theirs == mine, f"{file.name} imports {target}"


def test_import_graph_has_no_cycles(library):
    graph = {file.name: {target for target, _ in file.imports} for file in library}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError if the imports form a cycle


def test_every_folder_above_run_is_listed_as_an_optional_feature():
    above = [name.removeprefix("megazpp.") for name, layer in LAYER.items() if layer > LAYER["megazpp.run"]]
    assert sorted(above) == sorted(NEEDS)


def test_listed_needs_of_each_feature_are_the_features_that_it_imports(library):
    for feature, needed in NEEDS.items():
        files = [file for file in library if file.folder == f"megazpp.{feature}"]
        imported = {folder(target) for file in files for target, _ in file.imports} - {f"megazpp.{feature}"}
        assert set(needed) == {other for other in NEEDS if f"megazpp.{other}" in imported}, feature


# Beginning of a program that a fork server runs in a fork. The fork drops the modules of this checkout that the server
# has imported, so all imports are from the program's folder. It also removes the import finder of an editable install,
# which would find in this checkout a module that the test has deleted.
FORGET = """
import importlib, os, runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
for name in [name for name in sys.modules if name.split(".")[0] in ("megazpp", "pretrain_gpt")]:
    del sys.modules[name]
"""
IMPORT_ALL = """
for name in ("pretrain_gpt", *sys.argv[1:]):
    assert importlib.import_module(name).__file__.startswith(os.getcwd()), name
"""
PRETRAIN = """
sys.argv[0] = "pretrain_gpt.py"
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


def copy_without(features: Iterable[str], copy: Path) -> None:
    """Copy the checkout to `copy` without some optional features.

    The copy lacks their folders, their lines in features.py, and the default --sample- flags in configs/gpt_tiny.args.
    """
    for name in ("configs", "kernels", "megazpp"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", copy)
    for feature in features:
        shutil.rmtree(copy / "megazpp" / feature)
    deleted = tuple(f'    "{feature}": ' for feature in features)
    for path, lines in (("megazpp/features.py", deleted), ("configs/gpt_tiny.args", "--sample-")):
        kept = [text for text in (copy / path).read_text().splitlines() if not text.startswith(lines)]
        (copy / path).write_text("\n".join(kept) + "\n")


def run_in(copy: Path, program: str, *words: str) -> str:
    (copy / "program.py").write_text(FORGET + program)
    python = str(forked_python(*OTHERS_MODULES))
    code, output = run_program(str(copy / "program.py"), *words, folder=copy, cwd=copy, python=python)
    assert code == 0, output
    return output


@pytest.mark.parametrize("feature", chosen({name: name for name in NEEDS}, slow=("lora", "packed_weights")))
def test_all_remaining_modules_import_without_an_optional_feature(feature, library, tmp_path):
    """Import all modules in a copy of the checkout without one feature.

    Features that need the deleted feature stay in the copy, but their modules are not imported.
    """
    disabled = {feature}
    while more := {name for name, needed in NEEDS.items() if disabled & set(needed)} - disabled:
        disabled |= more
    copy_without([feature], tmp_path)
    left = [file.name for file in library if file.folder not in {f"megazpp.{name}" for name in disabled}]
    # the plugin for vLLM imports vLLM, which is not installed
    left = [name for name in left if name != "megazpp.weight_patches.vllm"]
    run_in(tmp_path, IMPORT_ALL, *left)


@pytest.mark.slow
def test_training_saves_and_resumes_without_any_optional_feature(tmp_path):
    copy_without(NEEDS, tmp_path)
    for iterations in (2, 4):
        flags = (
            f"--zeropp --nproc 2 --train-iters 4 --exit-interval {iterations} --eval-iters 1 --save ckpt --load ckpt"
        )
        places = ("--run-dir", "run", "--data-cache-path", "cache")
        shown = run_in(tmp_path, PRETRAIN, *flags.split(), *places)
        assert f"successfully saved checkpoint at iteration {iterations:7d}" in shown
        assert ("successfully loaded checkpoint" in shown) == (iterations == 4)


def test_own_modules_are_imported_at_the_top_of_a_file(library):
    """Two exceptions may import further below: `if TYPE_CHECKING` blocks, and functions in feature.py files.

    The flags of features are parsed before torch is imported, so feature.py must not import torch at its top.
    """
    for file in library:
        blocks = [x for x in file.nodes if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
        allowed = {node for block in blocks for node in block.body}
        lazy = [target for target, node in file.imports if node.col_offset > 0 and node not in allowed]
        ours = [target for target in lazy if target.startswith("megazpp")]
        assert ours == [] or file.name.endswith(".feature"), f"{file.name} imports {ours}"


# For each program that imports torch, a command line with wrong paths, and the error messages about it
WRONG_PATHS = {
    "pretrain_gpt.py": (
        "--tensor-model-parallel-size 3 --text-path nowhere --tokenizer-model no --load no --use-checkpoint-args "
        "--save README.md/a --run-dir README.md --data-cache-path README.md/b --lora-base . no_base",
        [
            "--lora-base no_base does not exist",
            *("--tokenizer-model no does not exist", "--load no has no", "--text-path nowhere does not exist"),
            *("--save: cannot write README.md/a", "--run-dir: cannot write", "--data-cache-path: cannot write"),
        ],
    ),
    "tools/convert_checkpoint.py": (
        "--input nowhere --output x --lora-base no_base",
        ["--input nowhere does not exist", "--lora-base no_base does not exist"],
    ),
    "tools/evaluate.py": ("--load nowhere --input no", ["--input no is neither a text nor the prefix of a .bin/.idx"]),
    "tools/generate.py": (
        "--load . --data-path no --prompt-file nowhere",
        ["--prompt-file nowhere does not exist", "--data-path no: no.idx does not exist"],
    ),
    "tools/post_train.py": (
        "--objective dpo --load no --ref-load nowhere --data-path a --cluster-file nowhere",
        ["--ref-load nowhere does not", "--load no has", "--cluster-file nowhere", "--data-path a: a does not exist"],
    ),
    "tools/show_topology.py": ("--cluster-file nowhere", ["--cluster-file nowhere cannot be read"]),
}


# Runs a program once for each list of flags, and prints (exit status, output) of each run
ANSWERS = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None
_, program, questions = sys.argv
answers = []
for flags in json.loads(questions):
    sys.argv, said = [program, *flags], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as stop:
            answers.append([stop.code, said.getvalue()])
print(json.dumps(answers))
"""


@pytest.mark.parametrize("path", ["pretrain_gpt.py", *(slow(name) for name in WRONG_PATHS if "/" in name)])
def test_flags_and_paths_are_checked_without_torch(path):
    """`import torch` fails in these runs: it takes seconds, but a typo in a flag must be reported at once."""
    flags, messages = WRONG_PATHS[path]
    questions = [["--help"], ["--tokenizer-modell", "2"], flags.split()]
    if path == "pretrain_gpt.py":
        questions += [["--print-config"], ["@configs/gpt_125m.args"]]
        questions += [["--tensor-model-parallel-size", "3", "--text-path", "nowhere"]]
    command = [sys.executable, "-c", ANSWERS, path, json.dumps(questions)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shown, refused, missing, *more = json.loads(found.stdout)
    assert (shown[0], "usage: " in shown[1]) == (0, True), shown
    assert (refused[0], "--tokenizer-model" in refused[1]) == (2, True), refused
    lines = missing[1].splitlines()
    assert (missing[0], len(lines)) == (2, len(messages)), missing
    assert all(any(message in line for line in lines) for message in messages), missing
    if more:
        assert more[0][0] == 0
        assert (more[1][0], "required flags are missing: --data-path and --tokenizer-model" in more[1][1]) == (2, True)
        assert (more[2][0], "--num-attention-heads 4 is not" in more[2][1], "nowhere does" in more[2][1]) == (2, 1, 1)


def test_three_folders_import_fsdp2_and_only_axis_calls_collectives(library):
    fsdp2 = {file.folder for file in library if any("fsdp" in target for target, _ in file.imports)}
    assert fsdp2 == {"megazpp.zero", "megazpp.host_states", "megazpp.drop_in"}
    assert [file.name for file in library if COLLECTIVES.search(file.text)] == ["megazpp.parallel.axis"]
    assert [file.name for file in library if NEW_GROUPS.search(file.text)] == ["megazpp.parallel.dims"]


def test_modules_have_no_mutable_state(library):
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
    for file in library:
        assert not any(isinstance(node, ast.Global) for node in file.nodes), file.name
        for statement in file.top_level:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, mutable):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [ast.unparse(target) for target in targets]
                assert all(name.isupper() or name == "__all__" for name in names), f"{file.name}: {names}"


def test_classes_have_unique_names(product):
    """Check the names of public classes. Private classes, whose names start with an underscore, may share a name."""
    classes = [node for file in product for node in file.top_level if isinstance(node, ast.ClassDef)]
    counts = Counter(node.name for node in classes if not node.name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


# Methods of this project's objects that only torch, transformers, vLLM or Python's file objects call
CALLED_BY_LIBRARIES = {
    *("on_save", "on_train_begin", "post_train"),
    *("_format_action_invocation", "_split_lines"),
    *("lookup_object", "create_stream", "all_gather_inputs"),
    *("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update"),
}


def test_every_function_is_used_outside_tests(product):
    """A function counts as used if its name occurs in an expression or as a string, in any file outside tests/."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    used: set[str] = set()
    for file in product:
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name].append(file.name)
            elif isinstance(node, ast.Name | ast.Attribute):
                used.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                used.add(node.value.rpartition(".")[2])
    unused = {name: files for name, files in defined.items() if name not in used and not re.fullmatch("__.*__", name)}
    assert unused.keys() == CALLED_BY_LIBRARIES, unused


def test_docstring_begins_with_a_verb_or_a_noun(product):
    riddles = ("What", "Where", "Whether", "Who", "How", "Of", "As", "Which")
    for file in product:
        for node in file.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first, *_ = (ast.get_docstring(node, clean=False) or "-").split()
                assert first not in riddles, f"{file.name}: {ast.get_docstring(node)}"


# ---- flags that messages name ----


FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
# flags that messages name, but that no call of `flag` or `add_argument` defines; each with the program that has it, or
# with the reason
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
# beginnings by which messages name several flags, such as "--lr-decay-*"
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


def test_every_flag_named_in_a_message_exists_or_is_foreign(product):
    known = {*FOREIGN, *BEGINNINGS}.union(*(flags_of(file.nodes) for file in product))
    assert {"--vocab-size", "--lr", "--no-overlap-grad-reduce", "--override-opt_param-scheduler"} <= known
    unknown = {
        f"{file.name}:{line}: {word}"
        for file in product
        for line, text in strings_of(file.nodes)
        for word in FLAG.findall(text)
        if word not in known
    }
    assert unknown == set()


# ---- lengths of files, and entries of mutations.toml (mistakes that tests/mutations.py injects) ----


def code_lines(file: File) -> int:
    """Return the number of lines with code in a file; lines with only comments or docstrings do not count."""
    lines = {number for number, line in enumerate(file.text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in file.nodes:
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_file_above_300_code_lines_gives_the_reason_at_its_top(product):
    without = [file for file in product if "one file" not in file.text[:1000].lower()]
    assert [file.name for file in without if code_lines(file) > 300] == []


def test_every_mutation_fits_its_file_and_names_tests_that_exist():
    assert len(read_changes()) > 200
