"""Every page is true: its commands and Python run, its links lead somewhere, what it quotes stands in the source.

The commands of a page run in order, in one folder, the tutorial's (docs/tutorial.md) first. What is too large for that,
or starts on machines that are not here, is made smaller by the table `INSTEAD`; `python` is helpers/fork_python.py.
"""

import ast
import dataclasses
import functools
import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
import yaml
from helpers.fork_python import forked_python
from helpers.megatron_files import VOCAB, make_weights, write_megatron
from helpers.program import LAUNCHER_VARIABLES
from helpers.ranks import ranks

from megazpp.base.arguments import parse_run_config
from megazpp.base.command_line import read_megatron_flags
from megazpp.model.config import GPTConfig
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.paper import Memory
from megazpp.planner.variants import for_planning, with_recompute
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = "docs/tutorial.md"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))]
SECONDS = 300

# Commands that the rest of the suite runs, and what does.
ELSEWHERE = {
    "pip install -e . && python pretrain_gpt.py": (
        "tests/test_pretrain.py::test_the_main_job_says_what_runs_and_what_came_out"
    ),
    "pip install -e '.[test]' && python -m pytest": "tests/test_docs.py::test_a_page_s_commands_run",
}

# A part of a command -> what runs instead; \g<0> is what has matched. `torchrun` is helpers/checked_launch.py here:
# it parses and checks every flag, and starts nothing.
DATA = "--data-path my_text_document --tokenizer-model my.model"
EIGHT = "--nproc-per-node 8 pretrain_gpt.py"
TINY = "--nproc-per-node 4 pretrain_gpt.py @configs/gpt_tiny.args"
SMALL_RUN = "--nproc 2 --train-iters 4 --eval-interval 4 --eval-iters 1 --global-batch-size 16 --sample-tokens 4"
INSTEAD = [
    (r"^python -m pytest (\S+).*", rf"test -e {ROOT}/\1"),
    (r"pretrain_gpt.py \.\.\.", "pretrain_gpt.py @book.args"),
    (r" \.\.\.$", f" {DATA}"),
    (r"^(python tools/convert_checkpoint.py .*--output) checkpoints/", r"\1 $(mktemp -d)/checkpoints/"),  # is there
    (r"^python pretrain_gpt.py @book.args.*", rf"\g<0> {SMALL_RUN}"),
    (r"^python pretrain_gpt.py .*--load again/.*", r"\g<0> --nproc 1"),
    (r"^python pretrain_gpt.py (@configs/gpt_tiny.args (?!--print)|(?=--train-iters))", f"torchrun {TINY} "),
    (r"^python pretrain_gpt.py (?!@book.args)(?!.*--(plan|print-config))", f"torchrun {EIGHT} "),
    (r"^python tools/train_tokenizer.py.*", r"\g<0> --vocab-size 600"),
    (r"^python tools/preprocess_data.py.*", r"\g<0> --workers 1"),
    (r"^python tools/(evaluate|generate).py.*", r"\g<0> --nproc 1 --tensor-model-parallel-size 1"),
    (r"^python tools/evaluate.py.*", r"\g<0> --eval-iters 1"),
    (r"^python tools/gpu_check.py.*", r"\g<0> --help"),  # tests/tools/test_gpu_check.py rehearses its parts
    (r"^python tools/generate.py(?!.*--temperature 0).*", r"\g<0> --sample-tokens 4"),
]
PYTHON_INSTEAD = {"zeropp(model)": "zeropp(model, ranks_per_node=2)"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.M | re.S)


def wanted(page: str) -> list[str]:
    """The commands of the table whose rows go on after "I want to ..."; none where a page has no such table."""
    rows = text_of(page).partition("| I want to ... | command |\n")[2].partition("\n\n")[0]
    return re.findall(r"\| `([^`]+)` \|$", rows, re.M)


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)


class Scratch:
    """A folder like a checkout in which a reader has put what the pages take for granted."""

    def __init__(self, path: Path, programs: Path) -> None:
        self.path = path
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env |= {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.env = env | {"XDG_CACHE_HOME": str(path / "cache"), "TMPDIR": str(path), "HF_HUB_OFFLINE": "1"}

    def run(self, script: str) -> str:
        """What a script prints; it must end well."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.path,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def run_page(self, page: str) -> list[str]:
        """What each block of commands prints, then each command of the table "I want to ..."."""
        scripts = [*blocks(page, "sh"), *wanted(page)]
        return [self.run("\n".join(map(instead, commands(script)))) for script in scripts]


def commands(block: str) -> list[str]:
    """The lines of a block, continued ones joined."""
    return block.replace("\\\n", " ").splitlines()


def instead(command: str) -> str:
    """The command as it runs here."""
    if command in ELSEWHERE:
        return ""
    if not re.match(r"python|torchrun|srun|sbatch", command):
        return command
    command = re.sub(r"\s+# .*", "", command)
    for pattern, replacement in INSTEAD:
        command = re.sub(pattern, replacement, command)
    if " < " in command:  # what was put behind stands before
        command = re.sub(r"(.*?) (< \S+)(.*)", r"\1\3 \2", command)
    return command


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "python").symlink_to(forked_python())
    launch = ROOT / "tests" / "helpers" / "checked_launch.py"
    for name in ("torchrun", "srun", "sbatch"):
        (folder / name).write_text(f'#!/bin/sh\nexec python {launch} {name} "$@"\n')
    for name in ("pip", "ruff", "mypy"):  # what pip is asked for is checked below; .ci/run runs the others
        (folder / name).write_text("#!/bin/sh\n")
    for name in ("torchrun", "srun", "sbatch", "pip", "ruff", "mypy"):
        (folder / name).chmod(0o755)
    return folder


class Followed(NamedTuple):
    """The tutorial's folder afterwards, and what its blocks have printed."""

    scratch: Scratch
    outputs: list[str]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory, programs) -> Followed:
    scratch = Scratch(tmp_path_factory.mktemp("tutorial"), programs)
    for name in ("pretrain_gpt.py", "configs", "kernels", "megazpp", "tools"):
        (scratch.path / name).symlink_to(ROOT / name)
    return Followed(scratch, scratch.run_page(TUTORIAL))


@pytest.fixture(scope="module")
def scratch(tutorial) -> Scratch:
    """The tutorial's folder, with what the other pages take for granted."""
    path = tutorial.scratch.path
    text = (path / "corpus/moby_dick.jsonl").read_bytes()
    (path / "corpus/part.jsonl.gz").write_bytes(gzip.compress(text))
    (path / "my_text.jsonl").write_bytes(b"".join(text.splitlines(keepends=True)[:3]))
    (path / "prompts.txt").write_text("Call me\nIt was\n")
    (path / "gpt2").symlink_to("book_gpt")
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=16)
    write_megatron(path / "megatron_save", make_weights(config), config, tp=2)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([text.decode()], vocab_size=VOCAB, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(path))
    for name in ("a", "b"):
        (path / "runs" / name).symlink_to("book")
    (path / "parts").mkdir()
    for name in ("a_text_document", "b_text_document"):
        for suffix in (".bin", ".idx"):
            shutil.copy(path / f"book_text_document{suffix}", path / "parts" / f"{name}{suffix}")
    return tutorial.scratch


@pytest.mark.slow
def test_the_tutorial_goes_from_a_folder_of_text_to_text_that_transformers_continues_alike(tutorial):
    path, printed = tutorial.scratch.path, "".join(tutorial.outputs)
    made = "book.model book_text_document.bin checkpoints runs/book/report.html answers short book_gpt more"
    assert [name for name in made.split() if not (path / name).exists()] == []
    assert "ZeRO-3 would have sent" in printed
    assert printed.count("bits per byte: ") == 3
    assert "completion at iteration 1 (short " in printed
    generated = dict(zip(blocks(TUTORIAL, "sh"), tutorial.outputs, strict=True))
    greedy = next(output for block, output in generated.items() if "--temperature 0" in block)
    ours = re.findall(r"^Call me.*", greedy, re.M)[-1]
    python = blocks(TUTORIAL, "python")[0]
    (path / "load.py").write_text(python)
    assert ours in tutorial.scratch.run("python load.py")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL and (blocks(page, "sh") or wanted(page))])
def test_a_page_s_commands_run(page, scratch):
    scratch.run_page(page)


def test_commands_that_are_run_elsewhere_stand_in_a_page_and_so_does_their_test():
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in commands(block)]
    for command, test in ELSEWHERE.items():
        assert command in lines
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            if target.startswith("http"):
                continue
            file, _, heading = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.exists(), f"{page}: {target}"
            titles = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M) if heading else []
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in slugs, f"{page}: {target}"


def test_files_that_contributors_are_sent_to_are_there():
    files = {f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.*") if path.suffix in (".py", ".c")}
    named = re.findall(r"`([\w/]+\.(?:py|c))`", prose("CONTRIBUTING.md"))
    assert len(named) > 60
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_pip_installs_what_there_is_and_the_page_of_tools_says_what_each_extra_is_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for asked in re.findall(r"'\.\[([\w,]+)\]'", text_of(page)):
            assert set(asked.split(",")) <= set(extras), f"{page}: {asked}"
    rows = re.findall(r"^\| (.*) \| .+ \|$", text_of(TUTORIAL), re.M)
    named = {name for row in rows for name in re.findall(r"`'\.\[(\w+)\]'`", row)}
    assert named == extras.keys() - {"test"}


@pytest.mark.slow
def test_a_command_in_the_text_has_flags_that_its_program_knows(tutorial):
    help_of = functools.cache(lambda program: tutorial.scratch.run(f"python {program} --help"))
    for command in re.findall(r"`(python tools/[^`]+)`", "".join(map(prose, PAGES))):
        _, program, *words = command.split()
        known = help_of(program) + help_of("pretrain_gpt.py")
        assert [word for word in words if re.match("--.", word) and word not in known] == [], command


def test_every_tool_has_a_line_in_the_table():
    for folder, page in (("tools", TUTORIAL), ("tools/benchmarks", "docs/figures.md")):
        listed = set(re.findall(r"^\| `(\w+\.py)` \|", text_of(page), re.M))
        programs = {path.name for path in (ROOT / folder).glob("*.py") if "\nif __name__ ==" in path.read_text()}
        parts = {name for name in programs for other in programs if name.startswith(other.removesuffix(".py") + "_")}
        assert listed == programs - parts


def test_the_examples_of_tests_stand_in_the_tests():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    examples = blocks("CONTRIBUTING.md", "python")
    assert len(examples) == 4
    assert [example for example in examples if example not in tests or example.count("\n") > 12] == []


# ---- Python ----


def run_python(code: str) -> bool:
    """Run a page's code on this rank; whether the weights of its `model` are finite."""
    names: dict[str, Any] = {}
    exec(code, names)
    return all(torch.isfinite(p.detach().to_local()).all() for p in names["model"].parameters())


@pytest.mark.slow
def test_a_page_s_python_runs_on_four_ranks():
    for code in [code for page in sorted({*PAGES} - {TUTORIAL, "CONTRIBUTING.md"}) for code in blocks(page, "python")]:
        for gpu, cpu in PYTHON_INSTEAD.items():
            assert gpu in code
            code = code.replace(gpu, cpu)
        code = re.sub(r'torch.device\("cuda".*\)', 'torch.device("cpu")', code)
        assert all(ranks(4).run(run_python, code))


# ---- other machines' files, and the site ----


def test_the_files_for_clouds_start_a_run_that_parses():
    job, task = map(yaml.safe_load, blocks("docs/cloud.md", "yaml"))
    words = shlex.split(" ".join(commands(task["run"])))
    for flags in (job["spec"]["trainer"]["args"], words[words.index("pretrain_gpt.py") + 1 :]):
        config = parse_run_config(flags, ROOT).config
        assert config.zero.zeropp
        assert config.checkpoint.save == config.checkpoint.load == "/data/my-gpt"


@pytest.mark.slow
def test_the_site_has_every_page_and_no_dead_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs/mkdocs.yml", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=SECONDS)
    navigation = (ROOT / ".mkdocs/mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation, page.name
    flags = (tmp_path / "flags/index.html").read_text()
    assert all(flag in flags for flag in ("--zero-gradient-bits", "--num-generations", "--top-p"))


def test_charts_are_those_of_the_tables_beside_them(tmp_path):
    for name in (".mkdocs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, tmp_path / ".mkdocs/pictures.py"], check=True)
    for path in (tmp_path / "docs/pictures").glob("*.svg"):
        assert path.read_text() == (ROOT / "docs/pictures" / path.name).read_text(), path.name


# ---- figures ----


@functools.cache
def planned(name: str, nodes: int, *flags: str, recompute: str | None = None) -> Estimate:
    """What the planner says of a config on nodes of eight GPUs."""
    config = for_planning(parse_run_config([f"@configs/{name}.args", *flags], ROOT).config, "--plan")
    cluster = Cluster(num_nodes=nodes, ranks_per_node=8)
    return Estimator(cluster, device_type="cpu").estimate(with_recompute(config, recompute))


@pytest.mark.slow
def test_the_memory_of_each_config_is_the_planner_s():
    rows = re.findall(r"^\| \[`(\w+)`\].*\| (\d+) x 8 \|(.*)\|$", text_of("docs/configs.md"), re.M)
    assert {name for name, *_ in rows} == {p.stem for p in (ROOT / "configs").glob("*.args")} - {"gpt_tiny"}
    for name, nodes, figures in rows:
        zero3, zeropp = planned(name, int(nodes)), planned(name, int(nodes), "--zeropp")
        full = planned(name, int(nodes), recompute="full")
        sizes = [estimate.gigabytes for estimate in (zero3, zeropp, full)]
        # a planner that has become better by a few percent need not be copied at once
        assert [float(f) for f in figures.split("|")] == pytest.approx([zero3.micro_batches, *sizes], rel=0.03), name


def test_the_zeropp_page_s_example_is_the_planner_s_and_its_formulas_agree():
    page = text_of("docs/zeropp.md")
    zero3, zeropp = planned("gpt_1b3", 2), planned("gpt_1b3", 2, "--zeropp")
    kinds = zeropp.memory
    shards = sum(kinds[kind] for kind in (Memory.PARAMETERS, Memory.MOMENTS, Memory.GRADIENTS)) / 1e9
    assert f"| {zero3.node_cross_bytes / 1e6:.1f} | {zeropp.node_cross_bytes / 1e6:.1f} |" in page
    assert f"| {shards:.3f} | {shards:.3f} |" in page
    for kind in (Memory.SECONDARY, Memory.PARTIAL_SUMS, Memory.FEEDBACK):
        assert f"| | {kinds[kind] / 1e9:.3f} |" in page

    parameters, nodes, local, micro_batches = kinds[Memory.PARAMETERS] / 4 * 16, 2, 8, zero3.micro_batches
    crossing = (nodes - 1) / nodes * parameters * (1.0078 + 0.5156)
    assert f"is {crossing / 1e6:.0f} MB" in page
    close = functools.partial(pytest.approx, rel=0.005)  # 1-D parameters travel exact, shards are padded
    assert zeropp.node_cross_bytes == close(crossing)
    assert zero3.node_cross_bytes == close(15 / 16 * micro_batches * parameters * 8)
    inside = (local - 1) / local * parameters * micro_batches * (2 * 1.0078 + 1.0156)
    assert zeropp.wires["local"] == close(inside)
    factors = {Memory.SECONDARY: 1.0078, Memory.PARTIAL_SUMS: 4.0, Memory.FEEDBACK: 1.0156}
    for kind, factor in factors.items():
        assert kinds[kind] == close(factor * parameters / local)


# ---- words ----


@functools.cache
def source_strings() -> str:
    """Every string of the product, a zero byte for each value in an f-string."""
    found = []
    for folder in ("megazpp", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return "\n".join(found)


def test_a_quoted_message_s_fixed_parts_stand_in_the_source():
    page = text_of("docs/troubleshooting.md")
    tables = page[: page.index("## Slow or out of memory")]
    messages = re.findall(r"^\| `([^`]+)` \|", tables, re.M)
    assert len(messages) > 20
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in source_strings(), f"{message}: {part.strip()!r}"


def test_the_fields_of_the_log_line_stand_in_the_source():
    page = text_of("docs/troubleshooting.md")
    table = page[page.index("| field |") :]
    for row in re.findall(r"^\| (`.*?) \| ", table, re.M):
        for field in re.findall(r"`([^`]+)`", row):
            name = re.sub("^(tp|local|cross|island) ", "", field)
            assert re.search(rf"(?m)(^| ){re.escape(name)}", source_strings()), field


def test_the_zeropp_page_s_table_has_a_row_for_every_flag_of_it():
    table = "".join(re.findall(r"^\| (`--.*?) \| ", text_of("docs/zeropp.md"), re.M))
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(ZeroConfig)}
    for name in fields - {"zero-stage", "use-distributed-optimizer"}:  # ZeRO's, in the table of stages
        assert re.search(rf"`--(no-)?{name}`", table), name


OTHERS_FLAGS = (
    "--job-name --master-port --nnodes --nproc-per-node --node-rank --rdzv-backend --rdzv-conf --master-addr "
    "--num_gpus --ntasks-per-node --gpus-per-task"
)


def test_every_flag_that_a_page_names_exists():
    sources = "".join(p.read_text(encoding="utf-8") for f in ("megazpp", "tools") for p in (ROOT / f).rglob("*.py"))
    fields = set(re.findall(r"\w+", source_strings())) | set(re.findall(r"\b(\w+): [^=\n]+ = flag\(", sources))
    known = set(read_megatron_flags()) | set(re.findall(r"--[\w-]+", sources)) | set(OTHERS_FLAGS.split())
    for page in set(PAGES) - {"CONTRIBUTING.md"}:  # it adds one
        for name in re.findall(r"(?<![\w-])--[a-z][\w-]*\*?", " ".join(re.findall(r"`([^`]+)`", prose(page)))):
            plain = name.removeprefix("--no-").removeprefix("--")
            field = plain.rstrip("*-").replace("-", "_")
            beginning = name.endswith(("*", "-")) and any(each.startswith(field) for each in fields)
            assert beginning or {name, f"--{plain}"} & known or plain.replace("-", "_") in fields, f"{page}: {name}"
