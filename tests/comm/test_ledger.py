"""Rows, totals and how a ledger prints."""

from __future__ import annotations

import pickle

import pytest

from course_lib.comm.ledger import Ledger, Row


def ledger_of(n: int) -> Ledger:
    ledger = Ledger()
    for i in range(n):
        ledger.add(Row("exchange", 1, 100 + i, 10, 1, 0.5 * i, 0.5 * i + 0.25))
    return ledger


def test_totals_and_order() -> None:
    ledger = ledger_of(3)
    ledger.add(Row("recv", 2, 0, 7, 0, 2.0, 3.0))
    assert (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (303, 37, 3)
    assert len(ledger) == 4 and [row.op for row in ledger] == ["exchange"] * 3 + ["recv"]
    assert ledger[-1].peer == 2 and ledger[0].exact and ledger[0].group is None


def test_clear_keeps_the_object() -> None:
    ledger = ledger_of(2)
    ledger.clear()
    assert len(ledger) == 0 and (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (0, 0, 0)


def test_rows_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ledger_of(1)[0].bytes_sent = 5  # type: ignore[misc]


def test_pickles() -> None:
    copy = pickle.loads(pickle.dumps(ledger_of(3)))
    assert list(copy) == list(ledger_of(3))


def test_prints_as_a_table_with_totals() -> None:
    ledger = ledger_of(1)
    ledger.add(Row("all_reduce", None, 8, 8, 2, 1.0, 2.0, exact=False))
    header, first, second, total = str(ledger).splitlines()
    assert header.split() == ["op", "peer", "sent", "received", "messages", "start_s", "end_s"]
    assert first.split() == ["exchange", "1", "100", "10", "1", "0.000000", "0.250000"]
    assert second.split()[0] == "all_reduce*"  # by formula, not counted
    assert total.split() == ["total", "108", "18", "3"]


def test_a_long_ledger_prints_its_ends_only() -> None:
    lines = str(ledger_of(1000)).splitlines()
    assert len(lines) == 43 and "960 more rows" in lines[21] and lines[-2].split()[2] == "1099"
    for n in (0, 39, 40, 41):
        text = str(ledger_of(n))
        assert text.count("exchange") == min(n, 40)
