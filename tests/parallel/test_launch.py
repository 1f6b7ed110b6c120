"""Test the launch of a job: which process starts the workers, and at which addresses the store and gloo listen."""

import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.ports import free_port
from helpers.ranks import ranks
from helpers.refusals import not_refused
from torch.distributed import distributed_c10d

from megazpp.base.address import Address, listen
from megazpp.base.launcher import find_address, find_launcher, first_host
from megazpp.base.program import BEGAN, EXIT_LATE, LAUNCHER_PID, UserError
from megazpp.parallel import launch, worker
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.launch import Workers, describe_failure, detect_rank_info
from megazpp.parallel.store import AGENT_STORE, FirstFailure, RankInfo, is_on_one_machine, loopback_store, open_store

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
ADDRESS = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_NODELIST": "n[0-1]"}


def mpi(prefix: str, *, rank: int = 5, size: int = 8) -> dict[str, str]:
    """Return the variables that an MPI launcher with this prefix sets for `rank` of `size` on a node of four ranks."""
    return {
        f"{prefix}_RANK": str(rank),
        f"{prefix}_SIZE": str(size),
        f"{prefix}_LOCAL_RANK": "1",
        f"{prefix}_LOCAL_SIZE": "4",
    }


STARTED = RankInfo(started=True, world_size=8, rank=5, local_rank=1)
PLACES = [
    ({"nproc": 3}, {}, RankInfo(started=False, world_size=3)),
    ({"nproc": 1}, {}, RankInfo(started=True, world_size=1)),
    ({"nproc": 1, "max_restarts": 2}, {}, RankInfo(started=False, world_size=1)),
    ({}, TORCHRUN, STARTED),
    ({}, SRUN, STARTED),
    # srun has started torchrun, which has started this process
    ({}, {**TORCHRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, STARTED),
    # the process is a batch script of Slurm, which no srun has started
    ({"nproc": 2}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, RankInfo(started=False, world_size=2)),
    ({"nproc": 8}, {**TORCHRUN, LAUNCHER_PID: "1"}, STARTED),  # the process is a worker of this project's own launcher
    ({}, {**mpi("OMPI_COMM_WORLD"), **ADDRESS}, STARTED),
    ({}, {**mpi("MV2_COMM_WORLD"), "PMI_RANK": "5", "PMI_SIZE": "8", **ADDRESS}, STARTED),
    ({}, {**mpi("JSM_NAMESPACE"), **ADDRESS}, STARTED),
    ({}, {**mpi("HOROVOD"), **ADDRESS}, STARTED),
    ({}, {"PMI_ID": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", **ADDRESS}, STARTED),
    ({}, {**HYDRA, **ADDRESS}, STARTED),
    ({}, {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PALS_RANKID": "5", **ADDRESS}, STARTED),
    ({}, {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", **ADDRESS}, STARTED),
    # mpirun on two Slurm nodes: srun has started mpirun's daemons, and leaves its own variables
    ({}, {**mpi("OMPI_COMM_WORLD"), "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **ADDRESS}, STARTED),
    ({}, {**HYDRA, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **ADDRESS}, STARTED),
    # srun has started the process; its PMI plugins also set variables like an MPI launcher
    ({}, {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"}, STARTED),
    # mpirun has started torchrun, which has started this process
    ({}, {**TORCHRUN, **mpi("OMPI_COMM_WORLD", rank=1, size=2)}, STARTED),
    *(
        ({"nproc": 2}, env, RankInfo(started=False, world_size=2))
        for env in (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
            # a container or a step of one task sets these, so no launcher has started ranks
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
            {"PMI_RANK": "0"},  # without the number of ranks, the variable of rank 0 is ignored
            {"RANK": "first"},  # not a number, so another program has set this variable
            mpi("OMPI_COMM_WORLD", rank=0, size=1) | {"PMIX_RANK": "0"},
        )
    ),
]
REFUSED = [
    ({"nproc": 2}, TORCHRUN, "--nproc 2 conflicts with torchrun"),
    ({"max_restarts": 3}, SRUN, "--max-restarts 3 conflicts with srun"),
    ({"distributed_backend": "nccl"}, {}, "--distributed-backend nccl needs a GPU"),
    ({"nproc": 2}, mpi("OMPI_COMM_WORLD"), "--nproc 2 conflicts with mpirun"),
    (
        {},
        mpi("OMPI_COMM_WORLD"),
        "mpirun has started 8 ranks (OMPI_COMM_WORLD_SIZE), and lacks MASTER_ADDR and MASTER_",
    ),
    ({}, {**HYDRA, "MASTER_ADDR": "host0"}, "mpiexec has started 8 ranks (PMI_SIZE), and lacks MASTER_PORT"),
    # All ranks are on one node, but no job number is known from which all of them could derive the same port
    ({}, {**HYDRA, "MPI_LOCALNRANKS": "8"}, "unset PMI_SIZE"),
    ({}, {"PMIX_RANK": "3"}, "PMIX_RANK=3: a launcher has started this process, and no variable says how many"),
    ({}, {"ALPS_APP_PE": "0"}, "ALPS_APP_PE=0: a launcher"),
    ({}, {"MP_CHILD": "0", "MP_PROCS": "2"}, "MP_CHILD=0: a launcher"),
    # The rank is above 0, but the number of ranks is missing, or only another launcher's variable gives one
    *(
        ({}, {name: "1", **others}, f"{name}=1: a launcher has started this process, and no variable says how many")
        for name, others in {
            "RANK": {},
            "PMI_RANK": {},
            "OMPI_COMM_WORLD_RANK": {},
            "MPI_LOCALRANKID": {"MPI_LOCALNRANKS": "2"},
            "PMIX_RANK": {"PMI_SIZE": "1"},
            "SLURM_PROCID": {"SLURM_NTASKS": "2"},
        }.items()
    ),
    ({}, {"PMI_RANK": "0", "PMI_SIZE": "many"}, "PMI_SIZE=many, which is not a number"),
    ({}, {"PMI_RANK": "0", "PMI_SIZE": "0"}, "PMI_SIZE=0, which is not a number of at least 1"),
    ({}, {"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1, which is not a number of at least 0"),
    ({}, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2, but ranks are numbered from 0"),
    ({}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0, which is not a number of"),
    ({}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1, which is not a number of at least 0"),
    ({}, SRUN | {"SLURM_LOCALID": "-3"}, "SLURM_LOCALID=-3, which is not a number of at least 0"),
    ({}, SRUN | {"SLURM_JOB_ID": "7_x"}, "SLURM_JOB_ID=7_x, which is not a number"),
    ({}, SRUN | {"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID=batch, which is not a number"),
]


def test_environment_decides_which_process_starts_workers():
    for flags, env, expected in PLACES:
        assert detect_rank_info(LaunchConfig(**flags), env) == expected, (flags, env)


def test_default_is_one_worker_per_gpu_or_two_to_four_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for cores, workers in ((1, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value=range(cores)))
        assert detect_rank_info(LaunchConfig(), {}).world_size == workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert detect_rank_info(LaunchConfig(), {}).world_size == 7


def test_conflicting_launch_is_rejected_with_flag_or_variable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not_refused(REFUSED, lambda flags, env: detect_rank_info(LaunchConfig(**flags), env)) == []


def test_hang_timeout_is_halved_after_the_first_step_unless_given():
    assert LaunchConfig().hang_seconds == (600, 300)
    assert LaunchConfig(distributed_timeout_seconds_after_init=7.5).hang_seconds == (600, 7.5)


def test_first_ctrl_c_is_passed_to_workers_and_second_ends_the_job():
    sent = []
    with launch._passing_signals_to([SimpleNamespace(send_signal=sent.append)]) as passed:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert sent == passed == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize(("last", "codes"), [("kill -STOP $$", {1: EXIT_LATE, 2: EXIT_LATE}), ("sleep 0.2", {})])
def test_worker_that_does_not_end_after_the_others_ends_the_job(last, codes):
    """End the job if two processes are stopped when rank 0 has ended, but not if they are only slow."""
    workers = Workers(["sh", "-c", f"test $RANK = 0 || {last}"], 3)
    workers.end_seconds = 1.0 if codes else 20.0
    workers.start({})
    try:
        deadline = time.monotonic() + 20
        while (failures := workers.failures()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        workers.stop()
    assert failures == codes
    if codes:
        assert "all work is done, but rank 1, 2 did not end" in describe_failure(failures)


def test_workers_count_time_from_the_launchers_start_also_after_a_restart():
    began = list[float]()

    class Recorded(Workers):
        def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> Any:
            began.append(float(env[BEGAN]))

    workers = Recorded([], 2)
    now = time.monotonic()
    workers.start({}).start({})
    assert began == [began[0]] * 4
    assert began[0] <= now


def test_closed_terminal_is_passed_to_workers_unless_nohup_started_the_job():
    for handler, expected in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
        sent = []
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with launch._passing_signals_to([SimpleNamespace(send_signal=sent.append)]):
                signal.raise_signal(signal.SIGHUP)
        finally:
            signal.signal(signal.SIGHUP, before)
        assert sent == expected


def test_ctrl_z_suspends_the_workers_with_their_launcher_and_continues_them(monkeypatch):
    """Suspend the launcher by Ctrl-Z, and check that it first suspends the workers, and continues them afterwards.

    If the workers kept running without the launcher's store, their watchdogs would end the job.
    """
    sent: list[Any] = []
    monkeypatch.setattr(launch.os, "kill", lambda *to: sent.append(to))
    with launch._passing_signals_to([SimpleNamespace(send_signal=sent.append)]):
        signal.raise_signal(signal.SIGTSTP)
    assert sent == [signal.SIGSTOP, (os.getpid(), signal.SIGSTOP), signal.SIGCONT]


def test_machine_without_a_loopback_interface_is_named_before_workers_start(monkeypatch):
    workers = mock.Mock()
    monkeypatch.setattr(
        launch.socket, "create_connection", mock.Mock(side_effect=OSError(101, "Network is unreachable"))
    )
    with pytest.raises(ValueError, match=r"cannot connect to itself at 127.0.0.1: Network is unreachable; switch"):
        launch._run_once(workers, {})
    workers.start.assert_not_called()


GLOO = "[/pytorch/gloo/tcp/pair.cc:553] Connection closed by peer [10.88.0.2]:23681. Check the logs"


@pytest.mark.parametrize(("text", "is_traced"), [(GLOO, False), ("the sizes 3 and 4 differ", True)])
def test_broken_connection_is_reported_in_one_line_without_frames(monkeypatch, capsys, text, is_traced):
    place = RankInfo(started=True, world_size=2)
    assert worker._report_once(RuntimeError(text), place, FirstFailure(dist.HashStore(), place, host="alpha")) == 1
    said = capsys.readouterr().err
    assert ("rank 0 failed:" in said) == is_traced
    if not is_traced:
        assert said.startswith("\nrank 0 on alpha: the connection to another rank is broken, and no rank has reported")
        assert said.endswith("or the link is down: Connection closed by peer [10.88.0.2]:23681. Check the logs\n")


def test_both_of_two_hosts_with_the_same_name_print_why_the_job_ends(monkeypatch, capsys):
    monkeypatch.setattr("socket.gethostname", lambda: "ubuntu")
    store = dist.HashStore()
    for rank in (0, 1):
        monkeypatch.setattr("megazpp.parallel.store.kernel_of", lambda rank=rank: ("the boot ID", rank))
        place = RankInfo(started=True, world_size=2, rank=rank)
        worker._report_once(ValueError("a fault"), place, FirstFailure(store, place))
    assert "\nrank 1 on ubuntu ends: rank 0 on ubuntu: a fault\n" in capsys.readouterr().err


def test_rank_with_the_store_ends_after_the_others_have_read_the_failure(monkeypatch):
    """Check that rank 0, which hosts the store if there is no launcher, waits until other ranks have read a failure.

    If rank 0 ended first, the other ranks could not read the failure.
    """
    monkeypatch.setattr("megazpp.parallel.store.ANSWER_SECONDS", 0.6)
    monkeypatch.delenv(AGENT_STORE, raising=False)
    store, began = dist.HashStore(), time.monotonic()
    first, second = (FirstFailure(store, RankInfo(started=True, world_size=2, rank=rank)) for rank in (0, 1))
    first.let_others_read()
    assert time.monotonic() - began > 0.6  # rank 0 waits for ANSWER_SECONDS, because rank 1 has not read the failure
    monkeypatch.setattr("megazpp.parallel.store.ANSWER_SECONDS", 60.0)
    began = time.monotonic()
    second.let_others_read()
    first.let_others_read()
    assert time.monotonic() - began < 60.0


# ---- addresses at which the store and gloo listen --------------------------------------------------------------------

TIMEOUT = timedelta(seconds=77)


def listening() -> set[tuple[str, int]]:
    """Return the (address, port) pairs at which this process listens for TCP connections."""
    return {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "::1"])
def test_store_of_rank_0_listens_only_at_the_loopback_address_that_is_given(host):
    try:
        listen(Address(host.strip("[]"), 0)).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = str(free_port())
    before, env = listening(), {"MASTER_ADDR": host, "MASTER_PORT": port}
    store = open_store(RankInfo(started=True, world_size=2), TIMEOUT, env)
    assert listening() - before == {(host.strip("[]"), int(port))}
    assert env["MASTER_ADDR"] == host.strip("[]")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_store_that_cannot_be_reached_is_named_in_one_line_without_frames(capfd):
    port = str(free_port())
    place, env = RankInfo(started=True, world_size=2, rank=1), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(
        ValueError, match=rf" 127.0.0.1 MASTER_PORT {port} within 0 s: Connection refused \(the address"
    ):
        open_store(place, timedelta(seconds=0.2), env)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"MASTER_ADDR": "alpha:29500"}, "MASTER_ADDR alpha:29500 is not the name or the IP address of a host"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 is not a TCP port"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT x is not a TCP port"),
    ],
)
def test_wrong_address_in_the_environment_is_named(variables, problem):
    with pytest.raises(ValueError, match=problem):
        detect_rank_info(LaunchConfig(), {**TORCHRUN, **ADDRESS, **variables})


def test_launchers_store_listens_on_loopback_only_and_workers_connect(monkeypatch):
    before = listening()
    store = loopback_store(listen(Address(launch.LOOPBACK, 0)))
    assert listening() - before == {("127.0.0.1", store.port)}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), AGENT_STORE: "True"}.items():
        monkeypatch.setenv(name, value)
    place = RankInfo(started=True, world_size=2, rank=1)
    opened = open_store(place, TIMEOUT)
    opened.set("key", "value")
    assert store.get("key") == b"value"
    assert is_on_one_machine(place)


def test_one_process_has_a_store_that_listens_nowhere():
    assert isinstance(open_store(RankInfo(started=True, world_size=1), TIMEOUT, {}), dist.HashStore)


def test_srun_on_one_node_uses_the_loopback_address():
    for hosts, address in (("host0", "127.0.0.1"), ("host[0-1]", "host0")):
        env = {**SRUN, "SLURM_JOB_NODELIST": hosts, "SLURM_JOB_ID": "20007"}
        env |= find_address(find_launcher(env), env)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (address, "20007")
        assert is_on_one_machine(STARTED, env) == (address == "127.0.0.1")


def test_first_host_of_slurms_list_is_found_without_scontrol():
    lists = {
        "n[001-016,020]": "n001",
        "rack[1-2]n[08-16],login": "rack1n08",
        "a.b-c,d": "a.b-c",
        "gpu[7,9]x": "gpu7x",
        "gpu[7]": launch.LOOPBACK,
        "gpu7": launch.LOOPBACK,
    }
    assert {nodes: first_host(nodes) for nodes in lists} == lists
    for nodes in ("a" * 32 + "[", "", "n[1-2", "a,,b", "a b"):
        with pytest.raises(ValueError, match="export its name as MASTER_ADDR"):
            first_host(nodes)


def test_steps_of_one_slurm_job_have_their_own_address_and_port():
    found = set()
    for step, nodes in enumerate(("a,b", "c,d")):
        of_step = {"SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": nodes}
        env = {**SRUN, "SLURM_JOB_NODELIST": "a,b,c,d", "SLURM_JOB_ID": "7", **of_step}
        env |= find_address(find_launcher(env), env)
        assert env["MASTER_ADDR"] == nodes[0]
        found.add(env["MASTER_PORT"])
    assert len(found) == 2


def test_mpirun_on_one_node_uses_loopback_and_a_port_per_job():
    ports = set()
    for job in ("prterun-a@1", "prterun-b@1"):
        env = mpi("OMPI_COMM_WORLD", rank=1, size=4) | {"PMIX_NAMESPACE": job}
        place = detect_rank_info(LaunchConfig(), env)
        env |= find_address(find_launcher(env), env)
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert is_on_one_machine(place, env)
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 2
    given = mpi("OMPI_COMM_WORLD") | ADDRESS
    given |= find_address(find_launcher(given), given)
    assert given == mpi("OMPI_COMM_WORLD") | ADDRESS


def check_lazy_group_on_the_loopback() -> None:
    rank, before = dist.get_rank(), listening()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        # share_gloo_device replaces this class, and monkeypatch restores it
        patch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)
        worker.share_gloo_device(launch.LOOPBACK, lazy=True)
        group = dist.new_group([0, 1, 2, 3], backend="gloo")
    ((address, _),) = listening() - before
    assert address == "127.0.0.1"
    values = [None] * 4 if rank == 0 else None
    dist.gather_object(rank, values, dst=0, group=group)
    box = [values]
    dist.broadcast_object_list(box, src=0, group=group)
    assert box == [[0, 1, 2, 3]]


def test_gloo_on_one_machine_listens_on_loopback_and_connects_lazily():
    ranks(4).run(check_lazy_group_on_the_loopback)


def device_threads() -> list[int]:
    # with torch 2.11 the result is empty, because gloo's threads have no name there
    names = Path("/proc/self/task").glob("*/comm")
    return [int(file.parent.name) for file in names if file.read_text().strip() == "gloo_tcp_loop"]


def check_new_groups() -> None:
    before, values = device_threads(), [torch.tensor(float(index + dist.get_rank())) for index in range(3)]
    groups = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in values]
    for work in [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(values, groups, strict=True)]:
        work.wait()
    assert values == [1.0, 3.0, 5.0]
    assert groups[0]._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    assert device_threads() == before
    assert {os.sched_getscheduler(thread) for thread in before} <= {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_new_gloo_groups_share_one_batch_thread_and_keep_their_timeout():
    ranks(2).run(check_new_groups)


def test_kernel_without_batch_scheduling_is_no_failure(monkeypatch):
    monkeypatch.setattr(os, "sched_setscheduler", mock.Mock(side_effect=[OSError(22, "Invalid argument"), None]))
    with worker._threads_that_wait_their_turn():
        pass


def test_host_whose_name_is_a_loopback_address_listens_on_the_way_to_rank_0(monkeypatch):
    """A host whose own name means a loopback address must listen at the address from which it reaches rank 0.

    Gloo chooses the address (None) if the name has another address, or if the host reaches rank 0 over loopback, so
    that it is rank 0's host itself.
    """
    for name, on_the_way, expected in (
        ("127.0.1.1", "10.0.0.2", "10.0.0.2"),
        ("10.1.0.2", "10.0.0.2", None),
        ("127.0.1.1", "127.0.0.1", None),
    ):
        monkeypatch.setattr(worker.socket, "gethostname", lambda name=name: name)
        monkeypatch.setattr(worker, "_local_address", {name: name, "rank0": on_the_way}.get)
        assert worker.address_if_name_fails("rank0") == expected
    monkeypatch.undo()
    assert worker._local_address("127.0.1.1") == worker._local_address("not a host") == "127.0.0.1"


def test_interface_named_in_the_environment_is_used(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    # share_gloo_device replaces this class, and monkeypatch restores it
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)
    with pytest.raises(UserError, match=r"^GLOO_SOCKET_IFNAME=no-such-interface: .*; set GLOO_SOCKET_IFNAME to an"):
        worker.share_gloo_device()
