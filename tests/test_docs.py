"""Test the documentation: commands and Python code run, links resolve, and quoted texts occur in the source.

The commands of a page run in order in one folder, in which the tutorial (docs/tutorial.md) has run before. The table
`INSTEAD` replaces commands that would take too long or that start workers on other machines. `python` is the forking
command of helpers/fork_python.py.
"""

import ast
import dataclasses
import functools
import gzip
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml
from helpers.fork_python import forked_python
from helpers.megatron_files import VOCAB, make_weights, write_megatron
from helpers.program import ROOT, run_program
from helpers.ranks import ranks
from helpers.tiers import chosen

import megazpp
from megazpp.base.flag_tables import read_megatron_flags
from megazpp.features import FEATURES
from megazpp.model.config import GPTConfig
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.simulator import Memory
from megazpp.planner.variants import for_planning, with_recompute
from megazpp.run.arguments import parse_run_config
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig

TUTORIAL, INSTALLATION, POST_TRAINING = "docs/tutorial.md", "docs/installation.md", "docs/guides/post_training.md"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))]
CONTRIBUTORS = ["CONTRIBUTING.md", *(page for page in PAGES if page.startswith("docs/contributing/"))]

# (pattern of a command, replacement); \g<0> is the matched text. `torchrun` is helpers/checked_launch.py in these
# tests, which parses and checks every flag and starts nothing.
DATA = "--data-path my_text_document --tokenizer-model my.model"
EIGHT = "--nproc-per-node 8 pretrain_gpt.py"
TINY = "--nproc-per-node 4 pretrain_gpt.py @configs/gpt_tiny.args"
SMALL_RUN = "--nproc 2 --train-iters 4 --eval-interval 4 --eval-iters 1 --global-batch-size 16 --sample-tokens 4"
INSTEAD = [
    (r"^git clone .*", ""),
    (r"^cp (\S*moby_dick.jsonl) (corpus/)$", r"head -n 30 \1 > \2moby_dick.jsonl"),  # a fifth of the book's chapters
    (r"^pip install .* && ", ""),
    (  # tests/test_two_machines.py runs these commands
        r"^python pretrain_gpt.py --nnodes .*--run-dir (\S+).*",
        r"mkdir -p \1 && cp configs/clusters/two_laptops.yaml \1/cluster.yaml",
    ),
    (r"^python pretrain_gpt.py --nnodes (.*?)( \.\.\.)?$", r"python pretrain_gpt.py --nnodes \1 --print-config"),
    (r"^python tools/(coordinate.py|report.py .*--rounds).*", r"\g<0> --help"),
    (r"@run7.args", f"@configs/gpt_125m.args {DATA} --global-batch-size 384 --train-iters 1000"),
    (r"^python pretrain_gpt.py @configs/gpt_18b.args .*--plan.*", r"\g<0> --print-config"),  # instead of a long search
    (r"^python -m pytest$", ""),
    (r"^python -m pytest (\S+).*", rf"test -e {ROOT}/\1"),
    (r"pretrain_gpt.py \.\.\.", "pretrain_gpt.py @book.args"),
    (r" \.\.\.$", f" {DATA}"),
    (
        r"^(python tools/convert_checkpoint.py .*--output) checkpoints/",
        r"\1 $(mktemp -d)/checkpoints/",
    ),  # a temporary folder, because the page's own output folder already exists
    (r"^python \S+ @configs/post_training/.*", r"\g<0> --nproc 1 --train-iters 1 --lr-warmup-iters 0"),
    # a learning rate for a model of 0.7M parameters
    (r"(^python tools/post_train.py --objective (?:sft|dpo) .*--lr) (?:5e-5|1e-6)", r"\1 3e-3"),
    (r"(^python tools/post_train.py --objective (?:sft|grpo) .*--train-iters) (?:100|20)", r"\1 4"),
    (r"^python pretrain_gpt.py @book.args.*", rf"\g<0> {SMALL_RUN}"),
    (r"^python pretrain_gpt.py .*--load again/.*", r"\g<0> --nproc 1"),
    (
        r"^python pretrain_gpt.py( @configs/gpt_tiny.args (?!.*--print)| (?=--train-iters)|$)",
        f"torchrun {TINY} ",
    ),
    (
        r"^python pretrain_gpt.py (?!@book.args|@configs/post_training/)(?!.*--(plan|print-config))",
        f"torchrun {EIGHT} ",
    ),
    (r"^python tools/train_tokenizer.py.*", r"\g<0> --vocab-size 600"),
    (r"^python tools/preprocess_data.py.*", r"\g<0> --workers 1"),
    (r"^python tools/(evaluate|generate).py.*", r"\g<0> --nproc 1 --tensor-model-parallel-size 1"),
    (r"^python tools/evaluate.py(?!.*--input).*", r"\g<0> --eval-iters 1"),
    (r"^python tests/gpu_check/gpu_check.py.*", r"\g<0> --help"),  # test_gpu_check.py runs the parts of the GPU check
    (r"^python tools/generate.py(?!.*--temperature 0).*", r"\g<0> --sample-tokens 4"),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the contents of a page's fenced code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.M | re.S)


def wanted(page: str) -> list[str]:
    """Return the commands of the page's table "I want to ..."; [] if the page has no such table."""
    rows = text_of(page).partition("| I want to ... | command |\n")[2].partition("\n\n")[0]
    return re.findall(r"\| `([^`]+)` \|$", rows, re.M)


def prose(page: str) -> str:
    """Return the text of a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)


def run(folder: Path, script: str) -> str:
    """Run a shell script in `folder`, assert that it succeeds, and return its output."""
    command = ("-euo", "pipefail", "-c", script)
    code, said = run_program(*command, folder=folder / "home", cwd=folder, python="bash")
    assert code == 0, f"{script}\n{said}"
    return said


def run_page(folder: Path, page: str) -> dict[str, str]:
    """Run each block of commands and each command of the table "I want to ..." of a page.

    Returns:
        The output of each block or command, by its text.
    """
    scripts = [*blocks(page, "sh"), *wanted(page)]
    return {script: run(folder, "\n".join(map(instead, commands(script)))) for script in scripts}


def commands(block: str) -> list[str]:
    """Return the commands of a code block, one string each; lines that end with a backslash are joined."""
    return block.replace("\\\n", " ").splitlines()


def instead(command: str) -> str:
    """Return the command that the test runs in place of a page's command: smaller, or as a check of its flags only."""
    if not re.match(r"cp|git|pip|python|torchrun|srun|sbatch", command):
        return command
    command = re.sub(r"\s+# .*", "", command)
    for pattern, replacement in INSTEAD:
        command = re.sub(pattern, replacement, command)
    if " < " in command:  # move the flags that INSTEAD has added before the redirection
        command = re.sub(r"(.*?) (< \S+)(.*)", r"\1\3 \2", command)
    return command


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Make a folder like a checkout for the pages' commands, and put test programs first on PATH.

    `python` starts as a fork of a process that has imported torch. `torchrun`, `srun` and `sbatch` only check flags.
    """
    folder, programs = (tmp_path_factory.mktemp(name) for name in ("checkout", "programs"))
    (folder / "home").mkdir()
    for name in ("pretrain_gpt.py", "configs", "kernels", "megazpp", "tests", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (programs / "python").symlink_to(forked_python())
    launch = ROOT / "tests" / "helpers" / "checked_launch.py"
    for name in ("torchrun", "srun", "sbatch", "pip", "ruff", "mypy"):  # pip, ruff and mypy do nothing
        checked = f'exec python {launch} {name} "$@"' if name in ("torchrun", "srun", "sbatch") else ""
        (programs / name).write_text(f"#!/bin/sh\n{checked}\n")
        (programs / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield folder


@pytest.fixture(scope="module")
def tutorial(checkout) -> dict[str, str]:
    """Run the tutorial's commands in the checkout, and return the output of each block of commands by its text."""
    return run_page(checkout, TUTORIAL)


@pytest.fixture(scope="module")
def scratch(checkout, tutorial) -> Path:
    """Return the folder in which the tutorial has run, with further files that the commands of other pages assume."""
    text = (checkout / "corpus/moby_dick.jsonl").read_bytes()
    (checkout / "corpus/part.jsonl.gz").write_bytes(gzip.compress(text))
    (checkout / "my_text.jsonl").write_bytes(b"".join(text.splitlines(keepends=True)[:3]))
    (checkout / "prompts.txt").write_text("Call me\nIt was\n")
    (checkout / "gpt2").symlink_to("book_gpt")
    config = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=16)
    write_megatron(checkout / "megatron_save", make_weights(config), config, tp=2)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([text.decode()], vocab_size=VOCAB, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(checkout))
    (checkout / "parts").mkdir()
    for name in ("a", "b"):
        (checkout / "runs" / name).symlink_to("book")
        for suffix in (".bin", ".idx"):
            (checkout / f"parts/{name}_text_document{suffix}").symlink_to(checkout / f"book_text_document{suffix}")
    return checkout


@pytest.mark.slow
def test_tutorial_trains_and_exports_a_model_that_transformers_continues(checkout, tutorial):
    made = "book.model book_text_document.bin checkpoints runs/book/report.html answers short book_gpt more"
    assert [name for name in made.split() if not (checkout / name).exists()] == []
    printed = "".join(tutorial.values())
    assert "ZeRO-3 would have sent" in printed
    assert printed.count("bits per byte: ") == 2
    assert "completion at iteration 1 (short " in printed
    greedy = next(said for script, said in tutorial.items() if "--temperature 0" in script)
    ours = re.findall(r"^Call me.*", greedy, re.M)[-1]
    (checkout / "load.py").write_text(blocks(TUTORIAL, "python")[0])
    assert ours in run(checkout, "python load.py")


@pytest.mark.slow
def test_post_training_page_ends_with_one_answer_in_a_terminal_and_in_transformers(scratch):
    said = run_page(scratch, POST_TRAINING)
    assert "\nCaptain Ahab.\n" in next(text for script, text in said.items() if "--chat" in script)
    (scratch / "answer.py").write_text(blocks(POST_TRAINING, "python")[0])
    assert run(scratch, "python answer.py").endswith("Captain Ahab.\n")


RUN = [page for page in PAGES if page not in (TUTORIAL, POST_TRAINING) and (blocks(page, "sh") or wanted(page))]
LONG = [f"docs/concepts/{page}.md" for page in ("context_parallelism", "zeropp")]
LONG += [f"docs/guides/{page}.md" for page in ("host_memory", "large_model_inference", "two_machines")]
LONG += ["docs/planner.md", "docs/reference/cluster_files.md", "docs/reference/configs.md"]


@pytest.mark.parametrize("page", chosen({page: page for page in RUN}, slow={*RUN} - {*LONG}))
def test_commands_of_a_page_run(page, scratch):
    run_page(scratch, page)


def test_the_quickstart_shows_the_lines_of_two_nodes_with_zeropp():
    flags = ["@configs/gpt_1b3.args", "--zeropp"]
    flags += ["--data-path", "my_text_document", "--tokenizer-model", "my.model"]
    config = parse_run_config(flags, ROOT, features=FEATURES).config
    plan = plan_run(config, Cluster(num_nodes=2, ranks_per_node=8), device_type="cpu")
    shown = [f"{plan.layout.describe()}; ZeRO stage {config.zero.stage}", plan.wire.describe()]
    assert blocks("docs/quickstart.md", "text")[0].split() == " ".join(shown).split()


def test_links_lead_to_existing_files_and_headings():
    for page in PAGES:
        for file, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text_of(page)):
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.exists(), f"{page}: {file}"
            titles = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M) if heading else [""]
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, f"{page}: {file}#{heading}"


def test_files_named_for_contributors_exist():
    folders = (ROOT / name for name in ("megazpp", "kernels", "tools", "tests", ".mkdocs"))
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.*"))]
    files = {f"/{path.relative_to(ROOT)}" for path in paths if path.suffix in (".py", ".c")}
    named = [name for page in CONTRIBUTORS for name in re.findall(r"`([\w/]+\.(?:py|c))`", prose(page))]
    assert len(named) > 60
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_named_pip_extras_exist_and_the_installation_page_explains_each():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for asked in re.findall(r"'\.\[([\w,]+)\]'", text_of(page)):
            assert set(asked.split(",")) <= set(extras), f"{page}: {asked}"
    rows = re.findall(r"^\| (.*) \| .+ \|$", text_of(INSTALLATION), re.M)
    named = {name for row in rows for name in re.findall(r"`'\.\[(\w+)\]'`", row)}
    assert named == extras.keys() - {"test"}


@pytest.mark.slow
def test_commands_in_the_text_use_flags_of_their_program(checkout):
    help_of = functools.cache(lambda program, flag="--help": run(checkout, f"python {program} {flag}"))
    for command in re.findall(r"`(python (?:tools|tests)/[^`]+)`", "".join(map(prose, PAGES))):
        _, program, *words = shlex.split(command)
        known = help_of(program) + help_of("pretrain_gpt.py", "--help-all")
        # --help lists a flag that is off by default only as --X, without --no-X
        flags = [word for word in words if re.fullmatch(r"--\S+", word)]
        assert [f for f in flags if f not in known and f.replace("--no-", "--", 1) not in known] == [], command


def test_every_tool_is_listed_in_the_tables_of_its_page():
    listed = re.findall(r"^\| `(\w+\.py)` \|", text_of("docs/reference/tools.md"), re.M)
    files = [path for folder in ("tools", "tools/benchmarks") for path in (ROOT / folder).glob("*.py")]
    programs = {path.name for path in files if "\nif __name__ ==" in path.read_text()}
    parts = {name for name in programs for other in programs if name.startswith(other.removesuffix(".py") + "_")}
    assert sorted(listed) == sorted(programs - parts)


def test_example_tests_in_contributing_occur_in_the_tests():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    examples = blocks("docs/contributing/testing.md", "python")
    assert len(examples) == 4
    assert [example for example in examples if example not in tests or example.count("\n") > 12] == []


# ---- Python code on the pages ----


def run_python(code: str) -> bool:
    """Run a page's Python code on this rank, and return True if all weights of its variable `model` are finite."""
    names: dict[str, Any] = {}
    exec(code, names)
    return all(torch.isfinite(p.detach().to_local()).all() for p in names["model"].parameters())


@pytest.mark.slow
def test_python_code_of_pages_runs_on_four_ranks():
    pages = sorted({*PAGES} - {TUTORIAL, POST_TRAINING, *CONTRIBUTORS})
    for code in [code for page in pages for code in blocks(page, "python")]:
        if "trainer_callback()" in code:  # needs a trainer of another library; tests/drop_in/test_api.py has one
            continue
        if "weight_patches" in code:  # needs an inference engine; tests/weight_patches/test_engines.py runs this code
            continue
        assert "zeropp(model)" in code
        code = code.replace("zeropp(model)", "zeropp(model, ranks_per_node=2)")
        code = re.sub(r'torch.device\("cuda".*\)', 'torch.device("cpu")', code)
        assert all(ranks(4).run(run_python, code))


# ---- files for clouds, and the web site ----


def test_cloud_files_start_a_run_whose_flags_parse():
    job, task = map(yaml.safe_load, blocks("docs/guides/cloud.md", "yaml"))
    words = shlex.split(" ".join(commands(task["run"])))
    for flags in (job["spec"]["trainer"]["args"], words[words.index("pretrain_gpt.py") + 1 :]):
        config = parse_run_config(flags, ROOT, features=FEATURES).config
        assert config.zero.zeropp
        assert config.checkpoint.save == config.checkpoint.load == "/data/my-gpt"


@pytest.mark.nightly
def test_site_has_every_page_and_no_dead_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs/mkdocs.yml", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    navigation = (ROOT / ".mkdocs/mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in navigation, page
    flags = (tmp_path / "flags/index.html").read_text()
    assert all(flag in flags for flag in ("--zero-gradient-bits", "--num-generations", "--top-p"))


def test_charts_match_the_tables_next_to_them(tmp_path):
    for name in (".mkdocs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, tmp_path / ".mkdocs/pictures.py"], check=True)
    for path in (tmp_path / "docs/pictures").glob("*.svg"):
        assert path.read_text() == (ROOT / "docs/pictures" / path.name).read_text(), path.name


# ---- README and release files ----


def test_readme_is_short_and_its_badges_are_true():
    text, project = text_of("README.md"), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(text.split()) <= 900
    assert len(re.findall(r"^\|[-|]+\|$", text, re.M)) <= 3
    badges = re.findall(r"!\[(.*?)\]\(https://img.shields.io/badge/", text)
    oldest, newest = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", project["dependencies"][0]).groups()
    assert badges == [
        f"License: {project['license']}",
        f"Python {project['requires-python'].removeprefix('>=')} or newer",
        f"PyTorch 2.{oldest} to 2.{int(newest) - 1}",
        f"Status: {project['classifiers'][0].rpartition(' - ')[2].lower()}",
    ]


def test_readme_repeats_the_table_of_the_benchmarks():
    tables = []
    for page, heading in (("README.md", "## Results"), ("docs/benchmarks.md", "## Speed on slow links")):
        table = text_of(page).partition(f"{heading}\n")[2].partition("| uplink |")[2]
        tables.append(re.findall(r"^\| \"?(\d+ .bit/s).*?\| (\d.*) \|$", table.partition("\n## ")[0], re.M))
    assert len(tables[0]) == 5
    assert tables[0] == tables[1]


def test_every_file_names_the_version_and_the_address_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["version"] == megazpp.__version__
    assert citation["repository-code"] == project["urls"]["Repository"]
    for name in (*PAGES, "pyproject.toml", "CITATION.cff", ".mkdocs/mkdocs.yml"):
        for address in re.findall(r"https://github.com/[\w-]+/megazpp\b", text_of(name)):
            assert address == project["urls"]["Repository"], name


# ---- figures on the pages ----


@functools.cache
def planned(name: str, nodes: int, *flags: str, recompute: str | None = None) -> Estimate:
    """Return the planner's estimate of a shipped config on `nodes` nodes of eight GPUs.

    Args:
        name: name of the file in configs/.
        nodes: number of nodes.
        flags: further flags.
        recompute: which activations are recomputed, as for the planner's `with_recompute`.
    """
    config = for_planning(parse_run_config([f"@configs/{name}.args", *flags], ROOT, features=FEATURES).config, "--plan")
    cluster = Cluster(num_nodes=nodes, ranks_per_node=8)
    return Estimator(cluster, device_type="cpu").estimate(with_recompute(config, recompute))


@pytest.mark.slow
def test_memory_table_of_configs_matches_the_planner():
    rows = re.findall(r"^\| \[`(\w+)`\].*\| (\d+) x 8 \|(.*)\|$", text_of("docs/reference/configs.md"), re.M)
    assert {name for name, *_ in rows} == {p.stem for p in (ROOT / "configs").glob("*.args")} - {"gpt_tiny", "moe_tiny"}
    for name, nodes, figures in rows:
        zero3, zeropp = planned(name, int(nodes), "--compile"), planned(name, int(nodes), "--compile", "--zeropp")
        full = planned(name, int(nodes), "--compile", recompute="full")
        sizes = [estimate.gigabytes for estimate in (zero3, zeropp, full)]
        # The tolerance lets the planner change a little without a change of the page
        assert [float(f) for f in figures.split("|")] == pytest.approx([zero3.micro_batches, *sizes], rel=0.03), name


def test_zeropp_pages_example_and_formulas_match_the_planner():
    page = text_of("docs/concepts/zeropp.md")
    zero3, zeropp = planned("gpt_1b3", 2), planned("gpt_1b3", 2, "--zeropp", "--zero-weight-delta", "none")
    kinds, micro_batches = zeropp.memory, zero3.micro_batches
    shards = sum(kinds[kind] for kind in (Memory.PARAMETERS, Memory.MOMENTS)) / 1e9
    gradients = (each.memory.get(Memory.GRADIENTS, 0) / 1e9 for each in (zero3, zeropp))
    assert f"| {zero3.node_cross_bytes / 1e6:.1f} | {zeropp.node_cross_bytes / 1e6:.1f} |" in page
    assert f"| {shards:.3f} | {shards:.3f} |" in page
    assert "| {:.3f} | {:.3f} |".format(*gradients) in page

    # the formulas neglect exact 1-D parameters and the padding of shards
    close = functools.partial(pytest.approx, rel=0.005)
    parameters = kinds[Memory.PARAMETERS] / 4 * 16
    crossing = 1 / 2 * parameters * (1.0078 + 0.5156)
    assert f"which is {crossing / 1e6:.0f} MB" in page
    assert zeropp.node_cross_bytes == close(crossing)
    assert zero3.node_cross_bytes == close(15 / 16 * micro_batches * parameters * 8)
    assert zeropp.wires["local"] == close(7 / 8 * micro_batches * parameters * (2 * 1.0078 + 1.0156))
    for kind, factor in ((Memory.SECONDARY, 1.0078), (Memory.PARTIAL_SUMS, 4.0), (Memory.FEEDBACK, 1.0156)):
        assert f"| | {kinds[kind] / 1e9:.3f} |" in page
        assert kinds[kind] == close(factor * parameters / 8)


# ---- messages, fields and flags on the pages ----


@functools.cache
def sources() -> list[str]:
    """Return the texts of the source files of the package, the tools and the GPU check."""
    folders = [ROOT / name for name in ("megazpp", "kernels", "tools", "tests/gpu_check")]
    return [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]


@functools.cache
def source_strings() -> str:
    """Return all string literals of the source, joined by newlines; the constant pieces of an f-string are separate."""
    nodes = [node for source in sources() for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def test_quoted_messages_and_log_fields_occur_in_the_source():
    tables, log = text_of("docs/troubleshooting.md"), text_of("docs/reference/metrics.md")
    messages = re.findall(r"^\| `([^`]+)` \|", tables, re.M)
    assert len(messages) > 20
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in source_strings(), f"{message}: {part.strip()!r}"
    rows = re.findall(r"^\| (`.*?) \| ", log.partition("| field |")[2].partition("## ")[0], re.M)
    for field in re.findall(r"`([^`]+)`", " ".join(rows)):
        name = re.sub("^(tp|intra-node|inter-node|replica-group) ", "", field)
        assert re.search(rf"(?m)(^| ){re.escape(name)}", source_strings()), field


def test_zeropp_pages_table_lists_every_zeropp_flag():
    table = "".join(re.findall(r"^\| (`--.*?) \| ", text_of("docs/concepts/zeropp.md"), re.M))
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(ZeroConfig)}
    # these two flags are in the page's table of ZeRO stages instead
    for name in fields - {"zero-stage", "use-distributed-optimizer"}:
        assert re.search(rf"`--(no-)?{name}`", table), name


OTHERS_FLAGS = (
    "--job-name --master-port --nnodes --nproc-per-node --node-rank --rdzv-backend --rdzv-conf --master-addr "
    "--num_gpus --ntasks-per-node --gpus-per-task --strict --durations --index-url"
)


def bare(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("_", "-")


def test_every_flag_named_on_a_page_exists():
    fields, flags = (re.findall(pattern, "".join(sources())) for pattern in (r"\b(\w+): [^=\n]+ = flag\(", r"--[\w-]+"))
    known = {bare(name) for name in (*fields, *flags, *read_megatron_flags(), *OTHERS_FLAGS.split())}
    for page in set(PAGES) - {"docs/contributing/extending.md"}:  # this page adds a flag as an example
        quoted = [*blocks(page, "sh"), *re.findall(r"`([^`]+)`", prose(page))]
        for name in re.findall(r"(?<![\w-])--[a-z][\w-]*\*?", " ".join(quoted)):
            family = bare(name).rstrip("*-")  # `--zero-*` and `--no-...` name families of flags
            found = any(flag.startswith(family) for flag in known) if name[-1] in "*-" else family in known
            assert found, f"{page}: {name}"
