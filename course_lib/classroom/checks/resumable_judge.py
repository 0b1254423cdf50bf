"""What a start of the learner's training did, held against a run that was never killed."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_lib.classroom.checks.endings import clean, raised
from course_lib.classroom.checks.resumable_run import NUM_EPOCHS
from course_lib.classroom.checks.verdict import joined
from course_lib.runtime.errors import RankError

POWER_CUT = (
    ". (One thing that killing a process cannot show: without os.fsync before the renaming, a power cut may leave "
    "an empty file.)"
)
_KILLED_ITSELF = "your function's process was killed, and not by this check"
_KILLS = (-signal.SIGKILL, -signal.SIGXFSZ)


class State(NamedTuple):
    """Digests of what an epoch begins with. momentum: "" if there is none."""

    model: str
    momentum: str
    rng: str


@dataclass(frozen=True)
class Start:
    """epochs: those it began. states: with what it began each, and with what it ended, if it came to the end."""

    epochs: list[int]
    states: list[State]
    ended: bool
    files: list[str]
    num_changes: int
    synced: bool
    error: RankError | None

    @classmethod
    def of(cls, lines: list[dict[str, Any]], error: RankError | None) -> Start:
        ends = [line for line in lines if "end" in line]
        return cls(
            [line["epoch"] for line in lines if "epoch" in line],
            [State(*line["state"]) for line in lines if "state" in line],
            bool(ends),
            ends[0]["files"] if ends else [],
            sum("change" in line for line in lines),
            any("fsync" in line for line in lines),
            error,
        )

    @property
    def killed(self) -> bool:
        return self.error is not None and self.error.exitcode in _KILLS

    @property
    def raised(self) -> str:
        """What it raised, or how else it ended; "" if it was killed or came to its end."""
        if self.error is None or self.killed:
            return ""
        message = re.sub(r"/[^\s'\"]*/", "", clean(self.error.exc_message))  # folders have random names
        if self.error.exc_type == "Wrong":
            return message
        return f"your function {raised(self.error.exc_type, message) if self.error.exc_type else message}"


def undisturbed(truth: list[State], start: Start) -> str:
    """The run that nobody kills."""
    if start.raised:
        return start.raised
    if start.killed:
        return _KILLED_ITSELF
    if start.epochs != list(range(NUM_EPOCHS)):
        return f"undisturbed, it trained {_epochs(start.epochs)}; expected each of 0 to {NUM_EPOCHS - 1} once, in order"
    if start.states[-1].model != truth[-1].model:
        return (
            "undisturbed, it ends with other parameters than the same epochs without saving: saving must change "
            "nothing, neither the model nor the optimizer nor the random numbers"
        )
    if not start.files:
        return "right epochs, but nothing was saved: there is no file beside `path` that a next start could go on from"
    return ""


def resumed(truth: list[State], start: Start, when: str, least: int, most: int) -> str:
    """A start after a kill: it may go on with epoch `least`, ..., `most`."""
    then = f"{when}, then started again, "
    if start.raised:
        return f"{when}, then started again: {start.raised}"
    if not start.epochs:
        return f"{then}it trained nothing, though {NUM_EPOCHS - least} epochs were left"
    first, state = start.epochs[0], start.states[0]
    text = (
        _too_early(truth, first, state, least)
        or _too_late(first, most)
        or _other_state(truth, first, state)
        or _rest(truth, start, first)
    )
    return then + text if text else ""


def _too_early(truth: list[State], first: int, state: State, least: int) -> str:
    if first >= least:
        return ""
    if state.model == truth[0].model:
        return f"it starts from zero: epoch {first} with a new model, though {least} epochs were over"
    if state.model == truth[least].model:
        which = "a saved epoch" if first == least - 1 else "epochs"
        return (
            f"it repeats {which}: it trains epoch {first} with the parameters that epoch {least - 1} had left; the "
            "snapshot must say which epoch comes next"
        )
    return f"it goes back to epoch {first}, though epoch {least - 1} was over: save after every epoch"


def _too_late(first: int, most: int) -> str:
    if first <= most:
        return ""
    return (
        f"it goes on with epoch {first}, though epoch {most} was never finished: save which epoch comes next when "
        "one is over"
    )


def _other_state(truth: list[State], first: int, state: State) -> str:
    right = truth[first]
    if state.model != right.model:
        whose = "those of a new model" if state.model == truth[0].model else "not those that were saved"
        return f"it goes on with epoch {first}, but the parameters are {whose}: model.load_state_dict(...)"
    where = f"it goes on with epoch {first} and the right parameters, but"
    if state.momentum != right.momentum:
        how = "has other momentum than before" if state.momentum else "has forgotten its momentum"
        return f"{where} the optimizer {how}: save optimizer.state_dict(), too, and load it"
    if state.rng != right.rng:
        return (
            f"{where} not the right random numbers, so dropout drops other values than in the run that was not "
            "killed: save torch.get_rng_state(), and set it again as the last thing before training"
        )
    return ""


def _rest(truth: list[State], start: Start, first: int) -> str:
    expected = list(range(first, NUM_EPOCHS))
    if start.epochs != expected[: len(start.epochs)] or (start.ended and start.epochs != expected):
        return f"it trained {_epochs(start.epochs)}; expected {_epochs(expected)}"
    if start.ended and start.states[-1].model != truth[-1].model:
        return "it begins right, but ends with other parameters than the run that was not killed"
    return ""


def resumed_after_save(truth: list[State], start: Start, cut: bool, epoch: int) -> str:
    """A start after a kill in the saving after `epoch`: this snapshot, or the one before it, has to be whole."""
    when = f"killed while it saved after epoch {epoch}"
    when += ", in the middle of writing the file" if cut else ", between two changes of files"
    text = resumed(truth, start, when, epoch, epoch + 1)
    lost = start.raised or (start.epochs and start.epochs[0] < epoch)
    if not text or not lost:
        return text
    if start.error is not None and start.error.exc_type == "FileExistsError":
        why = "a file that a killed start has left behind is in the way: write over it"
    elif cut:
        why = (
            "not atomic: the half-written file stands where the whole one stood. Write to another name in the "
            "same directory, then os.replace(other, path), which happens or does not"
        )
    else:
        why = (
            "not atomic: for a moment there is no snapshot, or half of one. Do not remove or rewrite the old one: "
            "os.replace(new, path) puts the new one in its place in one go"
        )
    return f"{text} ({why})"


def finished(truth: list[State], start: Start) -> str:
    """A start when all epochs are done."""
    when = "started again when all epochs were done, "
    if start.raised:
        return f"{when}{start.raised}"
    if start.killed:
        return f"{when}{_KILLED_ITSELF}"
    if start.epochs:
        return f"{when}it trained {_epochs(start.epochs)}: the last epoch has to be saved, too"
    if start.states[-1].model != truth[-1].model:
        return f"{when}it trained nothing, but the model is not the trained one: load it in any case"
    return ""


def _epochs(epochs: list[int]) -> str:
    if not epochs:
        return "no epoch"
    return ("epoch " if len(epochs) == 1 else "epochs ") + joined([str(epoch) for epoch in epochs])
