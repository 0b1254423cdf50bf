"""What `torch.nn.DataParallel` does, as chapter 01 tells it: each pitfall, reproduced.

Without a GPU it only calls the module, so most of its own code cannot run here as it is. Where a fact lies in that
code's Python, the test runs it with nothing replaced but the copy from device to device (`copies_stay_here`). Where
it lies in the GPU, the test needs one. Where our DataParallel shows the same thing on ["cpu", "cpu"], it stands
beside it.
"""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import _functions, scatter_gather

from course_lib.classroom.models import MLP
from course_lib.parallel.data_parallel import DataParallel

on_cpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="what happens on a machine without a GPU"
)


@pytest.fixture
def copies_stay_here(monkeypatch):
    """torch's scatter and gather, whose copies to and from GPUs are slices and `torch.cat` on the CPU instead."""

    class Scatter:
        @staticmethod
        def apply(devices, chunk_sizes, dim, tensor):
            return tensor.chunk(len(devices), dim)  # what torch's C++ code calls

    def cat(tensors, dim, destination):
        return torch.cat([torch.zeros(tensor.shape) for tensor in tensors], dim)

    monkeypatch.setattr(scatter_gather, "Scatter", Scatter)
    monkeypatch.setattr(_functions.comm, "gather", cat)


# --- what it is


def test_its_arguments() -> None:
    ours, theirs = inspect.signature(DataParallel), inspect.signature(nn.DataParallel)
    assert (
        list(theirs.parameters) == ["module", "device_ids", "output_device", "dim"] == list(ours.parameters)
    )
    defaults = lambda signature: [p.default for p in signature.parameters.values()][1:]
    assert defaults(theirs) == [None, None, 0] == defaults(ours)


@on_cpu
def test_without_a_gpu_it_just_calls_the_module() -> None:
    model, inputs = MLP(), torch.randn(1, 57)
    wrapped = nn.DataParallel(model, device_ids=[0, 1], output_device=3)  # not even looked at
    assert wrapped.device_ids == [] and not hasattr(wrapped, "output_device")
    assert torch.equal(wrapped(inputs), model(inputs))


# --- the batch is split


def test_5_samples_on_4_devices_use_3_of_them(copies_stay_here) -> None:
    pieces = scatter_gather.scatter(torch.arange(5), [0, 1, 2, 3])
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert (
        len(scatter_gather.scatter(torch.arange(2), [0, 1, 2, 3])) == 2
    )  # smaller than the devices: no error
    sizes = []

    class Look(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x

    DataParallel(Look(), ["cpu"] * 4)(torch.arange(5))
    assert sorted(sizes) == [1, 1, 1, 2]  # ours keeps all four busy
    with pytest.raises(ValueError, match="has 2 samples along dimension 0 for 4 replicas"):
        DataParallel(Look(), ["cpu"] * 4)(torch.arange(2))


def test_samples_without_a_partner_are_dropped_in_silence(copies_stay_here) -> None:
    inputs, weights = torch.arange(8), torch.ones(3)  # 8 samples, 3 weights
    pieces = scatter_gather.scatter((inputs, weights), [0, 1, 2, 3])
    assert [piece[0].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]  # 6 and 7 are gone
    with pytest.raises(ValueError, match=r"inputs\[0\] has 8, inputs\[1\] has 3"):
        DataParallel(nn.Linear(1, 1), ["cpu"] * 4)(inputs, weights)


@pytest.mark.parametrize("argument", [[7], "text", 3, None])
def test_what_is_no_tensor_reaches_every_copy(copies_stay_here, argument) -> None:
    pieces = scatter_gather.scatter((torch.arange(4), argument), [0, 1])
    assert [piece[1] for piece in pieces] == [argument, argument]


def test_an_object_that_holds_the_batch_is_not_split(copies_stay_here) -> None:
    class Batch:
        inputs = torch.arange(4)

    batch = Batch()
    assert scatter_gather.scatter((batch,), [0, 1]) == [(batch,), (batch,)]  # each device does all the work
    with pytest.raises(ValueError, match="not inside other objects"):
        DataParallel(nn.Linear(1, 1), ["cpu"] * 2)(batch)


# --- scalars


def test_the_warning_about_scalars_comes_from_a_loss_inside_forward(copies_stay_here) -> None:
    losses = [
        torch.tensor(0.25, device="meta"),
        torch.tensor(0.8, device="meta"),
    ]  # anything but the CPU is taken
    with pytest.warns(
        UserWarning, match="asked to gather along dimension 0, but all input tensors were scalars"
    ):
        vector = scatter_gather.gather(losses, "cpu")
    assert vector.shape == (2,)  # no loss, but one for each device: backward() on it fails
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        vector.requires_grad_().backward()


@on_cpu
def test_its_gather_refuses_the_cpu() -> None:
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):
        scatter_gather.gather([torch.zeros(2), torch.zeros(2)], "cpu")


# --- saving and loading


def test_the_prefix_in_the_checkpoint_and_the_two_ways_around_it() -> None:
    model = MLP()
    wrapped = nn.DataParallel(model)
    assert list(wrapped.state_dict()) == ["module." + name for name in model.state_dict()]
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"first\.weight".*Unexpected key.*"module\.first\.weight"'
    ):
        MLP().load_state_dict(wrapped.state_dict())
    MLP().load_state_dict(wrapped.module.state_dict())  # save .module ...
    state = wrapped.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")  # ... or take the prefix off
    MLP().load_state_dict(state)


def test_the_models_own_attributes_are_behind_module() -> None:
    wrapped = nn.DataParallel(MLP())
    with pytest.raises(AttributeError, match="'DataParallel' object has no attribute 'num_classes'"):
        wrapped.num_classes  # noqa: B018
    assert wrapped.module.num_classes == 7


# --- the optimizer must not be wrapped


@on_cpu
def test_a_wrapped_optimizer_cannot_step_and_forgets_to_zero_the_gradients() -> None:
    model = nn.Linear(2, 1)
    wrapped = nn.DataParallel(torch.optim.SGD(model.parameters(), lr=0.1))  # raises nothing
    model(torch.ones(3, 2)).sum().backward()
    wrapped.zero_grad()  # nn.Module's: of its parameters, and it has none
    assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))
    with pytest.raises(AttributeError, match="no attribute 'step'"):
        wrapped.step()
    before = model.weight.clone()
    wrapped.module.step()  # old tutorials write this: it is the optimizer itself, on one device
    torch.testing.assert_close(model.weight, before - 0.3)
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got SGD"):
        DataParallel(torch.optim.SGD(model.parameters(), lr=0.1), ["cpu"] * 2)


def test_an_optimizer_made_before_the_wrapper_or_after_it_is_the_same() -> None:
    model = MLP()
    wrapped = nn.DataParallel(model)
    assert all(a is b for a, b in zip(model.parameters(), wrapped.parameters(), strict=True))


# --- mixed precision, and what else torch keeps for each thread


def test_autocast_inside_forward_works_in_the_copies_threads() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return self.linear(x)

    model = Half()
    out = DataParallel(model, ["cpu"] * 2)(torch.randn(6, 4))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and model.linear.weight.grad.dtype == torch.float32


def test_a_new_thread_knows_nothing_of_autocast_around_it() -> None:
    """So the wrapper has to hand it on: ours does. torch's hands on that it is enabled, not for which dtype."""
    seen: list[object] = []

    def look() -> None:
        seen.extend((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float16)
    assert seen == [False, torch.bfloat16]


# --- the copies


def test_its_copies_have_no_parameters() -> None:
    model = MLP()
    copy = model._replicate_for_data_parallel()  # what nn.DataParallel makes its copies from
    assert (
        list(copy.parameters(recurse=False))
        == []
        == list(copy.first._replicate_for_data_parallel().parameters())
    )

    class AsksItsParameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x.to(next(self.parameters()).dtype))

    assert DataParallel(AsksItsParameters(), ["cpu"] * 2)(torch.ones(4, 2, dtype=torch.float64)).shape == (
        4,
        2,
    )


# --- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda:1"])
def test_parameters_must_be_on_the_first_device(home: str) -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2).to(home), device_ids=[0, 1])
    with pytest.raises(
        RuntimeError, match=r"parameters and buffers on device cuda:0 .*found one of them on device"
    ):
        wrapped(torch.ones(4, 2))


@pytest.mark.gpu
def test_the_gradient_of_an_unused_parameter_is_zero_not_none() -> None:
    model = MLP(unused=True).to("cuda:0")
    nn.DataParallel(model, [0, 1])(torch.ones(4, 57)).sum().backward()
    assert model.spare is not None and torch.count_nonzero(model.spare.weight.grad) == 0
    model.zero_grad()
    DataParallel(model, [0, 1])(torch.ones(4, 57, device="cuda:0")).sum().backward()
    assert model.spare.weight.grad is None


@pytest.mark.gpu
def test_its_threads_take_autocast_over_without_the_dtype() -> None:
    model, inputs = nn.Linear(2, 2).to("cuda:0"), torch.ones(4, 2, device="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.DataParallel(model, [0, 1])(inputs).dtype == torch.float16
        assert DataParallel(model, [0, 1])(inputs).dtype == torch.bfloat16


@pytest.mark.gpu
def test_its_copies_have_no_parameters_on_gpus_either() -> None:
    class AsksItsParameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x.to(next(self.parameters()).dtype))

    model = AsksItsParameters().to("cuda:0")
    with pytest.raises(StopIteration):
        nn.DataParallel(model, [0, 1])(torch.ones(4, 2, device="cuda:0"))
