"""`python -m vlens_cli.cli.generate --write|--check`, in the repository: completions/, and README.md's table of variables."""

from __future__ import annotations

import sys
from pathlib import Path

from vlens_cli import env
from vlens_cli.cli.completions import SHELLS, script

TABLE = "| variable | key in `vlens.toml` | default | meaning |\n|---|---|---|---|\n"


def stale(root: Path) -> list[Path]:
    """The files that are missing or not what vlens would write now."""
    return [path for path, text in _wanted(root).items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text]  # fmt: skip


def write(root: Path) -> None:
    for path, text in _wanted(root).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _wanted(root: Path) -> dict[Path, str]:
    completions = {root / "completions" / name: script(shell) + "\n" for shell, name in SHELLS.items()}
    readme = root / "README.md"
    return completions | {readme: _with_table(readme.read_text(encoding="utf-8"))}


def _with_table(text: str) -> str:
    """The README with its table, which ends at the first empty line, made anew."""
    before, head, after = text.partition(TABLE)
    if not head:
        sys.exit(f"README.md has no table that begins with: {TABLE.splitlines()[0]}")
    rows = "".join(f"| `{each.name}` | {_key(each)} | {each.default} | {each.meaning} |\n" for each in env.VARIABLES)
    rest = after.partition("\n\n")[2]
    return f"{before}{TABLE}{rows}\n{rest}"


def _key(each: env.Variable) -> str:
    return f"`{each.key}`" + ("" if each.project else " (the user's)") if each.key else ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(Path())
    elif sys.argv[1:] != ["--check"]:
        sys.exit("usage: python -m vlens_cli.cli.generate --write|--check")
    elif wrong := stale(Path()):
        sys.exit(f"not current: {', '.join(map(str, wrong))}\n\nhint: python -m vlens_cli.cli.generate --write")
