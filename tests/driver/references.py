#!/usr/bin/env python3
"""Everything that tests compare with and that needs transformers, in one process; `compare.REFERENCES` asks it."""

from __future__ import annotations

import reference  # first: it hides what breaks transformers

import edit_reference
import lens_reference
import patch_reference
from served import serve

if __name__ == "__main__":
    serve({"reference": reference.write, "edits": edit_reference.write, "lens": lens_reference.write,
           "patches": patch_reference.write})
