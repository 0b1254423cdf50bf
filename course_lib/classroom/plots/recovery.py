"""A job that lost a worker: what each process did and when; and its losses on those of the run without the fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.checks.verdict import plural
from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_seconds

Part = tuple[str, float, float, str]
"""(row, start_s, end_s, kind)"""

_LOOKS = {  # kind -> colour, hatch
    "start": (style.RANK_COLORS[5], ""),
    "rendezvous": (style.RANK_COLORS[3], "//"),
    "resume": (style.RANK_COLORS[2], "\\\\"),
    "training": (style.RANK_COLORS[1], ""),
    "waiting": (style.LIGHT, "xx"),
    "down": ("#ffffff", "xx"),
}
_MORE_LOOKS = ((style.RANK_COLORS[7], ".."), (style.RANK_COLORS[4], "--"), (style.RANK_COLORS[6], "++"))
_FAULT = style.RANK_COLORS[6]
_TRAINING = "training"
_CURVES: list[dict[str, Any]] = [
    # The first one is broad, to be seen below the next.
    {"color": style.RANK_COLORS[3], "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": style.RANK_COLORS[0], "linewidth": 1.6},
    {"color": style.RANK_COLORS[4], "linewidth": 1.6, "linestyle": "--"},
    {"color": style.RANK_COLORS[2], "linewidth": 1.6, "linestyle": ":"},
]


@style.styled
def plot_recovery(
    parts: Iterable[Part], marks: Iterable[tuple[float, str]] = (), *, title: str | None = None
) -> Figure:
    """A timeline with a row for each worker and each agent, and a line at each mark.

    parts: (row, start_s, end_s, kind); rows come in the order in which they first appear. The kinds "start",
    "rendezvous", "resume", "training", "waiting" and "down" have their looks, others get one. marks: (seconds, what
    happened); the first one is taken for the fault. Times are seconds since any moment; the figure begins at the first.
    The title says for how long nobody trained after the fault, or when training ended for good. Raises ValueError
    without parts, or for one that ends before it begins.
    """
    parts, marks = list(parts), sorted(marks)
    _check(parts)
    rows, kinds = list(dict.fromkeys(row for row, *_ in parts)), _kinds(parts)
    begin, end = min(start for _, start, _, _ in parts), max(stop for _, _, stop, _ in parts)
    total = (end - begin) or 1e-9
    figure = style.new_figure(9.2, 1.7 + 0.42 * len(rows) + 0.2 * min(len(marks), 3))
    axes = figure.add_subplot()
    for row, start, stop, kind in parts:
        color, hatch = _look(kind, kinds)
        box = (rows.index(row), max(stop - start, total / 400), 0.68)
        edge: dict[str, Any] = {"edgecolor": style.GREY if kind == "down" else "white", "linewidth": 0.6}
        axes.barh(*box, left=start - begin, color=color, hatch=hatch, **edge)
        _name(axes, kind, (start - begin, rows.index(row), stop - start), total, color, hatch)
    _draw_marks(axes, [(at - begin, text) for at, text in marks], total)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, total * 1.005), xlabel="time since the first event")
    style.seconds_axis(axes.xaxis)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    keys = [
        Patch(facecolor=c, hatch=h, edgecolor=style.GREY, label=kind)
        for kind in kinds
        for c, h in [_look(kind, kinds)]
    ]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys))
    style.heading(figure, title or _recovery_finding(parts, marks, rows))
    return figure


def _check(parts: Sequence[Part]) -> None:
    if not parts:
        raise ValueError("parts: expected at least one (row, start_s, end_s, kind)")
    for part in parts:
        if len(part) != 4 or not part[1] <= part[2]:
            raise ValueError(
                f"parts: expected (row, start_s, end_s, kind) with start_s <= end_s, got {part!r}"
            )


def _kinds(parts: Sequence[Part]) -> list[str]:
    """Those there are, the known ones first."""
    there = dict.fromkeys(kind for *_, kind in parts)
    return [kind for kind in _LOOKS if kind in there] + [kind for kind in there if kind not in _LOOKS]


def _look(kind: str, kinds: Sequence[str]) -> tuple[str, str]:
    others = [name for name in kinds if name not in _LOOKS]
    return _LOOKS.get(kind) or _MORE_LOOKS[others.index(kind) % len(_MORE_LOOKS)]


def _name(axes, kind: str, box: tuple[float, float, float], total: float, color: str, hatch: str) -> None:
    """The kind, written into its bar where there is room."""
    left, row, width = box
    if width / total * 95 > len(kind):
        ground = {"facecolor": color, "edgecolor": "none", "pad": 1.0} if hatch else None
        look = {"ha": "center", "va": "center", "fontsize": 9, "color": style.text_on(color), "clip_on": True}
        axes.text(left + width / 2, row, kind, bbox=ground, **look)


def _draw_marks(axes, marks: Sequence[tuple[float, str]], total: float) -> None:
    """A line for each, its text above the rows: on another level than one that is near, and never past the edge."""
    levels: list[float] = []  # where the last text on each level ends
    for number, (at, text) in enumerate(marks):
        color = _FAULT if number == 0 else style.GREY
        axes.axvline(at, color=color, linewidth=1.6, linestyle="-" if number == 0 else "--")
        width = total * len(text) / 105
        right = at + width > total
        begins = at - width if right else at
        level = next((i for i, taken in enumerate(levels) if begins >= taken), len(levels))
        levels[level : level + 1] = [begins + width + total / 60]
        axes.annotate(
            text,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2 if right else 2, 3 + 14 * level),
            textcoords="offset points",
            ha="right" if right else "left",
            color=color,
            fontsize=10,
            fontweight="bold" if number == 0 else "normal",
        )


def _recovery_finding(parts: Sequence[Part], marks: Sequence[tuple[float, str]], rows: Sequence[str]) -> str:
    begin, end = min(part[1] for part in parts), max(part[2] for part in parts)
    if not marks:
        return f"{len(rows)} process{'es' if len(rows) > 1 else ''}, {format_seconds(end - begin)}"
    fault, what = marks[0]
    steps = sorted(part[1:3] for part in parts if part[3] == _TRAINING and part[2] > fault)
    if not steps:
        return f"{what}: nobody trains after it"
    pauses, trained_until = [], fault  # after the fault, the times in which no row trains
    for start, stop in steps:
        if start > trained_until:
            pauses.append(start - trained_until)
        trained_until = max(trained_until, stop)
    if pauses:
        return f"{what}: nobody trains for {format_seconds(max(pauses))}"
    if trained_until < end:
        return f"{what}: training ends {format_seconds(trained_until - fault)} after it"
    return f"{what}: training never pauses"


@style.styled
def plot_loss_with_fault(
    losses: Mapping[str, Sequence[float]],
    fault_step: int,
    resumed_step: int | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """The losses of a run that lost a worker, on those of the run that did not.

    losses: two curves or more, name -> loss of each step, the undisturbed one first. Of the others, the losses of the
    steps that count: what was trained again after a restart, not what was lost. fault_step: the step in which the fault
    came. resumed_step: the first one trained after it; from there to `fault_step` the steps were lost, and trained
    again. The title says whether the curves are the same, number for number. Raises ValueError for fewer than two
    curves, or steps that are not in them.
    """
    curves = {name: list(values) for name, values in losses.items()}
    resumed_step = fault_step if resumed_step is None else resumed_step
    _check_losses(curves, fault_step, resumed_step)
    figure = style.new_figure(8.8, 4.4)
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(curves.items()):
        axes.plot(range(len(values)), values, label=name, **_CURVES[min(number, len(_CURVES) - 1)])
    lost = fault_step - resumed_step
    if lost:
        label = f"{plural(lost, 'step')} lost, and trained again"
        shade: dict[str, Any] = {
            "facecolor": style.LIGHT,
            "edgecolor": style.GREY,
            "hatch": "//",
            "linewidth": 0,
        }
        axes.axvspan(resumed_step, fault_step, label=label, zorder=0, **shade)
    axes.axvline(fault_step, color=_FAULT, linewidth=1.6, label=f"the fault, in step {fault_step}")
    axes.set(xlabel="step", ylabel="loss", xlim=(0, max(map(len, curves.values())) - 1 or 1))
    if min(map(min, curves.values())) >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.legend(loc="lower left")
    style.heading(figure, title or _loss_finding(curves))
    return figure


def _check_losses(curves: Mapping[str, Sequence[float]], fault_step: int, resumed_step: int) -> None:
    if len(curves) < 2 or not all(curves.values()):
        raise ValueError(f"losses: expected two curves with values, got {len(curves)}: {', '.join(curves)}")
    num_steps = min(map(len, curves.values()))
    if not 0 <= fault_step < num_steps:
        raise ValueError(f"fault_step: expected a step of all curves, 0 to {num_steps - 1}, got {fault_step}")
    if not 0 <= resumed_step <= fault_step:
        raise ValueError(f"resumed_step: expected 0 to fault_step = {fault_step}, got {resumed_step}")


def _loss_finding(curves: Mapping[str, Sequence[float]]) -> str:
    (_, undisturbed), *others = curves.items()
    verdicts = []
    for name, values in others:
        both = list(zip(undisturbed, values, strict=False))
        differ = [step for step, (a, b) in enumerate(both) if a != b and not (isnan(a) and isnan(b))]
        if not differ and len(values) == len(undisturbed):
            verdicts.append(f"{name}: the same loss in all {len(both)} steps, number for number")
        elif not differ:
            verdicts.append(f"{name}: {plural(len(values), 'step')} instead of {len(undisturbed)}")
        else:
            most = max(abs(both[step][0] - both[step][1]) for step in differ)
            to_the_end = differ == list(range(differ[0], len(both)))
            where = f"from step {differ[0]} on" if to_the_end else f"in {len(differ)} of {len(both)} steps"
            verdicts.append(f"{name}: other losses {where}, by up to {most:.2g}")
    return "; ".join(verdicts)
