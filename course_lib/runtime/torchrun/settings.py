"""What a torchrun job is asked to be, checked before anything starts."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.output import SHOW
from course_lib.runtime.torchrun.checks import check_options, check_resolves, parse_nodes, whole

BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
STORES = ("node 0", "apart")


@dataclass
class Settings:
    """See `torchrun` for what each one means. `num_agents`, `nodes` and `nproc` are made of the others."""

    script: str
    script_args: tuple[str, ...] = ()
    nproc_per_node: int | str | list = 2
    nnodes: int | str | None = None
    hosts: VirtualHosts | None = None
    agents: int | None = None
    max_restarts: int = 0
    module: bool = False
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, Any] | str = ""
    rdzv_timeout: float = 30.0
    rdzv_store: str = "node 0"
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    env: Mapping[str, str] | None = None
    timeout: float = 60.0
    deadline: float | None = None
    show: str = "live"
    log_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] | None = None  # what to print in place of a path
    nodes: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.script, self.script_args = os.fspath(self.script), tuple(map(str, self.script_args))
        self.log_dir = None if self.log_dir is None else os.fspath(self.log_dir)
        if self.env is not None and not isinstance(self.env, Mapping):
            raise TypeError(f"env: expected a dict of strings to strings, got {self.env!r:.60}")
        self._check_script()
        if self.hosts is not None and not isinstance(self.hosts, VirtualHosts):
            raise TypeError(f"hosts: expected VirtualHosts(...) or None, got {self.hosts!r:.60}")
        self.nodes = parse_nodes(self._default_nodes() if self.nnodes is None else self.nnodes)
        self._check_agents()
        self._check_workers()
        self._check_rendezvous()
        self._check_words()
        check_options(self.options, self.node_rank)
        if self.options.get("standalone") and self.nodes != (1, 1):
            raise ValueError(
                f"standalone: it means one node, got nnodes={self.nnodes!r}; leave one of them away"
            )

    # --- what follows from the settings

    @property
    def elastic(self) -> bool:
        return self.nodes[0] != self.nodes[1]

    @property
    def num_agents(self) -> int:
        """How many agents are started at first."""
        return 1 if self.node_rank is not None else self.agents or self.nodes[1]

    @property
    def on_namespaces(self) -> bool:
        return self.hosts is not None and self.hosts.how == "namespaces"

    def conf(self) -> dict[str, Any]:
        """`rdzv_conf` as a dict."""
        if not isinstance(self.rdzv_conf, str):
            return dict(self.rdzv_conf)
        pairs = [pair.partition("=") for pair in self.rdzv_conf.split(",") if pair.strip()]
        return {key.strip(): value.strip() for key, _, value in pairs}

    def nproc(self, host: int) -> int | str:
        """--nproc-per-node of the agent on this host."""
        listed = self.nproc_per_node
        return listed[host % len(listed)] if isinstance(listed, list) else listed

    def named(self, text: str) -> str:
        """`text` with the names that a reader knows in place of paths."""
        for path, name in (self.names or {}).items():
            text = text.replace(path, name)
        return text

    # --- checks

    def _default_nodes(self) -> int:
        if self.nproc_per_node == []:
            raise ValueError("nproc_per_node: expected a number for each node, got an empty list")
        if isinstance(self.nproc_per_node, list):
            return len(self.nproc_per_node)
        return self.hosts.num_hosts if self.hosts is not None else 1

    def _check_script(self) -> None:
        if not self.module:
            if not Path(self.script).is_file():
                raise FileNotFoundError(
                    f"script: there is no file {self.script!r} in {os.getcwd()}; check the path. (A module, as in "
                    "`python -m name`, is started with module=True.)"
                )
            return
        try:
            found = importlib.util.find_spec(self.script)
        except (ImportError, ValueError):
            found = None
        if found is None and not Path(*self.script.split(".")).with_suffix(".py").is_file():
            raise ModuleNotFoundError(
                f"module: Python finds no module {self.script!r}; check its name, and that it is installed or below "
                f"{os.getcwd()}"
            )

    def _check_agents(self) -> None:
        most = self.nodes[1]
        if self.agents is not None:
            whole("agents", self.agents, 1, most)
        if self.hosts is not None:
            self.hosts.check_open()
            if self.num_agents > self.hosts.num_hosts:
                raise ValueError(
                    f"nnodes: expected at most {self.hosts.num_hosts}, one for each virtual host, got {most}"
                )
        if self.node_rank is not None:
            whole("node_rank", self.node_rank, 0, most - 1)
            if self.hosts is not None:
                raise ValueError("node_rank: expected None with hosts=...: each host's agent gets its own")
            if self.rdzv_endpoint is None and (self.master_addr is None or self.master_port is None):
                raise ValueError(
                    "node_rank: one node of a job that others start, too, needs to know where they meet; give "
                    "master_addr and master_port (static), or rdzv_endpoint and rdzv_backend='c10d'"
                )
        if self.rdzv_store not in STORES:
            raise ValueError(
                f"rdzv_store: expected one of {', '.join(map(repr, STORES))}, got {self.rdzv_store!r}"
            )
        whole("max_restarts", self.max_restarts, 0, 10_000)

    def _check_workers(self) -> None:
        listed = self.nproc_per_node if isinstance(self.nproc_per_node, list) else [self.nproc_per_node]
        if isinstance(self.nproc_per_node, list) and len(listed) < self.num_agents:
            raise ValueError(
                f"nproc_per_node: expected {self.num_agents} numbers, one for each node, got {self.nproc_per_node}"
            )
        if isinstance(self.nproc_per_node, tuple):
            raise ValueError(f"nproc_per_node: expected a number or a list, got {self.nproc_per_node!r}")
        for value in listed:
            if not isinstance(value, str):
                whole("nproc_per_node", value, 1, 1024)
            elif value not in ("auto", "cpu", "gpu", "xpu") and not (value.isdecimal() and int(value) > 0):
                raise ValueError(
                    f"nproc_per_node: expected a number of workers, 'auto', 'cpu', 'gpu' or 'xpu', got {value!r}"
                )
            elif value == "gpu":
                import torch

                if not torch.cuda.is_available():
                    raise ValueError(
                        "nproc_per_node: 'gpu' means a worker for each GPU, and torch finds no GPU here; give a "
                        "number, or check nvidia-smi and that this torch was built for CUDA"
                    )

    def _check_rendezvous(self) -> None:
        if self.rdzv_backend is not None and self.rdzv_backend not in BACKENDS:
            raise ValueError(
                f"rdzv_backend: expected one of {', '.join(map(repr, BACKENDS))}, got {self.rdzv_backend!r}"
            )
        if self.elastic and self.rdzv_backend == "static":
            raise ValueError(
                f'rdzv_backend: "static" nodes have fixed ranks, so their number cannot vary (nnodes={self.nnodes!r}); '
                'use "c10d"'
            )
        for name in ("timeout", "rdzv_timeout", "deadline"):
            value = getattr(self, name)
            if value is None and name == "deadline":
                continue
            if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
                raise ValueError(f"{name}: expected a positive number of seconds, got {value!r}")
        if not self.rdzv_timeout < threading.TIMEOUT_MAX:
            raise ValueError(
                f"rdzv_timeout: torchrun wants an end to the waiting; expected a finite number of seconds, such as "
                f"86400 for a day, got {self.rdzv_timeout!r}"
            )
        if self.master_port is not None:
            whole("master_port", self.master_port, 1, 65535)
        endpoint_host, _, port = (self.rdzv_endpoint or "").rpartition(":")
        if self.rdzv_endpoint and not (endpoint_host and port.isdigit()) and self.rdzv_backend != "etcd":
            raise ValueError(
                f"rdzv_endpoint: expected host:port such as 'node0:29400', got {self.rdzv_endpoint!r}"
            )
        for name, host in (("master_addr", self.master_addr), ("rdzv_endpoint", endpoint_host)):
            if host:
                check_resolves(name, host.strip("[]"))

    def _check_words(self) -> None:
        if self.show not in SHOW:
            raise ValueError(f"show: expected one of {', '.join(map(repr, SHOW))}, got {self.show!r}")
        for name, value in (self.env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env: expected strings, got {name!r}: {value!r}; write numbers as strings")
