"""Which code each stored notebook ran.

A notebook whose code has changed since is *stale*: its outputs are hearsay. nbval compares texts, but no
figures, and passes over the cells that print times. So `make notebooks` writes down a digest of the code
that ran, in `tests/notebooks.json`, and a test holds the code of today against it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from nbformat import NotebookNode

from course_lib.classroom.notebooks.clean import ROOT, code_sha256

RECORD = ROOT / "tests" / "notebooks.json"


def load(record: Path = RECORD) -> dict[str, str]:
    """Notebook file name -> digest of the code that ran; {} while no notebook ran."""
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def save(notebook: NotebookNode, path: Path, record: Path = RECORD) -> None:
    """Write down that the outputs in `notebook`, stored at `path`, come from the code beside them.

    Notebooks that no longer exist beside `path` are forgotten.
    """
    ran = {name: digest for name, digest in load(record).items() if (path.parent / name).exists()}
    ran[path.name] = code_sha256(notebook)
    part = record.with_name(f".{record.name}.{os.getpid()}.part")
    part.write_text(json.dumps(ran, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, record)


def stale(notebook: NotebookNode, path: Path, record: Path = RECORD) -> str | None:
    """None when the stored outputs come from the code beside them, else a sentence that says what to do."""
    ran = load(record).get(path.name)
    if ran is None:
        return (
            f"{path.name} was never run by `make notebooks`: run it, and commit tests/{record.name} as well"
        )
    if ran != code_sha256(notebook):
        return f"{path.name} is stale: its code changed since its outputs were made. Run `make notebooks`"
    return None
