"""The figures of data-parallel training: what their titles claim is computed from what they draw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.classroom.plots import (
    plot_flows,
    plot_server_load,
    plot_staleness,
    plot_training,
    rank_color,
    to_png,
)
from course_lib.parallel.data_parallel import DataParallel

LINK = {"size_bytes": 4_000_000, "link": "400 Mbit/s"}
SERVER = [(2, 0.16, 0.2), (4, 0.48, 0.5), (8, 1.12, 1.2)]


# --- the server's link


def test_one_kind_of_server_is_held_against_itself_on_fewer_hosts() -> None:
    figure = plot_server_load({"server": SERVER[::-1]}, **LINK)  # in any order
    assert figure.get_suptitle() == "The server chokes: a step takes 6.0 times as long on 8 hosts as on 2"
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert lines == {
        "server, predicted": pytest.approx((0.16, 0.48, 1.12)),
        "server, measured": pytest.approx((0.2, 0.5, 1.2)),
    }
    assert (
        "seconds" in axes.get_ylabel() and axes.get_title("left") == "4 MB of parameters, links of 400 Mbit/s"
    )
    assert to_png(figure).startswith(b"\x89PNG")


def test_two_kinds_are_held_against_each_other_and_pacing_is_said() -> None:
    steps = {"server": SERVER, "sharded server": [(2, 0.08, 0.1), (8, 0.14, 0.15)]}
    figure = plot_server_load(steps, **LINK, label="paced in software")
    assert figure.get_suptitle() == "On 8 hosts the server takes 8.0 times as long as the sharded server"
    assert figure.axes[0].get_title("left").endswith("paced in software")


@pytest.mark.parametrize(
    "steps, finding",
    [
        ({"server": SERVER[:1]}, "On 2 hosts a step of the server takes 200 ms"),
        ({"sharded server": [(2, 0.1, 0.1), (8, 0.1, 0.12)]},
         "A step of the sharded server takes 1.2 times as long on 8 hosts as on 2"),
        ({"sharded server": [(2, 0.1, 0.1)], "server": SERVER[:1]},
         "On 2 hosts the sharded server takes 0.5 times as long as the server"),
    ],
)  # fmt: skip
def test_a_server_is_not_held_against_itself_and_need_not_choke(steps: dict, finding: str) -> None:
    title = plot_server_load(steps, **LINK).get_suptitle()
    assert title.replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") == finding


@pytest.mark.parametrize("nothing", [{}, {"server": []}])
def test_no_measurement(nothing: dict) -> None:
    with pytest.raises(ValueError, match="at least one measurement for each name"):
        plot_server_load(nothing, **LINK)


# --- staleness


def test_staleness_of_each_worker() -> None:
    figure = plot_staleness([0, 1, 2, 9], [1, 2, 1, 2])
    assert figure.get_suptitle().replace("\n", " ") == (
        "An update is 3.0 updates behind its weights on average, worker 2's 5.0, at most 9"
    )
    left, right = figure.axes
    points = {line.get_label(): line for line in left.lines if line.get_label().startswith("worker")}
    assert points["worker 1"].get_xydata().tolist() == [[0, 0], [2, 2]]
    assert points["worker 2"].get_xydata().tolist() == [[1, 1], [3, 9]]
    assert points["worker 1"].get_color() == rank_color(1)
    assert sum(bar.get_width() for bar in right.patches) == 4  # the bars hold every update once
    assert to_png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [([], []), ([1], [1, 2])])
def test_staleness_and_workers_must_match(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="as many staleness as workers, at least one"):
        plot_staleness(*arguments)


# --- loss against time and samples


def run(seconds: float, loss: float) -> list[tuple[float, int, float]]:
    """Ten updates of 16 samples with that loss."""
    return [(seconds * (i + 1) / 10, 16 * (i + 1), loss) for i in range(10)]


@pytest.mark.parametrize(
    ("seconds", "loss", "finding"),
    [(1.0, 0.6, "2.0 times the samples per second of sync, but 3.0 times its loss over the last 32 samples"),
     (1.0, 0.1, "2.0 times the samples per second of sync, and 0.5 times its loss over the last 32 samples")],
)  # fmt: skip
def test_the_second_run_is_held_against_the_first(seconds: float, loss: float, finding: str) -> None:
    figure = plot_training({"sync": run(2.0, 0.2), "async": run(seconds, loss)}, smooth_samples=32)
    assert figure.get_suptitle().replace("\n", " ") == "Async: " + finding
    clock, samples = figure.axes
    assert "seconds" in clock.get_xlabel() and "samples" in samples.get_xlabel()
    assert samples.lines[0].get_xdata()[-1] == 160 and clock.lines[1].get_xdata()[-1] == seconds


def test_a_point_is_the_mean_of_its_window() -> None:
    updates = [(1.0, 16, 4.0), (2.0, 32, 2.0), (3.0, 48, 0.0), (4.0, 64, 1.0)]
    figure = plot_training({"one": updates}, smooth_samples=32, note="compute paced")
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[32, 3.0], [48, 1.0], [64, 0.5]]
    assert figure.get_suptitle() == "One ends at a loss of 0.50" and figure.get_supxlabel() == "compute paced"


def test_a_run_that_diverged_and_a_short_one() -> None:
    figure = plot_training({"sync": run(2.0, 0.2), "async": run(1.0, float("nan"))})
    assert figure.get_suptitle().replace("\n", " ") == (
        "Async: 2.0 times the samples per second of sync, and a loss of nan where that has 0.20, "
        "over the last 160 samples"
    )
    figure = plot_training({"sync": run(2.0, 0.2), "async": run(1.0, 0.4)})
    assert (
        figure.get_suptitle().replace("\n", " ").endswith("but 2.0 times its loss over the last 160 samples")
    )


def test_a_run_without_updates() -> None:
    with pytest.raises(ValueError, match="runs: expected at least one name"):
        plot_training({})
    with pytest.raises(ValueError, match=r"'sync'.*no updates"):
        plot_training({"sync": []})


# --- the ways of DataParallel


def recorded(num_devices: int):
    model = DataParallel(nn.Linear(100, 10), ["cpu"] * num_devices)
    with model.record() as flows:
        model(torch.ones(6, 100)).sum().backward()
    return flows


def test_the_flows_of_a_real_step() -> None:
    flows = recorded(3)
    figure = plot_flows(flows)
    (axes,) = figure.axes
    assert figure.get_suptitle().replace("\n", " ").endswith("device 0 is at one end of every copy")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["device 0", "device 1", "device 2"]
    spans = sum(event.lane == "compute" for event in flows.trace)
    assert len(axes.patches) == 2 * len(flows.moves) + spans  # a copy is drawn at both of its ends
    assert to_png(figure).startswith(b"\x89PNG")


def test_one_device_copies_nothing() -> None:
    assert plot_flows(recorded(1)).get_suptitle().startswith("Nothing is copied")


def test_nothing_recorded() -> None:
    model = DataParallel(nn.Linear(2, 1), ["cpu"])
    with model.record() as flows:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        plot_flows(flows)
