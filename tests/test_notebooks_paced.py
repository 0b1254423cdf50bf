"""The chapters' cells on limited links, and the cells they need, where the system allows no network namespaces.

The kernel gets a PATH without the commands `ip` and `tc`, as on a machine that lacks them: the hosts fall back to
pacing in software, the cells must run all the same, and what they show must say so.
"""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from course_lib.classroom.notebooks.clean import ROOT, code_cells, read
from course_lib.classroom.notebooks.execute import execute

ON_LINKS = ("VirtualHosts(", "measure_on_links(")
SAYS = (
    "paced in software",
    "links not limited",
)  # the latter: torchrun's nodes, whose messages are torch's own
CHAPTERS = sorted(
    path
    for path in (ROOT / "notebooks").glob("*.ipynb")
    if any(name in path.read_text() for name in ON_LINKS)
)


def names(source: str) -> tuple[set[str], set[str]]:
    """What a cell binds at its top level, and what it uses."""
    tree = ast.parse(TransformerManager().transform_cell(source))  # %magics as calls
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return bound, {node.id for node in nodes if isinstance(node, ast.Name)}


def needed(sources: list[str]) -> list[int]:
    """The cells on limited links, and, again and again, the last cell before that binds a name they use."""
    todo = [i for i, source in enumerate(sources) if any(name in source for name in ON_LINKS)]
    bound, used = zip(*map(names, sources), strict=True)
    found: set[int] = set()
    while todo:
        cell = todo.pop()
        if cell in found:
            continue
        found.add(cell)
        for name in used[cell]:
            earlier = [i for i in range(cell) if name in bound[i]]
            todo += earlier[-1:]
    return sorted(found)


def test_needed_cells_are_found() -> None:
    sources = [
        "import a",
        "x = a.f()",
        "y = 1",
        "def g(n):\n    return n + x",
        "h = VirtualHosts(g(2))",
        "print(y)",
    ]
    assert needed(sources) == [0, 1, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_paced_in_software(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    notebook = copy.deepcopy(read(path))
    cells = code_cells(notebook)
    notebook.cells = [cells[i] for i in needed([cell.source for cell in cells])]
    execute(notebook, path.parent, timeout_s=90)
    shown = [
        str(output) for cell in notebook.cells for output in cell.outputs if "image/png" not in str(output)
    ]
    assert any(words in text for text in shown for words in SAYS), shown


def test_there_are_such_chapters() -> None:
    assert {"00_ranks_and_costs", "01_data_parallel", "02_ring_all_reduce"} <= {
        path.stem for path in CHAPTERS
    }
