"""A real shell on a terminal of its own, with vlens completed in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from vlens_cli.cli.completions import SHELLS

FILES = Path(__file__).parents[2] / "completions"
# Seconds of silence after which a shell has shown what it had to.
QUIET = 0.15


class Tabbed:
    """An interactive shell on a terminal of its own, in a folder that is empty but for `notes.txt` and `tiny/`."""

    READY = "READY> "

    def __init__(self, shell_name: str, folder: Path) -> None:
        self.name, self.folder, self._seen = shell_name, folder / "here", b""
        (self.folder / "tiny").mkdir(parents=True)
        (self.folder / "notes.txt").touch()
        binaries = folder / "bin"
        binaries.mkdir()
        script = binaries / "vlens"
        script.write_text(f"""#!/bin/sh
[ -n "$_VLENS_COMPLETE" ] && exec '{sys.executable}' -m vlens_cli
printf 'WORDS'; printf ' <%s>' "$@"; echo ' END'
""")
        script.chmod(0o755)
        source = f"source '{FILES / SHELLS[shell_name]}'"
        (folder / ".zshrc").write_text(f"autoload -Uz compinit && compinit -u\n{source}\nPS1='{self.READY}'\n"
                                       "unsetopt beep prompt_sp\nLISTMAX=1000\n")
        (folder / "bashrc").write_text(f"{source}\nPS1='{self.READY}'\nbind 'set completion-query-items 0'\n"
                                       "bind 'set page-completions off'\nbind 'set enable-bracketed-paste off'\n")
        (folder / "config.fish").write_text(f"{source}\nfunction fish_prompt; echo -n '{self.READY}'; end\n"
                                            "set fish_greeting\nset -g fish_autosuggestion_enabled 0\n")
        command = {"bash": ["--noprofile", "--rcfile", str(folder / "bashrc"), "-i"], "zsh": ["-d", "-i"],
                   "fish": ["--no-config", "-i", "-C", f"source '{folder / 'config.fish'}'"]}[shell_name]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
            "PATH": f"{binaries}:{os.environ['PATH']}", "ZDOTDIR": str(folder), "TERM": "xterm",
                            "INPUTRC": "/dev/null", "VLENS_RUNTIME": str(folder / "run")}
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (60, 200))
        self._process = subprocess.Popen([shell_name, *command], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
                                         cwd=self.folder, start_new_session=True, preexec_fn=_own_terminal)
        os.close(theirs)

    def __enter__(self) -> Tabbed:
        self._until(self.READY)
        return self

    def __exit__(self, *fault: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def words(self, line: str) -> str:
        """The words of the command that a line with TABs in it becomes."""
        self._type(line)
        seen = self._until(" END", after="WORDS")
        return seen[seen.rindex("WORDS") + 6 : seen.rindex(" END")]

    def listed(self, line: str, *wanted: str) -> str:
        """What is on the terminal when each of `wanted` has been shown behind a line with TABs, which is the shell's last."""
        self._type(line, enter=False)
        return [self._until(each) for each in wanted][-1]

    def _type(self, line: str, enter: bool = True) -> None:
        self._seen = b""
        *parts, rest = line.split("\t")
        for part in parts:
            os.write(self._terminal, part.encode())
            self._settle()
            began, before = time.monotonic(), self._seen
            os.write(self._terminal, b"\t")
            self._settle(lambda before=before: self._seen != before)
            print(f"{self.name}: {part!r} and TAB, {time.monotonic() - began - QUIET:.2f} s")
        os.write(self._terminal, rest.encode() + (b"\r" if enter else b""))

    def _settle(self, begun=lambda: True) -> None:
        """Read until nothing more comes, for as long as it takes to begin."""
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if select.select([self._terminal], [], [], QUIET)[0]:
                self._read()
            elif begun():
                return

    def _until(self, text: str, after: str = "") -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            shown = self._shown()
            if text in shown[max(0, shown.find(after)) :] and after in shown:
                return shown
            if select.select([self._terminal], [], [], 0.5)[0]:
                self._read()
        pytest.fail(f"{self.name} did not show {text!r}: {self._shown()!r}")

    def _read(self) -> None:
        more = os.read(self._terminal, 65536)
        # fish asks what the terminal is, and waits for the answer before it takes what is typed.
        if b"\x1b[c" in more or b"\x1b[0c" in more:
            os.write(self._terminal, b"\x1b[?62c")
        self._seen += more

    def _shown(self) -> str:
        return re.sub(r"\x1b(\[[0-9;?>=]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\\\)|[()][A-Z0-9]|[=>])", "",
                      self._seen.decode("utf-8", "replace"))


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
