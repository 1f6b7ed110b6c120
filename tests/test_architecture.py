"""The floors of the house, kept by reading the source: who may import whom, and what only one file may do."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "kernels": 0,
    "megazpp.base": 0,
    "megazpp.base.files": 0,
    "megazpp.base.program": 0,
    "megazpp.base.flags": 0,
    "megazpp.base.command_line": 0,
    "megazpp.topology": 1,
    "megazpp.parallel": 1,
    "megazpp.tensor_parallel": 2,
    "megazpp.zero": 2,
    "megazpp.model": 3,
    "megazpp.optim": 3,
    "megazpp.data": 3,
    "megazpp.checkpoint": 4,
    "megazpp.islands": 5,
    "megazpp.training": 5,
    "megazpp.inference": 5,
    "megazpp.report": 5,
    "megazpp.convert": 5,
    "megazpp.base.arguments": 6,
    "megazpp.base.checks": 6,
    "megazpp.base.checkpoint_flags": 7,
    "megazpp.base.run": 8,
    "megazpp.training.trainer": 7,
    "megazpp.training.run": 8,
    "megazpp.post_training": 9,
    "megazpp.planner": 7,
    "megazpp.stored": 6,
}
# steps inside a floor: parallel/ builds groups from topology/'s integers
SAME_FLOOR = {
    ("megazpp.parallel", "megazpp.topology"),
    ("megazpp.training", "megazpp.inference"),
    ("megazpp.islands", "megazpp.training"),
    ("megazpp.base.checks", "megazpp.base.arguments"),
    ("megazpp.training.run", "megazpp.base.run"),
}

SOURCES = sorted([*ROOT.glob("megazpp/**/*.py"), *ROOT.glob("kernels/**/*.py")])
PRODUCT = [*SOURCES, *ROOT.glob("tools/**/*.py"), *ROOT.glob("*.py")]
COLLECTIVES = re.compile(
    r"dist\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend|all_to_all|new_group|new_subgroups)"
)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree; the first is the module."""
    return list(ast.walk(ast.parse(path.read_text())))


def top_level(path: Path) -> list[ast.stmt]:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module.body


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@functools.cache
def room(module: str) -> str | None:
    """The entry of FLOORS that `module` belongs to."""
    names = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return max(names, key=len, default=None)


@functools.cache
def imports(path: Path) -> list[tuple[str, ast.stmt]]:
    found: list[tuple[str, ast.stmt]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node))
    return found


def teardown_module() -> None:
    nodes.cache_clear()
    imports.cache_clear()


def test_a_file_imports_only_from_lower_floors_or_its_own_folder():
    assert len(SOURCES) > 30
    offenders = []
    for path in SOURCES:
        here, mine = module_name(path), room(module_name(path))
        if here == "megazpp":
            continue
        if mine is None:
            offenders.append(f"{here} is on no floor")
            continue
        for target, node in imports(path):
            inside = target.startswith(("megazpp", "kernels", "pretrain_gpt", "tools", "tests"))
            if inside and target != "megazpp" and not may_import(mine, room(target)):
                offenders.append(f"{here}:{node.lineno} imports {target}: not a lower floor")
    assert offenders == []


def may_import(mine: str, theirs: str | None) -> bool:
    if theirs is None:
        return False
    both_flags = FLOORS[theirs] == FLOORS[mine] == 0 and mine != "kernels" and theirs != "kernels"
    return theirs == mine or FLOORS[theirs] < FLOORS[mine] or (mine, theirs) in SAME_FLOOR or both_flags


def test_the_import_graph_has_no_cycles():
    graph = {
        module_name(path): {t for t, _ in imports(path) if t.startswith(("megazpp", "kernels"))} for path in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_few_files_outside_its_folder_name_a_feature():
    """Local steps are one folder, others speak of islands; so is the planner."""
    for word, folder in (("diloco", "megazpp.islands"), ("megazpp.planner", "megazpp.planner")):
        others = [path for path in PRODUCT if room(module_name(path)) != folder]
        naming = [str(path.relative_to(ROOT)) for path in others if word in path.read_text().lower()]
        assert len(naming) <= 4, naming


def test_imports_stand_at_the_top():
    """A lazy import of our own code would dodge the floors."""
    offenders = []
    for path in SOURCES:
        inside = {
            inner
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
            if isinstance(inner, ast.Import | ast.ImportFrom)
        }
        ours = [node for name, node in imports(path) if node in inside and name.startswith(("megazpp", "kernels"))]
        offenders += [f"{path}:{node.lineno}" for node in ours]
    assert offenders == []


def test_only_zero_touches_fsdp2_and_only_the_axis_calls_collectives():
    offenders = []
    for path in SOURCES:
        here, text = module_name(path), path.read_text()
        if room(here) != "megazpp.zero" and "fsdp" in "".join(t for t, _ in imports(path)):
            offenders.append(f"{here} imports FSDP2")
        if here != "megazpp.parallel.axis" and COLLECTIVES.search(text):
            offenders.append(f"{here} calls a collective: {COLLECTIVES.search(text)}")
    assert offenders == []


def test_there_is_no_mutable_state_at_module_level():
    offenders = []
    for path in SOURCES:
        offenders += [f"{path}:{n.lineno}: global statement" for n in nodes(path) if isinstance(n, ast.Global)]
        for statement in top_level(path):
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            mutable = isinstance(statement.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            constant = all(n.lstrip("_").isupper() or n == "__all__" for n in names)
            if mutable and not constant:
                offenders.append(f"{path}:{statement.lineno}: mutable module-level value {names}")
    assert offenders == []


def test_zero_and_tensor_parallel_do_not_know_each_other_and_zero_does_not_know_the_model():
    strangers = {
        "megazpp.zero": ("megazpp.tensor_parallel", "megazpp.model"),
        "megazpp.tensor_parallel": ("megazpp.zero",),
    }
    for path in SOURCES:
        unknown = strangers.get(room(module_name(path)) or "", ())
        assert not any(target.startswith(unknown) for target, _ in imports(path)), path


def test_no_two_classes_of_the_product_share_a_name():
    """What only its own file uses, and says so by an underscore, may."""
    homes: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in top_level(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module_name(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


# Methods that torch, transformers, Jinja and Python's files call on what we give them.
CALLED_BY_LIBRARIES = {
    *("get_extra_state", "set_extra_state", "on_train_begin", "post_train", "parse"),
    *("lookup_object", "create_stream"),
}


def test_no_function_of_the_product_is_called_by_tests_alone():
    """By name: used is what some file of the product mentions, beside definition and import, also as a string."""
    defined: dict[str, str] = {}
    used: Counter[str] = Counter()
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name] = f"{path.relative_to(ROOT)}:{node.lineno}"
            elif isinstance(node, ast.Name | ast.Attribute):
                used[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                used[node.value.rpartition(".")[2]] += 1
    called = {name for name in defined if used[name] or re.fullmatch("__.*__", name)}
    assert {name: place for name, place in defined.items() if name not in called | CALLED_BY_LIBRARIES} == {}
    assert {name for name in CALLED_BY_LIBRARIES if name not in defined or used[name]} == set()


def test_a_docstring_begins_with_a_verb_or_the_thing_itself():
    riddles = ("What", "Where", "Whether", "Who", "How", "Of", "As", "Which")
    found = []
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node, clean=False) or "-").split()
                found += [f"{path.relative_to(ROOT)}: {' '.join(words[:6])}"] if words[0] in riddles else []
    assert found == []


def test_a_file_of_more_than_300_lines_says_why_in_its_first_lines():
    long = [path for path in PRODUCT if path.read_text().count("\n") > 300]
    assert [str(path.relative_to(ROOT)) for path in long if "one file" not in path.read_text()[:1000].lower()] == []
