"""Plain-text tables and numbers with units.

Plain text, because a table is part of what the notebook run compares, and because it reads the same in a
terminal, in a stored notebook and aloud. The same values always print the same characters.
"""

from __future__ import annotations

from collections.abc import Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_bytes(num_bytes: float) -> str:
    """A size in decimal units (1 kB = 1000 B) with up to three digits: 12582912 -> "12.6 MB"."""
    for unit in _BYTE_UNITS:
        if abs(num_bytes) < 999.5 or unit == _BYTE_UNITS[-1]:
            return f"{_three_digits(num_bytes)} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """A time with up to three digits: 3.5e-05 -> "35 µs"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def table(rows: Sequence[Sequence[object]], columns: Sequence[str], caption: str = "") -> str:
    """A text table: numbers to the right, integers with thin groups ("12 582 912"), floats with four digits.

    Raises ValueError for a row whose length is not that of `columns`.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells, expected {len(columns)}: {list(columns)}")
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(rows) and all(_is_number(row[c]) for row in rows) for c in range(len(columns))]
    widths = [max(len(line[c]) for line in [list(columns), *cells]) for c in range(len(columns))]
    lines = [caption] if caption else []
    lines.append(_line(columns, widths, numeric))
    lines.append("  ".join("─" * width for width in widths))
    lines += [_line(row, widths, numeric) for row in cells]
    return "\n".join(lines)


def show_table(rows: Sequence[Sequence[object]], columns: Sequence[str], caption: str = "") -> None:
    """Print `table(rows, columns, caption)`."""
    print(table(rows, columns, caption))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = [
        c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(aligned).rstrip()
