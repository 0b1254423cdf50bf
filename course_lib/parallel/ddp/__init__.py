"""DistributedDataParallel from scratch: one process for each rank, a whole model in each.

    model = BucketedDDP(module, comm)
    loss_fn(model(inputs), targets).backward()      # each rank: its own slice of the batch
    optimizer.step()                                # each rank: the same update

The parameters are broadcast once, when the model is wrapped. From then on only gradients travel: in each backward they
are averaged over the ranks, so that equal models stay equal. There is no server, and no parameter moves again. Each
rank
holds everything, parameters, gradients and optimizer state: this shares out the data, not the memory.

The classes are a ladder; each rung sends the same bytes and answers the same call, `loss.backward()`.

PerParameterDDP   after backward, one all-reduce for each parameter
FlatDDP           after backward, one all-reduce of one flat buffer
BucketedDDP       during backward, one all-reduce for each bucket that is full

The mean is the mean over the *ranks*: a rank's loss is the mean of its own samples. Where ranks have different numbers
of samples, weigh the losses (`weighted_loss`), or the result is a mean of means.

Source: S. Li and others, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

Left out: sparse gradients, several devices in one process, gradients of gradients, buckets in the order in which
gradients really came (PyTorch builds its buckets anew after the first step; here they stay in reverse order of the
parameters).
"""

from course_lib.parallel.ddp.after_backward import FlatDDP, PerParameterDDP
from course_lib.parallel.ddp.base import DDP
from course_lib.parallel.ddp.bucketed import BucketedDDP
from course_lib.parallel.ddp.hooks import all_reduce_hook, bf16_compress_hook
from course_lib.parallel.ddp.overlap import Overlap, measure_overlap
from course_lib.parallel.ddp.weighting import weighted_loss

__all__ = [
    "DDP",
    "BucketedDDP",
    "FlatDDP",
    "Overlap",
    "PerParameterDDP",
    "all_reduce_hook",
    "bf16_compress_hook",
    "measure_overlap",
    "weighted_loss",
]
