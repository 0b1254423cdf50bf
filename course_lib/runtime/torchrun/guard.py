"""The process that stands over one torchrun job. It is run as a script, and needs only the standard library.

torchrun starts every worker in a session of its own: ending an agent or its process group leaves them running, and
when a notebook's kernel is killed they would train on, unseen. This process is the agents' parent and the reaper of
what they leave behind (PR_SET_CHILD_SUBREAPER): all the job ever started is below it. When told to stop, or when the
kernel is gone, it kills all of that. (On macOS, without reapers, that misses workers of an agent that died before.)

It keeps a diary, a file of JSON lines, each with the time `at` (seconds since 1970) and the number of the agent:

    {"kind": "agent", "pid"}   {"kind": "line", "text"}   {"kind": "gone", "pid"}   {"kind": "ended", "status"}

"line" is a line the agent wrote; "gone" a worker that is no longer alive; "ended" the agent's own end. A new worker's
log files get a second name, in `workers/`: torchrun deletes the first when it restarts workers for a change of nodes.

From the kernel: JSON lines over a Unix socket. `{"start": agent, "argv", "env", "cwd", "log_dir", "namespaces":
[kind, ...]}` with the namespaces' file descriptors, `{"kill": agent}` (with all below it), `{"stop": true}`.
"""

import contextlib
import ctypes
import glob
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, CLONE_NEWUSER, CLONE_NEWNET = 1, 36, 0x10000000, 0x40000000
LINUX = sys.platform == "linux"
LOOK_S = 0.05  # how often it is looked whether workers are alive


class Agent:
    def __init__(self, number: int, pid: int, pipe: int, log_dir: str) -> None:
        self.number, self.pid, self.pipe, self.log_dir = number, pid, pipe, log_dir
        self.text, self.alive, self.workers = b"", True, set[int]()


class Guard:
    def __init__(self, control: socket.socket, parent: int, home: str) -> None:
        self.control, self.parent, self.home = control, parent, home
        self.diary = os.open(os.path.join(home, "diary.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.agents: dict[int, Agent] = {}
        self.text, self.fds, self.told_to_stop = b"", list[int](), False

    def note(self, agent: int, kind: str, **more: object) -> None:
        os.write(
            self.diary, json.dumps({"at": time.time(), "agent": agent, "kind": kind, **more}).encode() + b"\n"
        )

    def serve(self) -> None:
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        while os.getppid() == self.parent and not self.told_to_stop:
            pipes = {agent.pipe: agent for agent in self.agents.values() if agent.pipe >= 0}
            ready, _, _ = select.select([self.control.fileno(), wake, *pipes], [], [], LOOK_S)
            for fd in pipes.keys() & set(ready):
                self.read(pipes[fd])
            if wake in ready:
                os.read(wake, 4096)
                self.reap()
            self.look()
            if self.control.fileno() in ready and not self.listen():
                return

    def listen(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, 65536, 64)
        self.text, self.fds = self.text + data, self.fds + list(fds)
        *lines, self.text = self.text.split(b"\n")
        for request in map(json.loads, lines):
            if "start" in request:
                count = len(request["namespaces"])
                own, self.fds = self.fds[:count], self.fds[count:]
                self.start(request, own)
            elif "kill" in request and request["kill"] in self.agents:
                self.kill_agent(self.agents[request["kill"]])
            elif "stop" in request:
                self.told_to_stop = True
        return bool(data)

    def start(self, request: dict, namespaces: list[int]) -> None:
        number, (read, write) = request["start"], os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                become(request, write, namespaces)
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(127)
        for fd in [write, *namespaces]:
            os.close(fd)
        os.set_blocking(read, False)
        self.agents[number] = Agent(number, pid, read, request["log_dir"])
        self.note(number, "agent", pid=pid)

    def read(self, agent: Agent) -> None:
        try:
            data = os.read(agent.pipe, 1 << 16)
        except BlockingIOError:
            return
        *lines, agent.text = (agent.text + data).split(b"\n")
        if not data:
            lines, agent.text = lines + ([agent.text] if agent.text else []), b""
            os.close(agent.pipe)
            agent.pipe = -1
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith('{"name": "torchelastic.worker.status.START"'):
                self.started(agent, json.loads(text)["metadata"])
            self.note(agent.number, "line", text=text)

    def started(self, agent: Agent, about: dict) -> None:
        """A worker runs: remember it, and give its log files a second name."""
        pid, local_rank = int(about["worker_id"]), json.loads(about["metadata"])["local_rank"][0]
        agent.workers.add(pid)
        where = os.path.join(agent.log_dir, "*", f"attempt_{about['agent_restarts']}", str(local_rank))
        for stream in ("stdout", "stderr"):
            second = os.path.join(self.home, "workers", f"{pid}.{stream}")
            with contextlib.suppress(FileNotFoundError):
                os.remove(second)  # of an earlier process with the same number
            for path in glob.glob(os.path.join(where, stream + ".log")):
                try:
                    os.link(path, second)
                except OSError:  # another file system
                    os.symlink(path, second)

    def look(self) -> None:
        for agent in self.agents.values():
            for pid in [pid for pid in agent.workers if not is_alive(pid)]:
                agent.workers.remove(pid)
                self.note(agent.number, "gone", pid=pid)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for agent in self.agents.values():
                if agent.pid == pid and agent.alive:
                    agent.alive = False
                    while agent.pipe >= 0 and select.select([agent.pipe], [], [], 0)[0]:
                        self.read(agent)
                    self.note(agent.number, "ended", status=status)

    def kill_agent(self, agent: Agent) -> None:
        """As if its machine were switched off: the agent, its workers, and what they started."""
        below = descendants(agent.pid).union(agent.workers, *map(descendants, agent.workers))
        for pid in [agent.pid, *below] if agent.alive else below:
            kill(pid)

    def end(self) -> None:
        stop_at, below = time.monotonic() + 5.0, {0}
        while below and time.monotonic() < stop_at:
            below = {pid for pid in descendants(os.getpid()) if is_alive(pid)}
            for pid in below:
                kill(pid)
            self.reap()
            time.sleep(0.005)
        self.look()
        if not self.told_to_stop:  # the kernel is gone; nobody will read the files
            shutil.rmtree(self.home, ignore_errors=True)


def become(request: dict, output: int, namespaces: list[int]) -> None:
    """In the child: enter the host's namespaces and become the agent."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, fd in zip(request["namespaces"], namespaces, strict=True):
        if libc.setns(fd, CLONE_NEWUSER if kind == "user" else CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this agent could not enter its host's {kind} namespace")
        os.close(fd)
    if LINUX:  # after setns, which clears it
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request["cwd"])
    os.execvpe(request["argv"][0], request["argv"], request["env"])


def is_alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"], ["X"]) if LINUX else any(pid == one for one, _ in pairs())


def stat(pid: int | str) -> list[str]:
    """Linux: a process's state, its parent's number and more; [] when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for child, parent in pairs():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    ahead = [pid]
    while ahead:
        new = [child for child in children.get(ahead.pop(), ()) if child not in found]
        found.update(new)
        ahead += new
    return found


def pairs() -> list[tuple[int, int]]:
    """(process, its parent) for all processes."""
    if not LINUX:
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True).stdout
        return [(int(line.split()[0]), int(line.split()[1])) for line in listed.splitlines()]
    names = filter(str.isdigit, os.listdir("/proc"))
    return [(int(name), int(found[1])) for name in names if (found := stat(name))]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    control, parent, home = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the kernel decides
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(control, parent, home)
    try:
        guard.serve()
    finally:
        guard.end()


if __name__ == "__main__":
    main()
