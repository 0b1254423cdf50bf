"""The options of a launch, checked before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.output import SHOW
from course_lib.runtime.sizes import parse_bytes

BACKENDS = ("auto", "gloo", "nccl", "ring")
_MOST_S = 30 * 24 * 3600.0
STARTS = ("auto", "forkserver", "spawn")


@dataclass(frozen=True)
class Options:
    """See `launch` for what each one means."""

    world_size: int
    backend: str = "auto"
    timeout: float = 60.0
    deadline: float | None = None
    show: str = "live"
    threads: int = 1
    env: Mapping[str, str] | None = None
    start: str = "auto"
    hosts: VirtualHosts | None = None
    memory_limit: str | int | None = None

    def __post_init__(self) -> None:
        _count("world_size", self.world_size, "the number of ranks")
        _count("threads", self.threads, "the torch threads of each rank")
        _seconds("timeout", self.timeout)
        if self.deadline is not None:
            _seconds("deadline", self.deadline)
        self._check_hosts()
        if self.memory_limit is not None:
            parse_bytes("memory_limit", self.memory_limit)
        for name, value, known in (
            ("backend", self.backend, BACKENDS),
            ("show", self.show, SHOW),
            ("start", self.start, STARTS),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")
        if self.env is not None and not (
            isinstance(self.env, Mapping)
            and all(isinstance(text, str) for pair in self.env.items() for text in pair)
        ):
            raise TypeError(
                f"env: expected a dict of strings to strings, got {self.env!r}; write numbers as strings"
            )
        for name, value in (self.env or {}).items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: no system takes a variable {name!r} with the value {value!r}")
        for name in ("world_size", "threads"):  # numpy's numbers are numbers too
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "timeout", float(self.timeout))

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes("memory_limit", self.memory_limit)

    def _check_hosts(self) -> None:
        if self.hosts is None:
            return
        if not isinstance(self.hosts, VirtualHosts):
            raise TypeError(f"hosts: expected VirtualHosts(...) or None, got {self.hosts!r:.60}")
        if self.world_size > self.hosts.world_size:
            raise ValueError(
                f"world_size: expected at most {self.hosts.world_size} ({self.hosts.num_hosts} hosts of "
                f"{self.hosts.ranks_per_host} ranks), got {self.world_size}; make more hosts, or more ranks on each"
            )
        self.hosts.check_open()


def _count(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number ({what}), got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1 ({what}), got {value}")


def _seconds(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected seconds as a number, got {value!r}")
    if not 0 < float(value) <= _MOST_S:
        raise ValueError(f"{name}: expected a positive number of seconds, {_MOST_S:.0f} at most, got {value}")


def check_call(fn: Any, args: tuple) -> None:
    """Whether `fn(comm, *args)` can be called at all; a mistake here should not cost a launch."""
    if not callable(fn):
        raise TypeError(
            f"fn: expected a function that takes a Communicator first, got {type(fn).__name__} {fn!r:.60}"
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"fn: {_name(fn)} is async or a generator: calling it runs nothing. Write a plain function; inside it use "
            "asyncio.run(...), or collect what the generator yields in a list."
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind("comm", *args)
    except TypeError as error:
        name = _name(fn)
        raise TypeError(
            f"{name}{signature} cannot be called as {name}(comm, *args) with {len(args)} arguments after comm: "
            f"{error}. Each rank calls the function with its Communicator first, then the arguments you gave."
        ) from None


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
