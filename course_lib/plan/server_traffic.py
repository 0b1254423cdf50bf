"""What each rank sends and receives in a step with a parameter server: bytes and messages, exactly.

    N    world_size, number of ranks, all of them workers
    n    length, number of trainable elements
    S    n * itemsize, their bytes: one gradient, or one set of parameters
    P    num_tensors, number of trainable parameters (tensors)
    h    header_bytes(P): what travels ahead of a gradient (its number of samples, its loss, which parameters
    it has) c_r  bytes of the chunk that rank r serves

As in `plan.traffic`, the functions return one entry for each rank. One server receives and sends about
(N-1)·S; sharded, every rank sends about 2(N-1)/N·S. The total over all ranks is the same, 2(N-1)·S.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
"""

from __future__ import annotations

from course_lib.plan.partition import chunk_sizes
from course_lib.plan.traffic import Bytes

_NUMBER = 8  # headers hold float64
LOSS_BYTES = _NUMBER  # ahead of the parameters: the step's loss
START_BYTES = 4 * _NUMBER  # ahead of the first copy: what model it is, four int64


def header_bytes(num_tensors: int) -> int:
    return _NUMBER * (2 + num_tensors)


def server_step_bytes(
    world_size: int, length: int, itemsize: int = 4, num_tensors: int = 1, server: int = 0
) -> list[Bytes]:
    """A push and a pull: S and a header up from each worker, S and the loss down to each."""
    _check(world_size, server)
    up, down = header_bytes(num_tensors) + length * itemsize, LOSS_BYTES + length * itemsize
    workers = world_size - 1
    return [
        Bytes(workers * down, workers * up) if r == server else Bytes(up, down) for r in range(world_size)
    ]


def server_step_messages(world_size: int, server: int = 0) -> list[int]:
    """Two from each worker (header, gradient), two to each (loss, parameters)."""
    _check(world_size, server)
    return [2 * (world_size - 1) if r == server else 2 for r in range(world_size)]


def sharded_step_bytes(world_size: int, length: int, itemsize: int = 4, num_tensors: int = 1) -> list[Bytes]:
    """Rank r sends the chunks of the others, S - c_r, and its own to each of them, (N-1)·c_r; and N-1
    headers.

    It receives as much.
    """
    _check(world_size)
    chunks, headers = chunk_sizes(length, world_size), (world_size - 1) * header_bytes(num_tensors)
    each = [headers + itemsize * (length - chunk + (world_size - 1) * chunk) for chunk in chunks]
    return [Bytes(one, one) for one in each] if world_size > 1 else [Bytes(0, 0)]


def sharded_step_messages(world_size: int) -> list[int]:
    """To each other rank: a header, a chunk of the gradient, a chunk of the parameters."""
    _check(world_size)
    return [3 * (world_size - 1)] * world_size


def async_worker_bytes(
    num_pulls: int, num_pushes: int, length: int, itemsize: int = 4, num_tensors: int = 1
) -> Bytes:
    """One worker of an asynchronous server: a request up and S down for each pull, a header and S up for each
    push.

    And one request when it leaves. The server sends and receives what its workers receive and send.
    """
    request = _NUMBER + header_bytes(num_tensors)
    return Bytes(
        (num_pulls + num_pushes + 1) * request + num_pushes * length * itemsize, num_pulls * length * itemsize
    )


def start_bytes(world_size: int, num_bytes: int, server: int = 0) -> list[Bytes]:
    """Before the first step: the server's parameters and buffers, `num_bytes` in all, to every other rank."""
    _check(world_size, server)
    size = START_BYTES + num_bytes
    return [Bytes(size * (world_size - 1), 0) if r == server else Bytes(0, size) for r in range(world_size)]


def _check(world_size: int, server: int = 0) -> None:
    if world_size < 1:
        raise ValueError(f"world_size: expected 1 or more, got {world_size}")
    if not 0 <= server < world_size:
        raise ValueError(f"server: expected a rank of 0…{world_size - 1}, got {server}")
