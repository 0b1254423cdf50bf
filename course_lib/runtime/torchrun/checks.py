"""Checks of a torchrun job's arguments that do not concern each other."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import socket
import threading
from collections.abc import Mapping
from importlib.machinery import PathFinder
from numbers import Integral, Real
from pathlib import Path
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


def text_of_path(name: str, value: Any) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"{name}: expected a path, as text or as a Path, got {value!r:.60}")
    return path


def check_type(name: str, value: Any, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {value!r:.60}")


def check_seconds(name: str, value: Any) -> None:
    try:
        positive = isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
    except OverflowError:
        positive = False
    if not positive:
        raise ValueError(f"{name}: expected a positive number of seconds, got {value!r:.60}")


def check_directory(name: str, directory: str) -> None:
    """Raise ValueError if `directory` neither is one nor can be made."""
    there = next(
        path for path in (Path(directory).absolute(), *Path(directory).absolute().parents) if path.exists()
    )
    if not there.is_dir():
        raise ValueError(f"{name}: expected a directory, got {directory!r}: {there} is a file")


def check_env(env: Any) -> None:
    check_type("env", env, Mapping, "a dict of strings to strings")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: expected strings, got {name!r}: {value!r:.60}; write numbers as strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env: no system has a variable such as {name!r}: {value!r:.60}; expected a name without "
                             "'=', and no NUL characters")  # fmt: skip


def parse_conf(conf: Any) -> dict[str, Any]:
    """`rdzv_conf`, a dict or "key=value,key=value", as a dict."""
    if not isinstance(conf, str):
        check_type(
            "rdzv_conf", conf, Mapping, "a dict, or text such as 'join_timeout=60,last_call_timeout=5'"
        )
        pairs = [(str(key), value) for key, value in conf.items()]
    else:
        parts = [part.partition("=") for part in conf.split(",") if part.strip()]
        pairs = [(key.strip(), value.strip()) for key, _, value in parts]
    for key, value in pairs:
        number = re.search("(timeout|interval|attempt)$", key)
        if not key or not str(value) or (number and not re.fullmatch(r"\d+", str(value))):
            expected = "a whole number of seconds" if number else "key=value"
            raise ValueError(f"rdzv_conf: {key or value!r}: expected {expected}, got {value!r:.60}")
    return dict(pairs)


def check_module(name: str) -> None:
    """Whether Python finds this module. Nothing is imported: that would run a learner's script in this process."""
    if name.endswith(".py") or "/" in name:
        raise ValueError(
            f"module: {name!r} is a file, not a module's name; give the file without module=True"
        )
    parts = name.split(".")
    where: list[str] | None = [os.getcwd()]
    for number in range(1, len(parts) + 1):
        try:
            found = PathFinder.find_spec(".".join(parts[:number]), where)
            if found is None and number == 1:
                found = importlib.util.find_spec(parts[0])
        except (ImportError, ValueError):
            found = None
        where = list(found.submodule_search_locations or []) if found else None
        if found is None or (not where and number < len(parts)):
            raise ModuleNotFoundError(
                f"module: Python finds no module {name!r}; check its name, and that it is installed or below "
                f"{os.getcwd()}"
            )


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
