"""Run a notebook from top to bottom in a fresh kernel of this Python, with a time limit for each cell.

A cell tagged `gpu` is passed over where the machine has too few GPUs, and keeps the outputs it has: a
chapter that was run on a GPU server can be run again on a laptop and still shows what the server showed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from course_lib.classroom.notebooks.clean import GPU, code_cells, tags, where

NUM_GPUS = 2
"""GPUs that a cell tagged `gpu` may count on."""
CELL_TIMEOUT_S = 60.0
_WAIT_FOR_KERNEL_S = 60


class NotebookFailed(Exception):
    """A cell raised, ran too long or lost its kernel; the message names the cell."""


class ThisPython(KernelSpecManager):
    """Always the kernel of the running interpreter: a kernel named python3 may be anybody's."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return self.kernel_spec_class(resource_dir=RESOURCES, **get_kernel_dict())


def kernel_env() -> dict[str, str]:
    """The environment for a kernel: ours without MPLBACKEND, which would make every inline figure vanish."""
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}


def missing_gpus() -> str | None:
    """None when `gpu` cells can run here, else the reason why not."""
    import torch  # seconds: only where a notebook has such a cell

    present = torch.cuda.device_count()
    return None if present >= NUM_GPUS else f"needs {NUM_GPUS} GPUs, and this machine has {present}"


def execute(notebook: NotebookNode, directory: Path, timeout_s: float = CELL_TIMEOUT_S) -> None:
    """Run all code cells in place; outputs and execution counts of `notebook` become this run's.

    directory: where the kernel starts, as JupyterLab does it (the notebook's own folder).
    timeout_s: seconds that one cell may take.
    Raises NotebookFailed at the first cell that raises without the tag `raises-exception`, exceeds the
    limit, or ends the kernel; the outputs so far, the error included, are then in `notebook`.
    """
    skip_gpu = any(GPU in tags(cell) for cell in code_cells(notebook)) and missing_gpus() is not None
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=timeout_s,
        startup_timeout=_WAIT_FOR_KERNEL_S,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(directory)}},
    )
    client.reset_execution_trackers()
    with client.setup_kernel(
        env=kernel_env(), cleanup_kc=True
    ):  # it would not end a kernel of a manager it was given
        number = 0
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            number += 1
            if not (skip_gpu and GPU in tags(cell)):
                _execute_cell(client, cell, index, number, timeout_s)


def _execute_cell(
    client: NotebookClient, cell: NotebookNode, index: int, number: int, timeout_s: float
) -> None:
    place = where(number, cell)
    try:
        client.execute_cell(cell, index)
    except CellTimeoutError:
        raise NotebookFailed(f"{place} ran longer than {timeout_s:g} s") from None
    except DeadKernelError:
        raise NotebookFailed(f"the kernel died in {place}") from None
    except CellExecutionError as error:
        raise NotebookFailed(f"{place} raised {error.ename}: {error.evalue}\n{error.traceback}") from None
