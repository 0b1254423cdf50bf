"""Events, and the file that Chrome and Perfetto open."""

from __future__ import annotations

import json
from pathlib import Path

from course_lib.comm.ledger import Ledger, Row
from course_lib.comm.trace import Event, Trace


def trace_of_two_ranks() -> Trace:
    forward = Trace([Event(0, "forward", 0.2, 0.5, detail={"layer": 3})])
    waiting = Trace([Event(1, "ring_all_reduce", 0.1, 0.4, "collective")])
    ledger = Ledger([Row("exchange", 0, 8, 12, 1, 0.15, 0.35)])
    return Trace.combine([forward, waiting], [Ledger(), ledger])


def test_combined_in_order_of_time_with_the_ledgers_as_a_lane() -> None:
    trace = trace_of_two_ranks()
    assert [(event.rank, event.name, event.lane) for event in trace] == [
        (1, "ring_all_reduce", "collective"),
        (1, "exchange", "comm"),
        (0, "forward", "compute"),
    ]
    assert [event.name for event in trace.rank(0)] == ["forward"]
    assert trace.rank(1)[1].detail == {
        "peer": 0, "bytes_sent": 8, "bytes_received": 12, "messages": 1, "exact": True
    }  # fmt: skip
    assert repr(trace) == "Trace(3 events of 2 ranks)"


def test_saved_as_trace_events(tmp_path: Path) -> None:
    path = trace_of_two_ranks().save(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert ("process_name", 0, "rank 0") in names and ("thread_name", 1, "comm") in names
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans["forward"]["ts"] == 0.2e6 and abs(spans["forward"]["dur"] - 0.3e6) < 1  # microseconds
    assert spans["forward"]["args"] == {"layer": 3}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name: lanes[e["pid"], e["tid"]] for name, e in spans.items()} == {
        "forward": "compute",
        "exchange": "comm",
        "ring_all_reduce": "collective",
    }


def test_what_json_cannot_hold_is_written_as_text(tmp_path: Path) -> None:
    path = Trace([Event(0, "x", 0.0, 1.0, detail={"shape": {1, 2}})]).save(tmp_path / "t.json")
    assert json.loads(path.read_text())["traceEvents"][-1]["args"] == {"shape": "{1, 2}"}
