"""A Gantt chart of a trace: who did what, from when to when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.checks.verdict import plural
from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_seconds

_LANE_LOOKS = {  # name -> colour, hatch; drawn in this order, other lanes in between
    "compute": (style.RANK_COLORS[1], ""),
    "collective": (style.RANK_COLORS[3], ""),
    "comm": (style.RANK_COLORS[0], "//"),
}
_MORE_LOOKS = ((style.RANK_COLORS[2], ".."), (style.RANK_COLORS[7], "xx"), (style.RANK_COLORS[4], "\\\\"))
_TALK = {"comm", "collective"}  # a collective is the frame around messages, not work of the rank's own
_WAIT = "wait"  # lies on the work in which the rank waits, and is none
Interval = tuple[float, float]


class TraceEvent(Protocol):
    """What is drawn of a `comm.trace.Event`."""

    rank: int
    name: str
    start_s: float
    end_s: float
    lane: str


@style.styled
def plot_trace(trace: Iterable[TraceEvent], *, title: str | None = None) -> Figure:
    """One row for each rank and in it one strip for each lane ("compute", "comm", …), over the time.

    A name is written into its bar where there is room. Raises ValueError for a trace without events.
    """
    events = sorted(trace, key=lambda event: event.start_s)
    if not events:
        raise ValueError("the trace has no events: nothing was sent and no comm.span was entered")
    ranks = sorted({event.rank for event in events})
    lanes = sorted({event.lane for event in events}, key=lambda lane: (lane in _TALK, lane == "comm", lane))
    begin, end = events[0].start_s, max(event.end_s for event in events)
    figure = style.new_figure(9.2, 1.5 + len(ranks) * (0.28 + 0.27 * len(lanes)))
    axes = figure.add_subplot()
    strip = 0.84 / len(lanes)
    for event in sorted(events, key=lambda event: event.start_s - event.end_s):
        # The shortest last: what lies inside another is drawn on top.
        top = ranks.index(event.rank) - 0.42 + lanes.index(event.lane) * strip
        _draw_bar(
            axes, event, lanes, (event.start_s - begin, top, event.end_s - event.start_s, strip), end - begin
        )
    axes.set(
        xlim=(0, (end - begin) or 1e-9),
        ylim=(len(ranks) - 0.45, -0.55),
        xlabel="time since the first event (seconds)",
    )
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    style.seconds_axis(axes.xaxis)
    keys = [
        Patch(facecolor=_look(lane, lanes)[0], hatch=_look(lane, lanes)[1], edgecolor="white", label=lane)
        for lane in lanes
    ]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys))
    style.heading(figure, title or _finding(events, begin, end))
    return figure


def _draw_bar(
    axes, event: TraceEvent, lanes: list[str], box: tuple[float, float, float, float], total: float
) -> None:
    left, top, width, height = box
    color, hatch = _look(event.lane, lanes)
    axes.barh(
        top + height / 2,
        width,
        height * 0.94,
        left=left,
        color=color,
        hatch=hatch,
        edgecolor="white",
        linewidth=0.6,
    )
    if total and width / total * 110 > len(event.name):
        ground = {"facecolor": color, "edgecolor": "none", "pad": 1.0} if hatch else None
        look = {"ha": "center", "va": "center", "fontsize": 9, "color": style.text_on(color), "clip_on": True}
        axes.text(left + width / 2, top + height / 2, event.name, bbox=ground, **look)


def _look(lane: str, lanes: list[str]) -> tuple[str, str]:
    others = [name for name in lanes if name not in _LANE_LOOKS]
    return _LANE_LOOKS.get(lane) or _MORE_LOOKS[others.index(lane) % len(_MORE_LOOKS)]


def _finding(events: Sequence[TraceEvent], begin: float, end: float) -> str:
    """How much of the ranks' time is communication, and how much of that runs while the rank computes."""
    ranks = {event.rank for event in events}
    comm = hidden = 0.0
    for rank in ranks:
        own = [event for event in events if event.rank == rank]
        talks = _union(event for event in own if event.lane == "comm")
        works = _union(event for event in own if event.lane not in {*_TALK, _WAIT})
        waits = _union(event for event in own if event.lane == _WAIT)
        comm += _length(talks)
        at_once = _common(talks, works)
        hidden += _length(at_once) - _length(_common(at_once, waits))
    span = (end - begin) * len(ranks)
    share = f"communication takes {comm / span:.0%} of it" if span else "all in one moment"
    behind = f", {hidden / comm:.0%} of that while computing" if hidden else ""
    return f"{plural(len(ranks), 'rank')}, {format_seconds(end - begin)}: {share}{behind}"


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    pairs = [(max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others]
    return [(start, stop) for start, stop in pairs if start < stop]


def _length(intervals: Sequence[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _union(events: Iterable[TraceEvent]) -> list[Interval]:
    """The times of these events as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for event in sorted(events, key=lambda event: event.start_s):
        if merged and event.start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_s))
        else:
            merged.append((event.start_s, event.end_s))
    return merged
