"""Controls that move a figure. In a stored notebook, a still figure stands in their place."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

import ipywidgets

from course_lib.classroom.plots import plot_ring_step, plot_ring_steps, to_png
from course_lib.classroom.replay import Replay


class RingReplay(ipywidgets.VBox):
    """A slider over the steps of a replayed ring all-reduce, and the picture of the step.

    `slider` (ipywidgets.IntSlider, 0 to 2(N-1)) may be set from code as well; `image` holds the picture as
    PNG. A front end without widgets shows the still figure of all steps.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        last = len(replay.steps) - 1
        self._png = lru_cache(maxsize=None)(lambda step: to_png(plot_ring_step(replay, step)))
        self.slider = ipywidgets.IntSlider(
            value=0, min=0, max=last, description="step", layout=ipywidgets.Layout(width="420px")
        )
        play = ipywidgets.Play(value=0, min=0, max=last, interval=1500)
        self._link = ipywidgets.jslink((play, "value"), (self.slider, "value"))
        self.image = ipywidgets.Image(
            value=self._png(0),
            format="png",
            layout=ipywidgets.Layout(max_width="100%", align_self="flex-start"),
        )
        self.slider.observe(self._show, names="value")
        super().__init__([ipywidgets.HBox([play, self.slider]), self.image])

    def _show(self, change: Any) -> None:
        self.image.value = self._png(change["new"])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        still = to_png(plot_ring_steps(self.replay))
        return {**bundle, "text/plain": repr(self), "image/png": base64.b64encode(still).decode()}

    def __repr__(self) -> str:
        return f"RingReplay({self.replay.num_ranks} ranks, {len(self.replay.steps) - 1} steps)"


def ring_replay(replay: Replay) -> RingReplay:
    """A slider over the steps of `replay` (made by `classroom.replay.replay_ring`), and their pictures."""
    return RingReplay(replay)
