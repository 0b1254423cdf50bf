"""The script of chapter 04, on real torchrun: killed, stopped, restarted, it ends in the same parameters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from course_lib import Pool, launch, train_ddp
from course_lib.classroom.reference import differences
from course_lib.parallel.trainer import (
    EXIT_CODE,
    Journal,
    kept_samples,
    read_audit,
    read_events,
    recovery,
    snapshot,
)
from course_lib.train_ddp import main, parser

EPOCHS, STEPS, PADDED = 3, 23, 1438  # 1437 digits on 2 ranks, 32 each in a step


def command(folder: Path, *options: Any) -> list[str]:
    paths = {"snapshot_path": "s.pt", "audit": "audit", "events": "events"}
    files = [word for name, file in paths.items() for word in (f"--{name}", str(folder / file))]
    return [*files, *map(str, options)]


def state(folder: Path) -> dict[str, Any]:
    return snapshot.read(folder / "s.pt").state


def same_end(folder: Path, other: Path) -> None:
    ours, theirs = state(folder), state(other)
    assert not differences(ours["model"], theirs["model"])
    assert ours["progress"] == theirs["progress"] and ours["progress"]["epoch"] == EPOCHS
    momenta = [
        {str(k): v["momentum_buffer"] for k, v in s["optimizer"]["state"].items()} for s in (ours, theirs)
    ]
    assert not differences(*momenta)
    for epoch in range(EPOCHS):
        assert kept_samples(folder / "audit", epoch) == kept_samples(other / "audit", epoch)


def on_ranks(arguments: list[str], world_size: int = 2) -> list[str]:
    """The script on ranks of the launcher: as on torchrun, and there in a tenth of a second. What rank 0 prints."""
    with Pool(world_size, show="none") as pool:
        results = pool.run(lambda comm: main(arguments))
    assert list(results) == [0] * world_size
    return results.output[0].splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = on_ranks(command(folder, "--total_epochs", EPOCHS))
    assert len(lines) == EPOCHS and all(re.fullmatch(r"epoch \d: loss \d\.\d{4}", line) for line in lines)
    return folder


@contextmanager
def torchrun(*words: Any) -> Iterator[subprocess.Popen]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: value for name, value in os.environ.items() if "TORCH" not in name}
    process = subprocess.Popen(
        [*run, *map(str, words)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(
                signal.SIGINT
            )  # the agent then ends its workers, which have sessions of their own
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        assert process.stdout is not None
        process.stdout.close()


# --- real torchrun


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_an_epoch(tmp_path: Path, undisturbed: Path) -> None:
    options = ("--total-epochs", EPOCHS, "--save-every-steps", 5, "--crash-at", "1:8")
    script = ("-m", "course_lib.train_ddp", *command(tmp_path, *options))
    with torchrun("--max-restarts", 1, *script) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    # 23 steps an epoch: saved after steps 5, 10 … of all, the last time after step 30, which is step 7 of epoch 1
    assert re.findall("^(?:epoch|resumed).*$", output, re.M)[1] == "resumed from snapshot epoch 1, step 7"
    assert output.count("epoch 1: loss") == 1 and "exitcode: -9" in output
    same_end(tmp_path, undisturbed)
    lost = {(step.restart, step.epoch, step.step) for step in read_audit(tmp_path / "audit") if not step.kept}
    assert lost == {(0, 1, 7)}
    events = read_events(tmp_path / "events")
    killed_at = max(event["time"] for event in events if event["restart"] == 0)
    parts = recovery(events, killed_at)
    assert all(seconds >= 0 for seconds in parts.values())
    assert {event["restart"] for event in events} == {0, 1}


@pytest.mark.slow
def test_sigterm_to_the_agent_saves_before_it_ends(tmp_path: Path, undisturbed: Path) -> None:
    options = command(tmp_path, "--total_epochs", EPOCHS, "--step_delay", 0.05)
    with torchrun("-m", "course_lib.train_ddp", *options) as process:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "audit").exists() and (tmp_path / "audit").read_text().count("\n") > 8):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        assert not (tmp_path / "s.pt").exists()  # nothing saved but for the signal
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"stopped by SIGTERM; the snapshot is in {tmp_path / 's.pt'}" in output
    progress = state(tmp_path)["progress"]
    assert progress["epoch"] == 0 and 3 < progress["step"] < STEPS
    again = on_ranks(command(tmp_path, "--total_epochs", EPOCHS))
    assert again[0] == f"resumed from snapshot epoch 0, step {progress['step']}"
    same_end(tmp_path, undisturbed)
    assert all(step.kept for step in read_audit(tmp_path / "audit"))  # not one step was lost


# --- without torchrun


def test_every_sample_is_trained_on_in_every_epoch(undisturbed: Path) -> None:
    for epoch in range(EPOCHS):
        seen = kept_samples(undisturbed / "audit", epoch)
        assert set(seen) == set(range(1437)) and seen.total() == PADDED
    losses = state(undisturbed)["progress"]["epoch_losses"]
    assert losses[0] > losses[1] > losses[2] and losses[2] < 0.5  # it learns


@pytest.mark.parametrize("options", [("--model", "cnn", "--optimizer", "adam"), ("--model", "mlp")])
def test_ten_epochs_are_four_and_six_more(tmp_path: Path, options: tuple) -> None:
    ten, four = [
        [*options, "--batch_size", "128", "--snapshot_path", str(tmp_path / f"{n}.pt")] for n in "ab"
    ]
    expected = on_ranks([*ten, "--total_epochs", "10"], 1)
    got = on_ranks([*four, "--total_epochs", "4"], 1) + on_ranks([*four, "--total_epochs", "10"], 1)
    assert got.pop(4) == "resumed from snapshot epoch 4, step 0" and got == expected
    a, b = (snapshot.read(tmp_path / f"{n}.pt").state for n in "ab")
    assert not differences(a["model"], b["model"]) and a["progress"] == b["progress"]


def test_sigterm_ends_the_script_with_143(tmp_path: Path) -> None:
    """A process of its own, without torchrun: one rank. 143 also tells an agent that the job is not done."""
    options = command(tmp_path, "--step_delay", "0.05")
    run = [sys.executable, "-m", "course_lib.train_ddp", *options]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(run, env=one_thread, stdout=subprocess.PIPE) as process:
        try:
            while not (tmp_path / "audit").exists() or (tmp_path / "audit").read_text().count("\n") < 3:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == EXIT_CODE and b"stopped by SIGTERM" in output
    assert state(tmp_path)["progress"]["step"] >= 2


def test_options_with_underscores_or_hyphens() -> None:
    for spelling in ("_", "-"):
        words = f"--total{spelling}epochs 3 --save{spelling}every{spelling}steps 7 --crash{spelling}at 1:5:0".split()
        options = parser().parse_args(words)
        assert (options.total_epochs, options.save_every_steps, options.crash_at) == (3, 7, (1, 5, 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--crash_at 5", "expected EPOCH:STEP or EPOCH:STEP:RANK, as in 1:5, got '5'"),
        ("--batch_size 0", "expected a whole number, 1 or more, got '0'"),
        ("--dropout nan", "expected a number from 0 to 1, got 'nan'"),
        ("--dropout 1.5", "expected a number from 0 to 1, got '1.5'"),
        ("--seed 99999999999999999999999", "expected a whole number, at most 9223372036854775807, got '9999"),
        ("--total_epochs ten", "expected a whole number, 0 or more, got 'ten'"),
        ("--resume maybe", "invalid choice: 'maybe'"),
    ],
)
def test_wrong_options_are_named(words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words.split())
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "missing"),
    [("1:5:9", "rank 9: there are 1"), ("0:999", "step 999: there are 45"), ("7:1", "epoch 7")],
)
def test_a_crash_that_never_comes_is_said(tmp_path: Path, place: str, missing: str) -> None:
    path = str(tmp_path / "s.pt")
    arguments = ["--crash_at", place, "--total_epochs", "3", "--snapshot_path", path]

    def said(comm, arguments: list[str]) -> None:
        train_ddp.build(parser().parse_args(arguments), comm, Journal(0))

    for number in ("2:44", place):
        arguments[1] = number
        results = launch(said, arguments, world_size=1, show="none")
        assert (f"WARNING: --crash_at: nothing will crash at {missing}" in results.output[0]) == (
            number == place
        )


def test_a_crash_comes_once_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that has just joined counts no restarts; the job's name tells."""
    trainer = train_ddp.Demonstration.__new__(train_ddp.Demonstration)
    trainer.snapshot_path = tmp_path / "s.pt"
    crashes = []
    for job, restarts in (("none", 0), ("none", 1), ("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 0)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        crashes.append(trainer._crashes())
    assert crashes == [True, False, True, False, False, True, False]


@pytest.mark.parametrize("text", ["-1", "nan", "inf"])
def test_rates_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_ddp.parser().parse_args(["--lr", text])
    assert "expected a number, 0 or more" in capsys.readouterr().err


def test_a_rate_of_0_is_0(tmp_path: Path) -> None:
    def rate(comm, path: Path) -> float:
        options = train_ddp.parser().parse_args(["--lr", "0", "--snapshot_path", str(path)])
        return train_ddp.build(options, comm, Journal(0)).optimizer.param_groups[0]["lr"]

    assert launch(rate, tmp_path / "s.pt", world_size=1, show="none")[0] == 0
