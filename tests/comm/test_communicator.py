"""Messages, torch's own collectives, groups and marks, on real ranks."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib import Pool, launch
from course_lib.comm.communicator import Communicator
from course_lib.plan import traffic


def neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


# --- messages


def test_what_a_communicator_knows() -> None:
    def work(comm):
        return (
            comm.rank,
            comm.world_size,
            comm.ranks,
            comm.device.type,
            comm.backend,
            comm.host_of,
            comm.num_hosts,
        )

    for rank, known in enumerate(launch(work, world_size=3, backend="gloo", show="none")):
        assert known == (rank, 3, (0, 1, 2), "cpu", "gloo", (0, 0, 0), 1)


def test_send_and_recv_are_counted_on_both_sides() -> None:
    def work(comm):
        tensor = torch.full((3, 2), float(comm.rank))
        if comm.rank == 0:
            comm.send(tensor, 2)
        elif comm.rank == 2:
            comm.recv(tensor, 0)
        return tensor

    results = launch(work, world_size=3, show="none")
    assert [tensor.unique().item() for tensor in results] == [0, 1, 0]
    rows = [list(ledger) for ledger in results.ledger]
    (sent,), nothing, (received,) = rows
    assert (sent.op, sent.peer, sent.bytes_sent, sent.bytes_received, sent.messages) == ("send", 2, 24, 0, 1)
    assert (received.op, received.peer, received.bytes_received, received.messages) == ("recv", 0, 24, 0)
    assert nothing == [] and sent.exact and sent.group == (0, 1, 2)
    assert 0 < sent.start_s < received.end_s and sent.start_s <= sent.end_s  # one clock for all ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchange_around_a_ring_does_not_deadlock(world_size: int) -> None:
    def work(comm):
        right, left = neighbours(comm)
        came = torch.empty(3_000_000)
        comm.exchange(torch.full((3_000_000,), float(comm.rank)), right, came, left)
        return came.unique().tolist() == [left]

    results = launch(work, world_size=world_size, show="none")
    assert all(results)
    for rank, ledger in enumerate(results.ledger):
        (row,) = ledger
        assert (row.op, row.bytes_sent, row.bytes_received, row.messages) == (
            "exchange",
            12_000_000,
            12_000_000,
            1,
        )
        assert row.peer == (rank + 1) % world_size


def test_views_travel_as_the_elements_they_show() -> None:
    """gloo would send the memory behind a view; both ends of the message must be the elements."""

    def work(comm):
        memory = torch.arange(24.0).reshape(4, 6) + 100 * comm.rank
        came = torch.full((4, 6), -1.0)
        right, left = neighbours(comm)
        comm.exchange(memory.T[1:5:2], right, came.T[::3], left)  # shape (2, 4) both
        handle = comm.exchange(memory[:, 5], right, came[:, 5], left, async_op=True)
        handle.wait()
        return came

    for rank, came in enumerate(launch(work, world_size=2, show="none")):
        source = torch.arange(24.0).reshape(4, 6) + 100 * (1 - rank)
        right = torch.full((4, 6), -1.0)
        right[:, 0], right[:, 3], right[:, 5] = source[:, 1], source[:, 3], source[:, 5]
        assert torch.equal(came, right)


def test_an_empty_message_is_a_message() -> None:
    def work(comm):
        right, left = neighbours(comm)
        comm.exchange(torch.empty(0), right, torch.empty(0), left)

    for ledger in launch(work, world_size=2, show="none").ledger:
        assert (ledger.bytes_sent, ledger.bytes_received, ledger.messages) == (0, 0, 1)


def test_messages_between_two_ranks_arrive_in_order() -> None:
    def work(comm):
        right, left = neighbours(comm)
        came = [torch.empty(2) for _ in range(8)]
        sent = [torch.full((2,), float(i)) for i in range(8)]
        handles = [comm.exchange(a, right, b, left, async_op=True) for a, b in zip(sent, came, strict=True)]
        for handle in handles:
            handle.wait()
        return [int(tensor[0]) for tensor in came]

    assert launch(work, world_size=2, show="none") == [list(range(8))] * 2


def test_a_handle_is_one_row_when_waited_for_and_only_then() -> None:
    def work(comm):
        right, left = neighbours(comm)
        handle = comm.exchange(torch.ones(4), right, torch.empty(4), left, async_op=True)
        before = len(comm.ledger)
        handle.wait()
        handle.wait()
        return before, len(comm.ledger)

    assert launch(work, world_size=2, show="none") == [(0, 1)] * 2


def test_expected_receives_are_those_of_the_exchanges_that_follow() -> None:
    def work(comm):
        right, left = neighbours(comm)
        came = [torch.empty(3) for _ in range(4)]
        comm.expect(came[0], left)
        for i in range(4):
            if i < 3:
                comm.expect(came[i + 1], left)  # one ahead, as the ring does
            comm.exchange(torch.full((3,), 10.0 * comm.rank + i), right, came[i], left)
        return [tensor.unique().item() for tensor in came]

    results = launch(work, world_size=3, show="none")
    assert results == [[10.0 * left + i for i in range(4)] for left in (2, 0, 1)]
    for ledger in results.ledger:
        assert [(row.op, row.bytes_sent, row.bytes_received) for row in ledger] == [("exchange", 12, 12)] * 4


BAD_CALLS = [
    (lambda comm: comm.send(torch.ones(1), comm.rank), "ValueError", "which is this rank itself"),
    (lambda comm: comm.send(torch.ones(1), 2), "ValueError", "send(to): expected a rank"),
    (lambda comm: comm.recv(torch.ones(1), -1), "ValueError", "recv(source): expected a rank"),
    (lambda comm: comm.recv(torch.ones(1), "1"), "ValueError", "0…1, got '1'"),
    (
        lambda comm: comm.send([1.0], 1 - comm.rank),
        "TypeError",
        "send(tensor): expected a tensor, got list",
    ),
    (
        lambda comm: comm.send(torch.ones(1, device="meta"), 1 - comm.rank),
        "ValueError",
        "got one on meta",
    ),
    (
        lambda comm: comm.exchange(torch.ones(1), 1 - comm.rank, None, 1 - comm.rank),
        "TypeError",
        "exchange(recv)",
    ),
    (
        lambda comm: comm.expect(torch.ones(2, 2).T, 1 - comm.rank),
        "ValueError",
        "expect(recv): expected a contiguous",
    ),
    (lambda comm: comm.expect(torch.ones(2), comm.rank), "ValueError", "expect(source)"),
    (lambda comm: comm.broadcast(torch.ones(1), root=2), "ValueError", "broadcast(root)"),
    (lambda comm: comm.all_reduce(torch.ones(1, dtype=torch.int64), "avg"), "ValueError", "average"),
    (lambda comm: comm.all_reduce(torch.ones(1), "total"), "ValueError", "sum, avg, max, min, product"),
    (lambda comm: comm.reduce_scatter(torch.ones(2), torch.ones(3)), "ValueError", "2 times as long"),
    (
        lambda comm: comm.all_gather(torch.ones(3), torch.ones(2)),
        "ValueError",
        "3 x float32 and 2 x float32",
    ),
    (copy.copy, "TypeError", "a Communicator cannot be copied or pickled"),
    (lambda comm: comm.subgroup([1, 0]), "ValueError", "ascending"),
    (lambda comm: comm.subgroup([0, 2]), "ValueError", "got [0, 2]"),
    (lambda comm: comm.subgroup([]), "ValueError", "got []"),
]


def test_bad_arguments_name_rank_and_argument() -> None:
    def work(comm):
        errors = []
        for call, _, _ in BAD_CALLS:
            try:
                call(comm)
            except (TypeError, ValueError) as error:
                errors.append((type(error).__name__, str(error)))
            else:
                errors.append(("nothing", "was raised"))
        return errors

    for rank, errors in enumerate(launch(work, world_size=2, show="none")):
        for (kind, message), (_, right_kind, words) in zip(errors, BAD_CALLS, strict=True):
            assert kind == right_kind and words in message, message
            assert f"rank {rank}: " in message or message.startswith("op: "), message


# --- torch's own collectives


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torch_s_collectives(world_size: int) -> None:
    def work(comm):
        warnings.simplefilter("error")  # no deprecated name is called, whatever the version
        N, results = comm.world_size, {}
        for op in ("sum", "avg", "max", "min"):
            results[op] = torch.arange(3.0) * (comm.rank + 1)
            comm.all_reduce(results[op], op)
        results["scattered"] = torch.empty(2)
        comm.reduce_scatter(results["scattered"], torch.arange(2.0 * N) + comm.rank, "avg")
        results["gathered"] = torch.empty(2 * N, 1)
        comm.all_gather(results["gathered"], torch.full((2, 1), float(comm.rank)))
        results["from last"] = torch.full((2,), comm.rank)
        comm.broadcast(results["from last"], root=N - 1)
        comm.barrier()
        return results

    N = world_size
    results = launch(work, world_size=N, show="none")
    for rank, got in enumerate(results):
        base = torch.arange(3.0)
        assert torch.equal(got["sum"], base * sum(range(1, N + 1)))
        torch.testing.assert_close(got["avg"], base * sum(range(1, N + 1)) / N)
        assert torch.equal(got["max"], base * N) and torch.equal(got["min"], base)
        torch.testing.assert_close(got["scattered"], torch.arange(2.0) + 2 * rank + (N - 1) / 2)
        assert torch.equal(got["gathered"], torch.arange(float(N)).repeat_interleave(2).reshape(2 * N, 1))
        assert got["from last"].tolist() == [N - 1] * 2


def test_their_rows_are_formulas_and_say_so() -> None:
    def work(comm):
        comm.all_reduce(torch.ones(10))
        comm.reduce_scatter(torch.ones(2), torch.ones(6))
        comm.all_gather(torch.ones(6), torch.ones(2))
        comm.broadcast(torch.ones(5), root=1)
        comm.barrier()

    for rank, ledger in enumerate(launch(work, world_size=3, show="none").ledger):
        rows = {row.op: (row.bytes_sent, row.bytes_received) for row in ledger}
        assert rows == {
            "all_reduce": traffic.ring_all_reduce_bytes(3, 10)[rank],
            "reduce_scatter": (16, 16),
            "all_gather": (16, 16),
            "broadcast": traffic.chain_broadcast_bytes(3, 5, root=1)[rank],
            "barrier": (0, 0),
        }
        assert not any(row.exact for row in ledger) and all(row.peer is None for row in ledger)
        assert [row.messages for row in ledger][:3] == [4, 2, 2]


def test_they_take_views_and_parameters() -> None:
    def work(comm):
        memory = torch.zeros(3, 4)
        memory[:, 1] = torch.arange(3.0) + comm.rank
        comm.all_reduce(memory[:, 1])
        comm.broadcast(memory.T[2:4], root=0)
        parameter = torch.nn.Parameter(torch.ones(4).reshape(2, 2).T * (comm.rank + 1))
        comm.all_reduce(parameter, "avg")
        comm.all_gather(memory.T[:2], torch.full((3,), comm.rank + 5.0))
        return memory, parameter.detach()

    for memory, parameter in launch(work, world_size=2, show="none"):
        assert memory.T.tolist() == [[5.0] * 3, [6.0] * 3, [0.0] * 3, [0.0] * 3]
        assert parameter.tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_async_collectives_note_their_own_end() -> None:
    """The row ends when the communication ended, not when somebody waited: a trace shows what was hidden."""

    def work(comm):
        tensors = [torch.full((5,), comm.rank + 1.0), torch.empty(2), torch.empty(10), torch.ones(2)]
        handles = [
            comm.all_reduce(tensors[0], "avg", async_op=True),
            comm.all_gather(tensors[2], torch.ones(5), async_op=True),
            comm.broadcast(tensors[3], async_op=True),
        ]
        scatter = comm.reduce_scatter(tensors[1], torch.ones(4), async_op=True)
        while any(handle._end_s is None for handle in handles):
            time.sleep(0.01)  # the test's own timeout ends a loop that would not
        before_wait = comm.now()
        for handle in [*handles, scatter]:
            handle.wait()
        assert all(row.end_s <= before_wait for row in list(comm.ledger)[:3]), str(comm.ledger)
        return tensors[0].tolist(), tensors[1].tolist()

    assert launch(work, world_size=2, show="none") == [([1.5] * 5, [2.0] * 2)] * 2


# --- groups


def test_subgroups_share_the_ledger_and_speak_in_their_own_ranks() -> None:
    def work(comm):
        evens = comm.subgroup([0, 2])
        if comm.rank % 2:
            assert evens is None
            return None
        assert comm.subgroup(range(0, 3, 2)) is evens and comm.subgroup(range(4)) is comm
        came = torch.empty(1)
        evens.exchange(torch.ones(1) * comm.rank, 1 - evens.rank, came, 1 - evens.rank)
        evens.all_reduce(came)
        alone = evens.subgroup([evens.rank])
        alone.all_reduce(came)
        assert evens.ledger is comm.ledger and evens.trace is comm.trace and alone.world_size == 1
        return evens.rank, evens.ranks, came.item()

    results = launch(work, world_size=4, show="none")
    assert results == [(0, (0, 2), 2.0), None, (1, (0, 2), 2.0), None]
    assert [row.peer for row in results.ledger[0]] == [2, None, None]  # global ranks
    assert {row.group for row in results.ledger[2]} == {(0, 2), (2,)}


def test_overlapping_subgroups_in_any_order() -> None:
    """Each rank is in another number of groups, the smallest first."""

    def run(comm):
        sums = []
        for ranks in ([0, 1], [1, 2], [0, 1, 2], [2, 3], [0, 1, 2, 3], [0, 2]):
            if group := comm.subgroup(ranks):
                tensor = torch.tensor([float(comm.rank)], device=comm.device)
                group.all_reduce(tensor)
                sums.append((ranks, tensor.item()))
        mesh = init_device_mesh("cpu", (2, 2))  # groups that all ranks make, after groups that only some made
        dist.all_reduce(tensor, group=mesh.get_group(1))
        return sums

    for rank, sums in enumerate(launch(run, world_size=4, timeout=10, show="none")):
        assert all(total == sum(ranks) for ranks, total in sums) and len(sums) == (4, 4, 5, 2)[rank]


def test_hosts_of_a_subgroup() -> None:
    def work(comm):
        whole = Communicator(comm.group, host_of=[7, 7, 9])
        part = whole.subgroup([1, 2]) if comm.rank else whole
        return part.host_of, part.num_hosts

    assert launch(work, world_size=3, show="none") == [((7, 7, 9), 2), ((7, 9), 2), ((7, 9), 2)]


def test_a_new_run_on_the_same_ranks_starts_from_nothing() -> None:
    def work(comm):
        pair = comm.subgroup([0, 1])
        pair.exchange(torch.ones(1), 1 - comm.rank, torch.empty(1), 1 - comm.rank)
        with comm.span("work"):
            pass

    with Pool(2, show="none") as pool:
        for _ in range(2):
            results = pool.run(work)
            assert [len(ledger) for ledger in results.ledger] == [1, 1]
            ends = [event.end_s for event in results.trace]
            assert len(ends) == 4 and min(ends) > 0 and max(ends) < 10
            time.sleep(0.05)


# --- marks on the timeline


def test_span_is_an_event_even_if_it_raises() -> None:
    def work(comm):
        with comm.span("forward", layer=3):
            time.sleep(0.02)
        with pytest.raises(KeyError), comm.span("backward", lane="other"):
            raise KeyError

    for rank, event in [(event.rank, event) for event in launch(work, world_size=2, show="none").trace]:
        lane, detail = {"forward": ("compute", {"layer": 3}), "backward": ("other", {})}[event.name]
        assert (event.lane, event.detail) == (lane, detail) and rank in (0, 1)
        assert event.end_s - event.start_s >= (0.02 if event.name == "forward" else 0)


def test_progress_is_told_by_rank_0_only_and_to_its_end() -> None:
    def work(comm):
        told = []
        comm._report = told.append
        items = list(comm.progress((i * i for i in range(5)), total=5, desc="squares"))
        assert items == [0, 1, 4, 9, 16]
        for _ in comm.progress(range(7)):
            break
        return told

    rank_0, rank_1 = launch(work, world_size=2, show="none")
    assert rank_1 == []
    assert rank_0[0] == {"desc": "squares", "n": 0, "total": 5, "done": False}
    ends = [report for report in rank_0 if report["done"]]
    assert [(end["n"], end["total"]) for end in ends] == [(5, 5), (0, 7)]
