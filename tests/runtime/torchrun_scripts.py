"""Scripts for the tests of torchrun, and a look at what it may have left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

ABOUT = """
import json, os, sys
print(json.dumps(dict(os.environ)))
print("to stderr", file=sys.stderr)
sys.stdout.buffer.write(b"10 %\\r20 %\\rdone \\xff\\n"); sys.stdout.flush()
os.system("echo grandchild")
print("args", sys.argv[1:], end="")
"""

RAISES = """
import os, sys, time
from helper import double
def train(x):
    raise ValueError(f"bad value\\n{double(x)} in line two")
if os.environ["RANK"] == "1":
    try:
        {}["first"]
    except KeyError:
        train(3)
time.sleep(600)
"""

RECORDED = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        {}["missing"]
    time.sleep(600)
main()
"""

SUMS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("LOCAL_RANK RANK GROUP_RANK ROLE_RANK LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
         "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID PYTHON_EXEC").split()
print(total.item(), *[os.environ.get(name, "-") for name in names])
dist.barrier()
dist.destroy_process_group()
"""

ELASTIC = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("world", dist.get_world_size(), flush=True)
while True:
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(stop)
    if stop.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""

SLEEPS = """
import os, signal, subprocess, sys, time
if sys.argv[1:] == ["snapshot"]:
    signal.signal(signal.SIGTERM, lambda *_: (print("snapshot written", flush=True), sys.exit(0)))
if sys.argv[1:] == ["child"]:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not (sys.argv[1:] == ["twice"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "2"):
    time.sleep(0.1)
"""

HANGS = """
import os, time, torch.distributed as dist
print("up", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(600)
dist.init_process_group("gloo")
"""


def write_all(directory: Path) -> Path:
    """about.py, raises.py, ... in `directory`."""
    for name in ("ABOUT", "RAISES", "RECORDED", "SUMS", "ELASTIC", "SLEEPS", "HANGS"):
        (directory / f"{name.lower()}.py").write_text(globals()[name])
    (directory / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    return directory


TAG = "COURSE_TORCHRUN_TEST"


def left_behind(tag: str, seconds: float = 2.0) -> list[str]:
    """Processes that still live after `seconds` and were started with TAG=`tag`: agents, workers, what they started."""
    end = time.monotonic() + seconds
    while found := _tagged(tag):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return found


def _tagged(tag: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == tag:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            pass
    return found


def new_tag() -> str:
    return f"{os.getpid()}-{time.monotonic_ns()}"
