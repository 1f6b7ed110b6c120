"""Elastic DiLoCo in the training loop of a replica group: joining a run, leases of samples, synchronizations, progress.

After every training step, rank 0 of a group decides whether the group takes another step before it synchronizes. Rank 0
shares the decision, so that all ranks of the group synchronize after the same step. The progress of the run counts
samples that are merged into the outer weights. Between two synchronizations, each step of a group counts as one
iteration of the run, as if all live groups took a step at the same time.

This is one file of more than 300 lines, because joining, leases, synchronizations and progress all change the position
of the group in the run: its version, its leased cell, and its steps.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazpp.base.address import Address
from megazpp.base.program import MEGA, UserError
from megazpp.diloco.config import RUN_DEPENDENT, DilocoPlan
from megazpp.elastic.agent import Agent, OutError
from megazpp.elastic.config import ElasticConfig, ElasticPlan
from megazpp.elastic.outer import WholeOuter
from megazpp.elastic.rounds import NO_COMMIT, Cell, Record
from megazpp.elastic.wire import RETRY_SECONDS
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.dims import open_axis
from megazpp.parallel.timeline import WAIT
from megazpp.parallel.worker import seed_everything
from megazpp.run.start import facts_of_data, facts_of_flags
from megazpp.run.trainer import Trainer
from megazpp.training.loop import Loader
from megazpp.training.objective import LanguageModelLoss, StopRequested
from megazpp.training.step import LaunchedStep

# Flags that may differ between the groups of a run
OF_THE_GROUP = (
    *("--diloco-coordinator", "--diloco-group", "--diloco-listen", "--diloco-advertise"),
    *("--master-port", "--wandb-exp-name"),
)
LEAVING_SECONDS = 10.0  # longest time that a leaving group waits for the commit of its last contribution
# Longest time that a leaving group waits for other groups, which may still fetch messages from it
FAREWELL_SECONDS = 60.0
SAVE_SECONDS = 600.0  # longest time that a group waits, at the end of the run, for the saves of other groups
POLL_SECONDS = 20.0  # longest time that rank 0 waits for the coordinator while the other ranks wait in a collective
REPORTED_STEPS = 10_000  # number of last steps that a report about a NaN can name; more than an interval has
SMOOTHING = 0.3  # weight of the last step in the moving average of the seconds per step


class ElasticLoop:
    """The training of one replica group in a run of elastic DiLoCo. All ranks of the group call all public methods.

    Args:
        trainer: trainer of this job.
    Attributes:
        outer: outer weights and momentum of DiLoCo on this rank.
        version, id: version of this rank's outer weights, and the id of this version.
        merged: training steps, summed over all groups, that are merged into these outer weights.
    """

    def __init__(self, trainer: Trainer) -> None:
        run, parts = trainer.run, trainer.parts
        assert isinstance(parts.objective, LanguageModelLoss), "check_post_training refuses other objectives"
        elastic, diloco = run.plan.of(ElasticPlan), run.plan.of(DilocoPlan)
        assert elastic is not None
        assert diloco is not None
        self._trainer, self._dims, self._objective = trainer, run.context.dims, parts.objective
        self._batches, self._rules = run.plan.batches, elastic.rules
        self._flags, self._axis = run.config.section(ElasticConfig), open_axis(self._dims)
        self._stopped, self._say = trainer.stopped, run.context.log
        # (consumed samples before a step, index of the step's first sample) of the last steps, for a report about a NaN
        self._first_samples: deque[tuple[int, int]] = deque(maxlen=REPORTED_STEPS)
        trainer.guard.first_sample = lambda consumed_samples: dict(self._first_samples)[consumed_samples]
        self.outer = outer = WholeOuter(
            parts.built.sharding,
            diloco,
            run.config.precision,
            num_groups=self._rules.groups,
            late_factor=self._flags.diloco_late_factor,
        )
        # numbers of messages and of bytes that this rank has sent to other groups until the last synchronization
        self._counted = 0, 0
        self.version, self.id, self.merged = 0, NO_COMMIT, 0
        # Names of the groups that the commit of `version` has asked to save it; None for the version of a loaded
        # checkpoint
        self._writers: list[str] | None = None
        self._cell: Cell | None = None  # rest of the leased cell: its steps that are not trained yet; None without one
        self._steps = 0  # number of steps that this group has trained since its last published contribution
        self._granted = 0  # number of cells that the coordinator has leased to this group
        # By fragment of the model: tokens that this group has trained since its last contribution to this fragment
        self._tokens = torch.zeros(outer.plan.fragments, dtype=torch.float64, device=outer.sharding.device)
        # version of the outer weights from which this group's published contribution is computed; None if no
        # contribution of this group waits for its commit
        self._published: int | None = None
        # number of steps of the published contribution, which `_progress` adds to the merged steps; 0 after its commit
        self._published_steps = 0
        # number of live groups at this group's last step, at most the nominal number. While groups are missing, a step
        # advances the learning rate schedule by the live fraction of a global batch. `_is_connected` is True once all
        # ranks of this group have connected to the coordinator, and stays False if a stop signal came before.
        self._live, self._is_connected = self._rules.groups, False
        self._last_step_at = 0.0  # time from which the next step is timed: the end of the last step, or of a wait

    # ---- hooks that the trainer calls ---------------------------------------------------------------------------

    def begin(self, progress: TrainingProgress) -> TrainingProgress:
        """Join the run, wait for the first samples, and return the progress at which this group starts to train.

        Args:
            progress: progress of the loaded checkpoint, or of a new run.
        Raises:
            UserError: the loaded checkpoint has no state of an elastic run, but its steps would count as merged.
        """
        if progress.iteration > 0 and self.id == NO_COMMIT:
            load = self._trainer.run.config.checkpoint.load
            raise UserError(
                f"--load {load}: iteration {progress.iteration} has no version of the outer weights, so no elastic "
                "run can continue it: to start one with its weights, give --finetune and another folder by --save"
            )
        name = self._flags.diloco_group or socket.gethostname()
        name, incarnation = self._axis.share_object((name, secrets.token_hex(8)))
        hello: Record = {"group": name, "rank": self._axis.rank, "incarnation": incarnation}
        save = self._trainer.run.save
        hello |= {"facts": _facts(self._trainer), "rules": list(self._rules), "saves": save.shared_id if save else ""}
        try:
            self._agent = agent = Agent(
                self._flags,
                hello | {"version": self.version, "id": self.id},
                most_bytes=self.outer.most_bytes,
                snapshot=self._snapshot,
                stopped=self._stopped,
                say=self._say,
            )
            self._is_connected = True
        except OutError:
            if not self._stopped():
                raise
        # A stop signal makes `Agent` give up its first connection. Some ranks of this group may give up, and others may
        # have connected before. All ranks of the group then end together.
        if not all(self._axis.share_object(self._axis.gather_objects(self._is_connected))):
            if self._is_connected:
                self._agent.close()
            self._is_connected = False
            return progress._replace(stop_reason="a stop signal before this group had reached the coordinator")
        while (status := self._agreed(self._membership)) == "joining" and not self._fetch_state():
            pass
        if status == "stopped":
            return progress._replace(stop_reason="a stop signal before this group had joined the run")
        agent.tell(joined=True, fingerprint=(self.version, self.outer.fingerprint()))
        self._agreed(lambda state: state["status"] == "member")
        self._catch_up(progress)
        self.outer.merge(0.0)  # start to train from R, the common outer weights
        state = self._agreed(lambda state: state)
        self._seed(state["slot"])
        self._say(f"group {agent.group} takes part in column {state['slot']}, from version {self.version} on")
        self._await_cell(progress)
        return self._progress(progress)

    def loader(self, loader: Loader) -> Loader:
        """Return a loader that reads the samples that the coordinator has leased to this group."""
        return LeasedLoader(loader, self)

    def after_step(
        self, launched: LaunchedStep, progress: TrainingProgress, last: bool
    ) -> tuple[TrainingProgress, bool]:
        """Count a training step, and synchronize with the other groups if `_decide` ends the interval after this step.

        Args:
            launched: the training step, whose results may not have reached the host yet.
            progress: progress of the training loop after the step.
            last: ignored, because an elastic run ends when all samples are merged.
        Returns:
            the progress of the run with this group's steps, and True if this group ends its training.
        """
        assert self._cell is not None
        self._count_step()
        column, step, stop = self._cell
        self._cell = [column, step + 1, stop] if step + 1 < stop else None
        goes_on, leaves, self._live, self._cell = self._axis.share_object(self._decide())
        self._last_step_at = time.monotonic()  # after `_decide`, whose wait for samples is not part of a step
        # Merge the outer step that follows this group's earlier contribution `delay` training steps after the group has
        # published that contribution, or at the end of this interval if that comes first.
        if self._published is not None and (self._steps >= self.outer.plan.delay or not goes_on):
            self._merge(progress, leaves=leaves)
        if goes_on:
            return self._progress(progress), False
        launched.check()
        # If an earlier contribution still waits for its commit here, the group leaves, and `_merge` has given up after
        # LEAVING_SECONDS. A group can publish a contribution only after the commit of its previous one, so this group
        # cannot publish its last steps.
        if self._published is not None:
            self._say(f"{self._steps} steps of this group are not published; others will train their samples again")
            return self._progress(progress), True
        self._publish()
        # With a delay, the group trains on while its contribution waits for the commit, if it gets samples. Without a
        # delay or without samples, and if the group leaves, it waits for the commit here.
        if self.outer.plan.delay and not leaves:
            self._cell = self._cell or self._axis.share_object(self._ask(lambda state: state["exhausted"]))
        if leaves or not self.outer.plan.delay or self._cell is None:
            self._merge(progress, leaves=leaves)
        if not leaves:
            self._await_cell(progress)
        return self._progress(progress), leaves or self._cell is None

    def close(self, progress: TrainingProgress) -> None:
        """Leave the run, and close this rank's connections; do nothing if this group has not reached the coordinator.

        This group saves the outer weights if no other group does. That happens if a stop signal has reached all groups,
        or if the group that had to save the weights has died. Before a rank closes its connections, it waits until all
        live groups have computed the outer weights of this group's version. Until then, these groups may fetch messages
        from this rank.

        Args:
            progress: progress of the training loop at its end.
        """
        if not self._is_connected:
            return
        self._agent.tell(leaves=True)
        if self._must_save():
            self._trainer.checkpoints.save(self._merged_progress(progress))
        with contextlib.suppress(OutError):
            self._agent.wait(lambda state: state["oldest"] >= self.version, FAREWELL_SECONDS)
        self._agent.close()

    def _must_save(self) -> bool:
        """Return True if this leaving group has to save the outer weights, because no other group does.

        The coordinator decides whether another group saves (`Rounds._saves_last`). At the end of the run it decides
        only after all groups that save into this group's folder have saved and leave too, because one of them may die
        before its save. This group waits for the decision for SAVE_SECONDS at the end of the run, and before the end
        for LEAVING_SECONDS. If no decision comes, this group saves: other groups may have died before their saves, and
        without a coordinator no other group can continue the run.

        The result is False without a wait if this group has saved its version or loaded it from a checkpoint, or if the
        group has no folder to save into.
        """
        folder, began = self._trainer.run.save, time.monotonic()
        if self._writers is None or self._agent.group in self._writers or folder is None:
            return False

        def decided(state: Record) -> Any:
            limit = SAVE_SECONDS if state["done"] else LEAVING_SECONDS
            known = state["leaves"] and state["saves_last"] is not None
            return (state["saves_last"],) if known else time.monotonic() > began + limit and (True,)

        (saves_last,) = self._agreed(decided)
        return self._axis.share_object(saves_last and self.merged // self._rules.groups not in folder.iterations())

    def _seed(self, slot: int) -> None:
        """Seed dropout with the seeds that replica group `slot` has in DiLoCo within one job."""
        given, dims = self._trainer.run.config.launch.seed, self._dims
        rank = slot * dims.data_size * dims.cp.size + dims.dropout_rank
        seed_everything(given, data_rank=rank, tp_rank=dims.tp.rank)
        if (generator := self._trainer.parts.built.model.settings.generator) is not None:
            generator.seed(given, data_rank=rank)

    # ---- leased steps of an interval, and their contribution ----------------------------------------------------

    def first_sample(self, consumed_samples: int) -> int:
        """Return the number of consumed samples at which a loader finds the samples of this group's next leased step.

        The result is the first sample of the step's global batch, plus an offset for the leased column. Without the
        offset the loader of this job would read the samples of column 0 of the run's table of samples.

        Args:
            consumed_samples: number of samples at which the training loop counts this step.
        Raises:
            StopRequested: a stop signal came, or the run ended, while the group waited for samples.
        """
        if self._cell is None:
            raise StopRequested("received a stop signal, or the run ended, while this group waited for samples")
        batches, (column, step, _) = self._batches, self._cell
        share = batches.data_parallel_size // self._rules.groups * batches.micro_batch_size
        first = step * batches.global_batch_size + column * share
        self._first_samples.append((consumed_samples, first))
        return first

    def _count_step(self) -> None:
        """Add a training step to the contribution that is published next, and measure the step's time."""
        self._tokens += self._objective.tokens
        self._steps += 1
        agent, took = self._agent, time.monotonic() - self._last_step_at
        agent.seconds = took if agent.seconds is None else agent.seconds + SMOOTHING * (took - agent.seconds)
        agent.steps, agent.unsent, agent.leaves = self._steps, True, agent.leaves or self._stopped()

    def _decide(self) -> tuple[bool, bool, int, Cell | None]:
        """Decide on rank 0 what the group does after a training step; the result of other ranks has no meaning.

        Returns:
            True to take another step before the next synchronization; True to leave the run; the number of live
            groups; and the cell of samples for the next step, None without one.
        """
        if self._axis.rank > 0:
            return False, False, 0, None
        agent, state = self._agent, self._agent.wait(lambda state: state)
        leaves, live = agent.leaves or state["leaves"], max(1, min(state["live"], self._rules.groups))
        if leaves or self._steps == self._rules.interval or self._is_called(state):
            return False, leaves, live, self._cell
        cell = self._cell or self._ask(lambda state: state["exhausted"])
        return cell is not None, False, live, cell

    def _is_called(self, state: Record) -> bool:
        """Return True if this group must publish before its interval is over, because other groups would wait for it.

        True if both hold: this group would finish its interval only after the round's expected end (quorum plus grace),
        and one more step would end after half of the grace. False without an estimate of these times, and while a
        contribution of this group waits for its commit.
        """
        agent, grace = self._agent, state["grace"]
        quorum_in, seconds = agent.seconds_to_quorum(), agent.seconds
        if quorum_in is None or seconds is None or self._published is not None:
            return False
        remaining = (self._rules.interval - self._steps) * seconds
        return remaining > quorum_in + grace and seconds > quorum_in + grace / 2

    def _ask(self, gives_up: Callable[[Record], Any]) -> Cell | None:
        """Ask the coordinator for a cell of samples, on rank 0 of the group.

        Args:
            gives_up: function of the run's state; a true result ends the wait for a cell.

        Returns:
            the cell; None on other ranks, if `gives_up` has ended the wait, or after POLL_SECONDS.
        """
        if self._axis.rank > 0:
            return None
        wants = self._granted + 1
        self._agent.tell(wants=wants)

        # Each new span shows the watchdog that this rank makes progress, and what it waits for
        with self._axis.timeline.span(WAIT, "samples"):
            state = self._agent.wait(
                lambda state: (state["granted"] >= wants or gives_up(state)) and state, POLL_SECONDS
            )
        if state is None or state["granted"] < wants:
            return None
        self._granted = wants
        return list(state["cell"])

    def _await_cell(self, progress: TrainingProgress) -> None:
        """Wait until the coordinator leases a cell to this group, and apply new commits of the run meanwhile.

        If no cell is free and the group has steps that it has not published, it publishes them, because the run cannot
        end without them. The method returns without a cell at the end of the run, and after a stop signal.
        """
        while self._cell is None:
            self._cell = self._axis.share_object(
                self._ask(
                    lambda state: (
                        state["done"]
                        or state["version"] > self.version
                        or self._stopped()
                        or (state["exhausted"] and self._agent.unsent)
                    )
                )
            )
            if self._cell is None:
                self._catch_up(progress)
                if self._is_over():
                    break
                if self._axis.share_object(self._agent.unsent and self._agent.wait(lambda state: state)["exhausted"]):
                    self._publish()
                    self._merge(progress, leaves=False)
        self._last_step_at, self._agent.trains = time.monotonic(), self._cell is not None

    def _is_over(self) -> bool:
        """Return True if this group has the run's last outer weights, or if rank 0 has caught a stop signal."""
        state = self._agent.wait(lambda state: state)
        return self._axis.share_object(self._stopped() or (state["done"] and state["version"] == self.version))

    @property
    def _has_unsent(self) -> bool:
        """True if this group has trained since its last contribution to the fragment that the next version changes."""
        return bool(self._tokens[self.version % len(self._tokens)])

    @property
    def _all_merged(self) -> bool:
        """True if all samples of the run are merged into this rank's outer weights."""
        return self.merged == self._rules.iterations * self._rules.groups

    def _publish(self) -> None:
        """Publish this group's contribution to the next outer step, and start the group's next interval."""
        agent, fragment = self._agent, self.version % len(self._tokens)
        tokens, agent.trains = float(self._tokens[fragment]), False
        agent.publish(self.outer.pack(tokens, self.version), tokens=tokens, steps=self._steps)
        self._published, self._published_steps = self.version, self._steps
        self._steps, agent.steps = 0, 0
        self._tokens[fragment], agent.unsent = 0.0, False

    def _merge(self, progress: TrainingProgress, *, leaves: bool) -> None:
        """Wait for the outer step after this group's contribution, and merge its result into the inner weights.

        Args:
            progress: progress of the training loop.
            leaves: True if this group leaves the run; it then waits at most LEAVING_SECONDS, as after a stop signal.
        """
        agent, base, began = self._agent, self.version, time.monotonic()
        trained, agent.trains = agent.trains, False

        def over(state: Record) -> bool:
            waited = time.monotonic() - began
            return state["version"] > base or (waited > LEAVING_SECONDS and (leaves or self._stopped()))

        self._agreed(over)
        waited = time.monotonic() - began
        self._catch_up(progress)
        before, self._counted = self._counted, (agent.sent, agent.sent_bytes)
        calls, sent = self._counted[0] - before[0], self._counted[1] - before[1]
        self._dims.counter.add("cross", "replica_group", "send", sent, calls=calls)
        what = f"sent {sent / MEGA:.3f} MB per rank to other groups"
        self._say(f"version {self.version}: took {self._published_steps} steps, waited {waited:.1f} s, {what}")
        if self._published is None:
            self._published_steps = 0
        self._last_step_at, agent.trains = time.monotonic(), trained

    # ---- new versions of the outer weights, and the run's progress ----------------------------------------------

    def _catch_up(self, progress: TrainingProgress) -> None:
        """Bring outer and inner weights to the version of the newest commit that rank 0 of this group has received.

        If a commit says that this group has to save or to evaluate the new version, do so after applying the commit.
        """
        agent = self._agent
        target = self._agreed(lambda state: (state["version"],))[0]
        while self.version < target:
            commit, messages = self._fetched()
            units, own = self.outer.fragment_after(self.version), self._published == self.version
            before = None if own or not self._has_unsent else [unit.rows.clone() for unit in units]
            with self.outer.lock:
                self.outer.apply(commit["set"], messages, self.version)
                self.version, self.id, self.merged = commit["commit"], commit["id"], commit["merged"]
            agent.tell(
                version=self.version,
                id=self.id,
                unsent=self._has_unsent,
                fingerprint=(self.version, self.outer.fingerprint()),
            )
            # The commit after this group's contribution merges R into the inner weights by `merge_alpha`. Other commits
            # replace the inner weights by R. But if this group has trained steps that it has not published, these steps
            # would be lost, so the change of R is added to the inner weights instead.
            if before is not None:
                self.outer.shift(units, before)
            else:
                self.outer.merge(self.outer.plan.merge_alpha if own and not self._all_merged else 0.0, units)
            self._published = None if own else self._published
            at = self._merged_progress(progress)
            self._writers = commit["saves"]
            if agent.group in commit["saves"]:
                self._trainer.checkpoints.save(at)
            if commit["evaluates"] == agent.group:
                self._trainer.validate(at)

    def _fetched(self) -> tuple[Record, list[bytes]]:
        """Wait until all ranks of the group have fetched the messages of the next version's commit.

        Returns:
            the result of `Agent.messages_of` on this rank: the record of the commit, and the messages.
        """
        while True:
            with self._axis.timeline.span(WAIT, "messages of other groups"):
                found = self._agent.wait(lambda state: self._agent.messages_of(self.version + 1), POLL_SECONDS)
            if self._axis.share_object(all(self._axis.gather_objects(found is not None))):
                assert found is not None
                return found

    def _merged_progress(self, progress: TrainingProgress) -> TrainingProgress:
        """Return the progress of the outer weights.

        The iteration is the number of merged steps divided by the nominal number of groups, rounded down. The field
        `scheduled_samples`, which sets the learning rate, counts all merged samples.
        """
        iteration, size = self.merged // self._rules.groups, self._batches.global_batch_size
        samples = self.merged * size // self._rules.groups
        return progress._replace(iteration=iteration, consumed_samples=iteration * size, scheduled_samples=samples)

    def _progress(self, progress: TrainingProgress) -> TrainingProgress:
        """Return the progress at which this group trains: the merged samples, and this group's steps since then.

        The field `scheduled_samples` of the result sets the learning rate. In this field, each of this group's steps
        counts as a global batch times the fraction of the nominal groups that are live.
        """
        at, size = self._merged_progress(progress), self._batches.global_batch_size
        if self._all_merged:
            return at
        steps = self._published_steps + self._steps
        # Stay below the last iteration, at which the training loop would end before all samples are merged.
        iteration = min(at.iteration + steps, self._rules.iterations - 1)
        scheduled = at.scheduled_samples + steps * size * min(self._live, self._rules.groups) // self._rules.groups
        return at._replace(iteration=iteration, consumed_samples=iteration * size, scheduled_samples=scheduled)

    # ---- joining the run ----------------------------------------------------------------------------------------

    def _membership(self, state: Record) -> str | None:
        """Return what a group that wants to join the run does, given the state from the coordinator.

        Returns:
            "stopped" after a stop signal; "member" if the group is a member; "joining" if it can fetch the outer state
            from a member; None if it has to wait.
        """
        if self._stopped():
            return "stopped"
        if state["status"] == "member":
            return "member"
        return "joining" if any(peer["member"] for peer in state["peers"].values()) else None

    def _fetch_state(self) -> bool:
        """Fetch the outer state from a group that is a member; each rank fetches from the rank of the same index.

        Returns:
            True if all ranks have fetched the same version; False if the fetch has to be repeated.
        """
        agent, began = self._agent, time.monotonic()
        state = agent.wait(lambda state: state)
        members = sorted(name for name, peer in state["peers"].items() if peer["member"])
        donor = self._axis.share_object(members[0] if members else None)
        found = None
        try:
            about, data = agent.fetch_snapshot(Address(*state["peers"][donor]["address"]))
            self.outer.load(data)
            found = about["version"], about["id"], about["merged"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._say(f"could not fetch the state of group {donor}: {error!r}")
            time.sleep(RETRY_SECONDS)
        all_found = self._axis.share_object(self._axis.gather_objects(found))
        if found is None or set(all_found) != {found}:
            return False
        self.version, self.id, self.merged = found
        # Take over the loss scale too: with the initial one, about the first 30 steps in fp16 would overflow. All ranks
        # of this group use the scale that rank 0 has fetched. Other ranks may have fetched another scale, because the
        # ranks of group `donor` answer at different times, and may take training steps in between.
        self._trainer.values.scaler.load_state_dict(self._axis.share_object(about["loss_scale"]))
        self._writers = []
        agent.tell(version=self.version, id=self.id)
        took = time.monotonic() - began
        self._say(
            f"state of version {self.version} from group {donor}: {len(data) / MEGA:.1f} MB per rank in {took:.1f} s"
        )
        return True

    def _snapshot(self) -> tuple[Record, bytes]:
        """Return a snapshot of this rank's outer state for a rank of another group. A thread of the agent calls this.

        Returns:
            a record with version, id, merged steps and loss scale, and the bytes of the outer state.
        """
        scale = self._trainer.values.scaler.state_dict()
        with self.outer.lock:
            about = {"version": self.version, "id": self.id, "merged": self.merged, "loss_scale": scale}
            return about, self.outer.dump()

    def _agreed(self, ready: Callable[[Record], Any]) -> Any:
        """Wait until `ready` returns a true value for rank 0's state of the run, and return that value on all ranks.

        If a valid result may be false, such as version 0 or False, `ready` must return it in a tuple, which is true.
        """
        # The other ranks wait in a collective for rank 0's value, and a collective may time out. So rank 0 shares None
        # after POLL_SECONDS without a value, and all ranks wait again.
        while True:
            # Each new span shows the watchdog that this rank makes progress, and what it waits for
            with self._axis.timeline.span(WAIT, "other groups"):
                found = self._agent.wait(ready, POLL_SECONDS) if self._axis.rank == 0 else None
            if (found := self._axis.share_object(found)) is not None:
                return found


class LeasedLoader:
    """A data loader that reads the samples that elastic DiLoCo's coordinator has leased to this group.

    Args:
        loader: this rank's loader, which reads the samples at any given number of consumed samples.
        loop: elastic training loop of this group, which knows the leased cell.
    Attributes:
        wait_seconds: seconds that all calls of `step` together have waited for data, without the waits for a lease.
    """

    def __init__(self, loader: Loader, loop: ElasticLoop) -> None:
        self._loader, self._loop, self.wait_seconds = loader, loop, 0.0

    def step(self, consumed_samples: int, global_batch_size: int) -> Sequence[Any]:
        """Return this rank's micro-batches of the next leased step.

        Raises:
            StopRequested: a stop signal came, or the run ended, while the group waited for samples.
        """
        batches = self._loader.step(self._loop.first_sample(consumed_samples), global_batch_size)
        self.wait_seconds = self._loader.wait_seconds
        return batches


def _facts(trainer: Trainer) -> dict[str, str]:
    """Return values that must be equal in all groups of an elastic run, as text by flag or description.

    They are the flags that are not in OF_THE_GROUP, the tokenizer, the data, and the layout of a group's ranks.
    """
    run, parts = trainer.run, trainer.parts
    facts = facts_of_flags(run.config.parts) | facts_of_data(parts.tokenizer, parts.samples)
    layout = run.plan.layout
    facts["the layout of the ranks"] = str({name: layout.axis_size(name) for name in layout.coordinates})
    # A job that resumes gets these flags from its checkpoint, and other jobs leave them out: compare the values in use
    facts |= {f"--{name.replace('_', '-')}": str(trainer.flags[name]) for name in RUN_DEPENDENT}
    return {name: value for name, value in facts.items() if name not in OF_THE_GROUP}
