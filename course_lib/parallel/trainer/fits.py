"""Whether a whole snapshot is this training's: looked at before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from course_lib.parallel.trainer.snapshot import SnapshotError


def check_fits(state: Any, parts: Mapping[str, Any], kinds: Mapping[str, str], who: str, advice: str) -> None:
    """Raise SnapshotError unless `state` is a dict with these `parts`, each of its type, and its "kinds" are `kinds`.

    `kinds`: what torch would not notice: SGD's state loads into Adam, and fails in the next step. `who` loads it;
    `advice`: what to do.
    """
    if not isinstance(state, dict):
        raise SnapshotError(f"{who}: the snapshot does not fit: expected a dict, got {type(state)}. {advice}")
    if state.get("kinds") != kinds:
        raise SnapshotError(
            f"{who}: the snapshot is another training's: expected {kinds}, got {state.get('kinds')}. {advice}"
        )
    for name, kind in parts.items():
        if name not in state:
            raise SnapshotError(f"{who}: the snapshot does not fit: it has no {name!r}. {advice}")
        if not isinstance(state[name], kind):
            raise SnapshotError(
                f"{who}: the snapshot does not fit: {name!r} is a {type(state[name]).__name__}. {advice}"
            )


@contextmanager
def refused(who: str, advice: str) -> Iterator[None]:
    """What torch raises for values that do not fit, as SnapshotError."""
    try:
        yield
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{who}: the snapshot does not fit: {error}. {advice}") from error
