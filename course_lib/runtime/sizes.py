"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_LEAST_BYTES = 10**6


def parse_bytes(name: str, value: Any) -> int:
    """ "300MB" -> 300_000_000; "300MiB" -> 314_572_800; a whole number is bytes. Errors name the argument `name`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
    number = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < _LEAST_BYTES:
        raise ValueError(
            f'{name}: expected a size of at least 1 MB such as "300MB" (10^6 bytes) or "300MiB" (2^20), got {value!r}'
        )
    return round(number)
