"""Links limited in software, for systems that allow no network namespaces.

One bucket for each direction of each host's cable, in memory shared by all ranks: the time at which that direction
will be free. Whoever sends n bytes to another host reserves both directions it uses, from the moment both are free,
for n / rate seconds; the message may not be used before the reservation ends. The bytes themselves travel at once,
through real sockets; the due time travels ahead of each message, and both ends wait for it. So a transfer goes on
while its ranks compute, as on a real wire.

Only messages of the Communicator are paced. torch's own collectives do not come by here.
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
import struct
import tempfile
import threading
import time
from pathlib import Path

import torch

_PREFIX = "course_lib-pacer-"
_SLOT = struct.Struct("<dd")  # when the host's outgoing and its incoming direction are free (time.monotonic)


class Pacer:
    """The buckets of all hosts; `bytes_per_s` is each direction's rate."""

    def __init__(self, path: str | Path, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._file = open(path, "r+b")  # noqa: SIM115 (kept for the lock)
        self._slots = mmap.mmap(self._file.fileno(), 0)
        self._threads = threading.Lock()  # the file's lock holds between processes only

    @staticmethod
    def create(num_hosts: int) -> Path:
        """Make the shared file. Files whose kernel was killed are removed on the way; only this user's own."""
        for path in map(Path, glob.glob(os.path.join(tempfile.gettempdir(), _PREFIX + "*"))):
            owner = path.name.removeprefix(_PREFIX).partition("-")[0]
            if path.stat().st_uid == os.getuid() and owner.isdigit() and not _runs(int(owner)):
                path.unlink(missing_ok=True)
        fd, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-")
        os.write(fd, bytes(num_hosts * _SLOT.size))
        os.close(fd)
        return Path(name)

    @staticmethod
    def remove(path: Path) -> None:
        path.unlink(missing_ok=True)

    def reserve(self, source: int, target: int, nbytes: int) -> float:
        """The time (`time.monotonic`) at which `nbytes` sent now from host `source` have arrived at host `target`."""
        seconds = nbytes / self.bytes_per_s
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                out, into = source * _SLOT.size, target * _SLOT.size + 8
                begin = max(time.monotonic(), self._free(out), self._free(into))
                struct.pack_into("<d", self._slots, out, begin + seconds)
                struct.pack_into("<d", self._slots, into, begin + seconds)
                return begin + seconds
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _free(self, at: int) -> float:
        return struct.unpack_from("<d", self._slots, at)[0]


class Due:
    """When a paced message may be used: waited for like one of torch's handles, after the message itself.

    `tensor` is one float64, which the sender fills and the receiver receives.
    """

    def __init__(self, at: float = 0.0) -> None:
        self.tensor = torch.tensor([at], dtype=torch.float64)

    def wait(self) -> None:
        time.sleep(max(0.0, self.tensor.item() - time.monotonic()))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
