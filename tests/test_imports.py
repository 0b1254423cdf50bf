"""The layers of the package, read from its imports; and its sizes.

Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, by `importlib` with a
literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.classroom.notebooks.clean import ROOT

PACKAGE = "course_lib"
EVERYTHING_BELOW = {"strategies", "parallel", "comm", "plan", "runtime", "classroom"}
MAY_IMPORT = {
    "plan": set(),
    "comm": {"plan"},
    "runtime": {"comm"},
    "parallel": {"comm", "plan"},
    "strategies": {"parallel", "comm", "plan"},
    "classroom": EVERYTHING_BELOW,
    "bench": EVERYTHING_BELOW,
    "train": EVERYTHING_BELOW,
    "train_ddp": EVERYTHING_BELOW,
    "": {"runtime", "comm"},  # course_lib/__init__.py: the public names
}
"""Area (a package or module right below course_lib) -> the areas it may import besides itself."""

KNOWS_ITS_SIBLINGS = {"hybrid"}
"""The module of `parallel` that may import the others."""

ONLY_IN = {
    "matplotlib": ("classroom.plots", "classroom.widgets"),
    "ipywidgets": ("classroom.plots", "classroom.widgets"),
}
NOT_IN = {"torch": ("plan",)}

Import = tuple[str, int]
"""(dotted name, line)"""


def imports(path: Path, module: str) -> Iterator[Import]:
    """Everything the file imports, a.b for `from a import b`; `module`: its name, for relative imports."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def modules(root: Path) -> dict[str, Path]:
    """Dotted name below course_lib ("" for the package itself) -> file."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def violations(root: Path) -> list[str]:
    """One line for each import that goes against the layers."""
    known = modules(root)
    areas = {name.split(".")[0] for name in known}
    found = []
    for name, path in known.items():
        full = f"{PACKAGE}.{name}" if name else PACKAGE
        for target, line in imports(path, full):
            problem = _problem(name, target, areas)
            if problem:
                found.append(f"{path.relative_to(root)}:{line}: {problem}")
    return found


def _problem(name: str, target: str, areas: set[str]) -> str | None:
    area = name.split(".")[0]
    first, *rest = target.split(".")
    if first != PACKAGE:
        allowed = ONLY_IN.get(first)
        if allowed and not any(name == place or name.startswith(place + ".") for place in allowed):
            return f"only {' and '.join(allowed)} may import {first}"
        if area in NOT_IN.get(first, ()):
            return f"{area} must not import {first}"
        return None
    # A name that is no module below course_lib is one of the package's public names, which are runtime's.
    other = rest[0] if rest and rest[0] in areas else "runtime"
    if other == area:
        return _sibling_problem(name, rest)
    if other not in MAY_IMPORT.get(area, set()):
        return f"{area or '__init__'} must not import {other} ({target})"
    return None


def _sibling_problem(name: str, rest: list[str]) -> str | None:
    own = name.split(".")[1:2]
    if name.split(".")[0] != "parallel" or own in ([], *([unit] for unit in KNOWS_ITS_SIBLINGS)):
        return None
    return None if rest[1:2] == own else f"parallel.{own[0]} must not import its sibling {'.'.join(rest)}"


def test_imports_follow_the_layers():
    assert violations(ROOT) == []


def test_every_area_has_a_rule():
    areas = {name.split(".")[0] for name in modules(ROOT)}
    assert areas <= set(MAY_IMPORT), "give a new area its place in MAY_IMPORT"


PLANTED = {
    "plan/costs.py": ("import torch", "plan must not import torch"),
    "plan/memory.py": ("def f():\n    from torch import nn", "plan must not import torch"),
    "plan/planner.py": ("from course_lib.comm import ledger", "plan must not import comm"),
    "comm/ledger.py": ("from course_lib import launch", "comm must not import runtime"),
    "comm/trace.py": ("from ..runtime.launcher import launch", "comm must not import runtime"),
    "comm/wide.py": ("import course_lib", "comm must not import runtime"),
    "runtime/launcher.py": ("import course_lib.plan.costs", "runtime must not import plan"),
    "parallel/zero.py": ("from course_lib.parallel.ddp import x", "must not import its sibling parallel.ddp"),
    "parallel/ddp.py": ("from . import zero", "must not import its sibling parallel.zero"),
    "parallel/pipeline/run.py": ("from ..ddp import x", "must not import its sibling parallel.ddp"),
    "parallel/mesh.py": ("def f():\n    import course_lib.runtime.pool", "parallel must not import runtime"),
    "strategies.py": ("from course_lib.classroom import models", "strategies must not import classroom"),
    "classroom/checks.py": ("from course_lib import train", "classroom must not import train"),
    "classroom/models.py": ("import matplotlib.pyplot as plt", "only classroom.plots and classroom.widgets"),
    "bench/ring.py": ("def f():\n    import ipywidgets", "only classroom.plots and classroom.widgets"),
    "train.py": (
        "import importlib\nimportlib.import_module('course_lib.bench.ring')",
        "must not import bench",
    ),
    "__init__.py": ("from course_lib.parallel import ddp", "__init__ must not import parallel"),
}
FINE = {
    "parallel/hybrid.py": "from course_lib.parallel import ddp, zero\nfrom course_lib.comm import ledger",
    "parallel/pipeline/steps.py": "from . import run\nfrom course_lib.plan.costs import x\nimport torch",
    "classroom/plots.py": "import matplotlib.pyplot as plt\nfrom course_lib import launch",
    "classroom/widgets/slider.py": "import ipywidgets\nfrom course_lib.strategies import build",
    "runtime/worker.py": "from course_lib.comm.communicator import Communicator\nfrom . import launcher",
    "plan/schedule.py": "from course_lib.plan import costs\nimport math",
    "bench/__main__.py": "from course_lib import launch\nfrom course_lib.bench import ring",
}


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_checker_accepts_what_the_layers_allow(tmp_path):
    assert violations(_tree(tmp_path, {**dict.fromkeys(PLANTED, ""), **FINE})) == []


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_finds_a_planted_import(tmp_path, name):
    text, problem = PLANTED[name]
    found = violations(_tree(tmp_path, {**dict.fromkeys(PLANTED, ""), **FINE, name: text}))
    assert len(found) == 1 and found[0].startswith(f"{PACKAGE}/{name}:") and problem in found[0], found
