"""`python -m course_lib.bench [NAME …] [--world-size N …] [--json FILE|-]`: the course beside PyTorch itself.

Without a name all benches run. Each prints a table, and with `--json` all rows go into a file, or to the
standard output if it is "-" (the tables then go to the standard error). What a row holds is said in
`rows.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from course_lib.bench import ddp, launch, links, ring
from course_lib.bench.rows import BenchRow, table

BENCHES: dict[str, Callable[[Sequence[int]], list[BenchRow]]] = {
    "ddp": ddp.rows,
    "launch": launch.rows,
    "links": links.rows,
    "ring": ring.rows,
}
"""Name -> a function that takes the world sizes and returns its rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.json not in (None, "-") and not Path(options.json).parent.is_dir():
        print(f"--json: there is no folder {Path(options.json).parent} to write into", file=sys.stderr)
        return 2
    world_sizes = [n for sizes in options.world_size or [[2, 4]] for n in sizes]
    all_rows: list[BenchRow] = []
    to_stdout = options.json == "-"
    with contextlib.redirect_stdout(sys.stderr if to_stdout else sys.stdout):
        for name in options.name or BENCHES:
            rows = BENCHES[name](world_sizes)
            print(table(rows), flush=True)
            all_rows += rows
    if to_stdout:
        print(json.dumps(all_rows, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(all_rows, indent=1) + "\n")
    unequal = [f"{row['bench']} {row['case']}" for row in all_rows if not row["equal"]]
    if unequal:
        print(f"not equal to PyTorch's result: {', '.join(unequal)}", file=sys.stderr)
    return 1 if unequal else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m course_lib.bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "name", nargs="*", type=_bench, help=f"which benches (all): {', '.join(BENCHES)}", metavar="NAME"
    )
    parser.add_argument(
        "--world-size",
        nargs="+",
        type=_world_size,
        action="append",
        metavar="N",
        help="numbers of ranks (2 4)",
    )
    parser.add_argument("--json", metavar="FILE", help='where to write the rows; "-" is the standard output')
    return parser


def _bench(text: str) -> str:
    if text not in BENCHES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(BENCHES)}, got {text!r}")
    return text


def _world_size(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 rank or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
