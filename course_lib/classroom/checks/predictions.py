"""Predict first, measure then: a number written down before a run, and how near it was.

A prediction that is off by a *known* factor is worth more than one that is simply wrong: it says which idea is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from types import EllipsisType

_written: dict[str, float] = {}


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns: it prints as one line."""

    name: str
    value: float | None

    def __repr__(self) -> str:
        if self.value is None:
            return f"{self.name}: no prediction written down"
        return f"{self.name}: your prediction is {number(self.value)}"


@dataclass(frozen=True)
class Score:
    """What `score` returns. `ratio`: predicted / measured, or None where there is none."""

    name: str
    text: str
    ratio: float | None

    def __repr__(self) -> str:
        return f"{self.name}: {self.text}"


def predict(name: str, value: float | EllipsisType | None) -> Prediction:
    """Write a prediction down for `score(name, ...)`. None (or `...`) means: none, and forgets an earlier one.

    Raises TypeError if `value` is no number.
    """
    if value is None or value is ...:
        _written.pop(name, None)
        return Prediction(name, None)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"value: expected a number, or None for no prediction, got {value!r}")
    _written[name] = float(value) if not isinstance(value, int) else value
    return Prediction(name, _written[name])


def score(
    name: str, measured: float, unit: str = "", *, world_size: int | None = None, itemsize: int = 4
) -> Score:
    """Compare what was predicted under `name` with what was measured, in words.

    `world_size` and `itemsize` (bytes of an element) help to recognise what a wrong prediction forgot. Without a
    prediction it says so, and gives the measured value. Raises TypeError if `measured` is no number.
    """
    if isinstance(measured, bool) or not isinstance(measured, Real):
        raise TypeError(f"measured: expected a number, got {measured!r}")
    with_unit = f"{number(measured)} {unit}".rstrip()
    if name not in _written:
        return Score(name, f"measured {with_unit}; no prediction written down", None)
    guess = _written[name]
    text = f"you predicted {number(guess)}, measured {with_unit}: "
    ratio = guess / measured if measured else None
    return Score(name, text + _in_words(guess, measured, unit, world_size, itemsize), ratio)


def number(value: float) -> str:
    """12582912 -> "12 582 912"; 0.0312345 -> "0.03123"."""
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.4g}"


def _in_words(guess: float, measured: float, unit: str, world_size: int | None, itemsize: int) -> str:
    if abs(guess - measured) <= 1e-12 * abs(measured):
        return "exact"
    if measured == 0 or guess == 0 or (guess < 0) != (measured < 0):
        return "a different sign, or nothing where there is something"
    if not (isfinite(guess) and isfinite(measured)):
        return "no comparison: one of them is not a finite number"
    off = abs(guess / measured - 1)
    times = max(guess / measured, measured / guess)
    if abs(times - 2**20 / 1e6) < 1e-3 and (not unit or _counts_bytes(unit)):
        return "within 5 %: MB (10^6) and MiB (2^20) mixed up?"
    for percent in (1, 2, 5, 10, 20):
        if off <= percent / 100:
            return f"within {percent} %"
    side = "too large" if abs(guess) > abs(measured) else "too small"
    known = [
        (factor, what)
        for factor, what in _known(unit, world_size, itemsize)
        if abs(times / factor - 1) < 0.02
    ]
    if known:
        ideas = " or ".join(what for _, what in known[:2])  # two may have the same factor: 4 bytes, 4 ranks
        return f"{side} by a factor of {known[0][0]:.4g}: {ideas} mixed up?"
    return f"{side} by a factor of {times:.3g}"


def _counts_bytes(unit: str) -> bool:
    return "byte" in unit.lower() or unit.endswith("B")


def _known(unit: str, world_size: int | None, itemsize: int) -> Iterator[tuple[float, str]]:
    """Factors that say something, and what was mixed up; the most likely first. Which way round is not said."""
    if _counts_bytes(unit):
        yield itemsize, "elements and bytes"
    if world_size is not None and world_size > 1:
        N = world_size
        yield N, "one rank and all N ranks"
        yield N - 1, "one step and N-1 steps"
        yield 2 * (N - 1), "one step and 2*(N-1) steps"
        yield N / (N - 1), "N and N-1"
    if unit not in ("", "messages", "steps"):
        yield 8, "bits and bytes"
    yield 2, "one way and both ways"
    yield 1e3, "units (kilo)"
    yield 1e6, "units (mega)"
    yield 1e9, "units (giga)"
