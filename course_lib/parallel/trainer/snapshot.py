"""A snapshot on disk: whole or not there, and damage is noticed.

The file is one line of text and then what `torch.save` wrote:

    course_lib.snapshot 1 <SHA-256 of the rest> <length of the rest>

The line is there because `torch.load` compares no checksum: it loads a file with a flipped bit, and gives back other
weights. `head -1 FILE` shows it; cut it off (`tail -n +2`) and `torch.load` reads the rest.

`write` never touches the snapshot that is there before the new one is safe:

    1. the whole file goes to PATH.partial, in the same directory, since renaming works within one file system
    2. fsync: it is on the disk, not only in the page cache
    3. PATH becomes PATH.previous, PATH.partial becomes PATH: a rename happens or does not
    4. fsync of the directory: the new names are on the disk, too

Killed at any moment, it leaves PATH or PATH.previous whole. `latest` reads PATH, or PATH.previous if PATH is damaged
or missing. Everything is loaded with `weights_only=True`: a snapshot holds numbers and never runs code.

Left out: snapshots in shards, one from each rank, for models that do not fit into one rank's memory
(`torch.distributed.checkpoint`), and writing in the background.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from course_lib.parallel.trainer import disk

MAGIC, VERSION = b"course_lib.snapshot", 1
_LONGEST_HEADER = 200


class SnapshotError(RuntimeError):
    """A snapshot cannot be written, or what is there cannot be used. Says which file, why and what to do."""


@dataclass
class Loaded:
    """A snapshot that was found: its content, the file, its bytes, and what was wrong with the file before it."""

    state: dict[str, Any]
    path: Path
    data: bytes = field(repr=False)
    problems: list[str] = field(default_factory=list)


def previous_of(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


# --- bytes


def pack(state: dict[str, Any]) -> bytes:
    """The file's bytes. `state`: tensors, numbers, strings, and lists, tuples and dicts of these."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    header = b"%s %d %s %d\n" % (MAGIC, VERSION, hashlib.sha256(payload).hexdigest().encode(), len(payload))
    return header + payload


def unpack(data: bytes, name: Path | str = "the snapshot") -> dict[str, Any]:
    """The state, on the CPU. SnapshotError, which calls the file `name`, for anything that `pack` did not make."""
    header, _, _ = data[:_LONGEST_HEADER].partition(b"\n")
    words = header.split(b" ")
    if words[0] != MAGIC or len(words) != 4:
        raise SnapshotError(f"{name} {_stranger(data)}")
    if words[1] != str(VERSION).encode():
        raise SnapshotError(
            f"{name} is a snapshot of format {words[1].decode(errors='replace')}; this program reads format {VERSION}. "
            "Resume it with the program that wrote it."
        )
    payload = memoryview(data)[len(header) + 1 :]
    if words[3] != str(len(payload)).encode():
        expected = words[3].decode(errors="replace")
        raise SnapshotError(
            f"{name} is damaged: {len(payload)} bytes after its first line, expected {expected}"
        )
    if hashlib.sha256(payload).hexdigest().encode() != words[2]:
        raise SnapshotError(f"{name} is damaged: its checksum is not the one in its first line")
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    # torch raises many kinds; its advice, to load with weights_only=False, is not ours.
    except Exception as error:
        asked_for = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {asked_for[1]}" if asked_for else type(error).__name__
        raise SnapshotError(
            f"{name} is whole, but torch.load(weights_only=True) refuses it: {what}"
        ) from error


def _stranger(data: bytes) -> str:
    """What a file that does not begin as a snapshot looks like."""
    if not data:
        return "is empty"
    if MAGIC.startswith(data[: len(MAGIC)]) or data.startswith(MAGIC):
        return f"is damaged: it ends or breaks off in its first line, after {len(data)} bytes"
    kind = (
        "a file of plain torch.save, or another zip file" if data.startswith(b"PK") else "another program's"
    )
    return f"is no snapshot of this course but {kind}: it begins with {data[:8]!r}, expected {MAGIC!r}"


# --- files


def read(path: Path | str) -> Loaded:
    """The snapshot in the file `path`. Raises SnapshotError if there is none or it is not whole."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # a device, which may never end
        raise SnapshotError(f"{path} is no regular file; a snapshot is one")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise SnapshotError(f"{path} is missing") from error
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    return Loaded(unpack(data, path), path, data)


def latest(path: Path | str) -> Loaded | None:
    """The newest whole snapshot: `path`, else the one before it, with `problems` saying why. None if there is neither.

    Raises SnapshotError if there are files, but none of them is whole: to begin anew is the caller's decision.
    """
    path = Path(path)
    problems: list[str] = []
    candidates = (path, previous_of(path))
    for candidate in candidates:
        try:
            found = read(candidate)
            return Loaded(found.state, found.path, found.data, problems)
        except SnapshotError as error:
            problems.append(str(error))
    if not any(os.path.lexists(candidate) for candidate in candidates):
        return None
    raise SnapshotError(
        f"No snapshot can be used: {'; '.join(problems)}. Put a whole snapshot there, or begin anew with "
        "`--resume never`, which sets these files aside."
    )


def write(path: Path | str, data: bytes) -> None:
    """Make `data` the snapshot `path`; the one that was there becomes `previous_of(path)`.

    Raises SnapshotError if that fails. The snapshot that was there is then in its place again; should already the
    writing have failed, and not a renaming, the one before it is, too. Warns if the directory cannot be synced: the
    new snapshot is in its place, but a power cut may bring back the one before.
    """
    path = Path(path)
    partial = partial_of(path)
    try:
        disk.write_through(partial, data)
        disk.move_in(partial, path, previous_of(path))
    except OSError as error:
        disk.remove(partial)
        kept = [str(file) for file in (path, previous_of(path)) if file.is_file()]
        still = f"{' and '.join(kept)} stayed as before" if kept else "There is none yet"
        raise SnapshotError(f"{_cannot_write(path, len(data), error)} {still}.") from error
    try:
        disk.sync_directory(path.parent)
    except OSError as error:  # some file systems of networks know no fsync of a directory
        warnings.warn(
            f"The snapshot {path} is written, but the directory's new names could not be forced onto the disk: "
            f"{error.strerror}. A power cut in the next seconds may bring back the snapshot before it.",
            stacklevel=2,
        )


def check_writable(path: Path | str, data: bytes) -> None:
    """Raise SnapshotError now if `write(path, data)` would fail, be it for want of space.

    Tried, not guessed: root may write what permissions forbid, and no permission says that a disk is full. Besides PATH
    and PATH.previous there is a third file while one is written; so many of them as are still to come are written here,
    and removed.
    """
    path = Path(path)
    if path.is_dir():
        raise SnapshotError(
            f"The snapshot cannot be written to {path}: it is a directory. Name a file in it."
        )
    copies = 1 + sum(not file.exists() for file in (path, previous_of(path)))
    partial = partial_of(path)
    try:
        disk.write_through(partial, data * copies)
        partial.unlink()
    except OSError as error:
        disk.remove(partial)
        raise SnapshotError(_cannot_write(path, copies * len(data), error)) from error


def set_aside(path: Path | str) -> Path:
    """Rename `path` to NAME.aside, so that no run takes it for its own, and return the new name.

    If there is one already, to NAME.aside.2, and so on. Raises SnapshotError if it cannot be renamed.
    """
    path = Path(path)
    aside = disk.free_name(path, ".aside")
    try:
        os.replace(path, aside)
    except OSError as error:
        raise SnapshotError(
            f"{path} cannot be set aside as {aside}: {error.strerror}. Give rights in {path.parent}, or name another "
            "file with --snapshot_path."
        ) from error
    return aside


def _cannot_write(path: Path, size_bytes: int, error: OSError) -> str:
    why = (
        f"The snapshot cannot be written to {path}: {error.strerror} ({size_bytes} bytes were to be written)."
    )
    if not path.parent.is_dir():
        return f"{why} Create the directory {path.parent}, or name another with --snapshot_path."
    return f"{why} Make room or give rights there, or name another place with --snapshot_path."
