"""Options that commands share, as decorators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from vlens_cli.cli import complete
from vlens_cli.errors import UsageError
from vlens_cli.reply import COMPILE_HOOKS

if TYPE_CHECKING:
    from vlens_cli.daemon.client import Asking
    from vlens_cli.models import Model
    from vlens_cli.query import EngineSpec, Interventions

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
LITERAL = "vlens_cli.literal"


class Whole(click.IntRange):
    """A range of integers; Click calls its values "a valid integer range"."""

    name = "integer"


class Number(click.FloatRange):
    """The same of other numbers."""

    name = "number"


class PromptCommand(click.Command):
    """A command that remembers how many of its arguments stood after `--`; those are text, whatever they look like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[LITERAL] = len(args) - args.index("--") - 1 if "--" in args else 0
        return super().parse_args(ctx, args)


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, listed by `--help` in the order given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# Eager, so that completion knows the model wherever it stands on the line.
model = click.option(
    "-m", "--model", metavar="MODEL", is_eager=True, shell_complete=complete.model,
    help="A folder or a hub name. Default: VLENS_MODEL, then the config file, then the demo model.",
)  # fmt: skip

# Of `engine stop` and `engine log`: without it, all engines.
running = click.option("-m", "--model", metavar="MODEL", shell_complete=complete.engine, help="Of this model. Default: any.")

output_format = together(
    click.option("--json", "as_json", is_flag=True, help="Print JSON (the default when the output is not a terminal)."),
    click.option("--table", "as_table", is_flag=True, help="Print tables (the default on a terminal)."),
)

prompts = together(
    click.argument("prompts", nargs=-1, metavar="[PROMPT]..."),
    click.option("-f", "--file", "files", multiple=True, metavar="FILE", shell_complete=complete.file,
                 help="Prompts from a file, one a line or as JSON lines (a string, or an object with prompt, text or "
                 "tokens); - reads standard input."),
    click.option("--tokens", multiple=True, metavar="IDS", help="A prompt as token ids: 1,2,3."),
    click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template."),
    click.option("--system", metavar="TEXT", help="The system message, with --chat."),
    click.option("--bos/--no-bos", default=None, help="Add or leave out the BOS token. Default: the tokenizer's rule."),
)  # fmt: skip

selectors = together(
    click.option("--pos", metavar="ITEMS",
                 help='Positions, for hooks without [pos=...]: -1, 3:6, "Eiffel" (the tokens that cover it).'),
    click.option("--head", metavar="ITEMS", help="Heads, for hooks without [head=...]: 3, 0:4."),
    click.option("--dim", metavar="ITEMS", help="Indices of the last axis, for hooks without [dim=...]: 10, 0:8."),
)  # fmt: skip

interventions = together(
    click.option("-i", "--intervene", "expressions", multiple=True, metavar="EXPR", shell_complete=complete.edit,
                 help="Change the forward, repeatable, in order: 'blocks.5.hook_mlp_out = 0', 'blocks.8.hook_resid_post"
                 "[pos=3] = @source', 'blocks.10.hook_resid_post += 4 * steer.safetensors:happy'."),
    click.option("--spec", "specs", multiple=True, metavar="FILE", shell_complete=complete.file,
                 help="Interventions from a JSON file, after those of -i: a list of objects (hook, op, value, factor, "
                 "pos)."),
    click.option("--source", "sources", multiple=True, metavar="TEXT",
                 help="The prompt that @source values come from: one for all prompts, or one for each."),
    click.option("--source-tokens", multiple=True, metavar="IDS", help="The same as token ids."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of noise(STD): STD is the standard "
                 "deviation, in the units of the value."),
    click.option("--allow-nan", is_flag=True, help="Take values that are not finite."),
)  # fmt: skip


def interventions_of(asked: Any, source_is_read: bool = True) -> Interventions:
    """What the options of `interventions` ask; `asked` has them by name, and `chat` and `system`.

    Raises UsageError, HookError, PathError or PromptError; where only @source reads a source (`source_is_read`), also
    for one that nothing reads.
    """
    if not (asked.expressions or asked.specs or asked.sources or asked.source_tokens):
        from vlens_cli.query import Interventions

        return Interventions()
    from vlens_cli.cli import edits  # not loaded for a command without

    return edits.collect(asked, source_is_read)


def check_interventions(asked: Interventions, catalog: Any) -> None:
    """Raises UsageError or HookError for what this model does not take, before an engine is waited for."""
    if asked.expressions:
        from vlens_cli.cli import edits

        edits.check(asked, catalog)


def spec(model: Model, typed: Mapping[str, Any]) -> EngineSpec:
    """The engine that the options of `model` and `engine_spec` name; `typed` has them by name. Raises UsageError."""
    from vlens_cli.query import EngineSpec

    return EngineSpec(model=str(model.folder), name=model.name, revision=model.revision,
                      dtype=None if typed["dtype"] == "auto" else typed["dtype"], max_len=typed["max_len"],
                      chunk=typed["chunk"], tp=typed["tp"], pp=typed["pp"], executor=typed["executor"], **_compiled(typed))


def _compiled(typed: Mapping[str, Any]) -> dict[str, Any]:
    patterns = typed["compile_hooks"]
    if not (typed["compiled"] or patterns):
        if typed["compile_buffer"] is not None:
            raise UsageError("--compile-buffer is for compiled engines", hint="add --compile, or leave it out")
        return {}
    asked = [part for pattern in patterns for part in pattern.split()]
    return {"compile_hooks": tuple(asked) or COMPILE_HOOKS, "compile_buffer": typed["compile_buffer"]}


def asking(keep_alive: str | None, timeout: float | None, no_daemon: bool) -> Asking:
    """The options of `engine` that travel with a query. Raises UsageError for what is no duration."""
    from vlens_cli import env
    from vlens_cli.daemon.client import Asking

    stay = env.seconds(keep_alive if keep_alive is not None else env.keep_alive_text())
    env.sleep_after()  # what it says is the engine's to obey, and the asker's to be told of
    if no_daemon and timeout is not None:
        raise UsageError("--timeout is for the resident engine, and --no-daemon does without",
                         hint="`timeout 60 vlens ...` ends any command")
    return Asking(daemon=not no_daemon, keep_alive=stay, timeout=timeout)


engine_spec = together(
    click.option("--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), default="auto",
                 help="What the model runs in. Default: the checkpoint's own."),
    click.option("--max-len", type=Whole(min=1), metavar="N", help="Longest prompt in tokens. Default: the "
                 "model's own."),
    click.option("--chunk", type=Whole(min=1), metavar="N", help="Most tokens that one forward takes."),
    click.option("--compile", "compiled", is_flag=True, help="Keep compilation and CUDA graphs on, with hook points built "
                 "in: fast generation, fewer points, a slower start."),
    click.option("--compile-hooks", multiple=True, metavar="PATTERNS", shell_complete=complete.hook,
                 help="Which points --compile builds in, repeatable. "
                 "Default: hook_embed, resid_post, attn_out and mlp_out of every block, ln_final.hook_out."),
    click.option("--compile-buffer", type=Whole(min=1), metavar="MIB", help="Device memory for what --compile "
                 "captures in one step and for edits. Default: 256."),
    click.option("--tp", type=Whole(min=1), default=1, metavar="N", help="Spread each layer over N ranks: GPUs, or "
                 "processes on a CPU."),
    click.option("--pp", type=Whole(min=1), default=1, metavar="N", help="Spread the layers over N stages of such "
                 "ranks."),
    click.option("--executor", type=click.Choice(["mp", "ray"]), help="What runs the ranks: processes of this machine, or "
                 "Ray, on several. Default: mp."),
)  # fmt: skip

residency = together(
    click.option("--keep-alive", metavar="TIME", shell_complete=complete.words(*complete.KEEP_ALIVE),
                 help="How long the engine stays after this query: 90s, 15m, 2h, 0, "
                 "forever. Default: VLENS_KEEP_ALIVE, then 15m."),
    click.option("--timeout", type=Number(min=0, min_open=True), metavar="SECONDS",
                 help="Give up waiting for the resident engine. Default: never."),
    click.option("--no-daemon", is_flag=True, help="Start an engine in this process, and end it with the query."),
)  # fmt: skip

engine = together(
    engine_spec,
    click.option("--one-chunk", is_flag=True, help="Refuse a prompt that needs more than one forward."),
    residency,
)  # fmt: skip

saving = together(
    click.option("-o", "--output", metavar="FILE", shell_complete=complete.file, help="Write the tensors to FILE.safetensors."),
    click.option("--dtype-out", "--save-dtype", "save_dtype", type=click.Choice(["float32", "float16", "bfloat16"]),
                 help="Cast what -o writes. Default: the engine's own dtype."),
)  # fmt: skip

pictures = together(
    click.option("--svg", metavar="FILE", shell_complete=complete.file, help="Draw it into FILE.svg."),
    click.option("--html", metavar="FILE", shell_complete=complete.file,
                 help="Draw it into FILE.html, a page that needs no network and says what the mouse is on."),
)  # fmt: skip

class Size(click.ParamType):
    """A number of bytes: 500MB, 1GB, 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from vlens_cli import units

        size = value if isinstance(value, int) else units.size_of(value)
        if size is None:
            self.fail(f"{value} is no size; 500MB, 1GB and 2GiB are", param, ctx)
        return size


# What `capture` takes for large work.
large = together(
    click.option("--prompts-from-dataset", "dataset", metavar="FILE", help="Prompts from a Parquet file."),
    click.option("--column", metavar="NAME", help="Its column with the prompts. Default: text, prompt or tokens."),
    click.option("--reduce", type=click.Choice(["mean", "last", "max", "norm"]),
                 help="One row a prompt instead of one a position: over the positions, entry by entry."),
    click.option("--max-bytes", type=Size(), metavar="SIZE", help="Refuse to write more than this: 500MB, 20GB."),
    click.option("--shard-size", type=Size(), metavar="SIZE", help="About the size of each file of -o FOLDER/. Default: "
                 "1GB."),
    click.option("--resume", is_flag=True, help="Go on with what -o FOLDER/ holds: its prompts are not run again."),
    click.option("--skip-bad", is_flag=True, help="Leave out lines that are no prompts, and say which."),
)  # fmt: skip
