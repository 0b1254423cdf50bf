"""The messages of failed and hung launches: who caused it, who only waits, and where each rank stands."""

from __future__ import annotations

import linecache
import os
import re
import signal

from course_lib.runtime.errors import (
    Failure,
    Frame,
    RankError,
    RanksHung,
    grouped,
    place,
    ranks_text,
    shortened,
    users_part,
)
from course_lib.runtime.standing import Standing, mismatch

# A rank that says this has usually only noticed that another one is gone.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|remote process|store .*(closed|shut ?down)"
    r"|failed to (recv|send)|recvValue|ncclRemoteError|socket (closed|error)|no longer reachable",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms|wait timeout|timeout caused pair closure|operation timeout", re.I
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def is_consequence(failure: Failure) -> bool:
    return failure.status is None and bool(_CONSEQUENCE.search(failure.exc_message))


def is_timeout(failure: Failure) -> bool:
    """Torch's own limit ran out (see `worker._connect`): a hang that the board did not show."""
    torchs = failure.exc_type in ("RuntimeError", "DistBackendError", "DistNetworkError")
    return torchs and bool(_TIMEOUT.search(failure.exc_message))


def first_cause(failures: list[Failure]) -> Failure:
    """The failure to report: a death or an exception of its own before a consequence; then the earliest."""
    ranked = sorted(failures, key=lambda failure: (is_consequence(failure), is_timeout(failure), failure.at))
    same = [f for f in failures if (f.exc_type, f.exc_message) == (ranked[0].exc_type, ranked[0].exc_message)]
    return min(same, key=lambda failure: failure.rank)


def parse_stack(text: str) -> list[Frame]:
    """faulthandler's text -> the main thread's frames, outermost first, without the course's own start-up."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    for thread in threads:
        found = [match.groups() for match in map(_FRAME.match, thread.splitlines()) if match]
        if any(file.endswith(os.path.join("runtime", "worker.py")) for file, _, _ in found):
            frames = [Frame(f, int(n), fn, linecache.getline(f, int(n)).strip()) for f, n, fn in found]
            inner = [not frame.file.endswith(("worker.py", "forkserver.py")) for frame in frames]
            return [frame for frame, keep in zip(frames, inner, strict=True) if keep][::-1]
    return []


def rank_error(
    failures: list[Failure], standings: dict[int, Standing], outputs: dict[int, str], world_size: int
) -> RankError:
    """The error for a launch in which `failures` happened; the other ranks' standings say who only waited."""
    cause = first_cause(failures)
    died = cause.status is not None
    if died:
        code = os.waitstatus_to_exitcode(cause.status or 0)
        head = f"rank {cause.rank} of {world_size} {_ending(code)}"
    else:
        code = None
        what = _what(cause)
        head = f"rank {cause.rank} of {world_size} raised {what}"
    lines = [head, ""]
    if cause.frames:
        lines.append(
            "Where it was (most recent call last):" if died else "Traceback (most recent call last):"
        )
        lines += users_part(cause.frames)
        lines += [] if died else [what, *map(shortened, cause.causes)]
        lines.append("")
    if died:
        last = outputs[cause.rank].rstrip("\n").splitlines()[-6:]
        lines += ["Its last lines of output:", *[f"  {line}" for line in last], ""] if last else []
    lines += _others(cause, failures, standings)
    return RankError(
        "\n".join(lines).rstrip(),
        rank=cause.rank,
        exc_type=cause.exc_type,
        exc_message=_ending(code or 0) if died else cause.exc_message,
        traceback=cause.traceback,
        exitcode=code,
        output=outputs[cause.rank],
    )


def _what(failure: Failure) -> str:
    """As Python's own last line: an exception that says nothing has no colon."""
    return failure.exc_type + (f": {shortened(failure.exc_message)}" if failure.exc_message else "")


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} before its function returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = {"SIGKILL": "; something killed it, perhaps for lack of memory", "SIGSEGV": "; C code crashed"}
    return f"was ended by signal {-code} ({name}{hint.get(name, '')})"


def _others(cause: Failure, failures: list[Failure], standings: dict[int, Standing]) -> list[str]:
    texts = {}
    for rank, standing in standings.items():
        own = next((failure for failure in failures if failure.rank == rank), None)
        if rank == cause.rank:
            continue
        if own is None:
            texts[rank] = standing.text()
            if standing.is_waiting:
                texts[rank] += "; only a victim"
        elif (own.exc_type, own.exc_message) == (cause.exc_type, cause.exc_message):
            texts[rank] = "raised the same" if own.status is None else "ended in the same way"
        elif is_consequence(own):
            texts[rank] = "disconnected when that rank was gone; only a victim"
        else:
            texts[rank] = f"raised {_what(own)}" if own.exc_type else "ended as well"
    if not texts:
        return []
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in grouped(texts)]
    return ["The other ranks, which have been ended:", *lines]


def ranks_hung(
    reason: str, standings: dict[int, Standing], stacks: dict[int, list[Frame]], overdue: list[int]
) -> RanksHung:
    """The error for ranks that wait for ever. `reason` says which limit was passed; `overdue` ranks passed it."""
    texts = {rank: standing.text() for rank, standing in standings.items()}
    sentence = mismatch(standings, overdue)
    lines = [reason, sentence, ""]
    lines += [f"  {ranks_text(ranks)}: {text}" for text, ranks in grouped(texts)]
    where = {}
    for rank, frames in stacks.items():
        where[rank] = "\n".join(f"  {line}" for text in users_part(frames) for line in text.splitlines())
    lines += ["", "Where they stand (most recent call last):"]
    for text, ranks in grouped(where):
        lines += [f"  {ranks_text(ranks)}:", text or "      no Python stack: it has returned or is gone"]
    whole = [
        "".join(f"{place(f.file, f.line)}, in {f.function}\n" for f in stacks[r]) for r in sorted(stacks)
    ]
    return RanksHung("\n".join(lines), sentence, [texts[rank] for rank in sorted(texts)], whole)
