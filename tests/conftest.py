"""What all tests share: ranks kept between tests, notes for the end of the run, and a backend for figures that needs
no display.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import nbval.plugin
import pytest

from course_lib import Pool, RankResults

_NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOTES] = []
    # In this process only. MPLBACKEND would be inherited by kernels, whose inline figures would vanish.
    matplotlib.use("Agg")


class Ranks:
    """A pool for each world size, made anew after a failure, so that one red test does not redden those after it."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> RankResults:
        pool = self.pools.pop(world_size, None) or Pool(world_size, show="none")
        results = pool.run(fn, *args)
        self.pools[world_size] = pool
        return results

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Chapters, links, browsers, and what watches processes begin and end, run one at a time, after the rest."""
    for item in items:
        chapter = isinstance(item, nbval.plugin.IPyNbCell) or item.path.name == "test_notebooks_paced.py"
        marked = any(map(item.get_closest_marker, ("hosts", "browser")))
        if chapter or marked or item.path.parent.name == "runtime":
            item.add_marker("alone")


@pytest.fixture
def note(request: pytest.FixtureRequest):
    """`note(text)`: print `text` at the end of the run, also when the test passes."""
    return request.config.stash[_NOTES].append


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for text in config.stash[_NOTES]:
        terminalreporter.section("note", sep="-")
        terminalreporter.write_line(text)
