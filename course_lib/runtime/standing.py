"""Where each rank stands, and the one sentence that says what does not match."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.comm.board import Board, Entered, Wait
from course_lib.runtime.errors import grouped, ranks_text


@dataclass
class Standing:
    """Where one rank stands: what the launcher knows of it, and what it wrote on the board."""

    state: str  # "starting", "running", "done", "failed", "dead"
    waits: list[Wait]
    collectives: list[Entered]  # of this run, newest first

    @classmethod
    def of(cls, board: Board, rank: int, state: str, run_began: float) -> Standing:
        entries = [entry for entry in board.collectives(rank) if entry.start >= run_began]
        return cls(state, board.waits(rank), entries)

    @property
    def inside(self) -> Entered | None:
        """The collective this rank is in now."""
        return next((entry for entry in self.collectives if entry.end == 0.0), None)

    def text(self) -> str:
        """What the rank is: for example "waiting in all_reduce of 4 x float32 (collective 3)"."""
        last = self.collectives[0] if self.collectives else None
        after = f", after {last.op} (collective {last.number})" if last else "; it entered no collective"
        known = {
            "starting": "starting",
            "failed": "lost: it failed",
            "dead": "lost: its process ended",
            "done": f"finished: its function returned{after}",
            "inside torch": "waiting in a communication that torch started by itself (in backward, for example)"
            + after,
        }
        if self.state in known:
            return known[self.state]
        entry, wait = self.inside, self.waits[0] if self.waits else None
        part = ""
        if wait is not None and (entry is None or wait.op not in entry.op):
            part = wait.op if wait.peer is None else f"{wait.op} with rank {wait.peer}"
        if entry is not None:
            where = f"{entry.what} (collective {entry.number})"
            return (
                f"waiting in {where}{', in ' + part if part else ''}" if wait else f"computing inside {where}"
            )
        return f"waiting in {part}" if wait else f"computing{after}"

    @property
    def is_waiting(self) -> bool:
        return self.state == "inside torch" or bool(self.waits)


def mismatch(standings: dict[int, Standing], overdue: list[int]) -> str:
    """One sentence: what does not match."""
    return (
        _different_collectives(standings)
        or _absent(standings, overdue)
        or _circle(standings)
        or "No mismatch of collectives can be seen: look at where each rank stands."
    )


def _different_collectives(standings: dict[int, Standing]) -> str | None:
    waiting = {rank: s.inside for rank, s in standings.items() if s.inside and s.waits}
    for group in {entry.group for entry in waiting.values() if entry}:
        members = {rank: entry for rank, entry in waiting.items() if entry and entry.group == group}
        numbers = {entry.number for entry in members.values()}
        what = {rank: entry.what for rank, entry in members.items()}
        if len(numbers) == 1 and len(set(what.values())) > 1:
            parts = [f"{ranks_text(ranks)} called {text}" for text, ranks in grouped(what)]
            return f"What does not match: as collective {numbers.pop()}, {', but '.join(parts)}."
        if len(numbers) > 1:
            behind = {rank: f"{entry.what} (number {entry.number})" for rank, entry in members.items()}
            parts = [f"{ranks_text(ranks)} in {text}" for text, ranks in grouped(behind)]
            return f"What does not match: the ranks are in different collectives: {', '.join(parts)}."
    return None


def _absent(standings: dict[int, Standing], overdue: list[int]) -> str | None:
    """Ranks that the others wait for: returned early, or computing, or elsewhere."""
    waiters = [rank for rank in overdue if standings[rank].inside] or overdue
    if not waiters:
        return None
    missing = [r for r, s in standings.items() if r not in waiters and not (s.inside and s.is_waiting)]
    if not standings[waiters[0]].inside:
        peers = {wait.peer for rank in waiters for wait in standings[rank].waits if wait.peer is not None}
        missing = [rank for rank in missing if rank in peers or not peers]
    if not missing:
        return None
    waiting = [
        _are(ranks, text) for text, ranks in grouped({rank: standings[rank].text() for rank in waiters})
    ]
    rest = [_are(ranks, text) for text, ranks in grouped({rank: standings[rank].text() for rank in missing})]
    return f"What does not match: {', '.join(waiting)}, but {', '.join(rest)}."


def _are(ranks: list[int], text: str) -> str:
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}"


def _circle(standings: dict[int, Standing]) -> str | None:
    """Point-to-point waits: who waits for whom."""
    pairs = [
        f"rank {rank} waits in {s.waits[0].op} with rank {s.waits[0].peer}"
        for rank, s in standings.items()
        if s.waits and s.waits[0].peer is not None
    ]
    return f"What does not match: {', and '.join(pairs)}." if len(pairs) > 1 else None
