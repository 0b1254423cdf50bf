"""The rows of a bench, its table, its command line, and the ring's on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from course_lib import launch
from course_lib.bench import __main__ as command
from course_lib.bench import ring
from course_lib.bench.rows import row, table, take_turns
from course_lib.plan import traffic

FIELDS = {"bench", "case", "world_size", "ours", "ours_s", "peer", "peer_s", "ratio", "equal"}


def a_row(equal: bool = True, **more):
    return row("demo", "sum 1 MB", 2, ("ring", 0.001), ("gloo", 0.002), equal, **more)


def test_a_row_has_the_agreed_fields_and_more() -> None:
    one = a_row(bytes_sent=8)
    assert set(one) == FIELDS | {"bytes_sent"} and one["ratio"] == 0.5


def test_table() -> None:
    head, line = table([a_row()]).splitlines()
    assert head.split() == ["case", "ranks", "ours", "ms", "PyTorch", "ms", "ratio", "equal"]
    assert line.split() == ["sum", "1", "MB", "2", "ring", "1.00", "gloo", "2.00", "0.50", "yes"]
    assert table([a_row(equal=False)]).endswith("NO")


def test_turns_alternate_and_the_last_result_stays() -> None:
    class Runner:
        def __init__(self, name, log):
            self.name, self.log = name, log

        def prepare(self):
            self.log.append(f"prepare {self.name}")

        def call(self):
            self.log.append(self.name)

    def work(comm):
        log = []
        medians = take_turns(comm, [Runner("a", log), Runner("b", log)], runs=3)
        return log, medians

    results = launch(work, world_size=2, show="none")
    for log, medians in results:
        assert log == ["prepare a", "a", "prepare b", "b"] * 5  # two to warm up
        assert medians == results[0][1] and min(medians) > 0  # the slowest rank's time, so the same on all


@pytest.mark.parametrize("world_size", [1, 2])
def test_ring(world_size: int) -> None:
    rows = ring.rows([world_size], sizes_mb=[1])
    assert [one["case"] for one in rows] == ["all_reduce 1 MB", "reduce_scatter 1 MB", "all_gather 1 MB"]
    length = 250_000
    for one, name in zip(rows, ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"], strict=True):
        assert set(one) >= FIELDS and one["bench"] == "ring" and one["world_size"] == world_size
        assert one["equal"] is True and one["ours"] == name and one["ratio"] == one["ours_s"] / one["peer_s"]
        assert one["bytes_sent"] == getattr(traffic, f"{name}_bytes")(world_size, length)[0].sent
        assert one["messages"] == getattr(traffic, f"{name}_messages")(world_size, length)[0]


def test_an_unequal_result_is_reported() -> None:
    def work(comm):
        whole = ring.whole_tensor(comm, 1)
        ours, peer = ring.all_reduce(comm, whole)
        call = ours.call

        def wrong_on_one_rank():
            call()
            if comm.rank == 1:
                ours.result[7] += 1

        ours.call = wrong_on_one_rank
        return ring.measure(comm, 1, ours, peer)["equal"]

    assert launch(work, world_size=2, show="none") == [False, False]


def test_values_tell_ranks_apart() -> None:
    def work(comm):
        return ring.whole_tensor(comm, 1)[:1003]

    a, b = launch(work, world_size=2, show="none")
    assert not torch.equal(a, b) and torch.equal(a, a.round()) and a.unique().numel() == 1000


# --- the command


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> list:
    asked: list = []

    def demo(world_sizes):
        asked.append(list(world_sizes))
        print("said on the way")
        return [a_row()]

    monkeypatch.setattr(command, "BENCHES", {"demo": demo, "bad": lambda world_sizes: [a_row(equal=False)]})
    return asked


@pytest.mark.parametrize(
    ("arguments", "world_sizes"),
    [
        (["demo"], [2, 4]),
        (["demo", "--world-size", "3"], [3]),
        (["demo", "--world-size", "2", "4", "8"], [2, 4, 8]),
        (["demo", "--world-size", "2", "--world-size", "4"], [2, 4]),
    ],
)
def test_world_sizes(benches, arguments, world_sizes, capsys) -> None:
    assert command.main(arguments) == 0
    assert benches == [world_sizes] and "sum 1 MB" in capsys.readouterr().out


def test_json_on_the_standard_output_is_nothing_but_json(benches, capsys) -> None:
    assert command.main(["demo", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [a_row()]
    assert "said on the way" in printed.err and "sum 1 MB" in printed.err


def test_json_file(benches, tmp_path: Path, capsys) -> None:
    assert command.main(["demo", "--json", str(tmp_path / "rows.json")]) == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == [a_row()]
    assert "sum 1 MB" in capsys.readouterr().out


def test_all_benches_run_without_a_name_and_an_unequal_one_fails(benches, capsys) -> None:
    assert command.main([]) == 1
    assert benches == [[2, 4]] and "not equal" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["unknown"], ["demo", "--world-size", "0"], ["demo", "--world-size", "x"]]
)
def test_wrong_arguments(benches, arguments, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
