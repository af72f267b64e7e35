"""Runs in the process that holds the engine, and in vLLM's workers: the only folder that may import torch and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_lens.model_bridge import RemoteBridge

    from vlens_cli.driver.resident import ResidentDriver
    from vlens_cli.driver.vllm_driver import VLLMDriver


def open_driver(model: str | None = None, **fields: object) -> VLLMDriver:
    """A driver of its own in this process, for scripts and notebooks: the same model names as the command line.

    `fields` are those of `EngineSpec` (dtype, max_len, chunk). What the engine prints meanwhile is dropped, unless
    VLENS_LOG is set. Raises what `models.resolve` raises, and StartError.
    """
    from vlens_cli import models
    from vlens_cli.driver.quiet import engine_output
    from vlens_cli.query import EngineSpec

    found = models.resolve(model)
    spec = EngineSpec(model=str(found.folder), name=found.name, revision=found.revision, **fields)
    with engine_output():
        from vlens_cli.driver.session import Session

        return Session(spec, found.config).driver(lambda text: None)


def _resident(model: str | None, **fields: object) -> ResidentDriver:
    from vlens_cli import models
    from vlens_cli.driver.resident import ResidentDriver
    from vlens_cli.query import EngineSpec

    found = models.resolve(model)
    return ResidentDriver(EngineSpec(model=str(found.folder), name=found.name, revision=found.revision, **fields), found)


def bridge(model: str | None = None, *, resident: bool = False, **fields: object) -> RemoteBridge:
    """TransformerLens' bridge over `open_driver(model, **fields)`: run_with_cache, run_with_hooks, loss, `intervene=`.

    `resident` asks the resident engine instead, which stays when the bridge is closed. Hook points have every name that
    vlens understands. Needs the extra `transformerlens`; raises StartError without.
    """
    from vlens_cli.errors import StartError

    try:
        import transformer_lens  # noqa: F401
    except ImportError as fault:
        raise StartError("TransformerLens is not installed", hint="pip install 'vlens_cli[transformerlens]'",
                         code="no_transformerlens") from fault
    driver = _resident(model, **fields) if resident else open_driver(model, **fields)
    try:
        from vlens_cli.driver.lens_bridge import over

        return over(driver)
    except BaseException:
        driver.close()
        raise
