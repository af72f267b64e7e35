"""What a checkpoint holds, read from its headers alone: light, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from vlens_cli.errors import StartError

# The safetensors package's own limit.
MAX_HEADER = 100_000_000


def shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Tensor name -> shape, over the safetensors files that are loaded; None where the weights are not safetensors.

    Raises StartError for a file that is broken.
    """
    files = _files(folder)
    if not files:
        return None
    return {name: tuple(entry["shape"]) for file in files for name, entry in _header(file).items()
            if name != "__metadata__"}


def _files(folder: Path) -> list[Path]:
    """Those that the index names, where there is one; vLLM and transformers load no others then."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _header(file: Path) -> dict:
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(f.read(size))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if file.stat().st_size < 8 + size + end:
            raise ValueError("it is shorter than its header says")
        return header
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise StartError(f"a broken weight file: {file}: {fault}", hint="fetch or save it again", code="bad_checkpoint"
                         ) from fault
