"""The graders' parts, one by one, and a check in a real notebook kernel. Wrong answers: `test_checks_faults.py`."""

from __future__ import annotations

import threading

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

from course_lib.classroom.checks import Verdict, check, hint, show_solution
from course_lib.classroom.checks.cases import OP_CASES, REDUCE_CASES, Case, place, place_strided
from course_lib.classroom.checks.catalogue import CATALOGUE
from course_lib.classroom.checks.costs import longest_way
from course_lib.classroom.checks.diary import CaseLog, Message, as_tensor
from course_lib.classroom.checks.endings import clean, size_mismatch
from course_lib.classroom.checks.exercises import EXERCISES
from course_lib.classroom.checks.grader import is_stub
from course_lib.classroom.checks.guidance import close_hints
from course_lib.classroom.checks.hints import HINTS
from course_lib.classroom.checks.verdict import joined, plural

# --- which function, which exercise


def my_ring_all_reduce(comm, tensor, op="sum"):
    """Only a docstring."""


def test_a_name_in_any_order_or_none():
    for arguments in (
        ("ring_all_reduce", my_ring_all_reduce),
        (my_ring_all_reduce, "ring_all_reduce"),
        (my_ring_all_reduce,),
    ):
        assert repr(check(*arguments)) == "not attempted yet"


def test_unknown_names_list_the_known_ones():
    for call in (
        lambda: check("ring", my_ring_all_reduce),
        lambda: check(print),
        lambda: hint("x"),
        lambda: show_solution(3),
    ):
        with pytest.raises(
            ValueError, match=r"there is no exercise .*: ping_pong, pass_it_on, ring_all_reduce, ring_reduce"
        ):
            call()
    with pytest.raises(TypeError, match="expected a function, as in check"):
        check("ring_all_reduce")


# --- stubs


def test_what_is_a_stub():
    captured = 1

    def dots(comm): ...
    def nothing(comm):
        pass

    def not_yet(comm):
        """Do it."""
        raise NotImplementedError("your turn")

    def returns(comm):
        return captured

    def works(comm):
        comm.barrier()

    def raises_later(comm):
        comm.barrier()
        raise NotImplementedError

    assert [is_stub(fn) for fn in (dots, nothing, not_yet)] == [True] * 3
    assert [is_stub(fn) for fn in (returns, works, raises_later, print)] == [False] * 4


def test_a_half_written_stub_is_not_attempted():
    def half(comm, tensor):
        if comm.world_size == 1:
            return
        raise NotImplementedError

    verdict = check("ring_all_reduce", half)
    assert not verdict.attempted and not verdict.passed and repr(verdict) == "not attempted yet"


# --- what cannot even begin


def test_something_that_cannot_be_sent_is_a_verdict():
    lock = threading.Lock()

    def locked(comm, tensor):
        with lock:
            pass

    verdict = check("ring_all_reduce", locked)
    assert verdict.attempted and not verdict.passed
    assert verdict.text.startswith("your function cannot be sent to the ranks: ") and "lock" in verdict.text


def test_the_parameters_are_looked_at_first():
    verdict = check("ring_reduce_scatter", lambda comm, tensor: comm.barrier())
    assert (
        verdict.text == "your function takes (comm, tensor); the exercise calls it with (comm, out, tensor)"
    )


def test_a_required_op_is_passed():
    def with_op(comm, tensor, op):
        assert op in ("sum", "avg", "max")
        comm.all_reduce(tensor, op)

    assert check("ring_all_reduce", with_op).text.startswith(
        "right sum, but rank 0 called torch's all_reduce"
    )


def test_the_same_function_gets_the_same_characters():
    def two_faults(comm, tensor):
        raise ValueError(f"{object()} on {comm.rank}")

    first, second = (repr(check("tree_all_reduce", two_faults)) for _ in range(2))
    assert first == second and "<object object at 0x...> on 0" in first


# --- verdicts and words


def test_a_verdict_prints_its_sentence_and_what_each_rank_did():
    assert (
        repr(Verdict(False, True, "wrong", ("rank 0: a", "rank 1: b"))) == "wrong\n  rank 0: a\n  rank 1: b"
    )


def test_words():
    assert (plural(1, "rank"), plural(0, "byte")) == ("1 rank", "0 bytes")
    assert [joined(list("abc"[:n])) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


def test_messages_of_exceptions_are_cleaned():
    text = "[/pytorch/third_party/gloo/pair.cc:464] object at 0x7f00 lost [127.0.0.1]:3412.\nException raised from"
    assert clean(text) == "object at 0x... lost [..."
    assert clean("") == "" and clean(" \n ") == ""
    assert len(clean("x" * 999)) == 200


# --- cases


@pytest.mark.parametrize("case", [*REDUCE_CASES, *OP_CASES], ids=str)
def test_values_are_distinct_in_every_element(case):
    values = torch.cat([case.of_rank(rank) for rank in range(4)]).tolist()
    if case.dtype != torch.bfloat16 and case.values != "mixed" and case.length < 100:
        assert len(set(values)) == len(values)
    assert case.of_rank(0).dtype == case.dtype and len(values) == 4 * case.length


@pytest.mark.parametrize("N", [3, 4])
@pytest.mark.parametrize("case", [case for case in REDUCE_CASES if case.values == "rounding"], ids=str)
def test_rounding_cases_show_the_order_of_additions(N, case):
    inputs = [case.of_rank(rank) for rank in range(N)]
    forwards, backwards = inputs[0].clone(), inputs[-1].clone()
    for part in inputs[1:]:
        forwards += part
    for part in inputs[-2::-1]:
        backwards += part
    assert not torch.equal(forwards, backwards)
    assert case.close(forwards, case.reduced(N), N).all() and case.close(backwards, case.reduced(N), N).all()


def test_no_rank_alone_has_the_largest_values():
    case = next(case for case in OP_CASES if case.op == "max")
    for N in (2, 3, 4):
        winners = torch.stack([case.of_rank(rank) for rank in range(N)]).argmax(dim=0)
        assert len(set(winners.tolist())) > 1


def test_a_transposed_view_has_gaps_that_are_watched():
    placed = place(torch.arange(12.0), "transposed")
    assert not placed.tensor.is_contiguous() and placed.tensor.reshape(-1).tolist() == list(range(12))
    assert not placed.gaps_changed
    placed.tensor += 1
    assert not placed.gaps_changed
    placed.around[0][0].add_(1)
    assert placed.gaps_changed


def test_a_strided_output_has_gaps_too():
    placed = place_strided(3, torch.int64)
    placed.tensor.copy_(torch.arange(3))
    assert not placed.gaps_changed and not placed.tensor.is_contiguous()
    placed.around[0][0][0] = 0
    assert placed.gaps_changed


def test_a_tensor_that_was_given_other_memory_or_another_shape_is_noticed():
    for change in (lambda one: setattr(one, "data", one.clone()), lambda one: one.unsqueeze_(0)):
        placed = place(torch.arange(3.0), "plain")
        placed.tensor += 1
        assert not placed.moved
        change(placed.tensor)
        assert placed.moved


def test_cases_say_what_they_are():
    assert str(Case(12)) == "12 float32" and str(Case(12, op="sum")) == "12 float32"
    assert str(Case(1, torch.int64, op="max", form="scalar")) == "1 int64 of shape (), op=max"
    assert str(Case(12, form="transposed", times=2)) == "12 float32 in a transposed view, num_rounds=2"


def test_expected_values_and_traffic_agree_with_paper():
    ring, scatter = EXERCISES["ring_all_reduce"], EXERCISES["ring_reduce_scatter"]
    assert ring.expected(Case(2), 0, 3).tolist() == [600.0, 603.0]
    assert ring.traffic(Case(12), 4) == ([(72, 72)] * 4, [6] * 4)
    assert [scatter.expected(Case(7), rank, 3).tolist() for rank in (0, 2)] == [[600, 603, 606], [615, 618]]
    assert scatter.traffic(Case(12), 3) == ([(32, 32)] * 3, [2] * 3)
    assert EXERCISES["tree_all_reduce"].traffic(Case(12), 4)[1] == [2, 1, 2, 1]
    assert EXERCISES["ping_pong"].expected(Case(2, times=3), 1, 2).tolist() == [103, 104]
    assert EXERCISES["pass_it_on"].traffic(Case(1, torch.int64), 3) == ([(16, 16)] * 3, [2] * 3)


# --- reading the diaries


def logs(*ranks):
    return [CaseLog(list(messages)) for messages in ranks]


def send(to, sent=4):
    return Message("send", to, sent)


def recv(source, received=4):
    return Message("recv", source=source, received=received)


def test_the_longest_way_of_a_message():
    assert longest_way(logs([], [])) == 0
    assert longest_way(logs([send(1)], [recv(0)])) == 1
    star = logs([recv(1), recv(2), send(1), send(2)], [send(0), recv(0)], [send(0), recv(0)])
    assert longest_way(star) == 2
    chain = logs([recv(1), send(1)], [recv(2), send(0), recv(0), send(2)], [send(1), recv(1)])
    assert longest_way(chain) == 4
    ring = [[Message("exchange", (r + 1) % 3, 4, (r - 1) % 3, 4)] * 4 for r in range(3)]
    assert longest_way(logs(*ring)) == 4
    assert longest_way(logs([recv(1)], [])) is None


def test_a_size_mismatch_names_both_ranks():
    assert size_mismatch(logs([send(1, 8)], [recv(0, 8)])) == ""
    assert size_mismatch(logs([send(1, 8), send(1, 4)], [recv(0, 8), recv(0, 1)])) == (
        "rank 0 sends 4 bytes to rank 1, which has room for 1"
    )


def test_what_is_read_as_numbers():
    assert as_tensor([1, torch.tensor(2), 3.5]).tolist() == [1, 2, 3.5]
    assert as_tensor(torch.ones(2, 2)).tolist() == [1, 1, 1, 1]
    assert as_tensor(np.array([1, 2])).tolist() == [1, 2]
    none = (None, "ab", ["a"], ["1"], {1: 2}, [[1, 2]], torch.ones(1, dtype=torch.cfloat))
    assert [as_tensor(value) for value in none] == [None] * len(none)


# --- help


def test_hints_open_one_at_a_time(capsys):
    close_hints()
    total = len(HINTS["tree_all_reduce"])
    for number in range(1, total + 1):
        hint("tree_all_reduce")
        said = capsys.readouterr().out
        assert said.startswith(f"Hint {number} of {total}: {HINTS['tree_all_reduce'][number - 1]}")
        left = total - number
        assert (
            f"({left} hint{'' if left == 1 else 's'} left)" in said if left else "that was the last" in said
        )
    hint("tree_all_reduce")
    assert capsys.readouterr().out.startswith(f"All {total} hints are open:\n1. ")
    hint("ping_pong")
    assert capsys.readouterr().out.startswith("Hint 1 of ")
    close_hints()


def test_every_exercise_has_hints():
    assert set(HINTS) == set(CATALOGUE) and all(len(hints) >= 3 for hints in HINTS.values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_solution_is_shown_with_its_helpers(name, capsys):
    show_solution(name)
    said = capsys.readouterr().out
    assert (
        said.startswith("# course_lib/")
        and f"def {CATALOGUE[name].solution.__name__}(" in said
        and "\x1b" not in said
    )
    compile(said, name, "exec")
    helpers = {
        "ring_all_reduce": ["reduce_around", "gather_around"],
        "ring_reduce_scatter": ["reduce_around"],
    }
    assert all(f"def {helper}(" in said for helper in helpers.get(name, []))


# --- in a notebook


CELLS = (
    "from course_lib.classroom.checks import check, predict, score\nimport torch",
    "def my_ring_all_reduce(comm, tensor):\n    raise NotImplementedError\n\ncheck(my_ring_all_reduce)",
    "def my_ring_all_reduce(comm, tensor):\n"
    "    passing = tensor.clone()\n"
    "    for _ in range(comm.world_size - 1):\n"
    "        came = torch.empty_like(passing)\n"
    "        comm.exchange(passing, (comm.rank + 1) % comm.world_size, came, (comm.rank - 1) % comm.world_size)\n"
    "        tensor += came\n"
    "        passing = came\n\n"
    'check("ring_all_reduce", my_ring_all_reduce)',
    'def crash(comm, tensor):\n    total = tensor + missing\n\ncheck("ring_all_reduce", crash)',
    'predict("bytes per rank", None)',
    'score("bytes per rank", 64, unit="bytes")',
)
SAID = (
    "",
    "not attempted yet",
    "right sum, but each rank sent 96 bytes = (N-1)*S where a ring sends 2*(N-1)/N*S = 64 (3 ranks, 12 float32)\n"
    "  rank 0: sent 96 bytes in 2 messages, received 96 bytes (to rank 1)\n"
    "  rank 1: sent 96 bytes in 2 messages, received 96 bytes (to rank 2)\n"
    "  rank 2: sent 96 bytes in 2 messages, received 96 bytes (to rank 0)",
    "rank 0 raised NameError at `total = tensor + missing`: name 'missing' is not defined (1 rank, 12 float32)\n"
    "  rank 0: sent 0 bytes in 0 messages, received 0 bytes; raised NameError: name 'missing' is not defined",
    "bytes per rank: no prediction written down",
    "bytes per rank: measured 64 bytes; no prediction written down",
)


def test_a_check_in_a_notebook():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    for cell, said in zip(notebook.cells, SAID, strict=True):
        assert "".join(output["data"]["text/plain"] for output in cell.outputs) == said
