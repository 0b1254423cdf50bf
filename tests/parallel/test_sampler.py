"""The sampler: torch's, index for index, and the way back into the middle of an epoch."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

from course_lib.parallel.sampler import DistributedSampler, sampler_indices


def quiet(*args, **kwargs) -> DistributedSampler:
    """A sampler whose warning about empty shares is not the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedSampler(*args, **kwargs)


def team(length: int, num_replicas: int, **kwargs) -> list[DistributedSampler]:
    return [quiet(length, num_replicas, rank, **kwargs) for rank in range(num_replicas)]


# --- torch's, index for index


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 7])
def test_index_for_index_torchs(num_replicas: int, shuffle: bool, drop_last: bool) -> None:
    for length, seed, rank in product([*range(1, 30), 57, 2048], [0, 3], range(num_replicas)):
        torchs = TorchSampler(range(length), num_replicas, rank, shuffle, seed, drop_last)
        ours = quiet(length, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        for epoch in (0, 1, 5):
            torchs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(torchs), (length, seed, rank, epoch)
            assert len(ours) == len(torchs) == len(list(ours))


def test_the_numbers_of_the_docstring() -> None:
    shares = [sampler_indices(2048, 3, rank) for rank in range(3)]
    assert [len(share) for share in shares] == [683, 683, 683]
    times = Counter(i for share in shares for i in share)
    assert len(times) == 2048 and sorted(times.values())[-2:] == [1, 2]
    cut = [sampler_indices(2048, 3, rank, drop_last=True) for rank in range(3)]
    assert [len(share) for share in cut] == [682] * 3 and len({i for share in cut for i in share}) == 2046
    unshuffled = [sampler_indices(3, 7, rank, shuffle=False) for rank in range(7)]
    assert unshuffled == [[0], [1], [2], [0], [1], [2], [0]]


def test_a_forgotten_set_epoch_repeats_the_first_order() -> None:
    sampler = DistributedSampler(57, 3, 1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    list(DistributedSampler(57, 3, 1))
    assert torch.equal(torch.get_rng_state(), state)


# --- resuming


def train(samplers: list[DistributedSampler], batch_size: int, num_steps: int) -> list[list[list[int]]]:
    """`num_steps` steps of all ranks together: step -> rank -> its batch. Loaders read ahead of the steps."""
    data = TensorDataset(torch.arange(samplers[0].length))
    loaders = [DataLoader(data, batch_size, sampler=sampler) for sampler in samplers]
    steps = [[batch[0].tolist() for batch in batches] for batches in zip(*loaders, strict=True)]
    for batches in steps[:num_steps]:
        for sampler in samplers:
            sampler.advance(sum(len(batch) for batch in batches))
    return steps[:num_steps]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [i for batches in steps for batch in batches for i in batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_a_resumed_epoch_is_the_undisturbed_one(num_replicas: int, drop_last: bool) -> None:
    for length, batch_size in [(10, 2), (57, 5), (23, 1), (7, 3)]:
        fresh = lambda n=length: team(n, num_replicas, seed=2, drop_last=drop_last)
        undisturbed = fresh()
        for sampler in undisturbed:
            sampler.set_epoch(3)
        steps = train(undisturbed, batch_size, 100)
        for stopped_after in range(len(steps) + 1):
            before = fresh()
            for sampler in before:
                sampler.set_epoch(3)
            first = train(before, batch_size, stopped_after)
            states = [sampler.state_dict() for sampler in before]
            assert all(state == states[0] for state in states)
            after = fresh()
            for sampler in after:
                sampler.load_state_dict(states[0])
                sampler.set_epoch(3)  # as the loop over the epochs does; it does not begin again
                assert len(sampler) == len(undisturbed[0]) + sum(len(s[0]) for s in steps[stopped_after:])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the epoch that is over
                assert first + train(after, batch_size, 100) == steps


def test_ten_rows_three_ranks_micro_batch_two_restarted_after_six() -> None:
    undisturbed = train(team(10, 3, shuffle=False), 2, 100)
    assert undisturbed == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 0], [8, 1]]]
    restarted = team(10, 3, shuffle=False)
    for sampler in restarted:
        sampler.load_state_dict({**sampler.state_dict(), "position": 6})
    assert train(restarted, 2, 100) == undisturbed[1:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("worlds", [(3, 2), (2, 3), (4, 1), (1, 4), (3, 4, 2), (2, 5, 3, 4)])
def test_with_another_number_of_ranks_no_sample_is_lost(worlds: tuple[int, ...], drop_last: bool) -> None:
    length, state, trained = 57, None, []
    for i, num_replicas in enumerate(worlds):
        samplers = team(length, num_replicas, seed=5, drop_last=drop_last)
        for sampler in samplers:
            sampler.load_state_dict(state or {**sampler.state_dict(), "epoch": 2})
        trained += flat(train(samplers, 2, 2 if i < len(worlds) - 1 else 100))
        state = samplers[0].state_dict()
    times, last = Counter(trained), worlds[-1]
    doubled = sum(times.values()) - len(times)
    if drop_last:
        assert doubled == 0 and length - len(times) <= last - 1
    else:
        assert len(times) == length and doubled <= last - 1 and max(times.values()) <= 2
    order, first = sampler_indices(length, 1, 0, epoch=2, seed=5), worlds[0]
    assert sorted(trained[: 4 * first]) == sorted(order[: 4 * first])


def test_an_epoch_that_is_over_stays_over_for_any_number_of_ranks() -> None:
    samplers = team(10, 3)
    train(samplers, 2, 100)
    state = samplers[0].state_dict()
    assert state["position"] == 12  # the padding counts
    for num_replicas in (1, 2, 3, 4):
        sampler = DistributedSampler(10, num_replicas, 0)
        sampler.load_state_dict(state)
        assert len(sampler) == 0
        with pytest.warns(UserWarning, match=r"epoch 0 has been trained to its end.*set_epoch\(1\)"):
            assert list(sampler) == []
        sampler.set_epoch(1)
        assert list(sampler) == sampler_indices(10, num_replicas, 0, epoch=1)


def test_iterating_is_not_training() -> None:
    sampler = DistributedSampler(10, 2, 0)
    all_of_it = list(sampler)
    assert sampler.state_dict()["position"] == 0 and list(sampler) == all_of_it
    sampler.advance(4)
    assert list(sampler) == all_of_it[2:] and len(sampler) == 3


def test_a_state_survives_a_file_that_may_hold_weights_only() -> None:
    sampler = DistributedSampler(10, 2, 0, seed=4)
    sampler.set_epoch(7)
    sampler.advance(6)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    other = DistributedSampler(10, 5, 3, seed=4)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.epoch, other.position) == (7, 6) and len(other) == 1


# --- what makes no sense


def test_empty_shares_are_announced() -> None:
    with pytest.warns(UserWarning, match="nothing will be trained: drop_last with 3 samples on 7 ranks"):
        sampler = DistributedSampler(3, 7, 2, drop_last=True)
    assert list(sampler) == [] and len(sampler) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedSampler(7, 7, 2, drop_last=True)
        DistributedSampler(3, 7, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((0, 3, 0), ValueError, r"length: expected 1 or more \(the number of samples, as in len\(dataset\)\), got 0"),
        ((TensorDataset(torch.ones(3)), 3, 0), TypeError, r"length: .* got TensorDataset"),
        ((10, 0, 0), ValueError, "num_replicas: expected 1 or more"),
        ((10, 3, 3), ValueError, "rank: expected 0…2 for num_replicas=3, got 3"),
        ((10, 3, -1), ValueError, "rank: expected 0…2 for num_replicas=3, got -1"),
        ((10, 3, None), TypeError, "rank: .* got NoneType"),
        ((10, 2, True), TypeError, "rank: .* got bool"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        DistributedSampler(*arguments)


@pytest.mark.parametrize(
    ("arguments", "start", "sentence"),
    [
        ((10, 2, 5), 0, "rank: expected 0…1"),
        ((10, 2, 0), -3, "start: expected 0 or more"),
        ((0, 2, 0), 0, "length"),
    ],
)
def test_indices_of_no_rank(arguments: tuple[int, ...], start: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sampler_indices(*arguments, start=start)


def test_a_seed_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"seed: expected a whole number .* got float"):
        DistributedSampler(10, 2, 0, seed=0.5)


@pytest.mark.parametrize("num_samples", [2, 15, 9999])
def test_more_than_is_left_or_unequal_shares_cannot_be_trained_on(num_samples: int) -> None:
    sampler = DistributedSampler(10, 3, 1)
    with pytest.raises(
        ValueError, match=r"rank 1: num_samples: expected a multiple of num_replicas=3.*at most 12"
    ):
        sampler.advance(num_samples)
    assert sampler.position == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 11}, "taken with length=11, but this sampler has length=10"),
        ({"seed": 1}, "taken with seed=1, but this sampler has seed=0"),
        ({"shuffle": False}, "taken with shuffle=False, but"),
        ({"drop_last": True}, "taken with drop_last=True, but"),
        ({"position": -3}, r"state\['position'\]: expected 0 or more"),
        ({"position": 10**6}, r"state\['position'\]: expected at most the \d+ samples .* got 1000000"),
        ({"epoch": -1}, r"state\['epoch'\]: expected 0 or more"),
    ],
)
def test_a_state_of_something_else_is_refused(change, sentence: str) -> None:
    sampler = DistributedSampler(10, 3, 1)
    with pytest.raises(ValueError, match=sentence):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert (sampler.epoch, sampler.position) == (0, 0)


def test_a_state_with_something_missing_is_refused() -> None:
    sampler = DistributedSampler(10, 3, 1)
    state = sampler.state_dict()
    del state["position"]
    with pytest.raises(ValueError, match="got no 'position'"):
        sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="epoch: expected 0 or more"):
        sampler.set_epoch(-1)
