"""Damage is found and named before anything changes; contradictions are explained."""

import copyreg
import dataclasses
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Attempt, Job, run, schedule, template
from helpers.ranks import ranks
from helpers.training import Case
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from megazpp.base.program import UserError
from megazpp.checkpoint.checksums import read_checksums, sum_file, write_checksums
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.read import choose_source
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.optim.schedule import Schedule

CASE = Case()
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.txt", "run.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of iterations 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(run, Job(case=CASE, steps=2, flags={"save": str(folder), "save_interval": 1}))
    assert sorted(path.name for path in (folder / "iter_0000002").iterdir()) == FILES
    return folder


def try_loads(attempts: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[str, bool]]:
    """What each load says at last, or why it is refused; and whether the state has changed by it.

    Args:
        attempts: flags, and values of the record of the run that loads.
    """
    results = []
    attempt = Attempt(Job(case=CASE, steps=2, flags={}))
    checkpoints, record = attempt.checkpoints, template(attempt.job)
    for flags, own in attempts:
        checkpoints._config, checkpoints._record = CheckpointConfig(**flags), dataclasses.replace(record, **own)
        before = attempt.fingerprint()
        attempt.lines.clear()
        try:
            source = choose_source(checkpoints._config, restarted=False)
            assert source is not None
            resumed = checkpoints.load(source, Schedule(**checkpoints._record.schedule))
            said = "\n".join([*attempt.lines, f"at {resumed.progress if resumed else 'the beginning'}"])
        except (ValueError, UserError) as error:
            said = f"{type(error).__name__}: {error}"
        results.append((said, attempt.fingerprint() != before))
    return results


def damaged(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
        return
    if how == "cut":
        del content[len(content) // 2 :]
    elif how == "emptied":
        content.clear()
    else:
        content[int(how) * (len(content) - 1) // 100] ^= 16
    path.write_bytes(content)


def test_every_file_that_is_cut_or_changed_is_named_and_nothing_is_loaded_but_by_fallback(saved, tmp_path):
    cases = [(name, how) for name in FILES for how in ("cut", "emptied", "deleted", "0", "50", "100")]
    copies = [tmp_path / str(index) for index in range(len(cases))]
    for copy, (name, how) in zip(copies, cases, strict=True):
        shutil.copytree(saved, copy)
        damaged(copy / "iter_0000002" / name, how)
    results = ranks(2).run(try_loads, [({"load": str(copy)}, {}) for copy in copies])
    for result in results:  # the same on every rank
        for copy, (name, how), (said, changed) in zip(copies, cases, result, strict=True):
            assert said.startswith(f"DamagedError: {copy / 'iter_0000002' / name} "), (name, how, said)
            assert not changed

    pairs = zip(FILES, ("cut", "50", "100", "0", "deleted"), strict=True)
    some = [copies[cases.index((name, how))] for name, how in pairs]
    fallback = [({"load": str(copy), "load_fallback": True}, {}) for copy in some]
    for said, _ in ranks(2).run(try_loads, fallback)[0]:
        assert said.startswith("WARNING: ")
        assert "successfully loaded checkpoint" in said
        assert "at TrainingProgress(iteration=1, consumed_samples=16" in said


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "executed"),)


def test_a_checkpoint_with_code_in_its_index_is_refused_and_the_code_not_run(saved, tmp_path):
    """With checksums that are right: they guard against accidents, not against people."""
    shutil.copytree(saved, tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "iter_0000002"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path)))
    write_checksums(checkpoint, {name: sum_file(checkpoint / name) for name in read_checksums(checkpoint)})
    ((said, changed),) = ranks(2).run(try_loads, [({"load": str(tmp_path / "copy")}, {})])[0]
    assert said == "ValueError: a checkpoint's index has no use for posix.mkdir"
    assert not changed
    assert not (tmp_path / "executed").exists()


class Attribute:
    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_members_of_enumerations_may_be_named_by_attribute_and_nothing_else(saved, tmp_path, monkeypatch):
    """As Python 3.11.0 to 3.11.3 write an index."""
    index = pickle.loads((saved / "iter_0000002/.metadata").read_bytes())
    monkeypatch.setitem(copyreg.dispatch_table, _MEM_FORMAT_ENCODING, lambda m: (getattr, (type(m), m.name)))
    content = pickle.dumps(index)
    assert b"getattr" in content
    (tmp_path / ".metadata").write_bytes(content)
    assert SafeReader(tmp_path).tensors() == SafeReader(saved / "iter_0000002").tensors()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(TensorProperties, "create_from_tensor")))
    with pytest.raises(ValueError, match="has no use for an attribute of <class 'torch"):
        SafeReader(tmp_path).tensors()


def test_what_contradicts_the_checkpoint_is_explained(saved):
    other = dataclasses.asdict(dataclasses.replace(schedule(), max_lr=2e-2, decay_samples=999))
    sgd = {"flags": {"optimizer": "sgd", "optimizer_backend": "torch"}}
    differs = r"max lr is 0.02, in .* 0.01\n.*decay samples is 999, in .*\n--override-opt_param-"
    anew = "WARNING: could not find the metadata file .*\n.* random\nat the beginning"
    load = {"load": str(saved)}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (load, {"vocab_size": 103}, "the tokenizer has 103 tokens, that of .*iter_0000002 had 101"),
        (load, {"tokenizer": "bytes-100"}, "ValueError: the tokenizer gives other ids than that of .*--finetune"),
        (load | {"finetune": True}, {"tokenizer": "bytes-100"}, "WARNING: the tokenizer gives other ids(.|\n)*success"),
        (load, sgd, "--optimizer is sgd, was adam in .*moments"),
        (load, {"schedule": other}, differs),
        (load | {"override_opt_param_scheduler": True}, {"schedule": other}, "at TrainingProgress.iteration=2"),
        (load | {"use_checkpoint_opt_param_scheduler": True}, {"schedule": other}, "at TrainingProgress.iteration=2"),
        (load | {"finetune": True}, {"schedule": other}, "at TrainingProgress.iteration=0, consumed_samples=0"),
        (load | {"load_optim": False}, {"schedule": other}, "consumed_samples=32, scheduled_samples=0"),
        (load | {"ckpt_step": 1}, {}, "at TrainingProgress.iteration=1, consumed_samples=16, scheduled_samples=16"),
        ({"load": str(saved / "missing")}, {}, anew),
    ]
    results = ranks(2).run(try_loads, [(flags, own) for flags, own, _ in cases])[0]
    for (*_, message), (said, changed) in zip(cases, results, strict=True):
        assert re.search(message, said), (message, said)
        assert not changed or "successfully loaded" in said, message


def test_a_checkpoint_without_moments_or_generators_says_which_flag_goes_on_without(tmp_path):
    save = str(tmp_path)
    ranks(2).run(run, Job(case=CASE, steps=1, flags={"save": save, "save_optim": False, "save_rng": False}))
    attempts = [{}, {"load_rng": False}, {"load_rng": False, "load_optim": False}, {"finetune": True}]
    said = [text for text, _ in ranks(2).run(try_loads, [({"load": save} | flags, {}) for flags in attempts])[0]]
    assert "Unable to load optimizer from checkpoint" in said[0]
    assert "--no-load-optim or --finetune" in said[1]
    assert "at TrainingProgress(iteration=1" in said[2]
    assert "at TrainingProgress(iteration=0" in said[3]
