"""What a torchrun job is asked to be, checked before anything starts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.output import SHOW
from course_lib.runtime.torchrun import checks
from course_lib.runtime.torchrun.checks import check_options, check_resolves, check_type, parse_nodes, whole

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
        self._check_types()
        self._check_script()
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
    def dynamic(self) -> bool:
        """Whether ranks are given at the rendezvous, not by the nodes' own ranks."""
        if self.rdzv_backend is not None:
            return self.rdzv_backend != "static"
        return self.elastic or self.rdzv_store == "apart" or bool(self.rdzv_endpoint)

    @property
    def num_agents(self) -> int:
        """How many agents are started at first."""
        return 1 if self.node_rank is not None else self.agents or self.nodes[1]

    @property
    def on_namespaces(self) -> bool:
        return self.hosts is not None and self.hosts.how == "namespaces"

    def conf(self) -> dict[str, Any]:
        """`rdzv_conf` as a dict."""
        return checks.parse_conf(self.rdzv_conf)

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

    def _check_types(self) -> None:
        self.script = checks.text_of_path("script", self.script)
        self.script_args = tuple(map(str, self.script_args))
        if bad := [text for text in self.script_args if "\0" in text]:
            raise ValueError(f"script_args: no program can be given a NUL character, got {bad[0]!r:.60}")
        if self.log_dir is not None:
            self.log_dir = checks.text_of_path("log_dir", self.log_dir)
            checks.check_directory("log_dir", self.log_dir)
        check_type("module", self.module, bool, "True or False")
        for name in ("rdzv_backend", "rdzv_endpoint", "master_addr"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), str, "text or None")
        if self.env is not None:
            checks.check_env(self.env)
        if self.names is not None:
            check_type("names", self.names, Mapping, "a dict of paths to what to print for them, or None")
        if self.hosts is not None:
            check_type("hosts", self.hosts, VirtualHosts, "VirtualHosts(...) or None")
        self.conf()

    def _check_script(self) -> None:
        if not self.module:
            if not Path(self.script).is_file():
                raise FileNotFoundError(
                    f"script: there is no file {self.script!r} in {os.getcwd()}; check the path. (A module, as in "
                    "`python -m name`, is started with module=True.)"
                )
        else:
            checks.check_module(self.script)

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
            if name != "deadline" or self.deadline is not None:
                checks.check_seconds(name, getattr(self, name))
        if not self.rdzv_timeout < threading.TIMEOUT_MAX:
            raise ValueError(
                f"rdzv_timeout: torchrun wants an end to the waiting; expected a finite number of seconds, such as "
                f"86400 for a day, got {self.rdzv_timeout!r}"
            )
        if self.master_port is not None:
            whole("master_port", self.master_port, 1, 65535)
        endpoint_host, _, port = (self.rdzv_endpoint or "").rpartition(":")
        if self.rdzv_endpoint is not None and not (endpoint_host and port.isdecimal() and int(port) <= 65535):
            raise ValueError(
                f"rdzv_endpoint: expected host:port such as 'node0:29400', got {self.rdzv_endpoint!r}"
            )
        places = {"master_addr": self.master_addr, "rdzv_endpoint": endpoint_host}
        places["local_addr"] = self.options.get("local_addr")
        if self.node_rank is not None and self.dynamic and not places["local_addr"]:
            places["local_addr: not given, so torchrun takes this machine's host name"] = socket.gethostname()
        for name, host in places.items():
            if host:
                check_resolves(name, str(host).strip("[]"))

    def _check_words(self) -> None:
        if self.show not in SHOW:
            raise ValueError(f"show: expected one of {', '.join(map(repr, SHOW))}, got {self.show!r}")
