"""`python -m course_lib.classroom.notebooks {run,clean,check,site} [PATHS]`: the chapters' own workshop.

run     execute the notebooks in place, clean them, and record which code ran (`make notebooks`)
clean   clean them without executing: enough after a change of prose alone
check   say what is not clean, too long, undeclared or stale; exit status 1 if anything is
site    execute copies and write them as a web site (`make run`)

Without PATHS: all of notebooks/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from course_lib.classroom.notebooks import record as records
from course_lib.classroom.notebooks import site
from course_lib.classroom.notebooks.clean import ROOT, clean, code_cells, findings, read, write
from course_lib.classroom.notebooks.execute import CELL_TIMEOUT_S, NotebookFailed, execute


def _run(path: Path, args: argparse.Namespace) -> bool:
    notebook = read(path)
    begin = time.monotonic()
    try:
        execute(notebook, path.parent, args.timeout)
    except NotebookFailed as failure:
        print(f"{path.name}: {failure}\n{path.name} is left as it was.", file=sys.stderr)
        return False
    cleaned = clean(notebook)
    write(cleaned, path)
    records.save(cleaned, path, args.record)
    print(f"{path.name}: {len(code_cells(cleaned))} code cells in {time.monotonic() - begin:.0f} s")
    return _report(path, args)


def _clean(path: Path, args: argparse.Namespace) -> bool:
    write(clean(read(path)), path)
    return _report(path, args)


def _report(path: Path, args: argparse.Namespace) -> bool:
    """Print what is wrong with a stored notebook; True when nothing is."""
    notebook = read(path)
    found = findings(notebook, path.read_text(encoding="utf-8"))
    stale = records.stale(notebook, path, args.record)
    for sentence in found:
        print(f"{path.name}: {sentence}", file=sys.stderr)
    if stale:
        print(stale, file=sys.stderr)
    return not (found or stale)


def _site(paths: list[Path], args: argparse.Namespace) -> bool:
    args.out.mkdir(parents=True, exist_ok=True)
    pages = []
    for path in paths:
        notebook, failure = read(path), None
        if not args.stored:
            print(f"{path.name} ...", flush=True)
            try:
                execute(notebook, path.parent, args.timeout)
            except NotebookFailed as failed:
                failure = str(failed)
                print(f"{path.name}: {failure}", file=sys.stderr)
        pages.append(site.write_page(clean(notebook), path.stem, args.out, failure))
    print(f"open {site.write_index(pages, args.out)}")
    return not any(page.failure for page in pages)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.classroom.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["run", "clean", "check", "site"])
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATHS", help="notebooks; all when none is given"
    )
    parser.add_argument(
        "--timeout", type=float, default=CELL_TIMEOUT_S, metavar="S", help="seconds for one cell"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="site: where to write (build/)")
    parser.add_argument(
        "--stored", action="store_true", help="site: show the stored outputs, execute nothing"
    )
    parser.add_argument("--record", type=Path, default=records.RECORD, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); return the exit status."""
    args = _parse(argv)
    paths = [path.resolve() for path in args.paths] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in paths:
        if not path.is_file():
            print(f"there is no notebook {path}", file=sys.stderr)
            return 2
    if not paths:
        print("notebooks/ holds no notebook yet")
    try:
        if args.what == "site":
            return 0 if _site(paths, args) else 1
        do = {"run": _run, "clean": _clean, "check": _report}[args.what]
        results = [do(path, args) for path in paths]  # all of them, also after one that failed
        return 0 if all(results) else 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
