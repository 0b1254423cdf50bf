"""The command line and the environment of each agent: what a learner would type on each node, and why."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.torchrun.settings import Settings

_LOCAL = "127.0.0.1"
_PORT = 29500
# Ports of the jobs that run now. On virtual hosts nobody else is: no port need be tried out inside of them.
_taken: WeakKeyDictionary[VirtualHosts, set[int]] = WeakKeyDictionary()
HOLD_STORE = (
    "import sys, time; from torch.distributed import TCPStore; "
    "store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False); time.sleep(1e9)"
)


@dataclass
class Meeting:
    """Where the agents of one job meet: `address`:`port`, by `backend`; `run_id` is the job's name there."""

    backend: str
    address: str = _LOCAL
    port: int = 0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @classmethod
    def of(cls, settings: Settings) -> Meeting:
        meeting = cls(settings.rdzv_backend or ("c10d" if settings.dynamic else "static"))
        if settings.rdzv_id:
            meeting.run_id = settings.rdzv_id
        if settings.on_namespaces and settings.hosts:
            meeting.address = settings.hosts.addresses[0]
        if settings.rdzv_endpoint:
            meeting.address, _, port = settings.rdzv_endpoint.rpartition(":")
            meeting.port = int(port)
            return meeting
        meeting.address = settings.master_addr or meeting.address
        meeting.port = settings.master_port or 0
        if settings.on_namespaces and settings.hosts:
            meeting._reserve(settings.hosts)
        elif meeting.port == 0:
            meeting.port = _free_port()
        elif settings.node_rank in (None, 0):
            _check_free(meeting.address, meeting.port)
        return meeting

    def _reserve(self, hosts: VirtualHosts) -> None:
        taken = _taken.setdefault(hosts, set())
        self.port = self.port or next(port for port in itertools.count(_PORT) if port not in taken)
        taken.add(self.port)

    def release(self, settings: Settings) -> None:
        """The job has ended: its port is free for the next one on the same virtual hosts."""
        if settings.hosts is not None:
            _taken.get(settings.hosts, set()).discard(self.port)

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOCAL, 0))
        return probe.getsockname()[1]


def _check_free(address: str, port: int) -> None:
    """Whether the first node, which is this machine, can listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"master_port: node 0 cannot listen on port {port} of {address} ({error.strerror}). Another job holds "
                f"it, perhaps one that was not ended (`ss -ltnp | grep {port}` names it); choose another port, the "
                "same on every node"
            ) from None


@dataclass
class Command:
    """One agent's command line: `shown` is what matters to a reader, `kept` what this course adds for itself."""

    shown: list[str]
    kept: list[str]
    target: list[str]

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", *self.shown, *self.kept, *self.target]

    def __str__(self) -> str:
        return shlex.join(["torchrun", *self.shown, *self.target])


def command(settings: Settings, meeting: Meeting, agent: int, host: int, log_dir: Path) -> Command:
    """The command line of agent number `agent`, on `host`; its workers write their logs below `log_dir`."""
    shown = [] if settings.nodes == (1, 1) else [f"--nnodes={_range(settings)}"]
    shown.append(f"--nproc-per-node={settings.nproc(host)}")
    kept = [f"--log-dir={log_dir}", "--redirects=3", "--event-log-handler=console"]
    if _stands_alone(settings):
        shown.insert(0, "--standalone")
        kept += [f"--rdzv-conf={_conf(settings, meeting, None)}", f"--local-addr={_LOCAL}"]
    else:
        shown += _meet(settings, meeting, agent, host)
    if settings.max_restarts:
        shown.append(f"--max-restarts={settings.max_restarts}")
    for name, value in settings.options.items():
        flag = "--" + name.replace("_", "-")
        if value is not False and value is not None:
            shown += [flag] if value is True else [f"{flag}={value}"]
    if settings.module:
        shown.append("--module")
    return Command(shown, kept, [settings.script, *settings.script_args])


def _stands_alone(settings: Settings) -> bool:
    where = (settings.rdzv_backend, settings.rdzv_endpoint, settings.master_addr, settings.master_port)
    alone = settings.nodes == (1, 1) and settings.node_rank is None and settings.rdzv_store == "node 0"
    return alone and where == (None,) * 4


def _meet(settings: Settings, meeting: Meeting, agent: int, host: int) -> list[str]:
    here = address_of(settings, host)
    if meeting.backend == "static":
        rank = agent if settings.node_rank is None else settings.node_rank
        where = [f"--node-rank={rank}", f"--master-addr={meeting.address}", f"--master-port={meeting.port}"]
        where += [f"--rdzv-id={meeting.run_id}"] if settings.rdzv_id else []
    else:
        where = [
            f"--rdzv-backend={meeting.backend}",
            f"--rdzv-endpoint={meeting.endpoint}",
            f"--rdzv-id={meeting.run_id}",
        ]
    where.append(f"--rdzv-conf={_conf(settings, meeting, agent)}")
    return [*where, f"--local-addr={here}"] if here else where


def address_of(settings: Settings, host: int) -> str | None:
    """The address of the host; None if torchrun is to find out itself."""
    if settings.node_rank is not None:
        return None
    if settings.on_namespaces and settings.hosts:
        return settings.hosts.addresses[host]
    return _LOCAL


def _conf(settings: Settings, meeting: Meeting, agent: int | None) -> str:
    """Time limits that suit a lesson: torch's own are minutes. Which keys count depends on the backend."""
    seconds = max(1, round(settings.rdzv_timeout))
    if meeting.backend == "static" and agent is not None:
        conf: dict[str, object] = {"timeout": seconds}
    else:
        conf = {"join_timeout": seconds, "read_timeout": seconds, "close_timeout": 5}
        if settings.elastic:
            # A node that says nothing for 3 x 1 s is dead; nodes that come within 2 s of the least number are let in.
            conf |= {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
        if agent is not None and (settings.on_namespaces or not settings.rdzv_endpoint):
            # Who holds the store; torch guesses by host name, which virtual hosts share.
            first = agent == 0 and settings.node_rank in (None, 0)
            conf["is_host"] = int(first and settings.rdzv_store == "node 0")
    return ",".join(f"{key}={value}" for key, value in (conf | settings.conf()).items())


def _range(settings: Settings) -> str:
    least, most = settings.nodes
    return f"{least}:{most}" if settings.elastic else str(least)


def environment(settings: Settings, error_file: Path) -> dict[str, str]:
    """The agent's environment, which its workers inherit."""
    own = ("TORCHELASTIC_", "PET_")  # of a torchrun above this process
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **env}
    if settings.on_namespaces:
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    elif settings.node_rank is None:
        env = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", **env}
    if settings.elastic or settings.max_restarts:
        # torch 2.14 would keep one store for all restarts: new workers may read the addresses of dead ones in it, or,
        # when ranks have changed, look for it on the wrong node. So: a new store each time.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env}
    return env | {"TORCHELASTIC_ERROR_FILE": str(error_file)} | dict(settings.env or {})
