#!/usr/bin/env python3
"""Everything that tests compare with and that needs transformers, in one process; `compare.REFERENCES` asks it."""

from __future__ import annotations

import reference  # first: it hides what breaks transformers

import json
import sys
from pathlib import Path

import edit_reference
import lens_reference
import patch_reference
from served import serve

sys.path.insert(0, str(Path(__file__).parents[2]))


def check_hf(folder: str, file: str, tokens: list[int], out: str) -> None:
    """What vlens' own comparison answers, as JSON."""
    from vlens_cli.driver.check_hf import check

    Path(out).write_text(json.dumps(check(Path(folder), Path(file), tokens)))


if __name__ == "__main__":
    serve({"reference": reference.write, "edits": edit_reference.write, "lens": lens_reference.write,
           "patches": patch_reference.write, "check_hf": check_hf})
