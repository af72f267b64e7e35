"""TransformerLens' `RemoteBridge` over a driver of ours; imported only where TransformerLens (4.3) is installed."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import RemoteBridge

# 4.3 builds a bridge's config and tokenizer for its own sources with these, and has no public way.
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf, configure_tokenizer
from transformers import AutoConfig

from vlens_cli.driver.base import ForwardResult
from vlens_cli.driver.resident import ResidentDriver
from vlens_cli.driver.vllm_driver import VLLMDriver
from vlens_cli.errors import PromptError
from vlens_cli.families import Catalog


class BridgeDriver:
    """A driver of ours as TransformerLens' `Driver` protocol has it: sets of names, aliases among them, and its config."""

    _supported_features = frozenset({"weight_access"})

    def __init__(self, driver: VLLMDriver | ResidentDriver, bridge_config: Any, tokenizer: Any) -> None:
        self._driver = driver
        self.bridge_config = bridge_config
        self.tokenizer = tokenizer
        self.architecture = driver.architecture
        self.provides_sequence_logits: bool = driver.provides_sequence_logits
        catalog = driver.catalog
        self.supported_hook_points = frozenset(
            each for name in driver.supported_hook_points for each in (name, *catalog.aliases(name)))
        self.non_fireable_hook_points = _refused(catalog, driver) - self.supported_hook_points

    def forward(self, input_ids: Any = None, *, capture: Any = (), intervene: Any = None, max_new_tokens: int = 1,
                return_logits: bool = True, attention_mask: Any = None, feed_last: bool = False,
                output_attentions: bool = False) -> ForwardResult:
        """`VLLMDriver.forward`. TransformerLens asks `output_attentions` of every driver; patterns are hook points here."""
        return self._driver.forward(
            input_ids, capture=capture, intervene=intervene, max_new_tokens=max_new_tokens, return_logits=return_logits,
            attention_mask=attention_mask, feed_last=feed_last)

    def get_param(self, name: str) -> torch.Tensor:
        return self._driver.get_param(name)

    def probe_logit_reconstruction(self) -> bool:
        return self._driver.probe_logit_reconstruction()

    def supports(self, feature: str) -> bool:
        return feature in self._supported_features

    def close(self) -> None:
        self._driver.close()


def _refused(catalog: Catalog, driver: VLLMDriver | ResidentDriver) -> frozenset[str]:
    """Every name, in each layer, that TransformerLens has and this engine does not give."""
    named = {name.replace("{i}", str(i)) for name in catalog.refused for i in range(catalog.n_layers)}
    proved = {each for name in driver.non_fireable_hook_points for each in (name, *_aliases(catalog, name))}
    return frozenset(named | proved)


def _aliases(catalog: Catalog, name: str) -> tuple[str, ...]:
    return catalog.aliases(name) if name in catalog.points else ()


def over(driver: VLLMDriver | ResidentDriver) -> RemoteBridge:
    """The bridge over a driver, which it closes."""
    config = AutoConfig.from_pretrained(driver.spec.model)
    bridge_config = build_bridge_config_from_hf(config, driver.architecture, driver.spec.name,
                                                getattr(torch, driver.plan.dtype))
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    try:
        tokenizer = configure_tokenizer(driver.tokenizer, adapter.cfg)
    except PromptError:  # a folder without one answers token ids
        tokenizer = None
    return RemoteBridge(adapter, tokenizer, BridgeDriver(driver, bridge_config, tokenizer))
