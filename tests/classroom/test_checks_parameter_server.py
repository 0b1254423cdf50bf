"""The graders of the chapter on data parallelism, against right answers and against wrong ones, each with one fault."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from course_lib.classroom.checks import check
from course_lib.classroom.checks.catalogue import CATALOGUE
from course_lib.plan.partition import chunk_bounds
from tests.classroom.planted import Planted

NAMES = ["weighted_mean", "sharded_step", "may_pull"]
PLANTED = Planted(NAMES)
fault, right = PLANTED.fault, PLANTED.right


# --- the aggregation


@right("weighted_mean")
def stacked(gradients, counts):
    weights = torch.tensor(counts, dtype=gradients[0].dtype)
    return (weights[:, None] * torch.stack(gradients)).sum(dim=0) / weights.sum()


@right("weighted_mean")
def sums_first(gradients, counts):
    total = sum(gradient * count for gradient, count in zip(gradients, counts, strict=True))
    return total / sum(counts)


@fault(
    "weighted_mean",
    "wrong gradient: 0.525 where the mean over all samples is 0.433: that is the mean of the ranks'",
)
def mean_of_means(gradients, counts):
    return sum(gradients) / len(gradients)


@fault(
    "weighted_mean",
    "wrong gradient: 1.050 where",
    "that is the sum of the ranks' means",
    "[0.3, 0.2] and [0.8])",
)
def plain_sum(gradients, counts):
    return sum(gradients)


@fault("weighted_mean", "wrong gradient: 1.300 where", "never divided by the number of samples (1 rank")
def never_divided(gradients, counts):
    return sum(gradient * count for gradient, count in zip(gradients, counts, strict=True))


@fault("weighted_mean", "wrong gradient: 0.650 where", "divided by the number of ranks (2 ranks")
def divided_by_ranks(gradients, counts):
    total = sum(counts) if len(counts) == 1 else len(counts)
    return sum(gradient * count for gradient, count in zip(gradients, counts, strict=True)) / total


@fault(
    "weighted_mean",
    "wrong gradient: 0.144 where",
    "divided by the number of samples, but not weighted with the counts (1 rank",
)
def not_weighted(gradients, counts):
    return sum(gradients) / sum(counts)


@fault("weighted_mean", "wrong gradient: 0.250 where", "the gradient of the first rank alone")
def first_alone(gradients, counts):
    return gradients[0] * 1


@fault("weighted_mean", "your function returned None, where one flat tensor is needed (1 gradient")
def forgets_to_return(gradients, counts):
    weighted = stacked(gradients, counts)  # noqa: F841


@fault("weighted_mean", "your function returned a value of type list")
def returns_all(gradients, counts):
    return [gradient * count for gradient, count in zip(gradients, counts, strict=True)]


@fault(
    "weighted_mean",
    "your function returned a tensor of shape () and float32, where the gradients are of shape (1,)",
)
def one_number(gradients, counts):
    return stacked(gradients, counts).sum()


@fault("weighted_mean", "your function returned a tensor of shape (3,) and float32, where", "float64")
def float32_only(gradients, counts):
    return stacked(gradients, counts).float()


@fault("weighted_mean", "your function changed what it was given", "(2 gradients, of 2 and 1 samples)")
def in_place(gradients, counts):
    for gradient, count in zip(gradients, counts, strict=True):
        gradient *= count / sum(counts)
    return sum(gradients)


@fault("weighted_mean", "your function raised IndexError: list index out of range (1 gradient, of 3 samples)")
def two_ranks(gradients, counts):
    return (gradients[0] * counts[0] + gradients[1] * counts[1]) / sum(counts)


@fault("weighted_mean", "your function takes (gradients); the exercise calls it with (gradients, counts)")
def no_counts(gradients):
    return sum(gradients)


@fault(
    "weighted_mean",
    "rank 0 raised NotImplementedError: \"softmax_lastdim_kernel_impl\" not implemented for 'Long'",
)
def what_torch_cannot_do(gradients, counts):
    return torch.stack(gradients).T @ torch.tensor(counts).softmax(dim=0)


# --- the sharded server


def cut(flat, n):
    return [flat[start:stop] for start, stop in chunk_bounds(len(flat), n)]


def push(comm, gradient):
    N, r = comm.world_size, comm.rank
    chunks = cut(gradient, N)
    total = chunks[r].clone()
    for k in range(1, N):
        came = torch.empty_like(total)
        comm.exchange(chunks[(r + k) % N], (r + k) % N, came, (r - k) % N)
        total += came
    return total


def pull(comm, parameters):
    N, r = comm.world_size, comm.rank
    chunks = cut(parameters, N)
    for k in range(1, N):
        comm.exchange(chunks[r], (r + k) % N, chunks[(r - k) % N], (r - k) % N)


@right("sharded_step")
def by_hand(comm, parameters, gradient, learning_rate):
    mine = cut(parameters, comm.world_size)[comm.rank]
    mine -= learning_rate * push(comm, gradient)
    pull(comm, parameters)


@right("sharded_step")
def one_pair_at_a_time(comm, parameters, gradient, learning_rate):
    """Send and recv only: the lower rank of each pair sends first."""
    N, r = comm.world_size, comm.rank
    mine, total = cut(parameters, N), cut(gradient, N)[r].clone()
    for other in range(N):
        if other == r:
            continue
        came = torch.empty_like(total)
        for sends in (r < other, r > other):
            if sends:
                comm.send(cut(gradient, N)[other], other)
            else:
                comm.recv(came, other)
        total += came
    mine[r] -= learning_rate * total
    for other in range(N):
        for sends in (r < other, r > other) if other != r else ():
            if sends:
                comm.send(mine[r], other)
            else:
                comm.recv(mine[other], other)


@fault(
    "sharded_step",
    "right parameters, but rank 0 sent 96 bytes where 64 bytes should be (3 ranks, 12 float32)",
)
def by_one_server(comm, parameters, gradient, learning_rate):
    """The server that chokes: right, and (N-1)·S through rank 0."""
    if comm.world_size == 1 or comm.rank > 0:
        if comm.rank > 0:
            comm.send(gradient, 0)
            comm.recv(parameters, 0)
        else:
            parameters -= learning_rate * gradient
        return
    total = gradient.clone()
    for rank in range(1, comm.world_size):
        came = torch.empty_like(total)
        comm.recv(came, rank)
        total += came
    parameters -= learning_rate * total
    for rank in range(1, comm.world_size):
        comm.send(parameters, rank)


@fault("sharded_step", "right parameters, but")
def whole_gradients(comm, parameters, gradient, learning_rate):
    """Everybody gets everybody's whole gradient and updates everything."""
    N, r = comm.world_size, comm.rank
    total = gradient.clone()
    parts = {r: gradient}
    for k in range(1, N):
        parts[(r - k) % N] = torch.empty_like(gradient)
        comm.exchange(gradient, (r + k) % N, parts[(r - k) % N], (r - k) % N)
    total = sum(parts[rank] for rank in range(N))
    parameters -= learning_rate * total


@fault("sharded_step", "right parameters, but rank 0 called torch's all_reduce")
def all_reduced(comm, parameters, gradient, learning_rate):
    total = gradient.clone()
    comm.all_reduce(total)
    parameters -= learning_rate * total


@fault("sharded_step", "wrong parameters: rank 0 ended with", "(2 ranks, 12 float32)")
def only_its_own_gradient(comm, parameters, gradient, learning_rate):
    mine = cut(parameters, comm.world_size)[comm.rank]
    mine -= learning_rate * cut(gradient, comm.world_size)[comm.rank]
    push(comm, gradient)
    pull(comm, parameters)


@fault("sharded_step", "wrong parameters: rank 0 ended with", "(2 ranks, 12 float32)")
def never_pulls(comm, parameters, gradient, learning_rate):
    mine = cut(parameters, comm.world_size)[comm.rank]
    mine -= learning_rate * push(comm, gradient)


@fault("sharded_step", "wrong parameters", "(1 rank, 12 float32)")
def no_learning_rate(comm, parameters, gradient, learning_rate):
    mine = cut(parameters, comm.world_size)[comm.rank]
    mine -= push(comm, gradient)
    pull(comm, parameters)


@fault("sharded_step", "wrong parameters", "(2 ranks, 12 float32)")
def averages(comm, parameters, gradient, learning_rate):
    mine = cut(parameters, comm.world_size)[comm.rank]
    mine -= learning_rate * push(comm, gradient) / comm.world_size
    pull(comm, parameters)


@fault("sharded_step", "wrong parameters", "(2 ranks, 7 float32)")
def even_chunks_only(comm, parameters, gradient, learning_rate):
    N, r = comm.world_size, comm.rank
    size = len(parameters) // N
    mine = parameters[r * size : (r + 1) * size]
    mine -= learning_rate * push(comm, gradient[: size * N])
    pull(comm, parameters[: size * N])


@fault("sharded_step", "right parameters, but on rank 0 `gradient` changed")
def adds_into_the_gradient(comm, parameters, gradient, learning_rate):
    by_hand(comm, parameters, gradient.clone(), learning_rate)
    gradient *= learning_rate


@fault("sharded_step", "it does not end: rank 0 waits in", "(2 ranks")
def everybody_receives_first(comm, parameters, gradient, learning_rate):
    if comm.world_size == 1:
        by_hand(comm, parameters, gradient, learning_rate)
    for other in range(comm.world_size):
        if other != comm.rank:
            comm.recv(torch.empty_like(cut(gradient, comm.world_size)[comm.rank]), other)


# --- the bound


@right("may_pull")
def looks_at_each(version, in_flight, bound):
    pulled = [*in_flight.values(), version]
    return all(version - one + len(pulled) - 1 <= bound for one in pulled)


@right("may_pull")
def by_slots(version, in_flight, bound):
    if not in_flight:
        return True
    left = bound - (version - min(in_flight.values()))
    return left >= len(in_flight)


@fault("may_pull", "with bound 0 an update was 12 updates stale, which is more than the bound")
def no_bound(version, in_flight, bound):
    return True


@fault(
    "may_pull",
    "deadlock: nobody is in flight, so nothing can change, and nobody may pull (version=0, in_flight={}",
)
def never(version, in_flight, bound):
    return False


@fault(
    "may_pull",
    "no update was too stale, but",
    "with bound 1 no more than 1 worker of 3 computed at once, where 2",
)
def one_at_a_time(version, in_flight, bound):
    return not in_flight


@fault("may_pull", "with bound 0 an update was 2 updates stale")
def forgets_those_in_flight(version, in_flight, bound):
    return version - min(in_flight.values(), default=version) <= bound


@fault("may_pull", "with bound 1 an update was 12 updates stale")
def only_counts_workers(version, in_flight, bound):
    return len(in_flight) <= bound


@fault("may_pull", "with bound 0 an update was 1 update stale")
def one_too_many(version, in_flight, bound):
    return version - min(in_flight.values(), default=version) + len(in_flight) <= bound + 1


@fault("may_pull", "deadlock: nobody is in flight")
def one_too_few(version, in_flight, bound):
    return version - min(in_flight.values(), default=version) + len(in_flight) < bound


@fault(
    "may_pull",
    "your function raised ValueError: min() arg is an empty sequence (version=0, in_flight={}, bound=0)",
)
def forgets_the_empty_server(version, in_flight, bound):
    return version - min(in_flight.values()) + len(in_flight) <= bound


@fault("may_pull", "with bound")
def looks_at_the_newest(version, in_flight, bound):
    return version - max(in_flight.values(), default=version) + len(in_flight) <= bound


@fault(
    "may_pull",
    "no update was too stale, but your rule makes workers wait that need not",
    "after 2 updates already",
)
def only_rounds(version, in_flight, bound):
    """Synchronous rounds, whatever the bound: all that are in flight must hold the newest version."""
    if bound < 2:
        return looks_at_each(version, in_flight, bound)
    first = min(in_flight.values(), default=version)
    return len(in_flight) <= bound and (not in_flight or version == first)


@fault(
    "may_pull",
    "no update was too stale, but your rule makes workers wait that need not: with bound 4 it says no where",
    "(version=2, in_flight={1: 0, 3: 0}, bound=4)",
)
def adds_up_all_ages(version, in_flight, bound):
    return not in_flight or sum(version - pulled for pulled in in_flight.values()) + len(in_flight) <= bound


@fault("may_pull", "your function raised ValueError: The truth value of an array", "in_flight={}")
def many_answers(version, in_flight, bound):
    return np.array([True, False])


@fault("may_pull", "your function returned None; expected True or False")
def says_nothing(version, in_flight, bound):
    looks_at_each(version, in_flight, bound)


@fault(
    "may_pull", "your function takes (version, bound); the exercise calls it with (version, in_flight, bound)"
)
def two_arguments(version, bound):
    return version <= bound


# --- the tests


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name):
    verdict = check(name, CATALOGUE[name].solution)
    assert verdict.passed and verdict.attempted and verdict.text.startswith("passed: "), verdict


@pytest.mark.parametrize("name, fn", PLANTED.right_cases())
def test_another_right_answer_passes(name, fn):
    verdict = check(name, fn)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name, fn, said, options", PLANTED.wrong_cases())
def test_a_wrong_answer_is_caught(name, fn, said, options):
    PLANTED.caught(name, fn, said, options)


def test_every_grader_meets_at_least_six_wrong_answers():
    assert all(len(rows) >= 6 for rows in PLANTED.faults.values())


def test_a_verdict_is_the_same_every_time():
    for fn in (no_bound, looks_at_the_newest):
        assert repr(check("may_pull", fn)) == repr(check("may_pull", fn))


def test_a_rule_that_never_answers_does_not_hang_the_notebook():
    def thinks_for_ever(version, in_flight, bound):
        while True:
            pass

    verdict = check("may_pull", thinks_for_ever, timeout=1.0)
    assert verdict.text == "it does not end: your function did not return, and everybody waits for the server"


def test_a_half_written_function_is_no_attempt():
    def half_mean(gradients, counts):
        if len(counts) == 1:
            return gradients[0]
        raise NotImplementedError

    def half_rule(version, in_flight, bound):
        if not in_flight:
            return True
        raise NotImplementedError

    assert (
        repr(check("weighted_mean", half_mean)) == repr(check("may_pull", half_rule)) == "not attempted yet"
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_stub_is_no_failure(name):
    def stub(*arguments):
        """What to do."""
        raise NotImplementedError

    assert repr(check(name, stub)) == "not attempted yet"


def test_what_the_graders_said(note):
    """Not a test of its own: prints the table at the end of the run."""
    note(PLANTED.table())
