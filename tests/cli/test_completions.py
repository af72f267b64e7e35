"""`vlens completions` and the files made from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import made
import pytest
from tabbed import Tabbed

from vlens_cli import env
from vlens_cli.cli import complete, generate, shells
from vlens_cli.cli.completions import SHELLS
from vlens_cli.cli.main import COMMANDS, cli
from vlens_cli.daemon import launch, runtime

ROOT = Path(__file__).parents[2]
FILES = ROOT / "completions"


def test_files_are_current():
    assert generate.stale(ROOT) == [], "run: python -m vlens_cli.cli.generate --write"


def test_a_stale_file_is_seen(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n\n{generate.TABLE}| `OLD` | x | y | z |\n\nafter\n")
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


# In the shells themselves


@pytest.fixture(params=SHELLS)
def tabbed(request, tmp_path):
    """A shell in which vlens is completed: a TAB is answered by vlens, and a command line prints the words it is made of."""
    shell_name = request.param
    if shutil.which(shell_name) is None and shell_name != "bash":
        pytest.skip(f"{shell_name} is not installed: apt-get install {shell_name}")
    with Tabbed(shell_name, tmp_path) as started:
        yield started


def test_commands_and_options(tabbed):
    assert tabbed.words("vlens capt\t--ho\tx") == "<capture> <--hook> <x>"
    assert tabbed.words("vlens engine statu\t--js\t") == "<engine> <status> <--json>"
    assert tabbed.words("vlens capture --dtype bfl\t") == "<capture> <--dtype> <bfloat16>"
    tabbed.listed("vlens \t\t", *COMMANDS)


def test_hooks_of_the_model_that_is_named(tabbed):
    made.model(tabbed.folder / "tiny")
    before = "<capture> <-m> <tiny> "
    assert tabbed.words("vlens capture -m tiny --hook blocks.1.attn.hook_rot_q\t") == before + "<--hook> <blocks.1.attn.hook_rot_q>"
    assert tabbed.words("vlens capture -m tiny --hook=blocks.1.hook_resid_po\t") == before + "<--hook=blocks.1.hook_resid_post>"
    assert tabbed.words("vlens capture -m tiny --hook 'blocks.*.hook_resid_po\tx") == before + "<--hook> <blocks.*.hook_resid_post> <x>"
    assert tabbed.words("vlens capture -m tiny --hook 'blocks.{0,1}.attn.hook_rot_k\tx") == \
        before + "<--hook> <blocks.{0,1}.attn.hook_rot_k> <x>"
    shown = tabbed.listed("vlens hooks -m tiny blocks.1.hook_resid_\t\t", "resid_post", "resid_pre", "resid_mid")
    # fish cuts what all of them begin with.
    assert "hook_z" not in shown and "blocks.0" not in shown


def test_the_hook_of_an_expression_is_one_that_can_be_changed(tabbed):
    made.model(tabbed.folder / "tiny")
    assert tabbed.words("vlens patch -m tiny -i 'blocks.0.hook_mlp\t").startswith("<patch> <-m> <tiny> <-i> <blocks.0.hook_mlp_out")
    assert tabbed.words("vlens patch -m tiny -i blocks.0.attn.hook_pat\t") == "<patch> <-m> <tiny> <-i> <blocks.0.attn.hook_pat>"


def test_weights_from_the_checkpoint(tabbed):
    made.model(tabbed.folder / "tiny")
    assert tabbed.words("vlens param -m tiny blocks.1.attn.W_Q\t") == "<param> <-m> <tiny> <blocks.1.attn.W_Q>"
    assert tabbed.words("vlens param -m tiny model.layers.1.mlp.do\t") == "<param> <-m> <tiny> <model.layers.1.mlp.down_proj.weight>"
    tabbed.listed("vlens param -m tiny blocks.0.attn.W_\t\t", "W_Q", "W_K", "W_V", "W_O")


def test_files_and_folders(tabbed):
    assert tabbed.words("vlens capture -f no\t") == "<capture> <-f> <notes.txt>"
    assert tabbed.words("vlens capture -m ti\tx").startswith("<capture> <-m> <tiny/")
    assert tabbed.words("vlens patch --spec no\t") == "<patch> <--spec> <notes.txt>"


def test_models_of_the_hub_cache(tabbed):
    snapshot = Path(os.environ["HF_HOME"]) / "hub/models--acme--tiny-llama/snapshots" / ("0" * 40)
    made.model(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    assert tabbed.words("vlens capture -m ac\tx").replace(" <x>", "") in ("<capture> <-m> <acme/tiny-llama>", "<capture> <-m> <acme/tiny-llamax>")
    assert tabbed.words("vlens capture -m acme/tiny-llama --hook blocks.1.hook_resid_po\t") == \
        "<capture> <-m> <acme/tiny-llama> <--hook> <blocks.1.hook_resid_post>"


# What is offered


def test_many_names_are_offered_up_to_their_next_dot():
    names = ["hook_embed", *(f"blocks.{i}.attn.hook_{c}" for i in range(20) for c in "qkvzabcdef"), "ln_final.hook_scale"]
    assert complete.offered(names, "") == ["hook_embed", "blocks.", "ln_final."]
    assert complete.offered(names, "blo")[:2] == ["blocks.0.", "blocks.1."] and len(complete.offered(names, "blo")) == 20
    assert complete.offered(names, "blocks.3.") == [f"blocks.3.attn.hook_{c}" for c in "qkvzabcdef"]
    assert complete.offered(names, "nothing") == []


@pytest.mark.parametrize("layers", ["*", "-1", "{0,5,10}", "3-7"])
def test_layers_may_be_a_pattern(layers):
    names = ["hook_embed", *(f"blocks.{i}.hook_{c}" for i in range(12) for c in "qk"), "blocks.7.hook_only_here"]
    assert complete.offered(names, f"blocks.{layers}.h") == [f"blocks.{layers}.hook_{c}" for c in ("q", "k", "only_here")]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine of a tiny model that seems to run, in this process."""
    monkeypatch.setenv("VLENS_RUNTIME", str(tmp_path / "run"))
    runtime.directory.cache_clear()
    folder = made.model(tmp_path / "tiny")
    home = runtime.home("0" * 16)
    home.folder.mkdir(mode=0o700)
    home.write_status(runtime.Status(os.getpid(), runtime.process_start(os.getpid()), "0" * 16, "./my-tiny", str(folder), 1, "x"))
    yield folder
    runtime.directory.cache_clear()


def offers(words: str) -> list[str]:
    """As a shell asks: the values offered at the end of the words."""
    args = words.split(" ")
    return [item.value for item in shells.Bash(cli, {}, "vlens", "_VLENS_COMPLETE").get_completions(args[1:-1], args[-1])]


def test_models_of_running_engines(engine):
    assert offers("vlens engine stop -m ") == ["./my-tiny"] == offers("vlens engine log -m ./")
    assert offers("vlens engine stop -m de") == []
    assert offers("vlens capture -m ") == ["demo", "./my-tiny", ""]


def test_a_running_engine_says_what_it_does_not_give(engine, monkeypatch):
    said = {"refused": {"blocks.1.attn.hook_z": "it failed"}, "not_editable": {"blocks.1.attn.hook_v": "no effect"}}
    monkeypatch.setattr(launch, "proofs", lambda folder, timeout: [said] if folder == engine.resolve() else [])
    assert offers(f"vlens capture -m {engine} --hook blocks.1.attn.hook_z") == []
    assert offers(f"vlens capture -m {engine} --hook blocks.0.attn.hook_z") == ["blocks.0.attn.hook_z"]
    assert offers(f"vlens capture -m {engine} --hook blocks.1.attn.hook_v") == ["blocks.1.attn.hook_v"]
    assert offers(f"vlens patch -m {engine} -i blocks.1.attn.hook_v") == []


def test_what_cannot_be_read_offers_nothing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{")
    assert offers(f"vlens capture -m {tmp_path} --hook blo") == []
    assert offers(f"vlens param -m {tmp_path} blo") == []
    monkeypatch.setenv("VLENS_CONFIG", str(tmp_path / "none.toml"))
    assert offers("vlens capture --hook blo") == []


@pytest.mark.parametrize(("words", "left_out"), [
    ("vlens ", [f"vlens_cli.cli.{name}" for name in COMMANDS]),
    ("vlens capture -m {folder} --hook blo", ["vlens_cli.query", "vlens_cli.cli.prompts", "hashlib", "rich", "numpy"]),
    ("vlens param -m {folder} blo", ["vlens_cli.query", "vlens_cli.reader.launch", "rich", "numpy"]),
])
def test_a_tab_loads_what_it_needs_alone(tmp_path, words, left_out):
    words = words.format(folder=made.model(tmp_path / "tiny"))
    asking = {"_VLENS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "vlens_cli"], env=os.environ | asking, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout.count("plain,") > 1 and "vlens_cli.cli.main" in loaded
    assert not loaded & set(left_out)


def test_words_of_options(tmp_path):
    assert offers("vlens logits --lens resid_p") == ["resid_pre", "resid_post"]
    assert offers("vlens patch --sweep layer,") == ["layer,pos", "layer,head"]
    assert offers("vlens patch --metric re") == ["recovery"]
    assert offers("vlens engine start --keep-alive f") == ["forever"]
