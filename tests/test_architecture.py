"""The floors of the house, kept by reading the source: who may import whom, and what only one file may do."""

import ast
import graphlib
import io
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = """
megazpp.kernels megazpp.base
megazpp.topology megazpp.parallel
megazpp.tensor_parallel megazpp.zero
megazpp.model megazpp.optim megazpp.data
megazpp.checkpoint
megazpp.islands megazpp.training megazpp.inference megazpp.report megazpp.convert
megazpp.base.arguments megazpp.base.checks megazpp.stored
megazpp.base.checkpoint_flags megazpp.training.trainer megazpp.planner
megazpp.base.run megazpp.training.run
megazpp.post_training
"""  # from the lowest floor; of two that hold a file the longer one counts
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS.strip().splitlines()) for room in rooms.split()}
# steps inside a floor: parallel/ builds groups from topology/'s integers
SAME_FLOOR = {
    ("megazpp.parallel", "megazpp.topology"),
    ("megazpp.training", "megazpp.inference"),
    ("megazpp.islands", "megazpp.training"),
    ("megazpp.base.checks", "megazpp.base.arguments"),
    ("megazpp.training.run", "megazpp.base.run"),
}
COLLECTIVES = re.compile(
    r"dist\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend|all_to_all|new_group|new_subgroups)"
)


class File(NamedTuple):
    """A file of the product: its module, text, all of its syntax tree, and the modules that it imports."""

    name: str
    text: str
    nodes: list[ast.AST]
    imports: list[tuple[str, ast.AST]]

    @property
    def room(self) -> str | None:
        return room(self.name)

    @property
    def top_level(self) -> list[ast.stmt]:
        return self.nodes[0].body


def room(module: str) -> str | None:
    rooms = [room for room in FLOOR if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def read(path: Path) -> File:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    name = f"megazpp.{name}" if path.is_relative_to(ROOT / "kernels") else name  # megazpp/kernels is a link to it
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [(alias.name, node) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports += [(node.module, node) for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return File(name, path.read_text(), nodes, imports)


@pytest.fixture(scope="module")
def product() -> list[File]:
    globs = ("megazpp/**/*.py", "kernels/**/*.py", "tools/**/*.py", "*.py")
    return [read(path) for glob in globs for path in ROOT.glob(glob)]


@pytest.fixture(scope="module")
def house(product) -> list[File]:
    """Without the programs."""
    return [file for file in product if file.name.startswith("megazpp")]


def test_a_file_imports_only_from_lower_floors_or_its_own_folder(house):
    assert len(house) > 30
    assert [file.name for file in house if file.room is None] == ["megazpp", "megazpp.__main__"]
    for file in house:
        for target, _ in file.imports:
            if target.startswith(("megazpp.", "pretrain_gpt", "tools", "tests")):
                mine, theirs = file.room, room(target)
                lower = theirs in FLOOR and FLOOR[theirs] < FLOOR[mine]
                assert lower or theirs == mine or (mine, theirs) in SAME_FLOOR, f"{file.name} imports {target}"


def test_the_import_graph_has_no_cycles(house):
    graph = {file.name: {target for target, _ in file.imports} for file in house}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is one


def test_few_files_outside_its_folder_name_a_feature(product):
    """Local steps are one folder, others speak of islands; so is the planner."""
    for word, folder in (("diloco", "megazpp.islands"), ("megazpp.planner", "megazpp.planner")):
        naming = [file.name for file in product if file.room != folder and word in file.text.lower()]
        assert len(naming) <= 4, naming


def test_imports_stand_at_the_top(house):
    """A lazy import of our own code would dodge the floors."""
    ours = [(file.name, *each) for file in house for each in file.imports if each[0].startswith("megazpp")]
    assert [f"{name} imports {target}" for name, target, node in ours if node.col_offset > 0] == []


def test_only_zero_touches_fsdp2_and_only_the_axis_calls_collectives(house):
    assert {file.room for file in house if any("fsdp" in target for target, _ in file.imports)} == {"megazpp.zero"}
    assert [file.name for file in house if COLLECTIVES.search(file.text)] == ["megazpp.parallel.axis"]


def test_there_is_no_mutable_state_at_module_level(house):
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
    for file in house:
        assert not any(isinstance(node, ast.Global) for node in file.nodes), file.name
        for statement in file.top_level:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, mutable):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [ast.unparse(target) for target in targets]
                assert all(name.isupper() or name == "__all__" for name in names), f"{file.name}: {names}"


def test_no_two_classes_of_the_product_share_a_name(product):
    """What only its own file uses, and says so by an underscore, may."""
    classes = [node for file in product for node in file.top_level if isinstance(node, ast.ClassDef)]
    counts = Counter(node.name for node in classes if not node.name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


# Methods that torch, transformers and Python's files call on what we give them.
CALLED_BY_LIBRARIES = {
    *("get_extra_state", "set_extra_state", "on_train_begin", "post_train"),
    *("lookup_object", "create_stream"),
}


def test_no_function_of_the_product_is_called_by_tests_alone(product):
    """By name: used is what some file of the product mentions, beside definition and import, also as a string."""
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


def test_a_docstring_begins_with_a_verb_or_the_thing_itself(product):
    riddles = ("What", "Where", "Whether", "Who", "How", "Of", "As", "Which")
    for file in product:
        for node in file.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first, *_ = (ast.get_docstring(node, clean=False) or "-").split()
                assert first not in riddles, f"{file.name}: {ast.get_docstring(node)}"


def code_lines(file: File) -> int:
    """Count the lines that hold code: documentation is free."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    lines = {line for t in tokens if t.type not in skipped for line in range(t.start[0], t.end[0] + 1)}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in file.nodes:
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_file_of_more_than_300_code_lines_says_why_at_its_top(product):
    long = [file for file in product if code_lines(file) > 300]
    assert [file.name for file in long if "one file" not in file.text[:1000].lower()] == []
