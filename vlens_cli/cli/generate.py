"""`python -m vlens_cli.cli.generate --write|--check`, in the repository: the files of completions/."""

from __future__ import annotations

import sys
from pathlib import Path

from vlens_cli.cli.completions import SHELLS, script


def stale(folder: Path) -> list[Path]:
    """The files that are missing or not what vlens prints now."""
    wanted = {folder / name: script(shell) + "\n" for shell, name in SHELLS.items()}
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for shell, name in SHELLS.items():
        (folder / name).write_text(script(shell) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = Path("completions")
    if sys.argv[1:] == ["--write"]:
        write(target)
    elif sys.argv[1:] != ["--check"]:
        sys.exit("usage: python -m vlens_cli.cli.generate --write|--check")
    elif wrong := stale(target):
        sys.exit(f"not current: {', '.join(map(str, wrong))}\n\nhint: python -m vlens_cli.cli.generate --write")
