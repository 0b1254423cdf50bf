"""The figures of a recovery: what is drawn, and what the titles claim is computed from it."""

from __future__ import annotations

import pytest

from course_lib.classroom.plots import plot_loss_with_fault, plot_recovery, to_png

PARTS = [
    ("agent 0", 100.0, 101.5, "rendezvous"),
    ("rank 0", 101.5, 106.05, "training"),
    ("rank 1", 101.5, 106.0, "training"),
    ("agent 0", 106.1, 106.4, "rendezvous"),
    ("rank 0", 106.4, 108.5, "start"),
    ("rank 0", 108.5, 111.0, "training"),
    ("rank 1", 106.4, 108.6, "unpacking"),
    ("rank 1", 108.6, 111.0, "training"),
]
MARKS = [
    (108.5, "first step"),
    (106.0, "kill -9"),
    (106.1, "the agent notices"),
    (110.9, "a text that is long"),
]


def title(figure) -> str:
    return figure.get_suptitle().replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")


def test_a_timeline_has_a_row_for_each_process_and_a_bar_for_each_part() -> None:
    figure = plot_recovery(PARTS, MARKS)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["agent 0", "rank 0", "rank 1"]
    bars = {(round(bar.get_y() + bar.get_height() / 2), round(bar.get_x(), 3), round(bar.get_width(), 3))
            for bar in axes.patches}  # fmt: skip
    assert len(bars) == len(PARTS) and (0, 0.0, 1.5) in bars and (2, 8.6, 2.4) in bars
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "start",
        "rendezvous",
        "training",
        "unpacking",
    ]
    assert "time" in axes.get_xlabel() and to_png(figure).startswith(b"\x89PNG")


def test_marks_stand_where_they_happened_and_their_texts_keep_clear() -> None:
    figure = plot_recovery(PARTS, MARKS)
    (axes,) = figure.axes
    assert sorted(round(line.get_xdata()[0], 3) for line in axes.lines) == [6.0, 6.1, 8.5, 10.9]
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in axes.texts if t.get_text() in {text for _, text in MARKS}]
    assert len(boxes) == len(MARKS)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    assert all(box.x1 <= figure.bbox.x1 + 1 for box in boxes)


def test_the_title_says_how_long_nobody_trained() -> None:
    assert title(plot_recovery(PARTS, MARKS)) == "kill -9: nobody trains for 2.45 s"
    one_by_one = [("rank 0", at, at + 1.0, "training") for at in (0, 1, 2, 3, 7, 8)]
    assert title(plot_recovery(one_by_one, [(2.5, "killed")])) == "killed: nobody trains for 3 s"


def test_the_title_of_other_ends() -> None:
    steps = [("rank 0", 0.0, 5.0, "training"), ("rank 1", 0.0, 2.0, "training")]
    assert title(plot_recovery(steps, [(2.0, "killed")])) == "killed: training never pauses"
    again = [*steps, ("rank 1", 4.0, 6.0, "training")]
    assert title(plot_recovery(again, [(2.0, "killed")])) == "killed: training never pauses"
    waits = [*steps, ("rank 0", 5.0, 9.0, "waiting")]
    assert title(plot_recovery(waits, [(2.0, "killed")])) == "killed: training ends 3 s after it"
    assert title(plot_recovery(waits, [(5.0, "killed")])) == "killed: nobody trains after it"
    assert title(plot_recovery([("rank 0", 0.0, 5.0, "start")], [(2.0, "x")])) == "x: nobody trains after it"
    assert title(plot_recovery(steps)) == "2 processes, 5 s"
    assert title(plot_recovery(steps[:1])) == "1 process, 5 s"
    assert title(plot_recovery(steps, title="mine")) == "mine"


LOSSES = [2.0, 1.5, 1.2, 1.0, 0.9, 0.85]


def test_curves_that_are_the_same_and_the_lost_steps() -> None:
    figure = plot_loss_with_fault({"undisturbed": LOSSES, "killed": list(LOSSES)}, 4, 2)
    assert title(figure) == "killed: the same loss in all 6 steps, number for number"
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [LOSSES, LOSSES]
    assert axes.lines[2].get_xdata() == [4, 4]
    (span,) = axes.patches
    assert (span.get_x(), span.get_width()) == (2, 2)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["undisturbed", "killed", "2 steps lost, and trained again", "the fault, in step 4"]
    assert axes.get_xlabel() == "step" and axes.get_ylabel() == "loss"


def test_curves_that_differ_are_not_called_the_same() -> None:
    other = [*LOSSES[:4], 1.4, 0.85000001]
    figure = plot_loss_with_fault({"a": LOSSES, "b": other, "c": LOSSES[:5], "d": list(LOSSES)}, 4)
    assert title(figure) == (
        "b: other losses from step 4 on, by up to 0.5; c: 5 steps instead of 6; "
        "d: the same loss in all 6 steps, number for number"
    )
    assert len(figure.axes[0].patches) == 0  # nothing was lost
    nearly = [*LOSSES[:5], 0.85 + 1e-9]
    assert title(plot_loss_with_fault({"a": LOSSES, "b": nearly}, 4)).startswith(
        "b: other losses from step 5 on"
    )


def test_a_loss_that_is_not_a_number_is_the_same_in_both_and_one_odd_step_is_not_the_rest() -> None:
    diverged = [1.0, float("nan")]
    figure = plot_loss_with_fault({"a": diverged, "b": list(diverged)}, 1)
    assert title(figure) == "b: the same loss in all 2 steps, number for number"
    figure = plot_loss_with_fault({"a": [1.0, 1.0, 1.0], "b": [1.0, 3.0, 1.0]}, 1)
    assert title(figure) == "b: other losses in 1 of 3 steps, by up to 2"


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: plot_recovery([]), "parts: expected at least one"),
        (lambda: plot_recovery([("rank 0", 2.0, 1.0, "training")]), "start_s <= end_s"),
        (lambda: plot_loss_with_fault({"a": LOSSES}, 1), "losses: expected two curves"),
        (lambda: plot_loss_with_fault({"a": LOSSES, "b": []}, 1), "losses: expected two curves"),
        (
            lambda: plot_loss_with_fault({"a": LOSSES, "b": LOSSES}, 6),
            "fault_step: expected a step of all curves, 0 to 5",
        ),
        (
            lambda: plot_loss_with_fault({"a": LOSSES, "b": LOSSES}, 3, 4),
            "resumed_step: expected 0 to fault_step = 3",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, said) -> None:
    with pytest.raises(ValueError, match=said):
        call()
