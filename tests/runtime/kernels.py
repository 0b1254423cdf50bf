"""A real Jupyter kernel for tests: run cells, collect what they show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import psutil
from jupyter_client.manager import KernelManager


def family(pid: int) -> list[psutil.Process]:
    """`pid`'s descendants: its fork servers and their ranks."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(pid: int) -> list[psutil.Process]:
    """The rank processes below `pid`: children of its fork servers."""
    servers = [child for child in family(pid) if any("forkserver.py" in part for part in child.cmdline())]
    return [rank for server in servers if server.ppid() == pid for rank in server.children(recursive=True)]


@dataclass
class Shown:
    """What one cell showed."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""  # the exception's name
    message: str = ""
    traceback: str = ""
    values: list[str] = field(default_factory=list)
    seconds: float = 0.0
    first_output_s: float | None = None


class Kernel:
    def __init__(self, cwd: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(cwd))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def run(self, code: str, timeout: float = 60.0, on_output: Callable[[str], None] | None = None) -> Shown:
        return self.finish(self.start(code), timeout, on_output)

    def finish(
        self, request: str, timeout: float = 60.0, on_output: Callable[[str], None] | None = None
    ) -> Shown:
        shown, began = Shown(), time.monotonic()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=timeout - (time.monotonic() - began))
            except Empty:
                raise AssertionError(f"the cell did not end; so far: {shown}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
                shown.first_output_s = shown.first_output_s or time.monotonic() - began
                if on_output is not None:
                    on_output(content["text"])
            elif kind in ("execute_result", "display_data"):
                shown.values.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                shown.error, shown.message = content["ename"], content["evalue"]
                shown.traceback = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                shown.seconds = time.monotonic() - began
                return shown

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
