"""The kernel's side of `guard`: start it, have it start and kill agents, read its diary, end it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import psutil

from course_lib.runtime.torchrun.tail import Tail

_SCRIPT = Path(__file__).with_name("guard.py")
_END_S = 6.0


def temporary_directory() -> Path:
    """A new one; first removes those that a killed process has left."""
    for old in Path(tempfile.gettempdir()).glob("course_torchrun_*_*"):
        owner = old.name.split("_")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"course_torchrun_{os.getpid()}_"))


class Guardian:
    """One guard and its directory `home`, which holds the diary and the workers' output."""

    def __init__(self) -> None:
        self.home = temporary_directory()
        (self.home / "workers").mkdir()
        (self.home / "diary.jsonl").touch()
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(self.home)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C for the kernel's process group must not reach it
            )
        self._diary = Tail(self.home / "diary.jsonl")
        files = self._control, self._diary
        self._finalizer = weakref.finalize(self, _abandon, *files, self._process, os.getpid())

    def start(self, agent: int, argv: list[str], env: dict[str, str], log_dir: str, namespaces: list) -> None:
        """Start an agent; `namespaces`: (kind, open file) pairs, which are closed here."""
        request = {"start": agent, "argv": argv, "env": env, "cwd": os.getcwd(), "log_dir": log_dir}
        request["namespaces"] = [kind for kind, _ in namespaces]
        try:
            self._say(request, [fd for _, fd in namespaces])
        finally:
            for _, fd in namespaces:
                os.close(fd)

    def kill(self, agent: int) -> None:
        """Kill an agent and all that it started."""
        self._say({"kill": agent})

    def _say(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            if fds:  # they travel with the first byte
                socket.send_fds(self._control, [data[:1]], fds)
                data = data[1:]
            self._control.sendall(data)
        except OSError as error:
            raise RuntimeError(f"the process that stands over this job is gone ({error})") from None

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether it ended without having cleaned up."""
        return self._process.poll() not in (None, 0)

    def notes(self) -> list[dict[str, Any]]:
        """What is new in the diary."""
        return [json.loads(line) for line in self._diary.read()]

    def stop(self) -> None:
        """Kill all that is left of the job, and wait until it is gone. Harmless when it has been done."""
        try:
            self._say({"stop": True})
        except RuntimeError:
            pass
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close what is open here; the directory stays. Harmless when it has been done."""
        self._finalizer()


def _abandon(control: socket.socket, diary: Tail, process: subprocess.Popen, owner: int) -> None:
    """The guard sees that its socket is closed, and ends everything."""
    control.close()
    diary.close()
    if owner == os.getpid():
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
