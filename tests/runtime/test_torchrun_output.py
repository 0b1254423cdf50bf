"""How workers' output is read: lines that do not end, and more than anybody can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course_lib.runtime.torchrun import Worker, relay
from course_lib.runtime.torchrun.kept import Kept
from course_lib.runtime.torchrun.relay import Relay
from course_lib.runtime.torchrun.tail import Tail

MIB = 1 << 20


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


# --- more than anybody can read


def test_a_flood_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    append(path, b"x" * 99 + b"\n")
    tail = Tail(path, capped=True)
    append(path, (b"y" * 99 + b"\n") * 30_000)
    counts = [len(tail.read()) for _ in range(4)]
    assert sum(counts) == 30_001 and max(counts) <= MIB // 100 + 1 and not tail.read() and not tail.grew
    tail.close()


def test_what_lies_too_far_ahead_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "out"
    append(path, "begun: é".encode())
    tail = Tail(path, capped=True)
    assert tail.read() == []
    append(path, b"\n" + (b"y" * 99 + b"\n") * 100_000 + b"the end\n")
    lines = tail.read()
    assert lines[:2] == ["begun: é", "… 9 MB left out: they came faster than they can be read"]
    assert lines[-1] == "the end" and set(lines[2:-1]) == {"y" * 99} and len(lines) < MIB // 100 + 10
    whole = Tail(path)  # the diary's, of which nothing may be missing
    assert len(whole.read()) == 100_002
    whole.close()
    tail.close()


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "out"
    append(path, b"." * (2 * MIB + 5))
    tail = Tail(path, capped=True)
    assert [len(line) for _ in range(4) for line in tail.read()] == [2 * MIB]
    assert tail.rest == "." * 5 and tail.read(last=True) == ["....."]
    tail.close()


def test_the_first_and_the_last_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_lib.runtime.torchrun.kept._MOST", 1000)
    kept = Kept()
    assert not kept
    for number in range(500):
        kept += [(False, f"line {number:4}")]
    texts = [text for _, text in kept]
    assert texts[0] == "line    0" and texts[-1] == "line  499" and len(kept) == 18
    assert texts[9] == "… 482 lines left out; the log files, which log_dir=... keeps, have them all"


def test_a_reader_is_not_shown_more_than_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    relay._write(False, [str(number) for number in range(5000)])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2001 and (shown[0], shown[-1]) == ("0", "4999")
    assert shown[1000] == "… 3000 lines not shown; `output` has more"


# --- lines that do not end


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(the relay, its worker, what stdout goes to, a clock that is set by hand)"""
    worker = Worker(0, 0, 0, 7, 0, 1, 0, 0.0)
    for stream in ("stdout", "stderr"):
        (tmp_path / f"7.{stream}").touch()
    clock = [100.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: clock[0])
    made = Relay("live", lambda text: text)
    made.follow(worker, tmp_path)
    yield made, worker, tmp_path / "7.stdout", clock
    made.finish([worker])


def test_an_unfinished_line_is_a_sign_of_life_and_shown_after_a_while(followed, capsys) -> None:
    made, worker, path, clock = followed
    append(path, b"..")
    assert made.pump() and not made.pump()  # something came; nothing more came
    assert capsys.readouterr().out == ""
    clock[0] += 1.0
    assert not made.pump() and capsys.readouterr().out == "[rank 0] ..\n"
    append(path, b". done\nnext\n")
    assert made.pump() and capsys.readouterr().out == "[rank 0] . done\n[rank 0] next\n"
    assert worker.output == "... done\nnext\n"


def test_a_progress_bar_is_shown_as_it_stands(followed, capsys) -> None:
    made, worker, path, clock = followed
    for step in range(1, 7):
        append(path, f"\r{step}/6".encode())
        made.pump()
        clock[0] += 0.3
    assert capsys.readouterr().out == "[rank 0] 3/6\n[rank 0] 6/6\n"
    append(path, b"\n")
    made.pump()
    assert capsys.readouterr().out == "" and worker.output == "6/6\n"  # it has been shown


def test_what_is_unfinished_at_the_end_is_kept(followed) -> None:
    made, worker, path, _ = followed
    append(path, b"no end" + os.linesep.encode() + b"of this line")
    worker.gone = 1.0
    made.finish([worker])
    assert worker.output == "no end\nof this line\n"
