"""The smallest picture of DDP: in which order gradients become ready in one backward, and when their buckets leave."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from course_lib.classroom.plots import style


@style.styled
def plot_ready_order(
    names: Sequence[str], events: Sequence[str | None], *, title: str | None = None
) -> Figure:
    """One backward: a square for each gradient that becomes ready, a line for each bucket that leaves.

    names: the trained parameters, in the model's order. events: in the order of time: the name of a parameter whose
    gradient is ready, or None when the all-reduce of a bucket starts. Raises ValueError for a name that is not among
    `names`.
    """
    ready = [event for event in events if event is not None]
    if unknown := sorted(set(ready) - set(names)):
        raise ValueError(f"events: expected None, or one of names, got {unknown[0]!r}")
    if not ready:
        raise ValueError("events: expected at least one gradient that becomes ready")
    figure = style.new_figure(8.6, 1.6 + 0.28 * len(names))
    axes = figure.add_subplot()
    place, num_left = 0, 0
    for event in events:
        if event is None:
            axes.axvline(place + 0.5, color=style.RANK_COLORS[6], linestyle="--", linewidth=1.5)
            axes.text(place + 0.45, -0.65, f"bucket {num_left}\nleaves", ha="right", va="bottom", fontsize=9)
            num_left += 1
        else:
            place += 1
            axes.barh(
                names.index(event),
                0.9,
                left=place - 0.45,
                height=0.8,
                color=style.RANK_COLORS[1],
                edgecolor=style.INK,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(1, place + 1))
    axes.set(
        xlim=(0.4, place + 0.7),
        ylim=(len(names) - 0.4, -0.6),
        xlabel="order in which gradients become ready in backward",
    )
    axes.set_ylabel("parameters, as in the model")
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)
    style.heading(figure, title or _finding(names, events))
    return figure


def _finding(names: Sequence[str], events: Sequence[str | None]) -> str:
    ready = [event for event in events if event is not None]
    last = max(place for place, event in enumerate(events) if event is not None)
    early, num_buckets = list(events[:last]).count(None), list(events).count(None)
    end = "last" if names.index(ready[0]) > names.index(ready[-1]) else "first"
    return f"The {end} layer's gradients come first: {early} of {num_buckets} buckets leave while backward still runs"
