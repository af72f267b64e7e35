"""What comes back, and the words that queries and replies share: without the queries, which a TAB, `--help` or a weight
that is read from its file need not wait for."""

from __future__ import annotations

from typing import Any, NamedTuple

SCHEMA_VERSION = 1
# What --compile builds in where nothing else is named: of these, those that a family has.
COMPILE_HOOKS = ("hook_embed", "blocks.*.hook_resid_post", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out",
                 "ln_final.hook_out")
REDUCTIONS = ("mean", "last", "max", "norm")
METRICS = ("logit_diff", "prob", "recovery")
SWEEP_AXES = ("layer", "pos", "head")
# The progress line after which a query fails, and no longer the start of its engine.
RUNNING = "running"
# Said to people, who may compare with TransformerLens' numbers; true of nearly every command, and no news to a script.
BOS_NOTE = "no BOS token is fed, as this tokenizer has it; TransformerLens would prepend one (--bos does)"


class Saved(NamedTuple):
    """What was written into the file that the asker opened, or into files of its folder."""

    tensors: int
    bytes: int


class Reply(NamedTuple):
    """One answer: `body` is the JSON that `--json` prints (schema_version, command, model, ...), `notes` are
    lines for stderr, `saved` says what went into the file."""

    body: dict[str, Any]
    notes: tuple[str, ...] = ()
    saved: Saved | None = None

    def as_json(self) -> dict[str, Any]:
        return {"body": self.body, "notes": self.notes, "saved": self.saved and self.saved._asdict()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Reply:
        saved = fields["saved"]
        return cls(fields["body"], tuple(fields["notes"]), saved and Saved(**saved))
