"""Predictions and what is said of them."""

from __future__ import annotations

import pytest

from course_lib.classroom.checks import predict, score


@pytest.fixture(autouse=True)
def forget():
    yield
    predict("x", None)


def said(guess, measured, unit="", **known):
    predict("x", guess)
    return repr(score("x", measured, unit, **known))


def test_what_is_written_down_is_repeated():
    assert repr(predict("x", 12_582_912)) == "x: your prediction is 12 582 912"
    assert repr(predict("x", 0.031_234_5)) == "x: your prediction is 0.03123"


@pytest.mark.parametrize("nothing", [None, ...])
def test_an_untouched_prediction_is_no_failure(nothing):
    predict("x", 3)
    assert repr(predict("x", nothing)) == "x: no prediction written down"
    assert repr(score("x", 12_582_912, "bytes")) == "x: measured 12 582 912 bytes; no prediction written down"
    assert score("x", 1).ratio is None
    assert "no prediction" in repr(score("a name never seen", 1))


@pytest.mark.parametrize(
    "guess, measured, verdict",
    [
        (12_582_912, 12_582_912, "exact"),
        (0.1 + 0.2, 0.3, "exact"),
        (100.5, 100, "within 1 %"),
        (96, 100, "within 5 %"),
        (109, 100, "within 10 %"),
        (85, 100, "within 20 %"),
        (37, 100, "too small by a factor of 2.7"),
        (310, 100, "too large by a factor of 3.1"),
        (-5, 5, "a different sign, or nothing where there is something"),
        (0, 5, "a different sign, or nothing where there is something"),
        (5, 0, "a different sign, or nothing where there is something"),
        (0, 0, "exact"),
        (100 * 1.048576, 100, "within 5 %: MB (10^6) and MiB (2^20) mixed up?"),
        (-5, -13, "too small by a factor of 2.6"),
        (float("nan"), 1, "no comparison: one of them is not a finite number"),
        (1, float("nan"), "no comparison: one of them is not a finite number"),
    ],
)
def test_in_words(guess, measured, verdict):
    assert said(guess, measured).split(": ", 2)[2] == verdict


@pytest.mark.parametrize(
    "guess, measured, known, hint",
    [
        (25, 100, {"unit": "bytes"}, "too small by a factor of 4: elements and bytes mixed up?"),
        (
            50,
            100,
            {"unit": "bytes", "itemsize": 2},
            "too small by a factor of 2: elements and bytes or one way and both ways mixed up?",
        ),
        (800, 100, {"unit": "bytes"}, "too large by a factor of 8: bits and bytes mixed up?"),
        (800, 100, {"unit": "messages"}, "too large by a factor of 8"),
        (
            *(3_145_728, 12_582_912, {"unit": "bytes", "world_size": 4}),
            "too small by a factor of 4: elements and bytes or one rank and all N ranks mixed up?",
        ),
        (200, 100, {}, "too large by a factor of 2: one way and both ways mixed up?"),
        (300, 100, {"world_size": 3}, "too large by a factor of 3: one rank and all N ranks mixed up?"),
        (20, 100, {"world_size": 6}, "too small by a factor of 5: one step and N-1 steps mixed up?"),
        (60, 10, {"world_size": 4}, "too large by a factor of 6: one step and 2*(N-1) steps mixed up?"),
        (150, 100, {"world_size": 3}, "too large by a factor of 1.5: N and N-1 mixed up?"),
        (1e5, 100, {"unit": "s"}, "too large by a factor of 1000: units (kilo) mixed up?"),
    ],
)
def test_known_factors_are_named(guess, measured, known, hint):
    assert said(guess, measured, **known).endswith(f": {hint}")


def test_the_measured_value_keeps_its_unit_and_the_ratio_is_kept():
    assert said(3, 4, "messages") == "x: you predicted 3, measured 4 messages: too small by a factor of 1.33"
    predict("x", 3)
    assert score("x", 4).ratio == 0.75
    assert "within 5 %" in said(0.0102, 0.01, "s")


def test_only_bytes_can_be_mixed_up_with_mebibytes():
    assert said(1.048576, 1, "s").endswith("within 5 %")
    assert said(104.8576, 100, "MB").endswith("mixed up?")


@pytest.mark.parametrize("value", ["many", True, [1], 1j])
def test_only_numbers(value):
    with pytest.raises(TypeError, match="value: expected a number, or None"):
        predict("x", value)
    with pytest.raises(TypeError, match="measured: expected a number"):
        score("x", value)


def test_values_that_are_not_finite_do_not_break_a_notebook():
    assert "nan" in said(float("nan"), 1.0)
    assert "inf" in said(float("inf"), 1.0)
