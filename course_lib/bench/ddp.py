"""DDP beside PyTorch's: one training step of a GPT of 6 million parameters and of ResNet-18, on 2 and 4 ranks.

Three contests, each of two wrappers of the same model, fed the same batches in turns, in the same processes:

    BucketedDDP          against   DistributedDataParallel     both on gloo
    DDP on our ring      against   DDP on gloo                 both torch's wrapper
    FSDP2 on our ring    against   FSDP2 on gloo               both torch's fully_shard

A step is forward, backward and an SGD update. "equal": all parameters agree after the last step; sums of float32 in
another order differ in the last bits, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import launch
from course_lib.bench.rows import BenchRow, row, take_turns
from course_lib.classroom.gpt import GPT, gpt_6m, gpt_batches, token_loss
from course_lib.comm import ring_backend
from course_lib.comm.communicator import Communicator
from course_lib.parallel.ddp import BucketedDDP

RUNS = 15
RTOL, ATOL = 1e-3, 1e-5
MODELS: dict[str, Callable[[], nn.Module]] = {"GPT": gpt_6m, "ResNet-18": lambda: resnet18()}
Wrap = Callable[[nn.Module], nn.Module]


def resnet18() -> nn.Module:
    from torchvision.models import resnet18  # a second to import, for this bench only

    torch.manual_seed(0)
    return resnet18(num_classes=10)


def batch_of(model: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch, another one on each rank: 8 texts of 64 characters, or 8 images of 64 x 64."""
    if isinstance(model, GPT):
        return gpt_batches(model, 1, 8, seed=rank)[0]
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 3, 64, 64, generator=generator), torch.randint(10, (8,), generator=generator)


@dataclass
class Contestant:
    """A wrapped model, and its training step."""

    name: str
    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loss_fn = token_loss if self.batch[0].dtype == torch.int64 else F.cross_entropy

    def prepare(self) -> None:
        self.optimizer.zero_grad()

    def call(self) -> None:
        self.loss_fn(self.model(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()

    def parameters(self) -> list[torch.Tensor]:
        """Whole ones, also where the wrapper keeps shards."""
        parameters: list[Any] = list(self.model.parameters())
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters]


def rows(
    world_sizes: Sequence[int], models: Sequence[str] = tuple(MODELS), runs: int = RUNS
) -> list[BenchRow]:
    """For each world size and model, the three contests."""
    found: list[BenchRow] = []
    for world_size in world_sizes:
        for name in models:
            found += launch(on_ranks, name, runs, world_size=world_size, show="none")[0]
    return found


def on_ranks(comm: Communicator, model: str, runs: int) -> list[BenchRow]:
    ring_backend.register()
    gloo, ring = dist.new_group(backend="gloo"), dist.new_group(backend="ring")
    ddp = lambda group: lambda module: DistributedDataParallel(module, process_group=group)
    fsdp = lambda group: lambda module: shard_layers(module, DeviceMesh.from_group(group, "cpu"))
    contests: list[tuple[str, tuple[str, Wrap], tuple[str, Wrap]]] = [
        ("step", ("BucketedDDP", lambda module: BucketedDDP(module, comm)), ("DDP", ddp(comm.group))),
        ("DDP", ("on our ring", ddp(ring)), ("on gloo", ddp(gloo))),
        ("FSDP2", ("on our ring", fsdp(ring)), ("on gloo", fsdp(gloo))),
    ]
    return [measure(comm, model, case, ours, peer, runs) for case, ours, peer in contests]


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> Any:
    """torch's FSDP2, a layer at a time: each block by itself, then what is left."""
    blocks = (
        model.blocks
        if isinstance(model, GPT)
        else [b for name, b in model.named_children() if "layer" in name]
    )
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure(
    comm: Communicator, model: str, case: str, ours: tuple[str, Wrap], peer: tuple[str, Wrap], runs: int
) -> BenchRow:
    contestants = []
    for name, wrap in (ours, peer):
        module = MODELS[model]()
        contestants.append(Contestant(name, wrap(module), batch_of(module, comm.rank)))
    ours_s, peer_s = take_turns(comm, contestants, runs)
    pairs = zip(contestants[0].parameters(), contestants[1].parameters(), strict=True)
    close = [torch.allclose(one, other, RTOL, ATOL) for one, other in pairs]
    equal = torch.tensor([int(all(close))])
    comm.all_reduce(equal, "min")
    timed = (ours[0], ours_s), (peer[0], peer_s)
    parameters = sum(p.numel() for p in MODELS[model]().parameters())
    return row(
        "ddp", f"{model}, {case}", comm.world_size, *timed, bool(equal.item()), num_parameters=parameters
    )
