"""Is it made of messages, and of the right ones? Judged on results that are right."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.classroom.checks.diary import CaseLog, Observation
from course_lib.classroom.checks.on_rank import LIBRARY_NAMES
from course_lib.classroom.checks.verdict import Verdict, failed, joined, plural
from course_lib.classroom.checks.world import World, traffic_line

Judge = Callable[[World, int, list[Observation]], str]


def judge_costs(worlds: list[World]) -> Verdict | None:
    """The first thing wrong, looked for in this order in all worlds, the smallest first."""
    for judge in (_made_of_messages, _counted, _neighbours, _bytes, _messages, _hops, _same_bits):
        for world in worlds:
            for number in range(len(world.cases)):
                observed = world.observed(number)
                assert observed is not None
                text = judge(world, number, observed)
                if text:
                    sentence = f"{world.right()}, but {text} {world.where(number)}"
                    return failed(sentence, [_line(rank, one) for rank, one in enumerate(observed)])
    return None


def _line(rank: int, one: Observation) -> str:
    peers = f" (to {joined([f'rank {peer}' for peer in one.peers])})" if one.peers else ""
    called = f"; called {joined(list(one.collectives))}" if one.collectives else ""
    return f"rank {rank}: {traffic_line(one.sent, one.messages, one.received)}{peers}{called}"


def _made_of_messages(world: World, number: int, observed: list[Observation]) -> str:
    for rank, one in enumerate(observed):
        if one.collectives:
            name = one.collectives[0]
            whose = "the library's" if name in LIBRARY_NAMES else "torch's"
            return f"rank {rank} called {whose} {name}: build it from comm.send, comm.recv and comm.exchange alone"
    return ""


def _counted(world: World, number: int, observed: list[Observation]) -> str:
    right, _ = world.exercise.traffic(world.cases[number], world.size)
    if any(one.sent or one.received for one in observed) or not any(of_rank.sent for of_rank in right):
        return ""
    return "the ledger counted no message of it: build it from comm.send, comm.recv and comm.exchange"


def _bytes(world: World, number: int, observed: list[Observation]) -> str:
    exercise, case, N = world.exercise, world.cases[number], world.size
    right, _ = exercise.traffic(case, N)
    sent, received = [one.sent for one in observed], [one.received for one in observed]
    text = _compare(
        world, sent, [one.sent for one in right], "sent", "bytes", exercise.per_rank, exercise.in_all
    )
    if text.startswith("each rank"):
        text = text.replace(" where", _known_factor(sent[0], case.num_bytes, N) + " where", 1)
    if text:
        return text
    return _compare(
        world, received, [one.received for one in right], "received", "bytes", exercise.per_rank, ""
    )


def _known_factor(sent: int, whole: int, world_size: int) -> str:
    """For a number of bytes that can be recognised: " = (N-1)*S"."""
    known = {world_size: "N*S", 2 * (world_size - 1): "2*(N-1)*S", world_size - 1: "(N-1)*S", 1: "S"}
    if world_size == 2:  # N and 2*(N-1) are both 2
        known[2] = "2*S"
    factor, rest = divmod(sent, whole) if whole else (0, 1)
    return f" = {known[factor]}" if rest == 0 and factor in known else ""


def _messages(world: World, number: int, observed: list[Observation]) -> str:
    exercise, case = world.exercise, world.cases[number]
    if not exercise.counts_messages(case, world.size):
        return ""
    _, right = exercise.traffic(case, world.size)
    formulas = exercise.num_messages, exercise.messages_in_all
    return _compare(world, [one.messages for one in observed], right, "sent", "messages", *formulas)


def _compare(
    world: World, got: list[int], right: list[int], verb: str, unit: str, per_rank: str, in_all: str
) -> str:
    """Who does what may differ (a ring may turn the other way), unless the exercise says otherwise."""
    exercise = world.exercise
    if (sorted(got) == sorted(right)) if exercise.ranks_alike else (got == right):
        return ""
    verbs, what = "sends" if verb == "sent" else "receives", exercise.what
    if len(set(got)) == len(set(right)) == 1:
        return f"each rank {verb} {got[0]} {unit} where {what} {verbs} {per_rank} = {right[0]}"
    if not exercise.ranks_alike:
        rank = next(r for r in range(world.size) if got[r] != right[r])
        return f"rank {rank} {verb} {plural(got[rank], unit[:-1])} where {plural(right[rank], unit[:-1])} should be"
    if sum(got) != sum(right):
        formula = f"{in_all} = " if in_all else ""
        return f"the ranks {verb} {sum(got)} {unit} in all where {what} {verbs} {formula}{sum(right)}"
    if max(got) > max(right):
        rank = got.index(max(got))
        return f"rank {rank} {verb} {max(got)} {unit} where no rank of {what} {verbs} more than {max(right)}"
    return f"the ranks {verb} {got} {unit} where those of {what} {verbs.removesuffix('s')} {right}, in whatever order"


def _neighbours(world: World, number: int, observed: list[Observation]) -> str:
    if not world.exercise.one_neighbour:
        return ""
    for rank, one in enumerate(observed):
        if len(one.peers) > 1:
            to = joined([f"rank {peer}" for peer in one.peers])
            return f"rank {rank} sent to {to}; in a ring a rank sends to one neighbour only"
    return ""


def _hops(world: World, number: int, observed: list[Observation]) -> str:
    most = world.exercise.most_hops(world.size)
    hops = longest_way(world.case_logs(number))
    if most is None or hops is None or hops <= most:
        return ""
    return f"the result went through {hops} hands, one after the other, where a tree needs 2*log2(N) = {most}"


def longest_way(logs: list[CaseLog]) -> int | None:
    """The most messages that had to wait one for another, or None if a message has no partner."""
    clock, at = [0] * len(logs), [0] * len(logs)
    under_way: dict[tuple[int, int], list[int]] = {}
    posted: set[tuple[int, int]] = set()
    while any(at[rank] < len(log.messages) for rank, log in enumerate(logs)):
        moved = False
        for rank, log in enumerate(logs):
            if at[rank] == len(log.messages):
                continue
            message = log.messages[at[rank]]
            if message.to is not None and (rank, at[rank]) not in posted:
                under_way.setdefault((rank, message.to), []).append(clock[rank] + 1)
                posted.add((rank, at[rank]))
            if message.source is not None:
                arrived = under_way.get((message.source, rank))
                if not arrived:
                    continue
                clock[rank] = max(clock[rank], arrived.pop(0))
            at[rank] += 1
            moved = True
        if not moved:
            return None
    return max(clock)


def _same_bits(world: World, number: int, observed: list[Observation]) -> str:
    if not world.exercise.same_everywhere:
        return ""
    first = observed[0].result
    for rank, one in enumerate(observed):
        different = (one.result != first) & ~((one.result != one.result) & (first != first))
        if bool(different.any()):
            at = int(different.nonzero()[0])
            mine, theirs = f"{first[at].item():.9g}", f"{one.result[at].item():.9g}"
            return (
                f"the ranks do not end with the same bits: at position {at} rank 0 has {mine} and rank {rank} "
                f"{theirs}; "
                "add each element on one way only and copy the result"
            )
    return ""
