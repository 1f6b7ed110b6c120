"""Test that the wheel and the source distribution install and run without the checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.program import ROOT
from packaging.requirements import Requirement

FOLDERS = {"megazpp": "megazpp", "kernels": "megazpp/kernels", "configs": "megazpp/configs", "tools": "megazpp/tools"}
# programs that need a checkout, so the wheel does not contain them
LEFT_OUT = ("tools/benchmarks/", "tools/examples/", "tools/slurm/")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_wheel_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    # the folder kernels/ has no __init__.py of its own; docs/contributing/architecture.md gives the reason
    globs = ("[mk]*/**/__init__.py", "kernels/*.py")
    parts = [path.parent.relative_to(ROOT).parts for pattern in globs for path in ROOT.glob(pattern)]
    found = {".".join(part if part[0] == "megazpp" else ("megazpp", *part)) for part in parts}
    assert found == {
        name for name in listed if not name.startswith(("megazpp.configs", "megazpp.tools", "megazpp.programs"))
    }


@pytest.mark.nightly
def test_wheel_and_source_distribution_hold_all_needed_files(built):
    tracked = run("git", "ls-files", cwd=ROOT).split()
    wanted = {
        path.replace(folder, FOLDERS[folder], 1)
        for path in tracked
        if (folder := path.partition("/")[0]) in FOLDERS
        and not path.startswith(LEFT_OUT)
        and not path.endswith((".md", "megazpp/kernels"))  # megazpp/kernels is a link to the folder kernels/
    }
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        assert wanted - set(wheel.namelist()) == set()
    with tarfile.open(next(built.glob("*.tar.gz"))) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    sources = {
        path for path in wanted if path.startswith("megazpp/") and "/configs/" not in path and "/tools/" not in path
    }
    assert sources - inside == set()


@pytest.mark.nightly
def test_wheel_trains_in_an_empty_folder(built, tmp_path):
    """The environment has the dependencies of these tests, but the checkout is not on its search path."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    packages = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    wheel, python = next(built.glob("*.whl")), tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path, PYTHONPATH="")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    empty, programs = tmp_path / "empty", tmp_path / "venv/bin"
    empty.mkdir()
    small = ("--train-iters", "5", "--eval-iters", "1", "--sample-tokens", "2", "--nproc", "2")
    places = ("--save", "ck", "--data-cache-path", "cache")
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "WANDB_MODE": "disabled"}
    said = run(programs / "megazpp", *small, "--global-batch-size", "4", *places, cwd=empty, **env)
    assert "iteration        5/       5" in said
    again = ("--objective", "sft", "--load", "ck", "--max-length", "32", "--print-config")
    assert "--hidden-size" in run(programs / "megazpp-post-train", *again, cwd=empty, **env)
    assert "--hidden-size 768" in run(
        programs / "megazpp", "@configs/gpt_125m.args", "--print-config", cwd=empty, **env
    )
    assert "compiled by" in run(python, "-m", "megazpp.tools.env", cwd=empty, **env)
    # Hugging Face's package `kernels` has the name of this project's folder kernels/; both must import
    huggingface = ("install", "--no-deps", "kernels==0.10.0")
    run(sys.executable, "-m", "pip", "--python", python, *huggingface, cwd=tmp_path, PYTHONPATH="")
    both = "import kernels, megazpp.kernels.formats; print(kernels.get_kernel.__module__)"
    # with the checkout on PYTHONPATH, its folder kernels/ has the same name as the package
    for path in ("", str(ROOT)):
        assert run(python, "-c", both, cwd=empty, **env | {"PYTHONPATH": path}).startswith("kernels.")
    megatron = tmp_path / "megatron"  # Megatron-LM's pretrain_gpt.py has the same name, and is often on PYTHONPATH
    megatron.mkdir()
    (megatron / "pretrain_gpt.py").write_text("raise SystemExit('Megatron-LM')")
    run(programs / "megazpp", "--print-config", cwd=empty, **env | {"PYTHONPATH": str(megatron)})


def test_constraints_pin_every_requirement_inside_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in pinned}
    # The tests do not install the packages of the extra "gpu", so constraints.txt does not pin them
    extras = [texts for extra, texts in project["optional-dependencies"].items() if extra != "gpu"]
    for requirement in map(Requirement, [*project["dependencies"], *(text for texts in extras for text in texts)]):
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement
