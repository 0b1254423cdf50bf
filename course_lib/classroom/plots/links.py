"""Times on limited links, over the number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from matplotlib.figure import Figure

from course_lib.classroom.checks.verdict import plural
from course_lib.classroom.plots.style import heading, new_figure, seconds_axis, series_style, styled
from course_lib.classroom.tables import format_seconds


class Measured(Protocol):
    """One algorithm on one number of hosts, as `bench.links.measure` returns it."""

    @property
    def algorithm(self) -> str: ...
    @property
    def num_hosts(self) -> int: ...
    @property
    def predicted_s(self) -> float | None: ...
    @property
    def measured_s(self) -> float: ...
    @property
    def how(self) -> str: ...


@styled
def plot_on_links(measured: Sequence[Measured], *, title: str | None = None) -> Figure:
    """Seconds over the number of hosts: a line for each algorithm's formula, a marker for each measurement.

    The title says how much longer the slowest took than the ring on the most hosts (or, if that is the ring, than the
    fastest), and if messages were only paced in software. Raises ValueError for an empty sequence.
    """
    if not measured:
        raise ValueError("measured: expected at least one measurement, got none")
    figure = new_figure(9.0, 5.0)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(one.algorithm for one in measured))
    for index, name in enumerate(names):
        mine = sorted((one for one in measured if one.algorithm == name), key=lambda one: one.num_hosts)
        style = series_style(name, index)
        formula = [(one.num_hosts, one.predicted_s) for one in mine if one.predicted_s is not None]
        if formula:
            line = {key: style[key] for key in ("color", "linestyle", "linewidth") if key in style}
            axes.plot(*zip(*formula, strict=True), label=f"{name}, predicted", **line)
        points = [one.num_hosts for one in mine], [one.measured_s for one in mine]
        marker = {"color": style["color"], "marker": style.get("marker", "o"), "linestyle": "none"}
        axes.plot(*points, label=f"{name}, measured", markersize=8, **marker)
    axes.set_xlabel("hosts N, one rank on each")
    axes.set_ylabel("time of one all-reduce (seconds)")
    axes.set_xticks(sorted({one.num_hosts for one in measured}))
    axes.set_ylim(bottom=0)
    seconds_axis(axes.yaxis)
    axes.legend(loc="upper left")
    heading(figure, (title or _finding(measured)) + _label(measured))
    return figure


def _finding(measured: Sequence[Measured]) -> str:
    most = max(one.num_hosts for one in measured)
    times = {one.algorithm: one.measured_s for one in measured if one.num_hosts == most}
    slow = max(times, key=lambda name: times[name])
    found = f"On {plural(most, 'host')} {slow} takes"
    if len(times) == 1:
        return f"{found} {format_seconds(times[slow])}"
    fast = "ring" if "ring" in times and slow != "ring" else min(times, key=lambda name: times[name])
    return f"{found} {times[slow] / times[fast]:.1f} times as long as {fast}"


def _label(measured: Sequence[Measured]) -> str:
    return " (paced in software)" if any(one.how == "paced" for one in measured) else ""
