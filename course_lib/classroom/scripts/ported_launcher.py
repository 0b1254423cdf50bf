"""`old_launcher.py`, ported: `torchrun --nproc-per-node 2 ported_launcher.py`, on any number of machines."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: from the environment
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])  # with GPUs: torch.cuda.set_device(local_rank)
    data = TensorDataset(torch.arange(12))
    sampler: DistributedSampler = DistributedSampler(data)  # asks the process group for rank and world size
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # or every epoch has the same order
        samples = list(sampler)  # a training would train on them
        total = torch.tensor(sum(samples))
        dist.all_reduce(total)
        print(f"rank {rank} of {world_size}, local rank {local_rank}, epoch {epoch}: {samples}, sum {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
