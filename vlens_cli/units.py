"""Counts and sizes in bytes, as they are shown and typed."""

from __future__ import annotations

import re

_BYTES = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12,
          "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def counted(n: int, what: str) -> str:
    """1 prompt, 2,000 prompts."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def size_text(n_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000 or unit == "GB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"


def size_of(text: str) -> int | None:
    """Bytes of 500MB, 1GB, 2GiB; None for what is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    return int(float(found[1]) * _BYTES[found[2]]) or None if found and found[2] in _BYTES else None
