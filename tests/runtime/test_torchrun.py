"""The real torchrun from Python: output, failures, restarts, elastic nodes, bad input; and nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from course_lib import RankError, RanksHung, TorchrunError, VirtualHosts, start_torchrun, torchrun
from course_lib.runtime.magic import run_cell
from course_lib.runtime.torchrun import Agent, TorchrunResult
from course_lib.runtime.torchrun.checks import check_module, check_options, parse_nodes
from course_lib.runtime.torchrun.commands import Meeting
from course_lib.runtime.torchrun.guardian import temporary_directory
from course_lib.runtime.torchrun.rendezvous_failure import agent_error
from course_lib.runtime.torchrun.settings import Settings
from course_lib.runtime.torchrun.tracebacks import last_traceback, parse_traceback
from course_lib.runtime.torchrun_help import MEANINGS, VARIABLES, installed_options
from tests.runtime.torchrun_scripts import TAG, left_behind, new_tag, write_all


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    tag = new_tag()
    monkeypatch.setenv(TAG, tag)
    yield
    assert left_behind(tag) == []


# --- one node


@pytest.fixture(scope="module")
def first(scripts: Path) -> tuple[TorchrunResult, str, str]:
    """A run of two workers: its result, and what it showed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        result = torchrun(scripts / "about.py", "--x", 1, role="trainer", env={"EXTRA": "1"})
    return result, out.getvalue(), err.getvalue()


def test_output_is_shown_with_the_rank(first) -> None:
    result, out, err = first
    for rank in (0, 1):
        assert f"[rank {rank}] done \ufffd\n" in out and f"[rank {rank}] grandchild\n" in out
        assert f"[rank {rank}] args ['--x', '1']\n" in out and "20 %" not in out
        assert f"[rank {rank}] to stderr\n" in err
        lines = result.output[rank].splitlines()[1:]
        lines.remove("to stderr")  # the order of the two streams is not kept
        assert lines == ["done \ufffd", "grandchild", "args ['--x', '1']"]
    assert all(line.startswith("[rank ") for line in (out + err).splitlines()), out + err


def test_the_result_says_what_happened(first) -> None:
    result, _, _ = first
    assert (result.exit_codes, result.restarts, result.error, result.label) == ({0: 0, 1: 0}, 0, None, "")
    assert result.command.startswith("torchrun --standalone --nproc-per-node=2 --role=trainer ")
    assert result.command.endswith("about.py --x 1") and "\n" not in result.command
    assert result.argv[0][1:3] == ["-m", "torch.distributed.run"]
    kinds = [event.kind for event in result.events]
    assert kinds[:2] == ["agent started", "rendezvous"] and kinds[-1] == "agent ended"
    assert kinds.count("worker started") == kinds.count("worker gone") == 2
    assert [(w.rank, w.local_rank, w.world_size, w.restart_count) for w in result.workers] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
    ]
    assert (
        result.log_dir == ""
        and not Path(result.argv[0][result.argv[0].index("--redirects=3") - 1][10:]).exists()
    )


def test_the_workers_variables_are_those_of_the_table(first) -> None:
    result, _, _ = first
    seen = [json.loads(result.output[rank].splitlines()[0]) for rank in (0, 1)]
    new = set(seen[0]) - set(os.environ)  # torch puts variables into this process, too
    torchs = {name for name in new if name.startswith(("TORCH", "MASTER_", "ROLE_", "GROUP_", "LOCAL_"))}
    torchs |= {"RANK", "WORLD_SIZE"}
    assert torchs == {variable.name for variable in VARIABLES if variable.always}
    assert {variable.name for variable in VARIABLES if not variable.always} & set(seen[0]) >= {
        "OMP_NUM_THREADS"
    }
    assert [(env["RANK"], env["LOCAL_RANK"], env["ROLE_NAME"], env["EXTRA"]) for env in seen] == [
        ("0", "0", "trainer", "1"),
        ("1", "1", "trainer", "1"),
    ]


def test_every_argument_of_the_installed_torchrun_has_a_meaning() -> None:
    options = installed_options()
    assert {option.name for option in options} == set(MEANINGS)
    assert all(option.meaning and option.help for option in options if option.name != "training_script_args")
    assert next(o for o in options if o.name == "--nproc-per-node").flags == (
        "--nproc-per-node",
        "--nproc_per_node",
    )
    assert next(o for o in options if o.name == "--max-restarts").default == "0"


# --- failures


def open_files() -> Counter[str]:
    """What this process has open of a job: its directory's files, and sockets."""
    names = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return Counter(name for name in names if "course_torchrun" in name or name.startswith("socket:"))


def test_a_worker_that_raises(scripts: Path, capsys) -> None:
    before = open_files()
    with pytest.raises(RankError) as caught:
        torchrun(scripts / "raises.py")
    error = caught.value
    assert (error.rank, error.exc_type, error.exitcode) == (1, "ValueError", 1)
    assert error.exc_message == "bad value\n6 in line two"
    assert error.traceback.startswith("Traceback") and "KeyError: 'first'" in error.traceback
    text = str(error)
    assert text.startswith("rank 1 of 2 raised ValueError: bad value")
    assert "line 5, in train" in text and "rank 0: ended by its agent; only a victim" in text
    assert "[rank 1] ValueError: bad value\n" in capsys.readouterr().err
    logs = Path(text.rpartition("The log files are in ")[2])
    assert len(list(logs.rglob("stderr.log"))) == 2  # kept while this process lives
    assert open_files() <= before  # but nothing stays open


def test_a_worker_that_raises_under_record(scripts: Path, tmp_path: Path) -> None:
    result = torchrun(scripts / "recorded.py", check=False, show="none", log_dir=tmp_path / "logs")
    error = result.error
    assert isinstance(error, RankError) and (error.rank, error.exc_type, error.exc_message) == (
        1,
        "KeyError",
        "'missing'",
    )
    assert "line 7, in main" in str(error) and "Traceback" in error.traceback
    assert result.exit_codes == {0: -signal.SIGTERM, 1: 1}
    assert list((tmp_path / "logs").rglob("error.json")) and result.log_dir == str(tmp_path / "logs")


def test_a_killed_worker_is_restarted_until_the_limit(scripts: Path, capsys) -> None:
    with start_torchrun(scripts / "sleeps.py", max_restarts=1) as job:
        for restart in (0, 1):
            assert job.until(
                lambda n=restart: [w.restart_count for w in job.workers() if w.lines] == [n] * 2, 60
            )
            killed = job.kill_worker(1)
            assert killed.gone is not None and killed.pid not in [worker.pid for worker in job.workers()]
        with pytest.raises(
            RankError, match="rank 1 of 2 was killed by SIGKILL: something killed it"
        ) as caught:
            job.wait(60)
    assert "restarted 1 time, which is the limit (max_restarts=1)" in str(caught.value)
    assert (caught.value.exitcode, caught.value.exc_type) == (-signal.SIGKILL, "")
    result = job.poll()
    assert result is not None and result.restarts == 1 and result.output[0] == "up 0\nup 1\n"
    assert [(w.rank, w.exit_code) for w in result.workers if w.exit_code == -signal.SIGKILL] == [
        (1, -9),
        (1, -9),
    ]
    assert "[torchrun] workers started on node 0: ranks 0 and 1 of 2, restart 1\n" in capsys.readouterr().out
    assert result.events == sorted(result.events, key=lambda event: event.at)
    of_first = [e.kind for e in result.events if (e.rank, e.restart) == (1, 0)]
    assert of_first[:2] == ["worker started", "killed"]  # and then what came of it
    assert sorted(of_first[2:]) == ["worker failed", "worker gone"]


def test_sigterm_reaches_the_workers_and_children_are_ended(scripts: Path) -> None:
    with start_torchrun(scripts / "sleeps.py", "snapshot", show="none") as job:
        assert job.until(lambda: len([w for w in job.workers() if w.lines]) == 2, 60)
        job.terminate()
        result = job.wait(30)
    assert result.error is None and result.output == dict.fromkeys((0, 1), "up 0\nsnapshot written\n")
    with start_torchrun(scripts / "sleeps.py", "child", nproc_per_node=1, show="none") as job:
        assert job.until(lambda: any(w.lines for w in job.workers()), 60)
    assert isinstance(
        job.poll().error, TorchrunError
    )  # closed before its end; the fixture looks for the sleep


def test_a_job_whose_guard_is_killed(scripts: Path) -> None:
    with start_torchrun(scripts / "sleeps.py", show="none") as job:
        assert job.until(lambda: len(job.workers()) == 2, 60)
        with pytest.raises(TimeoutError, match="did not happen within 0 s; the job runs on"):
            job.wait(timeout=0)
        with pytest.raises(
            ValueError, match="timeout: expected a number of seconds, 0 or more, or None, got -1"
        ):
            job.wait(timeout=-1)
        os.kill(job._engine.guardian._process.pid, signal.SIGKILL)
        with pytest.raises(TorchrunError, match="stands over this job was killed"):
            job.wait(10)


def test_waiting_for_ever_in_init_process_group(scripts: Path) -> None:
    with pytest.raises(RanksHung) as caught:
        torchrun(scripts / "hangs.py", timeout=4, show="none", max_restarts=1)
    error = caught.value
    assert "For 4 s (timeout) no worker has computed or written anything" in str(error)
    assert "Waiting: rank 0 in init_process_group" in str(error) and "rank 1 in none" in str(error)
    assert error.ranks[0].startswith("waiting in init_process_group") and "'up'" in error.ranks[1]
    assert "time.sleep(600)" in str(error) and "hangs.py" in error.stacks[0]


def test_deadline(scripts: Path) -> None:
    with pytest.raises(RanksHung, match="longer than its deadline of 5 s"):
        torchrun(scripts / "sleeps.py", deadline=5, show="none", nproc_per_node=1)


# --- several nodes on this machine


def test_two_nodes_without_namespaces(scripts: Path, capsys) -> None:
    with VirtualHosts(2, how="paced") as hosts:
        result = torchrun(scripts / "sums.py", hosts=hosts, nproc_per_node=[2, 1], show="grouped")
    rows = [result.output[rank].split() for rank in range(3)]
    assert [row[:8] for row in rows] == [
        ["6.0", "0", "0", "0", "0", "2", "3", "3"],
        ["6.0", "1", "1", "0", "1", "2", "3", "3"],
        ["6.0", "0", "2", "1", "2", "1", "3", "3"],
    ]
    assert result.label == "all nodes on this machine's loopback, links not limited"
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [["[rank", "0]"], ["[rank", "1]"], ["[rank", "2]"]]
    assert [line.split()[1:5] for line in result.command.splitlines()] == [
        ["--nnodes=2", "--nproc-per-node=2", "--node-rank=0", "--master-addr=127.0.0.1"],
        ["--nnodes=2", "--nproc-per-node=1", "--node-rank=1", "--master-addr=127.0.0.1"],
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_is_lost_and_another_one_joins(scripts: Path, tmp_path: Path, note) -> None:
    stop = tmp_path / "stop"
    with start_torchrun(
        scripts / "elastic.py",
        stop,
        nnodes="1:2",
        nproc_per_node=1,
        max_restarts=2,
        rdzv_store="apart",
        show="none",
    ) as job:

        def works(world_size: int) -> bool:
            running = job.workers()
            return len(running) == world_size and all(f"world {world_size}\n" in w.output for w in running)

        job.until(lambda: works(2), 100)
        assert [agent.node for agent in job.agents()] == [0, 1]
        job.kill_agent(0)  # the node that would hold the store, if that did not live apart
        assert [agent.node for agent in job.agents()] == [1]
        killed = time.time()
        job.until(lambda: works(1), 100)
        note(f"elastic: {time.time() - killed:.1f} s from the death of a node to the next step of the other")
        assert job.add_node() == 2
        added = time.time()
        job.until(lambda: works(2), 100)
        note(f"elastic: {time.time() - added:.1f} s from starting a node to the first step of both")
        stop.touch()
        result = job.wait(60)
    happened = "\n".join(map(str, result.events)) + "".join(result.output.values())
    assert result.error is None and result.restarts == 1, happened  # a change of nodes is none
    assert result.agents[0].killed and [result.agents[node].status for node in (1, 2)] == [0, 0]
    assert [event.node for event in result.events if event.kind == "agent started"] == [0, 1, 2]
    with pytest.raises(ValueError, match="node: no agent 0 runs now; there are: none"):
        job.kill_agent(0)


# --- bad input


def _taken_port() -> socket.socket:
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (
            {"script": "no/train.py"},
            FileNotFoundError,
            r"script: there is no file 'no/train.py' in .*; check the path",
        ),
        (
            {"script": "no_such_module", "module": True},
            ModuleNotFoundError,
            "finds no module 'no_such_module'",
        ),
        ({"nproc_per_node": 0}, ValueError, "nproc_per_node: expected a whole number from 1 to 1024, got 0"),
        ({"nproc_per_node": "many"}, ValueError, "nproc_per_node: expected a number of workers, 'auto'"),
        ({"nproc_per_node": [1], "nnodes": 2}, ValueError, "expected 2 numbers, one for each node"),
        ({"nproc_per_node": "0"}, ValueError, "nproc_per_node: expected a number of workers, 'auto'"),
        (
            {"nproc_per_node": []},
            ValueError,
            "nproc_per_node: expected a number for each node, got an empty list",
        ),
        ({"nproc_per_node": (2, 1)}, ValueError, "nproc_per_node: expected a number or a list"),
        ({"standalone": True, "nnodes": 2}, ValueError, "standalone: it means one node, got nnodes=2"),
        ({"run_path": True}, ValueError, "run_path: not here"),
        ({"redirects": "1"}, ValueError, "redirects: not here: .*`show` says what is shown"),
        ({"event_log_handler": "null"}, ValueError, "event_log_handler: not here"),
        ({"local_addr": "127.0.0.2"}, ValueError, "local_addr: not here: .*started alone, by node_rank"),
        ({"rdzv_timeout": float("inf")}, ValueError, "rdzv_timeout: .*expected a finite number of seconds"),
        ({"env": ["A=1"]}, TypeError, "env: expected a dict of strings"),
        ({"nnodes": "3:1"}, ValueError, "nnodes: expected a number of nodes or a range such as '1:4'"),
        ({"nnodes": "1:2", "rdzv_backend": "static"}, ValueError, "their number cannot vary"),
        ({"max_restarts": -1}, ValueError, "max_restarts: expected a whole number from 0"),
        ({"rdzv_backend": "mpi"}, ValueError, "rdzv_backend: expected one of 'static', 'c10d'"),
        ({"rdzv_endpoint": "node0"}, ValueError, "rdzv_endpoint: expected host:port such as 'node0:29400'"),
        (
            {"node_rank": 1, "nnodes": 2},
            ValueError,
            "node_rank: .* needs to know where they meet; give master_addr",
        ),
        (
            {"master_addr": "no-such-host.invalid"},
            ValueError,
            "'no-such-host.invalid' does not resolve .* check",
        ),
        (
            {"rdzv_endpoint": "no-such-host.invalid:1"},
            ValueError,
            "rdzv_endpoint: the address .* does not resolve",
        ),
        ({"timeout": 0}, ValueError, "timeout: expected a positive number of seconds"),
        ({"show": "loud"}, ValueError, "show: expected one of 'live', 'grouped', 'none'"),
        ({"env": {"A": 1}}, TypeError, "env: expected strings, got 'A': 1"),
        (
            {"monitor_intervall": 1},
            TypeError,
            "no option 'monitor_intervall' .*Did you mean 'monitor_interval'",
        ),
        ({"hosts": 2}, TypeError, "hosts: expected VirtualHosts"),
        ({"script": None}, TypeError, "script: expected a path, as text or as a Path, got None"),
        ({"script": b"sleeps.py"}, TypeError, "script: expected a path"),
        ({"script": "train.py", "module": True}, ValueError, "give the file without module=True"),
        ({"module": "yes"}, TypeError, "module: expected True or False, got 'yes'"),
        ({"check": 5}, TypeError, "check: expected True or False, got 5"),
        ({"log_dir": 5}, TypeError, "log_dir: expected a path"),
        ({"log_dir": "/dev/null/logs"}, ValueError, "log_dir: expected a directory, .* /dev/null is a file"),
        ({"names": 5}, TypeError, "names: expected a dict"),
        ({"master_addr": 5}, TypeError, "master_addr: expected text or None, got 5"),
        ({"rdzv_endpoint": 5}, TypeError, "rdzv_endpoint: expected text or None, got 5"),
        ({"rdzv_endpoint": "127.0.0.1:99999"}, ValueError, "rdzv_endpoint: expected host:port"),
        ({"rdzv_conf": 5}, TypeError, "rdzv_conf: expected a dict, or text such as"),
        ({"rdzv_conf": [1]}, TypeError, "rdzv_conf: expected a dict"),
        ({"rdzv_conf": "abc"}, ValueError, "rdzv_conf: 'abc': expected key=value, got ''"),
        (
            {"rdzv_conf": {"join_timeout": "abc"}},
            ValueError,
            "'join_timeout': expected a whole number of sec",
        ),
        ({"deadline": 10**400}, ValueError, "deadline: expected a positive number of seconds"),
        ({"env": {"A=B": "x"}}, ValueError, "env: .* expected a name without '='"),
        ({"env": {"": "x"}}, ValueError, "env: no system has a variable such as ''"),
        ({"env": {"A": "a\0b"}}, ValueError, "env: .* no NUL characters"),
    ],
)
def test_wrong_arguments(scripts: Path, settings: dict, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        torchrun(settings.pop("script", scripts / "sleeps.py"), **settings)


def test_an_argument_with_nul(scripts: Path) -> None:
    with pytest.raises(ValueError, match="script_args: no program can be given a NUL character"):
        torchrun(scripts / "sleeps.py", "a\0b")


def test_a_module_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's script would train in this process."""
    monkeypatch.chdir(tmp_path)
    for name in ("training", "training/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "training" / "inner" / "loop.py").write_text("")
    (tmp_path / "space").mkdir()  # a package without __init__.py
    (tmp_path / "space" / "loop.py").write_text("")
    for name in ("training", "training.inner.loop", "space.loop", "course_lib.train_ddp", "json.tool"):
        check_module(name)
    for name in ("training.other", "training.inner.loop.step", "space.no", "", ".", "json.tool.more"):
        with pytest.raises(ModuleNotFoundError, match="module: Python finds no module"):
            check_module(name)


def test_an_address_that_does_not_resolve_is_named(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"nnodes": 2, "node_rank": 0, "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:29833"}
    monkeypatch.setattr(socket, "gethostname", lambda: "node0.invalid")
    with pytest.raises(ValueError, match=r"local_addr: not given, so .* 'node0\.invalid' does not resolve"):
        start_torchrun(scripts / "sleeps.py", **node)
    with pytest.raises(ValueError, match=r"local_addr: the address 'nowhere\.invalid' does not resolve"):
        start_torchrun(scripts / "sleeps.py", local_addr="nowhere.invalid", **node)
    settings = Settings(str(scripts / "sleeps.py"), options={"local_addr": "127.0.0.1"}, **node)
    why = "wait timeout after 8000ms, keys: /torch.rendezvous.x.0/MASTER_ADDR"
    found = {0: Agent(0, 1, 0.0, status=256, lines=[why])}
    error = agent_error(settings, found, scripts, "127.0.0.1:29833")
    assert "perhaps its host name does not resolve there. Start every node with local_addr=" in str(error)


def test_no_room_for_another_node_and_signals_that_are_none(scripts: Path) -> None:
    with start_torchrun(scripts / "sleeps.py", nproc_per_node=1, show="none") as job:
        with pytest.raises(ValueError, match="nnodes=1 has no room for another node; use nnodes='1:2'"):
            job.add_node()
        for signum in ("SIGKILL", 0, 999):
            with pytest.raises(ValueError, match="signum: expected a signal such as"):
                job.kill_worker(0, signum)
    with pytest.raises(ValueError, match="add_node: the job has ended"):
        job.add_node()


def test_two_jobs_on_the_same_hosts_have_ports_of_their_own(scripts: Path) -> None:
    hosts = object.__new__(VirtualHosts)
    hosts.how, hosts.num_hosts, hosts.addresses = "namespaces", 2, ["10.0.0.1", "10.0.0.2"]
    hosts.check_open = lambda: None
    settings = Settings(str(scripts / "sleeps.py"), hosts=hosts)
    first, second = Meeting.of(settings), Meeting.of(settings)
    assert (first.port, second.port) == (29500, 29501)
    first.release(settings)
    assert Meeting.of(settings).port == 29500


def test_a_node_that_is_started_alone_may_have_an_address() -> None:
    check_options({"local_addr": "node1"}, node_rank=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--env FOO", "--env: expected NAME=VALUE, as in --env A=1, got 'FOO'"),
        ("--env =1", "--env: expected NAME=VALUE, as in --env A=1, got '=1'"),
        ("--into a-b", "--into: expected the name of a variable, got 'a-b'"),
        ('-n 2 "x', '%%torchrun: no closing quotation in: -n 2 "x'),
        ("--save /nosuch/a.py", "--save: expected a file's name in a directory that is there, got '/nosuch"),
        ("--save /tmp/", "--save: expected a file's name"),
        ("--into class", "--into: expected the name of a variable, got 'class'"),
    ],
)
def test_a_wrong_line_of_the_magic(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_cell(line, "pass", {})


def test_gpu_without_a_gpu(scripts: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        torchrun(scripts / "sleeps.py", nproc_per_node="gpu")


def test_port_taken(scripts: Path) -> None:
    with _taken_port() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"node 0 cannot listen on port {port} of 127.0.0.1 .*choose another port"
        ):
            torchrun(scripts / "sleeps.py", nnodes=2, master_port=port)


def test_a_node_that_does_not_come(scripts: Path) -> None:
    """Within rdzv_timeout, and what it takes to import torch; both backends, at the same time."""
    with _taken_port() as listener, _taken_port() as another:
        free, also_free = listener.getsockname()[1], another.getsockname()[1]
    common = {"nnodes": 2, "node_rank": 0, "rdzv_timeout": 3, "show": "none"}
    with (
        start_torchrun(scripts / "sleeps.py", master_addr="127.0.0.1", master_port=free, **common) as static,
        start_torchrun(
            scripts / "sleeps.py", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{also_free}", **common
        ) as c10d,
    ):
        for job, words in (
            (static, "1 of 2 nodes came within 3 s"),
            (c10d, "fewer than 2 nodes came within 3 s"),
        ):
            with pytest.raises(TorchrunError, match=words) as caught:
                job.wait(60)
            assert "with the same nnodes, the same address and port" in str(caught.value)
            assert caught.value.agents.keys() == {0}


def test_nodes_that_disagree_on_nnodes(scripts: Path) -> None:
    with _taken_port() as listener:
        port = listener.getsockname()[1]
    common = {
        "master_addr": "127.0.0.1",
        "master_port": port,
        "rdzv_timeout": 8,
        "show": "none",
        "nproc_per_node": 1,
    }
    with (
        start_torchrun(scripts / "sleeps.py", nnodes=3, node_rank=0, **common) as three,
        start_torchrun(scripts / "sleeps.py", nnodes=2, node_rank=1, **common) as two,
    ):
        with pytest.raises(
            TorchrunError, match=r"2 of 3 nodes came within 8 s\. Check .* with the same nnodes"
        ):
            three.wait(60)
        with pytest.raises(TorchrunError, match=r"some wait for more nodes than others\. Check"):
            two.wait(60)


# --- small parts


@pytest.mark.parametrize(("text", "nodes"), [(2, (2, 2)), ("1:3", (1, 3)), ("4", (4, 4))])
def test_parse_nodes(text, nodes) -> None:
    assert parse_nodes(text) == nodes


def test_parse_a_traceback() -> None:
    frames, kind, message = parse_traceback(
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f(\n    ^^\n'
        '  File "b.py", line 7, in f\n    raise x.Odd("a")\nx.y.Odd: first\nsecond\n'
    )
    assert [(f.file, f.line, f.function, f.text) for f in frames] == [
        ("a.py", 3, "<module>", "f("),
        ("b.py", 7, "f", 'raise x.Odd("a")'),
    ]
    assert (kind, message) == ("Odd", "first\nsecond")
    lines = ["noise", '  File "a.py", line 2', "    y = (", "        ^", "SyntaxError: '(' was never closed"]
    assert parse_traceback(last_traceback(lines))[1:] == ("SyntaxError", "'(' was never closed")
    assert last_traceback(["nothing here"]) == ""


def test_what_a_killed_process_left_is_removed() -> None:
    old, other = Path(tempfile.gettempdir()) / "course_torchrun_4194399_x", temporary_directory()
    old.mkdir(exist_ok=True)  # no system has so high a pid
    new = temporary_directory()
    assert not old.exists() and other.is_dir() and new.is_dir()
    for directory in (other, new):
        directory.rmdir()


def test_psutil_sees_environments() -> None:
    """Else the look for what is left behind would find nothing, ever."""
    tag = new_tag()
    child = psutil.Popen(["sleep", "600"], env={**os.environ, TAG: tag})
    try:
        end = time.monotonic() + 5.0  # until it has become `sleep`
        while not (found := left_behind(tag, 0.0)) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(found) == 1
    finally:
        child.kill()
        child.wait()
