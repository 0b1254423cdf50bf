"""The results that README prints are those that data/results keeps."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_limited_links() -> None:
    stored = json.loads((ROOT / "data/results/links.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert stored["date"] in readme
    for row in stored["rows"]:
        of = {one["algorithm"]: one for one in row["all"]}
        cells = [str(row["world_size"])]
        for name in ("naive", "tree", "ring"):
            cells += [f"{of[name]['predicted_s']:.3f}", f"{of[name]['measured_s']:.3f}"]
        assert f"| {' | '.join([*cells, format(of['gloo']['measured_s'], '.3f')])} |" in readme
        for name in ("naive", "ring"):
            assert abs(of[name]["measured_s"] / of[name]["predicted_s"] - 1) <= 0.10
            assert abs(of[name]["link_bytes"] / of[name]["ledger_bytes"] - 1) <= 0.05
