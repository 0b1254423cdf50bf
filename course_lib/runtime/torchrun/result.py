"""What a torchrun job leaves: its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.runtime.errors import LaunchError
from course_lib.runtime.torchrun.diary import Agent, Event, Worker


@dataclass
class TorchrunResult:
    """How a job ended.

    By rank: `output` (text, of all restarts one after another) and `exit_codes` (of the last process with that rank;
    None: its agent ended it, or nobody knows). `restarts`: how often workers were restarted after a failure (torchrun
    does not count a change of nodes). `workers`, `events`: everything that happened; `agents`: by node, what each
    wrote itself and how it ended. `command`: what one would type, a line for each node; `argv`: what was really run.
    `log_dir`: where the log files are ("": removed). `label`: what a figure must say. `seconds`: from the call to the
    end of the last agent. `error`: what `check=True` raises.
    """

    output: dict[int, str] = field(repr=False)
    exit_codes: dict[int, int | None]
    restarts: int
    seconds: float
    log_dir: str
    command: str = field(repr=False)
    argv: list[list[str]] = field(repr=False)
    workers: list[Worker] = field(repr=False)
    agents: dict[int, Agent] = field(repr=False)
    events: list[Event] = field(repr=False)
    label: str = ""
    error: LaunchError | None = field(default=None, repr=False)
