"""What `torchrun` raises when a job fails: which worker was the cause, and what it said."""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
from pathlib import Path

from course_lib.runtime.errors import (
    Failure,
    Frame,
    LaunchError,
    RankError,
    grouped,
    ranks_text,
    shortened,
    users_part,
)
from course_lib.runtime.report import first_cause, is_consequence
from course_lib.runtime.torchrun.diary import Agent, Worker
from course_lib.runtime.torchrun.settings import Settings

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.+)", line (\d+)(?:, in (.+))?$')
_NOT_ITS = re.compile(r"^(\[[WEIC]\d{4} |\S+\.py:\d+: \w*Warning|Fatal Python error|terminate called)")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")


class TorchrunError(LaunchError):
    """The job failed without a worker being the cause: the nodes did not find each other, or an agent ended.

    `agents`: what each agent wrote, by the number of its node.
    """

    def __init__(self, message: str, agents: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.agents = agents or {}

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.agents)


def worker_error(settings: Settings, workers: list[Worker], restarts: int, kept: str) -> RankError:
    """The error for the last round of `workers`, some of which failed. `kept`: where the log files are."""
    failures = {
        w.rank: _failure(w, settings)
        for w in workers
        if w.exit_code not in (0, None) and not w.ended_by_agent
    }
    if not failures:  # all were ended by an agent that says that one of them failed
        failures = {w.rank: _failure(w, settings) for w in workers if w.exit_code not in (0, None)}
    cause = first_cause(list(failures.values()))
    worker = next(w for w in workers if w.rank == cause.rank)
    head, what = f"rank {cause.rank} of {worker.world_size} ", ending(worker.exit_code or 0)
    if cause.exc_type:
        what = f"raised {cause.exc_type}" + (f": {shortened(cause.exc_message)}" if cause.exc_message else "")
    lines = [head + what, ""]
    if cause.frames:
        lines += [_TRACEBACK, *users_part(cause.frames), what.removeprefix("raised "), ""]
    else:
        last = worker.output.rstrip("\n").splitlines()[-6:]
        lines += ["Its last lines of output:", *[f"  {line}" for line in last], ""] if last else []
    if settings.max_restarts:
        times = f"{restarts} time{'s' if restarts != 1 else ''}"
        lines += [
            f"The workers had been restarted {times}, which is the limit (max_restarts={settings.max_restarts})."
            if restarts >= settings.max_restarts
            else f"The workers had been restarted {times} of {settings.max_restarts}.",
            "",
        ]
    lines += _others(workers, cause, failures)
    lines.append(f"The log files are in {kept}")
    return RankError(
        "\n".join(lines),
        rank=cause.rank,
        exc_type=cause.exc_type,
        exc_message=cause.exc_message or ending(worker.exit_code or 0),
        traceback=cause.traceback,
        exitcode=worker.exit_code,
        output=worker.output,
    )


def ending(code: int) -> str:
    """How a process ended, from its exit code or minus the signal."""
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
    if code > 0 and not text:
        text = last_traceback([line for is_error, line in worker.lines if is_error])
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


def last_traceback(lines: list[str]) -> str:
    """The last traceback in what a worker wrote to stderr, with those that led to it."""
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if not starts:
        return _syntax_error(lines)
    first = starts[-1]
    # "During handling of the above exception, another exception occurred:"
    for start in reversed(starts[:-1]):
        if not any(line.endswith(("another exception occurred:", "cause of the following exception:"))
                   for line in lines[start:first]):  # fmt: skip
            break
        first = start
    stop = next((n for n in range(starts[-1], len(lines)) if _NOT_ITS.match(lines[n])), len(lines))
    return "\n".join(lines[first:stop]) + "\n"


def _syntax_error(lines: list[str]) -> str:
    """Python reports a script that it cannot read without the usual first line."""
    ends = [
        n
        for n, line in enumerate(lines)
        if line.startswith(("SyntaxError:", "IndentationError:", "TabError:"))
    ]
    places = [n for n in range(ends[-1] if ends else 0) if _FRAME.match(lines[n])]
    return "\n".join(lines[places[-1] : ends[-1] + 1]) + "\n" if places else ""


def parse_traceback(text: str) -> tuple[list[Frame], str, str]:
    """Its last part: frames (outermost first), the exception's type without its module, its message."""
    lines = text.rpartition(_TRACEBACK)[2].splitlines()
    frames: list[Frame] = []
    for number, line in enumerate(lines):
        if match := _FRAME.match(line):
            below = lines[number + 1].strip() if number + 1 < len(lines) else ""
            code = below if lines[number + 1 : number + 2] and lines[number + 1].startswith("    ") else ""
            frames.append(
                Frame(
                    match[1],
                    int(match[2]),
                    match[3] or "<module>",
                    code or linecache.getline(match[1], int(match[2])),
                )
            )
        elif line[:1].strip() and (raised := _RAISED.match(line)):
            message = "\n".join([raised[2] or "", *lines[number + 1 :]]).strip()
            return frames, raised[1].rpartition(".")[2], message
    return frames, "", lines[-1] if lines else ""


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


def agent_error(settings: Settings, agents: dict[int, Agent], home: Path, where: str) -> TorchrunError:
    """The error for a job that failed before, or without, a failing worker. `where`: the rendezvous' address."""
    outputs = {node: settings.named(agent.output) for node, agent in agents.items() if node >= 0}
    whys = {node: _why(home / f"agent{node}.json", outputs[node]) for node in outputs}
    known = next((text for why in whys.values() if (text := _explain(settings, why, outputs, where))), "")
    lines = [known] if known else ["the job ended without a result"]
    lines.append("")
    for node, agent in agents.items():
        if node < 0:
            continue
        code = None if agent.status is None else os.waitstatus_to_exitcode(agent.status)
        state = (
            "was still running" if code is None else "was killed on purpose" if agent.killed else ending(code)
        )
        last = (whys[node].strip() or "it wrote nothing").splitlines()[-1]
        lines.append(f"  agent {node}: {state}; {shortened(last)}")
    return TorchrunError("\n".join(lines), outputs)


def _why(error_file: Path, output: str) -> str:
    try:
        return json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, KeyError, TypeError):
        return output


def _explain(settings: Settings, why: str, outputs: dict[int, str], where: str) -> str:
    within = f"within {settings.rdzv_timeout:g} s"
    least, here = settings.nodes[0], len(outputs)
    check = (
        "Check that torchrun was started on every node, with the same nnodes, the same address and port "
        f"({where}) and the same rdzv_id, and that no firewall is between them."
    )
    if "EADDRINUSE" in why or "ddress already in use" in why:
        host, _, port = where.rpartition(":")
        return f"port {port} of {host} is taken by another program; choose another one, the same on all nodes"
    if count := re.search(r"(\d+)/(\d+) clients joined", why):
        return f"{count[1]} of {count[2]} nodes came {within}. {check}"
    if "RendezvousTimeoutError" in why:
        return f"fewer than {least} nodes came {within} ({here} started here). {check}"
    if re.search(r"wait timeout after \d+ms, keys: \S*torchelastic/(assigned_ranks|role_info)", why):
        return f"the nodes met at {where}, but did not agree {within}: some wait for more nodes than others. {check}"
    if "RendezvousClosedError" in why:
        return f"the rendezvous at {where} is closed: the job has ended on another node"
    if re.search(
        r"connect\(\)|RendezvousConnectionError|client socket has (failed|timed out)|DistNetworkError", why
    ):
        return f"nothing answers at {where} {within}: the store of node 0 is not there. {check}"
    if found := re.search(r"error: (unrecognized arguments: .*|argument .*)", why):
        return f"torchrun does not accept this: {found[1]}"
    return ""
