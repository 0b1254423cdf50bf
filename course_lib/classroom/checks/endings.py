"""A run that did not come to its end: who raised, whose process ended, or who waits for whom."""

from __future__ import annotations

import re
import signal

from course_lib.classroom.checks.diary import CaseLog, Message
from course_lib.classroom.checks.verdict import NOT_ATTEMPTED, Verdict, failed, joined, plural
from course_lib.classroom.checks.world import World, traffic_line
from course_lib.comm.message_log import ENDS_DIFFER
from course_lib.runtime.errors import Failure, RankError, RanksHung, ranks_text
from course_lib.runtime.report import is_consequence, is_timeout

_ENDLESS = 200  # more messages than any case needs: a loop


def judge_ending(world: World, number: int) -> Verdict:
    """The verdict on a run of which case `number` is the first that not every rank finished."""
    logs = world.case_logs(number)
    if isinstance(world.error, RanksHung):
        text = _hang(world.error, logs)
    elif isinstance(world.error, RankError):
        rank = _first_to_raise(logs)
        if rank is not None and _is_unwritten(logs[rank]):
            return NOT_ATTEMPTED
        # Either end may have noticed; the sizes of both say the same whoever did.
        sizes = size_mismatch(logs) if rank is not None and ENDS_DIFFER in _of(logs[rank])[1] else ""
        text = sizes or (_death(world.error, logs) if rank is None else _raised(rank, world, logs))
    else:
        raise AssertionError(f"case {number} has no end and no error")
    lines = [f"rank {rank}: {_did(world, rank, log)}" for rank, log in enumerate(logs)]
    return failed(f"{text} {world.where(number)}", lines)


def size_mismatch(logs: list[CaseLog]) -> str:
    """The first message whose receiver has made room for another number of bytes than are sent; "" if none."""
    for sender, log in enumerate(logs):
        for receiver, other in enumerate(logs):
            sent = [message.sent for message in log.messages if message.to == receiver]
            room = [message.received for message in other.messages if message.source == sender]
            for count, have in zip(sent, room, strict=False):
                if count != have:
                    return f"rank {sender} sends {plural(count, 'byte')} to rank {receiver}, which has room for {have}"
    return ""


def clean(message: str) -> str:
    """The first line of an exception's message, without what differs from run to run."""
    line = message.strip().splitlines()[0] if message.strip() else ""
    line = re.sub(r"\s*\[/[^\]]*\.(cc|cpp|h):\d+\]\s*", " ", line)
    line = re.sub(r"0x[0-9a-fA-F]+", "0x...", line)
    line = re.sub(r"\d+\.\d+\.\d+\.\d+(\]?:\d+)?", "...", line)
    return line.strip()[:200].removesuffix(".")


def raised(kind: str, message: str) -> str:
    """An exception in words: "raised KeyError: 'x'", or "raised KeyError" where it says nothing."""
    message = clean(message)
    return f"raised {kind}" + (f": {message}" if message else "")


def _of(log: CaseLog) -> tuple[str, str, str]:
    assert log.raised is not None
    return log.raised


def _is_victim(log: CaseLog) -> bool:
    """Whether what the rank raised only says that another one is gone."""
    kind, message, _ = _of(log)
    failure = Failure(0, kind, message)
    return is_consequence(failure) or is_timeout(failure)


def _is_unwritten(log: CaseLog) -> bool:
    kind, _, line = _of(log)
    return kind == "NotImplementedError" and (kind in line or not line)


def _first_to_raise(logs: list[CaseLog]) -> int | None:
    return next((rank for rank, log in enumerate(logs) if log.raised and not _is_victim(log)), None)


def _raised(rank: int, world: World, logs: list[CaseLog]) -> str:
    kind, message, line = _of(logs[rank])
    who = f"rank {rank}"
    if world.size > 1 and all(log.raised and log.raised[0] == kind and log.raised[2] == line for log in logs):
        who = "every rank"
    message = clean(message.removeprefix(f"rank {rank}: "))
    return f"{who} raised {kind}" + (f" at `{line}`" if line else "") + (f": {message}" if message else "")


def _death(error: RankError, logs: list[CaseLog]) -> str:
    if not error.exitcode and error.exc_type:
        return f"rank {error.rank} {raised(error.exc_type, error.exc_message)}"
    mismatch = size_mismatch(logs)
    if mismatch:
        return (
            f"{mismatch}: the tensor it receives into must be as long as what was sent, and of the same dtype"
        )
    code = error.exitcode or 0
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    return f"the process of rank {error.rank} {how} before your function returned"


def _hang(error: RanksHung, logs: list[CaseLog]) -> str:
    endless = [rank for rank, log in enumerate(logs) if len(log.messages) > _ENDLESS]
    if endless:
        return f"it does not end: rank {endless[0]} goes on sending and receiving"
    states = {rank: _standing(error, rank, log) for rank, log in enumerate(logs)}
    done = [rank for rank, state in states.items() if not state]
    rest = joined([f"rank {rank} {state}" for rank, state in states.items() if state])
    has = f"{ranks_text(done)} {'has' if len(done) == 1 else 'have'} returned, but " if done else ""
    return f"it does not end: {has}{rest}"


def _standing(error: RanksHung, rank: int, log: CaseLog) -> str:
    """Where a rank stands that did not return; "" for one that did."""
    if log.ended is not None:
        return ""
    if log.pending is not None:
        return f"waits in {log.pending}"
    told = error.ranks[rank] if rank < len(error.ranks) else ""
    if told.startswith("waiting in"):
        return "waits" + re.sub(r" \(collective \d+\)", "", told).removeprefix("waiting")
    return "is still computing"


def _did(world: World, rank: int, log: CaseLog) -> str:
    if len(log.messages) > _ENDLESS:
        return f"more than {_ENDLESS} messages, and no end"
    over = [message for message in log.messages if message is not log.pending]
    traffic = traffic_line(
        sum(m.sent for m in over), sum(m.to is not None for m in over), sum(m.received for m in over)
    )
    return f"{traffic}; {_end(world, rank, log)}"


def _end(world: World, rank: int, log: CaseLog) -> str:
    if log.ended is not None:
        return "returned"
    if log.raised is not None:
        return "lost the connection to another rank" if _is_victim(log) else raised(*_of(log)[:2])
    if isinstance(world.error, RanksHung):
        return _standing(world.error, rank, log)
    if isinstance(world.error, RankError) and world.error.rank == rank:
        return "its process ended" + _inside(log.pending)
    return f"waited in {log.pending}" if log.pending else "was ended while it was computing"


def _inside(pending: Message | None) -> str:
    return f" in {pending}" if pending else ""
