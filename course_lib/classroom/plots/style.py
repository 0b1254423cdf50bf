"""One look for all figures: legible, the same colours everywhere, never colour alone.

A rank has the same colour in every chapter. The eight colours keep their distance for readers with any kind
of colour blindness, and in grey (their lightness L* differs by 7 of 100 at least); a hatch is the second
channel. Algorithms (ring, tree, naive …) have a line style and a marker each.
"""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib.style
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from course_lib.classroom.tables import format_bytes, format_seconds

RANK_COLORS = ("#223262", "#e4a43b", "#16705f", "#97cbfb", "#d6309f", "#eadea1", "#8e2513", "#9088fa")
RANK_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
INK, GREY, LIGHT = "#1d1d1f", "#6b6b70", "#e3e3e6"  # text and lines, what is less important, backgrounds

STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "axes.grid": False,
    "grid.color": LIGHT,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 0.8,
}

_SERIES = {  # name -> colour, marker, line style
    "ring": (RANK_COLORS[0], "o", "-"),
    "tree": (RANK_COLORS[6], "^", "--"),
    "naive": (RANK_COLORS[1], "s", "-."),
    "server": (RANK_COLORS[1], "s", "-."),
    "hierarchical": (RANK_COLORS[2], "D", (0, (5, 1, 1, 1, 1, 1))),
    "torch": (GREY, "v", ":"),
}
_OTHERS = ((RANK_COLORS[4], "P", (0, (1, 1))), (RANK_COLORS[7], "X", (0, (8, 2))), (RANK_COLORS[3], "*", "-"))


class CourseFigure(Figure):
    """A figure that shows itself where a cell returns it, once, without pyplot's global state."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def to_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG image, in 256 colours: a third of the size in a stored notebook."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw with the course's style, and leave the reader's own settings as they are."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.style.context(["default", STYLE]):
            return draw(*args, **kwargs)

    return wrapper


def new_figure(width: float, height: float) -> CourseFigure:
    """An empty figure of this size in inches; its parts keep clear of each other (constrained layout)."""
    return CourseFigure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def heading(figure: Figure, text: str) -> None:
    """The finding, above everything, in as many lines as the figure's width asks for."""
    width = int(figure.get_figwidth() * 9.2)  # characters of bold 13 point text in an inch
    number_and_unit = r"(?<=\d) (?=[kMGT]?B\b|[mµn]?s\b)"
    lines = textwrap.fill(re.sub(number_and_unit, "\N{NO-BREAK SPACE}", text), width)
    figure.suptitle(lines, fontsize=13, fontweight="bold", x=0.01, ha="left", linespacing=1.3)


def rank_color(rank: int) -> str:
    """The colour of `rank`. From rank 8 on colours come again, with another hatch."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def rank_hatch(rank: int) -> str:
    """The hatch of `rank`: (colour, hatch) is unique for 64 ranks."""
    return RANK_HATCHES[(rank + rank // len(RANK_COLORS)) % len(RANK_HATCHES)]


def series_style(name: str, index: int = 0) -> dict[str, Any]:
    """Colour, marker and line style of an algorithm, by the first word of its name ("ring, N=4": ring)."""
    words = name.lower().replace(",", " ").replace("_", " ").split()
    color, marker, line = _SERIES.get(words[0] if words else "", _OTHERS[index % len(_OTHERS)])
    return {"color": color, "marker": marker, "linestyle": line}


def luminance(color: str) -> float:
    """Relative luminance of a colour, 0 (black) to 1 (white): what is left of it in grey (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    return INK if luminance(color) > 0.206 else "white"  # where both have the same contrast


def bytes_axis(axis: Any) -> None:
    """Label an axis (`axes.xaxis` or `.yaxis`) in B, kB, MB."""
    _unit_axis(axis, format_bytes)


def seconds_axis(axis: Any) -> None:
    """Label an axis in s, ms, µs."""
    _unit_axis(axis, format_seconds)


def _unit_axis(axis: Any, text: Callable[[float], str]) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else text(value)))
    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(10, numticks=12))
        axis.set_minor_formatter(NullFormatter())
