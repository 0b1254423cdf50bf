"""Figures of data-parallel training: a server's step on limited links, staleness, loss against time and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.classroom.checks.verdict import plural
from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_bytes, format_seconds

_RUNS = tuple(zip([style.RANK_COLORS[i] for i in (0, 4, 2, 7)], ("-", "--", "-.", ":"), strict=True))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@style.styled
def plot_server_load(
    steps: Mapping[str, Sequence[tuple[int, float, float]]],
    *,
    size_bytes: int,
    link: str,
    label: str = "",
    title: str | None = None,
) -> Figure:
    """Seconds of a step over the number of hosts: a line for each formula, a marker for each measurement.

    steps: name -> (number of hosts, predicted seconds, measured seconds). size_bytes: of the parameters. link: its
    rate, as text. label: what the figure must say of how the link is limited ("" or "paced in software").
    Raises ValueError for nothing to draw.
    """
    if not steps or not all(steps.values()):
        raise ValueError(f"steps: expected at least one measurement for each name, got {dict(steps)}")
    figure = style.new_figure(8.2, 4.6)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(steps.items()):
        look = style.series_style(name, index)
        hosts, predicted, measured = zip(*sorted(points), strict=True)
        axes.plot(
            hosts, predicted, color=look["color"], linestyle=look["linestyle"], label=f"{name}, predicted"
        )
        points_look = {"color": look["color"], "marker": look["marker"], "markersize": 9, "mec": "white"}
        axes.plot(hosts, measured, linestyle="none", label=f"{name}, measured", **points_look)
    axes.set_xlabel("hosts N, one rank on each")
    axes.set_ylabel("push and pull of one step (seconds)")
    axes.set_xticks(sorted({point[0] for points in steps.values() for point in points}))
    axes.set_ylim(bottom=0)
    style.seconds_axis(axes.yaxis)
    axes.grid(True, axis="y")
    axes.legend(loc="upper left")
    note = f"{format_bytes(size_bytes)} of parameters, links of {link}{f', {label}' if label else ''}"
    axes.set_title(note, fontweight="normal", fontsize=11)
    style.heading(figure, title or _load_finding(steps))
    return figure


def _load_finding(steps: Mapping[str, Sequence[tuple[int, float, float]]]) -> str:
    name = next(iter(steps))
    times = {num_hosts: measured for num_hosts, _, measured in steps[name]}
    few, many = min(times), max(times)
    others = {other: s for other, points in steps.items() if other != name for n, _, s in points if n == many}
    if others:
        best = min(others, key=lambda other: others[other])
        return (
            f"On {many} hosts the {name} takes {times[many] / others[best]:.1f} times as long as the {best}"
        )
    if few == many:
        return f"On {plural(many, 'host')} a step of the {name} takes {format_seconds(times[many])}"
    ratio = times[many] / times[few]
    who = f"The {name} chokes: a step" if ratio >= many / few else f"A step of the {name}"
    return f"{who} takes {ratio:.1f} times as long on {plural(many, 'host')} as on {few}"


@style.styled
def plot_staleness(staleness: Sequence[int], workers: Sequence[int], *, title: str | None = None) -> Figure:
    """The staleness of each update, coloured by its worker, and how often each staleness came.

    staleness, workers: one entry for each update, in the order in which the server applied them. Raises ValueError
    if they are empty or of different lengths.
    """
    if not staleness or len(staleness) != len(workers):
        raise ValueError(
            f"expected as many staleness as workers, at least one; got {len(staleness)} and {len(workers)}"
        )
    figure = style.new_figure(9.2, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=[2.3, 1], sharey=True)
    numbers, ages, who = np.arange(len(staleness)), np.array(staleness), np.array(workers)
    levels, below = np.arange(ages.max() + 1), np.zeros(ages.max() + 1)
    for index, worker in enumerate(sorted(set(workers))):
        mine = who == worker
        color, marker = style.rank_color(worker), _MARKERS[index % len(_MARKERS)]
        left.plot(numbers[mine], ages[mine], marker, color=color, ms=4.5, label=f"worker {worker}")
        counts = np.bincount(ages[mine], minlength=len(levels))
        look = {"color": color, "edgecolor": style.INK, "linewidth": 0.6, "hatch": style.rank_hatch(worker)}
        right.barh(levels, counts, left=below, height=0.8, **look)
        below = below + counts
    left.axhline(ages.mean(), color=style.INK, linewidth=1, linestyle=":")
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
    note = {"xytext": (-3, 3), "textcoords": "offset points", "fontsize": 9, "ha": "right", "bbox": ground}
    left.annotate("mean", (len(ages), ages.mean()), **note)
    left.set(xlabel="update, in the order applied", ylabel="staleness (updates)")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4, handletextpad=0.1, columnspacing=1)
    right.set(xlabel="number of updates")
    style.heading(figure, title or _staleness_finding(ages, who))
    return figure


def _staleness_finding(ages: np.ndarray, who: np.ndarray) -> str:
    means = {worker: ages[who == worker].mean() for worker in sorted(Counter(who.tolist()))}
    worst = max(means, key=means.__getitem__)
    return (
        f"An update is {ages.mean():.1f} updates behind its weights on average, "
        f"worker {worst}'s {means[worst]:.1f}, at most {ages.max()}"
    )


@style.styled
def plot_training(
    runs: Mapping[str, Sequence[tuple[float, int, float]]],
    *,
    smooth_samples: int = 512,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Loss against the wall clock and against the samples seen, a line for each run.

    runs: name -> (seconds, samples so far, loss) of each update, in their order. smooth_samples: a point is the mean
    over the updates of about so many samples. note: what was modelled, below the title. The title compares the second
    run with the first. Raises ValueError without runs, or for a run without updates.
    """
    if not runs:
        raise ValueError("runs: expected at least one name with updates, got none")
    figure = style.new_figure(9.6, 4.4)
    clock, samples = figure.subplots(1, 2, sharey=True)
    for index, (name, updates) in enumerate(runs.items()):
        if not updates:
            raise ValueError(f"runs[{name!r}] has no updates")
        points = _smoothed(updates, smooth_samples)
        color, line = _RUNS[index % len(_RUNS)]
        for axes, column in ((clock, 0), (samples, 1)):
            axes.plot(points[:, column], points[:, 2], color=color, linestyle=line, label=name)
    clock.set(xlabel="wall clock (seconds)", ylabel="training loss", title="Against time")
    samples.set(xlabel="samples seen", title="Against samples")
    for axes in (clock, samples):
        axes.set_ylim(bottom=0)
        axes.grid(True)
    clock.legend(loc="upper right")
    if note:
        figure.supxlabel(note, fontsize=10, x=0.01, ha="left", color=style.GREY)
    style.heading(figure, title or _training_finding(runs, smooth_samples))
    return figure


def _smoothed(updates: Sequence[tuple[float, int, float]], smooth_samples: int) -> np.ndarray:
    """(number of updates that fill a window, 3): each point is at the end of its window, its loss the window's mean."""
    values = np.array(updates, dtype=float)
    window = max(1, min(len(values), round(smooth_samples * len(values) / values[-1, 1])))
    means = np.convolve(values[:, 2], np.full(window, 1 / window), mode="valid")
    return np.column_stack([values[window - 1 :, :2], means])


def _training_finding(runs: Mapping[str, Sequence[tuple[float, int, float]]], smooth_samples: int) -> str:
    ends = {name: _smoothed(updates, smooth_samples)[-1] for name, updates in runs.items()}
    first, *rest = ends
    if not rest:
        return f"{_upper(first)} ends at a loss of {ends[first][2]:.2f}"
    (s1, n1, loss1), (s2, n2, loss2) = ends[first], ends[rest[0]]
    faster, seen = (n2 / s2) / (n1 / s1), min(smooth_samples, round(n1), round(n2))
    finding = f"{_upper(rest[0])}: {faster:.1f} times the samples per second of {first}"
    if not (loss1 > 0 and math.isfinite(loss1) and math.isfinite(loss2)):
        return (
            f"{finding}, and a loss of {loss2:.2f} where that has {loss1:.2f}, over the last {seen} samples"
        )
    worse = loss2 / loss1
    link = "but" if (faster > 1) == (worse > 1) else "and"
    return f"{finding}, {link} {worse:.1f} times its loss over the last {seen} samples"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
