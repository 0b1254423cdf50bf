"""Figures of what communication costs: the alpha-beta line, predicted times, bytes rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_bytes, format_seconds


class Traffic(Protocol):
    """What is read of a rank's `Ledger`: its totals."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


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
    for name, values in (
        ("sizes_bytes", sizes_bytes),
        ("alpha_s", [alpha_s]),
        ("bytes_per_s", [bytes_per_s]),
    ):
        if min(values) <= 0:
            raise ValueError(
                f"{name} must be positive for a logarithmic axis, got {min(values)}: measure again"
            )
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
    """Predicted time of each algorithm over the tensor's size (lines), measured times (points), who wins
    where.

    sizes_bytes: increasing. predicted: name -> seconds, one for each size. measured: name -> (bytes, seconds)
    of each measurement, for names in predicted. A crossover is where the fastest prediction changes; it is
    marked and named in the title.
    """
    figure = style.new_figure(8.2, 4.8)
    axes = figure.add_subplot()
    for index, (name, seconds) in enumerate(predicted.items()):
        _same_length("sizes_bytes", sizes_bytes, f"predicted[{name!r}]", seconds)
        look = style.series_style(name, index)
        axes.plot(
            sizes_bytes, seconds, color=look["color"], linestyle=look["linestyle"], label=f"{name}, predicted"
        )
    for name, points in (measured or {}).items():
        if name not in predicted:
            raise ValueError(
                f"measured[{name!r}] has no prediction beside it, only {list(predicted)} have one"
            )
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
    style.heading(figure, title or _who_wins(winners, bool(measured)))
    return figure


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


def _who_wins(changes: list[tuple[float, str, str]], measured: bool) -> str:
    source = "Predicted and measured" if measured else "Predicted"
    if len(changes) == 1:
        return f"{source}: {changes[0][2]} is fastest at every size shown"
    if len(changes) == 2:
        size, old, new = changes[1]
        return f"{source}: {old} is fastest up to {format_bytes(size)}, {new} above"
    steps = ", ".join(f"{new} from {format_bytes(size)}" for size, _, new in changes[1:])
    return f"{source}: {changes[0][2]} is fastest first, {steps}"


@style.styled
def plot_bytes_per_rank(
    traffic: Mapping[str, Sequence[Traffic | tuple[int, int]]], *, title: str | None = None
) -> Figure:
    """Bytes each rank sent and received, one panel for each algorithm, all on one scale.

    traffic: name -> the ranks' ledgers (`results.ledger`), or (bytes sent, bytes received) of each rank.
    """
    pairs = {name: [_pair(rank) for rank in ranks] for name, ranks in traffic.items()}
    figure = style.new_figure(max(8.2, 3.1 * len(pairs)), 4.4)
    panels = figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
    for axes, (name, ranks) in zip(panels, pairs.items(), strict=True):
        _bars(axes, ranks)
        axes.set(title=f"{name}: up to {format_bytes(max(map(max, ranks)))}", xlabel="rank")
    panels[0].set_ylabel("traffic of one rank (bytes)")
    style.bytes_axis(panels[0].yaxis)
    keys = [Patch(facecolor=style.GREY, edgecolor=style.INK, label="sent (in the rank's colour)")]
    keys.append(Patch(facecolor="white", edgecolor=style.INK, hatch="///", label="received"))
    figure.legend(handles=keys, loc="outside lower right", ncols=2)
    style.heading(figure, title or _balance(pairs))
    return figure


def _bars(axes, ranks: Sequence[tuple[int, int]]) -> None:
    numbers = np.arange(len(ranks))
    for side, shift in ((0, -0.21), (1, 0.21)):
        colors = [style.rank_color(rank) if side == 0 else "white" for rank in range(len(ranks))]
        edges = [style.INK] * len(ranks)
        axes.bar(
            numbers + shift, [rank[side] for rank in ranks], 0.4, color=colors, edgecolor=edges,
            hatch=None if side == 0 else "///", label=("sent", "received")[side],
        )  # fmt: skip
    axes.set_xticks(numbers)
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)


def _balance(pairs: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    totals = {name: sum(sent for sent, _ in ranks) for name, ranks in pairs.items()}
    busiest = {name: max(map(sum, ranks)) for name, ranks in pairs.items()}
    most, least = max(busiest, key=busiest.__getitem__), min(busiest, key=busiest.__getitem__)
    if len(pairs) == 1 or not busiest[least]:
        return f"{most}: {format_bytes(totals[most])} sent by all ranks together"
    ratio = f"one rank of {most} carries {busiest[most] / busiest[least]:.3g} times what one of {least} does"
    if len(set(totals.values())) == 1:
        return f"Equal totals ({format_bytes(totals[most])}), but {ratio}"
    return ratio[0].upper() + ratio[1:]


def _pair(rank: Traffic | tuple[int, int]) -> tuple[int, int]:
    return rank if isinstance(rank, tuple) else (rank.bytes_sent, rank.bytes_received)


def _same_length(name: str, values: Sequence, other: str, others: Sequence) -> None:
    if len(values) != len(others) or not len(values):
        raise ValueError(
            f"expected as many {name} as {other}, at least one; got {len(values)} and {len(others)}"
        )
