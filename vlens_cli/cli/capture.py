"""`vlens capture`: activations of prompts, at hook points."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli import hooks, models
from vlens_cli.cli import asking, complete, options, output, render
from vlens_cli.errors import UsageError

if TYPE_CHECKING:
    from vlens_cli.query import CaptureQuery, CollectQuery
    from vlens_cli.reply import Reply


class Typed(NamedTuple):
    """The command line of `vlens capture`, by the names that options.py gives."""

    hooks: tuple[str, ...]
    prompts: tuple[str, ...]
    files: tuple[str, ...]
    tokens: tuple[str, ...]
    chat: bool
    system: str | None
    bos: bool | None
    pos: str | None
    head: str | None
    dim: str | None
    values: bool
    as_map: bool
    svg: str | None
    html: str | None
    expressions: tuple[str, ...]
    specs: tuple[str, ...]
    sources: tuple[str, ...]
    source_tokens: tuple[str, ...]
    seed: int
    allow_nan: bool
    as_json: bool
    as_table: bool
    output: str | None
    save_dtype: str | None
    dataset: str | None
    column: str | None
    reduce: str | None
    max_bytes: int | None
    shard_size: int | None
    resume: bool
    skip_bad: bool
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


@click.command("capture", cls=options.PromptCommand)
@options.prompts
@click.option("--hook", "hooks", multiple=True, required=True, metavar="HOOK", shell_complete=complete.hook,
              help="A hook point or a pattern, repeatable; quote it: 'blocks.{0,5}.hook_resid_post[pos=-1]'.")
@options.selectors
@click.option("--values", is_flag=True, help="Print every value, not only the summary of each position.")
@click.option("--map", "as_map", is_flag=True, help="In place of tables, each hook's norms as a heat map, layer by token.")
@options.pictures
@options.interventions
@options.output_format
@options.saving
@options.large
@options.model
@options.engine
def command(**typed: Any) -> None:
    """Activations of each PROMPT at hook points.

    \b
    vlens capture --hook blocks.3.hook_resid_post "The Eiffel Tower is in"
    vlens capture --hook 'blocks.*.attn.hook_z' --pos -1 --head 3 -o z.safetensors "The Eiffel Tower is in"
    vlens capture --hook 'blocks.*.hook_resid_post' --map --html norms.html "The Eiffel Tower is in"
    vlens capture --hook 'blocks.*.hook_resid_post' -f prompts.jsonl -o activations/

    Prompts are arguments, lines of files (-f), token ids (--tokens), or standard input (-).
    """
    asked = Typed(**typed)
    as_json = output.wants_json(asked.as_json, asked.as_table)
    requests = _requests(asked)
    if output.names_folder(asked.output):
        from vlens_cli.cli import collect

        if asked.svg or asked.html or asked.as_map:
            raise UsageError("pictures are not drawn of what goes into a folder", hint="leave out --svg, --html and --map")
        collect.run(asked, partial(_check, requests), as_json)
        return
    for option in ("shard_size", "resume"):
        if getattr(asked, option):
            raise UsageError(f"--{option.replace('_', '-')} is for the files of a folder", hint="-o FOLDER/")
    skipped: list[str] = []
    query = _query(asked, skipped)
    pictures = asking.pictures_of(asked.svg, asked.html)
    target = asking.file_of(asked.output, asked.save_dtype)
    if target is None and asked.max_bytes is not None:
        raise UsageError("--max-bytes is for the file of -o, and -o is not given", hint="add -o FILE.safetensors")
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    for reason in skipped:
        output.say(f"note: left out, {render.visible(reason)}")
    model = models.resolve(asked.model)
    spec = options.spec(model, asked._asdict())
    reply = asking.ask(spec, query, target, how, partial(_check, requests, query, model.config))
    asking.draw(reply, pictures)
    asking.show(_without_values(reply, asked), target, as_json, _norms if asked.as_map else render.capture)


def _norms(body: dict[str, Any]) -> str:
    from vlens_cli.cli import effects

    return effects.norms(body)


def _draws_patterns(asked: Typed) -> bool:
    """Whether pictures of attention alone are asked: their cells are the values themselves, and not a norm."""
    names = [name.partition("[")[0].rpartition(".")[2] for name in asked.hooks]
    return bool(asked.svg or asked.html) and all(name in ("hook_pattern", "hook_attn_scores") for name in names)


def _without_values(reply: Reply, asked: Typed) -> Reply:
    """The reply without the values that the pictures alone were to have."""
    if not asked.values and _draws_patterns(asked):
        for row in (row for prompt in reply.body["prompts"] for hook in prompt["hooks"].values() for row in hook.get("rows", ())):
            row.pop("values", None)
    return reply


def _requests(asked: Typed) -> tuple[hooks.HookRequest, ...]:
    """What was asked for, as far as grammar goes."""
    for axis in ("pos", "head", "dim"):
        if (text := getattr(asked, axis)) is not None:
            hooks.parse_items(text, axis)
    return tuple(map(hooks.parse, asked.hooks))


def _query(asked: Typed, skipped: list[str]) -> CaptureQuery:
    from vlens_cli.cli import prompts
    from vlens_cli.query import CaptureQuery

    given = prompts.sources(asked.prompts, asked.files, asked.tokens, asked.dataset, asked.column)
    on_bad = (lambda where, error: skipped.append(error.message)) if asked.skip_bad else None
    return CaptureQuery(
        prompts=prompts.collect(given, chat=asked.chat, system=asked.system, bos=asked.bos, on_bad=on_bad),
        hooks=asked.hooks,
        pos=asked.pos,
        head=asked.head,
        dim=asked.dim,
        bos=asked.bos,
        values=asked.values or _draws_patterns(asked),
        save_dtype=asked.save_dtype,
        one_chunk=asked.one_chunk,
        interventions=options.interventions_of(asked),
        reduce=asked.reduce,
        max_bytes=asked.max_bytes,
    )


def _check(requests: tuple[hooks.HookRequest, ...], query: CaptureQuery | CollectQuery, config: dict[str, Any]) -> None:
    """Refuse what this model does not have, where the engine, which does it too, would be waited for."""
    from vlens_cli import families

    catalog = families.catalog_for(config)
    hooks.resolve(requests, catalog, query.pos, query.head, query.dim)
    options.check_interventions(query.interventions, catalog)
