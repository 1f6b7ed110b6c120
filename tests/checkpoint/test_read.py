"""Test loading of checkpoints.

Damage is reported before the run's state changes, and errors explain contradicting flags.
"""

import copyreg
import dataclasses
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Attempt, record_of, run, schedule
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megazpp.base.files import DamagedError
from megazpp.base.program import UserError
from megazpp.checkpoint.checksums import read_checksums, sum_file, verify_files, write_checksums
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.read import choose_source, verify
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import Moments
from megazpp.optim.schedule import Schedule

CASE = Case()
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.txt", "run.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Train CASE on two ranks with checkpoints of iterations 1 and 2. Return the folder."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(run, CASE, 2, save=str(folder), save_interval=1)
    assert sorted(path.name for path in (folder / "iter_0000002").iterdir()) == FILES
    return folder


def try_loads(rows: list[tuple[dict[str, Any], dict[str, Any], str]]) -> None:
    """Load each row's checkpoint, and check the log lines or the error. A failed load must change no state.

    Args:
        rows: (checkpoint flags of the loading run, changed fields of its run.json, pattern). The pattern must match the
            error, or the log lines and the progress from which the run continues.
    """
    attempt = Attempt(CASE)
    checkpoints = attempt.checkpoints
    for flags, own, pattern in rows:
        checkpoints._config, checkpoints._record = CheckpointConfig(**flags), record_of(CASE, **own)
        before = attempt.fingerprint()
        attempt.lines.clear()
        try:
            source = choose_source(checkpoints._config, restarted=False)
            verified = verify(source, attempt.axis, attempt.lines.append)
            schedule = Schedule(**checkpoints._record.schedule)
            resumed = None if verified is None else checkpoints.load(verified, schedule)
            said = "\n".join([*attempt.lines, f"at {resumed.progress if resumed else 'the beginning'}"])
        except (ValueError, UserError) as error:
            said = f"{type(error).__name__}: {error}"
        assert re.search(pattern, said, re.DOTALL), (flags, own, pattern, said)
        assert "successfully loaded" in said or attempt.fingerprint() == before, (flags, own)


def test_parameter_without_one_of_its_moments_is_named_as_damage():
    model = torch.nn.Linear(2, 3)
    moments, properties = Moments(model, torch.optim.AdamW(model.parameters())), TensorProperties(dtype=torch.float32)
    keys = [
        f"optimizer.state.{name}.{kind}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq", "step")
    ]
    saved = {key: TensorStorageMetadata(properties, torch.Size([3]), []) for key in keys}
    assert len(moments.targets(saved)) == 6
    for key in keys:
        *_, name, kind = key.split(".")
        with pytest.raises(DamagedError, match=f"optimizer states of {name} lack {kind}: pass "):
            moments.targets({other: entry for other, entry in saved.items() if other != key})


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how.startswith("cut"):
        os.truncate(path, int(how.removeprefix("cut at ")) * len(content) // 100)
    else:
        content[int(how.removeprefix("changed at ")) * (len(content) - 1) // 100] ^= 16
        path.write_bytes(content)


@pytest.mark.parametrize("every_way", [False, slow(True)])
def test_any_damaged_file_is_named_and_only_fallback_loads_another(saved, tmp_path, every_way):
    ways = ("cut at 50", "changed at 50", "changed at 100", "changed at 0", "deleted", "cut at 0")
    anew = "^WARNING: .*successfully loaded checkpoint.*at TrainingProgress.iteration=1, consumed_samples=16"
    rows, fallback = [], []
    for number, name in enumerate(FILES):
        for how in ways if every_way else ways[number : number + 1]:
            load = str(shutil.copytree(saved, tmp_path / f"{name}-{how}"))
            damage(Path(load, "iter_0000002", name), how)
            rows.append(({"load": load}, {}, f"^DamagedError: {load}/iter_0000002/{name} "))
            if how == ways[number] and (every_way or name in (FILES[0], FILES[-1])):
                fallback.append(({"load": load, "load_fallback": True}, {}, anew))
    ranks(2).run(try_loads, rows + fallback)


class Call:
    """An object of which unpickling calls `function` with `arguments`, as in a malicious checkpoint."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def test_checkpoint_index_with_code_is_rejected_and_not_run(saved, tmp_path):
    """Put a call of os.mkdir into the pickled index of a checkpoint, and check that loading refuses to run it.

    The checksums are made valid, because checksums protect against accidents and not against attacks.
    """
    checkpoint = shutil.copytree(saved, tmp_path / "copy") / "iter_0000002"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "executed"))))
    write_checksums(checkpoint, {name: sum_file(checkpoint / name) for name in read_checksums(checkpoint)})
    refusal = "^ValueError: a checkpoint's index must not refer to posix.mkdir, which could run code: "
    ranks(2).run(try_loads, [({"load": str(tmp_path / "copy")}, {}, refusal)])
    assert not (tmp_path / "executed").exists()


def test_index_may_name_enum_members_by_attribute_but_nothing_else(saved, tmp_path, monkeypatch):
    """Read an index whose enum members are pickled as `getattr(class, name)`, as Python 3.11.0 to 3.11.3 do.

    Other attributes of a class, such as a method, must be rejected.
    """
    index = pickle.loads((saved / "iter_0000002/.metadata").read_bytes())
    monkeypatch.setitem(copyreg.dispatch_table, _MEM_FORMAT_ENCODING, lambda m: (getattr, (type(m), m.name)))
    content = pickle.dumps(index)
    assert b"getattr" in content
    (tmp_path / ".metadata").write_bytes(content)
    write_checksums(tmp_path, {".metadata": sum_file(tmp_path / ".metadata")})
    assert SafeReader(tmp_path).tensors() == SafeReader(saved / "iter_0000002").tensors()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(getattr, TensorProperties, "create_from_tensor")))
    with pytest.raises(ValueError, match="must not refer to an attribute of <class 'torch"):
        SafeReader(tmp_path).tensors()


def test_index_without_a_checksum_is_not_opened(tmp_path):
    """Use a FIFO as the index of a checkpoint whose checksums do not list it: opening a FIFO would never return."""
    os.mkfifo(tmp_path / ".metadata")
    write_checksums(tmp_path, {})
    with pytest.raises(ValueError, match=r"checksums.txt does not list .metadata"):
        SafeReader(tmp_path).tensors()


KEY = "model.embedding.word.weight"


def forged(saved: Path, copy: Path, change: Callable[[Any], None]) -> SafeReader:
    """Copy the checkpoint of iteration 2, apply `change` to its unpickled index, and return a reader of the copy."""
    checkpoint = shutil.copytree(saved / "iter_0000002", copy)
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    return SafeReader(checkpoint)


def test_tensor_whose_chunks_leave_gaps_or_overlap_is_refused(saved, tmp_path):
    """Change the chunks of a tensor in the index so that they leave gaps or overlap, and check that reading fails.

    Without the check, elements in a gap would silently keep what was in memory before.
    """
    rows, width = SafeReader(saved / "iter_0000002").read_whole(KEY).shape

    def chunks(*parts: tuple[int, int]) -> Callable[[Any], None]:
        def change(index: Any) -> None:
            entry = index.state_dict_metadata[KEY]
            made = [ChunkStorageMetadata(torch.Size([low, 0]), torch.Size([high - low, width])) for low, high in parts]
            index.state_dict_metadata[KEY] = dataclasses.replace(entry, chunks=made)

        return change

    wrong = {
        "none": (),
        "half": ((0, rows // 2),),
        "gap": ((0, 10), (11, rows)),
        "overlap of the size of the gap": ((0, 10), (5, 10), (15, rows)),
        "twice": ((0, rows), (0, rows)),
        "beyond the end": ((0, rows + 1),),
    }
    for name, parts in wrong.items():
        with pytest.raises(ValueError, match=f"the chunks of {KEY} do not cover each of its elements exactly once"):
            forged(saved, tmp_path / name, chunks(*parts)).read_box(KEY, (0, 0), torch.empty(rows, width))


def test_only_files_that_the_checksums_list_are_read(saved, tmp_path):
    """Let the index name files that are outside the checkpoint or have no checksum; none of them may be read.

    An index may come from an untrusted source. The file could be secret, and reading a FIFO would never end.
    """
    secret = shutil.copy(next((saved / "iter_0000002").glob("*.distcp")), tmp_path / "secret")
    for number, name in enumerate((str(secret), "../secret", "unlisted", "checksums.txt")):

        def change(index: Any, name: str = name) -> None:
            places = index.storage_data.items()
            index.storage_data = {key: dataclasses.replace(place, relative_path=name) for key, place in places}

        reader = forged(saved, tmp_path / str(number), change)
        with pytest.raises(ValueError, match=f"is in the file '{re.escape(name[:80])}', which checksums.txt does"):
            reader.read_whole(KEY)
    for number, name in enumerate((str(secret), "../secret", "a/../../secret")):
        checkpoint = shutil.copytree(saved / "iter_0000002", tmp_path / f"sums {number}")
        write_checksums(checkpoint, {name: sum_file(secret)})
        with pytest.raises(DamagedError, match=f"names a file outside of the checkpoint: {re.escape(name)}"):
            verify_files(checkpoint)
    pipe = shutil.copytree(saved / "iter_0000002", tmp_path / "pipe")
    (pipe / ".metadata").unlink()
    os.mkfifo(pipe / ".metadata")
    with pytest.raises(DamagedError, match=r"\.metadata is not a file"):
        verify_files(pipe)


def test_index_that_does_not_fit_the_stored_tensors_is_refused(saved, tmp_path):
    """Let the index describe a tensor by another dtype, another position or nonsense, and check that reading fails.

    Without the check, the bytes of the file would silently become other numbers.
    """

    def with_dtype(index: Any) -> None:
        index.state_dict_metadata[KEY].properties.dtype = torch.int32

    def with_smaller_tensor(index: Any) -> None:
        places = index.storage_data
        smaller = min(places, key=lambda place: places[place].length)
        for place in [place for place in places if place.fqn == KEY]:
            places[place] = places[smaller]

    def with_fewer_dimensions(index: Any) -> None:
        entry = index.state_dict_metadata[KEY]
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size([0]), torch.Size([entry.size[0]]))]

    def with_negative_length(index: Any) -> None:
        for place in [place for place in index.storage_data if place.fqn == KEY]:
            index.storage_data[place] = dataclasses.replace(index.storage_data[place], length=-1)

    def with_negative_size(index: Any) -> None:
        index.state_dict_metadata[KEY].size = (-1,)

    def without_tensors(index: Any) -> None:
        index.state_dict_metadata = None

    wrong = {
        with_dtype: f"{KEY} is stored as torch.float32 .*, but the index describes torch.int32",
        with_smaller_tensor: f"{KEY} is stored as torch.*, but the index describes torch.float32",
        with_fewer_dimensions: f"the index describes {KEY} wrongly: tuple index out of range",
        with_negative_length: f"{KEY} cannot be read as a tensor: .*Invalid argument",
        with_negative_size: f"the index describes {KEY} wrongly: .*negative dimension",
        without_tensors: "metadata cannot be read: it is not the index of a checkpoint",
    }
    for change, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            forged(saved, tmp_path / change.__name__, change).read_whole(KEY)


@pytest.mark.slow
def test_contradictions_of_a_run_and_its_checkpoint_are_explained(saved, tmp_path):
    other = {"schedule": dataclasses.asdict(dataclasses.replace(schedule(), max_lr=2e-2, decay_samples=999))}
    sgd = {"flags": {"optimizer": "sgd", "optimizer_backend": "torch"}}
    bytes_100, load, bare = {"tokenizer": "bytes-100"}, {"load": str(saved)}, {"load": str(tmp_path)}
    anew, one, two = (rf"at TrainingProgress.iteration={done}, consumed_samples=" for done in range(3))
    ranks(2).run(run, CASE, 1, save=str(tmp_path), save_optim=False, save_rng=False)
    rows = [
        (load, {"vocab_size": 103}, "the tokenizer has 103 tokens, but the tokenizer of .*iter_0000002 had 101"),
        (load, bytes_100, "ValueError: the tokenizer gives other ids than the tokenizer of .*--finetune"),
        (load | {"finetune": True}, bytes_100, "WARNING: the tokenizer gives other ids.*success"),
        (load, sgd, "--optimizer is sgd, was adam in .*moments"),
        (load, other, "max lr is 0.02, in .* 0.01\n.*decay samples is 999, in .*\n--override-opt_param-"),
        (load | {"override_opt_param_scheduler": True}, other, two),
        (load | {"use_checkpoint_opt_param_scheduler": True}, other, two),
        (load | {"finetune": True}, other, f"{anew}0"),
        (load | {"load_optim": False}, other, "consumed_samples=32, scheduled_samples=0"),
        (load | {"ckpt_step": 1}, {}, f"{one}16, scheduled_samples=16"),
        ({"load": f"{saved}/missing"}, {}, "WARNING: could not find the metadata file .* random\nat the beginning"),
        # If the checkpoint has no optimizer moments or random states, the error names the flag that loads the rest
        # without them.
        (bare, {}, "Unable to load optimizer from checkpoint"),
        (bare | {"load_rng": False}, {}, "--no-load-optim or --finetune"),
        (bare | {"load_rng": False, "load_optim": False}, {}, one),
        (bare | {"finetune": True}, {}, anew),
    ]
    ranks(2).run(try_loads, rows)
