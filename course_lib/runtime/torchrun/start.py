"""`torchrun` and `start_torchrun`, as a cell calls them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from course_lib.runtime.errors import LaunchError
from course_lib.runtime.hosts import VirtualHosts
from course_lib.runtime.torchrun.checks import check_type
from course_lib.runtime.torchrun.job import TorchrunJob
from course_lib.runtime.torchrun.result import TorchrunResult
from course_lib.runtime.torchrun.settings import Settings


def start_torchrun(
    script: str | PathLike[str],
    *script_args: Any,
    nproc_per_node: int | str | list = 2,
    nnodes: int | str | None = None,
    hosts: VirtualHosts | None = None,
    agents: int | None = None,
    max_restarts: int = 0,
    module: bool = False,
    rdzv_backend: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    rdzv_conf: Mapping[str, Any] | str = "",
    rdzv_timeout: float = 30.0,
    rdzv_store: str = "node 0",
    master_addr: str | None = None,
    master_port: int | None = None,
    node_rank: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    deadline: float | None = None,
    show: str = "live",
    log_dir: str | PathLike[str] | None = None,
    names: Mapping[str, str] | None = None,
    **options: Any,
) -> TorchrunJob:
    """Start a torchrun job and return at once. All arguments: see `torchrun`.

    Use it as a context manager, or call `.wait()` or `.close()`; what is left of the job then is killed.
    """
    given: dict[str, Any] = dict(locals())  # the arguments by name: Settings has the same
    return TorchrunJob(Settings(**given))


def torchrun(
    script: str | PathLike[str], *script_args: Any, check: bool = True, **settings: Any
) -> TorchrunResult:
    """Run `script` (a file; a module's name with `module=True`) on several ranks with the real torchrun.

    * `nproc_per_node`: workers of each node (2): a number, "cpu", "gpu", "auto", or a list with one for each node.
    * `nnodes`: nodes: a number, or "1:3" for an elastic job that goes on while there are at least 1 and at most 3.
      Default: 1, or all of `hosts`. Without hosts all agents run on this machine and meet on its loopback.
    * `hosts`: a VirtualHosts; each agent runs inside one host, in order. (Where hosts are paced in software there is no
      host to be inside: the agents run on this machine's loopback, and the result's `label` says so.)
    * `agents`: how many agents to start at first (all).
    * `max_restarts`: how often all workers are restarted after one of them failed (0).
    * `rdzv_backend`: "static" (node ranks given, the default for several nodes) or "c10d" (the default if elastic).
      `rdzv_endpoint` (host:port), `rdzv_id`; `master_addr`, `master_port`: as torchrun's.
    * `rdzv_timeout`: seconds in which the nodes must find each other (30). `rdzv_conf`: more of torchrun's --rdzv-conf.
    * `rdzv_store`: "node 0": the store lives in its agent, as it does with torchrun: when node 0 is lost, so is the
      job. "apart": in a process of its own, so that any node may go.
    * `node_rank`: start this one node of a job whose others are started elsewhere.
    * `env`: more environment variables. OMP_NUM_THREADS is 1 unless set.
    * `timeout`: seconds without any sign of life, after which the job hangs (60); computing is never a hang.
      `deadline`: seconds for the whole job, or None.
    * `show`: "live", "grouped" (rank by rank, at the end), or "none". `names`: what to print in place of a path.
    * `log_dir`: where to keep torchrun's log files; by default they are removed after a success and at the end of this
      process. `check=False`: return the result of a failed job, too, with the error in `.error`.
    * any other option of the installed torchrun, with underscores: `monitor_interval=1`, `role="trainer"`.

    Raises RankError if a worker fails (and no restart is left), RanksHung if the job hangs or passes its deadline,
    TorchrunError if the nodes do not find each other or an agent ends; ValueError, TypeError, FileNotFoundError and
    ModuleNotFoundError for wrong arguments, before anything starts. Whatever happens, no agent or worker is left.
    """
    check_type("check", check, bool, "True or False")
    try:
        with start_torchrun(script, *script_args, **settings) as job:
            return job.wait(check=check)
    except LaunchError as error:
        raise error.with_traceback(None) from None  # the reader's line, not the insides
