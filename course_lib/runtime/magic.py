"""`%%torchrun`: the cell is a script, and torchrun runs it.

    %load_ext course_lib.runtime.magic

    %%torchrun -n 2 --max-restarts 1
    import os
    print("rank", os.environ["RANK"])

The cell knows nothing of the notebook's variables: it is a file of its own, which each rank runs from its first line.
"""

from __future__ import annotations

import argparse
import keyword
import os
import shlex
import shutil
from pathlib import Path
from typing import Any, NoReturn

from course_lib.runtime.torchrun import TorchrunResult, torchrun
from course_lib.runtime.torchrun.guardian import temporary_directory


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the line as an exception, not by ending the kernel."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%torchrun: {message}. {self.format_usage().strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ValueError(message or "")


def _parser() -> _Parser:
    parser = _Parser(prog="%%torchrun", allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("-n", "--nproc-per-node", default="2", help="workers of each node: 2, or 2,1 for two nodes")
    add("--nnodes", help="number of nodes, or MIN:MAX")
    add("--hosts", help="the name of a VirtualHosts in the notebook")
    add("--max-restarts", type=int, default=0)
    add("--rdzv-backend")
    add("--rdzv-timeout", type=float, default=30.0)
    add("--timeout", type=float, default=60.0)
    add("--deadline", type=float)
    add("--show", default="live")
    add("--log-dir")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    add("--save", metavar="FILE", help="keep the script under this name")
    add("--into", metavar="NAME", help="put the TorchrunResult into this variable")
    add("script_args", nargs="*", help="the script's own arguments, after --")
    return parser


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ValueError(f"%%torchrun: {str(error).lower()} in: {line.strip()}") from None


def _number(text: str) -> int | str | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def run_cell(line: str, cell: str, variables: dict[str, Any]) -> TorchrunResult:
    """Run the cell's text; `variables`: the notebook's, in which `--hosts` is looked up and `--into` is put.

    Raises what `torchrun` raises; ValueError for a wrong line.
    """
    asked = vars(_parser().parse_args(_words(line)))
    script_args, save, into, hosts = (asked.pop(name) for name in ("script_args", "save", "into", "hosts"))
    if hosts is not None and hosts not in variables:
        raise ValueError(f"%%torchrun: --hosts names a variable of the notebook; there is no {hosts!r}")
    if into is not None and (not into.isidentifier() or keyword.iskeyword(into)):
        raise ValueError(f"%%torchrun: --into: expected the name of a variable, got {into!r}")
    if save is not None and (not Path(save).name or Path(save).is_dir() or not Path(save).parent.is_dir()):
        raise ValueError(
            f"%%torchrun: --save: expected a file's name in a directory that is there, got {save!r}"
        )
    pairs = [pair.partition("=") for pair in asked.pop("env")]
    for name, equals, value in pairs:
        if not name or not equals:
            raise ValueError(
                f"%%torchrun: --env: expected NAME=VALUE, as in --env A=1, got {name + equals + value!r}"
            )
    asked["nproc_per_node"] = _number(asked["nproc_per_node"])
    directory = temporary_directory()
    script = directory / (Path(save).name if save else "cell.py")
    try:
        script.write_text(cell, encoding="utf-8")
        if save:
            Path(save).write_text(cell, encoding="utf-8")
        result = torchrun(
            script,
            *script_args,
            hosts=variables[hosts] if hosts is not None else None,
            env=_search_path() | {name: value for name, _, value in pairs},
            names={str(script): save or "cell.py"},
            **asked,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if into:
        variables[into] = result
    return result


def _search_path() -> dict[str, str]:
    """Let the script import what lies beside the notebook, as a cell can."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))}


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext course_lib.runtime.magic`."""

    def magic(line: str, cell: str) -> None:
        run_cell(line, cell, shell.user_ns)

    shell.register_magic_function(magic, "cell", "torchrun")
