"""All exercises, by name."""

from __future__ import annotations

from course_lib.classroom.checks import (
    bucketing,
    exercises,
    parameter_server,
    port_launcher,
    rank_arithmetic,
    resumable,
    sampler,
    weighted_loss,
)
from course_lib.classroom.checks.exercises import Exercise
from course_lib.classroom.checks.runs import RunExercise

CATALOGUE: dict[str, Exercise | RunExercise] = {
    **exercises.EXERCISES,
    **{exercise.name: exercise for exercise in parameter_server.EXERCISES},
    **{one.EXERCISE.name: one.EXERCISE for one in (bucketing, sampler, weighted_loss)},
    **{one.EXERCISE.name: one.EXERCISE for one in (rank_arithmetic, port_launcher, resumable)},
}


def exercise_named(name: object) -> Exercise | RunExercise:
    """Raises ValueError for a name that is no exercise's; it lists those that are."""
    if not isinstance(name, str) or name not in CATALOGUE:
        raise ValueError(f"there is no exercise {name!r}; the exercises are: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
