"""Run pretrain_gpt.py like a user, and call its `main` in this process where it starts no workers.

The runs have two gloo workers, or four for ZeRO++. One run starts with torchrun, one with `python -m`, and one at a
terminal. Runs are forks of a process that has imported torch, except those that Ctrl-C ends.
"""

import contextlib
import datetime
import functools
import gzip
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from helpers.chrome_trace import read_chrome_trace
from helpers.fork_python import forked_python
from helpers.pretrain import TOY, Home, Run
from helpers.program import ROOT, Program, run_forked
from helpers.refusals import table
from helpers.small_run import parse

import pretrain_gpt
from megazpp.base.program import LAUNCHER_PID, JobError
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL
from megazpp.data import dataset
from megazpp.parallel.worker import Worker
from megazpp.report.page import report_html
from megazpp.report.runs import read_runs
from megazpp.run.arguments import ParsedRun
from megazpp.run.report import what_next
from megazpp.topology.cluster_file import read_cluster

MAIN_JOB = shlex.split(
    "@configs/gpt_tiny.args --global-batch-size 8 --train-iters 6 --log-interval 2 --eval-interval 4 --eval-iters 1 "
    "--sample-tokens 8"
)
REDUCTION_ORDER = 1e-5  # relative tolerance for losses after 6 steps, if fp32 sums have another order


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    return Home(tmp_path_factory.mktemp("pretrain"))


@pytest.fixture(scope="module")
def main_job(home) -> Run:
    looks = ["--timeline-step", "3", "--profile", "--profile-step-start", "4", "--profile-step-end", "5"]
    return home.pretrain(*MAIN_JOB, *looks, "--timing-log-level", "1", run="main")


def test_run_logs_its_setup_and_results(main_job, home):
    output = main_job.output
    for text in (
        "using world size: 2, data-parallel size: 2, tensor-model-parallel size: 1",
        "\n1 node(s) x 2 rank(s): ",
        "ZeRO stage 3",
        "torch.optim.AdamW(fused=True)",
        "training a SentencePiece tokenizer of 2048 pieces",
        "no MFU: the peak of CPU in this precision is not known",
        "validation loss at iteration 4 | lm loss value: ",
        "timeline of step 3: ",
        "a sample of text:\nCall me",
        f"records of this run: {home.path / 'main'}\n",
        f"tokenizer and data indices: {home.path / 'cache'}\n",
    ):
        assert output.count(text) == 1, f"{text!r} in:\n{output}"
    (sample,) = map(json.loads, (home.path / "main/completions.jsonl").read_text().splitlines())
    assert sample["iteration"] == 6
    assert f"a sample of text:\n{sample['prompt']}{sample['completion']}" in output
    assert re.search(r"\n  --num-layers 2 +# configs/gpt_tiny.args:5\n", output)
    for text in ("--num-workers", "Traceback", "\r", "note: --emulate-nodes", "between nodes", "inter-node MB"):
        assert text not in output


def test_metrics_summary_and_log_agree_and_have_plausible_values(main_job):
    rows, summary = main_job.metrics, main_job.summary
    assert [row["iteration"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert row["consumed_samples"] == 8 * row["iteration"]
        assert row["consumed_tokens"] == 128 * row["consumed_samples"]
        assert min(row["step_seconds"], row["grad_norm"], row["learning_rate"]) > 0
        # one gather and one reduce-scatter of a million fp32 parameters send more than this
        assert row["local_bytes"] > 1e6
        # without tensor parallelism and without a second node, the wires `tp` and `cross` carry nothing
        assert row["tp_bytes"] == row["cross_bytes"] == row["skipped"] == 0
        assert f" | tokens/s per rank: {row['tokens_per_second'] / 2:.1f} | " in main_job.output
    assert rows[0]["lm_loss"] == pytest.approx(7.62, abs=0.1)  # ln 2048, the loss of a uniform guess
    assert rows[2]["lm_loss"] < rows[0]["lm_loss"] - 0.3
    assert summary["final_loss"] == rows[2]["lm_loss"]
    assert 5 < summary["validation_loss"] < 8
    assert 5 < summary["unigram_entropy"] < 7.62
    assert summary["tokens"] == 6 * 8 * 128
    assert 1e-6 < summary["cpu_seconds_per_token"] < 1e-2
    assert 1e8 < summary["peak_memory_bytes"] < 1e10
    assert summary["cross_bytes_per_step"] == 0


def test_records_of_a_run_make_a_report(main_job):
    (run,) = read_runs([main_job.folder])
    assert (run.state, run.notes) == ("finished", [])
    assert [row["iteration"] for row in run.validations] == [4, 6]
    assert run.validations[1]["lm_loss"] == main_job.summary["validation_loss"]
    assert run.topology.partition("\n")[0] in main_job.output
    page = report_html([run], datetime.datetime(2026, 1, 2))
    for chart in ("lm_loss", "validation", "tokens_per_second", "grad_norm", "peak_memory_bytes"):
        assert f'"{chart}":[[[' in page


def test_timeline_and_profile_cover_their_steps_and_timers_are_logged(main_job):
    by_rank = read_chrome_trace(main_job.folder / "timeline.json")
    assert [[span.name for span in spans if span.track == "step"] for spans in by_rank.values()] == [["step 3"]] * 2
    with gzip.open(main_job.folder / "profile-rank0-iterations5-5.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert names >= {"compute forward", "shard all_gather layers.0", "shard reduce_scatter the rest", "aten::mm"}
    timers = r"^ iteration .*\n\(min, max\) time across ranks \(ms\):\n    forward-backward \.+: \([\d.]+, [\d.]+\)$"
    assert len(re.findall(timers, main_job.output, re.MULTILINE)) == 3


@pytest.mark.slow
def test_reused_run_folder_keeps_records_and_args_txt_repeats_losses(main_job, home):
    """A run with the flags in the first run's args.txt has bit-identical losses, and reuses the cached tokenizer."""
    before = (main_job.folder / "metrics.jsonl").read_bytes()
    run = home.pretrain(f"@{main_job.folder / 'args.txt'}", "--sample-tokens", "3", run="main", nproc=None)
    assert (run.folder / "metrics.jsonl").read_bytes().startswith(before)
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        assert run.values(key)[:3] == run.values(key)[3:]
    assert "training a SentencePiece tokenizer" not in run.output
    args = [json.loads((run.folder / name).read_text()) for name in ("args.1.json", "args.json")]
    assert [values["sample_tokens"] for values in args] == [8, 3]
    assert {"summary.1.json", "timeline.1.json"} <= {path.name for path in run.folder.iterdir()}
    assert run.summary["final_loss"] == run.metrics[-1]["lm_loss"]


@pytest.mark.slow
def test_tensor_parallel_run_from_another_folder_gives_the_same_losses(main_job, home, tmp_path):
    flags = [*MAIN_JOB, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags += ["--log-params-norm", "--log-num-zeros-in-grad"]
    run = home.pretrain(*flags, run="tp", launcher=("-m", "pretrain_gpt"), cwd=tmp_path)
    assert "data-parallel size: 1, tensor-model-parallel size: 2" in run.output
    assert run.values() == pytest.approx(main_job.values()[:3], rel=REDUCTION_ORDER)
    assert all(row["tp_bytes"] > 1e6 for row in run.metrics)
    assert [row[f"{wire}_bytes"] for row in run.metrics for wire in ("local", "cross")] == [0] * 6
    assert len(re.findall(r"\| num zeros: \d+\.0 \| params norm: [1-9]\d\.\d{3} \|", run.output)) == 3
    assert list(tmp_path.iterdir()) == []  # the program may write nothing into its working directory


@pytest.mark.slow
def test_zeropp_on_two_nodes_of_two_logs_the_traffic_it_saves(main_job, home):
    """ZeRO++'s losses are within 0.5 % of ZeRO-3's (the main job's), with less than a tenth of the traffic."""
    run = home.pretrain(*MAIN_JOB, "--zeropp", "--micro-batch-size", "1", run="zeropp", nproc=4)
    assert run.values() == pytest.approx(main_job.values()[:3], rel=5e-3)
    assert "weights are gathered in two hops, int8 in blocks of 256, kept" in run.output
    assert "note: --emulate-nodes auto: 4 ranks on one machine are treated as 2 nodes\n" in run.output
    rows = {(row["collective"], row["axis"]): row for row in run.summary["traffic"]}
    assert {key: row["wire"] for key, row in rows.items()} == {
        ("all_gather", "local"): "local",
        ("all_to_all", "local"): "local",
        ("all_gather", "cross"): "cross",
        ("all_to_all", "cross"): "cross",
        ("all_reduce", "shard"): "cross",  # sums the loss and the gradient norm
    }
    # number of sharding units: weights cross nodes once per optimizer step, which has two micro-batches
    units = rows["all_gather", "cross"]["calls"] / 6
    assert rows["all_to_all", "cross"]["calls"] == 6 * units
    assert rows["all_to_all", "local"]["calls"] == 6 * 2 * units
    cross = sum(row["sent_bytes"] for key, row in rows.items() if row["wire"] == "cross")
    assert run.summary["cross_bytes_per_step"] == pytest.approx(cross / 6, rel=1e-3)

    zero3 = run.summary["zero3"]
    assert zero3["micro_batches"] == 12
    assert zero3["weight_bytes"] == pytest.approx(4 * 0.675e6, rel=0.03)
    assert cross < 0.1 * zero3["cross_bytes"]
    assert f"ZeRO-3 would have sent {zero3['cross_bytes'] / 1e6:.3f} MB" in run.output
    assert zero3["formula"] in run.output


def saved_weights(run: Run) -> dict[str, torch.Tensor]:
    reader = SafeReader(run.folder / "checkpoints" / "iter_0000006")
    return {key: reader.read_whole(key) for key in reader.tensors() if key.startswith(MODEL)}


@pytest.mark.slow
def test_zeropp_in_bf16_sends_lossless_deltas_and_trains_like_zero3(home):
    """With exact gradients, all numbers are bit-identical to ZeRO-3's, and fewer bytes cross nodes."""
    flags = [*TOY, "--bf16", "--train-iters", "6", "--global-batch-size", "8", "--save-to-run-dir"]
    zero3 = home.pretrain(*flags, "--emulate-nodes", "2", run="bf16")
    nodes = ["--emulate-nodes", "2", "--zeropp", "--no-zero-quantized-gradients"]
    zeropp = home.pretrain(*flags, *nodes, "--zero-weight-delta", "lossless", run="bf16-zeropp")
    assert "weights are gathered in two hops, not quantized inside nodes, lossless deltas across" in zeropp.output
    assert "--zero-weight-delta auto" not in zero3.output.split("end of arguments")[0]
    for key in ("lm_loss", "grad_norm"):
        assert zeropp.values(key) == zero3.values(key), key
    assert zeropp.summary["validation_loss"] == zero3.summary["validation_loss"]
    torch.testing.assert_close(saved_weights(zeropp), saved_weights(zero3), rtol=0.0, atol=0.0)
    assert zeropp.summary["cross_bytes_per_step"] < zero3.summary["cross_bytes_per_step"]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py")


@pytest.mark.slow
def test_torchrun_run_stops_at_exit_interval_and_logs_the_found_cluster(main_job, home):
    flags = ("--exit-interval", "4", "--emulate-nodes", "none", "--measure-links")
    run = home.pretrain(*MAIN_JOB, *flags, run="torchrun", launcher=TORCHRUN, nproc=None)
    assert run.summary["stop_reason"] == "--exit-interval 4"
    assert run.values() == main_job.values()[:2]
    hosts = f"note: hosts: {socket.gethostname()} (rank 0 1); "
    measured = "measured local (2 ranks, slowest link: domain): "
    for line in ("stopped by --exit-interval 4\n", hosts, "1 node(s) x 2 rank(s): ", measured):
        assert run.output.count(line) == 1
    assert re.search(r"^links: domain .* GB/s, .* us \(measured over local\)$", run.output, re.MULTILINE)
    kept = read_cluster(run.folder / "cluster.yaml")
    assert (kept.world_size, kept.num_nodes) == (2, 1)
    assert kept.links is not None


@pytest.mark.slow
def test_skip_train_only_evaluates(home):
    flags = ["--train-iters", "4", "--skip-train", "--split", "90,5,5"]
    run = home.pretrain(*TOY, *flags, run="skip", nproc=1)
    assert not (run.folder / "metrics.jsonl").exists()
    assert run.summary["iterations"] == 0
    assert run.summary["validation_loss"] == pytest.approx(5.55, abs=0.1)  # ln 257, the loss of a uniform guess
    assert run.summary["test_loss"] == pytest.approx(5.55, abs=0.1)
    assert not re.search(r"\bnan\b", run.output.lower().replace("number of nan", ""))


@pytest.fixture
def main(run_main, monkeypatch):
    """Return a function that runs pretrain_gpt's `main` in an empty folder.

    The function returns (exit code, stdout, stderr). The test fails if `main` starts workers.
    """
    monkeypatch.setattr("megazpp.run.start.launch_workers", lambda *_, **__: pytest.fail("started workers"))
    return functools.partial(run_main, pretrain_gpt.main)


def test_help_and_print_config_print_and_start_nothing(main, capfd):
    code, out, err = main("--print-config", "--DDP-impl", "local")
    assert code == 0
    assert err.startswith("note: command line: --DDP-impl is ignored: ")
    texts = [out]
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            main(flag)
        assert stop.value.code == 0
        texts.append(capfd.readouterr().out)
    assert all("--tensor-model-parallel-size" in text for text in texts)
    _, common, everything = texts
    assert common.count("\n") <= 64
    assert "--help-all shows all 2" in common
    assert "--muon-full-interval N " in everything
    for wrong in ("th", "STR", "INT"):
        assert not re.search(rf"(\d|\b){wrong}\b", everything), wrong
    words = re.findall(r"\{([^{}]*)\}", everything)
    assert all(len(set(group.split(","))) == len(group.split(",")) for group in words)
    assert os.listdir() == []


PLANNED = f"@configs/gpt_tiny.args --bf16 --seq-length 16 --cluster-file {ROOT}/configs/clusters/two_laptops.yaml"
REFUSED = """
--no-such-flag 3 --train-iter 4 | --no-such-flag is not a flag | did you mean --train-iters or --train-samples?
--train-iters 0x | --train-iters
--log-interval 0 | --log-interval 0
--tensor-model-parallel-size 3 | --num-attention-heads 4 is not divisible | --tensor-model-parallel-size 3
--record-memory-history | --record-memory-history
--load missing --exit-on-missing-checkpoint | --load missing
--text-path missing.txt | --text-path missing.txt
--lora-base missing | --lora-base missing does not exist
--split 0,1,1 | --split 0,1,1: no data for training
--text-path --valid-data-path a | --test-data-path: no data for training | without their tokenizer | --valid-data-path a
--text-path BAD | --text-path BAD, line 1: not UTF-8
--data-cache-path BAD | --data-cache-path: cannot write
@missing.args | missing.args
--plan --cluster-file BAD | --cluster-file BAD cannot be read
--plan PLANNED --tensor-model-parallel-size 8 | --num-attention-heads 4 is not | --tensor-model-parallel-size 8
--plan PLANNED --micro-batch-size 3 | --global-batch-size
--plan PLANNED --num-attention-heads 3 | --num-attention-heads
"""


def test_invalid_flags_are_rejected_before_anything_starts_or_is_written(main):
    """Each error takes one line: errors of parsing, of one config, between configs, of the machine, and of files."""
    Path("BAD").write_bytes(b"\xff\xfe")
    Path("a.idx").touch()
    Path("a.bin").touch()
    for flags, *named in table(REFUSED.replace("PLANNED", PLANNED)):
        code, out, err = main("--run-dir", "run", "--nproc", "2", *flags.split())
        assert (code, out) == (2, ""), flags
        assert len(err.splitlines()) == len(named), (flags, err)
        for words, line in zip(named, err.splitlines(), strict=True):
            assert line.startswith("pretrain_gpt.py: error: "), err
            assert words in line
    assert sorted(os.listdir()) == ["BAD", "a.bin", "a.idx"]


@pytest.mark.slow
def test_plan_prints_estimates_and_starts_and_writes_nothing(main):
    flags = "--zeropp --run-dir run --save save --DDP-impl local"
    code, out, err = main("--plan", *PLANNED.split(), *flags.split())
    assert (code, err) == (0, "")
    assert out.startswith("note: command line: --DDP-impl is ignored: ")
    assert "2 node(s) x 1 rank(s)" in out
    assert "fastest candidates" in out
    assert os.listdir() == []


def test_slurm_task_count_is_ignored_without_srun(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    monkeypatch.setattr("megazpp.run.start.launch_workers", lambda _, nproc, **limits: 100 + nproc)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--nproc", "2"])
    assert pretrain_gpt.main() == 102


def interrupted(home: Home, iteration: int, times: int, *flags: str, python: str) -> tuple[int, str]:
    """Run pretrain_gpt.py with wandb, and send SIGINT `times` times after an iteration, as Ctrl-C does.

    Returns:
        (exit code, output). All processes of the run must end.
    """
    job = [*TOY, "--wandb-project", "a-project", "--nproc", "2"]
    program = Program("pretrain_gpt.py", *job, *flags, *home.places("interrupted"), folder=home.path, python=python)
    program.wait_for(f" iteration {iteration:8d}/")
    assert len(program.left_behind()) > 3  # the launcher, two workers, and wandb's process
    for _ in range(times):
        os.killpg(program.process.pid, signal.SIGINT)
        program.wait_for("finishing this step; press Ctrl-C again to stop now\n")
    assert program.all_end()
    output = program.finish()
    assert "Traceback" not in output
    return program.process.returncode, output


@pytest.mark.slow
def test_ctrl_c_saves_leaves_no_process_and_prints_a_working_command(home):
    flags = ["--train-iters", "2000", "--save", str(home.path / "kept")]
    code, output = interrupted(home, 3, 1, *flags, python=sys.executable)
    assert code == 0
    assert "stopped by SIGINT\n" in output
    (command,) = re.findall("^to resume: python (.*)$", output, re.MULTILINE)
    assert command.endswith(f"--load {home.path / 'kept'}")
    following = max(map(int, re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE))) + 1
    goes_on = home.pretrain(*shlex.split(command)[1:], "--exit-interval", str(following), run="goes on", nproc=None)
    assert f" iteration {following:8d}/" in goes_on.output


@pytest.mark.slow
def test_second_ctrl_c_ends_the_run_and_wandb_at_once(home):
    # Both signals arrive in step 2, which lasts longer than 10 s. Only the launcher gets them
    flags = "--train-samples 40000 --rampup-batch-size 4 4092 4 --global-batch-size 4096"
    code, output = interrupted(home, 1, 2, *flags.split(), python=str(forked_python()))
    assert code == 130
    assert output.endswith("ended by SIGINT\n")


def test_run_stopped_without_save_says_that_nothing_was_saved(tmp_path):
    said = what_next(parse(shlex.join([*TOY, "--train-iters", "4"])), tmp_path, stopped=True, generate_flags="--chat")
    assert said == "nothing was saved: only a run with --save FOLDER can be resumed"


def test_command_that_resumes_names_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--save", "x"])
    parsed = parse(shlex.join([*TOY, "--train-iters", "4", "--save", "x"]))
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    for env, start, lines in (
        ({}, "python", 1),
        (torchrun, "torchrun ...", 1),
        (torchrun | {"LOCAL_WORLD_SIZE": "1"}, "torchrun ...", 2),
        (torchrun | {LAUNCHER_PID: "1"}, "python", 1),
        (slurm, "srun ...", 1),
    ):
        with monkeypatch.context() as own:
            for name, value in env.items():
                own.setenv(name, value)
            said = what_next(parsed, tmp_path, stopped=True, generate_flags="--chat").splitlines()
        assert said[0] == f"to resume: {start} pretrain_gpt.py --save x --load x"
        assert len(said) == lines
    forked = parse(shlex.join([*TOY, "--train-iters", "4", "--save", "x", "--load", "base", "--finetune"]))
    again = what_next(forked, tmp_path, stopped=True, generate_flags="--chat")
    assert again == "to resume: python pretrain_gpt.py --save x"
    for given, end in (("x --ckpt-step 2", " --ckpt-step none"), ("base --ckpt-step 2", ""), ("x", "")):
        back = parse(shlex.join([*TOY, "--train-iters", "4", "--save", "x", "--load", *given.split()]))
        again = what_next(back, tmp_path, stopped=True, generate_flags="--chat")
        assert again == f"to resume: python pretrain_gpt.py --save x{end}"
    complete = what_next(parsed, tmp_path / "a b", stopped=False, generate_flags="--chat")
    parts = what_next(parsed, tmp_path / "a b", stopped=False, generate_flags="--chat", split=True)
    assert "has only a part of the checkpoint" in parts
    assert "has only a part of the checkpoint" not in complete
    assert f"report.py '{tmp_path}/a b'\n" in complete
    assert "generate.py --load x --chat" in complete


@pytest.mark.slow
def test_terminal_output_starts_at_once_and_has_short_lines(tmp_path):
    flags = ["--train-iters", "4", "--nproc", "2", "--run-dir", str(tmp_path / "run")]
    reads, writes = pty.openpty()
    command = [str(forked_python()), "pretrain_gpt.py", *TOY, *flags]
    program = subprocess.Popen(command, cwd=ROOT, stdout=writes, stderr=writes)
    os.close(writes)
    said = b""
    with contextlib.suppress(OSError):  # reading fails when the last process that writes to the terminal has ended
        while part := os.read(reads, 1 << 16):
            said += part
    assert program.wait() == 0
    lines = said.decode().replace("\r", "\n").splitlines()
    assert lines[0] == "MegaZ++ 0.1.0 starts: importing torch"
    assert "starting 2 workers" in lines
    steps = [line for line in lines if re.match(r"iteration +\d+/4  loss", line)]
    assert len(steps) == 4
    assert max(map(len, steps)) <= 100
    assert "consumed samples" not in said.decode()
    assert "consumed samples" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.slow
def test_commands_printed_at_the_end_of_a_run_work(main_job):
    for label in ("see its curves", "generate text"):
        (command,) = re.findall(f"^{label}: python (.*)$", main_job.output, re.MULTILINE)
        small = ["--sample-tokens", "4"] if label == "generate text" else []
        code, output = run_forked(*shlex.split(command), *small, folder=main_job.folder)
        assert code == 0, output
    assert "Call me" in output
    assert json.loads((main_job.folder / "args.json").read_text())["save_to_run_dir"]
    log = (main_job.folder / "log.txt").read_text()
    assert "--train-iters 6 " in log
    assert " --save your_model/\n" in log


def test_the_launcher_checks_files_once_and_its_workers_do_not(monkeypatch, tmp_path):
    """Count how often the tokenizer is loaded: once by a launcher, once by a single process, and never by a worker.

    A single process keeps the tokenizer that its check of files has loaded, and uses it for the run.
    """
    loads, load_tokenizer = [], dataset.load_tokenizer
    monkeypatch.setattr(dataset, "load_tokenizer", lambda config: loads.append(config) or load_tokenizer(config))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TOY, "--train-iters", "1", "--data-cache-path", f"{tmp_path}"])
    runs: list[ParsedRun] = []

    def end(worker: Worker, parsed: ParsedRun, *rest: object) -> NoReturn:
        runs.append(parsed)
        raise JobError

    monkeypatch.setattr(pretrain_gpt, "worker_process", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(pretrain_gpt, "start_workers", lambda place, launch, main: 0)
    monkeypatch.setattr(pretrain_gpt, "open_run", end)
    monkeypatch.setattr("megazpp.run.start.report_failure", lambda *_: None)  # there is no store to report to
    pretrain_gpt.main()
    assert len(loads) == 1
    pretrain_gpt.main(["--nproc", "1", *sys.argv[1:]])
    assert loads == [runs[0].config.tokenizer] * 2
    assert runs[0].tokenizer.vocab_size == 257
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", LAUNCHER_PID: "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    pretrain_gpt.main()
    assert runs[1].tokenizer is None
    assert len(loads) == 2
