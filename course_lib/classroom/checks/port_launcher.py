"""The exercise on the old launcher: a learner's script is run by the real torchrun, as two nodes with 2 + 1 workers."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from course_lib.classroom import scripts
from course_lib.classroom.checks.endings import clean, raised
from course_lib.classroom.checks.runs import RunExercise, it_returned, run
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed, plural
from course_lib.classroom.scripts.ported_launcher import main
from course_lib.comm.communicator import Communicator
from course_lib.parallel.sampler import sampler_indices
from course_lib.plan.ranks import worker_ranks
from course_lib.runtime.errors import LaunchError, RankError, RanksHung
from course_lib.runtime.torchrun import torchrun

OLD_SCRIPT = Path(*scripts.__path__, "old_launcher.py").read_text(encoding="utf-8")
"""What the learner begins with."""

NPROC_PER_NODE, NUM_EPOCHS, NUM_SAMPLES = [2, 1], 3, 12
_WORLD = sum(NPROC_PER_NODE)
_HERE = "(torchrun, 2 nodes with 2 + 1 workers)"
_NO_OPTION = (
    'torchrun hands over no --local-rank: read int(os.environ["LOCAL_RANK"]), and take the argument out of the '
    "parser"
)
_ABOUT_RANKS = r"RuntimeError|ValueError|Dist\w+"  # what a wrong number of ranks may raise
_WRITTEN = re.compile(  # alone, or as the last of several: `rank, world_size = ..., 2`
    r"\b(?:world_size|num_replicas)(?:: int)? ?= ?(?:\(.*, )?(\d+)\)?(?=[,)]|$)", re.MULTILINE
)
_LINE = re.compile(
    r"^rank (\S+) of (\S+), local rank (\S+), epoch (\d+): \[([\d, ]*)\], sum (?:tensor\()?(\d+)\)?$"
)


@dataclass(frozen=True)
class Line:
    """What a worker printed of one epoch. rank, world_size, local_rank: as text, they may be anything."""

    rank: str
    world_size: str
    local_rank: str
    epoch: int
    samples: tuple[int, ...]
    total: int


def read_lines(output: str) -> list[Line]:
    found = []
    for match in filter(None, map(_LINE.match, output.splitlines())):
        rank, world_size, local_rank, epoch, samples, total = match.groups()
        dealt = tuple(int(one) for one in samples.split(",") if one.strip())
        found.append(Line(rank, world_size, local_rank, int(epoch), dealt, int(total)))
    return found


class PortLauncher(RunExercise):
    """A text, a Path, or f(old) -> text: a script that runs under torchrun."""

    takes_text: ClassVar[bool] = True

    def judge(self, fn: Callable[..., Any], timeout: float) -> Verdict:
        text = run(_ask, fn, OLD_SCRIPT, world_size=1, timeout=timeout)[0]
        if not isinstance(text, str):
            return failed(f"{it_returned(text)}; expected the text of a script")
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
    """Run it, and read what the workers print."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ported.py")
        script.write_text(text, encoding="utf-8")
        result = torchrun(
            script,
            *("--epochs", NUM_EPOCHS),
            nproc_per_node=NPROC_PER_NODE,
            show="none",
            check=False,
            timeout=max(10.0, timeout),
            deadline=max(90.0, 4 * timeout),
            names={str(script): "ported.py"},
        )
    if result.error is not None:
        return failed(f"{explain(text, result.error)} {_HERE}")
    problem = judge_output(result.output)
    if problem:
        lines = [line for rank in sorted(result.output) for line in result.output[rank].splitlines()]
        return failed(f"{problem} {_HERE}", lines[: 3 * NUM_EPOCHS])
    if _WORLD in written_world_sizes(text):
        return failed(
            f"right with these {_WORLD} workers, but their number is written into the script: any other job fails; "
            f"take it from the environment {_HERE}"
        )
    said = (
        "passed: run by torchrun as 2 nodes with 2 + 1 workers, each rank knows its number, its number on its "
        f"node and how many there are; they add up numbers together, and in {NUM_EPOCHS} epochs the samples have "
        f"{NUM_EPOCHS} orders"
    )
    return Verdict(passed=True, attempted=True, text=said)


def explain(text: str, error: LaunchError) -> str:
    """Why the job failed."""
    if isinstance(error, RanksHung):
        return (
            "it does not end. If it has no endless loop, the workers wait for each other: each must join with the "
            "job's WORLD_SIZE and with its own RANK, which LOCAL_RANK is on the first node only; init_process_group "
            "takes both from the environment if you give neither"
        )
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
    message = re.sub(r"^\[enforce fail at [^\]]*\] *", "", error.exc_message)  # gloo's, with a path
    said = f"rank {error.rank} {raised(error.exc_type, message) if error.exc_type else clean(message)}"
    if written_world_sizes(text) and re.fullmatch(_ABOUT_RANKS, error.exc_type):
        said += f". A world size is written into the script; this job has {_WORLD} ranks: take it from the environment"
    return said


def written_world_sizes(text: str) -> set[int]:
    """The numbers that are written into the script where the number of all ranks is due."""
    return {int(number) for number in _WRITTEN.findall(_code(text))}


# --- what the workers printed


def judge_output(outputs: Mapping[int, str]) -> str:
    """What is wrong with what the ranks printed; "" if nothing is."""
    ranks = [worker_ranks(NPROC_PER_NODE, node, r) for node, n in enumerate(NPROC_PER_NODE) for r in range(n)]
    lines = {one["RANK"]: read_lines(outputs.get(one["RANK"], "")) for one in ranks}
    for one in ranks:
        problem = _identity(one, lines[one["RANK"]])
        if problem:
            return problem
    return _samples(lines)


def _identity(right: Mapping[str, int], lines: list[Line]) -> str:
    rank, local, world = right["RANK"], right["LOCAL_RANK"], right["WORLD_SIZE"]
    if not lines:
        return f"rank {rank} printed no line as the old script does; keep its print as it is"
    if [line.epoch for line in lines] != list(range(NUM_EPOCHS)):
        return (
            f"rank {rank} printed {plural(len(lines), 'line')}, though the script was started with --epochs "
            f"{NUM_EPOCHS}: keep this argument, and one line for each epoch"
        )
    line = lines[0]
    if line.rank != str(rank):
        why = ": that is its LOCAL_RANK, which begins with 0 again on every node" * (line.rank == str(local))
        return f"rank {rank} takes itself for rank {line.rank}{why}"
    if line.world_size != str(world):
        return (
            f"rank {rank} takes {line.world_size} for the number of all ranks, which is {world}: is it written "
            "into the script? ask dist.get_world_size()"
        )
    if line.local_rank != str(local):
        why = (
            ": that is its RANK, and on the second node no GPU has that number"
            if line.local_rank == str(rank)
            else ""
        )
        return (
            f"rank {rank} takes {line.local_rank} for its local rank, which is {local}: read "
            f'os.environ["LOCAL_RANK"]{why}'
        )
    return ""


def _samples(lines: Mapping[int, list[Line]]) -> str:
    world = len(lines)
    for epoch in range(NUM_EPOCHS):
        dealt = [lines[rank][epoch].samples for rank in range(world)]
        if sorted(sum(dealt, ())) != list(range(NUM_SAMPLES)):
            return (
                f"the ranks train on {sum(map(len, dealt))} samples in epoch {epoch}, where each of the "
                f"{NUM_SAMPLES} has to come once: the sampler must know the rank and the number of ranks of this "
                "job"
            )
        if {lines[rank][epoch].total for rank in range(world)} != {sum(range(NUM_SAMPLES))}:
            return (
                f"the sum over the ranks is {lines[0][epoch].total} on rank 0, and should be "
                f"{sum(range(NUM_SAMPLES))}, everywhere: all ranks of both nodes have to add up in one process "
                "group"
            )
    orders = {tuple(lines[rank][epoch].samples for rank in range(world)) for epoch in range(NUM_EPOCHS)}
    if len(orders) == 1:
        return (
            "right ranks, but every epoch has the same order of samples: say which one begins, with "
            "sampler.set_epoch(epoch)"
        )
    right = [
        tuple(tuple(sampler_indices(NUM_SAMPLES, world, rank, epoch=epoch)) for rank in range(world))
        for epoch in range(NUM_EPOCHS)
    ]
    got = [tuple(lines[rank][epoch].samples for rank in range(world)) for epoch in range(NUM_EPOCHS)]
    if got != right:
        return "DistributedSampler deals other samples in epochs 0, 1 and 2: call sampler.set_epoch(epoch)"
    return ""


EXERCISE = PortLauncher("port_launcher", "old", main)
