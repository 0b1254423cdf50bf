"""Training with many GPUs, for real on any machine: the package that the course's chapters call."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.runtime.errors import RankError as RankError
    from course_lib.runtime.errors import RanksHung as RanksHung
    from course_lib.runtime.hosts import HostsUnavailable as HostsUnavailable
    from course_lib.runtime.hosts import VirtualHosts as VirtualHosts
    from course_lib.runtime.launcher import launch as launch
    from course_lib.runtime.limits import PacedStage as PacedStage
    from course_lib.runtime.limits import paced as paced
    from course_lib.runtime.pickling import CannotSend as CannotSend
    from course_lib.runtime.pool import Pool as Pool
    from course_lib.runtime.pool import RankResults as RankResults
    from course_lib.runtime.torchrun import TorchrunError as TorchrunError
    from course_lib.runtime.torchrun import start_torchrun as start_torchrun
    from course_lib.runtime.torchrun import torchrun as torchrun

# Imported at first use: every rank imports this package, and needs none of these.
_HOME = {
    "launch": "launcher",
    "Pool": "pool",
    "RankResults": "pool",
    "RankError": "errors",
    "RanksHung": "errors",
    "CannotSend": "pickling",
    "VirtualHosts": "hosts",
    "HostsUnavailable": "hosts",
    "paced": "limits",
    "PacedStage": "limits",
    "torchrun": "torchrun",
    "start_torchrun": "torchrun",
    "TorchrunError": "torchrun",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"course_lib.runtime.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
