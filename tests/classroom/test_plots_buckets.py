"""The order in which gradients become ready: what is drawn, and what the title says."""

from __future__ import annotations

import pytest

from course_lib.classroom.plots import plot_ready_order

NAMES = ["first", "second", "third"]


def test_a_square_for_each_gradient_in_its_place_and_a_line_for_each_bucket() -> None:
    figure = plot_ready_order(NAMES, ["third", None, "second", "first", None])
    axes = figure.axes[0]
    squares = [(round(patch.get_x() + 0.45), round(patch.get_y() + 0.4)) for patch in axes.patches]
    assert squares == [(1, 2), (2, 1), (3, 0)] and len(axes.lines) == 2
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "The last layer's gradients come first: 1 of 2 buckets leave while backward still runs"
    figure.draw_without_rendering()


def test_a_model_that_is_run_backwards() -> None:
    assert "The first layer's gradients come first: 0 of 1" in plot_ready_order(
        NAMES, ["first", "second", "third", None]
    ).get_suptitle().replace("\n", " ")


@pytest.mark.parametrize(("events", "words"), [([None], "at least one gradient"), (["head"], "got 'head'")])
def test_events_that_are_none(events: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plot_ready_order(NAMES, events)
