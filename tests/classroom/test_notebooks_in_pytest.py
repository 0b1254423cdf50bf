"""How the test run treats notebooks: pytest with nbval, in a process of its own, on throw-away notebooks.

One run over all of them (a kernel starts in a second); each test below looks at the reports of one notebook.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from course_lib.classroom.notebooks.clean import ROOT, findings, read
from course_lib.classroom.notebooks.execute import missing_gpus

CELL_TIMEOUT_S = 5


def cell(source: str, text: str | None = None, tags: tuple[str, ...] = (), count: int | None = 1):
    outputs = [] if text is None else [new_output("stream", name="stdout", text=text)]
    return new_code_cell(source, outputs=outputs, execution_count=count, metadata={"tags": list(tags)})


NOTEBOOKS = {
    "right": [
        cell("x = 6 * 7\nprint(x)", "42\n"),
        cell("print(object())", "<object object at 0x7f0000000000>\n"),
        cell("print('backend: gloo on the CPU')", "backend: nccl on 8 GPUs\n"),
        cell("import time\nprint(time.time())", "1.5\n", tags=("nbval-ignore-output",)),
        cell("print(' 50%|##  | 1/2 [0:07]', end='')", " 50%|##  | 1/2 [0:11]"),
    ],
    "wrong": [cell("print(6 * 8)", "42\n"), cell("print('still runs')", "still runs\n")],
    "dies": [
        cell("print('before')", "before\n"),
        cell("import os\nos._exit(3)"),
        cell("print('after')", "after\n"),
    ],
    "killed": [cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")],
    "hangs": [cell("import time\ntime.sleep(1000)"), cell("1 + 1")],
    "gpu": [cell("raise RuntimeError", "from a server\n", tags=("gpu",)), cell("print(1)", "1\n")],
    "raises": [cell("1/0"), cell("print(2)", "2\n")],
    "unrun": [cell("print('never compared')", None, count=None)],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, ET.Element]:
    """The JUnit report of each cell: "wrong 0" -> element, with the time of all under ""."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name, cells in NOTEBOOKS.items():
        if name == "raises":
            error = new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
            cells[0].outputs, cells[0].metadata["tags"] = [error], ["raises-exception"]
        (folder / f"{name}.ipynb").write_text(nbformat.writes(new_notebook(cells=cells)))
    xml = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += [
        f"--nbval-cell-timeout={CELL_TIMEOUT_S}",
        f"--junitxml={xml}",
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    begin = time.monotonic()
    subprocess.run(command, cwd=folder, capture_output=True, timeout=110)
    suite = ET.parse(xml).getroot().find("testsuite")
    assert suite is not None
    suite.set("time", str(time.monotonic() - begin))
    cells = {}
    for case in suite.iter("testcase"):
        name = re.sub(r".*?(\w+)(\.ipynb)?$", r"\1", case.get("classname", ""))
        cells[f"{Path(name).stem} {case.get('name', '').split()[-1]}"] = case
    return {"": suite, **cells}


def outcome(reports: dict[str, ET.Element], key: str) -> tuple[str, str]:
    """("passed" | "failure" | "skipped" | "error", what the report says)."""
    for kind in ("failure", "error", "skipped"):
        found = reports[key].find(kind)
        if found is not None:
            return kind, f"{found.get('message')}\n{found.text}"
    return "passed", ""


def test_each_cell_is_a_test(reports):
    assert len(reports) - 1 == sum(len(cells) for cells in NOTEBOOKS.values())


def test_what_differs_from_run_to_run_is_sanitised_or_tagged(reports):
    for number in range(len(NOTEBOOKS["right"])):
        assert outcome(reports, f"right {number}") == ("passed", "")


def test_a_wrong_output_fails_its_cell_only(reports):
    kind, text = outcome(reports, "wrong 0")
    assert kind == "failure" and "Cell outputs differ" in text and "48" in text
    assert outcome(reports, "wrong 1")[0] == "passed"


def test_a_dead_kernel_fails_at_once_and_names_the_cell(reports):
    assert outcome(reports, "dies 0")[0] == "passed"
    kind, text = outcome(reports, "dies 1")
    assert kind == "failure"
    assert "The kernel exited with status 3 while this cell ran" in text and "os._exit(3)" in text
    kind, text = outcome(reports, "dies 2")
    assert kind == "skipped" and "the kernel died in cell 1" in text
    assert "killed by signal 9" in outcome(reports, "killed 0")[1]
    for key in ("dies 1", "killed 0"):
        assert float(reports[key].get("time", "inf")) < CELL_TIMEOUT_S, "it did not wait for the time limit"


def test_a_hang_fails_at_the_time_limit(reports):
    kind, text = outcome(reports, "hangs 0")
    assert kind == "failure" and f"Timeout of {CELL_TIMEOUT_S} seconds exceeded" in text
    assert "KeyboardInterrupt" in text, "the traceback shows where it hung"


@pytest.mark.skipif(missing_gpus() is None, reason="this machine has the GPUs that the cell asks for")
def test_a_gpu_cell_is_skipped_with_the_reason(reports):
    kind, text = outcome(reports, "gpu 0")
    assert kind == "skipped" and "needs 2 GPUs, and this machine has" in text
    assert outcome(reports, "gpu 1")[0] == "passed"


def test_a_declared_error_is_no_failure(reports):
    assert outcome(reports, "raises 0") == ("passed", "") == outcome(reports, "raises 1")


def test_nbval_passes_over_a_cell_that_never_ran_and_the_clean_check_does_not(reports, tmp_path):
    assert outcome(reports, "unrun 0")[0] == "passed", "the trap: nbval compares nothing here"
    path = tmp_path / "unrun.ipynb"
    path.write_text(nbformat.writes(new_notebook(cells=NOTEBOOKS["unrun"])))
    assert any("never ran" in finding for finding in findings(read(path)))


def test_every_pattern_of_the_sanitise_file_is_read():
    from nbval.plugin import get_sanitize_patterns

    text = (ROOT / "tests" / "nbval_sanitize.cfg").read_text()
    patterns = get_sanitize_patterns(text)
    assert len(patterns) == len(re.findall(r"^\[", text, flags=re.MULTILINE))
    for pattern, _ in patterns:
        re.compile(pattern)
