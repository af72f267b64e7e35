"""The only door to vLLM's private attributes. Each function says where it was seen to hold.

Everything else in this project uses vLLM's documented surface (`LLM`, `SamplingParams`, `worker_cls`,
`collective_rpc`) or what is behind these functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Segment(NamedTuple):
    """The rows of one request in one step: `start:stop` of every flat tensor; `first` is the absolute position
    of the first of them."""

    request: str
    start: int
    stop: int
    first: int


def step_segments(runner: Any) -> list[Segment]:
    """Which rows of the running step belong to which request. Called inside a forward.

    V1 runner, vLLM 0.26 and 0.32: `input_batch` and `query_start_loc` are final once the inputs are prepared,
    which is before any module runs.
    """
    batch = runner.input_batch
    requests = list(batch.req_ids)
    offsets = runner.query_start_loc.np[: len(requests) + 1].tolist()
    firsts = batch.num_computed_tokens_cpu[: len(requests)].tolist()
    return [Segment(r, offsets[n], offsets[n + 1], firsts[n]) for n, r in enumerate(requests)]


def request_extra(new_request: Any) -> dict[str, Any]:
    """What the caller attached to a request through `SamplingParams.extra_args` (vLLM 0.26 to 0.32)."""
    params = new_request.sampling_params
    return (params.extra_args or {}) if params is not None else {}


def norm_eps(norm: torch.nn.Module) -> float:
    """The eps of a norm layer: vLLM's RMSNorm (0.26 to 0.32) keeps it as `variance_epsilon`, torch's and vLLM's
    LayerNorm as `eps`."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def route(experts: torch.nn.Module, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [rows, k], indices [rows, k]) of the experts that the engine chooses for router logits [rows, expert].

    0.32: the runner of a mixture of experts has a `router`, which it asks at each forward; the hidden states count only
    where a model brings a routing function of its own.
    """
    return experts.router.select_experts(hidden_states=logits, router_logits=logits)


def norm_affine(norm: torch.nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    """A normalized stream after the norm's weight (1 + weight for `rms_plus_one`), and its bias where it has one."""
    weight = norm.weight.to(x.dtype)
    out = x * (1 + weight if kind == "rms_plus_one" else weight)
    bias = getattr(norm, "bias", None)
    return out if bias is None else out + bias.to(x.dtype)


def experts(runner: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the experts that router logits choose make of x [rows, d_model], shared experts left out (0.32)."""
    weights, indices = route(runner, logits)
    return runner.routed_experts.forward_modular(x=x, topk_weights=weights, topk_ids=indices, shared_experts=None,
                                                 shared_experts_input=None)


def linear(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear layer's product and bias on this rank, whether its weight is live or packed away (0.32, CPU)."""
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


class Head(NamedTuple):
    """What the engine unembeds with: `weight` [padded vocabulary, d_model] and `bias` of this rank, then
    softcap * tanh(x / softcap) where there is one, then * scale."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float


def unembedding(processor: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Head:
    """The head that a call of vLLM's LogitsProcessor was given (0.26 to 0.32: lm_head, hidden_states, embedding_bias;
    `soft_cap` and `scale` are its own)."""
    given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args, strict=False)) | kwargs
    return Head(given["lm_head"].weight, given.get("embedding_bias"), processor.soft_cap, float(processor.scale))


def attention_scale(attention: torch.nn.Module) -> float:
    """The factor on q.k before the softmax (vLLM 0.26 to 0.32: the attention layer's `impl.scale`)."""
    return float(attention.impl.scale)


def attention_heads(attention: torch.nn.Module) -> tuple[int, int, int]:
    """(query heads, kv heads, head width) of this rank."""
    return attention.num_heads, attention.num_kv_heads, attention.head_size


def attention_window(attention: torch.nn.Module) -> int | None:
    """How many positions a query sees, itself included; None: all (0.26 to 0.32: `sliding_window`)."""
    return getattr(attention, "sliding_window", None)


def attention_plain(attention: torch.nn.Module) -> bool:
    """Whether the scores have no softcap, sinks or linear biases (`impl` attributes, 0.26 to 0.32)."""
    impl = attention.impl
    return not (
        getattr(impl, "logits_soft_cap", None) or getattr(impl, "alibi_slopes", None) is not None
        or getattr(impl, "sinks", None) is not None
    )


def inspect_models_in_process() -> None:
    """Let vLLM look at a model class in this process.

    vLLM 0.26 to 0.32 starts a second Python that imports all of vLLM again, only so that a forking parent keeps CUDA
    untouched. This process never forks, and packages that are hidden here (see `hide`) are not hidden there.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def abort_all(llm: Any) -> None:
    """Take every request out of an `LLM`: after a batch that was broken off.

    0.32: the output processor's table is keyed by the engine's own ids, which `internal` says they are.
    """
    unfinished = list(llm.llm_engine.output_processor.request_states)
    if unfinished:
        llm.llm_engine.abort_request(unfinished, internal=True)
