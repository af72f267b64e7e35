"""`vlens`: the group of commands, and the one boundary where an exception becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vlens_cli import __version__
from vlens_cli.cli import output
from vlens_cli.errors import EXIT_INTERRUPTED, EXIT_OK, BugError, QueryError, UsageError, VlensError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Each is a module of this folder with a `command`, loaded when it is asked for.
COMMANDS = {
    "capture": "Activations of each PROMPT at hook points.",
    "patch": "What changes if a value is another; sweeps.",
    "logits": "What the model predicts at each position, and why.",
    "param": "Weights, by any of their names.",
    "hooks": "The hook points of a model, and the ones it does not give.",
    "engine": "The resident engines: start, status, sleep, stop, log.",
    "doctor": "What keeps vlens from answering, and what mends it.",
    "config": "The settings in force, and where each comes from.",
    "completions": "The script with which a shell completes vlens.",
}

# What people type who know other tools.
_ELSEWHERE = dict.fromkeys(("--layer", "--layers"), "the layer is in the hook's name: blocks.3.…, 'blocks.*.…'")

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class LazyGroup(click.Group):
    """Loads a command's module when the command is asked for, so that one command does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"vlens_cli.cli.{cmd_name}").command
        command.short_help = COMMANDS[cmd_name]
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without the commands themselves: to load all of them takes longer than a TAB may."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean `vlens {near[0]}`?" if near else "`vlens --help` lists the commands"
            raise UsageError(f"there is no command: {args[0]}", hint=hint, code="unknown_command")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="vlens %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """One-off questions about the inside of a language model.

    \b
    vlens capture --hook blocks.3.hook_resid_post "The Eiffel Tower is in"
    vlens patch -i 'blocks.8.hook_resid_post[pos=1] = @source' --source "Rome is in" "Paris is in"
    vlens logits --lens --pos -1 "The Eiffel Tower is in the city of"
    vlens param blocks.0.attn.W_Q

    `vlens COMMAND --help` begins with examples of each.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The entry point: run one command line (sys.argv by default) and exit with its code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As an exception, so that a file that is half written is removed.
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        code: Any = run(sys.argv[1:] if args is None else args)
    except SystemExit as left:
        code = left.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # a stream may be closed, or None
            stream.flush()
    # Nothing is left to save. An orderly end takes the interpreter a tenth of a warm command's time, and vLLM seconds.
    os._exit(code or EXIT_OK)


def run(args: Sequence[str]) -> int:
    """Run one command line; every exception ends here. Returns the exit code."""
    output.ensure_stderr()
    try:
        _dispatch(list(args))
        return EXIT_OK
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except Exception as raised:
        return _failed(raised, args)


def _dispatch(args: list[str]) -> None:
    # Not click's own main(): it swallows a broken pipe anywhere, the engine's included, and exits 1.
    if "_VLENS_COMPLETE" in os.environ:
        from vlens_cli.cli import shells

        shells.register()
        cli.main(args, prog_name="vlens")
    with cli.make_context("vlens", args) as ctx:
        cli.invoke(ctx)


def _asks_for_json(args: Sequence[str]) -> bool:
    """Read from the raw arguments, because they may be what does not parse."""
    return "--json" in (args[: args.index("--")] if "--" in args else args)


def _failed(raised: Exception, args: Sequence[str]) -> int:
    if isinstance(raised, BrokenPipeError) and output.reader_gone():
        output.discard_stdout()  # `| head`: it has what it wanted
        return EXIT_OK
    if os.environ.get("VLENS_DEBUG", "0") not in ("", "0"):
        import traceback

        output.say("".join(traceback.format_exception(raised)).rstrip())
    error = _translated(raised, path=" ".join(["vlens", *(name for name in args[:1] if name in COMMANDS)]))
    output.report(error, as_json=_asks_for_json(args))
    return error.exit_code


def _translated(raised: Exception, path: str) -> VlensError:
    """What was raised as an error of our tree; `path` is the command whose help a hint names."""
    match raised:
        case VlensError():
            return raised
        case click.NoSuchOption():
            near = " or ".join(raised.possibilities or ())
            path = raised.ctx.command_path if raised.ctx is not None else path
            prompts = path.split()[1:] in (["capture"], ["patch"], ["logits"])
            hint = f"did you mean {near}?" if near else "a prompt that starts with `-` goes after `--`" if prompts else (
                f"`{path} --help` lists what it takes")
            hint = _ELSEWHERE.get(raised.option_name, hint)
            return UsageError(f"there is no option: {raised.option_name}", hint=hint, code="unknown_option")
        case click.MissingParameter() if raised.param is not None and "--hook" in raised.param.opts:
            return UsageError("no hook point is named", hint="--hook blocks.3.hook_resid_post; `vlens hooks` lists those of the model",
                              code="no_hook")
        case click.ClickException():
            message = raised.format_message().rstrip(".")
            return UsageError(message[:1].lower() + message[1:], hint=f"`{path} --help` lists what it takes")
        # Streams that cannot be written name no file; whoever opens a file translates its own errors.
        case OSError() if raised.filename is None and raised.errno in _DISK_FULL:
            return QueryError(f"the output could not be written: {os.strerror(raised.errno)}", code="output_failed")
    what = " ".join(f"{type(raised).__name__}: {raised}".split())
    return BugError(f"a bug in vlens: {what}", hint="run it again with VLENS_DEBUG=1 for the traceback, and report it")
