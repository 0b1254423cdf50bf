"""Written years ago for `python -m torch.distributed.launch --nproc-per-node 2 old_launcher.py`, on one machine."""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int)  # the launcher adds it
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    local_rank = rank = args.local_rank
    world_size = 2
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    data = TensorDataset(torch.arange(12))
    sampler: DistributedSampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    for epoch in range(args.epochs):
        samples = list(sampler)  # a training would train on them
        total = torch.tensor(sum(samples))
        dist.all_reduce(total)
        print(f"rank {rank} of {world_size}, local rank {local_rank}, epoch {epoch}: {samples}, sum {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
