"""The figure of times on limited links: what its title claims is computed from what it draws."""

from __future__ import annotations

import dataclasses

import pytest

from course_lib.bench.links import OnLinks
from course_lib.classroom.plots import plot_on_links, to_png


def measured(how: str = "namespaces") -> list[OnLinks]:
    times = {("naive", 2): 0.33, ("naive", 8): 2.4, ("ring", 2): 0.17, ("ring", 8): 0.3, ("gloo", 8): 0.2}
    return [
        OnLinks(name, n, 8_000_000, None if name == "gloo" else 0.9 * seconds, seconds, 1, 1.0, how, True)
        for (name, n), seconds in times.items()
    ]


def test_the_title_holds_the_server_against_the_ring() -> None:
    figure = plot_on_links(measured())
    assert figure.get_suptitle() == "On 8 hosts naive takes 8.0 times as long as ring"
    (axes,) = figure.axes
    assert axes.get_xlabel() == "hosts N, one rank on each" and "seconds" in axes.get_ylabel()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "naive, predicted" in labels and "gloo, measured" in labels and "gloo, predicted" not in labels
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert lines["ring, measured"] == [0.17, 0.3] and lines["ring, predicted"] == pytest.approx([0.153, 0.27])
    assert to_png(figure).startswith(b"\x89PNG")


def test_pacing_in_software_is_said_in_the_title() -> None:
    assert plot_on_links(measured("paced")).get_suptitle().endswith("(paced in software)")


def test_one_algorithm_alone_and_a_ring_that_is_slowest_are_not_held_against_themselves() -> None:
    naive, ring = measured()[0], measured()[2]  # of 2 hosts
    assert plot_on_links([naive]).get_suptitle() == "On 2 hosts naive takes 330\N{NO-BREAK SPACE}ms"
    slow = dataclasses.replace(ring, measured_s=0.66)
    assert plot_on_links([naive, slow]).get_suptitle() == "On 2 hosts ring takes 2.0 times as long as naive"


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="at least one measurement"):
        plot_on_links([])
