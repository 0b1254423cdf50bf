"""Times on paper: worked numbers, the laws between them, and a fit that finds what was put in."""

from __future__ import annotations

import math
import random

import pytest

from course_lib.plan import costs

ALPHA_S, RATE = 1e-3, 1e6  # a millisecond, and a byte per microsecond


def test_message() -> None:
    assert costs.message_time_s(500_000, ALPHA_S, RATE) == pytest.approx(0.501)
    # A link of 100 Mbit/s carries 12.5 MB in one second; a factor of 8 off would be 0.125 s.
    assert costs.message_time_s(12.5e6, 0, 100e6 / 8) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("time_s", "world_size", "expected"),
    [
        # S = 1 MB takes 1 s on the wire. naive: 2·7 messages of 1.001 s
        (costs.naive_all_reduce_time_s, 8, 14 * 1.001),
        (costs.reduce_time_s, 8, 3 * 1.001),
        (costs.broadcast_time_s, 8, 3 * 1.001),
        (costs.tree_all_reduce_time_s, 8, 6 * 1.001),
        (costs.tree_all_reduce_time_s, 5, 6 * 1.001),  # three levels from 5 ranks on
        (costs.ring_reduce_scatter_time_s, 8, 7 * (0.001 + 0.125)),
        (costs.ring_all_gather_time_s, 8, 7 * (0.001 + 0.125)),
        (costs.ring_all_reduce_time_s, 8, 14 * (0.001 + 0.125)),
        (costs.ring_all_reduce_time_s, 2, 2 * (0.001 + 0.5)),
    ],
)
def test_worked_numbers(time_s, world_size: int, expected: float) -> None:
    assert time_s(world_size, 1e6, ALPHA_S, RATE) == pytest.approx(expected)
    assert time_s(1, 1e6, ALPHA_S, RATE) == 0


def test_ring_hardly_depends_on_n_but_its_latency_does() -> None:
    def ring(n: int, alpha_s: float) -> float:
        return costs.ring_all_reduce_time_s(n, 1e6, alpha_s, RATE)

    assert ring(64, 0) / ring(2, 0) == pytest.approx(2 * 63 / 64)  # never more than twice
    assert ring(64, ALPHA_S) - ring(64, 0) == pytest.approx(126 * ALPHA_S)


def test_hierarchical() -> None:
    inside = {"inside_alpha_s": 1e-6, "inside_rate": 1e9}
    time_s = costs.hierarchical_all_reduce_time_s(8, 1e6, ALPHA_S, RATE, ranks_per_host=4, **inside)
    assert time_s == pytest.approx(6 * (1e-6 + 0.25e-3) + 2 * (1e-3 + 0.5))
    assert time_s < costs.ring_all_reduce_time_s(8, 1e6, ALPHA_S, RATE)
    with pytest.raises(ValueError, match=r"ranks_per_host.*divisor"):
        costs.hierarchical_all_reduce_time_s(8, 1e6, ALPHA_S, RATE, ranks_per_host=3, **inside)


@pytest.mark.parametrize("n", [4, 5, 8, 16, 100])
def test_at_the_crossover_tree_and_ring_take_equally_long(n: int) -> None:
    size = costs.tree_ring_crossover_bytes(n, ALPHA_S, RATE)
    times = [
        [
            f(n, factor * size, ALPHA_S, RATE)
            for f in (costs.tree_all_reduce_time_s, costs.ring_all_reduce_time_s)
        ]
        for factor in (0.5, 1, 2)
    ]
    assert times[0][0] < times[0][1] and times[2][0] > times[2][1]
    assert times[1][0] == pytest.approx(times[1][1])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_with_few_ranks_the_ring_is_never_slower(n: int) -> None:
    assert costs.tree_ring_crossover_bytes(n, ALPHA_S, RATE) == 0


@pytest.mark.parametrize(
    ("collective", "gigabytes_per_s"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_bandwidth_of_a_gigabyte_in_a_second_on_four_ranks(
    collective: str, gigabytes_per_s: float
) -> None:
    assert costs.bus_bandwidth(collective, 4, 1e9, 1.0) == pytest.approx(gigabytes_per_s * 1e9)


def test_bus_bandwidth_of_a_perfect_run_is_the_link_s() -> None:
    for n in (2, 3, 4, 8, 100):
        time_s = costs.ring_all_reduce_time_s(n, 1e9, 0, RATE)
        assert costs.bus_bandwidth("all_reduce", n, 1e9, time_s) == pytest.approx(RATE)


SIZES = [0, 64, 1024, 16_384, 262_144, 4_194_304]


def test_fit_finds_what_was_put_in() -> None:
    times = [costs.message_time_s(n, 40e-6, 1.2e9) for n in SIZES]
    alpha_s, rate = costs.fit_alpha_beta(SIZES, times)
    assert alpha_s == pytest.approx(40e-6) and rate == pytest.approx(1.2e9)


def test_fit_of_noisy_ping_pong_finds_the_latency_too() -> None:
    """5 % noise on the largest message is many times α: only relative errors let the small messages count."""
    for seed in range(20):
        noise = random.Random(seed)
        times = [costs.message_time_s(n, 40e-6, 1.2e9) * noise.uniform(0.95, 1.05) for n in SIZES]
        alpha_s, rate = costs.fit_alpha_beta(SIZES, times)
        assert alpha_s == pytest.approx(40e-6, rel=0.1) and rate == pytest.approx(1.2e9, rel=0.1)


def test_fit_never_says_a_negative_latency_or_rate() -> None:
    alpha_s, rate = costs.fit_alpha_beta([10, 20, 40], [9e-6, 20e-6, 42e-6])
    assert alpha_s == 0 and rate == pytest.approx(1e6, rel=0.1)
    assert costs.fit_alpha_beta([10, 20], [2e-6, 1e-6])[1] == math.inf


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: costs.message_time_s(-1, ALPHA_S, RATE), "nbytes"),
        (lambda: costs.message_time_s(1, -1, RATE), "alpha_s"),
        (lambda: costs.message_time_s(1, 0, 0), "rate"),
        (lambda: costs.ring_all_reduce_time_s(0, 1, 0, 1), "world_size"),
        (lambda: costs.tree_all_reduce_time_s(0, 1, 0, 1), "world_size"),
        (lambda: costs.naive_all_reduce_time_s(-3, 1, 0, 1), "world_size"),
        (lambda: costs.ring_all_gather_time_s(4, 1, 0, math.nan), "rate"),
        (lambda: costs.bus_bandwidth("gossip", 4, 1, 1), "collective.*all_reduce"),
        (lambda: costs.bus_bandwidth("all_reduce", 4, 1, 0), "seconds"),
        (lambda: costs.bus_bandwidth("all_reduce", 4, -1, 1), "nbytes"),
        (lambda: costs.bus_bandwidth("all_reduce", 0, 1, 1), "world_size"),
        (lambda: costs.fit_alpha_beta([1, 1], [1, 2]), "two different sizes"),
        (lambda: costs.fit_alpha_beta([1, 2], [1]), "got 2 and 1"),
        (lambda: costs.fit_alpha_beta([1, 2], [1, 0]), "times above 0"),
    ],
)
def test_bad_arguments_are_named(call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()
