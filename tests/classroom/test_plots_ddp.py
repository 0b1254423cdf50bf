"""DDP's figures: what their titles claim is computed from what they draw."""

from __future__ import annotations

import pytest

from course_lib.classroom.plots import plot_bucket_sizes, plot_overlap, to_png
from course_lib.comm.trace import Event


def step(wait_s: float, at_s: float = 5.0) -> list[Event]:
    return [
        Event(0, "forward", at_s, at_s + 1),
        Event(0, "backward", at_s + 1, at_s + 3 + wait_s),
        Event(0, "wait for gradients", at_s + 3, at_s + 3 + wait_s, "wait"),
        Event(0, "all_reduce", at_s + 2, at_s + 3 + wait_s, "comm"),
        Event(0, "broadcast", at_s, at_s + 9, "comm"),  # not drawn
        Event(0, "update", at_s + 3 + wait_s, at_s + 3.5 + wait_s),
    ]


def title(figure) -> str:
    return figure.get_suptitle().replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")


def test_steps_begin_together_and_the_title_compares_their_ends() -> None:
    figure = plot_overlap({"flat": step(2.0), "buckets": step(0.5, at_s=70.0)})
    assert title(figure) == "A step takes 4 s with buckets, 5.5 s with flat"
    (axes,) = figure.axes
    bars = [(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in axes.patches]
    assert len(bars) == 10 and bars.count((0.0, 1.0)) == 2 and "time" in axes.get_xlabel()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["flat", "buckets"]
    assert to_png(figure).startswith(b"\x89PNG")


def test_one_step_and_equal_steps_keep_their_unit() -> None:
    one = [Event(0, "forward", 1.0, 1.02)]
    assert title(plot_overlap({"flat": one})) == "A step takes 20 ms"
    assert title(plot_overlap({"flat": one, "buckets": one})) == "A step takes 20 ms either way"


def test_the_best_bucket_is_named() -> None:
    figure = plot_bucket_sizes([(25, [0.9]), (1, [0.4, 0.5, 0.6]), (0.25, [0.7])], flat_s=1.0)
    assert title(figure) == "Buckets of 1 MiB are best here: 500 ms for a step, the largest takes 900 ms"
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [0.25, 1, 25] and "MiB" in axes.get_xlabel()


def test_sizes_that_differ_less_than_their_steps_do_equally_well() -> None:
    figure = plot_bucket_sizes([(25, [0.9]), (1, [0.4, 0.5, 0.8]), (4, [0.6]), (0.25, [0.7])])
    assert (
        title(figure)
        == "Buckets of 0.25, 1 and 4 MiB do about equally well here: a step takes 500 ms at best"
    )


def test_buckets_that_are_slower_than_a_flat_buffer_are_not_called_best() -> None:
    figure = plot_bucket_sizes([(1, [0.5]), (25, [0.9])], flat_s=0.4)
    assert title(figure) == "One flat buffer is best here: 400 ms for a step, buckets of 1 MiB take 500 ms"


def test_links_that_are_paced_in_software_are_said_to_be() -> None:
    figures = plot_overlap({"flat": step(2.0)}, label="paced"), plot_bucket_sizes([(1, [0.5])], label="paced")
    assert all(figure.get_suptitle().endswith("(paced)") for figure in figures)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="at least one name with events"):
        plot_overlap({"flat": []})
    with pytest.raises(
        ValueError, match=r"steps\['flat'\]: expected events named forward, .*; got broadcast"
    ):
        plot_overlap({"flat": [Event(0, "broadcast", 0.0, 1.0)]})
    with pytest.raises(ValueError, match="at least one"):
        plot_bucket_sizes([])
    with pytest.raises(ValueError, match="with a time in each"):
        plot_bucket_sizes([(1, [])])
