"""What a snapshot asks of the disk: to be really there, and to change names without losing what had them."""

from __future__ import annotations

import os
from pathlib import Path


def write_through(path: Path, data: bytes) -> None:
    """Write the file, and return when it is on the disk, not only in the page cache."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Return when the names in it are on the disk, too."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_in(new: Path, path: Path, previous: Path) -> None:
    """`path`, if there is one, becomes `previous`, and `new` becomes `path`. If that fails, `path` is put back."""
    if path.exists():
        os.replace(path, previous)
    try:
        os.replace(new, path)
    except OSError:
        if previous.exists() and not path.exists():
            os.replace(previous, path)
        raise


def free_name(path: Path, ending: str) -> Path:
    """`path` with this ending, or, if there is such a file, the ending and .2, .3, …"""
    name, number = path.with_name(path.name + ending), 1
    while os.path.lexists(name):
        number += 1
        name = path.with_name(f"{path.name}{ending}.{number}")
    return name


def remove(path: Path) -> None:
    """Remove the file, if that can be done."""
    try:
        path.unlink()
    except OSError:
        pass  # it could not be made either
