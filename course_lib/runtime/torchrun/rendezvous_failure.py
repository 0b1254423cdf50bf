"""What `torchrun` raises when no worker is the cause: the nodes did not find each other, or an agent ended."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from course_lib.runtime.errors import shortened
from course_lib.runtime.torchrun.diary import Agent
from course_lib.runtime.torchrun.failure import TorchrunError, ending
from course_lib.runtime.torchrun.settings import Settings


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
    if re.search(r"keys: \S*MASTER_ADDR", why):
        return (
            f"the nodes met at {where}, but the one with rank 0 did not say {within} where its workers are to meet: "
            "perhaps its host name does not resolve there. Start every node with local_addr=, its own IP address "
            "(`hostname -I` on it)."
        )
    if "RendezvousClosedError" in why:
        return f"the rendezvous at {where} is closed: the job has ended on another node"
    if re.search(
        r"connect\(\)|RendezvousConnectionError|client socket has (failed|timed out)|DistNetworkError", why
    ):
        return f"nothing answers at {where} {within}: the store of node 0 is not there. {check}"
    if found := re.search(r"error: (unrecognized arguments: .*|argument .*)", why):
        return f"torchrun does not accept this: {found[1]}"
    return ""
