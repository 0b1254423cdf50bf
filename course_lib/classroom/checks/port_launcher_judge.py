"""What the workers of a ported script printed, and what of it is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.classroom.checks.verdict import plural
from course_lib.parallel.sampler import sampler_indices
from course_lib.plan.ranks import worker_ranks

NUM_EPOCHS, NUM_SAMPLES = 3, 12
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


def judge_output(outputs: Mapping[int, str], nproc_per_node: list[int]) -> str:
    """What is wrong with what the ranks printed; "" if nothing is."""
    ranks = [worker_ranks(nproc_per_node, node, r) for node, n in enumerate(nproc_per_node) for r in range(n)]
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
        beyond = line.local_rank == str(rank) and rank >= right["LOCAL_WORLD_SIZE"]
        why = ": that is its RANK, and on the second node no GPU has that number" if beyond else ""
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
