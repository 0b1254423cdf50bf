from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.rings import Pools


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
