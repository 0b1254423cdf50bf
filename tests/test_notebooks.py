"""The stored chapters are clean, made by the code they show, and their cells short.

nbval runs them and compares the outputs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.classroom.notebooks.clean import ROOT, findings, read
from course_lib.classroom.notebooks.record import load, stale

CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)
def test_the_stored_notebook_is_clean(path: Path):
    found = findings(read(path), path.read_text(encoding="utf-8"))
    assert not found, "\n".join([f"{path.name}:", *found])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)
def test_the_outputs_come_from_this_code(path: Path):
    sentence = stale(read(path), path)
    assert sentence is None, sentence


def test_the_record_names_no_notebook_that_is_gone():
    assert set(load()) <= {path.name for path in CHAPTERS}


def test_the_chapters_are_named_as_the_index_sorts_them():
    for path in CHAPTERS:
        assert path.name[:2].isdigit() and path.name[2] == "_", f"{path.name}: name it NN_topic.ipynb"
