"""Virtual hosts: limited links, placement, counters, clean-up; with namespaces, without root, and paced in software."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import HostsUnavailable, VirtualHosts, launch
from course_lib.comm.collectives import ring_all_reduce
from course_lib.comm.pacer import Pacer
from course_lib.runtime import hosts as hosts_module
from course_lib.runtime.calibrate import LinkNotAsSet
from course_lib.runtime.hosts import parse_rate


def why_not() -> str:
    try:
        VirtualHosts(1, how="namespaces").close()
    except HostsUnavailable as error:
        return str(error)
    return ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
BOTH = [pytest.param("namespaces", marks=[needs_namespaces, pytest.mark.hosts]), "paced"]


def host_processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if any("hostserver.py" in part for part in process.cmdline())
    ]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert host_processes() == [] and list(Path("/tmp").glob(f"course_lib-pacer-{os.getpid()}-*")) == []


# --- rates


@pytest.mark.parametrize(
    ("link", "bits"),
    [
        ("400Mbit", 400_000_000),
        ("1Gbit", 10**9),
        ("64kbit", 64_000),
        ("2.5Gbit", 2_500_000_000),
        (" 10 mbit ", 10**7),
    ],
)
def test_rates(link: str, bits: int) -> None:
    assert parse_rate(link) == bits


@pytest.mark.parametrize(
    "link", ["400Mb/s", "-1Mbit", "0", "0Mbit", 400, None, "fast", "400MB", "10Tbit", "1bit", ""]
)
def test_wrong_rates(link) -> None:
    with pytest.raises(ValueError, match=r'link: expected a rate in bits per second such as "400Mbit"'):
        VirtualHosts(2, link=link)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n: expected a whole number from 1"),
        ({"n": "2"}, "n: expected a whole number from 1"),
        ({"n": 2, "ranks_per_host": 0}, "ranks_per_host: expected"),
        ({"n": 2, "how": "docker"}, "how: expected one of 'auto', 'namespaces', 'paced'"),
    ],
)
def test_wrong_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VirtualHosts(**arguments)


def test_a_launch_that_does_not_fit() -> None:
    with (
        VirtualHosts(2, how="paced") as hosts,
        pytest.raises(ValueError, match=r"expected at most 2 .2 hosts of 1 ranks"),
    ):
        launch(lambda comm: None, world_size=3, hosts=hosts)
    with pytest.raises(RuntimeError, match="these 2 virtual hosts are closed"):
        launch(lambda comm: None, world_size=2, hosts=hosts)
    with pytest.raises(RuntimeError, match="these 2 virtual hosts are closed"):
        hosts.counters()
    with pytest.raises(RuntimeError, match="these 2 virtual hosts are closed"), hosts:
        pass
    with pytest.raises(TypeError, match="hosts: expected VirtualHosts"):
        launch(lambda comm: None, world_size=2, hosts=2)  # type: ignore[arg-type]


# --- placement and links


@pytest.mark.parametrize("how", BOTH)
def test_ranks_are_placed_in_order(how: str) -> None:
    def where(comm):
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK")
        return comm.host_of, [int(os.environ[name]) for name in names], os.environ["MASTER_ADDR"]

    with VirtualHosts(2, ranks_per_host=2, how=how) as hosts:
        results = launch(where, world_size=3, hosts=hosts, show="none")
        assert results.output == [
            "",
            "",
            "",
        ]  # no warning of torch's about names that virtual hosts do not have
        assert [result[0] for result in results] == [(0, 0, 1)] * 3
        assert [result[1] for result in results] == [[0, 2, 0], [1, 2, 1], [0, 1, 2]]
        assert results[2][2] == (hosts.addresses[0] if how == "namespaces" else "127.0.0.1")


@pytest.mark.parametrize("how", BOTH)
def test_the_link_carries_what_it_says(how: str) -> None:  # case 5, and the directions are not shared
    with VirtualHosts(2, link="100Mbit", how=how) as hosts:
        assert hosts.bytes_per_s == 12.5e6
        found = hosts.calibrate()
        assert found.expected == 12.5e6 and "100 Mbit/s = 12.5 MB/s in each direction" in str(found)


@pytest.mark.parametrize("how", BOTH)
def test_a_link_that_is_not_what_it_says_stops_the_lab(how: str) -> None:
    with VirtualHosts(2, link="100Mbit", how=how) as hosts:
        hosts.bytes_per_s *= 1.5
        if how == "paced":  # here the rate is only told to the ranks: slow the buckets themselves down
            hosts._pacer, wrong = Pacer.create(2), hosts._pacer
            hosts.bytes_per_s, real = 12.5e6, hosts.setup_of
            hosts.setup_of = lambda rank: real(rank) | {"bytes_per_s": 8e6}
        with pytest.raises(LinkNotAsSet, match="more than 5% off, so times measured on it would say nothing"):
            hosts.calibrate()
        if how == "paced":
            hosts._pacer.unlink()
            hosts._pacer = wrong


@needs_namespaces
@pytest.mark.hosts
def test_torchs_own_collectives_are_limited_too_and_the_kernel_counts_them() -> None:
    def work(comm):
        tensor = torch.ones(1_000_000)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - began

    with VirtualHosts(2, link="100Mbit") as hosts:
        before = hosts.counters()
        seconds = launch(work, world_size=2, hosts=hosts, show="none")
        sent = [after.bytes_sent - b.bytes_sent for after, b in zip(hosts.counters(), before, strict=True)]
    assert min(seconds) > 4e6 / 12.5e6 * 0.9  # 2 (N-1)/N S bytes, S = 4 MB: not faster than the wire
    assert all(4e6 <= count < 4.3e6 for count in sent)


@needs_namespaces
@pytest.mark.hosts
def test_the_ledger_agrees_with_the_interfaces() -> None:
    def work(comm):
        ring_all_reduce(comm, torch.ones(500_000))

    with VirtualHosts(4, link="1Gbit") as hosts:
        before = hosts.counters()
        results = launch(work, world_size=4, hosts=hosts, show="none")
        for b, after, ledger in zip(before, hosts.counters(), results.ledger, strict=True):
            assert after.bytes_sent - b.bytes_sent == pytest.approx(ledger.bytes_sent, rel=0.05)
            assert after.bytes_received - b.bytes_received == pytest.approx(ledger.bytes_received, rel=0.05)


@pytest.mark.parametrize("how", BOTH)
def test_ranks_of_one_host_talk_at_full_speed(how: str) -> None:
    def work(comm):
        tensor = torch.ones(2_500_000)
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            comm.send(tensor, 1)
        else:
            comm.recv(tensor, 0)
        return time.perf_counter() - began

    with VirtualHosts(1, link="10Mbit", ranks_per_host=2, how=how) as hosts:
        assert max(launch(work, world_size=2, hosts=hosts, show="none")) < 4.0  # 8 s over the link


def test_paced_messages_are_right_and_equal_those_of_namespaces() -> None:
    def work(comm):
        tensor = torch.arange(1001.0) * (comm.rank + 1)
        ring_all_reduce(comm, tensor)
        return tensor, comm.ledger.bytes_sent, comm.ledger.messages

    with VirtualHosts(3, how="paced") as hosts:
        paced = launch(work, world_size=3, hosts=hosts, show="none")
    plain = launch(work, world_size=3, show="none")
    for ours, theirs in zip(paced, plain, strict=True):
        assert torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]


def test_a_paced_server_is_the_bottleneck_it_should_be() -> None:
    """Three hosts send to one: its incoming direction takes them one after the other."""

    def work(comm):
        tensor = torch.zeros(250_000)  # 1 MB: 0.08 s at 100 Mbit
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            for source in (1, 2, 3):
                comm.recv(tensor, source)
        else:
            comm.send(tensor, 0)
        return time.perf_counter() - began

    with VirtualHosts(4, link="100Mbit", how="paced") as hosts:
        assert launch(work, world_size=4, hosts=hosts, show="none")[0] >= 0.24


# --- where namespaces are not allowed


def test_fall_back_and_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None)
    with pytest.raises(HostsUnavailable, match="the command 'ip' is missing; install the package iproute2"):
        VirtualHosts(2, how="namespaces")
    with VirtualHosts(2) as hosts:
        assert (hosts.how, hosts.label) == ("paced", "paced in software") and "iproute2" in hosts.reason
        with pytest.raises(HostsUnavailable, match="no link to read when messages are paced in software"):
            hosts.counters()
        assert launch(lambda comm: comm.rank, world_size=2, hosts=hosts, show="none") == [0, 1]


def test_the_reason_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hosts_module._HostServer, "_answer", lambda self: {"failed": "unshare: Operation not permitted"}
    )
    with pytest.raises(
        HostsUnavailable, match=r"not allowed here \(unshare: Operation not permitted\).*paced"
    ):
        VirtualHosts(2, how="namespaces")


@pytest.mark.hosts
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to become an ordinary user"
)
def test_an_ordinary_user_may_do_it(tmp_path: Path) -> None:
    script = Path(hosts_module.__file__).with_name("hostserver.py")
    python = next((p for p in ("/usr/bin/python3", sys.executable) if _runs_for_others(p)), None)
    if python is None:
        pytest.skip("no interpreter that another user may run")
    copy = Path("/tmp") / f"course_lib-hostserver-{os.getpid()}.py"
    shutil.copy(script, copy)
    copy.chmod(0o644)
    code = (
        "import json, os, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "arguments = [str(theirs.fileno()), str(os.getpid()), '2', '100000000']\n"
        "p = subprocess.Popen([sys.executable, sys.argv[1], *arguments], pass_fds=[theirs.fileno()])\n"
        "theirs.close(); answer = json.loads(ours.recv(65536))\n"
        "print(answer.get('user'), 'h1:' in open(f'/proc/{p.pid}/net/dev').read(), answer.get('failed'))\n"
        "ours.close(); p.wait()"
    )
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", python, "-c", code, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/tmp", timeout=30)
    copy.unlink()
    if "not permitted" in done.stdout:
        pytest.skip(f"this system gives ordinary users no user namespaces: {done.stdout.strip()}")
    assert done.stdout.split()[:2] == ["True", "True"], done.stdout + done.stderr


@needs_namespaces
@pytest.mark.hosts
def test_ranks_enter_hosts_of_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module._HostServer, "extra_arguments", ("user",))
    try:
        hosts = VirtualHosts(2, link="100Mbit", how="namespaces")
    except HostsUnavailable as error:
        pytest.skip(f"this system allows no user namespaces: {error}")

    def work(comm):
        tensor = torch.ones(250_000)
        comm.barrier()
        began = time.perf_counter()
        ring_all_reduce(comm, tensor)
        return (
            os.readlink("/proc/self/ns/user"),
            os.readlink("/proc/self/ns/net"),
            time.perf_counter() - began,
        )

    with hosts:
        before = hosts.counters()[0].bytes_sent
        (user, net, seconds), (same_user, other_net, _) = launch(work, world_size=2, hosts=hosts, show="none")
        assert user == same_user != os.readlink("/proc/self/ns/user") and net != other_net
        assert seconds > 0.9 * 1e6 / 12.5e6 and hosts.counters()[0].bytes_sent - before >= 1e6


def _runs_for_others(python: str) -> bool:
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", python, "-c", "pass"]
    return subprocess.run(command, capture_output=True, cwd="/tmp").returncode == 0


# --- clean-up


@needs_namespaces
@pytest.mark.hosts
def test_everything_ends_with_close_the_last_reference_or_an_exception() -> None:
    hosts = VirtualHosts(3)
    assert len(host_processes()) == 4
    hosts.close()
    hosts.close()
    assert host_processes() == []
    hosts = VirtualHosts(2)
    del hosts
    assert host_processes() == []
    with pytest.raises(KeyError), VirtualHosts(2):
        raise KeyError


@needs_namespaces
@pytest.mark.hosts
def test_a_killed_process_leaves_nothing() -> None:
    code = (
        "import time; from course_lib import VirtualHosts\n"
        "h = VirtualHosts(2); print('made', flush=True); time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=2)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_pacers_file_of_a_killed_process_is_removed_by_the_next() -> None:
    code = (
        "import os; from course_lib.comm.pacer import Pacer\n"
        "print(Pacer.create(2), flush=True); os.kill(os.getpid(), 9)"
    )
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.exists()
    VirtualHosts(2, how="paced").close()
    assert not left.exists()


@needs_namespaces
@pytest.mark.hosts
def test_two_clusters_at_once() -> None:
    with VirtualHosts(2) as one, VirtualHosts(2, link="10Mbit") as other:
        assert one.addresses == other.addresses  # and yet they are not each other's
        for hosts in (one, other):
            assert launch(lambda comm: comm.rank, world_size=2, hosts=hosts, show="none") == [0, 1]
