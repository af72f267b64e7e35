"""`python tests/driver/readme.py --write|--check` (`make readme`): README.md's examples, run, with the output that is in it or is now.

An indented block is an example where its first line begins with `$ `, `vlens ` or `>>> `:

    $ COMMAND        what follows, up to the next `$ `, is its output, as a terminal of 120 columns shows it, without
    > MORE           colours; standard error comes first
    vlens COMMAND    run, and not shown: `# ...` at its end is for the reader
    >>> CODE         Python, in one process a block

All run in one folder, in order, with one engine of the demo model, which the last of them stop. A block that needs a
package which is not installed (`NEEDS`) is left out, and said to be.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
INDENT = "    "
COLUMNS = 120
PATIENCE = 600
# What is another in each run or place: process ids, times, sizes, folders.
MASKS = ((r"pid \d+", "pid N"), (r"^ *\d+(?=  SmolLM2)", "N"), (r"\d+(\.\d+)? (s|min|kB|MB|GB|GiB)\b", "N \\2"), (r"/[\w./-]*/", "/…/"))
SIGNS = ("$ ", "vlens ", ">>> ")
# A word of a block of Python -> the package that it takes.
NEEDS = {"import bridge": "transformer_lens"}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

# One process of Python for a block: the sources of its statements in, what each printed out.
CONSOLE = """
import contextlib, io, json, os, sys
# An engine in this process may say something.
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names, shown = {}, []
for source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "<readme>", "single"), names)
    shown.append(out.getvalue())
json.dump(shown, answer)
"""


class Example(NamedTuple):
    """One command or statement: `kind` is its sign in the README, `shown` the output that stands there."""

    line: int
    kind: str
    source: str
    shown: str


def examples(text: str) -> Iterator[list[Example]]:
    """The examples that can be run here, block by block."""
    for block in _blocks(text):
        source = "\n".join(one.source for one in block)
        lacking = [package for word, package in NEEDS.items() if word in source and find_spec(package) is None]
        if lacking:
            print(f"line {block[0].line}: not run, {lacking[0]} is not installed", file=sys.stderr)
        else:
            yield block


def _blocks(text: str) -> Iterator[list[Example]]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = at
        while at < len(lines) and (lines[at].startswith(INDENT) or (at > begin and not lines[at] and _goes_on(lines, at))):
            at += 1
        block = [line[len(INDENT) :] for line in lines[begin:at]]
        if block and block[0].startswith(SIGNS):
            yield list(_parts(block, begin + 1))
        at += at == begin


def _goes_on(lines: list[str], at: int) -> bool:
    """Whether the block has more behind an empty line; another sign begins another block."""
    following = lines[at + 1 : at + 2]
    return bool(following) and following[0].startswith(INDENT) and not following[0].startswith(tuple(INDENT + sign for sign in SIGNS))


def _parts(block: list[str], number: int) -> Iterator[Example]:
    sign, more = (">>> ", "... ") if block[0].startswith(">>> ") else ("$ ", "> ")
    if block[0].startswith("vlens "):
        sign, more = "vlens ", "  "
    at = 0
    while at < len(block):
        begin, source = at, [block[at].removeprefix(sign) if sign != "vlens " else block[at]]
        at += 1
        while at < len(block) and block[at].startswith(more) and (sign != "$ " or len(source) < 20):
            source.append(block[at].removeprefix(more) if sign != "vlens " else block[at])
            at += 1
        shown = []
        while at < len(block) and not block[at].startswith(sign):
            shown.append(block[at])
            at += 1
        yield Example(number + begin, sign, "\n".join(source), "\n".join(shown).rstrip())


class Bench:
    """The folder in which the examples run, and what they find there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "here"
        self.folder.mkdir()
        for name in ("my-model", "fine-tuned"):
            (self.folder / name).symlink_to(model)
        (self.folder / "prompts.txt").write_text("The Eiffel Tower is located in the city of\nThe Colosseum is located in the city of\n")
        (self.folder / "prompts.jsonl").write_text('{"text": "The Eiffel Tower is in", "id": "eiffel"}\n{"text": "The Colosseum is in"}\n')
        binaries = folder / "bin"
        binaries.mkdir()
        script = binaries / "vlens"
        script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m vlens_cli \"$@\"\n")
        script.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLENS_", "XDG_", "HF_"))}
        self.env = kept | {
            "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
            "VLENS_RUNTIME": str(folder / "run"), "VLENS_CACHE": str(model.parents[1]), "XDG_CONFIG_HOME": str(folder / "config"),
            "HF_HOME": str(folder / "hub"), "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8",
        }

    def run(self, block: list[Example]) -> list[str]:
        """What each example of a block prints. Raises RuntimeError for one that fails."""
        if block[0].kind == ">>> ":
            done = subprocess.run([sys.executable, "-c", CONSOLE], input=json.dumps([one.source for one in block]), cwd=self.folder,
                                  env=self.env, capture_output=True, text=True, timeout=PATIENCE)
            if done.returncode:
                raise RuntimeError(f"line {block[0].line}: {done.stderr}")
            return [shown.rstrip() for shown in json.loads(done.stdout)]
        return [self._shell(one) for one in block]

    def _shell(self, one: Example) -> str:
        """Standard error is no terminal: what is said to people alone is not part of an example."""
        mine, theirs = pty.openpty()
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(["bash", "-c", one.source], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=theirs,
                                       stderr=said)
            os.close(theirs)
            shown = b""
            try:
                while more := os.read(mine, 65536):
                    shown += more
            except OSError:  # Linux's end of a terminal that nobody holds open
                pass
            os.close(mine)
            code = process.wait(PATIENCE)
            said.seek(0)
            text = said.read() + re.sub(r"\x1b\[[0-9;]*m", "", shown.decode().replace("\r\n", "\n"))
        if code and "echo $?" not in one.source and "error: " not in one.shown:
            raise RuntimeError(f"line {one.line}: {one.source}\nexit code {code}: {text}")
        return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))

    def close(self) -> None:
        subprocess.run(["vlens", "engine", "stop"], env=self.env, capture_output=True, check=False)


def same(shown: str, printed: str) -> bool:
    """Whether texts are equal, and each number within one of its last printed digit; what differs in each run is masked."""
    one, other = _masked(shown), _masked(printed)
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    return all(_near(a, b) for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))


def _masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    # Columns are as wide as their longest number.
    return "\n".join(re.sub(r"[ ─]{2,}", "  ", line).strip() for line in text.splitlines())


def _near(one: str, other: str) -> bool:
    return one == other or abs(float(one) - float(other)) <= 1.001 * max(_unit(one), _unit(other))


def _unit(number: str) -> float:
    """What one of the last printed digit is worth; of an integer 0: ids and counts are exact."""
    digits, _, exponent = number.partition("e")
    after = len(digits.partition(".")[2])
    return 0.0 if not after and not exponent else 10.0 ** (int(exponent or 0) - after)


def stale(text: str, bench: Bench) -> list[str]:
    """Each example whose output is not what stands there."""
    wrong = []
    for block in examples(text):
        for one, printed in zip(block, bench.run(block), strict=True):
            if one.kind != "vlens " and not same(one.shown, printed):
                wrong.append(f"line {one.line}: {one.source}\n{one.shown}\n--- now ---\n{printed}")
    return wrong


def current(text: str, bench: Bench) -> str:
    """The README with the outputs of now, where they are not the same."""
    lines = text.splitlines()
    for block in reversed([(block, bench.run(block)) for block in examples(text)]):
        for one, printed in reversed(list(zip(*block, strict=True))):
            if one.kind == "vlens " or same(one.shown, printed):
                continue
            begin = one.line - 1 + one.source.count("\n") + 1
            end = begin + (one.shown.count("\n") + 1 if one.shown else 0)
            lines[begin:end] = [(INDENT + line).rstrip() for line in printed.split("\n")] if printed else []
    return "\n".join(lines) + "\n"


def main(argument: str) -> None:
    for needed in ("jq", "bash"):
        if shutil.which(needed) is None:
            sys.exit(f"the examples need {needed}: apt-get install {needed}")
    sys.path.insert(0, str(ROOT))
    from vlens_cli.models import resolve

    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="vlens-readme-") as folder:
        bench = Bench(Path(folder), resolve("demo").folder)
        try:
            if argument == "--write":
                readme.write_text(current(text, bench), encoding="utf-8")
            elif wrong := stale(text, bench):
                sys.exit("\n\n".join(wrong) + "\n\nhint: python tests/driver/readme.py --write")
        finally:
            bench.close()


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit("usage: python tests/driver/readme.py --write|--check")
    main(sys.argv[1])
