"""The data the course trains on: small, real, the same on every machine.

Digits: 1797 images of handwritten digits, shipped in the repository's `data/` folder (source and licence:
data/README.md). Text: the documentation that every CPython installs (`pydoc_data.topics`), cut to a fixed
length and a fixed alphabet, so that a vocabulary, a number of batches or a number of bytes is the same under
every Python. Losses on it are not: the wording changes a little from one Python version to the next.

All splits and orders are fixed or follow from a seed. Every rank that asks for the same batches gets the same
batches.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

DATA_DIR = Path(__file__).resolve().parents[2] / "data"
NUM_TRAIN_DIGITS = 1437  # of 1797; the other 360 are the test part
CORPUS_LENGTH = 400_000  # characters; every supported Python has more
VALID_SHARE = 0.1  # the last tenth of the text
_TYPOGRAPHY = str.maketrans({"–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "…": ".", "\t": " "})


class DatasetError(RuntimeError):
    """A data file is missing, damaged or cannot be written. The message says which and what to do."""


def data_file(name: str, directory: Path = DATA_DIR) -> Path:
    """Path of the shipped file `name` in `directory`, after comparing it with the checksum in SHA256SUMS
    there.

    Raises DatasetError if the file or its checksum is missing or does not agree.
    """
    remedy = "Restore it with `git checkout -- data` in the course's checkout."
    for path in (directory / "SHA256SUMS", directory / name):
        if not path.is_file():
            raise DatasetError(
                f"The data file {path} is missing. {remedy} The course must run from its checkout "
                "(`make lab`, or `pip install -e .`): data/ is not copied by a plain install."
            )
    sums = dict(line.split()[::-1] for line in (directory / "SHA256SUMS").read_text().splitlines() if line)
    if name not in sums:
        raise DatasetError(
            f"{directory / 'SHA256SUMS'} has no line for {name}, only for {sorted(sums)}. {remedy}"
        )
    found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    if found != sums[name]:
        raise DatasetError(
            f"The data file {directory / name} is damaged: its SHA-256 is {found[:16]}…, "
            f"expected {sums[name][:16]}…. {remedy}"
        )
    return directory / name


def digits(
    split: str = "train", *, flat: bool = True, directory: Path = DATA_DIR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits 0-9 (E. Alpaydin and C. Kaynak, 1998; test part of the UCI set).

    split: "train" (the first 1437 images) or "test" (the last 360).
    Returns (images, labels): images float32 in [0, 1] of shape (n, 64), or (n, 1, 8, 8) with flat=False;
    labels int64 of shape (n,). Raises ValueError for another split, DatasetError for a missing or damaged
    file.
    """
    part = _part(split, {"train": slice(NUM_TRAIN_DIGITS), "test": slice(NUM_TRAIN_DIGITS, None)})
    with np.load(data_file("digits.npz", directory)) as file:
        images = torch.from_numpy(file["images"][part]).float() / 16
        labels = torch.from_numpy(file["labels"][part]).long()
    return images.flatten(1) if flat else images.unsqueeze(1), labels


def _part(split: str, parts: dict[str, slice]) -> slice:
    if split not in parts:
        raise ValueError(f"split must be one of {sorted(parts)}, not {split!r}")
    return parts[split]


# --- text


class Alphabet:
    """Characters as numbers: the 96 characters of plain text (newline and ASCII 32-126), or those you give.

    `len(alphabet)` is the vocabulary size; `encode(text)` gives int64 (len(text),), `decode` is its inverse.
    """

    def __init__(self, characters: str = "\n" + "".join(map(chr, range(32, 127)))) -> None:
        if len(set(characters)) != len(characters):
            raise ValueError("characters must be distinct: each is one entry of the vocabulary")
        self.characters = characters
        self._number = {character: number for number, character in enumerate(characters)}

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> torch.Tensor:
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise ValueError(
                f"not in the alphabet of {len(self)} characters: {unknown[:5]}. Replace them first."
            )
        return torch.tensor([self._number[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor | Sequence[int]) -> str:
        return "".join(self.characters[int(token)] for token in tokens)


ALPHABET = Alphabet()


def text_corpus(split: str = "all", *, cache: Path | None = None) -> str:
    """Text of the Python documentation: `split` "train" (the first 90 %), "valid" (the rest) or "all".

    400 000 characters of `ALPHABET`. Built at first use and kept as a file in `cache` (default:
    `cache_dir()`), which you can read. Any number of processes may build it at once. A damaged cache file is
    built again. Raises ValueError for another split, DatasetError where this Python has no such text or
    nothing can be written.
    """
    cut = CORPUS_LENGTH - int(CORPUS_LENGTH * VALID_SHARE)
    part = _part(split, {"all": slice(None), "train": slice(cut), "valid": slice(cut, None)})
    path = (cache or cache_dir()) / f"python-documentation-{platform.python_version()}.txt"
    text = _read_cached(path)
    if text is None:
        text = _build_corpus()
        _write_atomically(path, f"{_digest(text)}\n{text}")
    return text[part]


def cache_dir() -> Path:
    """Where the course keeps what it builds: $XDG_CACHE_HOME/course_lib or ~/.cache/course_lib.

    A folder in the system's temporary directory where that cannot be written (said once as a warning).
    Raises DatasetError if neither can be written.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    reasons = []
    for directory in (Path(home) / "course_lib", Path(tempfile.gettempdir()) / f"course_lib-{user}"):
        if not directory.is_absolute():  # no home directory is known; XDG_CACHE_HOME must be absolute, too
            reasons.append(f"{directory}: not an absolute path")
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror or error}")
            continue
        if reasons:
            warnings.warn(f"cannot write to the cache ({reasons[0]}); using {directory}", stacklevel=2)
        return directory
    raise DatasetError(
        f"no folder for the text corpus can be written ({'; '.join(reasons)}). "
        "Set XDG_CACHE_HOME to a folder you may write to."
    )


def _build_corpus() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DatasetError(
            "this Python has no documentation text (pydoc_data.topics), which the text corpus is made of. "
            "Install the full standard library, or use a Python from python.org, conda or pyenv."
        ) from error
    plain = "\n\n".join(topics[name] for name in sorted(topics)).translate(_TYPOGRAPHY)
    known = set(ALPHABET.characters)
    text = "".join(character if character in known else "?" for character in plain[:CORPUS_LENGTH])
    if len(text) < CORPUS_LENGTH:
        raise DatasetError(
            f"the documentation text of Python {platform.python_version()} has {len(text)} characters, "
            f"expected at least {CORPUS_LENGTH}. Use another Python (3.11 or newer)."
        )
    return text


def _read_cached(path: Path) -> str | None:
    try:
        digest, _, text = path.read_text(encoding="ascii").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == _digest(text) and len(text) == CORPUS_LENGTH else None


def _write_atomically(path: Path, text: str) -> None:
    # Each process writes a draft of its own and renames it: a reader meets the whole text or none.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            draft = Path(directory) / path.name
            draft.write_text(text, encoding="ascii", newline="\n")
            os.replace(draft, path)
    except OSError as error:
        raise DatasetError(
            f"the text corpus cannot be written to {path}: {error.strerror or error}. "
            "Pass cache=, or set XDG_CACHE_HOME, to a folder you may write to."
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def text_batches(
    split: str = "train",
    *,
    batch_size: int,
    length: int,
    num_batches: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches (inputs, targets) of the text, both int64 (batch_size, length); a target is the next character.

    The text is cut into windows that do not overlap. "train" visits them in an order drawn from `seed`, a new
    one each epoch; "valid" in the order of the text. Windows that do not fill a batch are left out.
    num_batches=None: one epoch. Raises ValueError if the text has not enough windows for one batch.
    """
    tokens = ALPHABET.encode(text_corpus(split, cache=cache))
    windows = tokens.unfold(
        0, length + 1, length
    )  # (num_windows, length + 1): a window's last target starts the next
    per_epoch = len(windows) // batch_size
    if per_epoch == 0:
        raise ValueError(
            f"the {split!r} text has {len(windows)} windows of length {length}, fewer than "
            f"batch_size {batch_size}: take a smaller batch_size or length"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(len(windows))
    for number in range(per_epoch if num_batches is None else num_batches):
        if split == "train" and number % per_epoch == 0:
            order = torch.randperm(len(windows), generator=generator)
        rows = windows[order[number % per_epoch * batch_size :][:batch_size]]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
