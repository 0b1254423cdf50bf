"""DDP beside PyTorch's: one training step of a GPT of 6 million parameters and of ResNet-18, on 2 and 4 ranks.

Three contests, each of two wrappers of the same model, fed the same batches in turns, in the same processes:

    BucketedDDP          against   DistributedDataParallel     both on gloo
    DDP on our ring      against   DDP on gloo                 both torch's wrapper
    FSDP2 on our ring    against   FSDP2 on gloo               both torch's fully_shard

and, for 4 ranks, two more on 4 virtual hosts with links of 400 Mbit/s, where there is something to hide: BucketedDDP
against DistributedDataParallel, both with buckets of 1 MiB. "hidden_share" is what ours hid behind backward, as a
share of what can be hidden, the smallest over the ranks.

Where ours is not far ahead, and why. gloo's reduce_scatter is an all_reduce inside, so FSDP2 on gloo sends 4 parts
where the ring sends 3: at most 1.33 times faster, where nothing but bytes counts. On one machine the ring takes two
thirds of gloo's time for FSDP2's collectives, but they are a fifth of a GPT's step; the rest is computing, and FSDP2's
own copies. With ResNet-18, whose parameters are more and whose computing is less, it shows.

A step is forward, backward and an SGD update. "equal": all parameters agree after the first step, on all ranks; sums of
float32 in another order differ in the last bits, hence the tolerance, and each further step of a network with BatchNorm
would make that larger.
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

from course_lib import VirtualHosts, launch
from course_lib.bench.rows import BenchRow, row, take_turns
from course_lib.classroom.gpt import GPT, gpt_6m, gpt_batches, token_loss
from course_lib.comm import ring_backend
from course_lib.comm.communicator import Communicator
from course_lib.comm.trace import Trace
from course_lib.parallel.ddp import BucketedDDP, measure_overlap

RUNS, RUNS_ON_LINKS = 15, 5
LINK = "400Mbit"
RTOL, ATOL = 1e-3, 1e-5
Make = Callable[[], nn.Module]
Wrap = Callable[[nn.Module], nn.Module]
MODELS: dict[str, Make] = {"GPT": gpt_6m, "ResNet-18": lambda: resnet18()}


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

    comm: Communicator
    name: str
    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loss_fn = token_loss if self.batch[0].dtype == torch.int64 else F.cross_entropy

    def prepare(self) -> None:
        self.optimizer.zero_grad()

    def call(self) -> None:
        loss = self.loss_fn(self.model(self.batch[0]), self.batch[1])
        with self.comm.span("backward"):
            loss.backward()
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
            found += launch(on_ranks, name, MODELS[name], runs, world_size=world_size, show="none")[0]
    return found + (on_links() if 4 in world_sizes else [])


def on_links() -> list[BenchRow]:
    with VirtualHosts(4, link=LINK) as hosts:
        options: dict[str, Any] = {"world_size": 4, "hosts": hosts, "backend": "gloo", "show": "none"}
        on_ranks = launch(hiding, MODELS["GPT"], hosts.label, **options)
        fsdp2 = launch(fsdp_on_links, MODELS["GPT"], hosts.label, **options)[0]
    return [on_ranks[0] | {"hidden_share": min(one["hidden_share"] for one in on_ranks)}, fsdp2]


def hiding(comm: Communicator, make: Make, label: str) -> BenchRow:
    ours: Wrap = lambda module: BucketedDDP(module, comm, bucket_cap_mb=1)
    peer: Wrap = lambda module: DistributedDataParallel(module, process_group=comm.group, bucket_cap_mb=1)
    contestants = [contestant(comm, make, *way) for way in (("BucketedDDP", ours), ("DDP", peer))]
    found = compare(comm, f"GPT, step at {LINK} {label}".rstrip(), RUNS_ON_LINKS, *contestants)
    comm.trace.clear()
    comm.ledger.clear()
    for _ in range(3):
        contestants[0].prepare()
        comm.barrier()
        contestants[0].call()
    mine = Trace(comm.trace)
    mine.add_ledger(comm.global_rank, comm.ledger)
    return found | {"hidden_share": measure_overlap(mine).share}


def fsdp_on_links(comm: Communicator, make: Make, label: str) -> BenchRow:
    ring_backend.register()
    groups = {"on our ring": dist.new_group(backend="ring"), "on gloo": dist.new_group(backend="gloo")}
    contestants = [contestant(comm, make, name, fsdp(group)) for name, group in groups.items()]
    return compare(comm, f"GPT, FSDP2 at {LINK} {label}".rstrip(), RUNS_ON_LINKS, *contestants)


def on_ranks(comm: Communicator, model: str, make: Make, runs: int) -> list[BenchRow]:
    ring_backend.register()
    gloo, ring = dist.new_group(backend="gloo"), dist.new_group(backend="ring")
    ddp = lambda group: lambda module: DistributedDataParallel(module, process_group=group)
    contests: list[tuple[str, tuple[str, Wrap], tuple[str, Wrap]]] = [
        ("step", ("BucketedDDP", lambda module: BucketedDDP(module, comm)), ("DDP", ddp(comm.group))),
        ("DDP", ("on our ring", ddp(ring)), ("on gloo", ddp(gloo))),
        ("FSDP2", ("on our ring", fsdp(ring)), ("on gloo", fsdp(gloo))),
    ]
    return [
        compare(comm, f"{model}, {case}", runs, *(contestant(comm, make, *way) for way in ways))
        for case, *ways in contests
    ]


def fsdp(group: Any) -> Wrap:
    return lambda module: shard_layers(module, DeviceMesh.from_group(group, "cpu"))


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


def same_first_step(comm: Communicator, ours: Contestant, peer: Contestant) -> bool:
    ours.call()
    peer.call()
    pairs = zip(ours.parameters(), peer.parameters(), strict=True)
    equal = torch.tensor([int(all(torch.allclose(one, other, RTOL, ATOL) for one, other in pairs))])
    comm.all_reduce(equal, "min")
    return bool(equal.item())


def contestant(comm: Communicator, make: Make, name: str, wrap: Wrap) -> Contestant:
    module = make()
    return Contestant(comm, name, wrap(module), batch_of(module, comm.rank))


def compare(comm: Communicator, case: str, runs: int, ours: Contestant, peer: Contestant) -> BenchRow:
    equal = same_first_step(comm, ours, peer)
    ours_s, peer_s = take_turns(comm, [ours, peer], runs)
    return row("ddp", case, comm.world_size, (ours.name, ours_s), (peer.name, peer_s), equal)
