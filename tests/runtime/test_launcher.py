"""Every row of the launcher's table: results, output, failures, hangs, limits."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import CannotSend, Pool, RankError, RankResults, RanksHung, launch
from tests.runtime.kernels import ranks_of


def hello(comm, name="you"):
    print("hello", name)
    return comm.rank


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert ranks_of(os.getpid()) == []


# --- results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_in_rank_order(world_size: int) -> None:
    results = launch(hello, "all", world_size=world_size, show="none")
    assert isinstance(results, RankResults) and results == list(range(world_size))
    assert results.output == ["hello all\n"] * world_size
    assert len(results.ledger) == world_size and results.seconds > 0


def test_values_of_many_kinds() -> None:
    def work(comm):
        big = torch.arange(1_000_000.0).reshape(1000, 1000)
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        return {"row": big[3], "view": big.T[:2], "p": parameter, "nested": [(1, {2})], "text": "é"}

    values = launch(work, world_size=2, show="none")[1]
    assert torch.equal(values["row"], torch.arange(3000.0, 4000.0))
    assert values["row"].untyped_storage().nbytes() == 4000  # not the matrix it was cut from
    assert torch.equal(values["view"], torch.arange(1_000_000.0).reshape(1000, 1000).T[:2])
    assert (
        isinstance(values["p"], torch.nn.Parameter)
        and values["nested"] == [(1, {2})]
        and values["text"] == "é"
    )


def test_plain_torch_distributed_works_too() -> None:
    def work(comm):
        tensor = torch.tensor([comm.rank + 1.0])
        dist.all_reduce(tensor)
        return (
            dist.get_rank(),
            dist.get_world_size(),
            float(tensor),
            os.environ["RANK"],
            os.environ["WORLD_SIZE"],
        )

    assert launch(work, world_size=3, show="none")[2] == (2, 3, 6.0, "2", "3")


def test_the_ledger_and_the_trace_come_back_on_one_clock() -> None:
    def work(comm):
        tensor = torch.zeros(10)
        if comm.rank == 0:
            time.sleep(0.2)
            comm.send(tensor, 1)
        else:
            comm.recv(tensor, 0)

    results = launch(work, world_size=2, show="none")
    (sent,), (received,) = results.ledger
    assert (sent.op, sent.peer, sent.bytes_sent, received.bytes_received) == ("send", 1, 40, 40)
    assert received.start_s < 0.2 <= sent.start_s <= received.end_s <= results.seconds
    assert {event.rank for event in results.trace} == {0, 1}


def test_environment_threads_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(
        hello, world_size=1, show="none"
    )  # the fork server runs already; what follows must reach the ranks still
    monkeypatch.setenv("COURSE_TEST", "later")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def work(comm):
        import beside

        return (
            os.environ["COURSE_TEST"],
            os.environ["MINE"],
            os.getcwd(),
            torch.get_num_threads(),
            beside.VALUE,
        )

    got = launch(work, world_size=1, threads=2, env={"MINE": "1"}, show="none")[0]
    assert got == ("later", "1", str(tmp_path), 2, 42)


def test_random_streams_of_siblings_differ() -> None:
    def work(comm):
        import random

        import numpy

        return random.random(), numpy.random.rand(), torch.rand(()).item()

    drawn = [numbers for _ in range(2) for numbers in launch(work, world_size=4, show="none")]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 8  # nor do two launches share one


def test_spawn_does_the_same() -> None:
    assert launch(hello, world_size=2, start="spawn", show="none") == [0, 1]


def test_launch_from_a_second_thread_and_two_at_once() -> None:
    results: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: launch(hello, world_size=n, show="none")}))
        for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {2: [0, 1], 3: [0, 1, 2]}


def test_port_29500_taken() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        assert launch(hello, world_size=2, show="none") == [0, 1]


def test_fifty_launches_leak_nothing() -> None:
    launch(hello, world_size=2, show="none")
    me = psutil.Process()
    servers = me.children()
    before = me.num_fds(), [server.num_fds() for server in servers], len(me.net_connections())
    for _ in range(50):
        launch(hello, world_size=2, show="none")
    assert (me.num_fds(), [server.num_fds() for server in servers], len(me.net_connections())) == before
    assert me.children() == servers and not any(server.children() for server in servers)


# --- output


def test_grouped_output_is_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    def work(comm):
        time.sleep(0.1 * (2 - comm.rank))
        print("one")
        print("to stderr", file=sys.stderr)
        print("two")

    launch(work, world_size=2, show="grouped", backend="gloo")
    out, err = capsys.readouterr()
    assert out == "[rank 0] one\n[rank 0] two\n[rank 1] one\n[rank 1] two\n"
    assert err == "[rank 0] to stderr\n[rank 1] to stderr\n"


def test_live_output_has_the_rank_and_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def work(comm):
        os.write(1, b"half a li")
        time.sleep(0.1)
        os.write(1, b"ne\nno end")

    launch(work, world_size=2, backend="gloo")
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank {rank}] {line}" for rank in (0, 1) for line in ("half a line", "no end")
    ]


def test_a_burst_on_both_streams_loses_nothing() -> None:
    def burst(comm):
        for number in range(100):
            block = b"".join(b"%07d %s\n" % (number, b"x" * 91) for _ in range(1000))
            for fd in (1, 2):
                view = memoryview(block)
                while view:
                    view = view[os.write(fd, view) :]

    results = launch(burst, world_size=4, show="none")
    assert [len(text) for text in results.output] == [20_000_000] * 4


def test_output_of_c_code_without_a_flush() -> None:
    def work(comm):
        ctypes.CDLL(None).puts(b"buffered in C")

    assert launch(work, world_size=1, show="none").output == ["buffered in C\n"]


# --- failures


def test_the_cause_is_named_first_and_the_others_are_victims() -> None:  # case 3
    def work(comm):
        if comm.rank == 0:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(RankError) as caught:
        launch(work, world_size=3, show="none")
    error, text = caught.value, str(caught.value)
    assert (error.rank, error.exc_type, error.exc_message) == (0, "KeyError", "'the cause'")
    assert text.startswith("rank 0 of 3 raised KeyError")
    assert text.index('raise KeyError("the cause")') < text.index("ranks 1 and 2: waiting in barrier")
    assert "only a victim" in text and "KeyError" in error.traceback


def test_a_consequence_that_arrives_first_is_not_the_cause() -> None:
    def work(comm):
        if comm.rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(0.4)
        raise ValueError("the cause")

    with pytest.raises(RankError, match=r"^rank 1 of 2 raised ValueError: the cause"):
        launch(work, world_size=2, show="none")


def test_causes_groups_and_long_texts() -> None:
    def chained(comm):
        try:
            {}["cfg"]
        except KeyError as error:
            raise ValueError("bad config") from error

    with pytest.raises(RankError, match=r"ValueError: bad config\ncaused by KeyError: 'cfg'"):
        launch(chained, world_size=1, show="none")

    def group(comm):
        raise ExceptionGroup("many", [ValueError("a"), TypeError("b")])

    with pytest.raises(RankError, match=r"one of them: ValueError: a\none of them: TypeError: b"):
        launch(group, world_size=1, show="none")

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def mute(comm):
        raise Mute

    with pytest.raises(RankError, match=r"Mute: \(its text cannot be made: __str__ raised RuntimeError\)"):
        launch(mute, world_size=1, show="none")

    def endless(comm):
        if comm.rank < 0:
            raise ValueError
        return endless(comm)

    with pytest.raises(RankError) as caught:
        launch(endless, world_size=1, show="none")
    assert "times in a row" in str(caught.value) and len(str(caught.value)) < 3000

    def long(comm):
        raise ValueError("x" * 1_000_000)

    with pytest.raises(RankError) as caught:
        launch(long, world_size=1, show="none")
    assert len(str(caught.value)) < 10_000 and "characters left out" in str(caught.value)
    assert len(caught.value.exc_message) == 1_000_000


def test_an_exception_that_says_nothing() -> None:
    def work(comm):
        if comm.rank == 1:
            raise ValueError
        comm.barrier()

    with pytest.raises(RankError) as caught:
        launch(work, world_size=2, show="none")
    assert (caught.value.exc_type, caught.value.exc_message) == ("ValueError", "")
    assert str(caught.value).startswith("rank 1 of 2 raised ValueError\n")
    assert "exit code" not in str(caught.value)


def test_a_function_that_closes_its_output() -> None:
    assert launch(lambda comm: sys.stdout.close(), world_size=1, show="none") == [None]


def test_the_same_exception_on_all_ranks_is_told_once() -> None:
    with pytest.raises(RankError) as caught:
        launch(lambda comm: 1 / 0, world_size=3, show="none")
    assert caught.value.rank == 0 and "ranks 1 and 2: raised the same" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "exitcode", "words"),
    [
        (lambda: os._exit(3), 3, "ended with exit code 3 before its function returned"),
        (lambda: os._exit(0), 0, "ended with exit code 0 before its function returned"),
        (lambda: ctypes.string_at(0), -signal.SIGSEGV, "was ended by signal 11 (SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "was ended by signal 9 (SIGKILL"),
        (lambda: os.abort(), -signal.SIGABRT, "was ended by signal 6 (SIGABRT"),
    ],
)
def test_a_rank_that_dies(end, exitcode: int, words: str) -> None:
    def work(comm):
        comm.barrier()
        if comm.rank == 1:
            print("last words")
            end()
        comm.all_reduce(torch.ones(2))

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(work, world_size=3, show="none")
    assert time.monotonic() - began < 10  # not the timeout of 60
    assert caught.value.rank == 1 and caught.value.exitcode == exitcode
    assert f"rank 1 of 3 {words}" in str(caught.value) and "  last words" in str(caught.value)
    if exitcode == -signal.SIGSEGV:
        assert "Where it was" in str(caught.value) and "test_launcher.py" in str(caught.value)


def test_system_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 raised SystemExit: 4"):
        launch(lambda comm: sys.exit(4), world_size=1, show="none")


def test_grandchildren_end_with_the_launch() -> None:
    def work(comm):
        return subprocess.Popen(["sleep", "600"]).pid

    (pid,) = launch(work, world_size=1, show="none")
    gone = lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    end = time.monotonic() + 2.0  # the signal has been sent; on a busy machine it takes effect a moment later
    while not gone() and time.monotonic() < end:
        time.sleep(0.01)
    assert gone()


# --- hangs


def hangs(fn, **options) -> RanksHung:
    began = time.monotonic()
    options = {"world_size": 4, "timeout": 1.0, "show": "none"} | options
    with pytest.raises(RanksHung) as caught:
        launch(fn, **options)
    assert time.monotonic() - began >= min(options["timeout"], options.get("deadline", 60))
    assert f"of {options.get('deadline', options['timeout'])} s" in str(caught.value)
    assert len(caught.value.ranks) == options["world_size"]
    return caught.value


@pytest.mark.parametrize("plain", [False, True])
def test_different_collectives(plain: bool) -> None:
    def work(comm):
        talk = dist if plain else comm
        talk.barrier()
        if comm.rank == 0:
            talk.all_reduce(torch.ones(4))
        else:
            talk.barrier()

    error = hangs(work)
    assert error.sentence.startswith(
        "What does not match: as collective 2, rank 0 called all_reduce of 4 x float32"
    )
    assert error.sentence.endswith("but ranks 1, 2 and 3 called barrier.")
    assert "talk.all_reduce(torch.ones(4))" in str(error) and "talk.barrier()" in str(error)  # the stacks


def test_a_rank_that_returned_early() -> None:
    def work(comm):
        if comm.rank != 1:
            comm.all_reduce(torch.ones(4))

    assert "but rank 1 is finished: its function returned" in hangs(work).sentence


@pytest.mark.parametrize("plain", [False, True])
def test_different_shapes(plain: bool) -> None:
    def work(comm):
        (dist if plain else comm).all_reduce(torch.ones(4 + (comm.rank == 3)))

    sentence = hangs(work).sentence
    assert "ranks 0, 1 and 2 called all_reduce of 4 x float32" in sentence
    assert "but rank 3 called all_reduce of 5 x float32" in sentence


def test_everybody_receives() -> None:
    def work(comm):
        comm.recv(torch.ones(1), 1 - comm.rank)

    sentence = hangs(work, world_size=2).sentence
    assert sentence == (
        "What does not match: rank 0 waits in recv with rank 1, and rank 1 waits in recv with rank 0."
    )


def test_who_computes_is_the_cause_and_who_waits_is_not() -> None:
    def work(comm):
        if comm.rank == 0:
            time.sleep(60)
        comm.barrier()

    error = hangs(work, world_size=3)
    assert "but rank 0 is computing" in error.sentence and "time.sleep(60)" in str(error)


def test_a_hang_that_torch_started_itself() -> None:
    def work(comm):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if comm.rank == 0:
            loss.backward()
        else:
            time.sleep(60)

    sentence = hangs(work, world_size=2).sentence
    assert "rank 0 is waiting in a communication that torch started" in sentence
    assert "but rank 1 is computing" in sentence


def test_computing_is_no_hang() -> None:  # case 2
    def work(comm):
        time.sleep(2.0)
        comm.barrier()
        return "done"

    assert launch(work, world_size=2, timeout=0.5, show="none") == ["done"] * 2


def test_the_deadline_bounds_the_whole_run() -> None:
    def work(comm):
        while True:
            time.sleep(0.01)

    assert "computing" in hangs(work, world_size=2, deadline=1.0).ranks[0]


def test_a_mismatch_that_is_none() -> None:
    """Different groups, different numbers of collectives and a second run of a pool are all in order."""

    def work(comm, extra):
        half = comm.subgroup([0, 1] if comm.rank < 2 else [2, 3])
        half.all_reduce(torch.ones(1 if comm.rank < 2 else 2))
        if extra and comm.rank < 2:
            half.barrier()
        comm.all_reduce(torch.ones(3))
        return True

    with Pool(4, show="none", timeout=5) as pool:
        for extra in (True, False, True):
            assert pool.run(work, extra) == [True] * 4


# --- messages whose ends do not agree


def _send_recv(comm, sent, received):
    if comm.rank == 0:
        comm.send(sent, 1)
    else:
        comm.recv(received, 0)


def _plain(comm, sent, received):
    if comm.rank == 0:
        dist.send(sent, 1)
    else:
        dist.irecv(received, 0).wait()


def _exchange(comm, sent, received):
    comm.exchange(sent, 1 - comm.rank, received, 1 - comm.rank)


@pytest.mark.parametrize("talk", [_send_recv, _plain, _exchange])
@pytest.mark.parametrize("received", [torch.zeros(5), torch.zeros(3), torch.zeros(4, dtype=torch.int32)])
def test_the_ends_of_a_message_must_agree(talk, received: torch.Tensor) -> None:
    what = f"{received.numel()} x {str(received.dtype).removeprefix('torch.')}"
    words = rf"(send of 4 x float32: rank \d receives {what}|recv of {what}: rank \d sends 4 x float32) \(message 1"
    with pytest.raises(RankError, match=words):
        launch(talk, torch.ones(4), received, world_size=2, show="none")


@pytest.mark.parametrize("peer", [5, -1, 1.0, True])
def test_the_other_end_must_be_a_rank_of_the_group(peer) -> None:
    def work(comm):
        said = []
        for talk in (dist.send, dist.isend, dist.recv, dist.irecv) if comm.rank == 0 else ():
            with pytest.raises(ValueError) as caught:
                talk(torch.ones(3), peer)
            said.append(str(caught.value))
        return said

    said = launch(work, world_size=2, timeout=5, show="none")[0]
    assert (
        said[0] == said[1] == f"rank 0: send(dst): expected a rank of the group, one of [0, 1], got {peer!r}"
    )
    assert said[2] == said[3] == said[0].replace("send(dst)", "recv(src)")


def test_a_place_in_the_group_that_is_none() -> None:
    def work(comm):
        with pytest.raises(ValueError, match=r"group_dst: expected 0…1, a rank of the group, got 5"):
            dist.send(torch.ones(3), group_dst=5)

    launch(work, world_size=2, timeout=5, show="none")


def test_messages_of_different_groups_runs_and_peers_are_not_mixed_up() -> None:
    def work(comm, length):
        pair = comm.subgroup([0, 1]) if comm.rank < 2 else None
        if comm.rank == 0:
            comm.send(torch.ones(length), 2)
            pair.send(torch.ones(length + 1), 1)
            comm.send(torch.ones(length + 2), 1)
            dist.send(torch.ones(length + 3), 1)
        elif comm.rank == 1:
            for one, size in ((pair, length + 1), (comm, length + 2)):
                one.recv(torch.empty(size), 0)
            dist.recv(torch.empty(length + 3), 0)
        else:
            comm.recv(torch.empty(length), 0)
        for _ in range(100):  # more than the log remembers
            comm.exchange(torch.ones(2), (comm.rank + 1) % 3, torch.empty(2), (comm.rank - 1) % 3)
        return True

    with Pool(3, show="none") as pool:
        assert [pool.run(work, length) for length in (1, 7)] == [[True] * 3] * 2


def test_receiving_from_anybody_ends_the_comparison() -> None:
    def work(comm):
        if comm.rank == 0:
            dist.recv(torch.empty(3))
            dist.recv(torch.empty(2), 1)
        else:
            comm.send(torch.ones(3), 0)
            comm.send(torch.ones(2), 0)
        return True

    assert launch(work, world_size=2, show="none") == [True, True]


# --- what cannot be sent, wrong arguments

BIG = torch.zeros(20_000_000)
LOCK = threading.Lock()


def uses_big(comm):
    return BIG.sum()


def uses_lock(comm):
    with LOCK:
        return helper()


def helper():
    return LOCK


def test_a_captured_global_of_80_mb_is_named() -> None:
    with pytest.raises(
        CannotSend, match=r"global variable 'BIG' \(Tensor\) used by uses_big\(\).*80 MB.*argument"
    ):
        launch(uses_big, world_size=2)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CannotSend, match=r"global variable 'LOCK' \(lock\) used by .*cannot pickle"):
        launch(uses_lock, world_size=2)
    lock = threading.Lock()
    with pytest.raises(CannotSend, match=r"closure variable 'lock' \(lock\) used by <lambda>"):
        launch(lambda comm: lock.locked(), world_size=2)
    with pytest.raises(CannotSend, match=r"argument 2 of the function \(lock\)"):
        launch(lambda comm, a, b: None, 1, threading.Lock(), world_size=2)


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 of 2 raised CannotSend: what the function returned \(lock\)"
    ):
        launch(lambda comm: threading.Lock(), world_size=2, show="none")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"world_size": 0}, ValueError, "world_size: expected at least 1"),
        ({"world_size": "4"}, TypeError, "world_size: expected a whole number"),
        ({"world_size": True}, TypeError, "world_size: expected a whole number"),
        (
            {"backend": "mpi"},
            ValueError,
            "backend: expected one of 'auto', 'gloo', 'nccl', 'ring', got 'mpi'",
        ),
        ({"timeout": -1}, ValueError, "timeout: expected a positive"),
        ({"timeout": None}, TypeError, "timeout: expected seconds"),
        ({"deadline": 0}, ValueError, "deadline: expected a positive"),
        ({"show": "all"}, ValueError, "show: expected one of 'live', 'grouped', 'none', got 'all'"),
        ({"threads": 0}, ValueError, "threads: expected at least 1"),
        ({"env": {"A=B": "1"}}, ValueError, "env: no system takes a variable 'A=B'"),
        ({"timeout": 1e300}, ValueError, "timeout: expected a positive"),
        ({"env": {"A": 1}}, TypeError, "env: expected a dict of strings to strings"),
        ({"start": "fork"}, ValueError, "start: expected one of 'auto', 'forkserver', 'spawn', got 'fork'"),
    ],
)
def test_wrong_options(options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        launch(hello, **({"world_size": 2} | options))


def test_wrong_calls() -> None:
    with pytest.raises(
        TypeError, match=r"hello\(comm, name='you'\) cannot be called as hello\(comm, \*args\) with 2 arg"
    ):
        launch(hello, 1, 2, world_size=2)
    with pytest.raises(TypeError, match="expected a function"):
        launch("hello", world_size=2)

    async def later(comm):
        pass

    with pytest.raises(TypeError, match="later is async or a generator"):
        launch(later, world_size=2)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs enough here")
def test_nccl_without_gpus() -> None:
    with pytest.raises(
        RankError, match=r'backend="nccl" needs a GPU for each of the 2 ranks.*Use backend="gloo"'
    ):
        launch(hello, world_size=2, backend="nccl")


# --- pools


def test_a_pool_keeps_its_ranks_and_starts_each_ledger_anew() -> None:
    def work(comm):
        comm.all_reduce(torch.ones(5))
        return os.getpid(), len(comm.ledger)

    with Pool(2, show="none") as pool:
        first, second = pool.run(work), pool.run(work)
        assert first == second and first[0][1] == 1 and "2 ranks, open" in repr(pool)
        assert all(psutil.pid_exists(pid) for pid, _ in first)
    assert not any(psutil.pid_exists(pid) for pid, _ in first)
    with pytest.raises(RuntimeError, match=r"this pool has ended \(closed\); make a new one: Pool\(2\)"):
        pool.run(work)


def test_an_idle_rank_that_is_killed_is_reported_by_the_next_run() -> None:
    with Pool(2, show="none") as pool:
        (pid, _) = pool.run(lambda comm: os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 0 of 2 was ended by signal 9"):
            pool.run(lambda comm: comm.barrier())


def test_a_pool_runs_one_function_at_a_time() -> None:
    with Pool(2, show="none") as pool:
        first = threading.Thread(target=pool.run, args=(lambda comm: time.sleep(1),))
        first.start()
        time.sleep(0.3)
        with pytest.raises(RuntimeError, match="this pool is running a function in another thread"):
            pool.run(lambda comm: None)
        first.join()
        assert pool.run(lambda comm: comm.rank) == [0, 1]


def test_the_fork_server_is_replaced_when_it_dies() -> None:
    launch(hello, world_size=1, show="none")
    for child in psutil.Process().children():
        child.kill()
        child.wait(5)
    assert launch(hello, world_size=2, show="none") == [0, 1]


def test_a_forgotten_pool_ends_with_its_last_reference() -> None:
    pool = Pool(2, show="none")
    pids = pool.run(lambda comm: os.getpid())
    del pool
    assert not any(psutil.pid_exists(pid) for pid in pids)
