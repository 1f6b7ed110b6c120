"""Test the examples of ZeRO++ with other frameworks, each started by torchrun on 2 emulated nodes x 2 ranks."""

import re
from pathlib import Path

import pytest
from helpers.fork_python import forked_python
from helpers.program import ROOT, run_program
from helpers.tiers import chosen

EXAMPLES = sorted((ROOT / "tools/examples").glob("*.py"))
# Example that the slow tier runs. The others are nightly, because tests in tests/drop_in already run their training
# loops and their mixtures of experts.
DISTINCT = ("own_loop",)
NEEDS = {"accelerate_loop": "accelerate", "trainer": "accelerate", "torchtitan_llama": "torchtitan"}


def losses(mode: str, path: str, folder: Path) -> list[float]:
    """Run the example at `path` with ZeRO++ "off", "exact" or "default".

    Return its printed losses, sorted, because ranks print in any order.
    """
    runner = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python")
    python = str(forked_python())
    command = (python, str(ROOT / "tests/helpers/on_cpu.py"), mode, path)
    code, output = run_program(*runner, *command, folder=folder, python=python)
    assert code == 0, output
    assert ("in two hops" in output) == (mode != "off")
    return sorted(float(loss) for loss in re.findall(r"(?:loss |'loss': ')([0-9.]+)", output))


@pytest.mark.parametrize("path", chosen({path.stem: path for path in EXAMPLES}, slow=DISTINCT))
def test_example_without_quantization_matches_training_without_zeropp(path, tmp_path, monkeypatch):
    """Compare losses of an example without ZeRO++, with ZeRO++ in exact messages, and with quantized messages.

    The frameworks print four digits, and TRL sums in bf16.
    """
    monkeypatch.setenv("MEGAZPP_RANKS_PER_NODE", "2")
    pytest.importorskip(NEEDS.get(path.stem, "trl" if "trl" in path.stem else "torch"))
    without = losses("off", str(path), tmp_path)
    assert losses("exact", str(path), tmp_path) == pytest.approx(without, abs=2e-3)
    assert losses("default", str(path), tmp_path) == pytest.approx(without, rel=1e-2)
    assert len(without) >= 4


def test_example_has_at_most_40_lines_and_documents_its_command():
    for path in EXAMPLES:
        text = path.read_text()
        assert text.count("\n") <= 40, path.name
        assert f"--rdzv-endpoint HOST:29500 tools/examples/{path.name}\n" in text.partition('\n"""')[0] + "\n"
