"""`vlens logits`: what the model says of the next token, at each position."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli import hooks, lens, models
from vlens_cli.cli import asking, complete, options, output, render
from vlens_cli.errors import PromptError, UsageError
from vlens_cli.units import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from vlens_cli.query import LogitsQuery

# Rows of an attribution's table; those of a large model's heads are thousands.
SHOWN_PARTS = 20
# From here on a token is drawn in the next colour: probabilities in the lens' table.
SHADES = ((0.9, "bold green"), (0.5, "green"), (0.1, "yellow"), (0.0, "dim"))


class LogitsCommand(options.PromptCommand):
    """`--lens` may stand alone: click would take the prompt behind it for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if not ctx.resilient_parsing:
            for arg, following in zip(args[:end], args[1:end], strict=False):
                if arg == "--lens":
                    _check_point(following)
        given = [f"--lens={lens.DEFAULT}" if arg == "--lens" and not _points_follow(args[n + 1 : end]) else arg
                 for n, arg in enumerate(args[:end])]
        return super().parse_args(ctx, given + args[end:])


def _points_follow(args: list[str]) -> bool:
    """Whether what stands behind `--lens` is meant for it: a word that it knows, or a hook."""
    return bool(args) and (hooks.looks_like_hook(args[0]) or all(word in lens.WORDS for word in _split(args[0])))


def _check_point(text: str) -> None:
    """Raises UsageError for a word behind `--lens` that is no point: a slip of the pen would be fed as a prompt."""
    if not text or text.startswith("-") or re.search(r"\s", text) or _points_follow([text]):
        return
    points = ",".join(next(iter(lens.near(word)), word) for word in _split(text))
    meant = f"did you mean --lens={points}? " if points != text else ""
    raise UsageError(f"this word after --lens is no point of it: {text}", code="no_lens",
                     hint=f"{meant}--lens takes {', '.join(lens.WORDS)}, or hook points; a prompt of one word stands "
                     "before it")


class Typed(NamedTuple):
    """The command line of `vlens logits`, by the names that options.py gives."""

    prompts: tuple[str, ...]
    files: tuple[str, ...]
    tokens: tuple[str, ...]
    chat: bool
    system: str | None
    bos: bool | None
    pos: str | None
    top: int
    targets: tuple[str, ...]
    target_prefix: bool
    diff: tuple[str, str] | None
    loss: bool
    lens: tuple[str, ...]
    attribution: bool
    every: bool
    values: bool
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


@click.command("logits", cls=LogitsCommand)
@options.prompts
@click.option("--pos", metavar="ITEMS", help='Positions: -1, 3:6, "Eiffel" (the tokens that cover it). Default: all.')
@click.option("--top", type=options.Whole(min=0), default=5, show_default=True, metavar="K",
              help="How many of the likeliest tokens to show.")
@click.option("--target", "targets", multiple=True, metavar="TEXT", help="A token whose logit and rank (0 is the "
              'likeliest) are shown, repeatable. A leading space is part of it: " Paris".')
@click.option("--target-prefix", is_flag=True, help="Of a text that is more than one token, take the first.")
@click.option("--diff", nargs=2, metavar="A B", help="The logit of A minus the logit of B.")
@click.option("--loss", is_flag=True, help="How badly the prompt is predicted: nats a token, mean, perplexity.")
@click.option("--lens", multiple=True, metavar="[POINTS]", shell_complete=complete.lens, help="Each layer's rows through the final norm and the "
              f"unembedding: {', '.join(lens.WORDS)}, or hook points. Default: {lens.DEFAULT}. "
              "--lens=POINTS cannot be taken for a prompt.")
@click.option("--attribution", is_flag=True, help="What the embedding, every sublayer and every head add to the logit of "
              "the targets, or to the difference, with the final norm's scale as it is.")
@click.option("--all", "every", is_flag=True, help=f"A row for each part of --attribution in the table, not for the {SHOWN_PARTS} "
              "largest.")
@click.option("--values", is_flag=True, help="Print every logit.")
@options.pictures
@options.interventions
@options.output_format
@options.saving
@options.model
@options.engine
def command(**typed: Any) -> None:
    """What the model says of the next token, at each position of each PROMPT.

    \b
    vlens logits --pos -1 --target " Paris" "The Eiffel Tower is in the city of"
    vlens logits --lens --pos -1 "The Eiffel Tower is in the city of"
    vlens logits --loss -f texts.txt

    Prompts are arguments, lines of files (-f), token ids (--tokens), or standard input (-).
    """
    asked = Typed(**typed)
    as_json = output.wants_json(asked.as_json, asked.as_table)
    _check(asked)
    query = _query(asked)
    pictures = asking.pictures_of(asked.svg, asked.html)
    target = asking.file_of(asked.output, asked.save_dtype)
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    model = models.resolve(asked.model)
    spec = options.spec(model, asked._asdict())
    reply = asking.ask(spec, query, target, how, partial(_check_model, query, model.config))
    asking.draw(reply, pictures)
    asking.show(reply, target, as_json, partial(table, every=asked.every))


def _check(asked: Typed) -> None:
    """What the command line says of itself. Raises UsageError and HookError."""
    if asked.pos is not None:
        hooks.parse_items(asked.pos, "pos")
    if (asked.svg or asked.html) and not asked.lens:
        raise UsageError(f"{'--svg' if asked.svg else '--html'} draws the lens, and --lens is not given", hint="add --lens")
    if asked.attribution and not (asked.targets or asked.diff):
        raise UsageError("--attribution explains a logit, and none is named",
                         hint='--target " Paris", or --diff " Paris" " Rome"')
    if asked.every and not asked.attribution:
        raise UsageError("--all is for the table of --attribution, and that is not given", hint="add --attribution")
    if asked.target_prefix and not (asked.targets or asked.diff):
        raise UsageError("--target-prefix is for --target and --diff, and neither is given")


def _query(asked: Typed) -> LogitsQuery:
    from vlens_cli.cli import prompts
    from vlens_cli.query import LogitsQuery

    if asked.diff and not (asked.prompts or asked.files or asked.tokens):
        raise PromptError(f"there is no prompt: --diff takes two tokens, and has taken {asked.diff[0]!r} and {asked.diff[1]!r}",
                          hint='--diff " Paris" " Rome" "The Eiffel Tower is in"', code="no_prompt")
    given = prompts.sources(asked.prompts, asked.files, asked.tokens)
    return LogitsQuery(
        prompts=prompts.collect(given, chat=asked.chat, system=asked.system, bos=asked.bos),
        pos=asked.pos,
        top=asked.top,
        targets=prompts.tokens(asked.targets),
        target_prefix=asked.target_prefix,
        diff=prompts.tokens(asked.diff or ()) or None,
        loss=asked.loss,
        lens=tuple(part for text in asked.lens for part in _split(text)),
        attribution=asked.attribution,
        values=asked.values,
        bos=asked.bos,
        save_dtype=asked.save_dtype,
        one_chunk=asked.one_chunk,
        interventions=options.interventions_of(asked),
    )


def _split(text: str) -> list[str]:
    """Words stand between commas; a hook pattern may hold commas itself."""
    return [text] if hooks.looks_like_hook(text) else [word.strip() for word in text.split(",")]


def _check_model(query: LogitsQuery, config: dict[str, Any]) -> None:
    """Refuse what this model does not have, where the engine, which does it too, would be waited for."""
    from vlens_cli import families

    catalog = families.catalog_for(config)
    lens.points(query.lens, catalog)
    options.check_interventions(query.interventions, catalog)


# The reply as tables


def table(body: dict[str, Any], every: bool = False) -> str:
    """The reply of `vlens logits`: for each prompt a table with a row a position, then what else was asked; `every` part of
    an attribution, or the largest."""
    model = body["model"]
    parts: list[Any] = [render.line(render.visible(f"{model['name']} ({model['family']}, {model['dtype']})"))]
    for place, prompt in enumerate(body["prompts"]):
        parts += [render.line(), render.line(render.heading(prompt, place, len(body["prompts"])), "bold")]
        parts += [*(render.line(render.visible(text)) for text in render.fired(prompt)), render.line()]
        pieces = render.pieces_of(prompt)
        parts.append(_positions(prompt, pieces))
        parts += _values(prompt)
        if "loss" in prompt:
            parts += [render.line(), *_loss(prompt["loss"])]
        for title, of in _lens_tables(prompt):
            parts += [render.line(), render.line(f"lens: {title}", "bold"), _lens(prompt["lens"], pieces, of)]
        for one in prompt.get("attribution", []):
            parts += [render.line(), *_attribution(one, pieces, every)]
    return render.draw(*parts)


def _positions(prompt: dict[str, Any], pieces: dict[int, str]) -> Table:
    rows = prompt["positions"]
    named = [(f"{_text(t)} logit", f"{_text(t)} prob", f"{_text(t)} rank") for t in rows[0].get("targets", [])]
    diff = rows[0].get("diff")
    columns = [("pos", "right"), ("token", "left"), ("entropy", "right")]
    columns += [(title, "right") for titles in named for title in titles]
    columns += [(f"{_text(diff['a'])} - {_text(diff['b'])}", "right")] if diff else []
    columns += [("likeliest (token: probability, logit)", "fold")] if rows[0]["top"] else []
    return render.table(columns, [_position(row, pieces) for row in rows])


def _position(row: dict[str, Any], pieces: dict[int, str]) -> list[str]:
    cells = [str(row["pos"]), pieces.get(row["pos"], ""), render.number(row["entropy"])]
    for one in row.get("targets", []):
        rank = "" if one["rank"] is None else str(one["rank"])
        cells += [render.number(one["logit"]), render.number(one["prob"]), rank]
    if "diff" in row:
        cells.append(render.number(row["diff"]["logit"]))
    if row["top"]:
        cells.append(", ".join(f"{_text(t)}: {_share(t['prob'])}, {render.number(t['logit'])}" for t in row["top"]))
    return cells


def _text(token: dict[str, Any]) -> str:
    return f"#{token['id']}" if token["text"] is None else render.quoted(token["text"])


def _share(prob: float | str) -> str:
    return prob if isinstance(prob, str) else f"{prob:.3g}"


def _values(prompt: dict[str, Any]) -> list[Text]:
    return [render.line(text) for row in prompt["positions"] if "values" in row
            for text in render.wrapped(f"pos {row['pos']}:", row["values"])]


def _loss(loss: dict[str, Any]) -> list[Text]:
    """The mean, then the loss of each token that the prompt predicts (the first is predicted by nothing)."""
    shown = f"loss {render.number(loss['mean'])} nats a token, perplexity {render.number(loss['perplexity'])}"
    return [render.line(shown, "bold"), *map(render.line, render.wrapped("pos 0 on:", loss["per_token"]))]


Cell = Callable[[dict[str, Any]], tuple[dict[str, Any], str]]


def _lens_tables(prompt: dict[str, Any]) -> list[tuple[str, Cell]]:
    """(title, what a cell shows of a position: a token and a text) of each table: the likeliest token, then each target."""
    first = prompt.get("lens", [{"positions": []}])[0]["positions"]
    tables: list[tuple[str, Cell]] = []
    if first and first[0]["top"]:
        tables.append(("likeliest token, probability", lambda row: (row["top"][0], _text(row["top"][0]) + " ")))
    for n, one in enumerate(first[0].get("targets", []) if first else []):
        tables.append((f"{_text(one)}: rank, probability", lambda row, n=n: (row["targets"][n], f"{row['targets'][n]['rank']} ")))
    return tables


def _lens(lenses: list[dict[str, Any]], pieces: dict[int, str], of: Cell) -> Table:
    """A row a hook point, a column a position, coloured by probability."""
    from rich.text import Text

    columns = [("", "left"), *((f"{row['pos']} {pieces.get(row['pos'], '')}", "left") for row in lenses[0]["positions"])]
    rows: list[list[str | Text]] = []
    for one in lenses:
        shown = [of(row) for row in one["positions"]]
        rows.append([one["hook"], *(Text(text + _share(t["prob"]), style=_shade(t["prob"])) for t, text in shown)])
    return render.table(columns, rows)


def _shade(prob: float | str) -> str:
    return next((style for least, style in SHADES if isinstance(prob, float) and prob >= least), "red")


class Part(NamedTuple):
    """A row of an attribution's table: a part of the sum, or a head, which is a share of one."""

    name: str
    value: float | str
    share: bool = False


def _attribution(one: dict[str, Any], pieces: dict[int, str], every: bool) -> list[Any]:
    """What the parts add, the largest first; of many the largest alone, and the others together, so that it adds up."""
    names = [_text(t) for t in one.get("diff") or [one["target"]]]
    title = f"what makes the {one['of']} of {' - '.join(names)} at pos {one['pos']} {pieces.get(one['pos'], '')}"
    parts = _parts(one)
    n_shown = len(parts) if every else SHOWN_PARTS
    sum_note = "without the heads, which their attn_out holds" if any(part.share for part in parts) else ""
    rows = [("sum", one["sum"], sum_note), ("constant (biases)", one["constant"], ""),
            *((part.name, part.value, "share of its attn_out" if part.share else "") for part in parts[:n_shown]),
            *_left_out(parts[n_shown:])]  # fmt: skip
    table = render.table([("part", "left"), ("adds", "right"), ("", "left")],
                         [(name, render.number(value), note) for name, value, note in rows])
    return [render.line(f"{title}: {render.number(one['logit'])}", "bold"), table]


def _parts(one: dict[str, Any]) -> list[Part]:
    """The largest first; a head by the name under which it is read and changed."""
    found = [Part(part["hook"], part["value"]) for part in one["parts"]]
    found += [Part(f"{part['hook'].replace('hook_attn_out', 'attn.hook_z')}[head={h}]", value, share=True)
              for part in one["parts"] for h, value in enumerate(part.get("heads", []))]
    # What is not finite stands in the reply as a text; it must be seen.
    return sorted(found, key=lambda part: -math.inf if isinstance(part.value, str) else -abs(part.value))


def _left_out(parts: list[Part]) -> Iterator[tuple[str, float, str]]:
    """A row for those that have none."""
    summed = [part.value for part in parts if not part.share]
    heads = len(parts) - len(summed)
    what = [counted(n, word) for n, word in ((len(summed), "part"), (heads, "head")) if n]
    if parts:
        value = sum(value if isinstance(value, float | int) else math.nan for value in summed)
        note = f"{' and '.join(what)} more" + (", added without the heads" if heads and summed else "")
        yield "the others", value, f"{note}; --all shows each"
