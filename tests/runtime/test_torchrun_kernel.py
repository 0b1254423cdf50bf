"""torchrun from a real Jupyter kernel: the magic, an interrupt, and the kernel's sudden death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.runtime.kernels import Kernel
from tests.runtime.torchrun_scripts import TAG, left_behind, new_tag, write_all


def _tag(kernel: Kernel) -> str:
    tag = new_tag()
    kernel.run(f"os.environ[{TAG!r}] = {tag!r}; os.environ['KERNEL'] = str(os.getpid())")
    return tag


def test_the_magic(kernel: Kernel) -> None:
    kernel.run("%load_ext course_lib.runtime.magic")
    shown = kernel.run(
        "%%torchrun -n 2 --save kept.py --into result -- --epochs 3\nimport os, sys\n"
        "print('rank', os.environ['RANK'], sys.argv)\nprint('problem', file=sys.stderr)"
    )
    assert shown.error == "" and "[rank 1] rank 1 ['kept.py', '--epochs', '3']\n" in shown.stdout, shown
    assert "[rank 0] problem\n" in shown.stderr
    assert kernel.run("result.command").values == [
        "'torchrun --standalone --nproc-per-node=2 kept.py --epochs 3'"
    ]
    assert "import os, sys" in kernel.run("print(open('kept.py').read())").stdout
    shown = kernel.run("%%torchrun -n 1\nx = 1\n\n1 / 0")
    assert (
        shown.error == "RankError"
        and "rank 0 of 1 raised ZeroDivisionError: division by zero" in shown.message
    )
    assert 'File "cell.py", line 3, in <module>' in shown.message and "1 / 0" in shown.message
    assert len(shown.traceback.splitlines()) < 25 and "engine.py" not in shown.traceback
    assert "unrecognized arguments: --restarts" in kernel.run("%%torchrun --restarts 3\npass").message
    assert "there is no 'hosts'" in kernel.run("%%torchrun --hosts hosts\npass").message


def test_interrupt(kernel: Kernel, tmp_path: Path) -> None:
    write_all(tmp_path)
    tag = _tag(kernel)
    request = kernel.start(
        f"from course_lib import torchrun\ntorchrun({str(tmp_path / 'sleeps.py')!r}, 'child')"
    )
    interrupted = []

    def when_up(text: str) -> None:
        if "up 0" in text and not interrupted:
            interrupted.append(True)
            kernel.interrupt()

    shown = kernel.finish(request, on_output=when_up)
    assert shown.error == "KeyboardInterrupt", shown
    assert _others(tag, kernel) == []
    assert kernel.run("1 + 1").values == ["2"]


def test_killed_kernel_leaves_nothing(own_kernel: Kernel, tmp_path: Path) -> None:
    write_all(tmp_path)
    tag = _tag(own_kernel)
    own_kernel.start(f"from course_lib import torchrun\ntorchrun({str(tmp_path / 'sleeps.py')!r}, 'child')")
    end = time.monotonic() + 60
    while sum("sleep 600" in line for line in left_behind(tag, 0.0)) < 2:
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.1)
    os.kill(own_kernel.pid, signal.SIGKILL)
    assert left_behind(tag, 2.0) == []


def _others(tag: str, kernel: Kernel) -> list[str]:
    return [line for line in left_behind(tag) if not line.startswith(f"{kernel.pid} ")]
