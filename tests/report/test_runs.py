"""Test reading run folders: complete, cut short and damaged ones. Folders without records of a run are rejected."""

import math

import pytest
from helpers.refusals import not_refused
from helpers.run_folders import make_run, row

from megazpp.report.runs import read_runs


def test_all_records_of_a_run_are_read(tmp_path):
    folder = make_run(
        tmp_path / "run",
        [row(2), row(4)],
        validation=[{"iteration": 4, "lm_loss": 6.0}],
        args={"lr": 1.0},
        summary={"iteration": 4},
    )
    (folder / "topology.txt").write_text("2 nodes\n")
    (run,) = read_runs([folder])
    assert (run.name, run.flags, run.topology, run.notes) == ("run", {"lr": 1.0}, "2 nodes\n", [])
    assert [row["iteration"] for row in run.rows] == [2, 4]
    assert [row["lm_loss"] for row in run.validations] == [6.0]


@pytest.mark.parametrize(
    ("iterations", "files", "state"),
    [
        ([2, 4], {"summary": {"iteration": 4, "stop_reason": None}}, "finished"),
        ([2, 4], {"summary": {"iteration": 4, "stop_reason": "SIGTERM"}}, "stopped by SIGTERM"),
        ([2, 4, 6], {"summary": {"iteration": 4}}, "still running, or it crashed"),
        ([2], {}, "still running, or it crashed"),
        ([], {"tail": '{"iteration": 1'}, "no log line yet"),
        ([], {"summary": {"iteration": 0}}, "finished"),
    ],
)
def test_run_state_follows_from_summary_and_last_line(iterations, files, state, tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run", [row(i) for i in iterations], **files)])
    assert run.state == state


def test_damaged_files_are_left_out_with_a_note(tmp_path):
    folder = make_run(tmp_path / "run", [row(2)], tail='{"iteration": 4, "lm_l', summary={})
    (folder / "summary.json").write_text('{"iteration"')
    (folder / "args.json").write_bytes(b"\xff\xfe\x00")
    (folder / "not-finite-2.json").touch()
    (run,) = read_runs([folder])
    assert ([row["iteration"] for row in run.rows], run.flags, run.summary, run.topology) == ([2], {}, {}, "")
    assert run.notes[0].startswith("metrics.jsonl: 1 line(s) are cut or damaged")
    noted = [note.split()[0] for note in run.notes[1:]]
    assert noted == ["not-finite-2.json", "args.json", "summary.json"]
    (tmp_path / "null").mkdir()
    (tmp_path / "null" / "metrics.jsonl").write_text('{"iteration": 2, "lm_loss": null}\n{"iteration": 4}\n')
    first, second = read_runs([tmp_path / "null"])[0].rows
    assert (math.isnan(first["lm_loss"]), "lm_loss" in second) == (True, False)
    folder = make_run(tmp_path / "other", [row(2)], tail='{"iter\n\x00\x00\n[1]\n{"iteration": "3"}\n')
    assert read_runs([folder])[0].notes[0].startswith("metrics.jsonl: 4 line(s) are cut or damaged")


def test_run_names_are_shortest_unique_and_a_folder_counts_once(tmp_path):
    one, other = make_run(tmp_path / "a/run", [row(2)]), make_run(tmp_path / "b/run", [row(2)])
    assert [run.name for run in read_runs([one, other, one / ".." / "run"])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([one])] == ["run"]


def test_folder_without_a_run_is_rejected(tmp_path):
    texts = ("\x00\x01binary", "[1, 2]\n", '{"loss": 1}\nmore\n')
    rows = [
        *(
            (make_run(tmp_path / ascii(text), tail=text), "no line is a JSON object with an iteration")
            for text in texts
        ),
        (tmp_path / "none", "none is not a folder"),
        (tmp_path, "is not a run folder: it has neither metrics.jsonl nor args.json"),
    ]
    assert not not_refused(rows, lambda folder: read_runs([folder]))
