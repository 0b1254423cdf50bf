"""The graders of the chapter on torchrun, against right answers and against wrong ones, each with one fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib import RanksHung, torchrun
from course_lib.classroom import scripts
from course_lib.classroom.checks import check, hint, show_solution
from course_lib.classroom.checks.catalogue import CATALOGUE
from course_lib.classroom.checks.guidance import close_hints
from course_lib.classroom.checks.hints import HINTS
from course_lib.classroom.checks.port_launcher import OLD_SCRIPT, explain, written_world_sizes
from course_lib.classroom.checks.port_launcher_judge import judge_output
from course_lib.parallel.sampler import sampler_indices
from course_lib.plan.ranks import RANK_VARIABLES, worker_ranks
from course_lib.runtime.errors import RankError
from tests.classroom.planted import Planted

NAMES = ["rank_arithmetic", "port_launcher", "resumable"]
PLANTED = Planted(NAMES)
fault, right = PLANTED.fault, PLANTED.right
NEW_SCRIPT = Path(*scripts.__path__, "ported_launcher.py").read_text()


# --- rank arithmetic


def variables(nproc_per_node, node, local_rank, **other):
    """The right ones, but for `other`."""
    return worker_ranks(nproc_per_node, node, local_rank) | other


@right("rank_arithmetic")
def as_the_exercise_asks(nproc_per_node, node, local_rank):
    rank, world = sum(nproc_per_node[:node]) + local_rank, sum(nproc_per_node)
    return {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "ROLE_RANK": rank,
        "LOCAL_WORLD_SIZE": nproc_per_node[node],
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
    }


@right("rank_arithmetic")
def as_text(nproc_per_node, node, local_rank):
    nproc_per_node.append(99)  # the list is the function's own
    return {key: str(value) for key, value in variables(nproc_per_node[:-1], node, local_rank).items()}


@right("rank_arithmetic")
def as_numbers_of_numpy(nproc_per_node, node, local_rank):
    return {key: np.int64(value) for key, value in variables(nproc_per_node, node, local_rank).items()}


@fault(
    "rank_arithmetic",
    "wrong RANK: 1 where torchrun sets 2: node * nproc_per_node[node] + local_rank is right only where all nodes have "
    "equally many workers",
    "(nproc_per_node=[2, 1], node=1, local_rank=0)",
)
def even_nodes(nproc_per_node, node, local_rank):
    rank = node * nproc_per_node[node] + local_rank
    return variables(nproc_per_node, node, local_rank, RANK=rank)


@fault("rank_arithmetic", "wrong RANK: 0 where torchrun sets 2: that is LOCAL_RANK", "[2, 2], node=1")
def rank_is_local(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, RANK=local_rank)


@fault("rank_arithmetic", "wrong RANK: 2 where torchrun sets 1: the workers are not dealt out in turn")
def in_turn(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, RANK=local_rank * len(nproc_per_node) + node)


@fault("rank_arithmetic", "wrong RANK: 1 where torchrun sets 0: ranks count from 0", "[1], node=0")
def from_one(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, RANK=sum(nproc_per_node[:node]) + local_rank + 1)


@fault("rank_arithmetic", "wrong RANK: 7 where torchrun sets 0 (nproc")
def nonsense(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, RANK=7)


@fault("rank_arithmetic", "wrong LOCAL_RANK: 2 where torchrun sets 0: that is RANK")
def local_is_rank(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, LOCAL_RANK=sum(nproc_per_node[:node]) + local_rank)


@fault("rank_arithmetic", "wrong GROUP_RANK: 1 where torchrun sets 0: nodes count from 0")
def nodes_from_one(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, GROUP_RANK=node + 1)


@fault(
    "rank_arithmetic",
    "wrong ROLE_RANK: 0 where torchrun sets 2: that is LOCAL_RANK; all nodes have the same role",
)
def role_per_node(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, ROLE_RANK=local_rank)


@fault(
    "rank_arithmetic", "wrong LOCAL_WORLD_SIZE: 2 where torchrun sets 1: that is node 0's", "[2, 1], node=1"
)
def first_nodes_size(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, LOCAL_WORLD_SIZE=nproc_per_node[0])


@fault("rank_arithmetic", "wrong WORLD_SIZE: 1 where torchrun sets 4: that is the number of nodes")
def counts_nodes(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, WORLD_SIZE=len(nproc_per_node))


@fault(
    "rank_arithmetic", "wrong WORLD_SIZE: 4 where torchrun sets 3: nodes * nproc_per_node[node] is right only"
)
def even_world(nproc_per_node, node, local_rank):
    world = len(nproc_per_node) * nproc_per_node[node]
    return variables(nproc_per_node, node, local_rank, WORLD_SIZE=world)


@fault("rank_arithmetic", "wrong ROLE_WORLD_SIZE: 2 where torchrun sets 4: the role has workers on all nodes")
def small_role(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, ROLE_WORLD_SIZE=nproc_per_node[node])


@fault("rank_arithmetic", "wrong GROUP_WORLD_SIZE: 4 where torchrun sets 1: that is LOCAL_WORLD_SIZE")
def groups_are_not_workers(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, GROUP_WORLD_SIZE=nproc_per_node[node])


@fault("rank_arithmetic", "your dict lacks ROLE_RANK and ROLE_WORLD_SIZE (nproc_per_node=[1]")
def without_roles(nproc_per_node, node, local_rank):
    found = variables(nproc_per_node, node, local_rank)
    return {name: value for name, value in found.items() if not name.startswith("ROLE")}


@fault("rank_arithmetic", "your dict holds NODE_RANK, which is none of RANK, LOCAL_RANK")
def foreign_name(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, NODE_RANK=node)


@fault("rank_arithmetic", "RANK is 0.0; expected a whole number")
def fractions(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, RANK=local_rank / 1)


@fault("rank_arithmetic", "your function returned None; expected a dict")
def returns_nothing(nproc_per_node, node, local_rank):
    variables(nproc_per_node, node, local_rank)


@fault("rank_arithmetic", "your function raised IndexError: list index out of range", "[1], node=0")
def raises(nproc_per_node, node, local_rank):
    return variables(nproc_per_node, node, local_rank, LOCAL_WORLD_SIZE=nproc_per_node[node + 1])


@fault(
    "rank_arithmetic",
    "your function takes (node, local_rank); the exercise calls it with (nproc_per_node, node,",
)
def other_arguments(node, local_rank):
    return variables([1], node, local_rank)


# --- a script ported: the real torchrun for the right one and for one fault; the other faults in what workers print


def with_line(old: str, new: str, text: str = NEW_SCRIPT) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


@right("port_launcher")
def whole_text(old):
    return NEW_SCRIPT


@fault(
    "port_launcher",
    'torchrun hands over no --local-rank: read int(os.environ["LOCAL_RANK"]), and take the argument out of the parser',
    "(torchrun, 2 nodes with 2 + 1 workers)",
)
def keeps_the_argument(old):
    return with_line("world_size = 2", "world_size = 3", old)


@fault(
    "port_launcher",
    "right with these 3 workers, but their number is written into the script",
    "(torchrun, 2 nodes with 2 + 1 workers)",
)
def writes_the_world_size_down(old):
    return with_line(
        "rank, world_size = dist.get_rank(), dist.get_world_size()", "rank, world_size = dist.get_rank(), 3"
    )


@fault(
    "port_launcher",
    'rank 1 takes 1 for its local rank, which is 0: read os.environ["LOCAL_RANK"] (torchrun, 2 nodes with 1 + 2',
    "with 2 + 1 it was right)",
)
def the_rank_modulo_two(old):
    return with_line('int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"]) % 2')


@fault(
    "port_launcher",
    "'ported.py' is the name of a file, not a script: put Path(...) around it, Path(\"ported.py\")",
)
def a_name(old):
    return "ported.py"


@fault("port_launcher", "Python cannot read the script: ", "in line 11")
def no_python(old):
    return with_line("def main():", "def main(:")


@fault("port_launcher", "your function returned a value of type int; expected the text of a script")
def no_text(old):
    return 3


@pytest.fixture(scope="module")
def printed() -> dict[int, str]:
    """By rank, what a right script prints."""
    line = "rank {} of 3, local rank {}, epoch {}: {}, sum 66"
    ranks = {0: 0, 1: 1, 2: 0}
    deal = lambda rank, epoch: sampler_indices(12, 3, rank, epoch=epoch)
    return {
        rank: "".join(line.format(rank, local, epoch, deal(rank, epoch)) + "\n" for epoch in range(3))
        for rank, local in ranks.items()
    }


PRINTED_FAULTS = [
    ("rank 2 of 3", "rank 0 of 3", "rank 2 takes itself for rank 0: that is its LOCAL_RANK"),
    (" of 3,", " of 2,", "rank 0 takes 2 for the number of all ranks, which is 3"),
    (
        "rank 2 of 3, local rank 0",
        "rank 2 of 3, local rank 2",
        "rank 2 takes 2 for its local rank, which is 0",
    ),
    ("local rank 1", "local rank None", "rank 1 takes None for its local rank, which is 1"),
    ("sum 66", "sum 20", "the sum over the ranks is 20 on rank 0, and should be 66, everywhere"),
    ("epoch 2", "epoch 7", "rank 0 printed 3 lines, though the script was started with --epochs 3"),
    ("rank", "Rank", "rank 0 printed no line as the old script does"),
    (
        r"epoch 1: \[\d+",
        "epoch 1: [0",
        "the ranks train on 12 samples in epoch 1, where each of the 12 has to come once",
    ),
    (r"\[(\d+), (\d+)", r"[\2, \1", "DistributedSampler deals other samples in epochs 0, 1 and 2"),
]


def test_what_a_right_script_prints_passes(printed):
    assert judge_output(printed, [2, 1]) == ""
    assert (
        judge_output({r: text.replace("sum 66", "sum tensor(66)") for r, text in printed.items()}, [2, 1])
        == ""
    )


@pytest.mark.parametrize("old, new, said", PRINTED_FAULTS)
def test_a_fault_in_what_is_printed_is_named(printed, old, new, said):
    wrong = {rank: re.sub(old, new, text) for rank, text in printed.items()}
    assert wrong != printed
    assert judge_output(wrong, [2, 1]).startswith(said)


@pytest.mark.parametrize(
    "wrong", [lambda rank: rank % 2, lambda rank: rank % [1, 2, 2][rank], lambda rank: rank]
)
def test_a_local_rank_computed_from_the_rank_alone_is_wrong_in_one_of_the_layouts(printed, wrong):
    told = {
        rank: re.sub(r"local rank \d", f"local rank {wrong(rank)}", text) for rank, text in printed.items()
    }
    assert judge_output(told, [1, 2]) == (
        'rank 1 takes 1 for its local rank, which is 0: read os.environ["LOCAL_RANK"]'
    )


def test_a_forgotten_set_epoch_is_named(printed):
    first = {rank: text.splitlines()[0] for rank, text in printed.items()}
    stuck = {
        r: "\n".join(line.replace("epoch 0", f"epoch {e}") for e in range(3)) for r, line in first.items()
    }
    assert judge_output(stuck, [2, 1]).startswith(
        "right ranks, but every epoch has the same order of samples"
    )


@pytest.mark.parametrize(
    "text, error, said",
    [
        (
            OLD_SCRIPT,
            ("RuntimeError", "`rank` must be an integer. None", ""),
            "torchrun hands over no --local-rank",
        ),
        (
            OLD_SCRIPT,
            ("", "ended with exit code 2", "p.py: error: the following arguments are required: --local-rank"),
            "torchrun hands over no --local-rank",
        ),
        (
            with_line('("gloo")', '("gloo", rank=int(os.environ["RANK"]), world_size=2)'),
            ("RuntimeError", "[enforce fail at /a/b/context.cc:23] rank < size. 2 vs 2", ""),
            "rank 1 raised RuntimeError: rank < size. 2 vs 2. A world size is written into the script; this job has 3",
        ),
        (
            NEW_SCRIPT,
            ("KeyError", "'LOCAL_RNK'", ""),
            "rank 1 raised KeyError: there is no 'LOCAL_RNK'; see the table",
        ),
        (
            NEW_SCRIPT,
            ("", "ended with exit code 2", "p.py: error: unrecognized arguments: --epochs 3"),
            "rank 1 does not accept its arguments, --epochs 3: unrecognized arguments: --epochs 3",
        ),
        (NEW_SCRIPT, ("ValueError", "bad /tmp", ""), "rank 1 raised ValueError: bad /tmp"),
        (
            f"PAIR = [\n    1, 2\n]\n{NEW_SCRIPT}",
            ("RuntimeError", "broken", ""),
            "rank 1 raised RuntimeError: broken (end)",
        ),
        (
            with_line('("gloo")', '("gloo", world_size=2)'),
            ("NameError", "name 'x' is not defined", ""),
            "rank 1 raised NameError: name 'x' is not defined (end)",
        ),
        (
            with_line('int(os.environ["LOCAL_RANK"])', "None.x"),
            ("AttributeError", "'NoneType' object has no attribute 'x'", ""),
            "rank 1 raised AttributeError: 'NoneType' object has no attribute 'x' (end)",
        ),
    ],
)
def test_why_a_script_failed(text, error, said):
    kind, message, output = error
    exitcode = 2 if "exit code" in message else 1
    told = RankError(
        "", rank=1, exc_type=kind, exc_message=message, traceback="", exitcode=exitcode, output=output
    )
    assert f"{explain(text, told)} (end)".startswith(said)


@pytest.mark.parametrize(
    "line, numbers",
    [
        ("world_size = 3", {3}),
        ("world_size: int = 3", {3}),
        ("rank, world_size = args.rank, 2", {2}),
        ("sampler = DistributedSampler(data, num_replicas=4, rank=rank)", {4}),
        ("world_size = int(os.environ.get('WORLD_SIZE', 1))", set()),
        ("if world_size == 3: pass", set()),
        ("world_size = 3 * num_nodes", set()),
        ("pass  # world_size = 3", set()),
        ("pairs = [\n    1, 2\n]", set()),
    ],
)
def test_a_world_size_that_is_written_down_is_found(line, numbers):
    assert written_world_sizes(line) == numbers


def test_workers_that_wait_for_each_other_are_explained():
    assert explain(NEW_SCRIPT, RanksHung("", [], "")).startswith(
        "it does not end. If it has no endless loop, the workers wait for each other"
    )


@pytest.mark.parametrize(
    "ranks, who",
    [
        (["barrier", "all_reduce", "all_reduce"], "rank 0 in barrier and ranks 1 and 2 in all_reduce"),
        (["barrier", "", ""], "rank 0 in barrier and ranks 1 and 2 in none"),
    ],
)
def test_workers_that_make_different_calls_are_named(ranks, who):
    told = [f"waiting in {call}; its last line: 'x'" if call else "has ended" for call in ranks]
    said = f"it does not end: the workers wait in calls of torch.distributed, {who}. Every rank must make the same"
    assert explain(NEW_SCRIPT, RanksHung("", "", told)).startswith(said)


def test_workers_that_wait_to_join_are_told_how():
    told = ["has ended", "has ended", "waiting in init_process_group"]
    assert "each must join with the job's WORLD_SIZE" in explain(NEW_SCRIPT, RanksHung("", "", told))


_LEFT = "Ranks 1 and 2 left first, without an error, while others still waited there: every rank must"


@pytest.mark.parametrize(
    "message, whole, said",
    [
        (
            "[/a/pair.cc:561] Connection closed by peer [127.0.0.1]:1. GLHF!",
            f"rank 0 of 3 raised\n\n{_LEFT}",
            "rank 0 lost the connection to another worker: ranks 1 and 2 left first, without an error. Every rank",
        ),
        (
            "[/a/pair.cc:561] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!",
            "rank 0 of 3 raised",
            "rank 0 lost the connection to another worker, though none failed by itself. Most likely two workers",
        ),
    ],
)
def test_a_lost_connection_is_a_consequence(message, whole, said):
    error = RankError(whole, rank=0, exc_type="RuntimeError", exc_message=message, exitcode=1)
    assert explain(NEW_SCRIPT, error).startswith(said)
    error.traceback = "in init_process_group"
    assert "Most likely two workers joined with the same rank" in explain(NEW_SCRIPT, error)
    two = with_line('("gloo")', '("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)')
    assert "A world size is written into the script; this job has 3" in explain(two, error)


@pytest.mark.parametrize(
    "answer", [..., OLD_SCRIPT, f"# mine\n{OLD_SCRIPT}", "", lambda old: None, lambda old: old]
)
def test_the_old_script_is_no_attempt(answer):
    assert repr(check("port_launcher", answer)) == "not attempted yet"


def test_a_file_is_an_answer_too(tmp_path):
    (tmp_path / "ported.py").write_text("def main(:")
    assert check("port_launcher", tmp_path / "ported.py").text.startswith("Python cannot read the script")


@pytest.mark.parametrize("answer", [3, None])
def test_what_is_no_script_is_told_what_is_expected(answer):
    with pytest.raises(
        TypeError, match=r"expected the text of a script, its Path, .* check\(\"port_launcher\", text\)"
    ):
        check("port_launcher", answer)


def test_only_this_exercise_takes_text():
    with pytest.raises(TypeError, match="expected a function"):
        check("resumable", "text")


def test_the_old_script_did_work_once():
    """With the launcher it was written for, which torch still has, under a warning."""
    path = Path(*scripts.__path__, "old_launcher.py")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node",
        "2",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    # Both workers write to one pipe: their lines may meet in one.
    lines = re.findall(r"rank (\d) of 2, local rank \1, epoch (\d): \[[\d, ]+\], sum 66", done.stdout)
    assert done.returncode == 0 and sorted(lines) == [(r, e) for r in "01" for e in "01"], done


# --- the table of ranks, held against a real torchrun


def test_the_rank_variables_are_those_of_a_real_torchrun(tmp_path):
    script = tmp_path / "about.py"
    script.write_text(f"import os\nprint([int(os.environ[name]) for name in {RANK_VARIABLES!r}])\n")
    result = torchrun(script, nproc_per_node=[2, 1], show="none")
    told = {worker.rank: worker for worker in result.workers}
    assert len(told) == 3
    for rank, output in result.output.items():
        worker = told[rank]
        expected = worker_ranks([2, 1], worker.group_rank, worker.local_rank)
        assert dict(zip(RANK_VARIABLES, eval(output), strict=True)) == expected


# --- resuming


def loaded(path, model, optimizer, parts="emor"):
    """Load what the letters name (epoch, model, optimizer, random numbers); the epoch that comes next."""
    if not path.exists():
        return 0
    state = torch.load(path)
    if "m" in parts:
        model.load_state_dict(state["m"])
    if "o" in parts:
        optimizer.load_state_dict(state["o"])
    if "r" in parts:
        torch.set_rng_state(state["r"])
    return state["e"] if "e" in parts else 0


def state_of(epoch, model, optimizer):
    return {"e": epoch, "m": model.state_dict(), "o": optimizer.state_dict(), "r": torch.get_rng_state()}


def renamed(state, path):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def training(load=loaded, save=renamed, told=1, number=int):
    """A loop with these parts; `told`: 1 if the snapshot names the epoch that comes next, 0: the one that is over.
    number: the type of its epochs.
    """

    def train(path, model, optimizer, num_epochs, train_epoch):
        for epoch in range(load(path, model, optimizer), num_epochs):
            train_epoch(number(epoch))
            save(state_of(epoch + told, model, optimizer), path)

    return train


right("resumable")(training(number=np.int64))


@right("resumable")
def two_files_in_turn(path, model, optimizer, num_epochs, train_epoch):
    """No renaming at all: the newer of two files that can be read counts."""

    def read(file):
        try:
            return torch.load(file)
        except Exception:
            return None

    files = [path.with_name(name) for name in ("a.pt", "b.pt")]
    states = [state for state in map(read, files) if state]
    first = 0
    if states:
        state = max(states, key=lambda one: one["e"])
        model.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
        torch.set_rng_state(state["r"])
        first = state["e"]
    for epoch in range(first, num_epochs):
        train_epoch(epoch)
        torch.save(state_of(epoch + 1, model, optimizer), files[epoch % 2])


MIDDLE = "killed in the middle of epoch 2, then started again, "
SAVING = "killed while it saved after epoch 2, in the middle of writing the file, then started again"


def resumable_fault(name: str, fn, *said: str) -> None:
    fn.__name__ = name
    fault("resumable", *said)(fn)


@fault("resumable", "right epochs, but nothing was saved")
def plain_loop(path, model, optimizer, num_epochs, train_epoch):
    for epoch in range(num_epochs):
        train_epoch(epoch)


resumable_fault(
    "never_loads",
    training(load=lambda *_: 0),
    f"{MIDDLE}it starts from zero: epoch 0 with a new model, though 2 epochs were over",
)
resumable_fault(
    "repeats_the_saved_epoch",
    training(told=0),
    f"{MIDDLE}it repeats a saved epoch: it trains epoch 1 with the parameters that epoch 1 had left",
)
resumable_fault(
    "counts_from_zero_again",
    training(load=lambda *three: loaded(*three, parts="mor")),
    f"{MIDDLE}it repeats epochs: it trains epoch 0 with the parameters that epoch 1 had left",
)
resumable_fault(
    "skips_the_killed_epoch",
    training(told=2),
    f"{MIDDLE}it goes on with epoch 3, though epoch 2 was never finished",
)
resumable_fault(
    "forgets_the_model",
    training(load=lambda *three: loaded(*three, parts="eor")),
    f"{MIDDLE}it goes on with epoch 2, but the parameters are those of a new model",
)
resumable_fault(
    "forgets_the_momentum",
    training(load=lambda *three: loaded(*three, parts="emr")),
    f"{MIDDLE}it goes on with epoch 2 and the right parameters, but the optimizer has forgotten its momentum",
)
resumable_fault(
    "forgets_random_numbers",
    training(load=lambda *three: loaded(*three, parts="emo")),
    f"{MIDDLE}it goes on with epoch 2 and the right parameters, but not the right random numbers",
)
resumable_fault(
    "writes_in_place",
    training(save=torch.save),
    f"{SAVING}: your function raised ",
    "(not atomic: the half-written file stands where the whole one stood",
)


def loaded_if_whole(path, model, optimizer):
    try:
        return loaded(path, model, optimizer)
    except Exception:
        return 0


resumable_fault(
    "begins_anew_if_damaged",
    training(load=loaded_if_whole, save=torch.save),
    f"{SAVING}, it starts from zero: epoch 0 with a new model, though 2 epochs were over (not atomic",
)


def removes_first(state, path):
    torch.save(state, f"{path}.tmp")
    if path.exists():
        path.unlink()
    os.rename(f"{path}.tmp", path)


resumable_fault(
    "removes_before_it_renames",
    training(save=removes_first),
    "killed while it saved after epoch 2, between two changes of files, then started again, it starts from zero",
    "(not atomic: for a moment there is no snapshot",
)


def refuses_leftovers(state, path):
    with open(f"{path}.tmp", "xb") as file:
        torch.save(state, file)
    os.replace(f"{path}.tmp", path)


resumable_fault(
    "stumbles_over_leftovers",
    training(save=refuses_leftovers),
    f"{SAVING}: your function raised FileExistsError",
)


@fault(
    "resumable",
    "killed in the middle of epoch 5 a second time, then started again, it goes back to epoch 2, though",
)
def saves_only_in_the_first_run(path, model, optimizer, num_epochs, train_epoch):
    first = loaded(path, model, optimizer)
    for epoch in range(first, num_epochs):
        train_epoch(epoch)
        if first == 0:
            renamed(state_of(epoch + 1, model, optimizer), path)


@fault(
    "resumable",
    f"{MIDDLE}it starts from zero: epoch 0 with a new model",
    "(and nothing had been saved by then)",
)
def saves_too_rarely(path, model, optimizer, num_epochs, train_epoch):
    for epoch in range(loaded(path, model, optimizer), num_epochs):
        train_epoch(epoch)
        if epoch % 3 == 2:
            renamed(state_of(epoch + 1, model, optimizer), path)


@fault(
    "resumable",
    "killed in the middle of epoch 5 a second time",
    "it goes back to epoch 4, though epoch 4 was over",
)
def saves_every_second_epoch(path, model, optimizer, num_epochs, train_epoch):
    for epoch in range(loaded(path, model, optimizer), num_epochs):
        train_epoch(epoch)
        if epoch % 2 == 1:
            renamed(state_of(epoch + 1, model, optimizer), path)


@fault("resumable", "undisturbed, it ends with other parameters than the same epochs without saving")
def draws_while_saving(path, model, optimizer, num_epochs, train_epoch):
    for epoch in range(loaded(path, model, optimizer), num_epochs):
        train_epoch(epoch)
        torch.rand(1)
        renamed(state_of(epoch + 1, model, optimizer), path)


@fault(
    "resumable",
    "started again when all epochs were done, it trained epoch 5: the last epoch has to be saved, too",
)
def last_epoch_unsaved(path, model, optimizer, num_epochs, train_epoch):
    for epoch in range(loaded(path, model, optimizer), num_epochs):
        train_epoch(epoch)
        if epoch < num_epochs - 1:
            renamed(state_of(epoch + 1, model, optimizer), path)


@fault(
    "resumable",
    "started again when all epochs were done, your function's process was killed, and not by this check",
)
def kills_itself_at_the_end(path, model, optimizer, num_epochs, train_epoch):
    if loaded(path, model, optimizer) == num_epochs:
        os.kill(os.getpid(), signal.SIGKILL)
    training()(path, model, optimizer, num_epochs, train_epoch)


@fault("resumable", "undisturbed, it trained epochs 0, 1, 2, 3 and 4; expected each of 0 to 5 once, in order")
def one_too_few(path, model, optimizer, num_epochs, train_epoch):
    training()(path, model, optimizer, num_epochs - 1, train_epoch)


@fault("resumable", "train_epoch was called with 6; expected an epoch from 0 to 5")
def one_too_many(path, model, optimizer, num_epochs, train_epoch):
    training()(path, model, optimizer, num_epochs + 1, train_epoch)


@fault("resumable", "your function raised TypeError: unsupported operand")
def path_is_no_text(path, model, optimizer, num_epochs, train_epoch):
    train_epoch(0)
    torch.save({}, path + ".tmp")


# --- all of them


@pytest.mark.parametrize("name, fn", PLANTED.right_cases())
def test_a_right_answer_passes(name, fn):
    verdict = check(name, fn)
    assert verdict.passed, verdict
    if name == "resumable":
        killed = re.match(r"passed: killed (\d+) times", verdict.text)
        assert killed and int(killed[1]) >= 3 and "without os.fsync" in verdict.text


@pytest.mark.parametrize("name", NAMES)
def test_the_librarys_own_passes(name):
    answer = CATALOGUE[name].solution if name != "port_launcher" else NEW_SCRIPT
    if name == "port_launcher":
        assert Path(sys.modules[CATALOGUE[name].solution.__module__].__file__).read_text() == NEW_SCRIPT
        return  # run above
    verdict = check(name, answer)
    assert verdict.passed and "os.fsync" not in verdict.text, verdict


@pytest.mark.parametrize("name, fn, said, options", PLANTED.wrong_cases())
def test_a_wrong_answer_is_told_what_is_wrong(name, fn, said, options):
    verdict = PLANTED.caught(name, fn, said, options)
    assert "/tmp" not in repr(verdict)


def test_there_are_enough_faults_and_hints(capsys):
    assert len(PLANTED.faults["rank_arithmetic"]) >= 10 and len(PLANTED.faults["resumable"]) >= 10
    assert all(len(HINTS[name]) >= 3 for name in NAMES)
    close_hints()
    for name in NAMES:
        hint(name)
        assert capsys.readouterr().out.startswith(f"Hint 1 of {len(HINTS[name])}: ")
    close_hints()


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_stub_is_no_failure(name):
    def stub(*arguments):
        """What to do."""
        ...

    def half(*arguments):
        if arguments == "never":
            return None
        raise NotImplementedError

    assert repr(check(name, stub)) == repr(check(name, half)) == "not attempted yet"


@pytest.mark.parametrize("name", ["rank_arithmetic", "resumable"])
def test_a_function_that_never_returns_does_not_hang_the_notebook(name):
    def thinks_for_ever(*arguments):
        while True:
            pass

    assert check(name, thinks_for_ever, timeout=0.5).text == "it does not end: your function did not return"


@pytest.mark.parametrize(
    "name, shown",
    [
        ("rank_arithmetic", ["# course_lib/plan/ranks.py", "def worker_ranks("]),
        (
            "port_launcher",
            ["# course_lib/classroom/scripts/ported_launcher.py", "import argparse", "def main("],
        ),
        (
            "resumable",
            ["# course_lib/parallel/trainer/epochs.py", "def train_resumably(", "def _save(", "def _load("],
        ),
    ],
)
def test_the_solution_is_the_librarys(name, shown, capsys):
    show_solution(name)
    shown_text = capsys.readouterr().out
    assert all(f"\n{part}" in f"\n{shown_text}" for part in shown)


def test_what_the_graders_said(note):
    """Not a test of its own: prints the table at the end of the run."""
    note(PLANTED.table())
