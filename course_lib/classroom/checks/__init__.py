"""The graders of the exercises, predictions, hints and solutions: what a chapter imports from here.

    from course_lib.classroom.checks import check, hint, predict, score, show_solution

`check` runs what a learner wrote on real ranks. `predict` writes a number down before it is measured, and `score`
compares them afterwards. `hint` and `show_solution` help, in this order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.classroom.checks.grader import check as check
    from course_lib.classroom.checks.guidance import hint as hint
    from course_lib.classroom.checks.guidance import show_solution as show_solution
    from course_lib.classroom.checks.predictions import predict as predict
    from course_lib.classroom.checks.predictions import score as score
    from course_lib.classroom.checks.verdict import Verdict as Verdict

# Imported at first use: every rank of a check imports this package, and needs only the part that runs there.
_HOME = {
    "check": "grader",
    "hint": "guidance",
    "show_solution": "guidance",
    "predict": "predictions",
    "score": "predictions",
    "Verdict": "verdict",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
