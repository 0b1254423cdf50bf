"""Which worker a failed job names, and what it says of it: where agents say nothing, and where they mislead."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib import RankError, start_torchrun, torchrun
from course_lib.runtime.torchrun import Worker
from course_lib.runtime.torchrun.failure import worker_error
from course_lib.runtime.torchrun.settings import Settings
from tests.runtime.torchrun_scripts import TAG, left_behind, new_tag

FAILS_AT_SIGTERM = """
import os, signal, time, traceback
def save(*_):
    raise RuntimeError("no room for the snapshot")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, save)
try:
    {}["handled"]
except KeyError:
    traceback.print_exc()
print("up", flush=True)
while True:
    time.sleep(0.1)
"""

OUTLIVES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("bad sample")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TAG, tag := new_tag())
    yield
    assert left_behind(tag) == []


def write(folder: Path, text: str) -> Path:
    (folder / "script.py").write_text(text)
    return folder / "script.py"


# --- what no agent says


def test_a_worker_that_fails_at_sigterm(tmp_path: Path) -> None:
    """The agents end with it, and say nothing of it; the other rank's traceback is an older, handled one."""
    with start_torchrun(write(tmp_path, FAILS_AT_SIGTERM), show="none") as job:
        assert job.until(lambda: len([w for w in job.workers() if "up\n" in w.output]) == 2, 60)
        job.terminate()
        with pytest.raises(RankError) as caught:
            job.wait(60)
    error = caught.value
    assert (error.rank, error.exc_type, error.exc_message) == (1, "RuntimeError", "no room for the snapshot")
    assert job.poll().exit_codes == {0: None, 1: 1}


def test_the_cause_is_named_while_its_agent_waits_for_a_survivor(tmp_path: Path) -> None:
    """The agent gives the other rank 30 s, and only then says which one failed."""
    with pytest.raises(RankError) as caught:
        torchrun(write(tmp_path, OUTLIVES_SIGTERM), timeout=4, show="none")
    error = caught.value
    assert (error.rank, error.exc_type, error.exc_message) == (1, "ValueError", "bad sample")
    assert "For 4 s (timeout) no worker has computed or written anything. Others had not ended" in str(error)


# --- what misleads


def error_of(folder: Path, *workers: Worker) -> RankError:
    return worker_error(Settings(str(write(folder, ""))), list(workers), 0, "logs")


def worker(rank: int, code: int | None, stderr: str = "", gone: float = 1.0, **more: object) -> Worker:
    made = Worker(0, rank, rank, 100 + rank, 0, 2, 0, 0.0, gone, code, **more)
    made.lines += [(True, line) for line in stderr.splitlines()]
    return made


def stderr_of(folder: Path, program: str) -> str:
    (folder / "fails.py").write_text(program)
    return subprocess.run([sys.executable, folder / "fails.py"], capture_output=True, text=True).stderr


def test_a_handled_traceback_is_not_the_cause(tmp_path: Path) -> None:
    text = stderr_of(tmp_path, "import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()")
    error = error_of(tmp_path, worker(0, 7, text))
    assert str(error).startswith("rank 0 of 2 ended with exit code 7\n") and error.exc_type == ""
    assert "ZeroDivisionError" in str(error)  # among the last lines of output


def test_an_exception_group(tmp_path: Path) -> None:
    program = "def f():\n raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])\n"
    program += "try:\n {}[0]\nexcept KeyError:\n f()"
    error = error_of(tmp_path, worker(0, 1, stderr_of(tmp_path, program)))
    assert error.exc_type == "ExceptionGroup" and error.exc_message.startswith("many (2 sub-exceptions)")
    assert "ValueError: a" in error.exc_message and "TypeError: b" in error.exc_message
    assert "line 6, in <module>" in str(error) and "line 2, in f" in str(error)
    assert "KeyError" in error.traceback


def test_a_rank_that_left_early_is_named(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\nRuntimeError: Connection reset by peer\n"
    early = worker(1, None, gone=1.0)
    assert "Rank 1 left first, without an error" in str(error_of(tmp_path, worker(0, 1, text, 2.0), early))
    for other in (worker(1, None, gone=3.0), worker(1, -signal.SIGTERM, gone=1.0, ended_by_agent=True)):
        assert "left first" not in str(error_of(tmp_path, worker(0, 1, text, 2.0), other))
    own = worker(0, 1, text.replace("Connection reset by peer", "bad value"), 2.0)
    assert "left first" not in str(error_of(tmp_path, own, early))
