"""One step of DataParallel: what each device computes, and what is copied from where to where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_bytes, format_seconds


class MoveLike(Protocol):
    """What is drawn of a `data_parallel.Move`."""

    @property
    def what(self) -> str: ...
    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class FlowsLike(Protocol):
    """What is read of `data_parallel.Flows`."""

    @property
    def num_replicas(self) -> int: ...
    @property
    def moves(self) -> Sequence[MoveLike]: ...
    @property
    def trace(self) -> Iterable[Any]: ...


_KINDS = {  # flow -> what moves in it, colour
    "data out, outputs in": (("inputs", "outputs", "output gradients", "input gradients"), 3),
    "parameters out": (("parameters", "buffers"), 2),
    "gradients in": (("parameter gradients",), 4),
}


@style.styled
def plot_flows(flows: FlowsLike, *, title: str | None = None) -> Figure:
    """One row for each device: what it computes, and below it every copy from or to it, over the time.

    An arrow goes from the device that a copy leaves to the one it reaches. Raises ValueError if nothing was recorded.
    """
    moves = [move for move in flows.moves if move.source >= 0 and move.target >= 0]
    spans = [event for event in flows.trace if event.lane == "compute"]
    if not moves and not spans:
        raise ValueError("flows: nothing was recorded; call the model inside `with model.record() as flows:`")
    times = [(one.start_s, one.end_s) for one in (*moves, *spans)]
    begin, end = min(start for start, _ in times), max(stop for _, stop in times)
    figure = style.new_figure(9.6, 1.6 + 0.85 * flows.num_replicas)
    axes = figure.add_subplot()
    for span in spans:
        _draw_span(axes, span.name, span.rank, span.start_s - begin, span.end_s - span.start_s, end - begin)
    for move in moves:
        _draw_move(axes, move, begin)
    axes.set(xlim=(0, (end - begin) or 1e-9), ylim=(flows.num_replicas - 0.4, -0.5), xlabel="time (seconds)")
    axes.set_yticks(range(flows.num_replicas), [f"device {i}" for i in range(flows.num_replicas)])
    style.seconds_axis(axes.xaxis)
    keys = [Patch(facecolor=style.RANK_COLORS[1], edgecolor=style.INK, label="compute")]
    keys += [
        Patch(facecolor=style.RANK_COLORS[color], edgecolor=style.INK, label=name)
        for name, (_, color) in _KINDS.items()
    ]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys))
    style.heading(figure, title or _flow_finding(moves, end - begin))
    return figure


def _draw_span(axes: Any, name: str, row: int, left: float, width: float, total: float) -> None:
    look = {"color": style.RANK_COLORS[1], "edgecolor": style.INK, "linewidth": 0.6}
    axes.barh(row - 0.19, width, 0.36, left=left, **look)
    if total and width / total * 105 > len(name):
        axes.text(left + width / 2, row - 0.19, name, ha="center", va="center", fontsize=9)


def _draw_move(axes: Any, move: MoveLike, begin: float) -> None:
    color = next(style.RANK_COLORS[number] for kinds, number in _KINDS.values() if move.what in kinds)
    left, width = move.start_s - begin, move.end_s - move.start_s
    for row in (move.source, move.target):
        axes.barh(row + 0.18, width, 0.3, left=left, color=color, edgecolor=style.INK, linewidth=0.5)
    down = 1 if move.target > move.source else -1
    start, stop = move.source + 0.18 + 0.15 * down, move.target + 0.18 - 0.15 * down
    arrow = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
    at = left + width / 2
    axes.annotate("", (at, stop), (at, start), arrowprops=arrow, zorder=4)


def _flow_finding(moves: Sequence[MoveLike], seconds: float) -> str:
    total = sum(move.nbytes for move in moves)
    first = sum(move.nbytes for move in moves if 0 in (move.source, move.target))
    if not total:
        return f"Nothing is copied in {format_seconds(seconds)}: one device has all it needs"
    share = "every copy" if first == total else f"copies of {int(100 * first / total)}% of that"
    copied = f"{format_bytes(total)} are copied in one step of {format_seconds(seconds)}"
    return f"{copied}; device 0 is at one end of {share}"
