"""DDP's two figures: what hides behind backward, and which bucket size hides the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.plots import style
from course_lib.classroom.plots.timeline import TraceEvent
from course_lib.classroom.tables import format_seconds

_LOOKS = {  # kind -> colour, hatch, strip (0: the rank's own work, 1: the wire)
    "forward": (style.RANK_COLORS[5], "", 0),
    "backward": (style.RANK_COLORS[1], "", 0),
    "wait": (style.LIGHT, "xx", 0),
    "update": (style.RANK_COLORS[2], "", 0),
    "all_reduce": (style.RANK_COLORS[0], "", 1),
}


@style.styled
def plot_overlap(
    steps: Mapping[str, Sequence[TraceEvent]], *, label: str = "", title: str | None = None
) -> Figure:
    """One training step of one rank, once for each way of averaging: its work above, its all-reduces below.

    steps: name -> the events of one step, spans "forward", "backward", "update", a wait ("wait for gradients") and
    the all-reduces. Every step begins at 0, so the ends compare. label: what the title must say of the links. Raises
    ValueError without such events.
    """
    _check_steps(steps)
    figure = style.new_figure(9.2, 1.4 + 0.95 * len(steps))
    axes = figure.add_subplot()
    ends = []
    for row, events in enumerate(steps.values()):
        known = [(kind, event) for event in events if (kind := _kind(event))]
        begin = min(event.start_s for _, event in known)
        ends.append(max(event.end_s for _, event in known) - begin)
        for kind, event in sorted(known, key=lambda pair: pair[0] == "wait"):  # the wait lies on backward
            color, hatch, strip = _LOOKS[kind]
            box = (row - 0.2 + 0.4 * strip, event.end_s - event.start_s, 0.36)
            axes.barh(
                *box, left=event.start_s - begin, color=color, hatch=hatch, edgecolor="white", linewidth=0.7
            )
    axes.set_yticks(range(len(steps)), list(steps))
    axes.set(
        ylim=(len(steps) - 0.5, -0.5), xlim=(0, max(ends) * 1.01 or 1e-9), xlabel="time since the step began"
    )
    style.seconds_axis(axes.xaxis)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    keys = [
        Patch(
            facecolor=c, hatch=hatch, edgecolor="white", label="all-reduce" if kind == "all_reduce" else kind
        )
        for kind, (c, hatch, _) in _LOOKS.items()
    ]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys))
    style.heading(
        figure, (title or _overlap_finding(dict(zip(steps, ends, strict=True)))) + _in_brackets(label)
    )
    return figure


def _check_steps(steps: Mapping[str, Sequence[TraceEvent]]) -> None:
    if not steps or not all(steps.values()):
        raise ValueError("steps: expected at least one name with events of a step")
    for name, events in steps.items():
        if not any(map(_kind, events)):
            names = ", ".join(dict.fromkeys(event.name for event in events))
            raise ValueError(f"steps[{name!r}]: expected events named {', '.join(_LOOKS)}; got {names}")


def _kind(event: TraceEvent) -> str | None:
    kind = "wait" if event.name.startswith("wait") else event.name
    return kind if kind in _LOOKS else None


def _overlap_finding(seconds: Mapping[str, float]) -> str:
    in_order = sorted(seconds, key=lambda name: seconds[name])
    times = {name: format_seconds(seconds[name]) for name in in_order}
    if len(set(times.values())) == 1:
        return f"A step takes {times[in_order[0]]}" + (" either way" if len(seconds) > 1 else "")
    shown = in_order if len(in_order) <= 3 else [in_order[0], in_order[-1]]
    return "A step takes " + ", ".join(f"{times[name]} with {name}" for name in shown)


@style.styled
def plot_bucket_sizes(
    points: Sequence[tuple[float, Sequence[float]]],
    flat_s: float | None = None,
    *,
    label: str = "",
    title: str | None = None,
) -> Figure:
    """The time of a step over the size of the buckets: the median, and a bar from the fastest to the slowest.

    points: (bucket_cap_mb, the seconds of each step). flat_s: the median with one flat buffer. label: what the title
    must say of the links. Raises ValueError without points, or for a point without a time.
    """
    if not points or not all(len(seconds) for _, seconds in points):
        raise ValueError(
            "points: expected at least one (bucket_cap_mb, seconds of its steps), with a time in each"
        )
    points = sorted(points)
    sizes, steps = [size for size, _ in points], [seconds for _, seconds in points]
    middle = [median(seconds) for seconds in steps]
    below = [m - min(seconds) for m, seconds in zip(middle, steps, strict=True)]
    above = [max(seconds) - m for m, seconds in zip(middle, steps, strict=True)]
    figure = style.new_figure(8.6, 4.4)
    axes = figure.add_subplot()
    look = style.series_style("ring") | {"label": "buckets, during backward", "markersize": 8}
    axes.errorbar(sizes, middle, yerr=[below, above], capsize=4, elinewidth=1.2, **look)
    if flat_s is not None:
        look = style.series_style("naive")
        axes.axhline(
            flat_s, label="one flat buffer, after backward", color=look["color"], linestyle=look["linestyle"]
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    top = max([flat_s or 0, *map(max, steps)])
    axes.set(
        xlabel="bucket_cap_mb (MiB)", ylabel="time of one step (bar: fastest to slowest)", ylim=(0, 1.1 * top)
    )
    style.seconds_axis(axes.yaxis)
    axes.grid(True)
    axes.legend(loc="lower right")
    style.heading(figure, (title or _bucket_finding(sizes, steps, flat_s)) + _in_brackets(label))
    return figure


def _bucket_finding(sizes: Sequence[float], steps: Sequence[Sequence[float]], flat_s: float | None) -> str:
    """`sizes` from small to large. Sizes whose median lies within the best one's bar do as well."""
    middle = [median(seconds) for seconds in steps]
    time_s, best = min(zip(middle, sizes, strict=True))
    if flat_s is not None and flat_s < time_s:
        flat, buckets = format_seconds(flat_s), f"buckets of {best:g} MiB take {format_seconds(time_s)}"
        return f"One flat buffer is best here: {flat} for a step, {buckets}"
    slowest = max(steps[sizes.index(best)])
    as_good = [size for size, m in zip(sizes, middle, strict=True) if m <= slowest]
    if len(as_good) > 1:
        several = f"{', '.join(f'{size:g}' for size in as_good[:-1])} and {as_good[-1]:g}"
        return f"Buckets of {several} MiB do about equally well here: a step takes {format_seconds(time_s)} at best"
    found = f"Buckets of {best:g} MiB are best here: {format_seconds(time_s)} for a step"
    return found + (f", the largest takes {format_seconds(middle[-1])}" if sizes[-1] != best else "")


def _in_brackets(label: str) -> str:
    return f" ({label})" if label else ""
