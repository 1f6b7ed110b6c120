"""Flag files: `@path`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.flag_files import Word, expand_flag_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def texts(words: list[Word]) -> list[str]:
    return [word.text for word in words]


def test_a_file_stands_for_its_words(folder: Path) -> None:
    (folder / "a.args").write_text(
        "# comment\n"
        "\n"
        "--name 'two words' --empty ''   # trailing comment\n"
        "--path a\\ b \\\n"
        "    c  # the end \\\n"
        "--lr 3e-4\n"
    )
    words = expand_flag_files(["--x", "@a.args", "--y"], folder)
    assert words == [
        Word("--x", "command line"),
        Word("--name", "a.args:3"),
        Word("two words", "a.args:3"),
        Word("--empty", "a.args:3"),
        Word("", "a.args:3"),
        Word("--path", "a.args:4"),
        Word("a b", "a.args:4"),
        Word("c", "a.args:5"),
        Word("--lr", "a.args:6"),
        Word("3e-4", "a.args:6"),
        Word("--y", "command line"),
    ]


def test_an_included_path_is_relative_to_the_including_file(folder: Path) -> None:
    (folder / "configs" / "common").mkdir(parents=True)
    (folder / "configs" / "model.args").write_text("@common/base.args\n--b 2\n")
    (folder / "configs" / "common" / "base.args").write_text("@../more.args\n--a 1\n")
    (folder / "configs" / "more.args").write_text("--c 3\n")
    words = expand_flag_files(["@configs/model.args"], folder)
    assert texts(words) == ["--c", "3", "--a", "1", "--b", "2"]
    assert [word.origin for word in words[::2]] == [
        "configs/more.args:1",
        "configs/common/base.args:2",
        "configs/model.args:2",
    ]


def test_a_path_on_the_command_line_is_looked_for_here_and_then_beside_the_script(folder: Path, tmp_path: Path) -> None:
    script_dir = tmp_path / "script"
    script_dir.mkdir()
    (script_dir / "a.args").write_text("--from script\n")
    (script_dir / "b.args").write_text("--from script\n")
    (folder / "b.args").write_text("--from here\n")
    assert texts(expand_flag_files(["@a.args"], script_dir)) == ["--from", "script"]
    assert texts(expand_flag_files(["@b.args"], script_dir)) == ["--from", "here"]
    with pytest.raises(ValueError, match=r"command line: there is no flag file c.args \(looked in \. and .*script\)"):
        expand_flag_files(["@c.args"], script_dir)


def test_the_same_file_may_be_included_twice_but_not_by_itself(folder: Path) -> None:
    (folder / "base.args").write_text("--a 1\n")
    (folder / "twice.args").write_text("@base.args\n@base.args\n")
    assert texts(expand_flag_files(["@twice.args"], folder)) == ["--a", "1"] * 2
    (folder / "x.args").write_text("@y.args\n")
    (folder / "y.args").write_text("\n@z.args\n")
    (folder / "z.args").write_text("@y.args\n")
    with pytest.raises(ValueError, match=":") as caught:
        expand_flag_files(["@x.args"], folder)
    assert str(caught.value) == ("z.args:1: flag files include each other in a circle: y.args -> z.args -> y.args")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"--a 1\n--b 'open\n", "bad.args:2: No closing quotation"),
        (b"--a \xff\n", "bad.args: cannot be read: "),
        (b"\n\n@missing.args\n", "bad.args:3: there is no flag file missing.args (looked in .)"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_line(folder: Path, content: bytes, message: str) -> None:
    (folder / "bad.args").write_bytes(content)
    with pytest.raises(ValueError, match=":") as caught:
        expand_flag_files(["@bad.args"], folder)
    assert str(caught.value).startswith(message)


def test_a_quoted_value_may_reach_over_lines_and_keeps_them_as_they_are(folder: Path) -> None:
    (folder / "a.args").write_bytes(b"--stop 'one  \n\r\n  # two\\\n' --lr 1\r\n# don't\n--seed 3\n")
    assert expand_flag_files(["@a.args"], folder) == [
        Word("--stop", "a.args:1"),
        Word("one  \n\r\n  # two\\\n", "a.args:1"),
        Word("--lr", "a.args:1"),
        Word("1", "a.args:1"),
        Word("--seed", "a.args:6"),
        Word("3", "a.args:6"),
    ]
