"""The Slurm file: run by bash with stand-ins for Slurm's commands, which write down how they were called."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from course_lib import train_ddp
from course_lib.classroom.notebooks.clean import ROOT
from course_lib.runtime.torchrun_help import installed_options

SBATCH = ROOT / "data" / "slurm" / "train_ddp.sbatch"
COMMANDS = {
    "srun": 'printf "%s\\n" "$@" > "$TOLD/srun"; eval "${SRUN_DOES:-:}"',
    "scontrol": 'echo "$@" >> "$TOLD/scontrol"; [ "$1" = show ] && printf "node7\\nnode9\\n"; exit 0',
    "scancel": 'echo "$@" >> "$TOLD/scancel"; touch "$TOLD/stop"',
}
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in COMMANDS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7,9]"}
    paths = {"TOLD": str(tmp_path), "VENV": str(tmp_path / "none"), "RUN_DIR": str(tmp_path / "run dir")}
    return {**job, **paths, "PATH": f"{programs}:{os.environ['PATH']}"}


def told(slurm: dict[str, str], name: str) -> str:
    path = Path(slurm["TOLD"], name)
    return path.read_text() if path.exists() else ""


def run(slurm: dict[str, str], *arguments: str, **more: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SBATCH), *arguments]
    return subprocess.run(command, env={**slurm, **more}, capture_output=True, text=True, timeout=30)


def torchrun_arguments(slurm: dict[str, str]) -> list[str]:
    words = told(slurm, "srun").splitlines()
    return words[words.index("torchrun") + 1 :]


def test_the_shell_parses():
    assert subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True).stderr == ""


def test_every_option_is_one_of_the_installed_torchruns(slurm):
    done = run(slurm)
    assert done.returncode == 0, done.stderr
    known = {flag for option in installed_options() for flag in option.flags}
    words = torchrun_arguments(slurm)
    own = words[: words.index("course_lib.train_ddp")]
    assert {word.partition("=")[0] for word in own} <= known and len(own) >= 9


def test_torchrun_and_the_training_understand_it(slurm):
    run(slurm, "--total_epochs", "7")
    options = get_args_parser().parse_args(torchrun_arguments(slurm))
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "gpu", 3)
    assert (options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id) == ("c10d", "node7:23456", "123456")
    assert options.module and options.training_script == "course_lib.train_ddp"
    training = train_ddp.parser().parse_args(options.training_script_args)
    assert training.snapshot_path == Path(slurm["RUN_DIR"], "snapshot.pt") and training.resume == "auto"
    assert training.total_epochs == 7  # the caller's, which comes last
    assert training.grace_s < 30  # torchrun kills its workers so long after SIGTERM


def test_nothing_is_said_to_slurm_after_a_success_or_a_failure(slurm):
    assert run(slurm).returncode == 0
    assert run(slurm, SRUN_DOES="exit 3").returncode == 3
    assert "requeue" not in told(slurm, "scontrol") and told(slurm, "scancel") == ""


@pytest.mark.parametrize("code, requeued", [(1, True), (0, False)])
def test_when_the_time_is_up_the_workers_are_told_and_the_job_is_requeued(slurm, code, requeued):
    """Not requeued: it came to its end all the same."""
    does = f'touch "$TOLD/runs"; until [ -e "$TOLD/stop" ]; do sleep 0.05; done; sleep 0.3; exit {code}'
    job = subprocess.Popen(["bash", str(SBATCH)], env={**slurm, "SRUN_DOES": does}, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not Path(slurm["TOLD"], "runs").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=20)[0].decode()
    assert told(slurm, "scancel") == "--signal=TERM 123456\n"
    assert ("requeue 123456" in told(slurm, "scontrol")) == requeued == ("to be continued" in output)
    assert job.returncode == 0


def test_slurm_is_asked_for_what_the_text_says():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", SBATCH.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == "1" and asked["signal"] == "B:USR1@180" and "requeue" in asked
    assert int(asked["nodes"]) > 1
