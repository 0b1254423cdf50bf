"""Figures: what they say, in which colours, and that no text lies on another."""

from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from course_lib.classroom.plots import (
    RANK_COLORS,
    crossovers,
    draw_cluster,
    plot_alpha_beta,
    plot_bytes_per_rank,
    plot_costs,
    plot_ring_step,
    plot_ring_steps,
    plot_trace,
    rank_color,
    rank_hatch,
    style,
    to_png,
)
from course_lib.classroom.replay import Replay, replay_ring
from course_lib.comm.ledger import Ledger, Row
from course_lib.comm.trace import Event, Trace

SIZES = [8 * 8**k for k in range(9)]


def heading(figure: Figure) -> str:
    return figure.get_suptitle().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def drawn_texts(figure: Figure) -> list[matplotlib.text.Text]:
    """Every text that is really drawn: no labels of ticks out of range, none of axes that are switched off."""
    found: dict[int, matplotlib.text.Text] = {}
    draw = matplotlib.text.Text.draw

    def note(text, *args, **kwargs):
        if text.get_visible() and text.get_text().strip():
            found[id(text)] = text
        return draw(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.text.Text, "draw", note)
        FigureCanvasAgg(figure).draw()
    return list(found.values())


def assert_readable(figure: Figure) -> None:
    """Every text lies inside the figure and on no other text, and none is smaller than 8 points."""
    found = drawn_texts(figure)
    assert len(found) >= 3
    boxes = [(text.get_text(), text.get_window_extent().padded(-1.0)) for text in found]
    whole = figure.bbox.padded(1)
    for text, (name, box) in zip(found, boxes, strict=True):
        assert text.get_fontsize() >= 8, f"{name!r} is too small"
        assert whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1), f"{name!r} is cut off"
    for (name, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), f"{name!r} lies on {other!r}"


def ring(chunk_bytes: list[int]) -> Replay:
    size = len(chunk_bytes)
    ledgers = []
    for rank in range(size):
        sends = [(rank - 1 - s) % size for s in range(size - 1)] + [
            (rank - s) % size for s in range(size - 1)
        ]
        rows = [
            Row("exchange", (rank + 1) % size, chunk_bytes[c], chunk_bytes[c - 1], 1, 0.0, 0.0) for c in sends
        ]
        ledgers.append(Ledger(rows))
    return replay_ring(ledgers, chunk_bytes)


def places(nodes: list[int], **more) -> list[dict]:
    rows = [{"node": node, "local_rank": local} for node, count in enumerate(nodes) for local in range(count)]
    return [{"rank": rank, **row, **more} for rank, row in enumerate(rows)]


def costs() -> dict[str, list[float]]:
    """The formulas for 8 ranks, alpha 40 µs, 2 GB/s."""
    alpha, rate, n = 40e-6, 2e9, 8
    return {
        "naive": [2 * (n - 1) * (alpha + size / rate) for size in SIZES],
        "tree": [2 * np.log2(n) * (alpha + size / rate) for size in SIZES],
        "ring": [2 * (n - 1) * (alpha + size / n / rate) for size in SIZES],
    }


def trace() -> Trace:
    events = []
    for rank in range(3):
        events.append(Event(rank, "forward", 1.0, 1.4, "compute"))
        events.append(Event(rank, "backward", 1.4, 2.0, "compute"))
        events.append(Event(rank, "all_reduce", 1.7, 2.2, "collective"))
        events += [Event(rank, "exchange", 1.7, 1.95, "comm"), Event(rank, "exchange", 1.9, 2.2, "comm")]
    return Trace(events)


FIGURES = {
    "cluster of 12": lambda: draw_cluster(
        places([4, 4, 4], device="cpu", pid=1234567, address="192.168.100.101")
    ),
    "cluster of 2 + 1": lambda: draw_cluster(places([2, 1])),
    "cluster of 8 in one": lambda: draw_cluster(places([8], device="cuda:0")),
    "alpha beta": lambda: plot_alpha_beta(SIZES, [40e-6 + n / 2e9 for n in SIZES], 40e-6, 2e9),
    "alpha beta, slow": lambda: plot_alpha_beta([1e5, 1e6], [9e-3, 81e-3], 1e-3, 12.5e6),
    "costs": lambda: plot_costs(SIZES, costs()),
    "costs, measured": lambda: plot_costs(SIZES, costs(), {"ring": [(8, 1e-3), (4096, 2e-3)]}),
    "bytes": lambda: plot_bytes_per_rank(
        {"server": [(9000, 9000), *[(3000, 3000)] * 3], "ring": [(4500, 4500)] * 4}
    ),
    "bytes of 8": lambda: plot_bytes_per_rank(
        {name: [(10**7, 10**7)] * 8 for name in ("naive", "tree", "ring")}
    ),
    "trace": lambda: plot_trace(trace()),
    **{f"ring of {n}": (lambda n=n: plot_ring_steps(ring([4] * n))) for n in (2, 3, 4, 5, 8)},
    "uneven ring": lambda: plot_ring_steps(ring([12, 12, 8, 8])),
    **{f"step 1 of {n}": (lambda n=n: plot_ring_step(ring([400_000] * n), 1)) for n in (2, 3, 4, 5, 8)},
    "start": lambda: plot_ring_step(ring([12] * 4), 0),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_is_readable(name: str):
    assert_readable(FIGURES[name]())


def test_the_reader_finds_text_on_text():
    figure = style.new_figure(5, 4)
    axes = figure.add_subplot(title="title", xlabel="x", ylabel="y")
    axes.text(0.5, 0.5, "one")
    axes.text(0.52, 0.5, "other")
    with pytest.raises(AssertionError, match="'one' lies on 'other'"):
        assert_readable(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_picture_of_modest_size(name: str):
    png = FIGURES[name]()._repr_png_()
    assert png.startswith(b"\x89PNG") and len(png) < 250_000


def test_figures_leave_the_readers_settings_alone():
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30}):
        figure = plot_costs(SIZES, costs())
        assert matplotlib.rcParams["font.size"] == 30
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert dict(matplotlib.rcParams) == before


# --- colours


def lightness(rgb: np.ndarray) -> float:
    """L* of linear RGB, 0 to 100."""
    y = float(rgb @ np.array([0.2126, 0.7152, 0.0722]))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = matrix @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


BLINDNESS = {  # G. Machado, M. Oliveira, L. Fernandes (2009), full severity
    "none": np.eye(3),
    "red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def test_rank_colors_differ_in_grey():
    levels = sorted(lightness(linear(color)) for color in RANK_COLORS)
    assert min(np.diff(levels)) > 7
    shades = [lightness(linear(color)) for color in RANK_COLORS]
    assert min(abs(a - b) for a, b in pairwise(shades)) > 25  # neighbours differ most


@pytest.mark.parametrize("kind", BLINDNESS)
def test_rank_colors_differ_for_every_eye(kind: str):
    seen = [lab(BLINDNESS[kind] @ linear(color)) for color in RANK_COLORS]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 18


@pytest.mark.parametrize("color", [*RANK_COLORS, style.GREY, style.LIGHT, "white"])
def test_text_on_a_color_has_contrast(color: str):
    lighter, darker = sorted([style.luminance(color), style.luminance(style.text_on(color))], reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.3  # WCAG asks 4.5 of small text, 3 of large


def test_color_and_hatch_name_a_rank():
    looks = [(rank_color(rank), rank_hatch(rank)) for rank in range(64)]
    assert len(set(looks)) == 64 and looks[3] == (RANK_COLORS[3], rank_hatch(3))


def test_an_algorithm_keeps_its_look():
    assert (
        style.series_style("ring")
        == style.series_style("ring, 4 ranks")
        == style.series_style("ring_all_reduce")
    )
    looks = [style.series_style(name) for name in ("ring", "tree", "naive", "hierarchical", "torch")]
    for key in ("color", "marker", "linestyle"):
        assert len({str(look[key]) for look in looks}) == len(looks)


# --- each figure


def test_the_cluster_shows_every_rank_once():
    figure = draw_cluster(places([4, 4, 4], device="cpu", pid=77, address="127.0.0.1"))
    words = texts(figure)
    assert heading(figure) == "3 nodes × 4 ranks each = 12 ranks"
    assert [word for word in words if word.isdigit()] == [str(rank) for rank in range(12)]
    assert sum("local_rank 2\non cpu\npid 77" in word for word in words) == 3
    assert [word for word in words if word.startswith("node ")] == ["node 0", "node 1", "node 2"]
    (notes,) = [word for word in words if word.startswith("rank = ")]
    assert "rank = node × 4 + local_rank" in notes and "not a device" in notes and "one machine" in notes
    boxes = figure.findobj(FancyBboxPatch)
    assert len(boxes) == 3 + 2 * 12


def test_a_cluster_with_a_device_for_each_rank_says_devices():
    rows = [
        {**row, "device": f"cuda:{row['local_rank']}", "address": f"10.0.0.{row['node']}"}
        for row in places([4, 4, 4])
    ]
    figure = draw_cluster(rows)
    assert heading(figure) == "3 nodes × 4 devices = 12 ranks"
    assert not [word for word in texts(figure) if "one machine" in word or "not a device" in word]


def test_a_formula_that_holds_by_chance_is_not_shown():
    for sizes in ([2, 1], [1, 2]):
        assert not [word for word in texts(draw_cluster(places(sizes))) if word.startswith("rank = ")]


def test_a_cluster_of_unknown_devices_claims_none():
    assert heading(draw_cluster(places([2, 2]))) == "2 nodes × 2 ranks each = 4 ranks"
    one = draw_cluster([{"rank": 0, "node": 0, "local_rank": 3, "device": "cuda:3"}])
    assert heading(one) == "1 node × 1 device = 1 rank"
    assert_readable(one)  # its card is inside the node, though it is the only one
    half = [{**row, "address": "10.0.0.1"} if row["node"] == 0 else row for row in places([1, 1])]
    assert not [word for word in texts(draw_cluster(half)) if "one machine" in word]


def test_an_uneven_cluster():
    assert heading(draw_cluster(places([2, 1]))) == "2 + 1 ranks on 2 nodes = 3 ranks"
    assert heading(draw_cluster(places([2]), title="mine")) == "mine"


def test_a_wrong_place_is_named():
    with pytest.raises(ValueError, match=r"lacks \['local_rank', 'node'\]"):
        draw_cluster([{"rank": 0}])
    with pytest.raises(ValueError, match="rank 0 comes twice"):
        draw_cluster([*places([1]), *places([1])])
    with pytest.raises(ValueError, match="empty"):
        draw_cluster([])


def test_alpha_beta_marks_the_half_way_size():
    figure = plot_alpha_beta(SIZES, [50e-6] * len(SIZES), 40e-6, 2e9, label="measured ping-pong")
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (
        axes.get_xlabel() == "message size n (bytes)" and axes.get_ylabel() == "time of one message (seconds)"
    )
    assert "n½ = 80 kB" in texts(figure) and heading(figure).startswith(
        "Up to 80 kB a message costs mostly its start-up"
    )
    points = next(line for line in axes.lines if line.get_label() == "measured ping-pong")
    assert list(points.get_xdata()) == SIZES and list(points.get_ydata()) == [50e-6] * len(SIZES)
    fit = next(line for line in axes.lines if "α = 40 µs" in str(line.get_label()))
    x, y = fit.get_data()
    np.testing.assert_allclose(y, 40e-6 + np.asarray(x) / 2e9)
    mark = next(line for line in axes.lines if line.get_marker() == "D")
    assert mark.get_xdata()[0] == pytest.approx(80e3) and mark.get_ydata()[0] == pytest.approx(80e-6)


def test_values_must_fit_the_sizes():
    with pytest.raises(ValueError, match="as many sizes_bytes as seconds, at least one; got 9 and 1"):
        plot_alpha_beta(SIZES, [1.0], 1e-6, 1e9)
    with pytest.raises(ValueError, match="alpha_s must be positive for a logarithmic axis, got -1e-06"):
        plot_alpha_beta([8, 64], [1e-6, 1e-6], -1e-6, 1e9)
    with pytest.raises(ValueError, match="sizes_bytes must be positive"):
        plot_alpha_beta([0, 64], [1e-6, 1e-6], 1e-6, 1e9)
    with pytest.raises(ValueError, match="seconds must be positive"):
        plot_alpha_beta([8, 64], [0.0, 1e-6], 1e-6, 1e9)
    with pytest.raises(ValueError, match="predicted: expected the times of at least one algorithm"):
        plot_costs(SIZES, {})
    with pytest.raises(
        ValueError, match=r"predicted\['ring'\] must be positive .* one rank alone sends nothing"
    ):
        plot_costs(SIZES, {"ring": [0.0] * len(SIZES)})
    with pytest.raises(ValueError, match="sizes_bytes: expected sizes from small to large"):
        plot_costs(SIZES[::-1], costs())
    with pytest.raises(ValueError, match=r"measured\['ring'\]: expected at least one"):
        plot_costs(SIZES, costs(), {"ring": []})
    with pytest.raises(ValueError, match=r"predicted\['ring'\]"):
        plot_costs(SIZES, {"ring": [1.0]})
    with pytest.raises(ValueError, match=r"measured\['star'\] has no prediction"):
        plot_costs(SIZES, costs(), {"star": [(8, 1.0)]})


def test_the_crossover_is_where_two_formulas_meet():
    # tree 6 (α + S/β) = ring 14 (α + S/8β)  at  S = 8αβ / (6 - 14/8)
    meeting = 8 * 40e-6 * 2e9 / (6 - 14 / 8)
    sizes = list(np.geomspace(1e3, 1e7, 400))
    alpha, rate = 40e-6, 2e9
    lines = {
        "tree": [6 * (alpha + s / rate) for s in sizes],
        "ring": [14 * (alpha + s / 8 / rate) for s in sizes],
    }
    (start, crossing) = crossovers(sizes, lines)
    assert start == (1e3, "tree", "tree")
    assert crossing[1:] == ("tree", "ring") and crossing[0] == pytest.approx(meeting, rel=1e-3)
    figure = plot_costs(sizes, lines)
    assert heading(figure) == "Predicted: tree is fastest up to 151 kB, ring above" and "151 kB" in texts(
        figure
    )


def test_equals_are_named_together():
    same = [1.0, 2.0, 3.0]
    figure = plot_costs([8, 64, 512], {"naive": same, "tree": list(same)})
    assert heading(figure) == "Predicted: naive and tree are fastest at every size shown"
    figure = plot_costs([8, 64, 512], {"naive": same, "ring": [2.0, 3.0, 2.0], "tree": list(same)})
    assert heading(figure) == "Predicted: naive and tree are fastest up to 181 B, ring above"
    at_a_size = plot_costs([8, 64, 512], {"ring": [2.0, 2.0, 2.0], "naive": [1.0, 2.0, 3.0]})
    assert heading(at_a_size) == "Predicted: naive is fastest up to 64 B, ring above"


def test_costs_say_what_is_predicted_and_what_measured():
    figure = plot_costs(SIZES, costs(), {"ring": [(8, 1e-3)]})
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert {"naive, predicted", "tree, predicted", "ring, predicted", "ring, measured"} <= labels
    assert heading(figure).startswith("Predicted and measured")
    only = plot_costs(SIZES, {"ring": costs()["ring"]})
    assert heading(only) == "Predicted: ring is fastest at every size shown"
    assert (
        only.axes[0].get_xlabel() == "tensor size S (bytes)" and only.axes[0].get_ylabel() == "time (seconds)"
    )


def test_bytes_per_rank_from_ledgers():
    server = [Ledger([Row("recv", 1, sent, sent, 1, 0.0, 0.0)]) for sent in (9000, 3000, 3000, 3000)]
    figure = plot_bytes_per_rank({"server": server, "ring": [(4500, 4500)] * 4})
    assert (
        heading(figure)
        == "Equal totals (18 kB), but one rank of server carries 2 times what one of ring does"
    )
    left, right = figure.axes
    assert (
        left.get_ylabel() == "traffic of one rank (bytes)"
        and left.get_xlabel() == right.get_xlabel() == "rank"
    )
    assert (left.get_title("left"), right.get_title("left")) == (
        "server: up to 9 kB",
        "ring: up to 4.5 kB",
    )
    assert left.get_ylim() == right.get_ylim()
    heights = [bar.get_height() for bar in left.patches]
    assert heights == [9000, 3000, 3000, 3000] * 2
    assert [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in right.patches[:4]] == list(
        RANK_COLORS[:4]
    )


def test_unequal_totals_are_not_called_equal():
    assert heading(plot_bytes_per_rank({"whole": [(6, 6)] * 2, "ring": [(3, 3)] * 2})).startswith(
        "One rank of whole carries"
    )


def test_equal_loads_are_not_held_against_each_other():
    figure = plot_bytes_per_rank({"ring": [(3, 3)] * 2, "tree": [(3, 3)] * 2})
    assert heading(figure) == "No difference: the busiest rank of each carries 6 B"
    assert heading(plot_bytes_per_rank({"ring": [[3, 3], [3, 3]]})) == "ring: 6 B sent by all ranks together"


@pytest.mark.parametrize("nothing", [{}, {"ring": []}])
def test_bytes_of_nobody(nothing):
    with pytest.raises(ValueError, match="traffic: expected at least one algorithm"):
        plot_bytes_per_rank(nothing)


def _cells(axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_ring_steps_show_what_every_rank_holds():
    figure = plot_ring_steps(ring([12, 12, 12, 8]))
    panels = [axes for axes in figure.axes if axes.get_title("left")]
    assert [axes.get_title("left") for axes in panels] == [
        "Start", "Step 1: reduce-scatter", "Step 2: reduce-scatter", "Step 3: reduce-scatter",
        "Step 4: all-gather", "Step 5: all-gather", "Step 6: all-gather",
    ]  # fmt: skip
    assert heading(figure) == "After 6 steps all 4 ranks hold the sum of 44 B; each sent 64 B to 68 B"
    assert all(len(_cells(axes)) == 4 + 16 for axes in panels)
    held = [[text.get_text() for text in axes.texts if text.get_text()] for axes in panels]
    assert held[1] == [
        "0",
        "0",
        "0",
        "0+3",
        "0",
        "1",
        "1",
        "1",
        "1",
        "0+1",
        "2",
        "1+2",
        "2",
        "2",
        "2",
        "3",
        "3",
        "2+3",
        "3",
        "3",
    ]
    assert [words.count("sum") for words in held] == [0, 0, 0, 4, 8, 12, 16]
    arrows = [[text for text in axes.texts if getattr(text, "arrow_patch", None)] for axes in panels]
    # The one that closes the ring is drawn in two parts.
    assert [len(found) for found in arrows] == [0, *[5] * 6]


def test_sums_are_dark_and_parts_are_light():
    panel = plot_ring_steps(ring([4] * 4)).axes[3]  # after the reduce-scatter
    by_text = {}
    for cell, text in zip(_cells(panel)[1:5], [t.get_text() for t in panel.texts][1:5], strict=True):
        by_text[text] = style.luminance(matplotlib.colors.to_hex(cell.get_facecolor()))
    assert by_text["sum"] + 0.3 < by_text["0+2+3"] < by_text["0+3"] < by_text["0"]


def test_one_step_names_chunks_and_bytes():
    replay = ring([12, 12, 12, 8])
    figure = plot_ring_step(replay, 1)
    assert heading(figure) == "Step 1 of 6: reduce-scatter. What arrives is added: sums of 2 ranks"
    assert {"chunk 3\n8 B", "chunk 0\n12 B", "chunk 1\n12 B", "chunk 2\n12 B"} <= set(texts(figure))
    assert heading(plot_ring_step(replay, 0)) == "Start. Every rank has 4 chunks of its own values"
    assert heading(plot_ring_step(replay, 3)).endswith("Every rank holds 1 of 4 sums")
    assert heading(plot_ring_step(replay, 6)).endswith("Every rank holds every sum")
    with pytest.raises(IndexError, match="step 7: this replay has the steps 0 to 6"):
        plot_ring_step(replay, 7)


def test_pictures_of_two_steps_differ():
    replay = ring([4] * 4)
    assert len({to_png(plot_ring_step(replay, step)) for step in range(7)}) == 7


def test_one_rank_is_a_figure_too():
    assert heading(plot_ring_steps(ring([40]))) == "One rank sends nothing: its values are the sum"
    assert heading(plot_ring_step(ring([40]), 0)).startswith("Start")


def test_the_trace_measures_what_hides_behind_computing():
    figure = plot_trace(trace())
    # communication 1.7-2.2 (its rows overlap), 0.3 of these 0.5 s inside backward; the whole lasts 1.2 s
    assert heading(figure) == "3 ranks, 1.2 s: communication takes 42% of it, 60% of that while computing"
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time since the first event (seconds)"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert len(axes.patches) == 15 and axes.get_xlim() == pytest.approx((0, 1.2))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["compute", "collective", "comm"]
    left = {round(bar.get_x(), 3) for bar in axes.patches}
    assert left == {0.0, 0.4, 0.7, 0.9}


def test_a_collective_alone_is_not_computing():
    events = [event for event in trace() if event.lane != "compute"]
    assert heading(plot_trace(events)) == "3 ranks, 500 ms: communication takes 100% of it"


def test_a_wait_is_not_computing():
    step = [
        Event(0, "backward", 0.0, 4.0, "compute"),
        Event(0, "all_reduce", 1.0, 4.0, "comm"),
        Event(0, "wait for gradients", 3.0, 4.0, "wait"),
    ]
    assert (
        heading(plot_trace(step)) == "1 rank, 4 s: communication takes 75% of it, 67% of that while computing"
    )
    assert heading(plot_trace(step[1:])) == "1 rank, 3 s: communication takes 100% of it"


def test_an_empty_trace_is_told():
    with pytest.raises(ValueError, match="no events"):
        plot_trace(Trace())
