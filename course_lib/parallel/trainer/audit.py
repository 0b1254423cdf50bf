"""Reading the audit: which samples made it into the final parameters.

After a fault the run goes on from a snapshot. Steps that were completed after that snapshot are lost: their updates are
gone, and their samples are trained on again. So a sample may stand in the file twice and still count once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from course_lib.parallel.trainer.journal import read_lines


@dataclass(frozen=True)
class Step:
    """One rank's part of a completed step.

    attempt: how often the run had begun or resumed before, over all restarts and all commands; restart: torchrun's own
    count. kept: no later attempt went back before it.
    """

    attempt: int
    restart: int
    epoch: int
    step: int
    rank: int
    indices: tuple[int, ...]
    loss: float
    kept: bool


def read_audit(path: Path | str) -> list[Step]:
    """All completed steps, in the order in which they were written. Raises ValueError for a file that is no audit."""
    lines = list(read_lines(path, "audit", ("epoch", "step", "restart")))
    # From the end: the earliest position at which a later attempt began.
    went_back_to: list[tuple[int, int]] = []
    earliest = (1 << 62, 0)
    for line in reversed(lines):
        went_back_to.append(earliest)
        if line.get("begin"):
            earliest = min(earliest, (line["epoch"], line["step"]))
    steps, attempt = [], -1
    for line, limit in zip(lines, reversed(went_back_to), strict=True):
        if line.get("begin"):
            attempt += 1
            continue
        kept = (line["epoch"], line["step"]) < limit
        where = (line["restart"], line["epoch"], line["step"], line["rank"])
        steps.append(Step(attempt, *where, tuple(line["indices"]), line["loss"], kept))
    return steps


def kept_samples(audit: Path | str, epoch: int | None = None) -> Counter[int]:
    """Sample index -> how often it went into the final parameters, in `epoch` or in all. Lost steps do not count."""
    kept: Counter[int] = Counter()
    for step in read_audit(audit):
        if step.kept and epoch in (None, step.epoch):
            kept.update(step.indices)
    return kept
