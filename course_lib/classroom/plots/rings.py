"""Pictures of a replayed ring all-reduce: all steps as small multiples, or one step large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from course_lib.classroom.plots import style
from course_lib.classroom.replay import Replay, Step, label
from course_lib.classroom.tables import format_bytes

_PARTIAL = LinearSegmentedColormap.from_list("contributions", ["#f1f4fb", "#90b1e6"])
_SUM = style.RANK_COLORS[0]
_MOVE = style.RANK_COLORS[6]
_ARROW = {"arrowstyle": "-|>", "color": _MOVE, "linewidth": 2.0}
_CELL = 0.76  # width of a cell; a column is 1 wide, and the arrows run in the gap
_LEGEND = "0+1: what ranks 0 and 1 had, added · sum: of all ranks · red: a chunk moves to the next rank"
_SHORT = " · 3/{size}: of 3 ranks"
_LEFT = 0.74  # from the edge of the picture to the middle of the first column


@style.styled
def plot_ring_steps(replay: Replay, *, title: str | None = None) -> Figure:
    """All steps of a ring all-reduce: what each rank holds after each step, and which chunk moved where.

    Up to 5 ranks: a row for the start and the reduce-scatter, below it a row for the all-gather.
    """
    size = replay.num_ranks
    columns = size if size <= 5 else 3
    rows = math.ceil(len(replay.steps) / columns)
    panel = max(2.4, 6.6 / columns, (0.62 if size <= 5 else 0.46) * size + 0.2)  # room for the titles
    figure = style.new_figure(columns * panel + 0.6, rows * (0.36 * size + 0.9) + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < len(replay.steps):
            _draw_held(axes, replay, replay.steps[number], named=number % columns == 0)
            _title_over_cells(axes, size, _step_title(replay.steps[number]))
        else:
            axes.axis("off")
    if size > 1:
        legend = _LEGEND + (_SHORT.format(size=size) if size > 4 else "")
        figure.supxlabel(legend, fontsize=10.5, x=0.01, ha="left", color=style.INK)
    style.heading(figure, title or _finding(replay))
    return figure


@style.styled
def plot_ring_step(replay: Replay, step: int, *, title: str | None = None) -> Figure:
    """One step: left the ranks in their circle with the chunks that travel, right what each rank holds
    afterwards.

    step: 0 (the start) … 2(N-1). Raises IndexError for another.
    """
    if not 0 <= step < len(replay.steps):
        raise IndexError(f"step {step}: this replay has the steps 0 to {len(replay.steps) - 1}")
    now, size = replay.steps[step], replay.num_ranks
    figure = style.new_figure(9.6, max(4.2, 1.4 + 0.46 * size))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_circle(left, replay, now)
    _draw_held(right, replay, now, fontsize=12 if size <= 4 else 9)
    _title_over_cells(
        right, size, "Afterwards each rank holds" if now.moves else "Each rank holds its own values"
    )
    style.heading(figure, title or f"{_step_title(now, len(replay.steps) - 1)}. {_what_happens(replay, now)}")
    return figure


def _draw_held(axes, replay: Replay, step: Step, fontsize: float = 9, named: bool = True) -> None:
    """A column for each rank, a row for each chunk; in a cell the ranks whose values are in."""
    size = replay.num_ranks
    arrived = {(move.to, move.chunk) for move in step.moves}
    for rank in range(size):
        _draw_cell(axes, rank, -1.05, str(rank), style.rank_color(rank), fontsize + 1, fontweight="bold")
        for chunk in range(size):
            held = step.held[rank][chunk]
            complete = replay.is_sum(step.number, rank, chunk)
            fill = _SUM if complete else to_hex(_PARTIAL((len(held) - 1) / max(size - 2, 1)))
            edge = (_MOVE, 2.4) if (rank, chunk) in arrived else (style.GREY, 0.8)
            text = label(held, size)
            _draw_cell(axes, rank, chunk, text, fill, fontsize - (len(text) > 3), edge)
    for move in step.moves:
        _draw_move(axes, move.source, move.to, move.chunk)
    axes.set(xlim=(-_LEFT, size - 1 + _LEFT), ylim=(size - 0.5, -1.5))
    names = ["rank", *(f"chunk {chunk}" for chunk in range(size))]
    axes.set_yticks([-1.05, *range(size)] if named else [], names if named else [], fontsize=fontsize)
    axes.set_xticks([])
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)


def _draw_cell(
    axes,
    x: float,
    y: float,
    text: str,
    fill: str,
    fontsize: float,
    edge: tuple[str, float] = (style.INK, 0.8),
    **look: Any,
) -> None:
    front = 3 if edge[0] == _MOVE else 2
    corner = (x - _CELL / 2, y - 0.4)
    axes.add_patch(
        Rectangle(corner, _CELL, 0.8, facecolor=fill, edgecolor=edge[0], linewidth=edge[1], zorder=front)
    )
    ink = style.text_on(fill)
    axes.text(x, y, text, ha="center", va="center", fontsize=fontsize, color=ink, zorder=6, **look)


def _draw_move(axes, source: int, to: int, chunk: int) -> None:
    """An arrow between neighbours; the one that closes the ring leaves right and comes in left."""
    start, end, gap = source + _CELL / 2, to - _CELL / 2, 1 - _CELL
    spans = [(start, end)] if to == source + 1 else [(start, start + 1.3 * gap), (end - 1.3 * gap, end)]
    for begin, stop in spans:
        look = {**_ARROW, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
        axes.annotate("", (stop, chunk), (begin, chunk), arrowprops=look, zorder=5)


def _title_over_cells(axes, size: int, text: str) -> None:
    """A title that begins where the first cell does."""
    axes.set_title(text, fontsize=11, loc="left", x=(_LEFT - _CELL / 2) / (size - 1 + 2 * _LEFT))


def _draw_circle(axes, replay: Replay, step: Step) -> None:
    """The ranks on a circle, clockwise from the top; on each arrow the chunk that travels and its size."""
    size, small = replay.num_ranks, replay.num_ranks > 6
    angles = [math.pi / 2 - 2 * math.pi * rank / size for rank in range(size)]
    for rank, angle in enumerate(angles):
        color, at = style.rank_color(rank), (math.cos(angle), math.sin(angle))
        axes.add_patch(Circle(at, 0.17 if small else 0.22, facecolor=color, edgecolor=style.INK, zorder=3))
        axes.text(*at, str(rank), ha="center", va="center", color=style.text_on(color), fontweight="bold",
                  fontsize=12 if small else 15, zorder=4)  # fmt: skip
    for move in step.moves:
        _draw_arc(axes, angles[move.source], angles[move.to], small, size)
        middle = angles[move.source] - math.pi / size
        reach = 0.78 if size == 2 else 1.42 if small else 1.22
        at = (reach * math.cos(middle), reach * math.sin(middle))
        text = f"chunk {move.chunk}\n{format_bytes(move.num_bytes)}"
        axes.text(*at, text, ha="center", va="center", fontsize=9 if small else 10.5, color=_MOVE)
    edge = 1.75 if small else 1.6
    axes.set(xlim=(-edge, edge), ylim=(-edge, edge) if small else (-1.4, 1.4), aspect="equal")
    axes.axis("off")


def _draw_arc(axes, source: float, to: float, small: bool, size: int) -> None:
    begin, end = ((math.cos(angle), math.sin(angle)) for angle in (source, to))
    look = {**_ARROW, "connectionstyle": f"arc3,rad={-0.35 if size == 2 else -0.2}", "mutation_scale": 16}
    shrink = 16 if small else 24
    axes.annotate("", end, begin, arrowprops={**look, "shrinkA": shrink, "shrinkB": shrink})


def _step_title(step: Step, last: int | None = None) -> str:
    number = f"Step {step.number}" if last is None else f"Step {step.number} of {last}"
    return f"{number}: {step.phase}" if step.moves else "Start"


def _what_happens(replay: Replay, step: Step) -> str:
    size = replay.num_ranks
    if not step.moves:
        return f"Every rank has {size} chunks of its own values"
    finished = min(
        sum(replay.is_sum(step.number, rank, chunk) for chunk in range(size)) for rank in range(size)
    )
    if finished == size:
        return "Every rank holds every sum"
    if finished:
        return f"Every rank holds {finished} of {size} sums"
    most = max(len(step.held[move.to][move.chunk]) for move in step.moves)
    return f"What arrives is added: sums of {most} ranks"


def _finding(replay: Replay) -> str:
    size, total = replay.num_ranks, format_bytes(sum(replay.chunk_bytes))
    if size == 1:
        return "One rank sends nothing: its values are the sum"
    sent = _range(sorted(replay.bytes_sent))
    return f"After {len(replay.steps) - 1} steps all {size} ranks hold the sum of {total}; each sent {sent}"


def _range(values: Sequence[int]) -> str:
    low, high = format_bytes(values[0]), format_bytes(values[-1])
    return low if low == high else f"{low} to {high}"
