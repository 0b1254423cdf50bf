"""The Trainer: stopped anywhere and resumed, it ends in the same bits; what cannot be saved is said in time."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from course_lib import Pool, RankError
from course_lib.classroom.models import MLP, DigitsCNN, sample_batches
from course_lib.classroom.reference import differences, train
from course_lib.parallel.sampler import DistributedSampler
from course_lib.parallel.trainer import (
    EXIT_CODE,
    MISTAKES,
    Journal,
    Trainer,
    TutorialTrainer,
    kept_samples,
    read_audit,
    read_events,
    recovery,
    snapshot,
)
from course_lib.parallel.trainer.epochs import train_resumably
from course_lib.parallel.trainer.preemption import StopSignal
from course_lib.parallel.trainer.process_group import fresh_part, process_group

SAMPLES, BATCH = 23, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.AdamW(p, 0.01),
}


class Crash(Exception):
    """In the place of a fault: the Trainer is gone, and what it had not written."""


class Crashing(Trainer):
    crash_at: tuple[int, int] | None = None

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if (self.progress.epoch, self.progress.step) == self.crash_at:
            raise Crash
        # All generators, on every rank, are part of what must be restored.
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return super().train_step(inputs + 1e-3 * noise, targets)


def make(
    comm: Any, path: Path, *, cls: type = Crashing, kind: str = "mlp", optimizer: str = "sgd", **options: Any
) -> Any:
    torch.manual_seed(time.monotonic_ns())  # a new process knows nothing of the old one's generators
    model = MLP(dropout=0.3) if kind == "mlp" else DigitsCNN(3, batch_norm=True, dropout=0.3)
    ((inputs, targets),) = sample_batches(model, 1, SAMPLES)
    wrapped = DistributedDataParallel(model)
    made = OPTIMIZERS[optimizer](wrapped.parameters())
    options = {"batch_size": BATCH, "scheduler": torch.optim.lr_scheduler.StepLR(made, 2, 0.5)} | options
    sampler = DistributedSampler(SAMPLES, comm.world_size, comm.rank)
    return cls(wrapped, made, TensorDataset(inputs, targets), sampler, comm, snapshot_path=path, **options)


def outcome(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that a snapshot holds, as tensors."""
    state = trainer.state_dict()
    return state["model"] | flat(
        {k: state[k] for k in ("optimizer", "scheduler", "rng", "progress", "sampler")}
    )


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), name)
    if isinstance(value, torch.Tensor):
        return {name: value}
    return {name: torch.tensor(float(value) if isinstance(value, float | int) else hash(str(value)) % 2**31)}


def run(comm: Any, path: Path, epochs: int, crash_at: tuple[int, int] | None = None, **options: Any) -> Any:
    """One process's life: (all of its state at the end, losses), or None if it crashed."""
    trainer = make(comm, path, **options)
    trainer.crash_at = crash_at
    try:
        trainer.fit(epochs)
    except Crash:
        return None
    return outcome(trainer), trainer.losses, trainer.stopped


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(n): a Pool of n ranks, the same in all tests. A failure ends a Pool: see `fails`."""
    made: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in made:
            made[world_size] = Pool(world_size, show="none")
        return made[world_size]

    yield pool
    for each in made.values():
        each.close()


def fails(world_size: int, body: Callable) -> RankError:
    with Pool(world_size, show="none") as pool, pytest.raises(RankError) as caught:
        pool.run(body)
    return caught.value


# --- bit for bit

PLACES = {
    "between epochs": ([2], {}),
    "in the middle of an epoch": ([(2, 1)], {"save_every_steps": 2}),
    "after the last step of an epoch": ([(2, 0)], {"save_every_steps": 1, "save_every": 99}),
    "twice, with work lost": ([(1, 1), (3, 1)], {"save_every_steps": 3, "save_every": 2}),
}


def resumed_equals_undisturbed(comm: Any, folder: Path, stops: list, options: dict) -> list[str]:
    expected, losses, _ = run(comm, folder / "undisturbed.pt", 4, **options)
    for stop in stops:
        if isinstance(stop, int):
            run(comm, folder / "s.pt", stop, **options)
        else:
            assert run(comm, folder / "s.pt", 4, stop, **options) is None
    got, last_losses, _ = run(comm, folder / "s.pt", 4, **options)
    return differences(got, expected) + differences(last_losses, losses[-len(last_losses) :], what="resumed")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("world_size", "kind", "optimizer"),
    [(1, "mlp", "adam"), (2, "mlp", "sgd"), (2, "cnn", "adam"), (3, "mlp", "adam"), (3, "cnn", "sgd")],
)
def test_resumed_equals_undisturbed(pools, tmp_path, world_size, place, kind, optimizer) -> None:
    stops, options = PLACES[place]
    options = options | {"kind": kind, "optimizer": optimizer}
    for problems in pools(world_size).run(resumed_equals_undisturbed, tmp_path, stops, options):
        assert problems == []
    files = [flat(snapshot.read(tmp_path / name).state) for name in ("s.pt", "undisturbed.pt")]
    assert not differences(*files)  # with every rank's generators


def test_torchs_ddp_adds_otherwise_in_its_first_step(pools, tmp_path) -> None:
    """Why a resumed run warms up. If this fails, torch's DDP has changed and `warm_up` may have become superfluous."""

    class Cold(Crashing):
        def warm_up(self) -> None:
            pass

    def cold(comm: Any, folder: Path) -> list[str]:
        return resumed_equals_undisturbed(comm, folder, [2], {"cls": Cold})

    assert pools(2).run(cold, tmp_path)[0] == []  # a + b is b + a
    for file in tmp_path.iterdir():
        file.unlink()
    assert any("weight differs" in problem for problem in pools(3).run(cold, tmp_path)[0])


def test_undisturbed_it_is_plain_training(tmp_path) -> None:
    """One rank, no dropout: the same as the loop without anything."""
    with process_group() as comm:
        model = MLP()
        ((inputs, targets),) = sample_batches(model, 1, SAMPLES)
        sampler = DistributedSampler(SAMPLES, 1, 0)
        batches = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches += [(inputs[rows], targets[rows]) for rows in torch.tensor(list(sampler)).split(BATCH)]
        expected = train(model, batches, OPTIMIZERS["sgd"])
        sampler = DistributedSampler(SAMPLES, 1, 0)
        data = TensorDataset(inputs, targets)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        path = tmp_path / "s.pt"
        trainer = Trainer(model, optimizer, data, sampler, comm, batch_size=BATCH, snapshot_path=path)
        progress = trainer.fit(3)
    assert not differences(trainer.losses, expected.losses) and not differences(
        model.state_dict(), expected.state
    )
    assert (progress.epoch, progress.step, progress.global_step, progress.samples) == (3, 0, 24, 69)
    by_hand = (
        sum(loss * len(b[1]) for loss, b in zip(expected.losses[16:], batches[16:], strict=True)) / SAMPLES
    )
    assert progress.epoch_losses[2] == pytest.approx(by_hand, rel=1e-12)


# --- what it says


def test_what_it_prints(pools, tmp_path) -> None:
    def lines(comm: Any, *args: Any, **options: Any) -> None:
        run(comm, *args, **options)

    pool, path = pools(2), tmp_path / "s.pt"
    first = pool.run(lambda c: lines(c, path, 6, (1, 3), save_every_steps=2)).output
    again = pool.run(lambda c: lines(c, path, 2)).output
    nothing_left = pool.run(lambda c: lines(c, path, 2)).output
    assert first[0].startswith("epoch 0: loss ") and first[0].count("\n") == 1
    assert again[0].splitlines()[0] == "resumed from snapshot epoch 1, step 2"
    assert again[0].splitlines()[1].startswith("epoch 1: loss ")
    assert nothing_left[0] == "resumed from snapshot epoch 2, step 0\n"
    assert first[1] == again[1] == nothing_left[1] == ""


# --- resume=


def test_resume_never_sets_aside_and_must_demands(pools, tmp_path) -> None:
    pool, path = pools(2), tmp_path / "s.pt"
    message = fails(2, lambda c: run(c, path, 2, resume="must")).exc_message
    assert f"There is no snapshot {path} to go on from, as `--resume must` demands" in message
    expected = pool.run(lambda c: run(c, path, 2))[0][0]
    old = path.read_bytes()
    anew = pool.run(lambda c: run(c, path, 2, resume="never"))
    assert not differences(anew[0][0], expected)
    assert (
        f"{path} is not resumed: set aside as {path}.aside" in anew.output[0]
        and "resumed from" not in anew.output[0]
    )
    assert (tmp_path / "s.pt.aside").read_bytes() == old
    assert (
        pool.run(lambda c: run(c, path, 3, resume="must"))
        .output[0]
        .startswith("resumed from snapshot epoch 2")
    )


@contextmanager
def under_torchrun(job: str, restarts: int) -> Iterator[None]:
    names = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@pytest.mark.parametrize(
    ("job", "restarts", "resumes"),
    [("none", 0, False), ("none", 1, True), ("b", 0, False), ("b", 1, False), ("a", 0, True), ("a", 1, True)],
)
def test_resume_never_means_the_first_start_of_a_job_only(pools, tmp_path, job, restarts, resumes) -> None:
    """When a node joins, all start again with the same job's name and the restart count as it was."""

    def started(comm: Any, job: str, restarts: int, epochs: int) -> None:
        with under_torchrun(job, restarts):
            run(comm, tmp_path / "s.pt", epochs, resume="never")

    pools(2).run(started, "a", 0, 1)
    printed = pools(2).run(started, job, restarts, 2).output[0]
    assert printed.startswith("resumed from snapshot epoch 1") == resumes != ("set aside" in printed), printed


# --- damaged, foreign, impossible


def test_damaged_the_one_before_is_used_and_stays(pools, tmp_path) -> None:
    pool, path = pools(2), tmp_path / "s.pt"
    expected = pool.run(lambda c: run(c, tmp_path / "undisturbed.pt", 6))[0][0]
    pool.run(lambda c: run(c, path, 4))
    path.write_bytes(path.read_bytes()[:-7])
    good = snapshot.previous_of(path).read_bytes()
    results = pool.run(lambda c: run(c, path, 6, (4, 1)))  # crashes before it writes one
    assert f"WARNING: {path} is damaged" in results.output[0]
    assert f"{path}.previous, the one before it, is used" in results.output[0]
    assert "resumed from snapshot epoch 3, step 0" in results.output[0]
    assert path.with_name("s.pt.aside").exists()
    assert good in (path.read_bytes(), snapshot.previous_of(path).read_bytes())
    results = pool.run(lambda c: run(c, path, 6))
    assert not differences(results[0][0], expected) and "WARNING" not in results.output[0]


def test_both_damaged_is_an_error_on_every_rank(pools, tmp_path) -> None:
    path = tmp_path / "s.pt"
    pools(2).run(lambda c: run(c, path, 2))
    path.write_bytes(b"")
    snapshot.previous_of(path).write_bytes(b"PK rubbish")

    def told(comm: Any) -> str:
        try:
            return str(run(comm, path, 3))
        except snapshot.SnapshotError as error:
            return str(error)

    for message in pools(2).run(told):
        assert message.startswith("No snapshot can be used") and "`--resume never`" in message
        assert f"{path} is empty" in message and f"{path}.previous is no snapshot" in message


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"optimizer": "adam"}, "expected {'optimizer': 'AdamW'"),
        ({"kind": "cnn"}, "the snapshot does not fit: Error"),
        ({"scheduler": None}, "'scheduler': 'NoneType'"),
    ],
)
def test_another_trainings_snapshot_is_refused(tmp_path, other, words) -> None:
    with process_group() as comm:
        run(comm, tmp_path / "s.pt", 1)
        with pytest.raises(snapshot.SnapshotError) as caught:
            run(comm, tmp_path / "s.pt", 2, **other)
    assert (
        words in str(caught.value) and "rank 0" in str(caught.value) and "--resume never" in str(caught.value)
    )


def without(state: dict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


FOREIGN: dict[str, tuple[Callable[[dict], Any], str]] = {
    "a list": (lambda s: [s], "expected a dict, got <class 'list'>"),
    "no rng": (lambda s: without(s, "rng"), "it has no 'rng'"),
    "no progress": (lambda s: without(s, "progress"), "it has no 'progress'"),
    "no world size": (lambda s: without(s, "world_size"), "it has no 'world_size'"),
    "a world size in words": (lambda s: s | {"world_size": "two"}, "'world_size' is a str"),
    "another progress": (
        lambda s: s | {"progress": s["progress"] | {"lap": 1}},
        "its 'progress' or its 'rng'",
    ),
    "empty generators": (lambda s: s | {"rng": [{}]}, "its 'progress' or its 'rng'"),
    "other generators": (lambda s: s | {"rng": [dict.fromkeys(("torch", "python", "numpy"), 1)]}, "expected"),
}


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("which", FOREIGN)
def test_a_whole_but_foreign_snapshot_is_refused_before_it_is_loaded(tmp_path, which, resume) -> None:
    change, words = FOREIGN[which]
    path = tmp_path / "s.pt"
    with process_group() as comm, under_torchrun("job", 0):
        run(comm, path, 1)
        snapshot.write(path, snapshot.pack(change(snapshot.read(path).state)))
        trainer = make(comm, path, resume=resume)
        before = {name: value.clone() for name, value in trainer.bare_model.state_dict().items()}
        if resume == "never" and which == "a list":  # it is nobody's, and set aside
            assert trainer.fit(1).epoch == 1
            return
        with pytest.raises(snapshot.SnapshotError, match=f"rank 0: the snapshot does not fit: .*{words}"):
            trainer.fit(2)
        if which != "other generators":
            assert not differences(trainer.bare_model.state_dict(), before)


def test_another_batch_size_is_said(tmp_path, capsys) -> None:
    with process_group() as comm:
        run(comm, tmp_path / "s.pt", 1)
        assert "batch size" not in capsys.readouterr().out
        run(comm, tmp_path / "s.pt", 2, batch_size=5)
    assert "batch size 5 instead of 3 on each rank, from here on" in capsys.readouterr().out


def test_train_resumably_refuses_what_it_did_not_write(tmp_path) -> None:
    path, model = tmp_path / "s.pt", MLP()

    def train(optimizer: str, net: torch.nn.Module = model, num_epochs: int = 1) -> None:
        train_resumably(path, net, OPTIMIZERS[optimizer](net.parameters()), num_epochs, lambda epoch: None)

    train("sgd")
    with pytest.raises(
        snapshot.SnapshotError, match=r"expected .*'AdamW'.*, got .*'SGD'.*Give the same model"
    ):
        train("adam")
    with pytest.raises(snapshot.SnapshotError, match=r"s\.pt: the snapshot does not fit: .*Error"):
        train("sgd", DigitsCNN(3))
    train("sgd", num_epochs=2)
    with process_group() as comm:
        run(comm, tmp_path / "trainer.pt", 1)
    path = tmp_path / "trainer.pt"
    with pytest.raises(snapshot.SnapshotError, match=r"is another training's: expected .*'train_resumably'"):
        train("sgd")


def test_arguments_are_checked(tmp_path) -> None:
    with process_group() as comm:
        for options, words in (
            ({"batch_size": 0}, "batch_size: expected a whole number, 1 or more, got 0"),
            ({"batch_size": 2.5}, "batch_size: expected a whole number, 1 or more, got 2.5"),
            ({"batch_size": "16"}, "batch_size: expected a whole number, 1 or more, got '16'"),
            ({"save_every": 0}, "save_every: expected a whole number, 1 or more, got 0"),
            ({"save_every_steps": -1}, "save_every_steps: expected a whole number, 1 or more, got -1"),
            ({"resume": "yes"}, "resume: expected one of auto, never, must, got 'yes'"),
            ({"seed": -1}, "seed: expected a whole number, 0 or more"),
            ({"grace_s": -1}, "grace_s: expected a number of seconds, 0 or more, got -1"),
            ({"grace_s": float("nan")}, "grace_s: expected a number of seconds, 0 or more, got nan"),
        ):
            with pytest.raises(ValueError, match=words):
                make(comm, tmp_path / "s.pt", **options)
        trainer = make(comm, tmp_path / "s.pt")
        sampler = DistributedSampler(SAMPLES, 2, 1)
        with pytest.raises(ValueError, match="expected one for rank 0 of 1, got one for rank 1 of 2"):
            Trainer(trainer.model, trainer.optimizer, [], sampler, comm, batch_size=1, snapshot_path="s.pt")
        with pytest.raises(ValueError, match=r"total_epochs: expected a whole number, 0 or more, got 2\.5"):
            trainer.fit(2.5)


def test_the_sampler_must_be_for_this_data_and_know_its_place(tmp_path) -> None:
    with process_group() as comm:
        made = make(comm, tmp_path / "s.pt")

        def with_sampler(sampler: Any, size: int) -> None:
            data = TensorDataset(torch.zeros(size, 57), torch.zeros(size, dtype=torch.int64))
            Trainer(made.model, made.optimizer, data, sampler, comm, batch_size=1, snapshot_path="s.pt")

        for size in (6, 12):
            with pytest.raises(
                ValueError, match=f"expected one for the {size} samples of the .* got one for 8"
            ):
                with_sampler(DistributedSampler(8, 1, 0), size)
        with pytest.raises(
            TypeError, match=r"DistributedSampler of course_lib.*cannot say how far into an epoch"
        ):
            with_sampler(torch.utils.data.DistributedSampler(range(8), 1, 0), 8)


def test_an_unwritable_place_is_an_error_before_the_first_step(tmp_path) -> None:
    error = fails(2, lambda c: run(c, tmp_path / "no" / "s.pt", 2, (0, 0)))
    assert (
        error.exc_type == "SnapshotError" and f"Create the directory {tmp_path / 'no'}" in error.exc_message
    )


def limit_file_size(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class FillingUp(Crashing):
    """The disk has room for so many bytes of a file, from one step of epoch 1 to another."""

    full: tuple[int, int] = (0, 99)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        step = self.progress.global_step
        if step in self.full:
            limit_file_size(2000 if step == self.full[0] else resource.RLIM_INFINITY)
        return super().train_step(inputs, targets)


def test_no_room_for_the_optimizers_moments_is_said_after_the_first_step(tmp_path) -> None:
    """At the start Adam has no moments yet: the first check passes, the one after the first step does not."""
    with process_group() as comm:
        small = len(snapshot.pack(make(comm, tmp_path / "s.pt", optimizer="adam").state_dict()))
        limit_file_size(3 * small)
        trainer = make(comm, tmp_path / "s.pt", optimizer="adam")
        try:
            with pytest.raises(snapshot.SnapshotError, match="File too large"):
                trainer.fit(2)
        finally:
            limit_file_size(resource.RLIM_INFINITY)
    assert trainer.progress.global_step == 1


def test_a_disk_that_is_full_for_a_while_costs_no_training(tmp_path, capsys) -> None:
    path = tmp_path / "s.pt"
    with process_group() as comm:
        expected = run(comm, tmp_path / "undisturbed.pt", 4)[0]
        trainer = make(comm, path, cls=FillingUp)
        trainer.full = (9, 17)  # 8 steps an epoch: the snapshot after epoch 1 fails
        trainer.fit(4)
        assert not differences(outcome(trainer), expected)
    printed = capsys.readouterr().err
    assert printed.count("WARNING") == 1 and "File too large" in printed
    assert f"{path} stayed as before. Training goes on; the next snapshot is tried when it is due." in printed
    assert snapshot.read(path).state["progress"]["epoch"] == 4


def test_at_the_end_a_full_disk_is_an_error(tmp_path) -> None:
    path = tmp_path / "s.pt"
    with process_group() as comm:
        trainer = make(comm, path, cls=FillingUp)
        trainer.full = (9, 99)
        try:
            with pytest.raises(snapshot.SnapshotError, match="stayed as before"):
                trainer.fit(2)
        finally:
            limit_file_size(resource.RLIM_INFINITY)
    assert snapshot.read(path).state["progress"]["epoch"] == 1


def test_a_failed_save_at_the_end_is_an_error_on_every_rank(pools, tmp_path) -> None:
    """And no rank waits for another one: all have heard that the save before it had failed, too."""
    path = tmp_path / "gone" / "s.pt"

    def fits(comm: Any) -> str:
        trainer = make(comm, path)
        trainer.fit(1)
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(path.parent)
        comm.barrier()
        try:
            trainer.fit(2)
        except snapshot.SnapshotError as error:
            return str(error)
        return ""

    path.parent.mkdir()
    results = pools(2).run(fits)
    assert all(message.startswith(f"The snapshot cannot be written to {path}") for message in results)
    assert "Training goes on" in results.output[0]  # after epoch 1 itself


# --- SIGTERM


class Preempted(Crashing):
    """Rank `who` hears SIGTERM in this step."""

    who, at = 1, (2, 1)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.comm.rank == self.who and (self.progress.epoch, self.progress.step) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(inputs, targets)


def test_sigterm_on_one_rank_stops_all_after_the_step(pools, tmp_path) -> None:
    def preempted(comm: Any, path: Path) -> Any:
        trainer = make(comm, path, cls=Preempted)
        before = signal.getsignal(signal.SIGTERM)
        trainer.fit(6)
        return (
            trainer.stopped,
            trainer.progress.epoch,
            trainer.progress.step,
            signal.getsignal(signal.SIGTERM) == before,
        )

    pool, path = pools(3), tmp_path / "s.pt"
    expected = pool.run(lambda c: run(c, tmp_path / "undisturbed.pt", 6))[0]
    assert list(pool.run(preempted, path)) == [(True, 2, 2, True)] * 3
    results = pool.run(lambda c: run(c, path, 6))
    assert results.output[0].startswith("resumed from snapshot epoch 2, step 2\n")
    assert not differences(results[0][0], expected[0]) and results[0][2] is False


def test_a_stopped_trainer_says_that_it_trains_no_more(tmp_path, capsys) -> None:
    with process_group() as comm:
        trainer = make(comm, tmp_path / "s.pt", cls=Preempted)
        trainer.who = 0
        trainer.fit(6)
        assert "trains nothing more" not in capsys.readouterr().err
        trainer.fit(7)
    assert (trainer.progress.epoch, trainer.progress.step) == (2, 2)
    assert "fit trains nothing more: SIGTERM has stopped this Trainer" in capsys.readouterr().err


def test_nobody_waits_for_ever_after_sigterm() -> None:
    child = os.fork()
    if child == 0:
        with StopSignal(grace_s=0.1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # a collective whose other rank is dead
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_CODE == 143


# --- another world size


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_world_size_goes_on_with_what_nobody_has_seen(pools, tmp_path, before, after) -> None:
    audit = tmp_path / "audit"

    def life(comm: Any, crash_at: tuple[int, int] | None) -> Any:
        return run(
            comm, tmp_path / "s.pt", 3, crash_at, save_every_steps=2, journal=Journal(comm.rank, audit=audit)
        )

    pools(before).run(life, (1, 2))
    results = pools(after).run(life, None)
    assert (
        f"world size {after} instead of {before}: the rest of the epoch is dealt out anew"
        in results.output[0]
    )
    assert ("draw random numbers from seed, rank and samples" in results.output[0]) == (after > before)
    seen = kept_samples(audit, 1)
    assert set(seen) == set(range(SAMPLES)) and sum(seen.values()) - SAMPLES < after
    models = [{k: v for k, v in result[0].items() if not k.startswith(".")} for result in results]
    assert all(not differences(model, models[0]) for model in models)


# --- the usual mistakes


def test_each_mistake_of_the_tutorial_ends_elsewhere_and_none_does_not(pools, tmp_path) -> None:
    def distance(comm: Any, mistakes: tuple[str, ...], undisturbed: dict, turn: int = 0) -> float:
        name = "-".join(mistakes) or "none"
        path = tmp_path / f"{name}{turn}.pt"
        make(comm, path, cls=TutorialTrainer, mistakes=mistakes).fit(3)
        torch.seed()  # a process that has drawn who knows what before
        trainer = make(comm, path, cls=TutorialTrainer, mistakes=mistakes)
        trainer.fit(6)
        return max(
            (trainer.bare_model.state_dict()[k] - v).abs().max().item() for k, v in undisturbed.items()
        )

    def undisturbed(comm: Any) -> dict:
        trainer = make(comm, tmp_path / "undisturbed.pt", cls=TutorialTrainer)
        trainer.fit(6)
        return trainer.bare_model.state_dict()

    expected = pools(2).run(undisturbed)[0]
    far = {
        m: pools(2).run(distance, m, expected)[0] for m in [(), tuple(MISTAKES), *((m,) for m in MISTAKES)]
    }
    assert far.pop(()) == 0.0
    assert all(gap > 1e-4 for gap in far.values()), far
    assert pools(2).run(distance, ("rng",), expected, 1)[0] == far[("rng",)]  # as at the beginning, each time


def test_a_tutorials_trainer_knows_whole_epochs_only(tmp_path) -> None:
    with process_group() as comm:
        for _ in range(
            2
        ):  # the second time it goes on from a snapshot of epoch 0, which has no epoch before it
            trainer = make(comm, tmp_path / "s.pt", cls=TutorialTrainer)
            assert trainer.fit(0).epoch == 0
        assert trainer.fit(1).epoch == 1
        run(comm, tmp_path / "middle.pt", 1, (0, 3), save_every_steps=2)
        with pytest.raises(
            snapshot.SnapshotError, match=r"end of an epoch, got one from epoch 0, step 2\. Go on with"
        ):
            make(comm, tmp_path / "middle.pt", cls=TutorialTrainer).fit(1)


# --- what it writes down


def test_audit_counts_only_what_is_in_the_final_parameters(pools, tmp_path) -> None:
    def life(comm: Any, name: str, crash_at: tuple[int, int] | None) -> Any:
        journal = Journal(comm.rank, audit=tmp_path / name)
        return run(comm, tmp_path / f"{name}.pt", 3, crash_at, save_every_steps=3, journal=journal)

    pools(2).run(life, "whole", None)
    pools(2).run(
        life, "fault", (1, 2)
    )  # 4 steps an epoch: saved after steps 3, 4 (the epoch) and 6; crash before 7
    pools(2).run(life, "fault", (2, 3))
    pools(2).run(life, "fault", None)
    for epoch in (0, 1, 2, None):
        assert kept_samples(tmp_path / "fault", epoch) == kept_samples(tmp_path / "whole", epoch)
    assert kept_samples(tmp_path / "whole", 0).total() == SAMPLES + 1  # with the padding
    lost = [(s.attempt, s.epoch, s.step, s.rank) for s in read_audit(tmp_path / "fault") if not s.kept]
    assert sorted(lost) == [(1, 2, step, rank) for step in (1, 2) for rank in (0, 1)]
    trained = Counter(i for step in read_audit(tmp_path / "fault") for i in step.indices)
    assert trained.total() == 3 * (SAMPLES + 1) + 4 * BATCH
    losses = {(s.epoch, s.step): s.loss for s in read_audit(tmp_path / "whole")}
    assert all(step.loss == losses[step.epoch, step.step] for step in read_audit(tmp_path / "fault"))


def test_a_file_that_is_no_audit_is_named(tmp_path) -> None:
    (tmp_path / "audit").write_text('{"epoch": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*audit is none that a Trainer writes"):
        read_audit(tmp_path / "audit")
    with pytest.raises(ValueError, match=r"audit: expected a file that can be written, got .*No such file"):
        Journal(audit=tmp_path / "no" / "audit")
    (tmp_path / "events").write_text('{"time": 1.0, "name": "a", "rank": 0, "restart": 0}\n{"time": 2.0, "na')
    with pytest.raises(
        ValueError, match=r"events: line 2 of .*events is none that a Trainer writes: '{\"time\": 2"
    ):
        read_events(tmp_path / "events")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_journal_that_cannot_be_written_costs_no_training(tmp_path, capsys) -> None:
    with process_group() as comm:
        journal = Journal(audit="/dev/full", events=tmp_path / "events")
        assert run(comm, tmp_path / "s.pt", 2, journal=journal) is not None
    printed = capsys.readouterr().err
    assert printed.count("WARNING: rank 0: audit: no line can be written any more (No space left") == 1, (
        printed
    )
    assert [event["name"] for event in read_events(tmp_path / "events")].count("epoch done") == 2


def test_the_parts_of_a_recovery_add_up() -> None:
    def event(time: float, name: str, rank: int, restart: int = 1) -> dict[str, Any]:
        return {"time": time, "name": name, "rank": rank, "restart": restart}

    names = (
        "process start",
        "torch imported",
        "process group ready",
        "model ready",
        "snapshot loaded",
        "first step done",
    )
    events = [event(95 + i, name, r, 0) for r in (0, 1) for i, name in enumerate(names)]
    events += [event(103 + 2 * i + r / 4, name, r) for r in (0, 1) for i, name in enumerate(names)]
    parts = recovery(events, killed_at=101.0)
    assert parts["detection and rendezvous"] == 2.25 and sum(parts.values()) == 113.25 - 101
    assert [v for k, v in parts.items() if k != "detection and rendezvous"] == [2.0] * 5
    split = recovery(events, killed_at=101.0, noticed_at=101.5)
    assert (split["detection"], split["rendezvous"]) == (0.5, 1.75) and sum(split.values()) == 113.25 - 101
    with pytest.raises(
        ValueError, match=r"noticed_at: expected .* not before the fault, at killed_at=101\.0, got 99"
    ):
        recovery(events, killed_at=101.0, noticed_at=99.0)
    with pytest.raises(ValueError, match="no 'process start' after 200"):
        recovery(events, killed_at=200.0)
    with pytest.raises(ValueError, match="no 'first step done'"):
        recovery([e for e in events if e["time"] < 113], killed_at=101.0)


def test_events_are_written_by_every_rank(pools, tmp_path) -> None:
    events = tmp_path / "events"
    pools(2).run(lambda c: run(c, tmp_path / "s.pt", 2, journal=Journal(c.rank, events=events)) and None)
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    seen = Counter((line["name"], line["rank"]) for line in lines)
    assert seen == {
        ("first step done", 0): 1,
        ("first step done", 1): 1,
        ("epoch done", 0): 2,
        ("epoch done", 1): 2,
        ("snapshot written", 0): 2,
    }


# --- meeting again after a restart


def test_ranks_meet_in_a_part_of_the_store_that_is_new(tmp_path) -> None:
    """Three attempts on one store, of other sizes, the first of which died halfway: words of the dead lie about."""

    def client(master: bool = False, port: int = 0) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", port, is_master=master, wait_for_workers=False)

    server = client(True)
    for rank in (1, 2, 3):
        client(port=server.port).set(f"word of {rank}", f"dead {rank}")
    prefixes = set()
    for world_size in (3, 4, 2):
        stores = [client(port=server.port) for _ in range(world_size)]
        with ThreadPoolExecutor(world_size) as threads:
            parts = list(threads.map(fresh_part, stores, range(world_size), [world_size] * world_size))
        parts[0].set("key", str(world_size))
        assert [part.get("key").decode() for part in parts] == [str(world_size)] * world_size
        assert not parts[-1].check(["key of the attempt before"])
        parts[0].set("key of the attempt before", "")
        prefixes.add(parts[0].get("key"))
    assert len(prefixes) == 3
