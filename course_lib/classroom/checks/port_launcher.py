"""The exercise on the old launcher: a learner's script is run by the real torchrun, as two nodes with 2 + 1 workers,
and with 1 + 2: what is computed from RANK alone is right for one of them at most.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from course_lib.classroom import scripts
from course_lib.classroom.checks.endings import clean, raised
from course_lib.classroom.checks.port_launcher_judge import NUM_EPOCHS, judge_output
from course_lib.classroom.checks.runs import RunExercise, it_returned, run
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed, joined
from course_lib.classroom.scripts.ported_launcher import main
from course_lib.comm.communicator import Communicator
from course_lib.runtime.errors import Failure, LaunchError, RankError, RanksHung, ranks_text
from course_lib.runtime.report import is_consequence
from course_lib.runtime.torchrun import torchrun

OLD_SCRIPT = Path(*scripts.__path__, "old_launcher.py").read_text(encoding="utf-8")
"""What the learner begins with."""

LAYOUTS = ([2, 1], [1, 2])
"""nproc_per_node of each job; the second one runs only if the first is right."""

_WORLD = sum(LAYOUTS[0])
_NO_OPTION = (
    'torchrun hands over no --local-rank: read int(os.environ["LOCAL_RANK"]), and take the argument out of the '
    "parser"
)
_ABOUT_RANKS = r"RuntimeError|ValueError|Dist\w+"  # what a wrong number of ranks may raise
_WRITTEN = re.compile(  # alone, or as the last of several: `rank, world_size = ..., 2`
    r"\b(?:world_size|num_replicas)(?:: int)? ?= ?(?:\(.*, )?(\d+)\)?(?=[,)]|$)", re.MULTILINE
)


class PortLauncher(RunExercise):
    """A text, a Path, or f(old) -> text: a script that runs under torchrun."""

    takes_text: ClassVar[bool] = True

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        text = run(_ask, fn, OLD_SCRIPT, world_size=1, timeout=timeout)[0]
        if not isinstance(text, str):
            return failed(f"{it_returned(text)}; expected the text of a script")
        if re.fullmatch(r"[^\n]+\.py", text.strip()):
            name = text.strip()
            return failed(
                f'{name!r} is the name of a file, not a script: put Path(...) around it, Path("{name}")'
            )
        if _code(text) in ("", _code(OLD_SCRIPT)):
            return NOT_ATTEMPTED
        try:
            compile(text, "ported.py", "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            return failed(
                f"Python cannot read the script: {error.args[0]}" + (f" in line {line}" if line else "")
            )
        return grade_script(text, timeout)


def _ask(comm: Communicator, fn: Callable[..., Any], old: str) -> Any:
    return fn(old)


def _code(text: str) -> str:
    """`text` without comments, docstrings and layout, to see whether anything was changed."""
    try:
        tree = ast.parse(text)
        has_docstring = ast.get_docstring(tree) is not None
        return ast.unparse(ast.Module(tree.body[1:] if has_docstring else tree.body, []))
    except (SyntaxError, ValueError):
        return text.strip()


def grade_script(text: str, timeout: float) -> Verdict:
    """Run it in each layout, and read what the workers print."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ported.py")
        script.write_text(text, encoding="utf-8")
        for nproc_per_node in LAYOUTS:
            problem, lines = _run_script(script, text, nproc_per_node, timeout)
            if problem:
                return failed(f"{problem} {_where(nproc_per_node)}", lines)
    said = (
        "passed: run by torchrun as 2 nodes with 2 + 1 workers, and with 1 + 2, each rank knows its number, its number "
        f"on its node and how many there are; they add up numbers together, and in {NUM_EPOCHS} epochs the samples "
        f"have {NUM_EPOCHS} orders"
    )
    return Verdict(passed=True, attempted=True, text=said)


def _run_script(script: Path, text: str, nproc_per_node: list[int], timeout: float) -> tuple[str, list[str]]:
    """What is wrong with the script in this layout ("": nothing), and what the workers printed."""
    result = torchrun(
        script,
        *("--epochs", NUM_EPOCHS),
        nproc_per_node=nproc_per_node,
        show="none",
        check=False,
        timeout=max(10.0, timeout),
        deadline=max(90.0, 4 * timeout),
        names={str(script): "ported.py"},
    )
    if result.error is not None:
        return explain(text, result.error), []
    problem = judge_output(result.output, nproc_per_node)
    if problem:
        lines = [line for rank in sorted(result.output) for line in result.output[rank].splitlines()]
        return problem, lines[: 3 * NUM_EPOCHS]
    if _WORLD in written_world_sizes(text):
        return (
            f"right with these {_WORLD} workers, but their number is written into the script: any other job fails; "
            "take it from the environment"
        ), []
    return "", []


def _where(nproc_per_node: list[int]) -> str:
    workers = "(torchrun, 2 nodes with {} + {} workers".format(*nproc_per_node)
    return f"{workers})" if nproc_per_node == LAYOUTS[0] else f"{workers}; with 2 + 1 it was right)"


def explain(text: str, error: LaunchError) -> str:
    """Why the job failed."""
    if isinstance(error, RanksHung):
        return _hang(error)
    if not isinstance(error, RankError):
        return f"torchrun failed: {clean(str(error))}"
    wants_option = "LOCAL_RANK" not in text and re.search(r"--local.rank", text)
    if wants_option and ("None" in error.exc_message or re.search(r"required: --local.rank", error.output)):
        return _NO_OPTION
    if error.exc_type == "KeyError":
        return f"rank {error.rank} raised KeyError: there is no {clean(error.exc_message)}; see the table of variables"
    usage = re.search(r"error: (.*)", error.output) if error.exitcode == 2 else None
    if usage:
        return f"rank {error.rank} does not accept its arguments, --epochs {NUM_EPOCHS}: {clean(usage[1])}"
    said = _lost(error) or f"rank {error.rank} {_raised(error)}"
    if written_world_sizes(text) and re.fullmatch(_ABOUT_RANKS, error.exc_type):
        said += f". A world size is written into the script; this job has {_WORLD} ranks: take it from the environment"
    return said


def _hang(error: RanksHung) -> str:
    waiting: dict[str, list[int]] = {}
    for rank, told in enumerate(error.ranks):
        found = re.match(r"waiting in (\w+)", told)
        waiting.setdefault(found[1] if found else "", []).append(rank)
    elsewhere = waiting.pop("", [])
    if not waiting or "init_process_group" in waiting:
        return (
            "it does not end. If it has no endless loop, the workers wait for each other: each must join with the "
            "job's WORLD_SIZE and with its own RANK, which LOCAL_RANK is on the first node only; init_process_group "
            "takes both from the environment if you give neither"
        )
    who = [f"{ranks_text(ranks)} in {call}" for call, ranks in waiting.items()]
    who += [f"{ranks_text(elsewhere)} in none"] if elsewhere else []
    return (
        f"it does not end: the workers wait in calls of torch.distributed, {joined(who)}. Every rank must make the "
        "same calls in the same order, or the others wait for it"
    )


def _lost(error: RankError) -> str:
    """Of an error that says no more than that a connection broke; "" for another."""
    failure = Failure(error.rank, error.exc_type, error.exc_message)
    if not error.exc_type or not (is_consequence(failure) or "Read error" in error.exc_message):
        return ""
    said = f"rank {error.rank} lost the connection to another worker"
    left = re.search(r"^R(anks? .* left first, without an error)", str(error), re.MULTILINE)
    if left and "init_process_group" not in error.traceback:
        return f"{said}: r{left[1]}. Every rank must make the same calls of torch.distributed, to the last"
    return (
        f"{said}, though none failed by itself. Most likely two workers joined with the same rank: LOCAL_RANK begins "
        "with 0 again on every node; join with RANK, which is in the environment"
    )


def _raised(error: RankError) -> str:
    message = re.sub(r"^\[enforce fail at [^\]]*\] *", "", error.exc_message)  # gloo's, with a path
    return raised(error.exc_type, message) if error.exc_type else clean(message)


def written_world_sizes(text: str) -> set[int]:
    """The numbers that are written into the script where the number of all ranks is due."""
    return {int(number) for number in _WRITTEN.findall(_code(text))}


EXERCISE = PortLauncher("port_launcher", "old", main)
