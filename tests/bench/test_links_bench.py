"""All-reduce on limited links, beside its formula: what is counted is held exactly, times only within reason."""

from __future__ import annotations

import pytest

from course_lib import HostsUnavailable, VirtualHosts
from course_lib.bench.links import measure
from course_lib.plan import costs, traffic


def _why_not() -> str:
    try:
        VirtualHosts(1, how="namespaces").close()
    except HostsUnavailable as error:
        return str(error)
    return ""


@pytest.mark.hosts
@pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")
def test_on_namespaces_the_links_agree_with_the_ledger() -> None:
    found = {one.algorithm: one for one in measure(3, size_bytes=3_000_000, link="1Gbit", runs=1)}
    assert list(found) == ["naive", "tree", "ring", "gloo"] and all(one.equal for one in found.values())
    assert found["naive"].ledger_bytes == traffic.naive_all_reduce_bytes(3, 750_000)[0].sent
    assert found["ring"].ledger_bytes == traffic.ring_all_reduce_bytes(3, 750_000)[0].sent
    for name in ("naive", "tree", "ring"):
        assert found[name].link_bytes == pytest.approx(found[name].ledger_bytes, rel=0.05)
    assert found["gloo"].predicted_s is None and found["gloo"].ledger_bytes is None
    assert found["naive"].predicted_s == costs.naive_all_reduce_time_s(3, 3_000_000, 0.0, 125e6)
    assert found["naive"].measured_s > 0.9 * found["naive"].predicted_s  # nothing beats the wire


def test_paced_in_software_torchs_own_is_left_out() -> None:
    found = {
        one.algorithm: one for one in measure(2, size_bytes=1_000_000, link="400Mbit", how="paced", runs=1)
    }
    assert list(found) == ["naive", "tree", "ring"] and all(one.how == "paced" for one in found.values())
    assert all(one.link_bytes is None and one.equal for one in found.values())
    assert found["ring"].measured_s > 0.9 * found["ring"].predicted_s
