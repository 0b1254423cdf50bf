"""Checks of a torchrun job's arguments that do not concern each other."""

from __future__ import annotations

import difflib
import socket
import threading
from collections.abc import Mapping
from numbers import Integral
from typing import Any

_RESOLVE_S = 5.0
_MOST_NODES = 64
_REFUSED = {
    "help": "call installed_options() of course_lib.runtime.torchrun_help",
    "redirects": "what the workers write is read from files, so both streams go there; `show` says what is shown",
    "event_log_handler": "what happens is read from torchrun's own events; the result's `events` has them",
    "local_addr": "an agent started here has its host's address; it is for a node that is started alone, by node_rank",
    "run_path": "it runs the script inside a process whose output is not the worker's; leave it away",
}


def whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")


def parse_nodes(nnodes: int | str) -> tuple[int, int]:
    """2 -> (2, 2), "1:3" -> (1, 3)."""
    parts = str(nnodes).split(":")
    if all(part.isdecimal() for part in parts) and len(parts) <= 2:
        least, most = int(parts[0]), int(parts[-1])
        if 1 <= least <= most <= _MOST_NODES:
            return least, most
    raise ValueError(
        f"nnodes: expected a number of nodes or a range such as '1:4', from 1 to {_MOST_NODES}, got {nnodes!r}"
    )


def check_resolves(name: str, host: str) -> None:
    """Raise ValueError if `host` has no address, or none is found within 5 s."""
    answers: list[Any] = []

    def look() -> None:
        try:
            answers.append(socket.getaddrinfo(host, None))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    if not answers or isinstance(answers[0], OSError):
        why = answers[0] if answers else f"no answer within {_RESOLVE_S:.0f} s"
        raise ValueError(
            f"{name}: the address {host!r} does not resolve ({why}); check its spelling, /etc/hosts and DNS on this "
            "machine, or give the node's IP address (`hostname -I` on it)"
        )


def check_options(options: Mapping[str, Any], node_rank: int | None) -> None:
    """Whether the installed torchrun knows these options, and they mean something in a job with this `node_rank`.

    (Only if there are some is torchrun imported here: that takes a moment.)
    """
    if not options:
        return
    from torch.distributed.run import get_args_parser

    known = {action.dest for action in get_args_parser()._actions}
    for name in options:
        if name in _REFUSED and not (name == "local_addr" and node_rank is not None):
            raise ValueError(f"{name}: not here: {_REFUSED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"torchrun has no option {name!r} (--{name.replace('_', '-')}).{hint}")
