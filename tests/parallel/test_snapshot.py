"""Snapshots: whole or not there; every damage is noticed, and the one before is used."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib.parallel.trainer import rng, snapshot
from course_lib.parallel.trainer.snapshot import SnapshotError


def state_of(number: int) -> dict:
    return {"number": number, "model": {"w": torch.full((300,), float(number))}, "losses": [0.5] * number}


def written(path: Path, *numbers: int) -> Path:
    for number in numbers:
        snapshot.write(path, snapshot.pack(state_of(number)))
    return path


def error_of(path: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        snapshot.read(path)
    return str(caught.value)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writing past `limit` bytes of a file fails: a full disk that needs no rights. Python ignores SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- writing and reading


def test_what_was_written_is_read_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "s.pt", 1, 2, 3)
    assert sorted(os.listdir(tmp_path)) == ["s.pt", "s.pt.previous"]
    for file, number in ((path, 3), (snapshot.previous_of(path), 2)):
        state = snapshot.read(file).state
        assert torch.equal(state["model"]["w"], torch.full((300,), float(number)))
        assert state["losses"] == [0.5] * number
    assert path.read_bytes().startswith(b"course_lib.snapshot 1 ")


def test_the_file_without_its_first_line_is_an_ordinary_torch_file(tmp_path: Path) -> None:
    _, _, payload = written(tmp_path / "s.pt", 4).read_bytes().partition(b"\n")
    assert torch.load(io.BytesIO(payload), weights_only=True)["number"] == 4


def test_the_order_that_makes_it_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is on the disk before a name changes, and the directory after; else a power cut could lose both."""
    path, calls = written(tmp_path / "s.pt", 1), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append((str(a), str(b))), replace(a, b)))
    written(path, 2)
    new, old = str(snapshot.partial_of(path)), str(snapshot.previous_of(path))
    assert calls == [new, (str(path), old), (new, str(path)), str(tmp_path)]


# --- damage


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = snapshot.pack(state_of(3))
    header, path = data.index(b"\n"), tmp_path / "s.pt"
    magic = len(snapshot.MAGIC)
    lengths = {0, 1, magic - 1, magic, magic + 1, header - 1, header, header + 1, header + 2, len(data) - 1}
    lengths |= set(range(0, len(data), 97))
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        message = error_of(path)
        assert str(path) in message and ("damaged" in message or "is empty" in message), (length, message)
    path.write_bytes(data + b"x")
    assert "damaged" in error_of(path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data = snapshot.pack(state_of(3))
    header, path = data.index(b"\n"), tmp_path / "s.pt"
    draw = random.Random(0)
    places = [(i, draw.randrange(8)) for i in range(header + 1)]
    places += [(draw.randrange(header + 1, len(data)), draw.randrange(8)) for _ in range(200)]
    for byte, bit in places:
        damaged = bytearray(data)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        assert str(path) in error_of(path), (byte, bit)


def test_torch_load_itself_does_not_notice_a_flipped_bit() -> None:
    """Why there is a checksum."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1000)}, buffer)
    data = bytearray(buffer.getvalue())
    ones = bytes(data).index(torch.ones(8).numpy().tobytes())
    data[ones + 3] ^= 0x40
    loaded = torch.load(io.BytesIO(data), weights_only=True)["w"]
    assert loaded.shape == (1000,) and not torch.equal(loaded, torch.ones(1000))


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-here",)


def test_foreign_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.pt"
    torch.save(state_of(1), path)
    assert "is no snapshot of this course but a file of plain torch.save" in error_of(path)
    path.write_bytes(pickle.dumps(Evil()))
    assert "another program's" in error_of(path)
    path.write_bytes(snapshot.pack(state_of(1)).replace(b"snapshot 1 ", b"snapshot 2 ", 1))
    assert "format 2; this program reads format 1" in error_of(path)
    path.write_bytes(snapshot.pack({"model": Evil()}))  # with a right checksum
    assert "torch.load(weights_only=True) refuses it: it asks for posix.system" in error_of(path)
    assert not Path("evil-was-here").exists()
    path.unlink()
    path.mkdir()
    assert "cannot be read: Is a directory" in error_of(path)
    assert "is missing" in error_of(tmp_path / "other.pt")


# --- the one before


def test_the_newest_whole_snapshot_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    assert snapshot.latest(path) is None
    found = snapshot.latest(written(path, 1))
    assert found is not None and (found.state["number"], found.problems) == (1, [])
    written(path, 2)
    path.write_bytes(path.read_bytes()[:-5])
    found = snapshot.latest(path)
    assert found is not None and (found.state["number"], found.path) == (1, snapshot.previous_of(path))
    assert len(found.problems) == 1 and f"{path} is damaged" in found.problems[0]
    path.unlink()  # as if killed between the two renamings
    found = snapshot.latest(path)
    assert found is not None and found.state["number"] == 1 and found.problems == [f"{path} is missing"]


@pytest.mark.parametrize("previous", [b"", None])
def test_none_whole_is_an_error_and_no_silent_new_beginning(tmp_path: Path, previous: bytes | None) -> None:
    path = written(tmp_path / "s.pt", 1)
    path.write_bytes(b"rubbish")
    if previous is not None:
        snapshot.previous_of(path).write_bytes(previous)
    with pytest.raises(SnapshotError) as caught:
        snapshot.latest(path)
    message = str(caught.value)
    assert f"{path} is no snapshot" in message and "--resume never" in message
    assert f"{snapshot.previous_of(path)} is {'missing' if previous is None else 'empty'}" in message


# --- where it cannot be written


def unwritable(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    return {
        "missing": (tmp_path / "no" / "s.pt", f"Create the directory {tmp_path / 'no'}"),
        "below a file": (tmp_path / "file" / "s.pt", "Not a directory"),
        "a directory": (tmp_path / "directory", "it is a directory. Name a file in it"),
        "proc": (Path("/proc/s.pt"), "No such file or directory"),
    }


@pytest.mark.parametrize("where", ["missing", "below a file", "a directory", "proc"])
def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path, where: str) -> None:
    path, words = unwritable(tmp_path)[where]
    with pytest.raises(SnapshotError) as caught:
        snapshot.check_writable(path, snapshot.pack(state_of(1)))
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_a_check_leaves_nothing_and_asks_for_all_three_files(tmp_path: Path) -> None:
    path, data = tmp_path / "s.pt", snapshot.pack(state_of(1))
    snapshot.check_writable(path, data)
    assert os.listdir(tmp_path) == []
    for files, enough in ((0, 3), (1, 2), (2, 1)):
        with file_size_limit(enough * len(data)):
            snapshot.check_writable(path, data)
        with file_size_limit(enough * len(data) - 1), pytest.raises(SnapshotError, match="File too large"):
            snapshot.check_writable(path, data)
        assert len(os.listdir(tmp_path)) == files
        written(path, files)


def test_a_failed_write_leaves_the_old_ones_valid(tmp_path: Path) -> None:
    path = written(tmp_path / "s.pt", 1, 2)
    with file_size_limit(500), pytest.raises(SnapshotError) as caught:
        written(path, 3)
    assert f"{path} and {snapshot.previous_of(path)} stayed as before" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["s.pt", "s.pt.previous"]
    assert [snapshot.read(file).state["number"] for file in (path, snapshot.previous_of(path))] == [2, 1]
    with file_size_limit(500), pytest.raises(SnapshotError, match="There is none yet"):
        written(tmp_path / "other.pt", 3)


def test_a_failed_renaming_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = written(tmp_path / "s.pt", 1, 2), os.replace

    def fails(old: Path, new: Path) -> None:
        if old == snapshot.partial_of(path):
            raise OSError(errno.EIO, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(SnapshotError, match="Input/output error") as caught:
        written(path, 3)
    assert f" {path} stayed as before." in str(
        caught.value
    )  # and says nothing of the one before, which is gone
    assert os.listdir(tmp_path) == ["s.pt"] and snapshot.read(path).state["number"] == 2


def test_a_directory_that_cannot_be_synced_is_said_and_no_failure(tmp_path: Path, monkeypatch) -> None:
    path, fsync = written(tmp_path / "s.pt", 1), os.fsync

    def fails(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.warns(UserWarning, match=r"s\.pt is written, but .* Invalid argument\. A power cut"):
        written(path, 2)
    assert [snapshot.read(file).state["number"] for file in (path, snapshot.previous_of(path))] == [2, 1]


def test_what_is_set_aside_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    names = [snapshot.set_aside(written(path, number)).name for number in (1, 2)]
    (tmp_path / "s.pt.aside.3").mkdir()
    names.append(snapshot.set_aside(written(path, 3)).name)
    assert names == ["s.pt.aside", "s.pt.aside.2", "s.pt.aside.4"]
    assert [snapshot.read(tmp_path / name).state["number"] for name in names] == [1, 2, 3]
    with pytest.raises(SnapshotError, match=r"s\.pt cannot be set aside as .*s\.pt\.aside\.5: No such file"):
        snapshot.set_aside(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system lets not even root mount a file system")
    try:
        path = written(tmp_path / "s.pt", 1)  # of the 16 kB each takes 4
        with pytest.raises(SnapshotError, match=r"No space left on device.*Make room"):
            snapshot.check_writable(path, snapshot.pack({"model": torch.ones(5000)}))
        with pytest.raises(SnapshotError, match=r"No space left on device.*s\.pt stayed as before"):
            snapshot.write(path, snapshot.pack({"model": torch.ones(5000)}))
        assert os.listdir(tmp_path) == ["s.pt"] and snapshot.read(path).state["number"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- killed at any moment


def test_killed_twenty_times_it_always_loads(tmp_path: Path) -> None:
    path, draw, reached, moments = tmp_path / "s.pt", random.Random(0), 0, set()
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # writes snapshots, and says after each one which it was
            try:
                for number in range(reached + 1, 1 << 30):
                    written(path, number)
                    os.write(writer, b"%10d" % number)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            first = told.read(10)
            time.sleep(draw.random() * 0.02)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            confirmed = int((first + told.read())[-10:])
        moments.add(frozenset(os.listdir(tmp_path)))
        found = snapshot.latest(path)
        assert found is not None
        reached = found.state["number"]
        # A renaming after the last word is a newer one; between the two renamings the confirmed one is the previous.
        assert reached in (confirmed, confirmed + 1)
        assert torch.equal(found.state["model"]["w"], torch.full((300,), float(reached)))
    assert any("s.pt.partial" in names for names in moments)  # some were killed while writing


# --- generators


def draws() -> list[float]:
    return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_generators_go_on_where_they_were_captured() -> None:
    cpu = torch.device("cpu")
    before = rng.capture(cpu)
    try:
        rng.seed_all(3, 1)
        draws()  # leaves half of a pair of normal numbers behind in two of the generators
        state = snapshot.unpack(snapshot.pack({"rng": rng.capture(cpu)}))["rng"]
        expected = draws()
        rng.seed_all(4)
        assert draws() != expected
        rng.restore(state, cpu)
        assert draws() == expected
        streams = []
        for numbers in ((0, 0), (0, 1), (1, 0), (0, 0, 1)):
            rng.seed_all(*numbers)
            streams.append(tuple(draws()))
        assert len({value for stream in streams for value in stream}) == 4 * len(streams[0])
    finally:
        rng.restore(before, cpu)


def test_a_device_is_not_read_to_its_end() -> None:
    with pytest.raises(snapshot.SnapshotError, match="/dev/zero is no regular file"):
        snapshot.read("/dev/zero")
