"""Values inside values: the tensors in tuples, lists, dicts and named tuples, to any depth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def nested_map(fn: Callable[..., Any], *values: Any, where: str = "") -> Any:
    """A value of the same structure as `values[0]`, in which each leaf is `fn(path, *leaves)`.

    `values` have the same structure; `fn` gets the leaves that stand at the same place in each of them, and the path
    to that place (`inputs[0]['mask']`). Tuples, lists, dicts and their subclasses are structure, all else is a leaf.
    Raises ValueError where the structures differ.
    """
    first = values[0]
    if not isinstance(first, tuple | list | dict):
        return fn(where, *values)
    _check_same_structure(values, where)
    if isinstance(first, dict):
        mapped = copy.copy(first)  # an OrderedDict or a defaultdict stays one
        for key in first:
            mapped[key] = nested_map(fn, *(value[key] for value in values), where=f"{where}[{key!r}]")
        return mapped
    fields = getattr(first, "_fields", None)  # a named tuple
    steps = [f".{field}" for field in fields] if fields else [f"[{i}]" for i in range(len(first))]
    items = [
        nested_map(fn, *column, where=(where + step).lstrip("."))
        for step, *column in zip(steps, *values, strict=True)
    ]
    return type(first)(*items) if fields else type(first)(items)


def leaves(value: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of each leaf, from left to right."""
    found: list[tuple[str, Any]] = []
    nested_map(lambda where, leaf: found.append((where, leaf)), value)
    return found


def _check_same_structure(values: tuple[Any, ...], where: str) -> None:
    shapes = [(type(v), list(v) if isinstance(v, dict) else len(v)) for v in values if _is_structure(v)]
    if len(shapes) == len(values) and all(shape == shapes[0] for shape in shapes):
        return
    found = ", ".join(_describe(value) for value in values)
    raise ValueError(f"{where or 'output'}: expected the same structure from every replica, got {found}")


def _is_structure(value: Any) -> bool:
    return isinstance(value, tuple | list | dict)


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} with keys {list(value)}"
    return f"{kind} of {len(value)}" if _is_structure(value) else kind
