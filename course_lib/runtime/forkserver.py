"""The process that starts all ranks. It is run as a script, and imports nothing of `course_lib`.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. Forking the notebook's
kernel itself would be wrong: it has threads, and perhaps a CUDA context, and neither survives a fork. So the kernel
starts this process once. It imports torch, starts no thread, never touches CUDA, and forks one child for each rank.
It does not import `course_lib`: an edited module of the course is imported afresh by the next launch.

It is also the ranks' guardian. Ranks are its children, each in a session of its own. When a rank ends, what is left
of its session is killed; when the kernel dies, all ranks are killed. Where forking is unsafe (macOS), it imports no
torch and starts each rank as a fresh interpreter; all else is the same.

Messages are JSON lines over a Unix socket. From the kernel: `{"start": id, "how": "fork" | "spawn", "namespaces":
[kind, ...]}`, with the rank's file descriptors, and `{"kill": [id, ...]}`. To the kernel: `{"ready": 1}`,
`{"failed": why}` and `{"exited": id, "status": wait status}`.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
from multiprocessing.connection import Connection

NUM_FDS = 5  # of a rank: channel, stdout, stderr, board, stacks
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "cloudpickle", "numpy", "tqdm", "psutil")


def main() -> None:
    fd, parent, preload = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "preload"
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the kernel's business
    try:
        for name in PRELOAD if preload else ():
            importlib.import_module(name)
    except BaseException:
        tell(control, failed=traceback.format_exc())
        return
    gc.collect()
    gc.freeze()  # a child's collector must not touch, and so copy, the pages it shares with its siblings
    tell(control, ready=1)
    ranks: dict[int, int] = {}  # pid -> id
    try:
        serve(control, parent, ranks)
    finally:
        for pid in ranks:
            kill_session(pid)


def serve(control: socket.socket, parent: int, ranks: dict[int, int]) -> None:
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    text = b""
    fds: list[int] = []
    while os.getppid() == parent:  # a fork of the kernel may hold the socket open after the kernel's death
        ready, _, _ = select.select([control.fileno(), wake], [], [], 0.5)
        if wake in ready:
            os.read(wake, 4096)
            reap(control, ranks)
        if control.fileno() in ready:
            data, new_fds, _, _ = socket.recv_fds(control, 65536, 64)
            if not data:
                return
            text, fds = text + data, fds + list(new_fds)
            *lines, text = text.split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "start" in request:
                    count = NUM_FDS + len(request["namespaces"])
                    own, fds = fds[:count], fds[count:]
                    start(control, request, own, fds, ranks)
                for number in request.get("kill", ()):
                    for pid in [pid for pid, known in ranks.items() if known == number]:
                        kill_session(pid)


def start(
    control: socket.socket, request: dict, own: list[int], others: list[int], ranks: dict[int, int]
) -> None:
    if request["how"] == "spawn":
        command = [sys.executable, "-P", __file__, "rank", json.dumps(request["namespaces"]), *map(str, own)]
        pid = subprocess.Popen(command, pass_fds=own, start_new_session=True, stdin=subprocess.DEVNULL).pid
    else:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                control.close()
                for fd in others:
                    os.close(fd)
                os.setsid()
                become_rank(request["namespaces"], own)
            finally:
                os._exit(1)
    ranks[pid] = request["start"]
    for fd in own:
        os.close(fd)


def reap(control: socket.socket, ranks: dict[int, int]) -> None:
    """Collect every child that ended, and end what it left behind."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in ranks:
            kill_session(pid)
            tell(control, exited=ranks.pop(pid), status=status)


def kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def tell(control: socket.socket, **message: object) -> None:
    try:
        control.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the kernel is gone: `serve` sees it too


def become_rank(namespaces: list[str], fds: list[int]) -> None:
    """In the child: take over the file descriptors, and hand on to the worker."""
    channel, out, err, board, stacks = fds[:NUM_FDS]
    for signum in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    for kind, fd in zip(namespaces, fds[NUM_FDS:], strict=True):
        enter_namespace(kind, fd)
    if sys.platform == "linux":  # the guardian may be killed too; after setns, which clears this
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    connection = Connection(channel)
    setup = json.loads(connection.recv_bytes())
    os.environ.clear()
    os.environ.update(setup["env"])
    os.chdir(setup["cwd"])
    sys.path[:] = setup["sys_path"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed()  # siblings must not share one stream, as processes of their own do not
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    from course_lib.runtime import worker

    worker.main(connection, board, stacks, setup)
    os._exit(0)


def enter_namespace(kind: str, fd: int) -> None:
    clone_newuser, clone_newnet = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, clone_newuser if kind == "user" else clone_newnet):
        raise OSError(ctypes.get_errno(), f"this rank could not enter its host's {kind} namespace")
    os.close(fd)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        become_rank(json.loads(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])
    else:
        main()
