"""What `launch` raises. Every message names the rank, what happened, and where."""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Frame:
    """One line of a rank's stack: where, and the text of the line ("" if unknown)."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        where = f"  {place(self.file, self.line)}, in {self.function}"
        return f"{where}\n      {self.text}" if self.text else where


@dataclass(frozen=True)
class Failure:
    """How one rank failed: an exception, or the death of its process (then `exc_type` is empty)."""

    rank: int
    exc_type: str
    exc_message: str
    frames: list[Frame] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)  # what led to the exception, one line each
    traceback: str = ""
    status: int | None = None  # as os.waitpid reports it
    at: float = 0.0  # time.monotonic()


class LaunchError(RuntimeError):
    """The base of RankError and RanksHung. In a notebook it is shown short: the cell's line, then the message."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        lines = [
            f"\x1b[31m{type(self).__name__}\x1b[0m: what the ranks did, after the line that launched them"
        ]
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if is_users(frame.filename)]
        for frame in frames[-2:]:
            lines += [f"{place(frame.filename, frame.lineno or 0)}, in {frame.name}", f"    {frame.line}"]
        return [*lines, "", str(self)]


class RankError(LaunchError):
    """A rank raised an exception, or its process ended before its function returned.

    `rank` is the cause's; `exc_type` and `exc_message` describe its exception (for a process that ended: "" and what
    happened); `traceback` is the full text of the rank's traceback; `exitcode` is the process's exit code or minus
    the signal, as in `subprocess`, or None; `output` the rank's output so far.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        exc_type: str = "",
        exc_message: str = "",
        traceback: str = "",
        exitcode: int | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message)
        self.rank, self.exc_type, self.exc_message = rank, exc_type, exc_message
        self.traceback, self.exitcode, self.output = traceback, exitcode, output

    def __reduce__(self) -> tuple:
        return type(self), (str(self), *self.__dict__.values())


class RanksHung(LaunchError):
    """Ranks waited in a communication for longer than `timeout`, or the launch took longer than `deadline`.

    `sentence` says what does not match; `ranks` holds, for each rank, where it stands; `stacks` each rank's stack.
    """

    def __init__(
        self,
        message: str,
        sentence: str = "",
        ranks: list[str] | None = None,
        stacks: list[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.sentence, self.ranks, self.stacks = sentence, ranks or [], stacks or []

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.sentence, self.ranks, self.stacks)


_MOST_FRAMES, _MOST_CHARACTERS = 30, 2000
_CELL = re.compile(r"ipykernel_\d+|<ipython-input|<cell")
_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+|course_lib)[/\\]|^<frozen|^<string>$"
)


def is_users(file: str) -> bool:
    """Whether a reader wrote this file: a cell or a script, not a library."""
    return bool(_CELL.search(file)) or not _LIBRARY.search(file)


def place(file: str, line: int) -> str:
    """A place as the reader knows it: `Cell In[5], line 3`, or `File "train.py", line 3`."""
    if _CELL.search(file):
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        kind, name = shell.compile.format_code_name(file) or ("Cell", "") if shell else ("Cell", "")
        return f"{kind} {name}, line {line}".replace(" ,", ",")
    return f'File "{file}", line {line}'


def users_part(frames: list[Frame]) -> list[str]:
    """The frames a reader can act on, as text: their own; if there are none, the innermost. Repeated ones once."""
    mine = [str(frame) for frame in frames if is_users(frame.file)] or [str(frame) for frame in frames[-1:]]
    texts: list[str] = []
    for text, same in itertools.groupby(mine):
        count = len(list(same))
        texts += [text] if count == 1 else [text, f"  … the same line {count} times in a row"]
    return texts if len(texts) <= _MOST_FRAMES else [*texts[:10], "  …", *texts[-10:]]


def shortened(text: str) -> str:
    """`text`, without the middle of what nobody reads in a cell."""
    left_out = len(text) - _MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:1500]} … {left_out} characters left out … {text[-500:]}"


def ranks_text(ranks: list[int]) -> str:
    """[0] -> "rank 0", [0, 1, 3] -> "ranks 0, 1 and 3", [0, 1, 2, 3] -> "ranks 0 to 3"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def grouped(texts: dict[int, str]) -> Iterator[tuple[str, list[int]]]:
    """Ranks with the same text, together: (text, ranks), in the order of their first rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    yield from groups.items()
