"""Test checkpoints of models with `megazpp.zeropp`.

The checkpoints have the same contents as without ZeRO++. The state of ZeRO++, such as error feedback, is saved in files
beside them.
"""

import contextlib
import gc
import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import optimizer as torch_optimizer

import megazpp
from megazpp.drop_in.handle import Handle

VOCAB, WIDTH = 61, 32
KINDS: dict[str, dict[str, Any]] = {
    "lossless": {"zero_weight_delta": "lossless", "zero_gradient_bits": (16, 16), "zero_error_feedback": False},
    "feedback": {"zero_weight_bits": 16},
    "both": {"zero_weight_delta": "lossless"},
}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Words(nn.Module):
    """A model that predicts the next word from the current one; its forward calls its children in order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 47), nn.Tanh()) for _ in range(1)))
        self.output = nn.Linear(47, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            ids = child(ids)
        return ids.clone()  # FSDP2 warns if a module returns a view


class Run:
    """A training of a small model on FSDP2 on this rank.

    Args:
        kind: key of KINDS, the settings of ZeRO++; None for plain FSDP2.
        ranks_per_node: ranks per emulated node.
        seed: seed of the initial weights.
        frozen: part of the names of frozen parameters; "" freezes none.

    Attributes:
        said: text that `zeropp` and the training have printed on this rank so far.
    """

    def __init__(self, kind: str | None, *, ranks_per_node: int = 2, seed: int = 0, frozen: str = "") -> None:
        self.model, self.said, self.handle = Words(seed), io.StringIO(), None
        for module in (self.model.blocks[0], self.model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))
        if kind is not None:
            zero = megazpp.ZeroConfig(zeropp=True, **KINDS[kind])
            with contextlib.redirect_stdout(self.said):
                self.handle = megazpp.zeropp(self.model, ranks_per_node=ranks_per_node, config=zero)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def steps(self, first: int, last: int) -> list[float]:
        """Train from step `first` to step `last` - 1, and return the mean loss of each step.

        Each step has the same four samples in every layout of ranks.
        """
        losses, size = [], dist.get_world_size()
        for step in range(first, last):
            mean = torch.zeros(())
            for sample in range(4 * step + dist.get_rank(), 4 * step + 4, size):
                ids = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(sample))
                with contextlib.redirect_stdout(self.said):
                    logits = self.model(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) * size / 4
                loss.backward()
                mean += loss.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.handle is not None:
                self.handle.end_step(1.0, iteration=step + 1)
            dist.all_reduce(mean)
            losses.append(mean.item() / size)
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model), "optimizer": self.optimizer_state()}

    def optimizer_state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)
        if self.handle is not None:
            self.handle.save(folder)

    def load(self, folder: str, *, handle: str = "after") -> None:
        """Load the checkpoint by DCP, and the state of ZeRO++ "before" it, "after" it, or "not at all" (`handle`)."""
        for moment in ("before", "", "after"):
            if moment == handle:
                with contextlib.redirect_stdout(self.said):
                    self.handle.load(folder)
            elif not moment:
                dcp.load(state := self.state(), checkpoint_id=folder)
                set_model_state_dict(self.model, state["model"])
                set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def crossed(self) -> int:
        return sum(row.sent_bytes for key, row in self.handle.counter.table().items() if key[2] == "all_gather")


# ---- `zeropp` adds nothing to the model -----------------------------------------------------------------------------


def uses_of_a_model() -> None:
    """Check that `zeropp` adds no module, parameter, buffer or key of the state dict to a model."""
    for kind in (None, *KINDS):
        model = Run(kind).model
        if kind is None:
            names = {name: type(each) for name, each in model.named_modules()}
            keys = list(model.state_dict())
            assert [name for name, _ in model.named_children()] == ["words", "blocks", "output"]
        assert {name: type(each) for name, each in model.named_modules()} == names
        assert list(model.state_dict()) == list(get_model_state_dict(model)) == keys
        # Additional modules or parameters would break these uses of the model: a feature extractor, parameter groups by
        # children, copies of all weights, and a strict load of these copies
        features = nn.Sequential(*list(model.children())[:-1])
        assert sum(1 for _ in features.parameters()) == len(keys) - 2
        head = list(list(model.children())[-1].parameters())
        assert [name for name, each in model.named_parameters() if any(each is p for p in head)] == keys[-2:]
        copies = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.load_state_dict(copies, strict=True)
        assert len(list(model.buffers())) == 0
        assert all(isinstance(each, torch.Tensor) for each in copies.values())


def test_zeropp_adds_nothing_to_modules_or_state_dict():
    ranks(2).run(uses_of_a_model)


def step_hooks() -> None:
    """Check that deleted models leave no global hooks for the steps of optimizers.

    One model was wrapped by `fully_shard` before the call of `zeropp`, the other one by `zeropp`.
    """
    counts = list[int]()
    for _ in range(2):
        Run("lossless").steps(0, 1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        megazpp.zeropp(model, ranks_per_node=1)
        del model
        gc.collect()
        hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        counts.append(sum(map(len, hooks)))
    assert counts == counts[:1] * 2


def test_deleted_models_leave_no_optimizer_hooks():
    ranks(2).run(step_hooks)


# ---- checkpoints that plain FSDP2 and ZeRO++ exchange ---------------------------------------------------------------


def load_by_dcp(run: Run, folder: str) -> None:
    run.load(folder, handle="not at all")


def load_in_place(run: Run, folder: str) -> None:
    dcp.load(run.state(), checkpoint_id=folder)


def load_whole(run: Run, folder: str, *, broadcast: bool = False) -> None:
    model, optimizer = torch.load(f"{folder}/whole.pt") if not broadcast or dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(run.model, model, options=options)
    set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=options)


def load_broadcast(run: Run, folder: str) -> None:
    load_whole(run, folder, broadcast=True)


LOADS = {load.__name__: load for load in (load_by_dcp, load_in_place, load_whole, load_broadcast)}


def exchange_checkpoints(folder: str, saved_by: str | None, loaded_by: str | None, load: str) -> None:
    """Load a run's checkpoint into another run, and compare the next steps of both.

    Args:
        folder: folder for the checkpoint.
        saved_by: key of KINDS of the run that saves; None for plain FSDP2.
        loaded_by: key of KINDS of the run that loads; None for plain FSDP2.
        load: key of LOADS, the way to load.
    """
    run = Run(saved_by)
    run.steps(0, 2)
    run.save(folder)
    whole = get_model_state_dict(run.model, options=WHOLE), run.optimizer_state(WHOLE)
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.barrier()
    expected, again = run.steps(2, 4), Run(loaded_by, seed=1)
    LOADS[load](again, folder)
    # The first forward after the load has the checkpoint's weights. Later losses differ by the rounding of the wire
    # formats
    found = again.steps(2, 4)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-2)


EXCHANGED = {f"{kind}, {load}": (kind, load) for kind, load in itertools.product(KINDS, LOADS)}


@pytest.mark.parametrize(
    "case", chosen(EXCHANGED, "both, load_broadcast", slow=("lossless, load_by_dcp", "feedback, load_in_place"))
)
def test_checkpoints_load_with_and_without_zeropp(case, tmp_path):
    kind, load = case
    for number, kinds in enumerate([(None, kind), (kind, None), (kind, kind)]):
        (folder := tmp_path / str(number)).mkdir()
        ranks(2).run(exchange_checkpoints, str(folder), *kinds, load)


# ---- the state of ZeRO++, saved beside a checkpoint -----------------------------------------------------------------


def resume(folder: str, kind: str, moment: str) -> None:
    """Check that a loaded run, and a run that loads from a new save of this run, repeat the losses of the first run.

    The new save of the state of ZeRO++ happens before any step has used the loaded state. `moment` is passed to
    `Run.load` as `handle`.
    """
    run = Run(kind)
    run.steps(0, 2)
    run.save(folder)
    expected, again = run.steps(2, 4), Run(kind, seed=1)
    again.steps(0, 1)  # after this step, `again` has error feedback and resident weights, which the load must replace
    again.load(folder, handle=moment)
    again.handle.save(f"{folder}/again")  # no step has used the loaded state yet
    assert again.steps(2, 4) == expected
    third = Run(kind, seed=2)
    third.load(folder, handle="not at all")
    third.handle.load(f"{folder}/again")
    assert third.steps(2, 4) == expected
    assert "whole weights" not in again.said.getvalue() + third.said.getvalue()
    assert ("unless Handle.load" in again.said.getvalue()) == (dist.get_rank() == 0)


@pytest.mark.parametrize("moment", ["before", slow("after")])
def test_run_with_loaded_state_is_bit_identical(moment, tmp_path):
    ranks(4).run(resume, str(tmp_path), "both", moment)


def save_from(folder: str, kind: str) -> list[float]:
    run = Run(kind)
    run.steps(0, 2)
    run.save(folder)
    return run.steps(2, 4)


def load_into(folder: str, kind: str, ranks_per_node: int) -> tuple[list[float], str]:
    """Resume in another layout than the checkpoint's; return the losses of the resumed steps and the printed text.

    A run that does not load the state of ZeRO++ must have the same losses.
    """
    found = []
    for handle in ("after", "not at all"):
        run = Run(kind, seed=1, ranks_per_node=ranks_per_node)
        run.load(folder, handle=handle)
        found.append(run.steps(2, 4))
    assert found[0] == found[1]
    run.load(folder, handle="after")
    return found[0], run.said.getvalue()


def test_state_of_another_layout_starts_anew_with_one_line(tmp_path):
    folder = str(tmp_path)
    expected = ranks(4).run(save_from, folder, "both")[0]
    losses, said = ranks(4).run(load_into, folder, "both", 1)[0]
    assert losses == pytest.approx(expected, rel=2e-2)
    assert said.count("has no state of ZeRO++ for this layout") == 1
    assert len(list(tmp_path.glob("zeropp_2x2x1x1_rank*.pt"))) == 4


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"text"])
def test_damaged_state_is_named_with_a_remedy(content, tmp_path):
    file = tmp_path / "zeropp_2x1x1x1_rank0.pt"
    file.write_bytes(content)
    handle: Any = SimpleNamespace(keeps_state=True, _path=lambda folder: file)
    with pytest.raises(ValueError, match=r"rank0\.pt cannot be read, delete it to start anew: "):
        Handle.load(handle, tmp_path)


def fresh(run: Run, folder: str) -> None:
    """Leave the loaded run unchanged, so that its state of ZeRO++ fits its weights and is used."""


def other_weights(run: Run, folder: str) -> None:
    with torch.no_grad():
        run.model.output.weight.to_local().mul_(0.5)


def other_weights_on_one_rank(run: Run, folder: str) -> None:
    if dist.get_rank() == 1:
        other_weights(run, folder)


def without_a_file_on_one_rank(run: Run, folder: str) -> None:
    run.handle.load(folder if dist.get_rank() == 0 else f"{folder}/elsewhere")


CHANGES: dict[str, Callable[[Run, str], None]] = {
    change.__name__: change for change in (fresh, other_weights, other_weights_on_one_rank, without_a_file_on_one_rank)
}


def load_and_change(folder: str, change: str) -> tuple[int, str]:
    """Save a run, load it into another run, change this run, and take a step.

    Args:
        folder: folder for the checkpoint.
        change: key of CHANGES.

    Returns:
        (bytes of weights that this rank sends across nodes in the step, printed text).
    """
    run = Run("lossless", ranks_per_node=1)
    # more than two deltas, because the first two have room for a change of every element and would be larger
    run.steps(0, 4)
    run.save(folder)
    again = Run("lossless", seed=1, ranks_per_node=1)
    again.load(folder)
    CHANGES[change](again, folder)
    before = again.crossed()
    assert all(loss < 5 for loss in again.steps(4, 5))
    return again.crossed() - before, again.said.getvalue()


@pytest.mark.slow
def test_state_of_other_weights_is_not_restored(tmp_path):
    """Make each change of CHANGES to a loaded run, and check whether the loaded state of ZeRO++ is used.

    If the state does not fit the changed weights, the run must send complete weights, and rank 0 must print a line.
    """
    found = {}
    for name in CHANGES:
        (folder := tmp_path / name).mkdir()
        results = ranks(2).run(load_and_change, str(folder), name)
        found[name] = results[0]
    sent = {name: each[0] for name, each in found.items()}
    lines = {name: each[1].count("was saved with other weights, or is missing") for name, each in found.items()}
    assert lines == {name: int(name != "fresh") for name in CHANGES}
    assert sent["fresh"] < sent["other_weights"] == sent["other_weights_on_one_rank"]
    assert sent["other_weights"] < sent["without_a_file_on_one_rank"]


def load_with_other_parameters(folder: str) -> str:
    run = Run("feedback", ranks_per_node=1)
    run.steps(0, 2)
    run.save(folder)
    again = Run("feedback", ranks_per_node=1, frozen="output")
    with contextlib.redirect_stdout(again.said):
        again.handle.load(folder)
    assert not any(part.any() for part in again.handle.feedback_state().values())
    assert all(part.any() for part in run.handle.feedback_state().values())
    return again.said.getvalue()


def test_error_feedback_of_other_trained_parameters_is_not_loaded(tmp_path):
    assert "has no state" in ranks(2).run(load_with_other_parameters, str(tmp_path))[0]
