"""Test that checkpoints written by an earlier version resume as they did in that version.

Commit 4e7c419 wrote `fixtures/checkpoints_4e7c419.tar.xz` with the flags in its `tiny.args`. The losses and gradient
norms below are from that commit's own continuation.
"""

import json
import tarfile

import pytest
from helpers.program import ROOT, run_forked

pytestmark = pytest.mark.slow

ARCHIVE = ROOT / "tests" / "fixtures" / "checkpoints_4e7c419.tar.xz"
PRETRAIN = "pretrain_gpt.py @tiny.args --nproc 2 --save-interval 100"
DILOCO = "--emulate-nodes 2 --diloco-steps 2 --diloco-islands 2 --diloco-gradient-bits 16 --diloco-weight-bits 16"
LORA = "tools/post_train.py --objective sft --nproc 2 --lora-r 2 --lora-alpha 4 --data-path sft.jsonl"
BATCHES = "--max-length 16 --global-batch-size 2 --micro-batch-size 1 --lr 1e-2 --log-interval 1"
CASES = {
    "plain": (
        f"{PRETRAIN} --train-iters 4 --load plain --save plain",
        {3: (5.552749156951904, 0.8870145082473755), 4: (5.544958591461182, 0.9401849508285522)},
    ),
    "replica groups": (
        f"{PRETRAIN} --train-iters 5 --load islands --save islands {DILOCO}",
        {4: (5.555530071258545, 1.3365545272827148), 5: (5.555505752563477, 1.256232500076294)},
    ),
    "lora": (
        f"{LORA} --train-iters 4 --load lora --save lora --lora-base base {BATCHES}",
        {3: (5.5561864376068115, 0.036627188324928284), 4: (5.552971601486206, 0.060392968356609344)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_of_4e7c419_resumes_with_its_losses(tmp_path, name):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    command, expected = CASES[name]
    program, *flags = f"{command} --data-cache-path cache --run-dir run".split()
    code, output = run_forked(str(ROOT / program), *flags, folder=tmp_path, cwd=tmp_path)
    assert code == 0, output
    assert "samples come in" not in output
    assert ("samples may come in" in output) == (name == "lora")  # the data was in another folder
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(expected), output
    for row in rows:  # other processors sum in another order
        assert (row["lm_loss"], row["grad_norm"]) == pytest.approx(expected[row["iteration"]], rel=2e-6)
