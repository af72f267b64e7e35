"""What a TAB offers: names that can be read at once. Nothing is downloaded, no weights are read, no engine is started.

Each function is Click's `shell_complete`: of a parameter, from what stands before the cursor. What cannot be read offers
nothing: an error message would tear the line that is being typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

# More than this are not looked through: they are offered up to the next dot.
MOST = 100
# Until a running engine has said what it refuses; a busy one answers as fast.
ENGINE_PATIENCE = 0.05
LAYERS = re.compile(r"-?\d+|\*|\{[^{}]*\}?|\d+-\d*")
KEEP_ALIVE = ("15m", "2h", "forever", "0")
SWEEPS = ("layer", "pos", "head", "layer,pos", "layer,head", "pos,head")


def hook(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Hook names of the model that is named, without those that a running engine of it has refused."""
    return offered(_hooks(ctx, editable=False), incomplete)


def edit(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The hook that an expression begins with: those that can be changed."""
    return [] if " " in incomplete else offered(_hooks(ctx, editable=True), incomplete)


def weight(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of weights, from the index or the headers of the checkpoint."""
    from vlens_cli import models, params
    from vlens_cli.errors import VlensError
    from vlens_cli.models.folder import load

    try:
        folder = models.at_hand(ctx.params.get("model"))
        weights = params.of_folder(folder, load(folder, "", None).config) if folder else None
    except (OSError, ValueError, AttributeError, VlensError):
        return []
    return offered(weights.names if weights else (), incomplete)


def model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Models that need no network, those of running engines, and folders, which the shell completes itself."""
    from click.shell_completion import CompletionItem

    from vlens_cli.models import hub

    found = dict.fromkeys([*hub.cached_models(), *_running()])
    return [*(CompletionItem(name) for name in found if name.startswith(incomplete)), CompletionItem(incomplete, type="dir")]


def engine(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Models whose engines run."""
    return [name for name in _running() if name.startswith(incomplete)]


def file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def lens(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from vlens_cli.lens import WORDS

    return [word for word in WORDS if word.startswith(incomplete)] or hook(ctx, param, incomplete)


def words(*choices: str) -> Any:
    """Of a parameter whose values are not checked by Click, since more than these are taken."""
    return lambda ctx, param, incomplete: [word for word in choices if word.startswith(incomplete)]


def offered(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that go on from `incomplete`; where they are many, up to their next dot. Layers may be a pattern
    (`blocks.*.`, `blocks.{0,5}.`): what follows is what any layer has."""
    found = list(dict.fromkeys(_patterned(name, incomplete) for name in names))
    found = [name for name in found if name.startswith(incomplete)]
    at = len(incomplete)
    while len(found) > MOST:
        cut = list(dict.fromkeys(name[: name.find(".", at) + 1] or name for name in found))
        if len(cut) > 1:
            return cut
        at = len(cut[0])
    return found


def _patterned(name: str, incomplete: str) -> str:
    """The name with the layers that `incomplete` has in its place, where those are more than one number."""
    parts, typed = name.split("."), _parts(incomplete)[:-1]
    for n, (part, own) in enumerate(zip(parts, typed, strict=False)):
        if part.isdigit() and not own.isdigit() and LAYERS.fullmatch(own):
            parts[n] = own
    return ".".join(parts)


def _parts(incomplete: str) -> list[str]:
    return incomplete.split(".")


def _hooks(ctx: click.Context, editable: bool) -> list[str]:
    from vlens_cli import models
    from vlens_cli.errors import VlensError
    from vlens_cli.families import catalog_for

    try:
        folder = models.at_hand(ctx.params.get("model"))
        if folder is None:
            return []
        catalog = catalog_for(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        refused = _refused(folder, editable)
    except (OSError, ValueError, AttributeError, VlensError):
        return []
    return [name for name in catalog.names if name not in refused and (catalog.editable(name) or not editable)]


def _refused(folder: Path, editable: bool) -> set[str]:
    """What every running engine of a model has found at load that it does not give, or not let be changed."""
    if not _homes():
        return set()
    from vlens_cli.daemon import launch

    proofs = launch.proofs(folder.resolve(), ENGINE_PATIENCE)
    said = [{*proof["refused"], *(proof["not_editable"] if editable else ())} for proof in proofs]
    return set.intersection(*said) if said else set()


def _running() -> list[str]:
    """What the models of the running engines can be named by."""
    from vlens_cli.models import DEMO, DEMO_NAME

    living = [status for home in _homes() if (status := home.alive())]
    return list(dict.fromkeys(DEMO if one.model.startswith(DEMO_NAME) else one.model for one in living))


def _homes() -> list[Any]:
    """The folders of engines; none where the runtime directory is no use."""
    from vlens_cli.daemon import runtime
    from vlens_cli.errors import VlensError

    try:
        return runtime.homes()
    except (OSError, VlensError):
        return []
