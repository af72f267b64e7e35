"""One engine at a time in the test process, kept for as long as the tests ask for the same one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vlens_cli.driver import boot
from vlens_cli.driver.base import Request, Want
from vlens_cli.driver.graph.driver import driver_for
from vlens_cli.driver.vllm_driver import VLLMDriver
from vlens_cli.families import catalog_for
from vlens_cli.query import EngineSpec


class Engines:
    """Opens drivers; opening another closes the one before."""

    def __init__(self) -> None:
        self._spec: EngineSpec | None = None
        self._driver: VLLMDriver | None = None

    def open(self, folder: Path, **fields: object) -> VLLMDriver:
        spec = EngineSpec(model=os.path.realpath(folder), name=Path(folder).name, **fields)
        if spec != self._spec:
            self.close()
            config = json.loads((Path(folder) / "config.json").read_text())
            catalog = catalog_for(config)
            self._driver = driver_for(spec, boot.plan(spec, config, catalog), catalog)
            self._spec = spec
        return self._driver

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver = self._spec = None


def capture(driver: VLLMDriver, prompts: list[list[int]], names=None, **want: object) -> list[dict[str, object]]:
    """name -> tensor for each prompt, all points where none are named."""
    names = driver.supported_hook_points if names is None else names
    results = driver.run([Request(tuple(p), {name: Want(**want) for name in names}) for p in prompts])
    return [{name: got.value for name, got in result.captured.items()} for result in results]
