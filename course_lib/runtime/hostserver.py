"""The process that holds a cluster of virtual hosts. It is run as a script, and needs only the standard library.

Each host is a network namespace with one interface, `eth0`; a bridge in a namespace of its own is the switch that joins
them. A token bucket (tc's tbf) on both ends of every cable holds each direction to the link's rate:

    host 0 [eth0]---cable---[h0] switch [h1]---cable---[eth0] host 1

Nothing of this has a name in the machine's own namespace. A namespace lives as long as a process in it: one child
of this process for each host. When this process ends, for whatever reason, its children end, and with them the
namespaces, cables and buckets. So a killed kernel leaves nothing behind that somebody would have to find.

An ordinary user may do all this inside a user namespace, in which they are root, where the system allows it.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
MTU = 9000  # jumbo frames: headers are 0.7 % of the bytes instead of 4 %


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent, num_hosts, rate = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    as_user = sys.argv[5:] == ["user"]  # do as an ordinary user must, also as root (for tests)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        in_user_namespace = isolate(as_user)
        run("ip", ["link add switch type bridge", "link set switch up"])
        hosts = [Host(number, rate) for number in range(num_hosts)]
    except Exception as error:
        control.sendall(json.dumps({"failed": str(error)}).encode() + b"\n")
        return
    message = {"pids": [host.pid for host in hosts], "user": in_user_namespace}
    control.sendall(json.dumps(message).encode() + b"\n")
    while os.getppid() == parent:
        if select.select([control], [], [], 0.5)[0] and not control.recv(1):
            break


def isolate(as_user: bool = False) -> bool:
    """Leave the machine's network namespace; True if that took a user namespace."""
    user, group = os.geteuid(), os.getegid()
    if not as_user:
        try:
            unshare(CLONE_NEWNET)
            return False
        except OSError:
            pass
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {user} 1")
    write("/proc/self/gid_map", f"0 {group} 1")
    return True


class Host:
    """One host: a child process that stays in the host's namespace."""

    def __init__(self, number: int, rate: int) -> None:
        self.number, self.rate = number, rate
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                self._live(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._expect(ours, "in its namespace")
        cable = f"h{number}"
        run(
            "ip",
            [
                f"link add {cable} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {self.pid}",
                f"link set {cable} master switch",
                f"link set {cable} up",
            ],
        )
        run("tc", [limit(cable, rate)])
        ours.sendall(b"connected\n")
        self._expect(ours, "ready")
        self._alive = ours  # closed when this process ends: the child then ends too

    def _expect(self, child: socket.socket, what: str) -> None:
        answer = child.recv(4096).decode()
        if answer.strip() != what:
            raise OSError(f"host {self.number}: {answer.strip() or 'its process ended'}")

    def _live(self, parent: socket.socket) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        try:
            unshare(CLONE_NEWNET)
            parent.sendall(b"in its namespace\n")
            parent.recv(4096)
            try:
                write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")  # its announcements would be counted
            except OSError:
                pass
            address = f"addr add {address_of(self.number)}/16 dev eth0"
            run("ip", ["link set lo up", address, "link set eth0 up"])
            run("tc", [limit("eth0", self.rate)])
            parent.sendall(b"ready\n")
        except Exception as error:
            parent.sendall(f"{error}\n".encode())
        while parent.recv(4096):
            pass


def address_of(number: int) -> str:
    return f"10.77.{(number + 1) // 250}.{(number + 1) % 250 + 1}"


def limit(device: str, rate: int) -> str:
    """A token bucket. It holds 1 ms of traffic, at least two packets: so much may pass at once after a pause."""
    burst = max(rate // 8 // 1000, 2 * (MTU + 14))
    return f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} latency 400ms"


def run(tool: str, commands: list[str]) -> None:
    done = subprocess.run([tool, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode:
        raise OSError(
            f"{tool}: {done.stderr.strip() or done.stdout.strip()} (commands: {'; '.join(commands)})"
        )


def unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
