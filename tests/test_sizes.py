"""Small rooms: modules and functions to be read at one sitting. And no file holds one machine's paths."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.classroom.notebooks.clean import ROOT

MODULE_AIM, MODULE_LIMIT = 250, 300
FUNCTION_AIM, FUNCTION_LIMIT = 40, 60
FILES = sorted((ROOT / "course_lib").rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(place and name, lines) of each function. A docstring is a contract, may be long, is not counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines


def sizes() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(modules, functions), each with its number of lines."""
    lines = [(str(path.relative_to(ROOT)), len(path.read_text().splitlines())) for path in FILES]
    return lines, [size for path in FILES for size in functions(path)]


def test_no_module_and_no_function_is_too_long(note):
    long_modules, long_functions = sizes()
    over = [f"{what}: {n} lines" for what, n in long_modules if n > MODULE_LIMIT]
    over += [f"{what}: {n} lines" for what, n in long_functions if n > FUNCTION_LIMIT]
    near = [f"{what}: {n} lines" for what, n in long_modules if MODULE_AIM < n <= MODULE_LIMIT]
    near += [f"{what}: {n} lines" for what, n in long_functions if FUNCTION_AIM < n <= FUNCTION_LIMIT]
    if near:
        aims = f"modules of {MODULE_AIM} and functions of {FUNCTION_AIM} lines"
        note("\n".join([f"longer than the aim ({aims}):", *near]))
    assert not over, "\n".join(["split these:", *over])


def test_lines_are_counted_without_the_docstring(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "m.py"
    path.write_text('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n\n\nasync def g(): return 2\n')
    assert list(functions(path)) == [("m.py:1 f", 2), ("m.py:9 g", 1)]


MACHINE_PATH = re.compile(r"(?<![\w.+/=~-])/(?:(?:work|root)/|(?:home|Users)/\w)")


def test_what_counts_as_a_path_of_one_machine():
    for text in ("/wo" + "rk/x", '"/ro' + 'ot/.cache"', "/ho" + "me/ada/course", "(/Use" + "rs/ada"):
        assert MACHINE_PATH.search(text), text
    for text in (
        "net/wo" + "rk/x",
        "~/ro" + "ot/x",
        "/tmp/x",
        "/proc/self",
        "/homework",
        "AAA/wo" + "rk/zz==",
    ):
        assert not MACHINE_PATH.search(text), text


def test_no_tracked_file_holds_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
