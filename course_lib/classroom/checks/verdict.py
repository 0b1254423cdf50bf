"""What a grader says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`text` is one sentence; `details`, for a failure, what each rank did. An untouched stub is not `attempted`.

    The same function always gets the same characters: no times, no process numbers, no addresses.
    """

    passed: bool
    attempted: bool
    text: str
    details: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join([self.text, *(f"  {line}" for line in self.details)])


NOT_ATTEMPTED = Verdict(passed=False, attempted=False, text="not attempted yet")


def failed(text: str, details: list[str] | tuple[str, ...] = ()) -> Verdict:
    return Verdict(passed=False, attempted=True, text=text, details=tuple(details))


def plural(count: int, noun: str) -> str:
    """1, "rank" -> "1 rank"; 3, "rank" -> "3 ranks"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def joined(parts: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
