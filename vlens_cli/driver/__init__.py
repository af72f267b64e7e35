"""Runs in the process that holds the engine, and in vLLM's workers: the only folder that may import torch and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
