"""Random numbers as state: what dropout, augmentation and shuffling draw next belongs into a snapshot.

Each rank has its own generators, so a snapshot holds those of *every* rank. Packed as tensors and numbers, so that they
load with `weights_only=True`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """This process's generators: torch's (CPU, and `device`'s if it is a GPU), `random`'s and numpy's global one."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def is_state(value: Any) -> bool:
    """Whether `value` looks like what `capture` returns."""
    return isinstance(value, dict) and {"torch", "python", "numpy"} <= set(value)


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Undo what was drawn since `capture`. A GPU's generator only if there is one here and there was one then."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_all(*numbers: int) -> None:
    """Seed all generators of this process. Other `numbers` (seed, rank …) give streams that are not related."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)  # every GPU's, too
    random.seed(seed)
    np.random.seed(seed % 2**32)
