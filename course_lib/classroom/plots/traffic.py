"""The figure of what each rank sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.classroom.plots import style
from course_lib.classroom.tables import format_bytes


class Traffic(Protocol):
    """What is read of a rank's `Ledger`: its totals."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


@style.styled
def plot_bytes_per_rank(
    traffic: Mapping[str, Sequence[Traffic | tuple[int, int]]], *, title: str | None = None
) -> Figure:
    """Bytes each rank sent and received, one panel for each algorithm, all on one scale.

    traffic: name -> the ranks' ledgers (`results.ledger`), or (bytes sent, bytes received) of each rank. Raises
    ValueError without algorithms or ranks.
    """
    if not traffic or not all(map(len, traffic.values())):
        raise ValueError(
            "traffic: expected at least one algorithm, and for each the bytes of at least one rank"
        )
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
    times = f"{busiest[most] / busiest[least]:.3g}"
    if times == "1":
        return f"No difference: the busiest rank of each carries {format_bytes(busiest[most])}"
    ratio = f"one rank of {most} carries {times} times what one of {least} does"
    if len(set(totals.values())) == 1:
        return f"Equal totals ({format_bytes(totals[most])}), but {ratio}"
    return ratio[0].upper() + ratio[1:]


def _pair(rank: Traffic | tuple[int, int]) -> tuple[int, int]:
    return (rank[0], rank[1]) if isinstance(rank, Sequence) else (rank.bytes_sent, rank.bytes_received)
