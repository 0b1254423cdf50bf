"""The slider over a ring's steps, with a real run behind it, without a front end and in a kernel."""

import base64
import io
from itertools import pairwise

import ipywidgets
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image, ImageChops

from course_lib import launch
from course_lib.classroom.plots import plot_ring_steps, to_png
from course_lib.classroom.replay import Replay, replay_ring
from course_lib.classroom.widgets import RingReplay, ring_replay
from course_lib.comm.collectives import ring_all_reduce
from course_lib.comm.ledger import Ledger
from course_lib.plan.partition import chunk_sizes


def _ring(comm, length):
    ring_all_reduce(comm, torch.ones(length))


@pytest.fixture(scope="module")
def replay() -> Replay:
    results = launch(_ring, 10, world_size=3, show="none")
    return replay_ring(results.ledger, [4 * size for size in chunk_sizes(10, 3)])


def picture(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def test_moving_the_slider_changes_the_picture(replay: Replay):
    widget = ring_replay(replay)
    assert isinstance(widget, ipywidgets.VBox) and isinstance(widget.image, ipywidgets.Image)
    assert (widget.slider.min, widget.slider.max, widget.slider.value) == (0, 4, 0)
    seen = []
    for step in (0, 1, 2, 3, 4):
        widget.slider.value = step
        seen.append(picture(widget.image.value))
    assert len({image.size for image in seen}) == 1  # the figure does not jump
    for before, after in pairwise(seen):
        assert ImageChops.difference(before, after).getbbox() is not None
    widget.slider.value = 0
    assert picture(widget.image.value).tobytes() == seen[0].tobytes()


def test_only_changed_steps_are_drawn_and_each_once(replay: Replay, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "course_lib.classroom.widgets.plot_ring_step", lambda _, step: drawn.append(step) or step
    )
    monkeypatch.setattr("course_lib.classroom.widgets.to_png", lambda step: b"picture %d" % step)
    widget = RingReplay(replay)
    for step in (2, 1, 2, 0):
        widget.slider.value = step
    assert drawn == [0, 2, 1] and widget.image.value == b"picture 0"


def test_the_image_is_inside_the_widget(replay: Replay):
    widget = ring_replay(replay)
    controls, image = widget.children
    assert image is widget.image and widget.slider in controls.children


def test_a_stored_notebook_keeps_a_still_figure(replay: Replay):
    widget = ring_replay(replay)
    bundle = widget._repr_mimebundle_()
    assert bundle["text/plain"] == repr(widget) == "RingReplay(3 ranks, 4 steps)"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
    still = picture(base64.b64decode(bundle["image/png"]))
    assert still.tobytes() == picture(to_png(plot_ring_steps(replay))).tobytes()


def test_one_rank_has_one_step():
    widget = ring_replay(replay_ring([Ledger()], [8]))
    assert (widget.slider.min, widget.slider.max) == (0, 0) and bytes(widget.image.value[:4]) == b"\x89PNG"


def test_it_works_in_a_kernel(tmp_path):
    code = """
        from course_lib.classroom.replay import replay_ring
        from course_lib.classroom.widgets import ring_replay
        from course_lib.comm.ledger import Ledger, Row
        rows = [Ledger([Row("exchange", 1 - r, 4, 4, 1, 0.0, 0.0)] * 2) for r in (0, 1)]
        widget = ring_replay(replay_ring(rows, [4, 4]))
        widget
        """
    move = "before = widget.image.value\nwidget.slider.value = 2\nwidget.image.value != before"
    cells = [
        nbformat.v4.new_code_cell("\n".join(line.strip() for line in text.splitlines()))
        for text in (code, move)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown, moved = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in shown] == ["execute_result"]
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(shown[0].data)
    assert moved[0].data["text/plain"] == "True"


def test_a_figure_is_shown_once_by_a_kernel(tmp_path):
    code = "from course_lib.classroom.plots import plot_costs\nplot_costs([1, 10], {'ring': [1.0, 2.0]})"
    pyplot = "import matplotlib.pyplot as plt\n"  # activates the inline backend
    cells = [nbformat.v4.new_code_cell(text) for text in (code, pyplot + code)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    for cell in notebook.cells:
        assert [output.output_type for output in cell.outputs] == ["execute_result"]
        assert picture(base64.b64decode(cell.outputs[0].data["image/png"])).width > 500
