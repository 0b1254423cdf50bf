"""The graders of the chapter on DDP, against right answers and against wrong ones, each with one fault."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.classroom.checks import check, show_solution
from course_lib.classroom.checks.catalogue import CATALOGUE
from course_lib.classroom.checks.hints import HINTS
from tests.classroom.planted import Planted

NAMES = ["bucketing", "sampler", "weighted_loss"]
PLANTED = Planted(NAMES)
fault, right = PLANTED.fault, PLANTED.right


# --- buckets


def put(self, parameter):
    """The gradient into its bucket; the bucket."""
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    view = bucket.views[parameter]
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad / self.num_contributing)
    parameter.grad = view
    bucket.num_missing -= 1
    return bucket


def leave_in_turn(self):
    for bucket in self.buckets:
        if bucket.num_missing:
            return
        if bucket.sum is None:
            bucket.sum = self.comm_hook(self.comm, bucket.flat)


@right("bucketing")
def by_the_public_names(self, parameter):
    put(self, parameter)
    leave_in_turn(self)


@right("bucketing")
def without_the_hook(self, parameter):
    put(self, parameter)
    for bucket in self.buckets:
        if bucket.num_missing:
            break
        bucket.sum = bucket.sum or self.comm.all_reduce(bucket.flat, async_op=True)


@right("bucketing")
def with_torchs_own(self, parameter):
    put(self, parameter)
    for bucket in self.buckets:
        if bucket.num_missing:
            break
        bucket.sum = bucket.sum or dist.all_reduce(bucket.flat, async_op=True)


class BroughtBack:
    """A sum that is made in other memory."""

    def __init__(self, handle, source, flat):
        self.handle, self.source, self.flat = handle, source, flat

    def wait(self):
        self.handle.wait()
        self.flat.copy_(self.source[: len(self.flat)])


@fault(
    "bucketing",
    "right averages, but on rank 0 bucket 0 could leave after gradient 2 of 12",
    "(1 r",
)
def all_at_the_end(self, parameter):
    put(self, parameter)
    if not any(bucket.num_missing for bucket in self.buckets):
        leave_in_turn(self)


@fault("bucketing", "right averages, but on rank 0 bucket 1 could leave after gradient 6 of 12")
def one_bucket_late(self, parameter):
    """A bucket leaves when the first gradient of the next one comes."""
    if self.buckets[0].num_missing == 0:
        leave_in_turn(self)
    put(self, parameter)
    if not any(bucket.num_missing for bucket in self.buckets) or self.buckets[0].num_missing == 0 == (
        self.buckets[1].num_missing - len(self.buckets[1].views)
    ):
        leave_in_turn(self)


@fault("bucketing", "right averages, but rank 0 waits for an all-reduce inside your function")
def waits_at_once(self, parameter):
    put(self, parameter)
    before = [bucket for bucket in self.buckets if bucket.sum is None]
    leave_in_turn(self)
    for bucket in before:
        if bucket.sum is not None:
            bucket.sum.wait()


@fault(
    "bucketing", "backward is over, and bucket 0 of 4 has not left: the all-reduce has run to its end inside"
)
def not_asynchronous(self, parameter):
    bucket = put(self, parameter)
    if bucket.num_missing == 0:
        bucket.sum = self.comm.all_reduce(bucket.flat)


@fault(
    "bucketing", "rank 0 started 12 all-reduces in one backward, where there are 4 buckets for 12 gradients"
)
def one_for_each_gradient(self, parameter):
    bucket = put(self, parameter)
    bucket.sum = self.comm_hook(self.comm, bucket.views[parameter])


@fault("bucketing", "on rank 0 bucket 0 left with 1 of its 2 gradients: and the others came too late for it")
def leaves_with_the_first(self, parameter):
    bucket = put(self, parameter)
    if bucket.sum is None:
        bucket.sum = self.comm_hook(self.comm, bucket.flat)


@fault(
    "bucketing",
    "on rank 1 bucket 2 left before bucket 1: the n-th all-reduce of one rank meets the n-th",
    "computes in the other order",
)
def whenever_it_is_full(self, parameter):
    bucket = put(self, parameter)
    if bucket.num_missing == 0:
        bucket.sum = self.comm_hook(self.comm, bucket.flat)


@fault(
    "bucketing",
    "wrong gradient of ",
    "it is this rank's own, divided by 2; the other ranks' are missing",
    "(2 ranks",
)
def never_set(self, parameter):
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    mine = None if parameter.grad is None else parameter.grad / self.num_contributing
    put(self, parameter)
    bucket.flat.view(-1)
    parameter.grad = mine
    leave_in_turn(self)


@fault("bucketing", "wrong gradient of ", "it is this rank's own, not the average", "(2 ranks, six layers)")
def left_as_it_is(self, parameter):
    mine = parameter.grad
    put(self, parameter)
    parameter.grad = mine
    leave_in_turn(self)


@fault(
    "bucketing",
    "wrong gradient of ",
    "it is 2 times too large: the sum was never divided by self.num_contributing",
)
def never_divided(self, parameter):
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    if parameter.grad is None:
        bucket.views[parameter].zero_()
    else:
        bucket.views[parameter].copy_(parameter.grad)
    parameter.grad = bucket.views[parameter]
    bucket.num_missing -= 1
    leave_in_turn(self)


@fault("bucketing", "wrong gradient of ", "it is 2 times too small")
def divided_twice(self, parameter):
    if parameter.grad is not None:
        parameter.grad = parameter.grad / self.num_contributing
    by_the_public_names(self, parameter)


@fault("bucketing", "wrong gradient of ", "it is 0: nothing came into the bucket (1 rank")
def forgets_to_copy(self, parameter):
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    parameter.grad = bucket.views[parameter]
    bucket.num_missing -= 1
    leave_in_turn(self)


@fault(
    "bucketing",
    "wrong gradient of ",
    "added what was in its bucket since the last step: its view must be 0",
    "leaves",
)
def keeps_what_was_there(self, parameter):
    if parameter.grad is None:
        parameter.grad = (
            next(b for b in self.buckets if parameter in b.views).views[parameter] * self.num_contributing
        )
    by_the_public_names(self, parameter)


@fault(
    "bucketing",
    "wrong gradient of ",
    "it is 0 in a step after zero_grad(set_to_none=False), where parameter.grad is the bucket's view already",
    "(1 rank",
)
def overwrites_before_it_reads(self, parameter):
    view = next(bucket for bucket in self.buckets if parameter in bucket.views).views[parameter]
    view.zero_()
    if parameter.grad is not None:
        view.add_(parameter.grad / self.num_contributing)
    parameter.grad = view * self.num_contributing
    by_the_public_names(self, parameter)


@fault(
    "bucketing",
    "your function raised TypeError: ",
    "(here parameter.grad is None: this rank has nothing to add) (2",
)
def never_none(self, parameter):
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    parameter.grad = bucket.views[parameter].copy_(parameter.grad / self.num_contributing)
    bucket.num_missing -= 1
    leave_in_turn(self)


@fault("bucketing", "backward is over, and bucket 0 of 4 has not left: bucket.sum is None")
def never_starts(self, parameter):
    put(self, parameter)


@fault(
    "bucketing",
    "backward is over, and bucket 0 of 4 has not left: its bucket.num_missing is 2, though all of its",
)
def never_counts_down(self, parameter):
    bucket = next(bucket for bucket in self.buckets if parameter in bucket.views)
    missing = bucket.num_missing
    put(self, parameter)
    bucket.num_missing = missing
    leave_in_turn(self)


@fault(
    "bucketing",
    "wrong gradient of ",
    "it was divided by the number of ranks, 2: divide by self.num_contributing, which is smaller inside join()",
    "(2 ranks, self.num_contributing is 1, as where one rank is the last with data)",
)
def divides_by_the_world_size(self, parameter):
    if parameter.grad is not None:
        parameter.grad = parameter.grad * self.num_contributing / self.comm.world_size
    by_the_public_names(self, parameter)


@fault(
    "bucketing",
    "wrong gradient of ",
    "it was divided by the number of ranks, 2",
    "self.num_contributing is 1",
)
def averages_on_the_way(self, parameter):
    if parameter.grad is not None:
        parameter.grad = parameter.grad * self.num_contributing
    put(self, parameter)
    for bucket in self.buckets:
        if bucket.num_missing:
            break
        bucket.sum = bucket.sum or self.comm.all_reduce(bucket.flat, "avg", async_op=True)


@fault("bucketing", "right averages, but rank 0 waits for an all-reduce inside your function")
def waits_with_torchs_own(self, parameter):
    put(self, parameter)
    for bucket in self.buckets:
        if bucket.num_missing:
            break
        if bucket.sum is None:
            bucket.sum = dist.all_reduce(bucket.flat, async_op=True)
            bucket.sum.wait()


@fault(
    "bucketing",
    "right averages, but rank 0 called all_reduce of 22 x float64",
    "where the buckets are an all_reduce of 20 x float64, all_reduce of 20 x float64, all_reduce of 40 x float64 and",
)
def sends_more_than_the_bucket(self, parameter):
    put(self, parameter)
    for bucket in self.buckets:
        if bucket.num_missing:
            break
        if bucket.sum is None:
            longer = torch.cat([bucket.flat, bucket.flat[:2]])
            bucket.sum = BroughtBack(self.comm_hook(self.comm, longer), longer, bucket.flat)


@fault("bucketing", "your function takes (parameter); the exercise calls it with (self, parameter)")
def no_self(parameter):
    parameter.grad.zero_()


# --- the sampler


def permuted(length, epoch, seed, shuffle):
    if not shuffle:
        return list(range(length))
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def dealt(order, num_replicas, rank, drop_last):
    each = len(order) // num_replicas if drop_last else -(-len(order) // num_replicas)
    padded = order * (1 + each * num_replicas // len(order))
    return padded[: each * num_replicas][rank::num_replicas]


@right("sampler")
def as_torch_does(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, drop_last)


@right("sampler")
def as_a_tensor(length, num_replicas, rank, epoch=0, seed=0, shuffle=True, drop_last=False):
    return torch.tensor(
        dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, drop_last), dtype=torch.int64
    )


@right("sampler")
def as_numbers_of_numpy(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    mine = np.array(
        dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, drop_last), dtype=np.int64
    )
    return mine if shuffle else list(mine)


@fault(
    "sampler",
    "the ranks got 4, 3 and 3 samples: one with fewer leaves the loop",
    "(length=10, num_replicas=3, shuf",
)
def not_padded(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return permuted(length, epoch, seed, shuffle)[rank::num_replicas]


@fault(
    "sampler", "every rank got 3 samples; 10 samples, padded so that every rank gets equally many, are 4 each"
)
def always_cut(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, True)


@fault(
    "sampler",
    "every rank got 4 samples; 10 samples, cut so that every rank gets equally many, are 3 each",
    "drop_last",
)
def always_padded(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, False)


@fault("sampler", "the ranks got 1, 1, 1, 1, 1, 1 and 0 samples", "(length=3, num_replicas=7, shuffle=False)")
def padded_once(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    """The beginning is added once: not enough where there are more than twice as many ranks as samples."""
    if drop_last:
        return as_torch_does(
            length, num_replicas, rank, epoch=epoch, seed=seed, shuffle=shuffle, drop_last=True
        )
    order = permuted(length, epoch, seed, shuffle)
    return (order + order[: -length % num_replicas])[rank::num_replicas]


@fault(
    "sampler",
    "all ranks got the same samples, so every gradient is computed several times",
    "num_replicas=2,",
)
def not_dealt(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, shuffle), num_replicas, 0, drop_last)


@fault(
    "sampler",
    "rank 0 got [0, 1, 2, 3, 4, 5] where [0, 2, 4, 6, 8, 10] is right: those are blocks",
    "num_replicas=2",
)
def in_blocks(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = permuted(length, epoch, seed, shuffle)
    each = len(dealt(order, num_replicas, rank, drop_last))
    return [order[i % length] for i in range(rank * each, rank * each + each)]


@fault(
    "sampler",
    "rank 0 got [0, 1, 2, 3, 4, 5, …] where [",
    "not shuffled although shuffle=True (length=12, num_replicas=1, ",
)
def never_shuffled(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, False), num_replicas, rank, drop_last)


@fault(
    "sampler",
    "rank 0 got [",
    "is right: shuffled although shuffle=False (length=12, num_replicas=1, shuffle=F",
)
def always_shuffled(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, True), num_replicas, rank, drop_last)


@fault("sampler", "rank 0 got [11, 10, ", "is right: that is another order although shuffle=False")
def from_the_end(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed, shuffle)[::-1], num_replicas, rank, drop_last)


@fault(
    "sampler",
    "rank 0 got [",
    "that is the order of epoch 0; the generator's seed must be seed + epoch",
    "epoch=1)",
)
def no_epoch(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, 0, seed, shuffle), num_replicas, rank, drop_last)


@fault(
    "sampler",
    "rank 0 got [",
    "that is the order of seed 0; the generator's seed must be seed + epoch",
    "seed=3, epoch=0",
)
def no_seed(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, 0, shuffle), num_replicas, rank, drop_last)


@fault(
    "sampler",
    "3 samples, 1 for one, are",
    " on no rank, while sample ",
    "the ranks do not cut the same order. Every rank must draw",
)
def another_order_on_each_rank(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    return dealt(permuted(length, epoch, seed + rank, shuffle), num_replicas, rank, drop_last)


@fault(
    "sampler",
    "rank 0 got [",
    "the order must be torch.randperm(length, generator=torch.Generator().manual_seed(seed",
)
def the_global_generator(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = torch.randperm(length).tolist() if shuffle else list(range(length))
    return dealt(order, num_replicas, rank, drop_last)


@fault("sampler", "right samples, but your function drew from torch's global generator, so dropout")
def reseeds_everything(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist() if shuffle else list(range(length))
    return dealt(order, num_replicas, rank, drop_last)


@fault("sampler", "rank 0 got [", "each rank shuffles its own share, so a sample never changes its rank")
def shuffles_its_share(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    share = dealt(list(range(length)), num_replicas, rank, drop_last)
    return [share[i] for i in permuted(len(share), epoch, seed, shuffle)]


@fault(
    "sampler",
    "rank 1 got [1, 4, 7, 9] where [1, 4, 7, 0] is right: the padding must be the beginning of the order",
)
def padded_with_the_last(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = permuted(length, epoch, seed, shuffle)
    return dealt(
        order + (0 if drop_last else -length % num_replicas) * order[-1:], num_replicas, rank, drop_last
    )


@fault("sampler", "rank 0 got [1, 4, 7] where [0, 3, 6] is right: drop_last leaves out the end of the order")
def drops_the_first(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = permuted(length, epoch, seed, shuffle)
    cut = order[length % num_replicas :] if drop_last and length >= num_replicas else order
    return dealt(cut, num_replicas, rank, drop_last)


@fault("sampler", "rank 0 got index 12, which no sample has (length=12, num_replicas=1")
def from_one(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = [1 + i for i in permuted(length, epoch, seed, shuffle)]
    return dealt(order, num_replicas, rank, drop_last)


@fault("sampler", "your function returned None; expected a list of indices (length=12")
def says_nothing(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    dealt(permuted(length, epoch, seed, shuffle), num_replicas, rank, drop_last)


@fault(
    "sampler",
    "your function raised IndexError: list index out of range (length=10, num_replicas=3, shuffle=False)",
)
def no_wrapping(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
    order = permuted(length, epoch, seed, shuffle)
    return [order[i] for i in range(rank, length + (-length % num_replicas), num_replicas)]


@fault(
    "sampler",
    "your function takes (length, num_replicas, rank); the exercise calls it with (length, num_replicas, ",
)
def without_options(length, num_replicas, rank):
    return dealt(list(range(length)), num_replicas, rank, False)


# --- the weighted loss


@right("weighted_loss")
def in_floats(comm, loss_sum, count):
    total = torch.tensor(float(count))
    comm.all_reduce(total)
    return loss_sum * (comm.world_size / total.item())


@right("weighted_loss")
def by_gathering(comm, loss_sum, count):
    counts = torch.empty(comm.world_size)
    comm.all_gather(counts, torch.tensor([float(count)]))
    return comm.world_size * loss_sum / counts.sum()


@right("weighted_loss")
def with_torchs_own_sum(comm, loss_sum, count):
    total = torch.tensor(count)
    dist.all_reduce(total)
    return dist.get_world_size() * loss_sum / total


@right("weighted_loss")
def with_torchs_own_gathering(comm, loss_sum, count):
    counts = [torch.empty(1) for _ in range(comm.world_size)]
    dist.all_gather(counts, torch.tensor([float(count)]))
    return comm.world_size * loss_sum / sum(counts).item()


@right("weighted_loss")
def with_a_factor_in_float32(comm, loss_sum, count):
    total = torch.tensor([float(count)])
    comm.all_reduce(total)
    return (comm.world_size / total * loss_sum).sum()


@fault(
    "weighted_loss",
    "wrong gradient: nan where the mean over all samples is 1.25 (1 rank with the losses [0.5",
)
def never_a_number(comm, loss_sum, count):
    return in_floats(comm, loss_sum, count) * float("nan")


@fault(
    "weighted_loss",
    "wrong gradient: 2.5 where the mean over all samples is 1.75: that is the mean of the ranks'",
    "(2",
)
def mean_of_means(comm, loss_sum, count):
    return loss_sum / max(count, 1)


@fault("weighted_loss", "your function raised ZeroDivisionError", "[2, 6], [] and [1, 9, 7]")
def divides_by_its_count(comm, loss_sum, count):
    total = torch.tensor(count)
    comm.all_reduce(total)
    return loss_sum * (1 / count) * count * comm.world_size / total


@fault(
    "weighted_loss", "right gradient, but a rank without samples divides 0 by 0, and returned NaN", "(3 ranks"
)
def nan_from_nothing(comm, loss_sum, count):
    mean = loss_sum / torch.tensor(count)
    total = torch.tensor(count)
    comm.all_reduce(total)
    return mean * count * comm.world_size / total


@fault(
    "weighted_loss",
    "wrong gradient: 0.875 where",
    "that is 2 times too small: DDP divides the sum",
    "(2 ranks",
)
def no_world_size(comm, loss_sum, count):
    total = torch.tensor(count)
    comm.all_reduce(total)
    return loss_sum / total


@fault("weighted_loss", "wrong gradient: 3.5 where", "that is 2 times too large (2 ranks")
def world_size_twice(comm, loss_sum, count):
    return in_floats(comm, loss_sum, count) * comm.world_size


@fault(
    "weighted_loss",
    "wrong gradient: 3.75 where",
    "that is the sum of the losses: loss_sum is a sum already, so it needs no weight",
)
def just_the_sum(comm, loss_sum, count):
    return loss_sum * 1


@fault(
    "weighted_loss",
    "wrong gradient: 3.75 where",
    "that is the sum of the losses: loss_sum is a sum already, so it needs no weight",
)
def weighted_twice(comm, loss_sum, count):
    return in_floats(comm, loss_sum, count) * count


@fault(
    "weighted_loss",
    "right gradient, but the mean of the ranks' losses is 3.5 where all samples have 1.75",
    "(2 ranks",
)
def reduces_the_loss_itself(comm, loss_sum, count):
    comm.all_reduce(loss_sum)
    return in_floats(comm, loss_sum, count)


@fault(
    "weighted_loss", "the tensor that your function returned knows nothing of the model any more", "(1 rank"
)
def detached(comm, loss_sum, count):
    return in_floats(comm, loss_sum.detach(), count)


@fault("weighted_loss", "your function returned a value of type float; expected the loss, a tensor")
def a_number(comm, loss_sum, count):
    return in_floats(comm, loss_sum, count).item()


@fault(
    "weighted_loss",
    "it does not end: your function waits on ranks 0 and 2 in all_reduce, and not all",
    timeout=2.0,
)
def leaves_when_empty(comm, loss_sum, count):
    return loss_sum if count == 0 else in_floats(comm, loss_sum, count)


@fault(
    "weighted_loss", "your function takes (comm, loss); the exercise calls it with (comm, loss_sum, count)"
)
def no_count(comm, loss):
    return loss


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


def test_every_grader_meets_at_least_ten_wrong_answers_and_has_three_hints():
    assert all(len(rows) >= 10 for rows in PLANTED.faults.values())
    assert all(len(HINTS[name]) >= 3 for name in NAMES)


def test_a_verdict_is_the_same_every_time():
    for name, fn in [("weighted_loss", mean_of_means), ("bucketing", never_divided)]:
        assert repr(check(name, fn)) == repr(check(name, fn))


def test_what_the_overlap_is_judged_by_is_told_for_each_rank():
    verdict = check("bucketing", all_at_the_end)
    assert verdict.details == (
        "rank 0: bucket 0 left after gradient 12, bucket 1 left after gradient 12, bucket 2 left after gradient 12, "
        "bucket 3 left after gradient 12 of 12",
    )


def test_a_sampler_that_never_ends_does_not_hang_the_notebook():
    def thinks_for_ever(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
        while True:
            pass

    verdict = check("sampler", thinks_for_ever, timeout=0.5)
    assert verdict.text == "it does not end: your function did not return"


def test_a_generator_that_never_ends_is_cut():
    def for_ever(length, num_replicas, rank, *, epoch, seed, shuffle, drop_last):
        while True:
            yield random.Random(0).randrange(length)

    assert check("sampler", for_ever).text.startswith("every rank got 120 samples; 12 samples, padded")


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_stub_is_no_failure(name):
    def stub(*arguments, **options):
        """What to do."""
        raise NotImplementedError

    def half(*arguments, **options):
        if options.get("unheard_of"):
            return None
        raise NotImplementedError

    assert repr(check(name, stub)) == repr(check(name, half)) == "not attempted yet"


@pytest.mark.parametrize(
    "name, shown",
    [
        (
            "bucketing",
            ["# course_lib/parallel/ddp/bucketed.py", "def gradient_ready(self", "def _launch_full(self"],
        ),
        ("sampler", ["# course_lib/parallel/sampler.py", "def sampler_indices(", "def _share("]),
        ("weighted_loss", ["# course_lib/parallel/ddp/weighting.py", "def weighted_loss("]),
    ],
)
def test_the_solution_is_the_librarys(name, shown, capsys):
    show_solution(name)
    printed = capsys.readouterr().out
    assert all(f"\n{part}" in f"\n{printed}" for part in shown)


def test_what_the_graders_said(note):
    """Not a test of its own: prints the table at the end of the run."""
    note(PLANTED.table())
