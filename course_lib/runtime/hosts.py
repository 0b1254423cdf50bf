"""Virtual hosts: several hosts with their own addresses and limited links, inside one machine.

A laptop's ranks talk through memory, at gigabytes per second; no formula of a cluster can be measured there. So the
cluster's limit is imposed: every host is a network namespace, and a token bucket holds each direction of its cable to
the link's rate (see `hostserver`). Whatever the ranks use, the course's messages, gloo, torchrun, is held to it.
Ranks of one host talk over its loopback, at full speed.

Where the system allows no namespaces, the Communicator paces its own messages to the same rate (see `comm.pacer`).
Then only the course's own messages are limited, not torch's collectives, and figures must say "paced in software".
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from course_lib.comm.pacer import Pacer
from course_lib.runtime.hostserver import address_of

if TYPE_CHECKING:
    from course_lib.runtime.calibrate import Calibration

HOW = ("auto", "namespaces", "paced")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_START_S = 20.0
_MOST_HOSTS = 64


class HostsUnavailable(RuntimeError):
    """This system does not let us make network namespaces; the message says why, and what to do."""


@dataclass(frozen=True)
class LinkCounters:
    """What the kernel counted on one host's cable, in bytes, headers included."""

    host: int
    bytes_sent: int
    bytes_received: int


def parse_rate(link: Any) -> int:
    """ "400Mbit" -> 400_000_000 bits per second. Units: kbit, Mbit, Gbit: 10^3, 10^6, 10^9."""
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", link.strip().lower()) if isinstance(link, str) else None
    )
    if match and match[2] in _UNITS and 8e3 <= float(match[1]) * _UNITS[match[2]] <= 1e11:
        return round(float(match[1]) * _UNITS[match[2]])
    raise ValueError(
        f'link: expected a rate in bits per second such as "400Mbit", "1Gbit" or "64kbit" (at least 8kbit, at most '
        f"100Gbit), got {link!r}"
    )


class VirtualHosts:
    """`n` hosts, numbered from 0, joined by a switch; each cable carries `link` in each direction, both at once.

    `ranks_per_host` consecutive ranks live on each host: `launch(..., world_size=n * ranks_per_host, hosts=hosts)`.
    `how`: "namespaces", "paced" (in software, by the Communicator), or "auto": namespaces where they are allowed.
    Use it as a context manager, or call `close()`; it also ends with its last reference, and with this process.

    `num_hosts, ranks_per_host, world_size, link`; `bytes_per_s` of each direction; `addresses`; `how` that was chosen,
    and why, if it is the second best (`reason`); `label`: what a figure must say ("" or "paced in software").

    Raises ValueError for wrong arguments, HostsUnavailable if `how="namespaces"` is not possible here.
    """

    def __init__(self, n: int, link: str = "400Mbit", ranks_per_host: int = 1, how: str = "auto") -> None:
        for name, value, most in (("n", n, _MOST_HOSTS), ("ranks_per_host", ranks_per_host, 64)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name}: expected a whole number from 1 to {most}, got {value!r}")
        if how not in HOW:
            raise ValueError(f"how: expected one of {', '.join(map(repr, HOW))}, got {how!r}")
        self.num_hosts, self.ranks_per_host, self.link = n, ranks_per_host, link
        self.world_size = n * ranks_per_host
        self.bytes_per_s = parse_rate(link) / 8
        self.addresses = [address_of(host) for host in range(n)]
        self.reason = ""
        self._server: _HostServer | None = None
        self._pacer: Path | None = None
        self._open = True
        if how != "paced":
            try:
                self._server = _HostServer(n, parse_rate(link))
            except HostsUnavailable as error:
                if how == "namespaces":
                    raise
                self.reason = str(error)
        self.how = "paced" if self._server is None else "namespaces"
        self.label = "paced in software" if self.how == "paced" else ""
        if self._server is not None:
            self._finalizer: weakref.finalize = weakref.finalize(self, self._server.close)
        else:
            self._pacer = Pacer.create(n)
            self._finalizer = weakref.finalize(self, Pacer.remove, self._pacer)

    def host_of(self, rank: int) -> int:
        """The host on which `rank` lives."""
        return rank // self.ranks_per_host

    def counters(self) -> list[LinkCounters]:
        """Bytes that crossed each host's cable since it was made, read from the kernel's counters of the interface."""
        self.check_open()
        if self._server is None:
            raise HostsUnavailable(
                "counters: there is no link to read when messages are paced in software; compare ledgers. "
                + self.reason
            )
        return self._server.counters()

    def calibrate(self) -> Calibration:
        """Measure the link between hosts 0 and 1; raise LinkNotAsSet, with a sentence, if it is not what it says."""
        from course_lib.runtime.calibrate import calibrate  # which launches ranks, and so imports this module

        return calibrate(self)

    def check_open(self) -> None:
        if not self._open or (self._server is not None and not self._server.alive()):
            raise RuntimeError(
                f"these {self.num_hosts} virtual hosts are closed; make new ones with VirtualHosts(...)"
            )

    def setup_of(self, rank: int) -> dict[str, Any]:
        """What the rank's process must know to live on its host (used by the launcher)."""
        address = self.addresses[self.host_of(0)] if self._server is not None else "127.0.0.1"
        return {"address": address, "pacer": str(self._pacer or ""), "bytes_per_s": self.bytes_per_s}

    def namespaces_of(self, rank: int) -> list[tuple[str, int]]:
        """The namespaces that the rank enters: (kind, open file), to be closed by the caller."""
        self.check_open()
        return [] if self._server is None else self._server.open_namespaces(self.host_of(rank))

    def close(self) -> None:
        """Remove the hosts. Harmless when they are gone."""
        self._open = False
        self._finalizer()

    def __enter__(self) -> VirtualHosts:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        what = f"{self.num_hosts} hosts x {self.ranks_per_host} ranks, {self.link} links"
        return f"VirtualHosts({what}, {self.how}{state})"


class _HostServer:
    """The kernel's side of `hostserver`: start it, read its counters, end it."""

    extra_arguments: tuple[str, ...] = ()

    def __init__(self, num_hosts: int, rate: int) -> None:
        if sys.platform != "linux":
            raise HostsUnavailable(f"network namespaces are Linux's; this is {sys.platform}")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise HostsUnavailable(f"the command {tool!r} is missing; install the package iproute2")
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        script = Path(__file__).with_name("hostserver.py")
        arguments = [str(theirs.fileno()), str(os.getpid()), str(num_hosts), str(rate), *self.extra_arguments]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            answer = self._answer()
            if "failed" in answer:
                raise HostsUnavailable(_advice(answer["failed"]))
        except BaseException:
            self.close()
            raise
        self._pids, self._in_user_namespace = answer["pids"], answer["user"]

    def _answer(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([self._control], [], [], _START_S)[0]:
                raise HostsUnavailable(f"making the hosts took longer than {_START_S:.0f} s")
            data = self._control.recv(65536)
            if not data:
                raise HostsUnavailable("the process that makes the hosts ended")
            text += data
        return json.loads(text)

    def alive(self) -> bool:
        return self._process.poll() is None

    def open_namespaces(self, host: int) -> list[tuple[str, int]]:
        paths = [("net", f"/proc/{self._pids[host]}/ns/net")]
        if self._in_user_namespace:
            paths.insert(0, ("user", f"/proc/{self._process.pid}/ns/user"))
        return [(kind, os.open(path, os.O_RDONLY)) for kind, path in paths]

    def counters(self) -> list[LinkCounters]:
        """The switch's ends of the cables: what it receives there is what the host sent."""
        found = {}
        for line in Path(f"/proc/{self._process.pid}/net/dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            found[name.strip()] = (int(fields[0]), int(fields[8]))
        return [LinkCounters(host, *found[f"h{host}"]) for host in range(len(self._pids))]

    def close(self) -> None:
        self._control.close()
        if self._owner != os.getpid():
            return
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _advice(reason: str) -> str:
    hints = [f"network namespaces are not allowed here ({reason})."]
    if os.geteuid() == 0:
        hints.append(
            "In a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN (or --privileged)."
        )
    else:
        hints.append(
            "An ordinary user needs user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
            "user.max_user_namespaces > 0, and on Ubuntu 24.04 or newer "
            "kernel.apparmor_restrict_unprivileged_userns=0."
        )
    hints.append('Or use VirtualHosts(..., how="paced"), which limits the course\'s own messages.')
    return " ".join(hints)
