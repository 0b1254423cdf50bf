"""What a stored notebook may hold, and how one is brought into that form.

A chapter is stored *with* its outputs, so that it can be read on the web. Left alone, a notebook also
stores the editor's state, times, widget state and every step of a progress bar: a change of one line then
shows as a hundred. `clean` keeps what a reader sees and drops the rest; `findings` says in words what is
not clean, or what no tool can clean (a cell that never ran, a cell of 30 lines, an error nobody declared).

Running a notebook is `execute`'s part; nothing here starts a kernel.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[3]
"""The checkout: its absolute path is removed from what a notebook prints."""

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MAX_CELL_LINES = 20
RAISES = "raises-exception"
IGNORE_OUTPUT = "nbval-ignore-output"
GPU = "gpu"

_WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_NOTE = "[interactive: run this cell to use it]"
"""Stored in place of a widget, whose state is dropped: without it a widget would show as an error."""


def read(path: Path) -> NotebookNode:
    """Return the notebook at `path` as nbformat 4.

    Raises ValueError that names the file when it is no notebook.
    """
    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except (
        nbformat.reader.NotJSONError,
        nbformat.ValidationError,
        UnicodeDecodeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is not a Jupyter notebook: {str(error)[:200]}") from None


def dumps(notebook: NotebookNode) -> str:
    """The text of a notebook file: sorted keys, one space of indent, a newline at the end."""
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def write(notebook: NotebookNode, path: Path) -> None:
    """Replace the file at `path` in one step: an interrupt leaves the old or the new one, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(dumps(notebook), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell, [] when it has none."""
    return list(cell.metadata.get("tags", []))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells, in order; messages count them from 1."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def where(number: int, cell: NotebookNode) -> str:
    """How messages name a code cell: its number among the code cells, and its first line."""
    lines = cell.source.strip().splitlines() or ["(empty)"]
    return f"code cell {number} (`{lines[0][:60]}`)"


def code_sha256(notebook: NotebookNode) -> str:
    """A digest of the sources of all code cells: what ran, as far as a later reader can check."""
    digest = hashlib.sha256()
    for cell in code_cells(notebook):
        digest.update(cell.source.strip().encode() + b"\0")
    return digest.hexdigest()


def clean(notebook: NotebookNode) -> NotebookNode:
    """Return a cleaned copy; cleaning twice changes nothing.

    A cell that never ran keeps its null execution count (unless it needs GPUs): nbval does not compare such
    a cell, so that the gap must stay visible.
    """
    cleaned = copy.deepcopy(notebook)
    cleaned.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    cleaned.nbformat, cleaned.nbformat_minor = 4, max(5, cleaned.get("nbformat_minor", 5))
    _give_ids(cleaned)
    for cell in cleaned.cells:
        kept = tags(cell)
        cell.metadata = nbformat.from_dict({"tags": kept} if kept else {})
    has_run = any(cell.execution_count is not None for cell in code_cells(cleaned))
    for number, cell in enumerate(code_cells(cleaned), start=1):
        if cell.execution_count is not None or (has_run and GPU in tags(cell)):
            cell.execution_count = number
        cell.outputs = _clean_outputs(cell.outputs, cell.execution_count)
    return cleaned


def _give_ids(notebook: NotebookNode) -> None:
    """Keep each cell's id; make a missing or repeated one from the cell's text, so that it stays the same."""
    seen: set[str] = set()
    for index, cell in enumerate(notebook.cells):
        if not cell.get("id") or cell["id"] in seen:
            text = f"{index} {cell.cell_type} {cell.source}"
            cell["id"] = hashlib.sha256(text.encode()).hexdigest()[:8]
        seen.add(cell["id"])


def _clean_outputs(outputs: list[NotebookNode], count: int | None) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
                continue
        elif output.output_type == "error":
            output.traceback = [_scrub(line) for line in output.traceback]
            output.evalue = _scrub(output.evalue)
        else:
            output.metadata = NotebookNode()
            output.data = _clean_data(output.data)
            if output.output_type == "execute_result":
                output.execution_count = count
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = _scrub(_collapse(output.text))
    return [output for output in kept if output.output_type != "stream" or output.text]


def _clean_data(data: NotebookNode) -> NotebookNode:
    if _WIDGET in data or data.get("text/plain") == WIDGET_NOTE:
        # A picture that the widget brought along stays: it is what a reader on the web sees.
        still = {mime: data[mime] for mime in ("image/png",) if mime in data}
        return NotebookNode({"text/plain": WIDGET_NOTE, **still})
    return NotebookNode({mime: _scrub(v) if isinstance(v, str) else v for mime, v in data.items()})


def _collapse(text: str) -> str:
    """What a terminal shows in the end: a progress bar writes over itself after each carriage return."""
    return "\n".join(re.sub(r"^.*\r(?=.)", "", line.rstrip("\r")) for line in text.split("\n"))


def _scrub(text: str, root: Path = ROOT, home: Path | None = None) -> str:
    """Make paths relative to the checkout or to the home directory: no reader has the author's disk."""
    home = home or Path.home()
    text = text.replace(f"{root}{os.sep}", "")
    if home in root.parents:  # tracebacks write the home directory as ~
        text = text.replace(f"~{os.sep}{root.relative_to(home)}{os.sep}", "")
    return text.replace(f"{home}{os.sep}", f"~{os.sep}") if home != Path(home.anchor) else text


def findings(notebook: NotebookNode, text: str | None = None) -> list[str]:
    """One sentence for each thing that is not as it should be; [] for a notebook that is fine.

    `text`: the file's text, to see also that it is laid out as `dumps` does.
    """
    found = _unclean(notebook)
    numbered = list(enumerate(code_cells(notebook), start=1))
    unrun = [where(n, cell) for n, cell in numbered if cell.execution_count is None and GPU not in tags(cell)]
    if unrun:
        found.append(
            f"{len(unrun)} of {len(numbered)} code cells never ran, and nbval would not compare them: run "
            f"`make notebooks` (the first is {unrun[0]})"
        )
    for number, cell in numbered:
        found += [f"{where(number, cell)}: {what}" for what in _cell_findings(cell)]
    if not found and text is not None and text != dumps(clean(notebook)):
        found.append("the file is laid out in another way than `make notebooks` does: run it")
    return found


def _unclean(notebook: NotebookNode) -> list[str]:
    cleaned = clean(notebook)
    found = []
    if notebook.metadata != cleaned.metadata:
        extra = sorted(set(notebook.metadata) - set(METADATA)) or ["a kernel or language of its own"]
        found.append(f"the notebook's metadata holds {', '.join(extra)}: run `make notebooks`")
    for index, (cell, want) in enumerate(zip(notebook.cells, cleaned.cells, strict=True)):
        place = f"cell {index + 1} of all ({cell.cell_type})"
        if cell.get("id") != want["id"]:
            found.append(f"{place}: its id is missing or used twice: run `make notebooks`")
        if cell.metadata != want.metadata:
            extra = sorted(set(cell.metadata) - {"tags"}) or ["an empty list of tags"]
            found.append(f"{place}: its metadata holds {', '.join(extra)}: run `make notebooks`")
        if cell.get("execution_count") != want.get("execution_count"):
            found.append(f"{place}: execution counts do not run from 1 on: run `make notebooks`")
        elif cell.get("outputs") != want.get("outputs"):
            found.append(
                f"{place}: an output is not clean (steps of a progress bar, split streams, widget "
                "state, output metadata or an absolute path): run `make notebooks`"
            )
    return found


def _cell_findings(cell: NotebookNode) -> list[str]:
    """What running and cleaning cannot put right in one code cell."""
    found = []
    num_lines = len(cell.source.strip().splitlines())
    if num_lines == 0:
        found.append("it is empty: delete it")
    if num_lines > MAX_CELL_LINES:
        found.append(
            f"it has {num_lines} lines, more than {MAX_CELL_LINES}: move code into course_lib, or split it"
        )
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if errors and RAISES not in tags(cell):
        found.append(
            f"it stores an undeclared {errors[0].ename}: mend it, or tag the cell {RAISES} if the error is "
            "the lesson (the one tag that JupyterLab's Run All, nbval and `make notebooks` all go on after)"
        )
    shows_widget = any(output.get("data", {}).get("text/plain") == WIDGET_NOTE for output in cell.outputs)
    if shows_widget and IGNORE_OUTPUT not in tags(cell):
        found.append(f"it shows a widget, whose text changes from run to run: tag the cell {IGNORE_OUTPUT}")
    return found
