"""`vlens patch`: prompts as they are against prompts patched, and sweeps over patches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli import hooks, models
from vlens_cli.cli import asking, complete, options, output
from vlens_cli.errors import UsageError
from vlens_cli.reply import METRICS, SWEEP_AXES

if TYPE_CHECKING:
    from vlens_cli.query import PatchQuery


class Typed(NamedTuple):
    """The command line of `vlens patch`, by the names that options.py gives."""

    prompts: tuple[str, ...]
    files: tuple[str, ...]
    tokens: tuple[str, ...]
    chat: bool
    system: str | None
    bos: bool | None
    expressions: tuple[str, ...]
    specs: tuple[str, ...]
    sources: tuple[str, ...]
    source_tokens: tuple[str, ...]
    seed: int
    allow_nan: bool
    targets: tuple[str, ...]
    target_prefix: bool
    metric: str | None
    top: int
    max_tokens: int
    sweep: str | None
    hooks: tuple[str, ...]
    output: str | None
    svg: str | None
    html: str | None
    as_json: bool
    as_table: bool
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
    one_chunk: bool
    keep_alive: str | None
    timeout: float | None
    no_daemon: bool


@click.command("patch", cls=options.PromptCommand)
@options.prompts
@options.interventions
@click.option("--target", "targets", multiple=True, metavar="TEXT",
              help="A token whose logit is compared, repeatable; the first two are subtracted. #123 is an id.")
@click.option("--target-prefix", is_flag=True, help="Take the first piece of a target that is several tokens.")
@click.option("--metric", type=click.Choice(METRICS), help="logit_diff: first target minus second; prob: of the first; "
              "recovery: 0 is the base, 1 the source. Default: logit_diff of two targets, prob of one.")
@click.option("--top", type=options.Whole(min=1), default=10, show_default=True, metavar="N",
              help="How many of the likeliest tokens to show.")
@click.option("--max-tokens", type=options.Whole(min=1), default=1, metavar="N",
              help="Tokens to generate, greedily and past the end-of-text token; both continuations are shown.")
@click.option("--sweep", metavar="AXES", shell_complete=complete.words(*complete.SWEEPS), help="A patch from the source at each of: layer, pos, head, or two of them, "
              "such as layer,pos.")
@click.option("--hook", "hooks", multiple=True, metavar="HOOK", shell_complete=complete.hook,
              help="The hook points of a sweep: 'blocks.*.hook_resid_post'.")
@click.option("-o", "--output", metavar="FILE", shell_complete=complete.file, help="Write each run's logits after the prompt, or a sweep's grid, to FILE.safetensors.")
@click.option("--svg", metavar="FILE", shell_complete=complete.file, help="Write a sweep's heat map to FILE.svg.")
@click.option("--html", metavar="FILE", shell_complete=complete.file, help="Write a sweep's heat map to FILE.html.")
@options.output_format
@options.model
@options.engine
def command(**typed: Any) -> None:
    """The effect of interventions on what comes after each PROMPT: base against patched.

    \b
    vlens patch -i 'blocks.8.hook_resid_post[pos=1] = @source' --source "Rome is in" "Paris is in"
    vlens patch -i 'blocks.10.hook_resid_post += 4 * steer.safetensors:happy' --max-tokens 20 "I feel"
    vlens patch --sweep layer,pos --hook 'blocks.*.hook_resid_post' --source "Rome is in" "Paris is in"

    With --sweep, the effect of patching one prompt from its --source, at each layer and position or head.
    """
    asked = Typed(**typed)
    as_json = output.wants_json(asked.as_json, asked.as_table)
    query = _query(asked)
    target = asking.file_of(asked.output, None)
    pictures = asking.pictures_of(asked.svg, asked.html)
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    model = models.resolve(asked.model)
    spec = options.spec(model, asked._asdict())
    reply = asking.ask(spec, query, target, how, partial(_check, query, model.config))
    asking.draw(reply, pictures)
    asking.show(reply, target, as_json, _table)


def _query(asked: Typed) -> PatchQuery:
    from vlens_cli.cli import prompts
    from vlens_cli.query import PatchQuery

    given = prompts.sources(asked.prompts, asked.files, asked.tokens)
    sweep = _axes(asked)
    return PatchQuery(
        prompts=prompts.collect(given, chat=asked.chat, system=asked.system, bos=asked.bos),
        interventions=options.interventions_of(asked, source_is_read=False),
        targets=prompts.tokens(asked.targets),
        target_prefix=asked.target_prefix,
        metric=asked.metric,
        top=asked.top,
        max_new_tokens=asked.max_tokens,
        sweep=sweep,
        hooks=asked.hooks,
        bos=asked.bos,
        one_chunk=asked.one_chunk,
    )


def _axes(asked: Typed) -> tuple[str, ...]:
    """The axes of `--sweep`; raises UsageError for options that belong to a sweep without one, or the other way."""
    if asked.sweep is None:
        alone = [name for name, given in (("--hook", asked.hooks), ("--svg", asked.svg),
                                          ("--html", asked.html)) if given]  # fmt: skip
        if alone:
            raise UsageError(f"{alone[0]} is for a sweep, and --sweep is not given", hint="add --sweep layer,pos")
        if not (asked.expressions or asked.specs):
            raise UsageError("nothing is patched: no intervention is given", code="no_intervention",
                             hint="-i 'blocks.8.hook_resid_post[pos=3] = @source', or --sweep layer,pos --hook ...")
        return ()
    axes = tuple(part.strip() for part in asked.sweep.split(","))
    if not set(axes) <= set(SWEEP_AXES) or len(set(axes)) < len(axes) or len(axes) > 2:
        raise UsageError(f"a sweep is over one or two of layer, pos, head: {asked.sweep}", code="sweep_axes",
                         hint="--sweep layer,pos")
    if not asked.hooks:
        raise UsageError("a sweep patches hook points, and none is given", hint="--hook 'blocks.*.hook_resid_post'")
    if not (asked.sources or asked.source_tokens):
        raise UsageError("a sweep patches from a source run, and none is given", code="no_source",
                         hint='add --source "The Colosseum is in"')
    for text in asked.hooks:
        hooks.parse(text)
    return axes


def _check(query: PatchQuery, config: dict[str, Any]) -> None:
    """Refuse what this model does not have, where the engine, which does it too, would be waited for."""
    from vlens_cli import families, interventions

    catalog = families.catalog_for(config)
    options.check_interventions(query.interventions, catalog)
    for hook in hooks.resolve(map(hooks.parse, query.hooks), catalog):
        interventions.check_editable(catalog, hook.name)


def _table(body: dict[str, Any]) -> str:
    from vlens_cli.cli import effects

    return effects.patch(body)
