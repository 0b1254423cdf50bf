from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.kernels import Kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    kernel.run("import os, time, torch\nfrom course_lib import launch, Pool, RankError, RanksHung")
    yield kernel
    kernel.close()


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for a test that breaks it."""
    kernel = Kernel(tmp_path)
    kernel.run("import os, time, torch\nfrom course_lib import launch, Pool, RankError, RanksHung")
    yield kernel
    kernel.close()
