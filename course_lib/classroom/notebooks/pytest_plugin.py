"""What nbval leaves open when pytest runs the notebooks.

* A kernel that dies fails its cell at once. nbval waits for an answer until the cell's time is up.
* Cells tagged `gpu` are skipped, with the reason, on a machine with too few GPUs; so are tests marked
  `gpu`.
* Kernels start without MPLBACKEND, which would make every inline figure vanish.
* The file of patterns to sanitise is found from any directory.

`pyproject.toml` loads this module for every pytest run in the checkout (`-p`), so that `pytest
notebooks/X.ipynb` alone behaves as in `make test`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from functools import cache
from queue import Empty
from typing import Any

import nbval.plugin
import pytest

from course_lib.classroom.notebooks.clean import GPU
from course_lib.classroom.notebooks.execute import missing_gpus

_LOOK_EVERY_S = 0.25


class KernelDied(RuntimeError):
    """The kernel's process ended while a cell waited for it."""


class WatchedKernel(nbval.plugin.RunningKernel):
    """nbval's kernel, looked after while nbval waits for its messages."""

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        """The next message of `stream`; queue.Empty after `timeout` s, KernelDied when none can come."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            alive = self.is_alive()
            left = _LOOK_EVERY_S if end is None else min(_LOOK_EVERY_S, end - time.monotonic())
            try:
                return super().get_message(stream, timeout=max(left, 0.01))
            except Empty:
                if not alive:  # dead before this look, and nothing more came
                    raise KernelDied(self._how_it_ended()) from None
                if end is not None and time.monotonic() >= end:
                    raise

    def _how_it_ended(self) -> str:
        process = getattr(getattr(self.km, "provisioner", None), "process", None)
        code = process.poll() if process is not None else None
        if code is None:
            return "The kernel died"
        return (
            f"The kernel was killed by signal {-code}"
            if code < 0
            else f"The kernel exited with status {code}"
        )


@cache
def _why_no_gpus() -> str | None:
    return missing_gpus()


def pytest_configure(config: pytest.Config) -> None:
    nbval.plugin.RunningKernel = WatchedKernel
    os.environ.pop("MPLBACKEND", None)
    patterns = config.option.nbval_sanitize_with
    if patterns and config.inipath is not None:
        config.option.nbval_sanitize_with = str(config.inipath.parent / patterns)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, nbval.plugin.IPyNbCell) and GPU in item.cell.metadata.get("tags", []):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and (reason := _why_no_gpus()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    died_in = getattr(item.parent, "kernel_died_in", None)
    if died_in is not None:
        pytest.skip(f"the kernel died in cell {died_in}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except KernelDied as died:
        assert isinstance(item, nbval.plugin.IPyNbCell)
        item.parent.kernel_died_in = item.cell_num
        raise nbval.plugin.NbCellError(
            item.cell_num, f"{died} while this cell ran.", item.cell.source
        ) from None
