"""What goes wrong on the ring backend: which rank did what, and what a rank can see alone is refused where it calls.

A refusal leaves the group good, since nothing was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib import launch
from course_lib.comm import ring_backend
from course_lib.comm.torch_collectives import torch_all_gather, torch_reduce_scatter
from tests.comm.rings import data, fails, hangs, mlp


def comes_late(comm) -> None:
    if comm.rank == 1:
        time.sleep(30)
    dist.all_reduce(torch.ones(4))


def leaves_ddp(comm) -> None:
    model = DistributedDataParallel(mlp())
    loss = model(data()[0]).sum()
    if comm.rank != 1:
        loss.backward()


def other_sizes(comm, call: str) -> None:
    tensor = torch.ones(4 + comm.rank // 2)
    comm.all_reduce(tensor) if call == "comm" else dist.all_reduce(tensor)


def other_kinds(comm) -> None:
    tensor = torch.ones(4)
    dist.broadcast(tensor, 0) if comm.rank == 0 else dist.all_reduce(tensor)


def test_a_rank_that_does_not_come_is_named():
    sentence = hangs(comes_late).sentence
    assert "ranks 0 and 2 are waiting in all_reduce of 4 x float32 sum (collective 1)" in sentence
    assert "but rank 1 is computing" in sentence


def test_a_rank_that_leaves_ddp_is_named():
    sentence = hangs(leaves_ddp).sentence
    assert "all_reduce of 1730 x float32 sum" in sentence
    assert "but rank 1 is finished: its function returned" in sentence


@pytest.mark.parametrize("call", ["dist", "comm"])
def test_other_sizes_are_reported_and_do_not_crash(call):
    assert hangs(other_sizes, call).sentence == (
        "What does not match: as collective 1, ranks 0 and 1 called all_reduce of 4 x float32 sum, "
        "but rank 2 called all_reduce of 5 x float32 sum."
    )


def test_other_collectives_are_reported():
    assert "rank 0 called broadcast of 4 x float32 from 0, but ranks 1 and 2 called all_reduce" in (
        hangs(other_kinds).sentence
    )


def raises_meanwhile(comm) -> None:
    if comm.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        raise KeyError("of rank 0")
    time.sleep(30)


def test_a_rank_that_raises_while_a_collective_waits_is_the_cause():
    error = fails(raises_meanwhile)
    assert (error.rank, error.exc_type) == (0, "KeyError")


def gathers_other_lengths(comm) -> None:
    mine = torch.ones(1 + comm.rank // 2)
    dist.gather(mine, [torch.ones(1)] * 3 if comm.rank == 0 else None)


def lists_other_lengths(comm) -> None:
    lengths = [1, 3] if comm.rank == 0 else [3, 1]
    dist.all_gather([torch.empty(n) for n in lengths], torch.ones(1))


def swaps_other_lengths(comm) -> None:
    given = [2, 2] if comm.rank == 0 else [3, 2]  # rank 0 expects 2 from rank 1, which sends 3
    dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(n) for n in given])


def test_lengths_that_differ_between_ranks_are_reported():
    sentence = hangs(gathers_other_lengths).sentence  # rank 1 only sends, and may have returned
    assert "called gather of 1 x float32 to 0, but rank 2 called gather of 2 x float32 to 0" in sentence
    assert "rank 0 called all_gather of 1 + 3 x float32, but rank 1 called all_gather of 3 + 1 x float32" in (
        hangs(lists_other_lengths, world_size=2).sentence
    )
    message = fails(swaps_other_lengths).exc_message
    assert "3 x float32" in message
    assert "Both ends of a message must have the same length and dtype" in message


# --- what one rank can see alone


def ones(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(length) for length in lengths]


def wrong_lengths(r: int) -> Iterator[tuple[Callable, str]]:
    """Each rank is the root, where there is one: so both refuse."""
    one, expanded = torch.ones(1), torch.ones(1).expand(4)
    yield lambda: dist.gather(one, ones(3, 3), r), "gather(tensor_list): expected tensor 0 with shape (1,)"
    yield lambda: dist.gather(one, ones(1), r), "gather(tensor_list): expected 2 tensors, one for each rank"
    yield (
        lambda: dist.scatter(torch.ones(3), ones(3, 1), r),
        "scatter(tensor_list): expected tensor 1 with shape (3,)",
    )
    yield (
        lambda: dist.scatter(one, ones(1, 1, 1), r),
        "scatter(tensor_list): expected 2 tensors, one for each rank",
    )
    yield (
        lambda: dist.all_to_all(ones(3, 3), ones(1, 1)),
        "all_to_all: expected the tensor for this rank itself",
    )
    yield lambda: dist.all_to_all(ones(1), ones(1, 1)), "all_to_all(tensor_list): expected 2 tensors"
    yield lambda: dist.all_to_all(ones(1, 1), ones(1)), "all_to_all(tensor_list): expected 2 tensors"
    yield (
        lambda: dist.reduce_scatter(torch.ones(2), ones(1, 3)),
        "reduce_scatter(tensor_list): expected tensor 0",
    )
    yield lambda: dist.reduce_scatter(one, ones(1)), "reduce_scatter(tensor_list): expected 2 tensors"
    yield lambda: dist.group.WORLD.allgather([[one]], [one]), "all_gather(tensor_list): expected 2 tensors"
    yield lambda: dist.all_gather(ones(2, 2), one), "this rank's place as long as what it gives, 1 elements"
    yield (
        lambda: torch_reduce_scatter(torch.ones(2), torch.ones(5)),
        "reduce_scatter(out, tensor): expected the same dtype, and one tensor 2 times as long",
    )
    yield (
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [1, 2]),
        "expected 2 sizes that add up to the tensor's length along dim 0, 4; got [1, 2]",
    )
    for out, tensor in ((torch.ones(2, 2), torch.ones(2, 3)), (torch.ones(()), torch.ones(()))):
        yield (
            lambda out=out, tensor=tensor: dist.all_to_all_single(out, tensor),
            "all_to_all_single(out, tensor): expected shapes alike but for dim 0",
        )
    for call in (
        lambda: dist.all_reduce(expanded),
        lambda: dist.reduce(expanded, 0),
        lambda: dist.broadcast(expanded, 0),
        lambda: torch_reduce_scatter(expanded, torch.ones(8)),
        lambda: torch_all_gather(expanded, torch.ones(2)),
        lambda: dist.all_gather([expanded] * 2, torch.ones(4)),
        lambda: dist.gather(torch.ones(4), [expanded] * 2, r),
        lambda: dist.scatter(expanded, ones(4, 4), r),
        lambda: dist.all_to_all([expanded] * 2, ones(4, 4)),
    ):
        yield (
            call,
            "(tensor): the result is written there, but its elements share memory: shape (4,), strides (0,)",
        )


def other_wrong_arguments(r: int) -> Iterator[tuple[Callable, str]]:
    two, whole = torch.ones(2), torch.ones(2, dtype=torch.int64)
    scaled = dist._make_nccl_premul_sum(2.0)
    yield lambda: dist.all_reduce(two, dist.ReduceOp.BAND), "op: torch cannot make the band of torch.float32"
    yield (
        lambda: dist.all_reduce(two.to(torch.float8_e4m3fn)),
        "op: torch cannot make the sum of torch.float8_e4m3fn",
    )
    yield lambda: dist.all_reduce(whole, dist.ReduceOp.AVG), "all_reduce: op: the average of torch.int64"
    yield (
        lambda: dist.all_reduce(two, scaled),
        "PREMUL_SUM is for NCCL alone; multiply the tensor by the factor",
    )
    yield lambda: dist.all_reduce_coalesced([]), "all_reduce_coalesced(tensors): expected at least one tensor"
    yield (
        lambda: dist.all_reduce(torch.ones(2, 2).to_sparse()),
        "dense tensors on the CPU, got torch.sparse_coo on cpu",
    )
    yield (
        lambda: dist.recv(torch.ones(4)[::2], 1 - r),
        "recv(tensor): expected a contiguous tensor, got strides (2,)",
    )
    yield lambda: dist.isend(two, 1 - r, tag=-1), "send(tag): expected 0 or a greater number, got -1"
    yield lambda: dist.irecv(two, 1 - r, tag=-1), "recv(tag): expected 0 or a greater number, got -1"
    yield lambda: dist.recv(two, tag=-1), "recv(tag): expected 0 or a greater number, got -1"
    yield lambda: dist.broadcast(two, 5), "broadcast(root): expected a rank of the group, 0…1, got 5"
    yield lambda: dist.reduce(two, 5), "reduce(root): expected a rank of the group, 0…1, got 5"
    yield lambda: dist.gather(two, None, 5), "gather(root): expected a rank of the group, 0…1, got 5"
    yield lambda: dist.scatter(two, None, 5), "scatter(root): expected a rank of the group, 0…1, got 5"
    yield lambda: ring_backend.plugged(all_reduce=3).__enter__(), "plugged(all_reduce): expected a function"


def refused(comm, calls: Callable) -> list[tuple[str, str]]:
    found = []
    for call, words in calls(comm.rank):
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            call()
        found.append((str(caught.value), words))
        dist.all_reduce(torch.ones(2))  # nothing was sent, so the group is still good
    return found


@pytest.mark.parametrize("calls", [wrong_lengths, other_wrong_arguments])
def test_wrong_arguments_are_named_and_leave_the_group_good(pools, calls):
    for text, words in pools.run(2, "ring", refused, calls)[1]:
        assert words in text
        assert text.startswith(("rank 1: ", "plugged"))


def a_subgroups_rank(comm) -> str:
    dist.new_group([0, 1])
    pair = dist.new_group([1, 2])
    with pytest.raises(ValueError) if comm.rank else nullcontext() as caught:
        if comm.rank:
            dist.all_reduce(torch.ones(1).expand(2), group=pair)
    return str(caught.value) if comm.rank else ""


def test_a_refusal_in_a_subgroup_names_the_rank_of_the_launch():
    texts = launch(a_subgroups_rank, world_size=3, backend="ring", show="none")
    assert [text[:7] for text in texts[1:]] == ["rank 1:", "rank 2:"]


def not_here(comm) -> dict[str, str]:
    found = {}
    for name in (
        "allgather_coalesced",
        "gather_single",
        "monitored_barrier",
        "split_group",
        "merge_remote_group",
        "new_window",
        "reconfigure",
    ):
        try:
            getattr(dist.group.WORLD, name)()
        except NotImplementedError as error:
            found[name] = str(error)
    return found


def test_what_is_missing_says_what_to_do_instead(pools):
    found = pools.run(1, "ring", not_here)[0]
    assert len(found) == 7
    assert found["monitored_barrier"].startswith(
        'rank 0: monitored_barrier: backend "ring" cannot do this: use dist.barrier'
    )


def test_torch_has_nothing_that_the_group_quietly_leaves_to_gloo():
    """Every method of torch's ProcessGroup that starts a communication is ours, here or in its base."""
    ours = {name for cls in ring_backend.RingGroup.__mro__[:2] for name in vars(cls)}
    words = ("gather", "reduce", "scatter", "broadcast", "alltoall", "all_to_all", "barrier", "send", "recv")
    asked = {name for name in dir(dist.ProcessGroup) if any(word in name for word in words)}
    assert {name for name in asked - ours if not name.startswith("__")} == set()
