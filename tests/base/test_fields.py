"""Test every field of every config dataclass: numbers that are rejected, and that some test uses each flag."""

import ast
import dataclasses
import importlib
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.refusals import not_refused, table
from helpers.small_run import ROOT, SMALL, parse
from helpers.tiers import slow

from megazpp.base.flags import flag_name, flag_texts
from megazpp.diloco import config as diloco_config
from megazpp.diloco.config import DilocoConfig
from megazpp.features import FEATURES
from megazpp.parallel.launch import detect_rank_info
from megazpp.run.arguments import run_configs, section_configs
from megazpp.run.checks import RunPlan, plan_run
from megazpp.training import config as training_config
from megazpp.training.config import AnomalyConfig, ProfilerConfig, TimingConfig

BESIDE = """
--train-iters none | --train-samples
--train-iters none --train-samples 100 | --rampup-batch-size --lr-decay-samples --lr-warmup-samples
--train-iters none --train-samples 100 --lr-decay-style WSD | --lr-wsd-decay-samples
--optimizer sgd | --sgd-momentum
--optimizer muon | --muon-momentum --muon-num-ns-steps --muon-extra-scale-factor --muon-adam-lr-multiple
--optimizer muon | --muon-full-interval
--lr-decay-style WSD | --lr-wsd-decay-iters
--position-embedding-type rope --use-rope-scaling | --rope-scaling-factor
--weight-decay-incr-style linear --end-weight-decay 1 | --start-weight-decay
--weight-decay-incr-style linear --start-weight-decay 0 | --end-weight-decay
--group-query-attention | --num-query-groups
--recompute-granularity full --recompute-method block | --recompute-num-layers
--save x | --save-interval --keep-last --save-retain-interval
--load x | --ckpt-step
--profile | --profile-step-start
--profile --profile-step-start 0 | --profile-step-end
--profile --profile-step-start 0 --profile-step-end 1 | --profile-ranks
"""  # each line: flags to set | flags that have an effect, or are checked, only together with the flags to set
NEEDED = {name: beside for beside, names in table(BESIDE) for name in names.split()}
IGNORED = {"--local-rank"}  # flags of which any value is accepted, so no number is rejected
ZERO_MEANS_SOMETHING = re.findall(  # flags for which 0 is valid, mostly to switch a feature off
    "--[a-z0-9-]+",
    """
--hidden-dropout --attention-dropout --num-workers --weight-decay --adam-beta1 --adam-beta2 --sgd-momentum --lr --min-lr
--muon-momentum --muon-full-interval
--zero-error-feedback-beta --diloco-outer-momentum --diloco-fragment-sync-delay --diloco-fragment-update-alpha
--clip-grad --lr-warmup-fraction
--lr-warmup-iters --lr-warmup-samples --lr-warmup-init --start-weight-decay --end-weight-decay --max-restarts --seed
--ckpt-step --eval-iters --profile-step-start --profile-ranks --sample-tokens --sample-temperature --sample-top-k
--sample-min-p
""",
)
NOT_USED = dict(  # flags that no test uses, and the reason why a test is not needed
    table("""
use_cpu_initialization | on a CPU, weights are initialized there anyway; the flag has an effect only on a GPU
memory_snapshot_path | file name for --record-memory-history, which needs CUDA
diloco_fragment_update_alpha | test_diloco.py sets it as fragment_update_alpha, an argument of its function `exact`
zero_verify_interval | does not change a healthy run; test_verify.py and test_anomalies.py test the verification
exit_on_missing_checkpoint | only raises an error, which test_load_source.py and test_pretrain.py test
ref_checksum | written by the program; test_post_train.py changes the base model that it is the checksum of
""")
)


# ---- numbers that flags reject ----------------------------------------------------------------------------------


def numbers(wanted: str) -> dict[str, int]:
    """Return the flags of a run that take numbers of the type `wanted`, each with its number of values.

    `wanted` is "int" or "float".
    """
    found = {}
    for config in (*run_configs().values(), *section_configs(FEATURES)):
        for field in dataclasses.fields(config):
            if re.search(rf"\b{wanted}\b", str(typing.get_type_hints(config)[field.name])):
                count = field.metadata["flag"].nargs
                found[flag_name(field)] = count if isinstance(count, int) else 1
    return found


FLOATS, INTS = numbers("float"), numbers("int")


def plan(flags: str) -> RunPlan:
    """Parse and check `flags`, as the program does before it starts workers. Return the plan of the run."""
    config = parse(f"{SMALL} {flags}").config
    place = detect_rank_info(config.launch, {})
    cluster = config.detect_cluster(place.world_size, {})
    return plan_run(config, cluster, device_type="cpu")


def test_non_finite_and_too_large_numbers_are_rejected_all_at_once():
    for flags, values, reason in (
        (FLOATS, ("nan", "-inf", "1e400"), "is not a finite number"),
        (INTS, ("99999999999999999999", "-99999999999999999999"), "does not fit 64 bits"),
    ):
        for value in values:
            with pytest.raises(ValueError, match="command line") as caught:
                plan(" ".join(f"{name} {' '.join([value] * count)}" for name, count in flags.items()))
            for name, line in zip(flags, str(caught.value).splitlines(), strict=True):
                assert line.startswith(f"command line: {name}")
                assert line.endswith(f": {value!r} {reason}")


@pytest.mark.parametrize("value", ["0", slow("-1")])
def test_numbers_below_1_are_rejected_by_flag_unless_0_is_valid(value):
    rows = []
    for name, count in {**INTS, **FLOATS}.items():
        flags = f"{NEEDED.get(name, '')} {name} {' '.join([value] * count)}"
        if value == "0" and name in ZERO_MEANS_SOMETHING:
            plan(flags)
        elif name not in IGNORED:
            rows.append((flags, f"{name} {value}"))
    assert len(rows) > 50
    assert not not_refused(rows, plan)
    assert {*NEEDED, *ZERO_MEANS_SOMETHING, *IGNORED} <= FLOATS.keys() | INTS.keys()
    assert plan("").layout.data >= 2  # SMALL alone is valid, so each error comes from the flag of its row


# ---- flags that at least one test uses --------------------------------------------------------------------------


def configs() -> Iterator[type]:
    """Yield every dataclass with flags in megazpp/ and tools/."""
    for path in (*(ROOT / "megazpp").rglob("*.py"), *(ROOT / "tools").glob("*.py")):
        if re.search(r": .* = flag\(", path.read_text()):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts) if parts[0] == "megazpp" else path.stem)
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            yield from (c for c in classes if dataclasses.is_dataclass(c) and c.__module__ == module.__name__)


def used_words() -> set[str]:
    """Return the keyword arguments, attributes and words in strings that tests contain.

    A flag counts as used if its name is among them. Tests of errors and help do not count.
    """
    words: set[str] = set()
    for path in {*(ROOT / "tests").rglob("*.py")} - {Path(__file__), ROOT / "tests/test_docs.py"}:
        lines = path.read_text().splitlines()
        for statement in ast.parse("\n".join(lines)).body:
            names = [getattr(target, "id", "") for target in getattr(statement, "targets", [])]
            names.append("refused" if isinstance(statement, ast.ImportFrom) else getattr(statement, "name", ""))
            if not any(re.search("refused|REFUSED|help|OTHER_DEFAULTS", name) for name in names):
                first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
                text = "\n".join(lines[first - 1 : statement.end_lineno])
                words.update(word for pair in re.findall(r"\.(\w+)|\b(\w+)=(?!=)", text) for word in pair)
                for string in re.findall(r'"""[^"]*"""|"[^"\n]*"', text):
                    words.update(re.findall(r"[\w-]+", string))
    return words


def test_every_flag_is_used_by_a_test_or_has_a_reason():
    words, unused = used_words(), set()
    for config in configs():
        for field in dataclasses.fields(config):
            if spec := field.metadata.get("flag"):
                name = flag_name(field)
                spellings = {field.name, name, name.replace("--", "--no-", 1), *spec.aliases}
                unused |= set() if spellings & words else {field.name}
    assert len(words) > 5_000
    assert unused <= {*NOT_USED}


def test_every_flag_has_a_text_for_help_in_the_docstring_of_its_config():
    for path in (*(ROOT / "megazpp").rglob("*.py"), *(ROOT / "tools").glob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if " = flag(" in text else ():
            if isinstance(node, ast.ClassDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is not None]
                names = [ast.unparse(each.target) for each in fields if ast.unparse(each.value).startswith("flag(")]
                documented = flag_texts(type(node.name, (), {"__doc__": ast.get_docstring(node)}))
                assert not names or list(documented) == names, f"{path}: {node.name}"


def test_texts_of_flags_have_the_numbers_of_the_program():
    for config, name, words in (
        (TimingConfig, "log_straggler", f"takes over {training_config.SLOW} times"),
        (ProfilerConfig, "record_memory_history", f"last {training_config.MOST_ALLOCATIONS} CUDA allocations"),
        (AnomalyConfig, "loss_spike_sigma", f"the last {training_config.WINDOW} losses; takes effect after"),
        (AnomalyConfig, "loss_spike_sigma", f"takes effect after {training_config.FEWEST} steps"),
        (DilocoConfig, "diloco_outer_lr", f"fewer than {diloco_config.FEWEST} planned synchronizations"),
        (DilocoConfig, "diloco_outer_lr", f"--diloco-steps below {diloco_config.SHORTEST})"),
    ):
        assert words in flag_texts(config)[name], name
