"""Figures of what communication costs in time: the alpha-beta line, and predicted times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from course_lib.classroom.checks.verdict import joined
from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_bytes, format_seconds


@style.styled
def plot_alpha_beta(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    alpha_s: float,
    bytes_per_s: float,
    *,
    label: str = "measured",
    title: str | None = None,
) -> Figure:
    """Measured times of one message over its size, the line alpha + n / rate, and the half-way size.

    sizes_bytes, seconds: one point each, times of one message one way. alpha_s: start-up time in seconds;
    bytes_per_s: the rate. At the half-way size n½ = alpha · rate half of the time is start-up (R. Hockney,
    1994).
    """
    _same_length("sizes_bytes", sizes_bytes, "seconds", seconds)
    checked = {
        "sizes_bytes": sizes_bytes,
        "seconds": seconds,
        "alpha_s": [alpha_s],
        "bytes_per_s": [bytes_per_s],
    }
    for name, values in checked.items():
        _positive(name, values, "measure again")
    half = alpha_s * bytes_per_s
    figure = style.new_figure(8.2, 4.6)
    axes = figure.add_subplot()
    line = np.geomspace(min(*sizes_bytes, half) / 2, max(*sizes_bytes, half) * 2, 200)
    fit = f"α + n/β: α = {format_seconds(alpha_s)}, β = {format_bytes(bytes_per_s)}/s"
    axes.plot(line, alpha_s + line / bytes_per_s, color=style.RANK_COLORS[6], label=fit)
    _draw_parts(axes, line, alpha_s, bytes_per_s)
    axes.plot(sizes_bytes, seconds, "o", color=style.RANK_COLORS[0], markersize=6, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="message size n (bytes)", ylabel="time of one message (seconds)"
    )
    _mark(axes, half, 2 * alpha_s, f"n½ = {format_bytes(half)}")
    style.bytes_axis(axes.xaxis)
    style.seconds_axis(axes.yaxis)
    axes.grid(True)
    axes.legend(loc="upper left")
    finding = f"Up to {format_bytes(half)} a message costs mostly its start-up, above mostly its bytes"
    style.heading(figure, title or finding)
    return figure


def _draw_parts(axes, sizes: np.ndarray, alpha_s: float, bytes_per_s: float) -> None:
    """The two costs apart: a level line for the start-up, a rising one for the bytes."""
    start_up, transfer = np.full_like(sizes, alpha_s), sizes / bytes_per_s
    look = {"color": style.GREY, "linewidth": 1, "linestyle": ":"}
    note = {"color": style.GREY, "textcoords": "offset points", "ha": "right", "fontsize": 10}
    axes.plot(sizes, start_up, **look)
    axes.annotate("start-up α", (sizes[-1], alpha_s), xytext=(-2, -5), va="top", **note)
    shown = transfer >= alpha_s / 4
    axes.plot(sizes[shown], transfer[shown], **look)
    axes.annotate("transfer n/β", (sizes[shown][0], transfer[shown][0]), xytext=(-6, 0), va="center", **note)


def _mark(axes, x: float, y: float, text: str) -> None:
    """A point with a dropped line and its name beside it."""
    bottom = axes.get_ylim()[0]
    axes.plot([x, x], [bottom, y], color=style.INK, linewidth=1)
    axes.plot([x], [y], "D", color="white", markeredgecolor=style.INK, markersize=8, zorder=5)
    axes.annotate(
        text, (x, y), xytext=(10, -12), textcoords="offset points", fontweight="bold", va="top", zorder=6
    )
    axes.set_ylim(bottom=bottom)


@style.styled
def plot_costs(
    sizes_bytes: Sequence[float],
    predicted: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Predicted time of each algorithm over the tensor's size (lines), measured times (points), who wins where.

    sizes_bytes: increasing. predicted: name -> seconds, one for each size. measured: name -> (bytes, seconds) of each
    measurement, for names in predicted. A crossover is where the fastest prediction changes; it is marked and named in
    the title. Raises ValueError without predictions, for sizes in another order, or for what is not positive.
    """
    _check_costs(sizes_bytes, predicted, measured or {})
    figure = style.new_figure(8.2, 4.8)
    axes = figure.add_subplot()
    for index, (name, seconds) in enumerate(predicted.items()):
        look = style.series_style(name, index)
        axes.plot(
            sizes_bytes, seconds, color=look["color"], linestyle=look["linestyle"], label=f"{name}, predicted"
        )
    for name, points in (measured or {}).items():
        look = style.series_style(name, list(predicted).index(name)) | {"linestyle": ""}
        axes.plot(*zip(*points, strict=True), **look, ms=7, mec="white", label=f"{name}, measured")
    axes.set(xscale="log", yscale="log", xlabel="tensor size S (bytes)", ylabel="time (seconds)")
    winners = crossovers(sizes_bytes, predicted)
    for size, _, name in winners[1:]:
        seconds = np.exp(np.interp(np.log(size), np.log(sizes_bytes), np.log(predicted[name])))
        _mark(axes, size, float(seconds), format_bytes(size))
    style.bytes_axis(axes.xaxis)
    style.seconds_axis(axes.yaxis)
    axes.grid(True)
    axes.legend(loc="upper left")
    fastest = [_with_equals(sizes_bytes, predicted, winners, number) for number in range(len(winners))]
    style.heading(figure, title or _who_wins(fastest, [size for size, *_ in winners], bool(measured)))
    return figure


def _check_costs(
    sizes_bytes: Sequence[float],
    predicted: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    if not predicted:
        raise ValueError("predicted: expected the times of at least one algorithm, got none")
    _positive("sizes_bytes", [*sizes_bytes, 1], "a tensor has bytes")
    if list(sizes_bytes) != sorted(set(sizes_bytes)):
        raise ValueError(f"sizes_bytes: expected sizes from small to large, got {list(sizes_bytes)}")
    for name, seconds in predicted.items():
        _same_length("sizes_bytes", sizes_bytes, f"predicted[{name!r}]", seconds)
        _positive(f"predicted[{name!r}]", seconds, "one rank alone sends nothing; ask for two or more")
    for name, points in measured.items():
        if name not in predicted:
            raise ValueError(
                f"measured[{name!r}] has no prediction beside it, only {list(predicted)} have one"
            )
        if not len(points):
            raise ValueError(f"measured[{name!r}]: expected at least one (bytes, seconds), got none")


def crossovers(
    sizes_bytes: Sequence[float], seconds: Mapping[str, Sequence[float]]
) -> list[tuple[float, str, str]]:
    """Who is fastest from which size on: (size, who was fastest below, who is from here). The first entry is
    the smallest size.

    Between two sizes the lines are taken as straight in the log-log plane. Of equals, the first named wins.
    """
    names = list(seconds)
    best = [min(names, key=lambda name: seconds[name][i]) for i in range(len(sizes_bytes))]
    changes = [(float(sizes_bytes[0]), best[0], best[0])]
    for i in range(1, len(sizes_bytes)):
        old, new = best[i - 1], best[i]
        if old != new:
            left = np.log(seconds[new][i - 1] / seconds[old][i - 1])  # > 0: old is faster here
            right = np.log(seconds[new][i] / seconds[old][i])
            share = left / (left - right)
            size = np.exp(np.log(sizes_bytes[i - 1]) * (1 - share) + np.log(sizes_bytes[i]) * share)
            changes.append((float(size), old, new))
    return changes


def _with_equals(
    sizes_bytes: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    changes: list[tuple[float, str, str]],
    number: int,
) -> list[str]:
    """Who is fastest from change `number` to the next one, with those that are just as fast all the way."""
    start, _, name = changes[number]
    stop = changes[number + 1][0] if number + 1 < len(changes) else math.inf
    rounded = 1 + 1e-9  # a crossover may lie on a size
    inside = [i for i, size in enumerate(sizes_bytes) if start <= size * rounded < stop]
    best = [seconds[name][i] for i in inside]
    return [other for other in seconds if np.allclose([seconds[other][i] for i in inside], best, 1e-9, 0)]


def _who_wins(fastest: list[list[str]], starts: list[float], measured: bool) -> str:
    """fastest: the names, from each of the sizes `starts` on."""
    first, *later = [joined(names) for names in fastest]
    found = f"{'Predicted and measured' if measured else 'Predicted'}: {first} {'are' if len(fastest[0]) > 1 else 'is'}"
    if not later:
        return f"{found} fastest at every size shown"
    if len(later) == 1:
        return f"{found} fastest up to {format_bytes(starts[1])}, {later[0]} above"
    steps = [f"{name} from {format_bytes(size)}" for name, size in zip(later, starts[1:], strict=True)]
    return f"{found} fastest first, {', '.join(steps)}"


def _positive(name: str, values: Sequence[float], what_to_do: str) -> None:
    if min(values) <= 0:
        raise ValueError(f"{name} must be positive for a logarithmic axis, got {min(values)}: {what_to_do}")


def _same_length(name: str, values: Sequence, other: str, others: Sequence) -> None:
    if len(values) != len(others) or not len(values):
        raise ValueError(
            f"expected as many {name} as {other}, at least one; got {len(values)} and {len(others)}"
        )
