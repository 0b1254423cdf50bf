"""The DDP bench: its rows, on real ranks, with a model small enough for a test."""

from __future__ import annotations

import pytest

from course_lib.bench import ddp
from course_lib.classroom.gpt import GPT


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ddp.MODELS, "GPT", GPT)


def test_rows(small: None) -> None:
    rows = ddp.rows([2], models=["GPT"], runs=1)
    assert [(one["case"], one["ours"], one["peer"]) for one in rows] == [
        ("GPT, step", "BucketedDDP", "DDP"),
        ("GPT, DDP", "on our ring", "on gloo"),
        ("GPT, FSDP2", "on our ring", "on gloo"),
    ]
    assert all(one["equal"] and one["world_size"] == 2 and one["ratio"] > 0 for one in rows)


@pytest.mark.hosts
def test_what_is_hidden_on_links(small: None) -> None:
    step, fsdp2 = ddp.on_links()
    assert step["case"].startswith("GPT, step at 400Mbit") and step["equal"]
    assert 0 <= step["hidden_share"] <= 1
    assert (
        fsdp2["case"].startswith("GPT, FSDP2 at 400Mbit")
        and fsdp2["equal"]
        and fsdp2["ours"] == "on our ring"
    )
