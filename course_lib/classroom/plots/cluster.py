"""A drawing of the ranks of a run: which node, which device, which process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from course_lib.classroom.checks.verdict import plural
from course_lib.classroom.plots import style

_CARD_WIDTH, _CARD_HEIGHT, _GAP = 2.5, 0.78, 0.16
_NODE_GAP = 0.5


@style.styled
def draw_cluster(places: Sequence[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Nodes as boxes, in them a card for each rank.

    places: one row for each rank with "rank", "node", "local_rank" and, if known, "device", "pid", "address"
    (of the node): what the ranks of a run returned. Raises ValueError for a row without the first three, or a
    rank that comes twice.
    """
    nodes = _by_node(places)
    tallest = max(len(rows) for rows in nodes.values())
    node_width, height = _CARD_WIDTH + 0.4, tallest * (_CARD_HEIGHT + _GAP) + 0.8
    width = len(nodes) * (node_width + _NODE_GAP) - _NODE_GAP
    figure = style.new_figure(max(6.0, width * 0.95), (height + 1.5) * 0.95)
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, width + 0.1), ylim=(-height - 0.1, 0.75), aspect="equal")
    axes.axis("off")
    for column, (node, rows) in enumerate(nodes.items()):
        left = column * (node_width + _NODE_GAP)
        _draw_node(axes, left, height, node_width, node, rows)
    _draw_network(axes, [i * (node_width + _NODE_GAP) + node_width / 2 for i in range(len(nodes))])
    style.heading(figure, title or _title(nodes))
    figure.supxlabel("\n".join(_notes(places, nodes)), fontsize=11, x=0.01, ha="left", color=style.INK)
    return figure


def _by_node(places: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    nodes: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    seen: set[int] = set()
    for place in places:
        lacking = {"rank", "node", "local_rank"} - set(place)
        if lacking:
            raise ValueError(
                f"each row needs rank, node and local_rank; {dict(place)} lacks {sorted(lacking)}"
            )
        if place["rank"] in seen:
            raise ValueError(f"rank {place['rank']} comes twice: expected one row for each rank")
        seen.add(place["rank"])
        nodes[place["node"]].append(place)
    if not nodes:
        raise ValueError("places is empty: expected one row for each rank")
    return {node: sorted(nodes[node], key=lambda row: row["local_rank"]) for node in sorted(nodes)}


def _draw_node(
    axes, left: float, height: float, width: float, node: int, rows: Sequence[Mapping[str, Any]]
) -> None:
    axes.add_patch(_box(left, -height, width, height, style.LIGHT, style.GREY))
    axes.text(left + 0.2, -0.2, f"node {node}", fontsize=13, fontweight="bold", va="top")
    address = rows[0].get("address")
    if address:
        axes.text(left + width - 0.2, -0.24, str(address), fontsize=10, va="top", ha="right", color=style.INK)
    for number, row in enumerate(rows):
        top = -0.75 - number * (_CARD_HEIGHT + _GAP)
        _draw_card(axes, left + 0.2, top, row)


def _draw_card(axes, left: float, top: float, row: Mapping[str, Any]) -> None:
    color = style.rank_color(row["rank"])
    axes.add_patch(_box(left, top - _CARD_HEIGHT, _CARD_WIDTH, _CARD_HEIGHT, "white", style.INK))
    badge = _box(left, top - _CARD_HEIGHT, 0.95, _CARD_HEIGHT, color, style.INK)
    axes.add_patch(badge)
    middle = top - _CARD_HEIGHT / 2
    ink = style.text_on(color)
    axes.text(left + 0.475, middle + 0.2, "rank", fontsize=9, ha="center", va="center", color=ink)
    axes.text(
        left + 0.475,
        middle - 0.1,
        str(row["rank"]),
        fontsize=17,
        ha="center",
        va="center",
        color=ink,
        fontweight="bold",
    )
    lines = [f"local_rank {row['local_rank']}"]
    lines += [
        f"{name}{row[key]}" for key, name in (("device", "on "), ("pid", "pid ")) if row.get(key) is not None
    ]
    axes.text(left + 1.05, middle, "\n".join(lines), fontsize=9.5, va="center", linespacing=1.25)


def _draw_network(axes, centres: Sequence[float]) -> None:
    if len(centres) < 2:
        return
    axes.plot([centres[0], centres[-1]], [0.35, 0.35], color=style.INK, linewidth=2.5, solid_capstyle="round")
    for centre in centres:
        axes.plot([centre, centre], [0.0, 0.35], color=style.INK, linewidth=2.5, solid_capstyle="round")
    axes.text(centres[0], 0.45, "network", fontsize=10, va="bottom", color=style.INK)


def _box(left: float, bottom: float, width: float, height: float, face: str, edge: str) -> FancyBboxPatch:
    rounding = "round,pad=0,rounding_size=0.08"
    return FancyBboxPatch(
        (left, bottom), width, height, boxstyle=rounding, facecolor=face, edgecolor=edge, linewidth=1
    )


def _title(nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    counts = [len(rows) for rows in nodes.values()]
    if len(set(counts)) == 1:
        alone = all(row.get("device") for rows in nodes.values() for row in rows) and not _shares_devices(
            nodes
        )
        each = plural(counts[0], "device") if alone else f"{plural(counts[0], 'rank')} each"
        return f"{plural(len(nodes), 'node')} × {each} = {plural(sum(counts), 'rank')}"
    return f"{' + '.join(map(str, counts))} ranks on {len(nodes)} nodes = {sum(counts)} ranks"


def _shares_devices(nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether two ranks of one node name the same device."""
    for rows in nodes.values():
        devices = [row["device"] for row in rows if row.get("device") is not None]
        if len(set(devices)) < len(devices):
            return True
    return False


def _notes(
    places: Sequence[Mapping[str, Any]], nodes: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[str]:
    """What the rows themselves show: the numbering, and where the processes really ran."""
    notes = []
    sizes = {len(rows) for rows in nodes.values()}
    if len(nodes) > 1 and len(sizes) == 1:  # on 2 + 1 ranks a formula may hold by chance
        (per_node,) = sizes
        if all(row["rank"] == row["node"] * per_node + row["local_rank"] for row in places):
            notes.append(f"rank = node × {per_node} + local_rank")
    if _shares_devices(nodes):
        notes.append("Ranks of a node share a device here: a rank is a process, not a device.")
    addresses = {row.get("address") for row in places}
    if len(nodes) > 1 and len(addresses) == 1 and None not in addresses:
        notes.append("All have one address: the processes are real, the nodes are names on one machine.")
    return notes
