"""torchrun on virtual hosts: an agent in each, ranks as on real machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course_lib import HostsUnavailable, VirtualHosts, torchrun
from course_lib.runtime import hosts as hosts_module
from tests.runtime.torchrun_scripts import TAG, left_behind, new_tag, write_all


def why_not() -> str:
    try:
        VirtualHosts(1, how="namespaces").close()
    except HostsUnavailable as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts_of_two_and_one_ranks(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell of the table of variables."""
    monkeypatch.setenv(TAG, tag := new_tag())
    write_all(tmp_path)
    with VirtualHosts(2) as hosts:
        result = torchrun(
            tmp_path / "sums.py",
            hosts=hosts,
            nproc_per_node=[2, 1],
            rdzv_backend=backend,
            rdzv_id="job",
            show="none",
        )
        crossed = hosts.counters()
    rows = [result.output[rank].split() for rank in range(3)]
    port = rows[0][9]
    assert port == "29500" if backend == "static" else port.isdigit()
    # sum, LOCAL_RANK, RANK, GROUP_RANK, ROLE_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, ROLE_WORLD_SIZE, MASTER_ADDR,
    # MASTER_PORT, RESTART_COUNT, MAX_RESTARTS, RUN_ID, PYTHON_EXEC (which nobody has set)
    assert rows == [
        ["6.0", "0", "0", "0", "0", "2", "3", "3", hosts.addresses[0], port, "0", "0", "job", "-"],
        ["6.0", "1", "1", "0", "1", "2", "3", "3", hosts.addresses[0], port, "0", "0", "job", "-"],
        ["6.0", "0", "2", "1", "2", "1", "3", "3", hosts.addresses[0], port, "0", "0", "job", "-"],
    ]
    assert all(link.bytes_sent > 1000 for link in crossed)  # they talked over the cable
    assert [worker.node for worker in result.workers if worker.rank == 2] == [1] and result.label == ""
    assert left_behind(tag) == []


def test_agents_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts inside a user namespace, as an ordinary user has them."""
    monkeypatch.setattr(hosts_module._HostServer, "extra_arguments", ("user",))
    write_all(tmp_path)
    try:
        hosts = VirtualHosts(2, how="namespaces")
    except HostsUnavailable as error:
        pytest.skip(str(error))
    with hosts:
        result = torchrun(tmp_path / "about.py", hosts=hosts, nproc_per_node=1, show="none")
    found = [json.loads(result.output[rank].splitlines()[0])["MASTER_ADDR"] for rank in (0, 1)]
    assert found == [hosts.addresses[0]] * 2 and result.exit_codes == {0: 0, 1: 0}


def test_more_nodes_than_hosts(tmp_path: Path) -> None:
    write_all(tmp_path)
    with (
        VirtualHosts(1) as hosts,
        pytest.raises(ValueError, match="nnodes: expected at most 1, one for each virtual"),
    ):
        torchrun(tmp_path / "sums.py", hosts=hosts, nnodes=2)
