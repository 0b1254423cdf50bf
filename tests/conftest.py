"""What all tests share: notes for the end of the run, and a backend for figures that needs no display."""

from __future__ import annotations

import matplotlib
import pytest

_NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOTES] = []
    # In this process only. MPLBACKEND would be inherited by kernels, whose inline figures would vanish.
    matplotlib.use("Agg")


@pytest.fixture
def note(request: pytest.FixtureRequest):
    """`note(text)`: print `text` at the end of the run, also when the test passes."""
    return request.config.stash[_NOTES].append


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for text in config.stash[_NOTES]:
        terminalreporter.section("note", sep="-")
        terminalreporter.write_line(text)
