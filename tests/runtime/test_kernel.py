"""Launching from a real Jupyter kernel: the scenarios in which a notebook differs from a script."""

from __future__ import annotations

import os
import signal
import time

import psutil

from tests.runtime.kernels import Kernel, family, ranks_of

WAIT = """
def wait(comm):
    print("waiting", flush=True)
    comm.barrier()
    time.sleep(600)
"""


def test_function_class_and_closure_of_cells(kernel: Kernel) -> None:
    kernel.run("import math")
    kernel.run(
        "class Point:\n    def __init__(self, x): self.x = x\n    def twice(self): return 2 * self.x * scale"
    )
    kernel.run(
        "scale = 1\ndef make(offset):\n"
        "    def body(comm, p): return Point(math.floor(p.x) + offset + comm.rank)\n    return body"
    )
    shown = kernel.run("launch(make(10), Point(1.5), world_size=2, show='none')[1].x")
    assert (shown.error, shown.values) == ("", ["12"]), shown
    check = "[isinstance(p, Point) for p in launch(make(0), Point(1.5), world_size=2, show='none')]"
    assert kernel.run(check).values == ["[True, True]"]
    # The kernel's class is as it was: its methods still see the kernel's globals.
    kernel.run("scale = 7")
    assert kernel.run("Point(1).twice()").values == ["14"]
    kernel.run("def make(offset):\n    def body(comm, p): return 'new body'\n    return body")
    assert kernel.run("list(launch(make(0), Point(1), world_size=2, show='none'))").values == [
        "['new body', 'new body']"
    ]


def test_after_a_large_cpu_operation(kernel: Kernel) -> None:
    kernel.run("torch.set_num_threads(2); a = torch.randn(1500, 1500); (a @ a).sum(); del a")
    shown = kernel.run(
        "def f(comm):\n    b = torch.ones(1500, 1500); t = (b @ b)[0, :4].clone()\n"
        "    comm.all_reduce(t); return t.tolist()\n"
        "launch(f, world_size=2, threads=2)[0]"
    )
    assert (shown.error, shown.stderr) == ("", ""), shown
    assert shown.values == ["[3000.0, 3000.0, 3000.0, 3000.0]"]


def test_an_exception_points_at_the_cell(kernel: Kernel) -> None:
    kernel.run(
        "def bad(comm):\n    if comm.rank == 2:\n        raise ValueError('on purpose')\n"
        "    comm.all_reduce(torch.ones(3))"
    )
    kernel.run("launch(lambda comm: None, world_size=2, show='none')")
    shown = kernel.run("launch(bad, world_size=4)")
    assert shown.error == "RankError" and shown.seconds < 2 + 1  # reported within 2 s; a second for starting
    assert shown.message.startswith("rank 2 of 4 raised ValueError: on purpose")
    assert "line 3, in bad" in shown.message and "raise ValueError('on purpose')" in shown.message
    assert (
        "ranks 0, 1 and 3: waiting in all_reduce of 3 x float32 sum (collective 1); only a victim"
        in shown.message
    )
    assert "launch(bad, world_size=4)" in shown.traceback and "Cell In[" in shown.traceback
    assert len(shown.traceback.splitlines()) < 20 and "team.py" not in shown.traceback


def test_source_of_the_cell_inside_a_rank(kernel: Kernel) -> None:
    shown = kernel.run(
        "def f(comm):\n    import inspect, traceback\n    try:\n        1 / 0  # here\n"
        "    except ZeroDivisionError:\n        return inspect.getsource(f), traceback.format_exc()\n"
        "source, text = launch(f, world_size=1)[0]\n'1 / 0  # here' in source, '1 / 0  # here' in text"
    )
    assert shown.values == ["(True, True)"], shown


def test_all_kinds_of_output_arrive_live(kernel: Kernel) -> None:
    arrived: dict[str, float] = {}

    def note(text: str) -> None:
        for word in ("python-out", "python-err", "from-c", "grandchild", "late"):
            if word in text:
                arrived.setdefault(word, time.monotonic())

    shown = kernel.run(
        "def f(comm):\n    import ctypes, subprocess, sys\n    print('python-out')\n"
        "    print('python-err', file=sys.stderr)\n"
        "    os.write(1, b'from-fd\\n'); ctypes.CDLL(None).puts(b'from-c')\n    ctypes.CDLL(None).fflush(None)\n"
        "    subprocess.run(['echo', 'grandchild'])\n    time.sleep(1.5)\n    print('late')\n"
        "r = launch(f, world_size=1)\nr.output[0]",
        on_output=note,
    )
    assert {"python-out", "python-err", "from-c", "grandchild", "late"} == set(arrived), shown
    assert (
        arrived["late"] - max(arrived[w] for w in arrived if w != "late") > 1
    )  # the others did not wait for the end
    assert "[rank 0] from-fd\n" in shown.stdout and "[rank 0] python-err\n" in shown.stderr
    assert "grandchild" in shown.values[0] and "late" in shown.values[0]


def test_interrupt(kernel: Kernel) -> None:
    kernel.run(WAIT)
    request = kernel.start("launch(wait, world_size=3)")
    _wait_for(lambda: len(ranks_of(kernel.pid)) == 3)
    time.sleep(0.5)
    kernel.interrupt()
    time.sleep(0.05)
    kernel.interrupt()  # a second one is harmless
    shown = kernel.finish(request)
    # If the second one comes while IPython still writes the first one's traceback, it prints the name alone.
    assert "KeyboardInterrupt" in shown.error + shown.stderr and shown.seconds < 0.5 + 3 + 1
    assert ranks_of(kernel.pid) == []
    assert kernel.run("launch(lambda comm: comm.rank, world_size=3)").values == ["[0, 1, 2]"]


def test_interrupt_while_ranks_compute_in_c(kernel: Kernel) -> None:
    kernel.run(
        "def busy(comm):\n    a = torch.ones(3000, 3000, dtype=torch.float64)\n    while True: a = (a @ a).clamp(0, 1)"
    )
    request = kernel.start("launch(busy, world_size=2)")
    _wait_for(lambda: len(ranks_of(kernel.pid)) == 2)
    time.sleep(0.5)
    kernel.interrupt()
    assert kernel.finish(request).error == "KeyboardInterrupt"
    assert ranks_of(kernel.pid) == []


def test_killed_kernel_leaves_nothing(own_kernel: Kernel) -> None:
    own_kernel.run(WAIT)
    own_kernel.run("pool = Pool(2)\npool.run(lambda comm: None)")
    own_kernel.start(
        "def f(comm):\n    import subprocess; subprocess.Popen(['sleep', '600']); wait(comm)\nlaunch(f, world_size=2)"
    )
    _wait_for(lambda: sum(p.name() == "sleep" for p in family(own_kernel.pid)) == 2)
    processes = family(own_kernel.pid)
    assert len(processes) >= 7  # the server, 2 + 2 ranks, 2 grandchildren
    os.kill(own_kernel.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=2.0)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_two_kernels_side_by_side(kernel: Kernel, own_kernel: Kernel) -> None:
    code = (
        "def f(comm):\n    t = torch.ones(1)\n"
        "    for _ in range(20): comm.all_reduce(t.fill_(1)); time.sleep(0.02)\n"
        "    return float(t)\nlist(launch(f, world_size=3))"
    )
    requests = [(k, k.start(code)) for k in (kernel, own_kernel)]
    for k, request in requests:
        assert k.finish(request).values == ["[3.0, 3.0, 3.0]"]


def test_progress_is_text(kernel: Kernel) -> None:
    shown = kernel.run(
        "def f(comm):\n    for _ in comm.progress(range(5), desc='steps'): comm.barrier()\n"
        "launch(f, world_size=2)\nNone"
    )
    assert shown.error == "" and "steps: 100%" in shown.stdout and "5/5" in shown.stdout, shown
    assert shown.stdout.count("100%") == 1  # rank 0's only


def test_a_pool_over_several_cells(kernel: Kernel) -> None:
    kernel.run("pool = Pool(3)\ndef f(comm, x):\n    print('cell', x); return x + comm.rank")
    assert kernel.run("list(pool.run(f, 1))").values == ["[1, 2, 3]"]
    shown = kernel.run("list(pool.run(f, 5))")
    assert (
        shown.values == ["[5, 6, 7]"] and shown.stdout.count("cell 5") == 3 and "cell 1" not in shown.stdout
    )
    assert "1 / 0" in kernel.run("pool.run(lambda comm: 1 / 0)").message
    assert "this pool has ended (a run ended with RankError)" in kernel.run("pool.run(f, 1)").message
    assert ranks_of(kernel.pid) == []


def _wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what this test waits for did not happen"
        time.sleep(0.02)
