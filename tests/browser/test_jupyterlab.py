"""The chapters where a reader meets them: JupyterLab in a real browser, started by `make lab`'s own recipe.

Headless Chromium opens chapter 02, runs all its cells from the menu, and moves its slider. The notebook is a
copy, and all that the server writes is below tmp_path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from course_lib.classroom.notebooks.clean import GPU, RAISES, ROOT, clean, read, tags, write
from course_lib.classroom.notebooks.execute import missing_gpus

CHAPTER = ROOT / "notebooks" / "02_ring_all_reduce.ipynb"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-first-run"]
RUN_ALL_S = 240.0
PICTURE = "COURSE_PICTURE"
"""Environment variable: a file to which the test writes a picture of the page (the one in README.md)."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
]

SLIDER = """
import matplotlib.pyplot as plt
import ipywidgets

@ipywidgets.interact(step=(0, 9))
def show(step=0):
    plt.plot([0, 1], [0, step])
    plt.ylim(0, 9)
    plt.show()
"""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, token, folder."""

    url: str
    token: str
    folder: Path

    def sessions(self) -> list[dict]:
        request = urllib.request.Request(f"{self.url}api/sessions?token={self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _own_places(tmp_path: Path) -> dict[str, str]:
    """Jupyter's settings and state below tmp_path: the reader's own neither matter nor change."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "DISPLAY", "BROWSER")
    }
    for name in ("CONFIG", "DATA", "RUNTIME"):
        env[f"JUPYTER_{name}_DIR"] = str(tmp_path / "jupyter" / name.lower())
    settings = tmp_path / "jupyter/config/lab/user-settings/@jupyterlab"
    for plugin, text in {
        "notebook-extension/tracker": '{"windowingMode": "none"}',  # all cells in the page, also out of sight
        "apputils-extension/notification": '{"fetchNews": "false"}',
    }.items():
        path = settings / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return env


def _wait_for_server(runtime: Path, folder: Path, server: subprocess.Popen, log: Path) -> Lab:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                info = json.loads(path.read_text())
                lab = Lab(info["url"], info["token"], folder)
                lab.sessions()
                return lab
            except (OSError, ValueError):
                pass
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab by the recipe of `make lab`, on this interpreter, in a folder of its own."""
    folder, log = tmp_path / "course", tmp_path / "lab.log"
    folder.mkdir()
    # -o: the set-up's stamp is taken as current; the tests may run in an environment that make did not make.
    command = ["make", "-C", str(ROOT), "-o", ".venv/.installed", "lab", f"VENV_PYTHON='{sys.executable}'"]
    command += [f"PORT={_free_port()}", f"LAB_ARGS=--ServerApp.root_dir='{folder}'"]
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            env=_own_places(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield _wait_for_server(tmp_path / "jupyter" / "runtime", folder, server, log)
    finally:
        _stop(server)


def _stop(server: subprocess.Popen) -> None:
    """End the server as a terminal's hang-up would; then nothing of it may be left, no kernel and no rank."""
    if server.poll() is not None:
        return
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    os.killpg(server.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=20)
    for process in alive:
        process.kill()
    server.wait(10)
    assert not alive, (
        f"left running: {[' '.join(process.cmdline()) for process in alive if process.is_running()]}"
    )


@pytest.fixture
def page(lab: Lab) -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1400, "height": 1120})
        finally:
            browser.close()


def _place(lab: Lab, name: str) -> Path:
    """The notebook to open, in the server's folder: chapter 02 without outputs, or one with a slider."""
    if not CHAPTER.exists():
        notebook = new_notebook(cells=[new_code_cell("print('hello')"), new_code_cell(SLIDER.strip())])
    else:
        notebook = read(CHAPTER)
        if missing_gpus():
            notebook.cells = [cell for cell in notebook.cells if GPU not in tags(cell)]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    path = lab.folder / name
    write(clean(notebook), path)
    return path


def _wait_for(what: str, condition, seconds: float):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.25)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def _all_ran(lab: Lab, page, path: Path) -> bool:
    """Every code cell has its count in the saved file, and the kernel is idle."""
    if [session["kernel"]["execution_state"] for session in lab.sessions()] != ["idle"]:
        return False
    page.keyboard.press("Control+s")
    time.sleep(0.5)
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    stopped = [cell for cell in cells for output in cell.outputs if output.output_type == "error"]
    undeclared = [cell.source for cell in stopped if RAISES not in tags(cell)]
    assert not undeclared, f"a cell raised:\n{undeclared[0]}"
    return all(cell.execution_count for cell in cells)


def _pictures(page) -> list[str]:
    """What the slider's cell shows: its images and drawings."""
    cell = page.locator(".jp-CodeCell", has=page.locator(".widget-slider")).first
    return cell.locator(".jp-Cell-outputArea").first.evaluate(
        "area => [...area.querySelectorAll('img, svg.figure, canvas')]"
        ".map(e => e.src || e.outerHTML + (e.toDataURL ? e.toDataURL() : ''))"
    )


def test_run_all_cells_and_move_the_slider(lab: Lab, page):
    path = _place(lab, CHAPTER.name)
    page.goto(f"{lab.url}lab/tree/{path.name}?token={lab.token}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
    _wait_for("the kernel", lambda: lab.sessions(), 30)
    _wait_for("an idle kernel", lambda: lab.sessions()[0]["kernel"]["execution_state"] == "idle", 30)

    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.get_by_role("menuitem", name=re.compile("^Run$")).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
    _wait_for("all cells to run", lambda: _all_ran(lab, page, path), RUN_ALL_S)

    handle = page.locator(".jp-CodeCell .widget-slider .noUi-handle").first
    handle.scroll_into_view_if_needed()
    before = _wait_for("a figure beside the slider", lambda: _pictures(page), 20)
    handle.focus()
    handle.press("ArrowRight")
    _wait_for("the slider to change the figure", lambda: _pictures(page) not in ([], before), 20)
    if os.environ.get(PICTURE):
        page.keyboard.press("Control+b")  # without the file browser
        time.sleep(1.0)
        handle.scroll_into_view_if_needed()
        page.screenshot(path=os.environ[PICTURE])


def test_the_server_asks_for_the_token_and_answers_this_machine_only(lab: Lab):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{lab.url}api/contents", timeout=10)
    assert refused.value.code == 403
    port = int(lab.url.rsplit(":", 1)[1].strip("/"))
    listens = {
        c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }
    assert listens == {"127.0.0.1"}
