"""Tracebacks as Python prints them: found in what a worker wrote to stderr, and taken apart."""

from __future__ import annotations

import linecache
import re

from course_lib.runtime.errors import Frame

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = f"  + Exception Group {_TRACEBACK}"
_FRAME = re.compile(r'^  File "(.+)", line (\d+)(?:, in (.+))?$')
_NOT_ITS = re.compile(r"^(\[[WEIC]\d{4} |\S+\.py:\d+: \w*Warning|Fatal Python error|terminate called)")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")


def count_tracebacks(lines: list[str]) -> int:
    """How many there are, those that led to others included."""
    return len(_starts(lines)) or bool(_syntax_error(lines))


def _starts(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if line in (_TRACEBACK, _GROUP)]


def last_traceback(lines: list[str]) -> str:
    """The last traceback in what a worker wrote to stderr, with those that led to it."""
    starts = _starts(lines)
    if not starts:
        return _syntax_error(lines)
    first = starts[-1]
    # "During handling of the above exception, another exception occurred:"
    for start in reversed(starts[:-1]):
        if not any(line.endswith(("another exception occurred:", "cause of the following exception:"))
                   for line in lines[start:first]):  # fmt: skip
            break
        first = start
    stop = next((n for n in range(starts[-1], len(lines)) if _NOT_ITS.match(lines[n])), len(lines))
    return "\n".join(lines[first:stop]) + "\n"


def _syntax_error(lines: list[str]) -> str:
    """Python reports a script that it cannot read without the usual first line."""
    ends = [
        n
        for n, line in enumerate(lines)
        if line.startswith(("SyntaxError:", "IndentationError:", "TabError:"))
    ]
    places = [n for n in range(ends[-1] if ends else 0) if _FRAME.match(lines[n])]
    return "\n".join(lines[places[-1] : ends[-1] + 1]) + "\n" if places else ""


def _without_margin(lines: list[str]) -> list[str]:
    """An ExceptionGroup's traceback as that of any other exception: its own part has a margin of four characters."""
    return [line.removeprefix("  | ") for line in lines[1:]] if lines[0] == _GROUP else lines[1:]


def parse_traceback(text: str) -> tuple[list[Frame], str, str]:
    """Its last part: frames (outermost first), the exception's type without its module, its message."""
    lines = text.splitlines()
    starts = _starts(lines)
    lines = _without_margin(lines[starts[-1] :]) if starts else lines
    frames: list[Frame] = []
    for number, line in enumerate(lines):
        if match := _FRAME.match(line):
            below = lines[number + 1].strip() if number + 1 < len(lines) else ""
            code = below if lines[number + 1 : number + 2] and lines[number + 1].startswith("    ") else ""
            frames.append(
                Frame(
                    match[1],
                    int(match[2]),
                    match[3] or "<module>",
                    code or linecache.getline(match[1], int(match[2])),
                )
            )
        elif line[:1].strip() and (raised := _RAISED.match(line)):
            message = "\n".join([raised[2] or "", *lines[number + 1 :]]).strip()
            return frames, raised[1].rpartition(".")[2], message
    return frames, "", lines[-1] if lines else ""
