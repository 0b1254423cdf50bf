"""What the tests of the ring backend share: pools of ranks, launches that fail on purpose, a small model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib import Pool, RankError, RanksHung, launch


class Pools:
    """Pools that are started once for all tests; a failure ends a pool, so tests that fail on purpose launch anew."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def run(self, world_size: int, backend: str, fn, *args):
        key = world_size, backend
        if key not in self._pools:
            self._pools[key] = Pool(world_size, backend=backend, show="none", timeout=20)
        try:
            return self._pools[key].run(fn, *args)
        except BaseException:
            self._pools.pop(key).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def hangs(fn, *args, world_size: int = 3) -> RanksHung:
    with pytest.raises(RanksHung) as caught:
        launch(fn, *args, world_size=world_size, backend="ring", timeout=1.0, show="none")
    return caught.value


def fails(fn, *args, world_size: int = 2) -> RankError:
    with pytest.raises(RankError) as caught:
        launch(fn, *args, world_size=world_size, backend="ring", timeout=20, show="none")
    return caught.value


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 29), nn.Tanh(), nn.Linear(29, 5))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 17, generator=generator), torch.randn(12, 5, generator=generator)
