"""What is asked: frozen, plain, free of torch. What comes back, and the words that both share, are in reply.py.

`EngineSpec` holds what forces a reload; a query holds everything else. Both cross a process boundary as JSON
(`as_json`/`from_json`), never pickled. A `Reply` is a JSON-able body; tensors go straight into the file that the
asker opened, as safetensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from vlens_cli.reply import (  # noqa: F401
    BOS_NOTE, COMPILE_HOOKS, METRICS, REDUCTIONS, RUNNING, SCHEMA_VERSION, SWEEP_AXES, Reply, Saved,
)
from vlens_cli.units import counted


class EngineSpec(NamedTuple):
    """What an engine is started with; any difference is another engine.

    `model` is the resolved folder (absolute, no symbolic links), `name` what the user calls it.
    `dtype` None means the checkpoint's own. `max_len` None means the model's own, as far as the KV bytes hold it.
    `chunk` is the most tokens one forward takes, None for the default.
    `compile_hooks` are the patterns of the hook points that are built into compiled graphs, None for an eager engine;
    `compile_buffer` is the device memory, in MiB, that their captured rows and their edits get, None for the default.
    `tp` ranks share each layer, `pp` stages have a part of the layers each; `executor` runs them: mp (processes of this
    machine), ray (of several), None for what their number asks.
    """

    model: str
    name: str
    revision: str | None = None
    dtype: str | None = None
    max_len: int | None = None
    chunk: int | None = None
    compile_hooks: tuple[str, ...] | None = None
    compile_buffer: int | None = None
    tp: int = 1
    pp: int = 1
    executor: str | None = None

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> EngineSpec:
        built = fields.get("compile_hooks")
        return cls(**{**fields, "compile_hooks": None if built is None else _texts(built)})


class Prompt(NamedTuple):
    """One prompt: either `text` or token ids. `chat` runs the text through the model's chat template,
    `system` is its system message. `id` is what a file calls it."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: bool = False
    system: str | None = None
    id: str | int | None = None


class Interventions(NamedTuple):
    """What `-i` and `--spec` change in the run of every prompt.

    expressions  as `interventions.parse` reads them; paths are absolute, since the engine works in another folder
    sources      the prompt of the source run: one for all prompts, or one for each
    seed         of noise
    allow_nan    take values that are not finite
    """

    expressions: tuple[str, ...] = ()
    sources: tuple[Prompt, ...] = ()
    seed: int = 0
    allow_nan: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Interventions:
        return cls(**{**fields, "expressions": _texts(fields["expressions"]),
                      "sources": tuple(map(_prompt, fields["sources"]))})


class Query(Protocol):
    """One question. `verb` names it on the wire, and the module of `driver/` that answers it."""

    verb: str

    def summary(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...
    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Query: ...


class CaptureQuery(NamedTuple):
    """`vlens capture`.

    hooks       hook patterns as typed, with their selectors
    pos         default position selector (the text inside `[pos=...]`) for hooks that carry none; None: all
    head, dim   the same for heads and for the last axis
    bos         True/False adds or leaves out the BOS token; None follows the tokenizer's own rule
    values      put every value into the reply's body
    save_dtype  cast what is written to a file (None: the engine's own dtype)
    one_chunk   refuse a prompt that needs more than one forward
    interventions  changes of the forward that is captured from
    reduce      one row a prompt instead of one a position: their mean, last, max or norm
    max_bytes   refuse a larger file
    """

    verb = "capture"

    prompts: tuple[Prompt, ...]
    hooks: tuple[str, ...]
    pos: str | None = None
    head: str | None = None
    dim: str | None = None
    bos: bool | None = None
    values: bool = False
    save_dtype: str | None = None
    one_chunk: bool = False
    interventions: Interventions = Interventions()
    reduce: str | None = None
    max_bytes: int | None = None

    def summary(self) -> str:
        """What this asks, in a few words, for who waits behind it."""
        return f"{counted(len(self.hooks), 'hook')} in {counted(len(self.prompts), 'prompt')}"

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CaptureQuery:
        _check_reduction(fields["reduce"])
        return cls(**{**fields, "prompts": tuple(map(_prompt, fields["prompts"])), "hooks": _texts(fields["hooks"]),
                      "interventions": Interventions.from_json(fields["interventions"])})


def _check_reduction(reduce: Any) -> None:
    if reduce not in (None, *REDUCTIONS):
        raise TypeError("no such reduction")


class CollectQuery(NamedTuple):
    """`vlens capture -o FOLDER/`: any number of prompts, which come through the open file: JSON lines with `text` or
    `tokens`, perhaps an `id`, and `where`, which names the line in an error.

    count        lines of the file
    folder       where the shards go, an absolute path; `token` is part of the names of what is not whole yet
    shard_bytes  about the size of a shard
    resume       go on with what the folder holds
    skip_bad     leave prompts out that cannot be fed, instead of refusing them all
    chat, system, bos and the rest as in Prompt and CaptureQuery
    """

    verb = "collect"

    count: int
    folder: str
    token: str
    hooks: tuple[str, ...]
    pos: str | None = None
    head: str | None = None
    dim: str | None = None
    chat: bool = False
    system: str | None = None
    bos: bool | None = None
    save_dtype: str | None = None
    one_chunk: bool = False
    interventions: Interventions = Interventions()
    reduce: str | None = None
    shard_bytes: int = 10**9
    max_bytes: int | None = None
    resume: bool = False
    skip_bad: bool = False

    def summary(self) -> str:
        """What this asks, in a few words, for who waits behind it."""
        return f"{counted(len(self.hooks), 'hook')} in {counted(self.count, 'prompt')}"

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CollectQuery:
        _check_reduction(fields["reduce"])
        # It is part of a file's name.
        if not fields["token"].isalnum() or not fields["folder"].startswith("/") or fields["shard_bytes"] < 1:
            raise TypeError("a token of letters and digits, an absolute path and a size are needed")
        return cls(**{**fields, "hooks": _texts(fields["hooks"]),
                      "interventions": Interventions.from_json(fields["interventions"])})


class PatchQuery(NamedTuple):
    """`vlens patch`: each prompt as it is and with `interventions`, or, of one prompt, a sweep.

    targets         tokens whose logits are compared; `target_prefix` takes the first piece of one that has several
    metric          logit_diff, prob or recovery (driver/effect.py); None: by the number of targets
    top             likeliest tokens shown of each run
    max_new_tokens  tokens that each run generates, greedily
    sweep           one or two of layer, pos, head: a cell for each, in which `hooks` take the source's value;
                    `interventions` are then part of the base run and of every cell
    """

    verb = "patch"

    prompts: tuple[Prompt, ...]
    interventions: Interventions = Interventions()
    targets: tuple[str, ...] = ()
    target_prefix: bool = False
    metric: str | None = None
    top: int = 10
    max_new_tokens: int = 1
    sweep: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    bos: bool | None = None
    one_chunk: bool = False

    def summary(self) -> str:
        """What this asks, in a few words, for who waits behind it."""
        if self.sweep:
            return f"a sweep over {' and '.join(self.sweep)}"
        return f"{counted(len(self.interventions.expressions), 'intervention')} in {counted(len(self.prompts), 'prompt')}"

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> PatchQuery:
        if any(type(fields[name]) is not int or fields[name] < 1 for name in ("top", "max_new_tokens")):
            raise TypeError("top and max_new_tokens are counts")
        if fields["metric"] not in (None, *METRICS) or not set(fields["sweep"]) <= set(SWEEP_AXES):
            raise TypeError("no such metric or axis")
        return cls(**{**fields, "prompts": tuple(map(_prompt, fields["prompts"])),
                      "interventions": Interventions.from_json(fields["interventions"]),
                      **{name: _texts(fields[name]) for name in ("targets", "sweep", "hooks")}})


def _prompt(fields: dict[str, Any]) -> Prompt:
    """A prompt that crossed the wire. Raises TypeError, KeyError or AttributeError for another shape."""
    text, tokens = fields["text"], fields["tokens"]
    if not (isinstance(text, str) if tokens is None else text is None and all(type(t) is int for t in tokens)):
        raise TypeError("a prompt has either text or token ids")
    return Prompt(**{**fields, "tokens": None if tokens is None else tuple(tokens)})


def _plain(value: Any) -> Any:
    """What JSON has of a named tuple, and of those within it."""
    if hasattr(value, "_asdict"):
        return {name: _plain(own) for name, own in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _texts(items: Any) -> tuple[str, ...]:
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise TypeError("names and expressions are a list of texts")
    return tuple(items)


class LogitsQuery(NamedTuple):
    """`vlens logits`.

    pos            position selector (the text inside `[pos=...]`); None: all
    top            how many of the likeliest tokens
    targets        token texts whose logit and rank are asked; `target_prefix` takes the first piece of a longer one
    diff           two token texts whose logits' difference is asked
    loss           the negative log-likelihood of each next token of the prompt
    lens           hook patterns whose rows go through the final norm and the unembedding
    attribution    what every part of the stream adds to the targets' logits, or to the difference
    values         put every logit into the reply's body
    bos, save_dtype, one_chunk, interventions  as in CaptureQuery
    """

    verb = "logits"

    prompts: tuple[Prompt, ...]
    pos: str | None = None
    top: int = 5
    targets: tuple[str, ...] = ()
    target_prefix: bool = False
    diff: tuple[str, str] | None = None
    loss: bool = False
    lens: tuple[str, ...] = ()
    attribution: bool = False
    values: bool = False
    bos: bool | None = None
    save_dtype: str | None = None
    one_chunk: bool = False
    interventions: Interventions = Interventions()

    def summary(self) -> str:
        return counted(len(self.prompts), "prompt")

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LogitsQuery:
        if type(fields["top"]) is not int or fields["top"] < 0:
            raise TypeError("top is a count")
        diff = fields["diff"] if fields["diff"] is None else _texts(fields["diff"])
        if diff is not None and len(diff) != 2:
            raise TypeError("diff is two texts")
        return cls(**{**fields, "prompts": tuple(map(_prompt, fields["prompts"])), "diff": diff,
                      "targets": _texts(fields["targets"]), "lens": _texts(fields["lens"]),
                      "interventions": Interventions.from_json(fields["interventions"])})


class ParamQuery(NamedTuple):
    """`vlens param`, where the engine is asked.

    names    weights as typed, with their selectors
    live     take every value from the engine, also what the checkpoint has
    values   put every value into the reply's body
    svd      how many singular values to give, or None
    compare  folder of a model whose checkpoint the weights are compared with, or None
    raw      quantized tensors as they are stored
    """

    verb = "param"

    names: tuple[str, ...]
    live: bool = False
    values: bool = False
    svd: int | None = None
    compare: str | None = None
    raw: bool = False

    def summary(self) -> str:
        """What this asks, in a few words, for who waits behind it."""
        return counted(len(self.names), "weight")

    def as_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ParamQuery:
        return cls(**{**fields, "names": _texts(fields["names"])})


class StartQuery(NamedTuple):
    """`vlens engine start`: nothing but an engine that is ready."""

    verb = "start"

    def summary(self) -> str:
        return "an engine"

    def as_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StartQuery:
        return cls()


class SleepQuery(NamedTuple):
    """`vlens engine sleep`: the engine's weights to the host's memory, until the next query."""

    verb = "sleep"

    def summary(self) -> str:
        return "the engine"

    def as_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SleepQuery:
        return cls()


QUERIES: dict[str, type[Query]] = {
    query.verb: query for query in (CaptureQuery, CollectQuery, PatchQuery, LogitsQuery, ParamQuery, StartQuery, SleepQuery)
}
