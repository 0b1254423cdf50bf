"""`python -m course_lib.classroom.notebooks` on small throw-away notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib.classroom.notebooks.__main__ import main
from course_lib.classroom.notebooks.clean import ROOT, WIDGET_NOTE, _scrub, clean, dumps, findings, read
from course_lib.classroom.notebooks.execute import missing_gpus
from course_lib.classroom.notebooks.site import title_and_summary

NO_GPUS = pytest.mark.skipif(
    missing_gpus() is None, reason="this machine has the GPUs that the cell asks for"
)


def save(path: Path, *cells) -> Path:
    """A notebook of code cells (strings) and of cells; its metadata as an editor leaves it."""
    made = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    metadata = {"kernelspec": {"name": "other", "display_name": "Other"}, "widgets": {"state": {"a": 1}}}
    path.write_text(nbformat.writes(new_notebook(cells=made, metadata=metadata)))
    return path


def ran(source: str, *outputs, tags=(), count=1):
    cell = new_code_cell(source, outputs=list(outputs), execution_count=count)
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell


def stream(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)


def run(path: Path, *options: str) -> int:
    return main(["run", str(path), "--record", str(path.parent / "ran.json"), *options])


def check(path: Path) -> int:
    return main(["check", str(path), "--record", str(path.parent / "ran.json")])


def test_run_executes_cleans_and_records(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    gpu = ran("raise RuntimeError('no GPU')", stream("from a server\n"), tags=["gpu"], count=7)
    path = save(
        tmp_path / "a.ipynb",
        "import os\nprint(os.environ.get('MPLBACKEND'), os.listdir())",
        "import sys, time\nfor i in range(4):\n    sys.stderr.write(f'\\r{i}/3'); sys.stderr.flush()",
        "import ipywidgets\nipywidgets.IntSlider()",
        gpu,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        ran("1/0", tags=["raises-exception"]),
        "40 + 2",
    )
    nb = read(path)
    nb.cells[2].metadata["tags"] = ["nbval-ignore-output"]
    ids = [cell["id"] for cell in nb.cells]
    path.write_text(nbformat.writes(nb))
    status = run(path)
    assert status == 0 or missing_gpus() is None, capfd.readouterr()
    stored = read(path)
    assert [cell["id"] for cell in stored.cells] == ids
    assert [cell.execution_count for cell in stored.cells] == [1, 2, 3, 4, 5, 6, 7]
    assert "Agg" not in stored.cells[0].outputs[0].text
    assert "['a.ipynb']" in stored.cells[0].outputs[0].text, "a kernel starts beside its notebook"
    assert stored.cells[1].outputs[0].text == "3/3"
    assert stored.cells[2].outputs[0].data == {"text/plain": WIDGET_NOTE}
    assert "image/png" in stored.cells[4].outputs[0].data, "inline figures must not vanish"
    assert stored.cells[5].outputs[0].ename == "ZeroDivisionError"
    assert stored.cells[6].outputs[0].data == {"text/plain": "42"}
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    assert all(set(cell.metadata) <= {"tags"} for cell in stored.cells)
    before = path.read_bytes()
    assert main(["clean", str(path), "--record", str(tmp_path / "ran.json")]) == 0
    assert path.read_bytes() == before, "cleaning twice changes nothing"
    if missing_gpus():
        assert stored.cells[3].outputs[0].text == "from a server\n"


def test_a_changed_cell_makes_the_notebook_stale_and_prose_does_not(tmp_path, capsys):
    path = save(tmp_path / "b.ipynb", new_markdown_cell("# T\n\nProse."), "print(6 * 7)")
    assert check(path) == 1
    assert "never ran" in capsys.readouterr().err
    assert run(path) == 0
    nb = read(path)
    nb.cells[0].source += " More of it."
    path.write_text(dumps(nb))
    assert check(path) == 0
    nb.cells[1].source = "print(6 * 8)"
    path.write_text(dumps(nb))
    capsys.readouterr()
    assert check(path) == 1
    assert "b.ipynb is stale" in (err := capsys.readouterr().err) and "make notebooks" in err


@pytest.mark.parametrize(
    "source, options, sentence",
    [
        ("import os; os._exit(3)", [], "the kernel died in code cell 2 (`import os; os._exit(3)`)"),
        ("while True: pass", ["--timeout", "2"], "code cell 2 (`while True: pass`) ran longer than 2 s"),
        ("[][1]", [], "code cell 2 (`[][1]`) raised IndexError: list index out of range"),
    ],
    ids=["dies", "hangs", "raises"],
)
def test_a_run_that_fails_says_where_and_leaves_the_notebook(tmp_path, capsys, source, options, sentence):
    path = save(tmp_path / "c.ipynb", "print('ok')", source)
    before, begin = path.read_bytes(), time.monotonic()
    assert run(path, *options) == 1
    assert sentence in capsys.readouterr().err
    assert path.read_bytes() == before and not (tmp_path / "ran.json").exists()
    assert list(tmp_path.iterdir()) == [path], "no half-written file stays"
    assert time.monotonic() - begin < 40, "far below the 60 s that a cell may take"


UNCLEAN = {
    "an id that repeats": lambda nb: nb.cells[1].update(id=nb.cells[0]["id"]),
    "editor state in a cell": lambda nb: nb.cells[0].metadata.update(collapsed=True),
    "times": lambda nb: nb.cells[0].metadata.update(execution={"iopub.execute_input": "2024-01-01"}),
    "widget state": lambda nb: nb.metadata.update(widgets={}),
    "another kernel": lambda nb: nb.metadata.kernelspec.update(name="mine"),
    "a Python version": lambda nb: nb.metadata.language_info.update(version="3.11.7"),
    "a count out of order": lambda nb: nb.cells[0].update(execution_count=5),
    "a count of null": lambda nb: nb.cells[0].update(execution_count=None),
    "steps of a progress bar": lambda nb: nb.cells[0].outputs.append(stream(" 10%\r100%\n", "stderr")),
    "split streams": lambda nb: nb.cells[0].outputs.append(stream("more\n")),
    "output metadata": lambda nb: nb.cells[1].outputs[0].metadata.update(needs_background="light"),
    "an absolute path": lambda nb: nb.cells[0].outputs[0].update(text=f"{ROOT}/course_lib/x.py\n"),
    "21 lines": lambda nb: nb.cells[0].update(source="\n".join(["pass"] * 21)),
    "an empty cell": lambda nb: nb.cells[0].update(source="\n", outputs=[]),
    "an undeclared error": lambda nb: nb.cells[0].outputs.append(
        new_output("error", ename="ValueError", evalue="no", traceback=[])
    ),
    "an error that stops Run All": lambda nb: nb.cells[0].update(
        metadata={"tags": ["nbval-raises-exception"]},
        outputs=[new_output("error", ename="ValueError", evalue="no", traceback=[])],
    ),
    "an untagged widget": lambda nb: nb.cells[1].outputs[0].update(data={"text/plain": WIDGET_NOTE}),
}


def _fine():
    result = new_output("execute_result", data={"text/plain": "1"}, execution_count=2)
    return clean(new_notebook(cells=[ran("print('x')", stream("x\n")), ran("1", result, count=2)]))


def test_a_clean_notebook_has_no_findings():
    notebook = _fine()
    assert findings(notebook, dumps(notebook)) == []


@pytest.mark.parametrize("what", UNCLEAN)
def test_check_finds(what):
    notebook = _fine()
    UNCLEAN[what](notebook)
    assert len(findings(notebook)) >= 1


@pytest.mark.parametrize("what", [what for what in UNCLEAN if what[0:2] not in ("21",)])
def test_cleaning_never_hides_what_only_a_run_can_mend(what):
    notebook = _fine()
    UNCLEAN[what](notebook)
    left = findings(clean(notebook), dumps(clean(notebook)))
    for_people = {
        "a count of null",
        "an empty cell",
        "an undeclared error",
        "an error that stops Run All",
        "an untagged widget",
    }
    assert bool(left) == (what in for_people), left


@pytest.mark.parametrize("shown", ["/h/ada/course/x.py:3", "~/course/x.py:3", "x.py:3"])
def test_paths_in_outputs_are_the_checkouts(shown):
    assert (
        _scrub(f"File {shown}, /h/ada/y, /opt/z", Path("/h/ada/course"), Path("/h/ada"))
        == "File x.py:3, ~/y, /opt/z"
    )
    assert _scrub("File /c/x.py, /h", Path("/c"), Path("/")) == "File x.py, /h"


def test_the_picture_that_a_widget_brings_along_stays():
    notebook = _fine()
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "a"},
        "image/png": "UE5H",
        "text/plain": "W()",
    }
    notebook.cells[1].outputs[0].data = nbformat.from_dict(view)
    once = clean(notebook)
    assert (
        once.cells[1].outputs[0].data == {"text/plain": WIDGET_NOTE, "image/png": "UE5H"}
        and clean(once) == once
    )


def test_another_layout_of_the_file_is_found():
    assert findings(_fine(), json.dumps(_fine())) != []


def test_a_file_that_is_no_notebook(tmp_path, capsys):
    path = tmp_path / "d.ipynb"
    path.write_text("not JSON")
    assert main(["check", str(path)]) == 2
    assert "d.ipynb is not a Jupyter notebook" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "gone.ipynb")]) == 2
    assert "there is no notebook" in capsys.readouterr().err


def test_site_lists_the_chapters_and_links_them(tmp_path, capsys):
    intro = new_markdown_cell(
        "# Ranks & *costs*\n\n## Why\n\nA rank is a **process**.\n\nSee [two](two.ipynb#x)."
    )
    one = save(tmp_path / "one.ipynb", intro, "print('made', 'now')")
    two = save(tmp_path / "two.ipynb", new_markdown_cell("# Two\n\n$x$"), "raise SystemError('broken')")
    out = tmp_path / "build"
    assert main(["site", str(one), str(two), "--out", str(out)]) == 1
    assert "raised SystemError" in capsys.readouterr().err
    index = (out / "index.html").read_text()
    assert '<a href="one.html">Ranks &amp; <em>costs</em></a>' in index
    assert "A rank is a <strong>process</strong>." in index
    assert index.index("one.html") < index.index("two.html")
    assert "This run stopped: code cell 1" in index
    page = (out / "one.html").read_text()
    assert "made now" in page and 'href="two.html#x"' in page
    assert "<script src=" not in page, "a page without formulas loads nothing from outside"
    assert "SystemError" in (out / "two.html").read_text()
    assert read(one).cells[1].outputs == [], "copies run, the chapters stay as they are"


def test_title_and_summary():
    notebook = new_notebook(
        cells=[new_markdown_cell("<img src=x>\n\n# A #\n\n![fig](f.png)\n\nFirst\nlines.\n\nNext.")]
    )
    assert title_and_summary(notebook, "x") == ("A", "First\nlines.")
    assert title_and_summary(new_notebook(cells=[]), "fallback") == ("fallback", "")


def test_the_command_line_explains_itself():
    command = [sys.executable, "-m", "course_lib.classroom.notebooks", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "execute the notebooks in place" in shown.stdout
