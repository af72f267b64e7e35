"""`vlens completions` and the files made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlens_cli import env
from vlens_cli.cli import generate
from vlens_cli.cli.completions import SHELLS
from vlens_cli.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "completions"


def test_files_are_current():
    assert generate.stale(ROOT) == [], "run: python -m vlens_cli.cli.generate --write"


def test_a_stale_file_is_seen(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n\n{generate.TABLE}| `OLD` | x | y |\n\nafter\n")
    written = [*(tmp_path / "completions" / name for name in SHELLS.values()), tmp_path / "README.md"]
    assert generate.stale(tmp_path) == written
    generate.write(tmp_path)
    assert generate.stale(tmp_path) == []
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n\n| variable |") and readme.endswith(" |\n\nafter\n") and "OLD" not in readme
    assert all(f"| `{each.name}` |" in readme for each in env.VARIABLES)
    (tmp_path / "completions" / "_vlens").write_text("old")
    assert generate.stale(tmp_path) == [tmp_path / "completions" / "_vlens"]


@pytest.mark.parametrize("shell_name", SHELLS)
def test_the_command_prints_the_file(shell, shell_name):
    done = shell.real("completions", shell_name)
    assert (done.stdout, done.stderr) == ((FILES / SHELLS[shell_name]).read_text(), "")


def test_an_unknown_shell(shell):
    done = shell.real("completions", "tcsh")
    assert done.returncode == 2 and "'bash', 'zsh', 'fish'" in done.stderr


def test_bash_takes_the_file():
    code = f"source '{FILES / 'vlens.bash'}' && complete -p vlens"
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "-F _vlens_completion vlens" in done.stdout


def completed(words: str, folder: Path, **env: str) -> list[str]:
    """What bash would offer at the end of the words, by the function that the file defines."""
    script = folder / "vlens"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m vlens_cli \"$@\"\n")
    script.chmod(0o755)
    *before, last = words.split(" ")
    code = f"""
        source '{FILES / "vlens.bash"}'
        COMP_WORDS=({words}{" ''" if not last else ""}) COMP_CWORD={len(before)}
        _vlens_completion '{script}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path):
    assert completed("vlens ", tmp_path) == list(COMMANDS)
    assert completed("vlens capture --ho", tmp_path) == ["--hook"]


def test_bash_completes_hook_names_of_a_folder(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 4,
        "intermediate_size": 12, "vocab_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = ["blocks.2.hook_resid_pre", "blocks.2.hook_resid_mid", "blocks.2.hook_resid_post"]
    assert completed(f"vlens capture -m {tmp_path} --hook blocks.2.hook_r", tmp_path) == wanted
    assert completed("vlens capture --hook blocks.2.hook_r", tmp_path, VLENS_MODEL=str(tmp_path)) == wanted
    assert completed("vlens capture --hook blocks.2.hook_r", tmp_path) == []


def test_bash_completes_models_at_hand(tmp_path):
    assert completed("vlens hooks -m de", tmp_path)[0] == "demo"
