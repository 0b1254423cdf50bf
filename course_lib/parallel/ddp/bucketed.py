"""Buckets that leave while backward still runs: the sum of the late layers' gradients hides behind the early layers'
backward.

Backward goes through the layers from the last to the first, so gradients become ready in about the reverse order of the
parameters. In that order they fill buckets (`plan.buckets`). A hook on each parameter copies its gradient into the
bucket, and when the last gradient of a bucket has come, its all-reduce starts and backward goes on. At the end of
backward only the buckets that have not come back yet are waited for.

Buckets leave in a fixed order, the same on all ranks, even where one is full before its turn: the n-th all-reduce of
one rank meets the n-th of the others, whatever is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from course_lib.comm.communicator import Communicator
from course_lib.parallel.ddp.base import DDP
from course_lib.parallel.ddp.hooks import CommHook, Pending, all_reduce_hook
from course_lib.plan.buckets import assign_buckets

MB = 2**20


@dataclass
class Bucket:
    """Gradients that travel together, and the flat memory they lie in."""

    flat: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    num_missing: int = 0
    sum: Pending | None = None

    def __repr__(self) -> str:
        return f"Bucket({len(self.views)} gradients, {self.flat.nbytes / MB:.2f} MiB)"


class BucketedDDP(DDP):
    """Gradients averaged bucket by bucket, during backward.

    bucket_cap_mb: a bucket is full with this many MiB. Small: many all-reduces, each with its fixed cost. Large: the
        last one, which nothing hides, is large.
    first_bucket_mb: the same for the first bucket, so that something is under way early.
    comm_hook: what to do with a full bucket (`hooks`); None: sum it up.

    After backward each `parameter.grad` is a view into its bucket, which saves copying the averages back. So the
    gradients of a step must not be kept beyond the next one; clone them.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        *,
        comm_hook: CommHook | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a number of MiB above 0, got {value!r}")
        if comm_hook is not None and not callable(comm_hook):
            raise TypeError(f"comm_hook: expected a function of (comm, flat) or None, got {comm_hook!r:.60}")
        super().__init__(module, comm, **options)
        self.comm_hook = comm_hook or all_reduce_hook
        ready_order = self.parameters_trained[::-1]
        caps = [max(1, int(cap * MB)) for cap in (min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb)]
        kinds = [parameter.dtype for parameter in ready_order]
        numbers = assign_buckets([parameter.nbytes for parameter in ready_order], kinds, caps)
        self.buckets = [_bucket([ready_order[i] for i in members]) for members in numbers]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
        self._num_launched = 0

    def begin_backward(self) -> None:
        self._num_launched = 0
        for bucket in self.buckets:
            bucket.num_missing, bucket.sum = len(bucket.views), None

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        view = bucket.views[parameter]
        if parameter.grad is None:  # not used in this forward: it adds nothing
            view.zero_()
        else:  # the division costs no second pass; and the gradient may be the view already
            torch.mul(parameter.grad, 1 / self.num_contributing, out=view)
        parameter.grad = view
        bucket.num_missing -= 1
        self._launch_full()

    def _launch_full(self) -> None:
        while self._num_launched < len(self.buckets) and not self.buckets[self._num_launched].num_missing:
            bucket = self.buckets[self._num_launched]
            bucket.sum = self.comm_hook(self.comm, bucket.flat)
            if not hasattr(bucket.sum, "wait"):
                raise TypeError(
                    f"rank {self.comm.global_rank}: comm_hook: expected it to return something with wait(), after "
                    f"which the sum stands in the bucket; got {bucket.sum!r:.60}"
                )
            self._num_launched += 1

    def average_gradients(self) -> None:
        for bucket in self.buckets:
            assert bucket.sum is not None
            bucket.sum.wait()

    def average_zeros(self) -> None:
        self.begin_backward()
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.num_missing = 0
        self._launch_full()
        self.average_gradients()


def _bucket(parameters: list[nn.Parameter]) -> Bucket:
    """Memory for the parameters' gradients, and in it a view for each, of its shape and strides."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    bucket, start = Bucket(flat), 0
    for parameter in parameters:
        # Autograd gives a gradient the strides of its parameter where that has no gaps; so does empty_like.
        strides = torch.empty_like(parameter, device="meta").stride()
        bucket.views[parameter] = flat.as_strided(parameter.shape, strides, start)
        start += parameter.numel()
    return bucket
