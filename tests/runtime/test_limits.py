"""Memory limits that make out-of-memory happen, and stages with a modelled compute time."""

from __future__ import annotations

import time

import pytest
import torch

from course_lib import Pool, RankError, launch, paced
from course_lib.runtime.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("300MB", 300_000_000), ("1.5GB", 1_500_000_000), ("2MiB", 2 << 20), (10**7, 10**7)]
)
def test_sizes(text, size: int) -> None:
    assert parse_bytes("memory_limit", text) == size


@pytest.mark.parametrize("text", ["300", "300mb", "-1MB", "0MB", "many", True, 1.5, "300 Mbit", 100])
def test_wrong_sizes(text) -> None:
    with pytest.raises(ValueError, match=r'memory_limit: expected a size of at least 1 MB such as "300MB"'):
        launch(lambda comm: None, world_size=1, memory_limit=text)


def allocate(comm, megabytes):
    return torch.ones(megabytes * 250_000).sum().item()


def test_within_the_limit_and_beyond_it() -> None:
    assert launch(allocate, 250, world_size=2, memory_limit="300MB", show="none") == [250 * 250_000] * 2
    with pytest.raises(RankError) as caught:
        launch(allocate, 350, world_size=2, memory_limit="300MB", show="none")
    error = caught.value
    assert (error.rank, error.exc_type) == (0, "OutOfMemoryError")
    assert error.exc_message.startswith("tried to allocate 350.0 MB with ")
    assert error.exc_message.endswith(" MB left of the limit of 300.0 MB")
    left = float(error.exc_message.split(" with ")[1].split()[0])
    assert 280 < left <= 300  # what the call itself needs is small
    assert launch(allocate, 350, world_size=1, show="none") == [350 * 250_000]  # no limit, no error


def test_what_is_kept_counts_and_what_is_freed_does_not() -> None:
    def work(comm, keep):
        kept = []
        for _ in range(6):
            block = torch.ones(25_000_000)  # 100 MB
            if keep:
                kept.append(block)
        return True

    with Pool(1, memory_limit="300MB", show="none") as pool:
        assert pool.run(work, False) == [True]
        with pytest.raises(RankError, match=r"OutOfMemoryError: tried to allocate 100\.0 MB"):
            pool.run(work, True)


def test_the_rank_itself_can_catch_it() -> None:
    def work(comm):
        try:
            torch.ones(100_000_000)
        except RuntimeError as error:
            return "allocate" in str(error)

    assert launch(work, world_size=1, memory_limit="100MB", show="none") == [True]


def test_a_paced_stage_computes_the_same_and_takes_its_time() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    stage, inputs = paced(plain, 0.05), torch.randn(2, 4, requires_grad=True)
    began = time.monotonic()
    out = stage(inputs)
    assert time.monotonic() - began >= 0.05 and torch.equal(out, plain(inputs))
    (expected,) = torch.autograd.grad(plain(inputs).square().sum(), inputs)
    began = time.monotonic()
    out.square().sum().backward()
    assert time.monotonic() - began >= 0.1 and torch.equal(inputs.grad, expected)


def test_a_stage_that_is_too_slow_says_so() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.05)
            return x

    stage = paced(Slow(), 0.01, 0.0)
    stage(torch.ones(1))
    assert stage.late_s >= 0.035
    for wrong in (-1, float("inf"), None, "1"):
        with pytest.raises(ValueError, match=f"forward_s: expected seconds, 0 or more, got {wrong!r}"):
            paced(Slow(), wrong)
    with pytest.raises(TypeError, match=r"module: expected an nn.Module, got int"):
        paced(3, 0.01)
