"""`vlens engine`: the resident engines: start, status, sleep, stop, log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from vlens_cli.cli import options, output, render
from vlens_cli.errors import EXIT_FAILED, QueryError, UsageError
from vlens_cli.reply import SCHEMA_VERSION
from vlens_cli.units import counted

if TYPE_CHECKING:
    from vlens_cli.daemon.runtime import Home


@click.group("engine", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """The resident engines: start, status, sleep, stop, log.

    \b
    vlens engine status
    vlens engine stop
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command("start")
@options.model
@options.engine
@options.output_format
def start(as_json: bool, as_table: bool, **typed: Any) -> None:
    """Start the engine of a model and wait until it answers.

    \b
    vlens engine start --keep-alive 2h
    """
    as_json = output.wants_json(as_json, as_table)
    if typed["no_daemon"] or typed["one_chunk"]:
        raise UsageError("engine start takes neither --no-daemon nor --one-chunk", hint="leave it out")
    from vlens_cli.daemon import client, launch, runtime
    from vlens_cli.query import StartQuery

    from vlens_cli import models

    spec = options.spec(models.resolve(typed["model"]), typed)
    how = options.asking(typed["keep_alive"], typed["timeout"], no_daemon=False)
    with output.progress() as show:
        reply = client.ask(spec, StartQuery(), show, None, how)
    for note in reply.notes:
        output.say(f"note: {render.visible(note)}")
    described = launch.describe(runtime.home(runtime.fingerprint(spec)))
    _emit([described] if described else [], "engine start", as_json)


@command.command("status")
@options.output_format
def status(as_json: bool, as_table: bool) -> None:
    """The resident engines: model, state, memory, time left. Exit code 1 where none runs.

    \b
    vlens engine status --json
    """
    from vlens_cli.daemon import runtime

    as_json = output.wants_json(as_json, as_table)
    engines = running()
    _emit(engines, "engine status", as_json)
    told = [] if engines else ["no engine runs"]
    told += [f"another vlens is {doing}" for doing in runtime.under_way()]
    if told:
        output.say("; ".join(map(render.visible, told)))
    if not engines:
        sys.exit(EXIT_FAILED)


@command.command("sleep", short_help="Move weights to the host's memory until the next query.")
@options.running
def sleep(model: str | None) -> None:
    """Move the weights of the engines of a model, or of all, to the host's memory; the next query wakes them.

    \b
    vlens engine sleep
    """
    from vlens_cli.daemon import client, launch
    from vlens_cli.query import SleepQuery

    freed = []
    for home in _homes(model):
        if home.alive() and (described := launch.describe(home)):
            # It stays for as long as it was told to.
            reply = client.ask_running(home, SleepQuery(), client.Asking(keep_alive=described["keep_alive_s"]))
            freed += [] if reply is None else [reply.body["freed_bytes"]]
    output.say(f"{counted(len(freed), 'engine')} asleep: {sum(freed) / 1e9:.1f} GB of GPU memory freed"
               if freed else "no engine runs")


@command.command("stop", short_help="Stop engines, and wait until their processes are gone.")
@options.running
def stop(model: str | None) -> None:
    """Stop the engines of a model, or all of them, and wait until their processes are gone.

    \b
    vlens engine stop
    vlens engine stop -m ./my-model
    """
    from vlens_cli.daemon import launch, runtime

    stopped = []
    with output.progress() as show:
        for home in _homes(model):
            recorded = home.status()
            with runtime.locked(home, f"stopping the engine of {recorded.model if recorded else home.folder.name}", show):
                stopped.append(launch.stop(home, show, break_off=True))
    pids = [str(pid) for pid in stopped if pid is not None]
    output.say(f"stopped {counted(len(pids), 'engine')}: pid {', '.join(pids)}" if pids else "no engine runs")


@command.command("log", short_help="What the newest engine said.")
@options.running
@click.option("-n", "--lines", type=options.Whole(min=1), default=100, metavar="N", help="Last lines. Default: 100.")
@click.option("--path", "only_path", is_flag=True, help="Print the log's path alone.")
def log(model: str | None, lines: int, only_path: bool) -> None:
    """What the newest engine said, its vLLM included; also of one that has ended.

    \b
    vlens engine log -n 20
    """
    homes = [home for home in _homes(model) if home.log.exists()]
    if not homes:
        raise QueryError("there is no engine log", hint="`vlens engine start` starts an engine", code="no_engine_runs")
    from vlens_cli.daemon import runtime

    output.emit(str(homes[-1].log) if only_path else runtime.log_tail(homes[-1].log, lines))


def _homes(model: str | None) -> list[Home]:
    """Engine folders, oldest first; those of one model where it is named."""
    from vlens_cli.daemon import runtime

    homes = runtime.homes()
    if model is None:
        return homes
    from vlens_cli import models

    folder = str(models.resolve(model).folder)
    return [home for home in homes if (status := home.status()) and status.folder == folder]


def running() -> list[dict[str, Any]]:
    """What each living engine says of itself; of one that does not answer, what its status file and the system say."""
    from vlens_cli import memory
    from vlens_cli.daemon import launch, runtime

    engines = []
    for home in runtime.homes():
        recorded = home.alive()
        if recorded is not None:
            engines.append(launch.describe(home) or {
                "pid": recorded.pid, "model": recorded.model, "folder": recorded.folder, "state": "not answering",
                "doing": None, "fingerprint": recorded.fingerprint, "socket": str(home.socket), "log": str(home.log),
                "version": recorded.version, "rss_bytes": memory.resident(recorded.pid), "idle_left_s": None,
            })
    return engines


def _emit(engines: list[dict[str, Any]], verb: str, as_json: bool) -> None:
    if as_json:
        output.emit(render.to_json({"schema_version": SCHEMA_VERSION, "command": verb, "engines": engines}))
    elif engines:
        output.emit(render.engines(engines))
