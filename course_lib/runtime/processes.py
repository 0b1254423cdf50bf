"""The kernel's side of the fork server: start ranks, end them, learn how they ended."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

_SCRIPT = Path(__file__).with_name("forkserver.py")
_START_S = 120.0  # the server imports torch: seconds, minutes on a slow disk


class StartError(RuntimeError):
    """The process that starts the ranks could not do its work; the message says why."""


class ForkServer:
    """One process that forks ranks; `preload` says whether it has imported torch (else ranks are spawned)."""

    def __init__(self, preload: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), "preload" if preload else "bare"]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), *arguments],
                pass_fds=[theirs.fileno()],
                env=os.environ
                | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's library starts threads when imported
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C for the kernel's process group must not end it
            )
        self.socket, self.preload, self.owner = ours, preload, os.getpid()
        self._text = b""
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ready = False
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self.socket.settimeout(_START_S)
        try:
            while not self._ready:
                if not self._read():
                    raise StartError("the process that starts the ranks ended before it was ready")
        except TimeoutError:
            raise StartError(f"importing torch took longer than {_START_S:.0f} s") from None
        self.socket.setblocking(False)

    def _read(self) -> bool:
        data = self.socket.recv(65536)
        *lines, self._text = (self._text + data).split(b"\n")
        for message in map(json.loads, lines):
            if "failed" in message:
                raise StartError("the process that starts the ranks failed:\n" + message["failed"])
            self._ready = self._ready or "ready" in message
            if "exited" in message:
                self._statuses[message["exited"]] = message["status"]
        return bool(data)

    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def start(self, number: int, fds: list[int], namespaces: list[str]) -> None:
        """Start rank process `number`, which owns `fds` (see forkserver.NUM_FDS) and enters `namespaces`."""
        how = "fork" if self.preload else "spawn"
        message = json.dumps({"start": number, "how": how, "namespaces": namespaces}).encode() + b"\n"
        with self._lock:
            self.socket.setblocking(True)
            try:
                socket.send_fds(self.socket, [message], fds)
            except OSError as error:
                raise StartError(f"the process that starts the ranks is gone ({error})") from None
            finally:
                self.socket.setblocking(False)

    def kill(self, numbers: list[int]) -> None:
        with self._lock:
            try:
                self.socket.sendall(json.dumps({"kill": numbers}).encode() + b"\n")
            except OSError:
                pass  # it is gone, and its ranks with it

    def status(self, number: int) -> int | None:
        """How process `number` ended (as `os.waitpid` reports it), or None while it runs."""
        with self._lock:
            try:
                while self._read():
                    pass
            except (BlockingIOError, OSError):
                pass
            if number not in self._statuses and not self.alive():
                return 9  # without its guardian a rank is killed
            return self._statuses.get(number)

    def wait(self, numbers: list[int], seconds: float) -> bool:
        """Wait until all of `numbers` have ended; False if `seconds` were not enough."""
        end = time.monotonic() + seconds
        while any(self.status(number) is None for number in numbers):
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._statuses.pop(number, None)

    def close(self) -> None:
        self.socket.close()
        if self.owner == os.getpid():
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


_servers: dict[bool, ForkServer] = {}
_servers_lock = threading.Lock()
numbers = itertools.count(1)  # names of rank processes, unique in this kernel


def fork_server(start: str) -> ForkServer:
    """The server for `start` ("auto": a fork server on Linux, else spawn), started at first use or when it died."""
    preload = start == "forkserver" or (start == "auto" and sys.platform == "linux")
    with _servers_lock:
        server = _servers.get(preload)
        if server is None or not server.alive():
            server = _servers[preload] = ForkServer(preload)
        return server


@atexit.register
def _close_all() -> None:
    for server in _servers.values():
        server.close()
