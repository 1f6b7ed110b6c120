"""The floors of the house, kept by reading the source: who may import whom, and what only one file may do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "kernels": 0,
    "megazpp.flags": 0,
    "megazpp.exit_codes": 0,
    "megazpp.flag_checks": 0,
    "megazpp.flag_files": 0,
    "megazpp.flag_report": 0,
    "megazpp.megatron_flags": 0,
    "megazpp.topology": 1,
    "megazpp.parallel": 1,
    "megazpp.tensor_parallel": 2,
    "megazpp.zero": 2,
    "megazpp.model": 3,
    "megazpp.optim": 3,
    "megazpp.data": 3,
    "megazpp.checkpoint": 4,
    "megazpp.training": 5,
    "megazpp.inference": 5,
    "megazpp.report": 5,
    "megazpp.convert": 5,
    "megazpp.arguments": 6,
    "megazpp.checks": 6,
    "megazpp.checkpoint_flags": 7,
    "megazpp.env": 7,
    "megazpp.introduce": 7,
    "megazpp.run": 7,
    "megazpp.planner": 7,
}
# steps inside a floor: parallel/ builds groups from topology/'s integers
SAME_FLOOR = {
    ("megazpp.parallel", "megazpp.topology"),
    ("megazpp.training", "megazpp.inference"),
    ("megazpp.checks", "megazpp.arguments"),
}

SOURCES = sorted([*ROOT.glob("megazpp/**/*.py"), *ROOT.glob("kernels/**/*.py")])
COLLECTIVES = re.compile(
    r"dist\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend|all_to_all|new_group|new_subgroups)"
)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def room(module: str) -> str | None:
    """The entry of FLOORS that `module` belongs to."""
    for name in FLOORS:
        if module == name or module.startswith(name + "."):
            return name
    return None


def imports(path: Path) -> list[tuple[str, ast.stmt]]:
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node))
    return found


def test_the_sources_are_found():
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_file_imports_only_from_lower_floors_or_its_own_folder(path: Path):
    here = module_name(path)
    if here == "megazpp":
        return
    mine = room(here)
    assert mine is not None, f"{here} is on no floor"
    for target, node in imports(path):
        if not target.startswith(("megazpp", "kernels", "pretrain_gpt", "tools", "tests")) or target == "megazpp":
            continue
        theirs = room(target)
        assert theirs is not None, f"{here} imports {target}, which is on no floor"
        allowed = theirs == mine or FLOORS[theirs] < FLOORS[mine] or (mine, theirs) in SAME_FLOOR
        both_flags = FLOORS[theirs] == FLOORS[mine] == 0 and mine != "kernels" and theirs != "kernels"
        assert allowed or both_flags, f"{here}:{node.lineno} imports {target}: not a lower floor"


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


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_stand_at_the_top(path: Path):
    """A lazy import of our own code would dodge the floors."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    names = [a.name for a in inner.names] if isinstance(inner, ast.Import) else [inner.module or ""]
                    assert not any(n.startswith(("megazpp", "kernels")) for n in names), f"{path}:{inner.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_zero_touches_fsdp2_and_only_the_axis_calls_collectives(path: Path):
    here, text = module_name(path), path.read_text()
    if room(here) != "megazpp.zero":
        assert "fsdp" not in "".join(t for t, _ in imports(path)), f"{here} imports FSDP2"
    if here != "megazpp.parallel.axis":
        assert not COLLECTIVES.search(text), f"{here} calls a collective: {COLLECTIVES.search(text)}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_there_is_no_mutable_state_at_module_level(path: Path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: global statement"
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        mutable = isinstance(statement.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
        constant = all(n.lstrip("_").isupper() or n == "__all__" for n in names)
        assert not mutable or constant, f"{path}:{statement.lineno}: mutable module-level value {names}"


def test_zero_and_tensor_parallel_do_not_know_each_other_and_zero_does_not_know_the_model():
    for path in SOURCES:
        if room(module_name(path)) == "megazpp.zero":
            assert not any(t.startswith(("megazpp.tensor_parallel", "megazpp.model")) for t, _ in imports(path))
        if room(module_name(path)) == "megazpp.tensor_parallel":
            assert not any(t.startswith("megazpp.zero") for t, _ in imports(path))
