"""Workers whose second tensor-parallel rank is not as the first takes it to be."""

from __future__ import annotations

from typing import Any

import torch
from vlens_cli.driver.ranks import Ranks
from vlens_cli.driver.worker import LensWorker


class OtherReplica(LensWorker):
    """One norm gives other values on rank 1."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._ranks.at == 1:
            norm = self.model_runner.get_model().model.layers[1].post_attention_layernorm
            norm.register_forward_hook(lambda module, args, out: (out[0] * 1.01, *out[1:]))


class MissingPart(LensWorker):
    """Rank 1 never reads the queries of one layer, which the others wait to join."""

    missing = "blocks.1.attn.hook_q"

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._ranks.at == 1:
            visit = self._taps._visit
            self._taps._visit = lambda body, point, *call: None if point.name == self.missing else visit(body, point, *call)


class MissingReplica(MissingPart):
    """The same of a point that each has whole."""

    missing = "blocks.2.hook_mlp_out"


class FailsAtSeven(LensWorker):
    """Rank 1 cannot read prompts of seven tokens."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._ranks.at == 1:
            read = self._taps._read

            def reading(point: Any, asking: Any, *call: Any) -> None:
                if any(segment.stop - segment.start == 7 for _, segment in asking):
                    raise LookupError("seven")
                read(point, asking, *call)

            self._taps._read = reading


class Reversed(LensWorker):
    """Parts are joined the wrong way round."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        joined = Ranks.joined
        Ranks.joined = lambda self, t, replicas=1, dim=1: torch.cat(joined(self, t, replicas, dim).chunk(self.tp, dim)[::-1], dim)
        super().load_model(*args, **kwargs)


class OtherShards(LensWorker):
    """Each rank has the heads that are the other's: every number is right, under the other head's name."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for layer in self.model_runner.get_model().model.layers:
            for module in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
                module.quant_method = UnquantizedSwapped(module.quant_method, self._ranks, module is layer.self_attn.o_proj)


class UnquantizedSwapped:
    """A linear layer's kernel with the other rank's weight; its name says, as those of vLLM do, that the weight is whole."""

    def __init__(self, method: Any, ranks: Ranks, rows: bool) -> None:
        self._method, self._ranks, self._rows = method, ranks, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not hasattr(self, "_weight"):
            eye = torch.eye(x.shape[1], dtype=x.dtype)
            self._weight = self._ranks.each(self._method.apply(layer, eye, None))[1 - self._ranks.at]
        return x @ self._weight
