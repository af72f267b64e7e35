"""`vlens param`: weights, by any of their names, from the checkpoint or from the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli.cli import asking, complete, options, output, render
from vlens_cli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from vlens_cli.reply import Reply


class Typed(NamedTuple):
    """The command line of `vlens param`."""

    names: tuple[str, ...]
    pattern: str | None
    source: str
    values: bool
    svd: int | None
    compare: str | None
    raw: bool
    allow_pickle: bool
    as_json: bool
    as_table: bool
    output: str | None
    svg: str | None
    html: str | None
    model: str | None
    dtype: str
    max_len: int | None
    chunk: int | None
    compiled: bool
    compile_hooks: tuple[str, ...]
    compile_buffer: int | None
    tp: int
    pp: int
    executor: str | None
    keep_alive: str | None
    timeout: float | None
    no_daemon: bool


@click.command("param")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete.weight)
@click.option("--list", "pattern", is_flag=False, flag_value="*", metavar="[PATTERN]", shell_complete=complete.weight,
              help="List the weights whose names match, with shape, dtype and where they are; all without a PATTERN.")
@click.option("--from", "source", type=click.Choice(["auto", "checkpoint", "engine"]), default="auto",
              help="Where values are read. Default: the checkpoint; the engine for what only it has, and with --dtype.")
@click.option("--values", is_flag=True, help="Print every value.")
@click.option("--svd", type=options.Whole(min=1), metavar="K",
              help="The K largest singular values, by head where there are heads.")
@click.option("--compare", metavar="MODEL", shell_complete=complete.model,
              help="The difference from the weight of the same name in MODEL's checkpoint.")
@click.option("--raw", is_flag=True, help="Tensors of a quantized checkpoint as they are stored.")
@click.option("--allow-pickle", is_flag=True,
              help="Read a checkpoint of *.bin files, which are pickled (weights only).")
@options.output_format
@click.option("-o", "--output", metavar="FILE", shell_complete=complete.file, help="Write the tensors to FILE.safetensors, under the names as asked.")
@options.pictures
@options.model
@options.engine_spec
@options.residency
def command(**typed: Any) -> None:
    """Weights, by their TransformerLens, checkpoint or engine names.

    \b
    vlens param blocks.0.attn.W_Q
    vlens param 'blocks.*.attn.W_O[head=3]' -o wo.safetensors
    vlens param --list '*.0.*'

    `*` in a NAME stands for anything; brackets choose: [head=3], [0:10].
    """
    asked = Typed(**typed)
    as_json = output.wants_json(asked.as_json, asked.as_table)
    if asked.pattern is not None:
        from vlens_cli.cli import weights

        weights.show_list(asked, as_json)
        return
    _check(asked)
    pictures = asking.pictures_of(asked.svg, asked.html)
    target = asking.file_of(asked.output, None)
    live = asked.source == "engine" or asked.dtype != "auto"
    reply = None if live else _read(asked, target, as_json)
    if reply is None:
        from vlens_cli.cli import weights

        reply = weights.ask(asked, target, live)
    asking.draw(reply, pictures)
    asking.show(reply, target, as_json, render.params)


def _check(asked: Typed) -> None:
    if not asked.names:
        raise UsageError("no weight is named", hint="`vlens param --list` lists the weights of the model")
    if asked.source == "checkpoint" and asked.dtype != "auto":
        raise UsageError("--dtype is the engine's, and a checkpoint has its own", hint="--from engine")
    if asked.source == "engine" and asked.raw:
        raise UsageError("--raw is for tensors of a checkpoint, and --from engine takes none from there",
                         hint="leave out one of them")


def _read(asked: Typed, target: Path | None, as_json: bool) -> Reply | None:
    """The reply from the checkpoint; None where the engine is needed."""
    from vlens_cli.reader import launch

    # First of all: it imports while this process imports, and finds out what to ask.
    with launch.reader(threads=asked.svd is not None) as reader:
        from vlens_cli.cli import weights

        return weights.read(asked, target, as_json, reader)
