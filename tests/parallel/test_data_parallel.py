"""DataParallel from scratch: the unwrapped module's gradients, every byte counted, and errors that say what to do."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import OrderedDict, namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.classroom.models import MLP, DigitsCNN, sample_batches
from course_lib.classroom.reference import differences
from course_lib.parallel.data_parallel import DataParallel, ReplicaError, Wires, replicate, scatter
from course_lib.parallel.data_parallel.flows import HOST, Flows
from course_lib.plan.partition import chunk_bounds, chunk_sizes

ROUNDING = {"rtol": 1e-10, "atol": 1e-13}
"""float64: sums of a few hundred terms in another order differ by about 1e-14, relatively."""

MODELS = {
    "plain": MLP,
    "tied": partial(MLP, tied=True),
    "frozen": partial(MLP, frozen=True),
    "unused": partial(MLP, unused=True),
    "all": partial(MLP, tied=True, frozen=True, unused=True),
    "cnn": DigitsCNN,
}


def cpus(n: int) -> list[str]:
    return ["cpu"] * n


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def model_and_batch(name: str, batch_size: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = MODELS[name]().double()
    return model, *sample_batches(model, 1, batch_size, dtype=torch.float64)[0]


# --- equal


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_same_output_and_gradients_as_the_module_alone(name: str, num_replicas: int) -> None:
    model, inputs, targets = model_and_batch(name, 5)
    wrapped = DataParallel(copy.deepcopy(model), cpus(num_replicas))
    outputs, expected = wrapped(inputs), model(inputs)
    assert not differences({"out": outputs}, {"out": expected}, **ROUNDING)
    F.cross_entropy(outputs, targets).backward()
    F.cross_entropy(expected, targets).backward()
    assert not differences(gradients(wrapped.module), gradients(model), **ROUNDING)
    if name in ("unused", "all"):
        assert (
            wrapped.module.spare.weight.grad is None
        )  # not zeros: an optimizer with weight decay would shrink it


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_bit_for_bit_the_slices_gradients_added_in_order(num_replicas: int) -> None:
    model, inputs, targets = model_and_batch("plain", 7)
    slice_gradients = []
    for start, stop in chunk_bounds(7, num_replicas):
        model.zero_grad()
        part = inputs[
            start:stop
        ].clone()  # in memory of its own: a matrix product's last bit depends on alignment
        F.cross_entropy(model(part), targets[start:stop], reduction="sum").backward()
        slice_gradients.append([p.grad.clone() for p in model.parameters()])
    expected = slice_gradients[0]
    for grads in slice_gradients[1:]:
        expected = [total + grad for total, grad in zip(expected, grads, strict=True)]
    model.zero_grad()
    F.cross_entropy(DataParallel(model, cpus(num_replicas))(inputs), targets, reduction="sum").backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_gradients_add_up_over_calls_as_they_do_without_the_wrapper() -> None:
    model, inputs, targets = model_and_batch("tied", 8)
    wrapped = DataParallel(model, cpus(2))
    for half in (slice(0, 3), slice(3, 8)):
        F.cross_entropy(wrapped(inputs[half]), targets[half], reduction="sum").backward()
    added = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    assert not differences(added, gradients(model), **ROUNDING)


def test_gradients_reach_the_inputs_and_second_derivatives_exist() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    inputs = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    wrapped = DataParallel(model, cpus(2))
    assert torch.autograd.gradcheck(wrapped, inputs)
    assert torch.autograd.gradgradcheck(wrapped, inputs)


def test_a_recurrent_network_whose_batch_is_dimension_1() -> None:
    lstm = nn.LSTM(5, 4, num_layers=2).double()
    second = replicate(lstm, Wires([torch.device("cpu")] * 2))[1]
    assert second._flat_weights[0] is second.weight_ih_l0  # the second list that it keeps of its weights
    sequence = torch.randn(3, 5, 5, dtype=torch.float64)  # (steps, batch, features)
    output, (h, c) = lstm(sequence)
    (output.sum() + h.square().sum() + c.sum()).backward()
    expected = {name: grad.clone() for name, grad in gradients(lstm).items()}
    lstm.zero_grad()
    got, (got_h, got_c) = DataParallel(lstm, cpus(3), dim=1)(sequence)
    assert not differences({"o": got, "h": got_h, "c": got_c}, {"o": output, "h": h, "c": c}, **ROUNDING)
    (got.sum() + got_h.square().sum() + got_c.sum()).backward()
    assert not differences(gradients(lstm), expected, **ROUNDING)


def test_layers_that_write_into_their_inputs() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2), nn.ReLU(inplace=True)).double()
    got, expected = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected.data.copy_(got)
    DataParallel(model, cpus(2))(got * 1).sum().backward()
    model(expected * 1).sum().backward()
    assert not differences({"x": got.grad}, {"x": expected.grad}, **ROUNDING)


def test_a_sparse_gradient_moves_only_its_rows() -> None:
    model, words = nn.Embedding(100, 4, sparse=True), torch.tensor([[1, 2], [1, 5], [7, 2]])
    wrapped = DataParallel(copy.deepcopy(model), cpus(2))
    with wrapped.record() as flows:
        wrapped(words).sum().backward()
    model(words).sum().backward()
    assert torch.equal(wrapped.module.weight.grad.to_dense(), model.weight.grad.to_dense())
    assert flows.bytes_received(0, "parameter gradients") == 2 * (4 * 4 + 8)  # rows 7 and 2: values and index


def test_modules_that_compute_their_weight() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double())
    inputs = torch.randn(5, 3, dtype=torch.float64)
    wrapped = DataParallel(copy.deepcopy(model), cpus(2))
    wrapped(inputs).square().sum().backward()
    model(inputs).square().sum().backward()
    assert not differences(gradients(wrapped.module), gradients(model), **ROUNDING)


Point = namedtuple("Point", "x y")


class Nested(nn.Module):
    """Takes and returns everything that can be nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, pair, batch, *, scale, point=None, mode=None):
        rows = self.linear(pair[0]) + pair[1][0] + batch["bias"]
        assert mode == "loud" and batch["words"] == ["not", "cut"]
        return OrderedDict(
            rows=rows * scale, none=None, pair=(rows.sum(1), [rows[:, 0]]), point=Point(point.x * 2, point.y)
        )


def test_nested_arguments_and_outputs() -> None:
    n = torch.arange(5.0)
    arguments = ((n.outer(torch.ones(3)), [n[:, None]]), {"bias": n[:, None] / 10, "words": ["not", "cut"]})
    keywords = {"scale": 3, "point": Point(n, n[:, None]), "mode": "loud"}
    module = Nested()
    expected = module(*arguments, **keywords)
    got = DataParallel(module, cpus(3))(*arguments, **keywords)
    assert type(got) is OrderedDict and list(got) == list(expected) and got["none"] is None
    torch.testing.assert_close(got["rows"], expected["rows"])
    assert type(got["pair"]) is tuple and type(got["pair"][1]) is list
    torch.testing.assert_close(got["pair"], expected["pair"])
    assert type(got["point"]) is Point and torch.equal(got["point"].x, n * 2)


def test_no_arguments_one_copy() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.arange(3.0))

        def forward(self):
            return self.value * 2

    wrapped = DataParallel(Constant(), cpus(2))
    wrapped().sum().backward()
    assert torch.equal(wrapped(), torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(wrapped.module.value.grad, torch.full((3,), 2.0))


# --- the copies


def test_each_copy_has_its_own_memory_and_what_is_shared_stays_shared() -> None:
    model = MLP(tied=True, frozen=True)
    first, second = replicate(model, Wires([torch.device("cpu")] * 2))
    assert first.head.weight.data_ptr() == model.head.weight.data_ptr()
    assert second.head.weight.data_ptr() != model.head.weight.data_ptr()
    assert second.second.weight is second.third.weight
    assert not second.first.weight.requires_grad and second.head.weight.requires_grad
    assert [name for name, _ in second.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())  # the module itself is as it was


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.threads = 0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1  # lost: each copy is a new object
        self.seen += len(x)  # of copy 0: the module's own memory
        self.threads.append((os.getpid(), threading.get_ident()))  # one list, which all copies hold
        return x + self.seen


def test_what_forward_writes_is_lost_except_in_the_buffers_of_copy_0() -> None:
    counter = Counter()
    out = DataParallel(counter, cpus(2))(torch.zeros(5))
    assert (counter.calls, counter.seen.item()) == (0, 3.0)
    assert out.tolist() == [3, 3, 3, 2, 2]


def test_one_process_one_thread_for_each_copy() -> None:
    started, both = threading.Barrier(2, timeout=20), Counter()

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = both

        def forward(self, x):
            started.wait()  # passes only if both copies run at the same time
            return self.inner(x)

    DataParallel(Meets(), cpus(2))(torch.zeros(2))
    processes, threads = zip(*both.threads, strict=True)
    assert set(processes) == {os.getpid()} and len(set(threads)) == 2
    assert threading.get_ident() not in threads


def test_the_threads_take_over_grad_mode_inference_mode_and_autocast() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return x @ x.T

    wrapped, inputs = DataParallel(Look(), cpus(2)), torch.ones(4, 3)
    wrapped(inputs)
    with torch.no_grad():
        wrapped(inputs)
    with torch.inference_mode():
        assert wrapped(inputs).is_inference()
    assert seen == [(True, False)] * 2 + [(False, False)] * 2 + [(False, True)] * 2
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert wrapped(inputs).dtype == dtype
    assert wrapped(inputs).dtype == torch.float32


def test_batch_norm_sees_slices_and_remembers_the_first() -> None:
    model, inputs = nn.BatchNorm1d(4).double(), torch.randn(5, 4, dtype=torch.float64) ** 3
    wrapped, alone = DataParallel(copy.deepcopy(model), cpus(2)), copy.deepcopy(model)
    got = wrapped(inputs)
    expected = torch.cat([alone(inputs[:3]), copy.deepcopy(model)(inputs[3:])])
    assert torch.equal(got, expected)  # each slice normalised by itself ...
    assert not torch.allclose(got, model(inputs))  # ... which is not what the whole batch gives
    assert not differences(wrapped.module.state_dict(), alone.state_dict())  # statistics: of rows 0-2 alone
    assert not torch.allclose(wrapped.module.running_mean, model.running_mean)
    assert wrapped.module.num_batches_tracked == 1
    assert torch.equal(wrapped.eval()(inputs), wrapped.module(inputs))  # evaluation: no difference


# --- scalars, and the mean of means


class MeanLoss(nn.Module):
    def forward(self, losses):
        return losses.mean()


@pytest.mark.parametrize(
    ("num_replicas", "means", "mean"),
    [(1, [0.4333], 0.433), (2, [0.25, 0.8], 0.525), (3, [0.3, 0.2, 0.8], 0.433)],
)
def test_a_loss_inside_forward_gives_a_mean_of_means(
    num_replicas: int, means: list[float], mean: float
) -> None:
    losses = torch.tensor([0.3, 0.2, 0.8])
    with pytest.warns(UserWarning, match="along dimension 0, but output of every replica is a scalar"):
        got = DataParallel(MeanLoss(), cpus(num_replicas))(losses)
    torch.testing.assert_close(got, torch.tensor(means), rtol=0, atol=1e-4)
    assert round(got.mean().item(), 3) == mean
    sizes = torch.tensor(chunk_sizes(3, num_replicas))
    assert round((got * sizes).sum().item() / 3, 3) == 0.433  # the repair: sums, divided by the whole batch


# --- counted


def test_every_byte_of_a_step_is_counted() -> None:
    model = MLP(frozen=True, unused=True, tied=True)  # float32
    n, batch_size, [(inputs, targets)] = 3, 8, sample_batches(model, 1, 8)
    model.register_buffer("scale", torch.ones(6))
    wrapped = DataParallel(model, cpus(n))
    with wrapped.record() as flows:
        F.cross_entropy(wrapped(inputs), targets).backward()
    parameters = 4 * sum(
        p.numel() for p in model.parameters()
    )  # tied ones go once, unused and frozen ones too
    learned = 4 * sum(p.numel() for p in model.parameters() if p.grad is not None)
    away = batch_size - chunk_sizes(batch_size, n)[0]  # samples that are not device 0's
    assert flows.bytes_sent(0, "parameters") == (n - 1) * parameters
    assert flows.bytes_sent(0, "buffers") == (n - 1) * 24
    assert flows.bytes_sent(0, "inputs") == away * 57 * 4
    assert flows.bytes_received(0, "outputs") == flows.bytes_sent(0, "output gradients") == away * 7 * 4
    assert flows.bytes_received(0, "parameter gradients") == (n - 1) * learned
    assert flows.bytes_sent(0) == (n - 1) * (parameters + 24) + away * (57 + 7) * 4
    assert flows.bytes_received(0) == (n - 1) * learned + away * 7 * 4
    for replica, size in enumerate(chunk_sizes(batch_size, n)[1:], start=1):
        assert flows.bytes_received(replica) == parameters + 24 + size * (57 + 7) * 4
        assert flows.bytes_sent(replica) == learned + size * 7 * 4
    assert learned < parameters
    assert "parameter gradients" in repr(flows) and len(repr(flows).splitlines()) == len(flows.moves) + 5


def test_the_trace_has_both_ends_of_each_move_and_the_work_between() -> None:
    model, inputs, targets = model_and_batch("plain", 6)
    wrapped = DataParallel(model, cpus(2))
    with wrapped.record() as flows:
        outputs = wrapped(inputs)
        with flows.span("loss"):
            loss = F.cross_entropy(outputs, targets)
        loss.backward()
    names = lambda replica, lane: [e.name for e in flows.trace.rank(replica) if e.lane == lane]
    moves = ["inputs", "parameters", "outputs", "output gradients", "parameter gradients"]
    assert names(0, "comm") == names(1, "comm") == moves
    assert sorted(names(0, "compute")) == ["backward", "forward", "loss"]
    assert sorted(names(1, "compute")) == ["backward", "forward"]
    at = {(e.rank, e.name): (e.start_s, e.end_s) for e in flows.trace}
    times = [
        at[1, name]
        for name in ("inputs", "parameters", "forward", "outputs", *moves[3:4], "backward", moves[4])
    ]
    assert all(start <= end for start, end in times)
    assert [start for start, _ in times] == sorted(start for start, _ in times)
    assert at[0, "forward"] < at[0, "loss"] < at[0, "backward"]
    for replica in (0, 1):
        start, end = at[replica, "backward"]
        assert start < end <= at[1, "parameter gradients"][0]


def test_nothing_is_kept_outside_a_recording_and_one_replica_moves_nothing() -> None:
    model, inputs, _ = model_and_batch("plain", 4)
    wrapped = DataParallel(model, cpus(2))
    with wrapped.record() as first:
        wrapped(inputs)
    recorded = len(first.moves)
    with wrapped.record() as second:
        pass
    wrapped(inputs).sum().backward()
    assert recorded == len(first.moves) == 3 and second.moves == []
    alone = DataParallel(model, cpus(1))
    with alone.record() as flows:
        alone(inputs).sum().backward()
    assert flows.moves == [] and sorted(e.name for e in flows.trace) == ["backward", "forward"]


def test_inputs_from_a_device_without_a_replica_come_from_the_host() -> None:
    flows = Flows(2)
    parts = scatter((torch.zeros(5, 3),), Wires([torch.device("meta")] * 2, flows))
    assert [part[0].device.type for part in parts] == ["meta", "meta"]
    assert [(m.source, m.target, m.nbytes) for m in flows.moves] == [(HOST, 0, 36), (HOST, 1, 24)]
    assert [e.rank for e in flows.trace] == [0, 1] and "host" in repr(flows)


def test_without_gradients_nothing_comes_back() -> None:
    model, inputs, _ = model_and_batch("plain", 4)
    wrapped = DataParallel(model, cpus(2))
    with wrapped.record() as flows, torch.no_grad():
        assert not wrapped(inputs).requires_grad
    assert [m.what for m in flows.moves] == ["inputs", "parameters", "outputs"]


# --- state_dict


def test_a_checkpoint_fits_with_and_without_the_wrapper() -> None:
    ours, other = DataParallel(MLP(seed=1), cpus(2)), MLP(seed=2)
    assert list(ours.state_dict()) == list(other.state_dict())
    other.load_state_dict(ours.state_dict())
    assert not differences(other.state_dict(), ours.module.state_dict())
    ours.load_state_dict(MLP(seed=3).state_dict())
    assert not differences(ours.state_dict(), MLP(seed=3).state_dict())


def test_checkpoints_of_torchs_wrapper_can_be_loaded() -> None:
    theirs, ours = nn.DataParallel(MLP(seed=4)), DataParallel(MLP(seed=5), cpus(2))
    assert next(iter(theirs.state_dict())) == "module.first.weight"
    ours.load_state_dict(theirs.state_dict())
    assert not differences(ours.state_dict(), theirs.module.state_dict())
    theirs.module.load_state_dict(ours.state_dict())  # and the other way: through .module


@pytest.mark.parametrize("spelling", ["", "module."])
def test_a_module_that_has_a_child_called_module(spelling: str) -> None:
    inner = DataParallel(nn.Sequential(OrderedDict(module=nn.Linear(2, 2))), cpus(2))
    state = {
        f"{spelling}module.{name}": torch.ones(2, 2)[: 2 if name == "weight" else 0] for name in ("weight",)
    }
    state[f"{spelling}module.bias"] = torch.ones(2)
    inner.load_state_dict(state)
    assert inner.module.module.weight.sum() == 4 and list(state) == [
        f"{spelling}module.weight",
        f"{spelling}module.bias",
    ]


def test_inside_a_larger_model_and_through_pickle_and_deepcopy() -> None:
    outer = nn.Sequential(nn.Linear(57, 57), DataParallel(MLP(seed=1), cpus(2)))
    plain = nn.Sequential(nn.Linear(57, 57), MLP(seed=2))
    plain.load_state_dict(outer.state_dict())
    for twin in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        twin.load_state_dict(plain.state_dict())
        inputs = torch.randn(4, 57)
        torch.testing.assert_close(twin(inputs), plain(inputs))
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.weight"):
        outer[1].load_state_dict({"first.bias": torch.zeros(19)})


# --- errors


class Picky(nn.Module):
    def forward(self, x):
        if (x < 0).any():
            raise KeyError("negative")
        return x


def test_an_error_in_a_copy_names_the_copy_and_keeps_its_cause() -> None:
    wrapped = DataParallel(Picky(), cpus(3))
    with pytest.raises(ReplicaError, match=r"^replica 1 of 3 on cpu raised: KeyError: 'negative'$") as caught:
        wrapped(torch.tensor([1.0, -1.0, 1.0]))
    assert (caught.value.replica, caught.value.device) == (1, torch.device("cpu"))
    cause = caught.value.__cause__
    assert type(cause) is KeyError and cause.__traceback__.tb_next is not None  # down to the line in forward
    with pytest.raises(ReplicaError, match=r"replica 0 of 3 on cpu raised \(so did 2\)"):
        wrapped(torch.tensor([-1.0, 1.0, -1.0]))
    assert wrapped(torch.ones(3)).tolist() == [1, 1, 1]  # and is fit for the next batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["cpu", "cuda:97"],), r"device_ids\[1\]: expected a device of this machine \(cpu.*got 'cuda:97'"),
        (([97],), r"device_ids\[0\]: expected a device of this machine \(cpu.*got 97"),
        ((["cpu", "gpu"],), r"device_ids\[1\]: expected a device .* got 'gpu'"),
        (([None],), r"device_ids\[0\]: .* got None"),
        (([],), r"device_ids: expected a list such as .* got \[\]"),
        (("cpu",), "device_ids: expected a list .* got 'cpu'"),
        ((["cpu", "cpu"], "cuda:97"), "output_device: expected a device of this machine"),
    ],
)
def test_devices_that_do_not_exist(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Linear(2, 2), *arguments)


@pytest.mark.gpu
def test_an_output_device_outside_the_list() -> None:
    with pytest.raises(ValueError, match="output_device: expected one of device_ids"):
        DataParallel(nn.Linear(2, 2), [0, 1], output_device="cpu")


def test_wrong_kinds() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"module: expected an nn\.Module, got SGD.*stays as it is"):
        DataParallel(torch.optim.SGD(model.parameters(), lr=0.1))
    for dim in ("0", 1.0, True, None):
        with pytest.raises(TypeError, match="dim: expected the number of a dimension"):
            DataParallel(model, cpus(2), dim=dim)
    assert DataParallel(model, ["cpu:0", torch.device("cpu")]).device_ids == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("batch", "dim", "message"),
    [
        ((torch.zeros(3, 2),), 0, r"inputs\[0\] has 3 samples along dimension 0 for 4 replicas.*drop_last"),
        ((torch.zeros(0, 2),), 0, "has 0 samples"),
        ((torch.zeros(8, 2), torch.zeros(4)), 0, r"inputs\[0\] has 8, inputs\[1\] has 4"),
        (
            ({"x": torch.zeros(8), "scale": torch.tensor(2.0)},),
            0,
            r"inputs\[0\]\['scale'\]: dim=0 does not exist.*as a number",
        ),
        ((torch.zeros(8, 2),), 2, r"inputs\[0\]: dim=2 does not exist in a tensor of shape \(8, 2\)"),
        ((torch.zeros(8, 2),), -3, "dim=-3 does not exist"),
        ((8, "words", object()), 0, "no tensor to cut among the arguments"),
    ],
)
def test_batches_that_cannot_be_cut(batch: tuple, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Identity(), cpus(4), dim=dim)(*batch)


def test_keyword_arguments_are_named_too() -> None:
    with pytest.raises(ValueError, match=r"kwargs\['mask'\] has 4"):
        DataParallel(nn.Linear(2, 2), cpus(2))(torch.zeros(8, 2), mask=torch.zeros(4))


def test_a_module_that_lives_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ValueError,
        match=r"on cpu, the first of device_ids, but 1\.weight is on meta: call module\.to\('cpu'\)",
    ):
        DataParallel(model, cpus(2))(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="weight has no shape yet"):
        DataParallel(nn.LazyLinear(3), cpus(2))(torch.zeros(4, 2))


class Returns(nn.Module):
    """Returns what `make` makes of the slice and of whether it is the first one."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x, x[0].item() == 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x, first: (x, {"n": 3.0}), TypeError, r"output\[1\]\['n'\]: expected a tensor .* got float, float"),
        (lambda x, first: x if first else None, TypeError, "output: .* got Tensor, NoneType"),
        (lambda x, first: x if first else [x], TypeError, "output: .* got Tensor, list"),
        (lambda x, first: [x] if first else x, ValueError, "got list of 1, Tensor"),
        (lambda x, first: (x,) * (1 + first), ValueError, "same structure .* got tuple of 2, tuple of 1"),
        (lambda x, first: {"a" if first else "b": x}, ValueError, r"with keys \['a'\], dict with keys \['b'\]"),
        (lambda x, first: x[:, None].expand(-1, 2 + first), ValueError, r"got \(2, 3\), \(2, 2\)\. Sequences"),
        (lambda x, first: x if first else x[0], ValueError, "dim=0 does not exist in a tensor of shape"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_together(make, error, message: str) -> None:
    with pytest.raises(error, match=message):
        DataParallel(Returns(make), cpus(2))(torch.arange(4.0))


# --- GPUs


@pytest.mark.gpu
def test_the_same_on_two_gpus_as_torchs_own() -> None:
    model = MLP(tied=True, frozen=True).to("cuda:0")
    inputs, targets = (t.to("cuda:0") for t in sample_batches(model, 1, 6)[0])
    theirs, ours = nn.DataParallel(copy.deepcopy(model), [0, 1]), DataParallel(model, [0, 1])
    for wrapped in (theirs, ours):
        F.cross_entropy(wrapped(inputs), targets).backward()
    assert not differences(gradients(ours.module), gradients(theirs.module), rtol=1e-5, atol=1e-7)  # float32
