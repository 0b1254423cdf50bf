"""The device report: on this machine, and on machines described by hand."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from course_lib.classroom import report
from course_lib.classroom.report import DeviceReport, Gpu, device_report


def lines(text: str) -> dict[str, str]:
    return {line[:12].strip(): line[12:] for line in text.splitlines()}


def test_this_machine():
    found = device_report()
    assert 1 <= found.num_cores <= found.num_cores_total == psutil.cpu_count()
    assert 0 < found.available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert found.torch == torch.__version__ and found.num_visible_gpus == torch.cuda.device_count()
    assert found.backends["gloo"] is True and set(found.backends) == {"gloo", "nccl", "mpi"}
    assert found.namespaces.startswith(("yes, as ", "no: "))
    assert found.as_dict()["cpu"] == found.cpu != ""
    shown = lines(str(found))
    assert (
        list(shown)[:5] == ["CPU", "cores", "memory", "Python", "torch"] and list(shown)[-1] == "namespaces"
    )
    assert repr(found) == str(found)


def test_the_report_does_not_start_cuda():
    code = "import torch; from course_lib.classroom.report import device_report; device_report();"
    code += "assert not torch.cuda.is_initialized(); print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr


def made(**change) -> DeviceReport:
    values = {
        "cpu": "A", "num_cores": 8, "num_cores_total": 8, "memory_bytes": 64 * 10**9, "available_bytes": 10**9,
        "python": "3.12.1", "torch": "2.11", "gpus": (), "num_visible_gpus": 0, "cuda_visible_devices": None,
        "backends": {"gloo": True, "nccl": False, "mpi": False}, "namespaces": "yes, as root",
    }  # fmt: skip
    return DeviceReport(**(values | change))


def test_a_laptop():
    shown = lines(str(made()))
    assert shown["cores"] == "8" and shown["memory"] == "64 GB, 1 GB of it free"
    assert shown["GPUs"] == "none: ranks run on the CPU, over gloo"
    assert shown["backends"] == "gloo yes, nccl no (no GPU here), mpi no (not in this build of torch)"


def test_a_container_with_fewer_cores_says_so():
    assert lines(str(made(num_cores=2)))["cores"] == "2 of 8 (this process may use no more)"


def test_a_server_shows_all_gpus_and_those_torch_sees():
    gpus = tuple(Gpu(index, "X100", 80 * 10**9) for index in range(4))
    seen = made(
        gpus=gpus, num_visible_gpus=2, cuda_visible_devices="2,3", backends={"gloo": True, "nccl": True}
    )
    shown = lines(str(seen))
    assert shown["GPU 3"] == "X100, 80 GB"
    assert shown["torch sees"] == "2 of 4 GPUs: CUDA_VISIBLE_DEVICES=2,3"
    assert shown["backends"] == "gloo yes, nccl yes" and "GPUs" not in shown
    whole = lines(str(made(gpus=gpus, num_visible_gpus=4)))
    assert whole["torch sees"] == "4 of 4 GPUs: CUDA_VISIBLE_DEVICES is not set"
    assert lines(str(made(num_visible_gpus=1)))["torch sees"].startswith("1 of ? GPUs")


def test_gpus_are_read_from_the_drivers_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf '0, NVIDIA H200, 143771\\n1, NVIDIA H200, [N/A]\\n2, Other GPU, 24564\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert report._gpus() == (Gpu(0, "NVIDIA H200", 143771 * 2**20), Gpu(2, "Other GPU", 24564 * 2**20))


@pytest.mark.parametrize("script", ["exit 9", "echo broken", "echo 'a, b, c'"])
def test_a_broken_drivers_tool_means_no_gpus(tmp_path, monkeypatch, script: str):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert report._gpus() == ()


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(report.platform, "system", lambda: "Linux")
    monkeypatch.setattr(report.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert report._namespaces() == "no: the tools tc are not installed (links are then paced in software)"
    monkeypatch.setattr(report.platform, "system", lambda: "Darwin")
    assert report._namespaces().startswith("no: they exist on Linux only")


def test_a_forbidden_namespace_is_told(monkeypatch):
    monkeypatch.setattr(report.platform, "system", lambda: "Linux")
    monkeypatch.setattr(report.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(report, "_run", lambda command: None)
    assert report._namespaces().startswith("no: this system allows neither")
    monkeypatch.setattr(report, "_run", lambda command: "" if "--user" in command else None)
    assert report._namespaces() == "yes, as a user"


def test_a_command_that_fails_or_is_missing_gives_none():
    assert report._run(["false"]) is None and report._run(["no-such-tool-here"]) is None
    assert report._run(["echo", "x"]) == "x"
