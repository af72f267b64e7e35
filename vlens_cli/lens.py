"""The points that the lens reads: rows of the stream, or what a sublayer adds to it."""

from __future__ import annotations

from collections.abc import Iterable

from vlens_cli import hooks
from vlens_cli.errors import HookError, UsageError
from vlens_cli.families import Catalog

# The words of `--lens`, and the hook points that they stand for.
WORDS = {
    "embed": "hook_embed", "resid_pre": "blocks.*.hook_resid_pre", "resid_mid": "blocks.*.hook_resid_mid",
    "resid_post": "blocks.*.hook_resid_post", "attn_out": "blocks.*.hook_attn_out", "mlp_out": "blocks.*.hook_mlp_out",
}
DEFAULT = "resid_post"
_READ = {pattern.rpartition(".")[2] for pattern in WORDS.values()} | {"hook_pos_embed"}


def near(word: str) -> list[str]:
    """The words of `--lens` like one that is none of them, the nearest first."""
    from difflib import get_close_matches

    return get_close_matches(word, WORDS, cutoff=0.7)


def points(texts: Iterable[str], catalog: Catalog) -> tuple[str, ...]:
    """The hook points that words or hook patterns mean, in the order of the forward.

    Raises HookError for a point that is no row of the stream, UsageError for brackets.
    """
    found: set[str] = set()
    for text in texts:
        request = hooks.parse(WORDS.get(text, text))
        if request.pos or request.head or request.dim:
            raise UsageError(f"the lens takes whole rows, at the positions of --pos: {text}",
                             hint=f"--lens '{request.pattern}' --pos -1")
        names = hooks.expand(request, catalog)
        other = [name for name in names if name.rpartition(".")[2] not in _READ]
        if other:
            raise HookError(f"the lens reads the stream and what is added to it, not {other[0]}",
                            hint=f"--lens takes {', '.join(WORDS)}, or such hook points", code="no_lens")
        found.update(names)
    return tuple(name for name in catalog.names if name in found)
