"""What this machine has: the numbers that decide how many ranks run well here, and with which backend.

The report starts no CUDA: a process that has used CUDA cannot fork children that use it, and the launcher's
fork server must stay free to. Names and memory of the GPUs come from the driver's own tool, `nvidia-smi`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from course_lib.classroom.tables import format_bytes


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver numbers it (PCI order), whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class DeviceReport:
    """What `device_report` found. `print(report)` shows it; `report.as_dict()` has the same as plain values.

    num_cores: logical cores this process may use, of num_cores_total. memory_bytes: what the process may
    use (a container's limit, if lower than the machine's memory). gpus: all the driver knows;
    num_visible_gpus: those torch may use, as CUDA_VISIBLE_DEVICES (None: not set) allows. namespaces: "yes"
    or why network namespaces cannot be made here.
    """

    cpu: str
    num_cores: int
    num_cores_total: int
    memory_bytes: int
    available_bytes: int
    python: str
    torch: str
    gpus: tuple[Gpu, ...]
    num_visible_gpus: int
    cuda_visible_devices: str | None
    backends: dict[str, bool]
    namespaces: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("CPU", self.cpu),
            ("cores", _of(self.num_cores, self.num_cores_total)),
            ("memory", f"{format_bytes(self.memory_bytes)}, {format_bytes(self.available_bytes)} of it free"),
            ("Python", self.python),
            ("torch", self.torch),
            *_gpu_rows(self),
            ("backends", ", ".join(_backend(name, there) for name, there in self.backends.items())),
            ("namespaces", self.namespaces),
        ]
        return "\n".join(f"{name:<12}{value}" for name, value in rows)

    __repr__ = __str__  # a cell whose last line is the report shows it


def device_report() -> DeviceReport:
    """Look at this machine. Takes about 50 ms (more with GPUs), starts no CUDA, changes nothing."""
    memory = psutil.virtual_memory()
    limit = _container_limit()
    return DeviceReport(
        cpu=_cpu_model(),
        num_cores=_usable_cores(),
        num_cores_total=psutil.cpu_count() or 1,
        memory_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, limit or memory.available),
        python=platform.python_version(),
        torch=str(torch.__version__),
        gpus=_gpus(),
        num_visible_gpus=torch.cuda.device_count(),  # asks the driver's library; does not start CUDA
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        backends={
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available() and torch.cuda.device_count() > 0,
            "mpi": dist.is_available() and dist.is_mpi_available(),
        },
        namespaces=_namespaces(),
    )


def _backend(name: str, there: bool) -> str:
    missing = "no (no GPU here)" if name == "nccl" else "no (not in this build of torch)"
    return f"{name} {'yes' if there else missing}"


def _of(usable: int, total: int) -> str:
    return str(total) if usable == total else f"{usable} of {total} (this process may use no more)"


def _gpu_rows(report: DeviceReport) -> list[tuple[str, str]]:
    if not report.gpus and not report.num_visible_gpus:
        return [("GPUs", "none: ranks run on the CPU, over gloo")]
    rows = [(f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}") for gpu in report.gpus]
    setting = report.cuda_visible_devices
    why = "CUDA_VISIBLE_DEVICES is not set" if setting is None else f"CUDA_VISIBLE_DEVICES={setting}"
    return [*rows, ("torch sees", f"{report.num_visible_gpus} of {len(report.gpus) or '?'} GPUs: {why}")]


def _cpu_model() -> str:
    """From /proc/cpuinfo on Linux, sysctl on macOS; else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        name = _run(["sysctl", "-n", "machdep.cpu.brand_string"])
        if name:
            return name
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Cores of this process's affinity, further limited by a container's CPU quota (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or quota "max"
        return cores


def _container_limit() -> int | None:
    """The memory limit of a container in bytes (cgroup v2, then v1), None without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def _gpus() -> tuple[Gpu, ...]:
    text = _run(["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"])
    gpus = []
    for line in (text or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit() and parts[2].isdigit():
            gpus.append(Gpu(int(parts[0]), parts[1], int(parts[2]) * 2**20))  # the tool counts in MiB
    return tuple(gpus)


def _namespaces() -> str:
    """Whether a network namespace can be made: tried on a process that ends at once."""
    lacking = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if platform.system() != "Linux":
        return "no: they exist on Linux only (links are then paced in software)"
    if lacking:
        return f"no: the tools {', '.join(lacking)} are not installed (links are then paced in software)"
    root = os.geteuid() == 0
    for how, name in ((["--net"], "as root"), (["--user", "--map-root-user", "--net"], "as a user")):
        if (root or "--user" in how) and _run(["unshare", *how, "true"]) is not None:
            return f"yes, {name}"
    return "no: this system allows neither (links are then paced in software)"


def _run(command: Sequence[str]) -> str | None:
    """Standard output of a command; None if it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
