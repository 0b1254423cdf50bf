"""What `torchrun` raises when a job fails: which worker was the cause, and what it said."""

from __future__ import annotations

import json
import signal

from course_lib.runtime.errors import (
    Failure,
    LaunchError,
    RankError,
    grouped,
    ranks_text,
    shortened,
    users_part,
)
from course_lib.runtime.report import first_cause, is_consequence
from course_lib.runtime.torchrun.diary import Worker
from course_lib.runtime.torchrun.settings import Settings
from course_lib.runtime.torchrun.tracebacks import count_tracebacks, last_traceback, parse_traceback

_SAME_MOMENT_S = 0.1  # the guard looks every 0.05 s which workers are gone


class TorchrunError(LaunchError):
    """The job failed without a worker being the cause: the nodes did not find each other, or an agent ended.

    `agents`: what each agent wrote, by the number of its node.
    """

    def __init__(self, message: str, agents: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.agents = agents or {}

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.agents)


def worker_error(
    settings: Settings, workers: list[Worker], restarts: int, kept: str, passed: str = ""
) -> RankError:
    """The error for the last round of `workers`, some of which failed.

    `kept`: where the log files are. `passed`: the limit that ended the job, if the agents still waited for others.
    """
    failures = {w.rank: _failure(w, settings) for w in _failed(workers)}
    cause = first_cause(list(failures.values()))
    worker = next(w for w in workers if w.rank == cause.rank)
    head, what = f"rank {cause.rank} of {worker.world_size} ", ending(worker.exit_code)
    if cause.exc_type:
        what = f"raised {cause.exc_type}" + (f": {shortened(cause.exc_message)}" if cause.exc_message else "")
    lines = [head + what, ""]
    if cause.frames:
        lines += [
            "Traceback (most recent call last):",
            *users_part(cause.frames),
            what.removeprefix("raised "),
            "",
        ]
    else:
        last = worker.output.rstrip("\n").splitlines()[-6:]
        lines += ["Its last lines of output:", *[f"  {line}" for line in last], ""] if last else []
    lines += _restarted(settings, restarts) + _left_before(workers, cause)
    lines += (
        [f"{passed} Others had not ended at SIGTERM, and their agent waited for them.", ""] if passed else []
    )
    lines += _others(workers, cause, failures)
    lines.append(f"The log files are in {kept}")
    return RankError(
        "\n".join(lines),
        rank=cause.rank,
        exc_type=cause.exc_type,
        exc_message=cause.exc_message or ending(worker.exit_code),
        traceback=cause.traceback,
        exitcode=worker.exit_code,
        output=worker.output,
    )


def _failed(workers: list[Worker]) -> list[Worker]:
    failed = [w for w in workers if w.exit_code not in (0, None)]
    # If all of these were ended by an agent: it says that one of them failed.
    return [w for w in failed if not w.ended_by_agent] or failed or gone_by_itself(workers)


def is_victim(error: RankError) -> bool:
    """Whether it says only that another rank was gone."""
    return bool(error.exc_type) and is_consequence(Failure(error.rank, error.exc_type, error.exc_message))


def gone_by_itself(workers: list[Worker]) -> list[Worker]:
    """Those that have ended, but neither well nor by their agent, as far as is known."""
    return [w for w in workers if w.gone is not None and w.exit_code != 0 and not w.ended_by_agent]


def fill_in(worker: Worker, known: int = 0) -> None:
    """No agent says how the worker ended: an exception, of which it wrote a traceback, has exit code 1.

    `known`: so many tracebacks were there already, and it lived on.
    """
    if worker.exit_code is None and tracebacks_of(worker) > known:
        worker.exit_code = 1


def tracebacks_of(worker: Worker) -> int:
    return count_tracebacks(_stderr(worker))


def _stderr(worker: Worker) -> list[str]:
    return [line for is_error, line in worker.lines if is_error]


def _restarted(settings: Settings, restarts: int) -> list[str]:
    if not settings.max_restarts:
        return []
    times = f"{restarts} time{'s' if restarts != 1 else ''}"
    if restarts < settings.max_restarts:
        return [f"The workers had been restarted {times} of {settings.max_restarts}.", ""]
    return [
        f"The workers had been restarted {times}, which is the limit (max_restarts={settings.max_restarts}).",
        "",
    ]


def _left_before(workers: list[Worker], cause: Failure) -> list[str]:
    """If the cause lost its connection: who had gone by then, as if all were done."""
    left = [w.rank for w in workers if w.rank != cause.rank and not w.ended_by_agent and w.exit_code in (0, None)
            and w.gone is not None and w.gone <= cause.at + _SAME_MOMENT_S]  # fmt: skip
    if not (left and cause.exc_type and is_consequence(cause)):
        return []
    who = ranks_text(left)
    return [
        f"{who[0].upper()}{who[1:]} left first, without an error, while others still waited there: every rank must "
        "take part in all collectives, to the last.",
        "",
    ]


def ending(code: int | None) -> str:
    """How a process ended, from its exit code or minus the signal; None: nobody knows."""
    if code is None:
        return "ended; how, its agent had not said yet"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": ": something killed it, perhaps for lack of memory",
        "SIGSEGV": ": C code crashed",
        "SIGABRT": ": C code gave up. At the very end of a script: call dist.destroy_process_group() last",
    }
    return f"was killed by {name}{hint.get(name, '')}"


def _failure(worker: Worker, settings: Settings) -> Failure:
    code = worker.exit_code or 0
    text = settings.named(_recorded(worker)) if code > 0 else ""
    if (
        code == 1 and not text
    ):  # another code is not that of an exception: then a traceback was one it had handled
        text = last_traceback(_stderr(worker))
    at = worker.gone if worker.gone is not None else float("inf")
    if not text:
        return Failure(worker.rank, "", "", status=code, at=at)
    frames, exc_type, exc_message = parse_traceback(text)
    return Failure(worker.rank, exc_type, exc_message, frames, traceback=text, at=at)


def _recorded(worker: Worker) -> str:
    """The traceback that torch's `@record` wrote into the worker's error file, which the agent read."""
    try:
        message = json.loads(worker.raw_error)["message"]
        return message["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError):
        return ""


def _others(workers: list[Worker], cause: Failure, failures: dict[int, Failure]) -> list[str]:
    texts = {}
    for worker in workers:
        own = failures.get(worker.rank)
        if worker.rank == cause.rank:
            continue
        if own is not None and own.exc_type and is_consequence(own):
            texts[worker.rank] = "disconnected when that rank was gone; only a victim"
        elif own is not None and own.exc_type:
            texts[worker.rank] = f"raised {own.exc_type}: {shortened(own.exc_message)}"
        elif worker.exit_code == 0:
            texts[worker.rank] = "had finished"
        elif worker.ended_by_agent or worker.exit_code is None:
            texts[worker.rank] = (
                "ended by its agent; only a victim"
                if worker.ended_by_agent
                else "had ended before its agent looked"
            )
        else:
            texts[worker.rank] = ending(worker.exit_code)
    return [f"  {ranks_text(ranks)}: {text}" for text, ranks in grouped(texts)] + ([""] if texts else [])
