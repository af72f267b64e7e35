"""The boundary: streams, exit codes, errors, and what a process may import."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys

import pytest

from vlens_cli import __version__, env as settings
from vlens_cli.cli.main import COMMANDS, cli

HEAVY = ("torch", "numpy", "vllm", "transformers", "huggingface_hub", "safetensors")


# Help


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(shell, command, flag):
    done = shell.real(command, flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: vlens {command} ")


@pytest.mark.parametrize("words", [*((command,) for command in COMMANDS), *(("engine", verb) for verb in ("start", "status", "sleep", "stop", "log"))])
def test_help_begins_with_examples(words):
    """What it is in a sentence, then what to type."""
    command = cli
    for word in words:
        command = command.get_command(None, word)
    summary, examples, *_ = [part for part in inspect.cleandoc(command.help).split("\n\n") if part]
    assert summary.endswith(".") and examples.startswith("\b\n")
    for line in examples.splitlines()[1:]:
        assert " ".join(("vlens", *words)) in line


def test_vlens_alone_lists_the_commands(shell):
    done = shell.real()
    assert done.returncode == 0
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


def test_version(shell):
    assert shell.real("--version").stdout == f"vlens {__version__}\n"


# Imports


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["capture", "--help"], 0),
        (["capture", "--hook", "blocks.x", "hello"], 2),
        (["capture", "--hook", "blocks.3.hook_resid_post", "hello"], 0),
        (["capture", "--hook", "blocks.3.hook_resid_post", "--table", "-o", "a.safetensors", "hello"], 0),
        (["hooks", "--table"], 0),
    ],
)
def test_the_client_loads_nothing_heavy(shell, args, code):
    done = shell.fake(*args, env={"FAKE_IMPORTS": "loaded"})
    assert done.returncode == code, done.stderr
    loaded = (shell.folder / "loaded").read_text().splitlines()
    assert "vlens_cli.cli.main" in loaded
    assert not set(loaded) & set(HEAVY)


def test_json_does_not_pay_for_tables(shell):
    shell.fake("hooks", "--json", env={"FAKE_IMPORTS": "loaded"})
    loaded = (shell.folder / "loaded").read_text().splitlines()
    assert "vlens_cli.cli.hooks" in loaded
    assert "rich" not in loaded and "vlens_cli.cli.capture" not in loaded


def test_what_the_fakes_stand_for_is_light_too():
    """In the tests above models and client are fakes."""
    code = "import sys, vlens_cli.models, vlens_cli.families, vlens_cli.daemon.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "vlens_cli.daemon.client" in loaded
    assert not set(loaded) & set(HEAVY)


def test_the_fakes_take_what_the_real_ones_take():
    import fake_vlens

    from vlens_cli import models
    from vlens_cli.daemon import client

    for fake, real in ((fake_vlens.ask, client.ask), (fake_vlens.resolve, models.resolve)):
        assert list(inspect.signature(fake).parameters) == list(inspect.signature(real).parameters)


# Errors


def test_an_error_is_a_message_then_a_hint(shell):
    done = shell.real("hoks")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no command: hoks\n\nhint: did you mean `vlens hooks`?\n"


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["capture", "--hok", "x", "hello"], "there is no option: --hok", "did you mean --hook"),
        (["capture", "--layer", "3", "hello"], "there is no option: --layer", "blocks.3."),
        (["capture", "--hook"], "option '--hook' requires an argument", "`vlens capture --help`"),
        (["capture", "hello"], "no hook point is named", "--hook blocks.3.hook_resid_post; `vlens hooks` lists"),
        (["capture", "--hook", "hook_embed", "-5 degrees"], "there is no option: -5", "goes after `--`"),
        (["capture", "--hook", "hook_embed", "--dtype", "int8", "x"], "'int8' is not one of", "`vlens capture --help`"),
        (["capture", "--hook", "hook_embed", "--chunk", "0", "x"], "--chunk", "`vlens capture --help`"),
        (["hooks", "--json", "--table"], "--json and --table exclude each other", "one of them"),
    ],
)
def test_a_command_line_that_does_not_parse(shell, args, message, hint):
    done = shell.real(*args)
    assert done.returncode == 2
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("error: ") and message in first and not first.endswith(".")
    assert last.startswith("hint: ") and hint in last


@pytest.mark.parametrize(("option", "kind"), [("--tp", "integer"), ("--timeout", "number")])
def test_what_a_range_takes_is_said(shell, option, kind):
    done = shell.real("capture", "--hook", "hook_embed", option, "x", "hello")
    assert done.stderr.startswith(f"error: invalid value for '{option}': 'x' is not a valid {kind}\n")


@pytest.mark.parametrize(
    ("args", "code", "exit_code"),
    [
        (["nothing", "--json"], "unknown_command", 2),
        (["capture", "--json", "--hok", "x"], "unknown_option", 2),
        (["capture", "--json", "--hook", "blocks.99.hook_resid_post", "hello"], "layer_out_of_range", 2),
        (["capture", "--json", "--hook", "hook_embed", "-m", "missing", "hello"], "start_failed", 3),
    ],
)
def test_with_json_the_error_is_on_stdout_too(shell, args, code, exit_code):
    done = shell.fake(*args)
    assert done.returncode == exit_code
    body = json.loads(done.stdout)
    assert body["schema_version"] == 1 and set(body["error"]) == {"code", "message", "hint"}
    assert body["error"]["code"] == code
    assert done.stderr.startswith(f"error: {body['error']['message']}\n")


def test_json_after_the_dashes_is_a_prompt(shell):
    assert shell.fake("capture", "--hook", "blocks.99.hook_resid_post", "--", "--json").stdout == ""


def test_an_error_cannot_drive_the_terminal(shell):
    done = shell.real("capture", "--hook", "hook_embed", "-f", "\x1b[31mfile", "x")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr and r"\x1b[31mfile" in done.stderr


def test_a_bug_is_one_line(shell, hook):
    done = shell.fake("capture", "--hook", hook, "hello", env={"FAKE": "bug"})
    assert (done.returncode, done.stdout) == (4, "")
    message, blank, hint = done.stderr.splitlines()
    assert message == "error: a bug in vlens: ZeroDivisionError: one bug"
    assert blank == "" and "VLENS_DEBUG=1" in hint


def test_debug_shows_the_traceback(shell, hook):
    done = shell.fake("capture", "--hook", hook, "hello", env={"FAKE": "bug", "VLENS_DEBUG": "1"})
    assert done.returncode == 4
    assert done.stderr.startswith("Traceback") and "in ask" in done.stderr


def test_colour_only_on_a_terminal_that_wants_it(shell):
    assert b"\x1b[31m" in on_terminal(shell, "hoks")
    assert b"\x1b[" not in on_terminal(shell, "hoks", env={"NO_COLOR": "1"})


def on_terminal(shell, *args: str, env: dict[str, str] | None = None) -> bytes:
    """What vlens writes where both of its streams are one terminal."""
    import pty

    mine, theirs = pty.openpty()
    # Above what the terminal's buffer holds, vlens would wait for a reader; these outputs are small.
    shell.fake(*args, stdout=theirs, stderr=theirs, env={"TERM": "xterm-256color", **(env or {})})
    os.close(theirs)
    found = b""
    try:
        while more := os.read(mine, 65536):
            found += more
    except OSError:  # Linux's end of a terminal that nobody holds open
        pass
    os.close(mine)
    return found


def test_a_terminal_gets_tables_and_a_pipe_json(shell):
    assert b"layers 0 to 3" in on_terminal(shell, "hooks", "hook_embed")
    assert on_terminal(shell, "hooks", "hook_embed", "--json").startswith(b"{")
    assert shell.fake("hooks", "hook_embed").stdout.startswith("{")
    assert "layers 0 to 3" in shell.fake("hooks", "hook_embed", "--table").stdout


@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_no_number_breaks_or_goes_on_a_narrow_terminal(shell, hook, columns):
    shown = on_terminal(shell, "capture", "--hook", hook, "hello", env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    for number in (b"-Infinity", b"1e-30", b"0.333333", b'" \\x1b[31m[bold]\\u202e\\n"'):
        assert shown.count(number) == 3, shown.decode()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_word_of_the_settings_is_cut_on_a_narrow_terminal(shell, columns):
    shown = on_terminal(shell, "config", env={"COLUMNS": str(columns), "NO_COLOR": "1"}).decode()
    words = {word for one in settings.VARIABLES for word in one.meaning.split()}
    assert words <= set(shown.split())


# Streams that end


@pytest.mark.parametrize("form", ["--table", "--json"])
def test_head_ends_quietly(shell, hook, form):
    process = shell.start(
        "capture", "--hook", hook, form, "hello",
        env={"FAKE_TOKENS": "20000"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(30) == 0
    assert errors.splitlines() == [r"note: two BOS\x1b[0m"]
    process.stderr.close()


def test_head_of_help_ends_quietly(shell):
    reader, writer = os.pipe()
    os.close(reader)
    done = shell.real("capture", "--help", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_of_the_engine_is_no_quiet_end(shell, hook):
    done = shell.fake("capture", "--hook", hook, "hello", env={"FAKE": "pipe"})
    assert done.returncode == 4
    assert "BrokenPipeError" in done.stderr


@pytest.mark.parametrize("args", [["hooks"], ["--help"], ["hooks", "--json", "--hok"]])
def test_a_full_disk_is_an_error_without_traceback(shell, args):
    with open("/dev/full", "w") as full:
        done = shell.fake(*args, stdout=full)
    assert done.returncode == (2 if "--hok" in args else 1)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if "--hok" not in args:
        assert done.stderr == "error: the output could not be written: No space left on device\n"


def test_closed_streams(shell, hook):
    done = shell.fake("hooks", preexec_fn=lambda: os.close(1), stdout=None)
    assert (done.returncode, done.stderr) == (1, "error: standard output is closed\n")
    done = shell.fake("capture", "--hook", hook, "hi", preexec_fn=lambda: os.close(2), stderr=None)
    assert done.returncode == 0
    assert json.loads(done.stdout)["command"] == "capture"  # and not the note, which goes to standard error


def test_ctrl_c_ends_quietly(shell, hook):
    process = shell.start(
        "capture", "--hook", hook, "-o", "a.safetensors", "hello",
        env={"FAKE": "slow"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr.readline() == "engine started\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors) == (130, "", "")
    assert os.listdir(shell.folder) == []


def test_a_locale_without_unicode(shell):
    for form in ("--json", "--table"):
        done = shell.fake("capture", "--hook", "hook_embed", form, "Zürich", env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert "Z\\" in done.stdout and done.stdout.isascii()
        if form == "--json":
            assert json.loads(done.stdout)["prompts"][0]["text"] == "Zürich"


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"},
                                 {"PYTHONIOENCODING": "cp1252"}])
def test_locales_of_another_time(shell, env):
    """Every table and every error, of texts that these encodings lack."""
    prompt = "Zürich 東京 שלום"
    for args in (["capture", "--hook", "blocks.1.attn.hook_pattern", "--table", prompt], ["capture", "--hook", "hook_embed", "--map",
                  "--table", prompt], ["hooks", "--table"], ["--help"], ["config", "--table"]):
        done = shell.fake(*args, env=env, errors="backslashreplace")
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    done = shell.fake("capture", "--hook", "hook_embed", "--json", prompt, env=env)
    assert json.loads(done.stdout)["prompts"][0]["text"] == prompt
    done = shell.fake("capture", "--hook", "hook_東京", prompt, env=env, errors="backslashreplace")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"CI": "true"}])
def test_no_progress_where_a_line_cannot_be_taken_back_or_nobody_looks(shell, hook, env):
    shown = on_terminal(shell, "capture", "--hook", hook, "hello", env=env)
    assert b"loading weights" not in shown and (b"\x1b" not in shown or "CI" in env)
    assert b"loading weights" in on_terminal(shell, "capture", "--hook", hook, "hello")


@pytest.mark.parametrize("columns", ["1", "20", "80", "0", "wide"])
def test_any_width_of_the_terminal(shell, hook, columns):
    shown = on_terminal(shell, "capture", "--hook", hook, "--map", "hello", env={"COLUMNS": columns, "NO_COLOR": "1"})
    assert shown.count(b"NaN") == 3 and b"Traceback" not in shown and b"layer 3" in shown
    assert shown.count(rb'" \x1b[31m[bold]\u202e\n"') == 3 and "…".encode() not in shown


def test_prompts_and_specs_from_windows(shell, hook):
    (shell.folder / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (shell.folder / "s.json").write_bytes(b'\xef\xbb\xbf[{"hook": "hook_embed",\r\n "op": "suppress"}]\r\n')
    done = shell.fake("capture", "--hook", hook, "-f", "p.txt", "--spec", "s.json", env={"FAKE": "echo"})
    query = json.loads(done.stdout)["query"]
    assert [prompt["text"] for prompt in query["prompts"]] == ["one", "two"] and len(query["interventions"]["expressions"]) == 1


@pytest.mark.parametrize("args", [["--help"], ["engine", "--help"]])
def test_the_list_of_commands_is_whole(shell, args):
    listed = shell.real(*args).stdout.partition("Commands:")[2]
    assert listed and "..." not in listed and all(len(line) < 80 for line in listed.splitlines())


def test_module_and_script_are_one(shell):
    """The installed script and `python -m vlens_cli` name themselves alike."""
    code = "import sys; sys.argv[0] = 'x'; from vlens_cli.cli.main import main; main(['capture', '-h'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == shell.real("capture", "-h").stdout


def test_the_engine_command_alone_prints_its_help(shell):
    done = shell.real("engine")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == shell.real("engine", "--help").stdout
