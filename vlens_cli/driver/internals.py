"""The only door to vLLM's private attributes. Each function says where it was seen to hold.

Everything else in this project uses vLLM's documented surface (`LLM`, `SamplingParams`, `worker_cls`,
`collective_rpc`) or what is behind these functions.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any, NamedTuple

import torch

from vlens_cli.driver.gather import Sharding


class Segment(NamedTuple):
    """The rows of one request in one step: `start:stop` of every flat tensor; `first` is the absolute position
    of the first of them."""

    request: str
    start: int
    stop: int
    first: int


class Layout(NamedTuple):
    """The rows of one step: those of `requests[n]` are `offsets[n]:offsets[n + 1]`, the first of them at the absolute position
    `firsts[n]`."""

    requests: list[str]
    offsets: list[int]
    firsts: list[int]

    def segments(self) -> list[Segment]:
        starts, stops = self.offsets[:-1], self.offsets[1:]
        return [Segment(*one) for one in zip(self.requests, starts, stops, self.firsts, strict=True)]


def step_layout(runner: Any) -> Layout:
    """Which rows of the running step belong to which request. Called inside a forward.

    V1 runner, vLLM 0.26 and 0.32: `input_batch` and `query_start_loc` are final once the inputs are prepared,
    which is before any module runs.
    """
    batch = runner.input_batch
    requests = list(batch.req_ids)
    offsets = runner.query_start_loc.np[: len(requests) + 1].tolist()
    firsts = batch.num_computed_tokens_cpu[: len(requests)].tolist()
    return Layout(requests, offsets, firsts)


def on_layout(runner: Any, planned: Callable[[Layout], None]) -> None:
    """Call `planned` with the rows of every step, once they are laid out and before its forward.

    V1 runner, vLLM 0.26 and 0.32: `_prepare_inputs` ends with what `step_layout` reads. V2 runner: `prepare_inputs`
    returns the batch, in an order of its own (by scheduled tokens).
    """
    if is_v2(runner):
        prepare = runner.prepare_inputs

        def laid_out(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            offsets = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
            firsts = batch.num_computed_tokens_np[: batch.num_reqs].tolist()
            planned(Layout(list(batch.req_ids), offsets, firsts))
            return batch

        runner.prepare_inputs = laid_out
        return
    prepare = runner._prepare_inputs

    def prepared(*args: Any, **kwargs: Any) -> Any:
        out = prepare(*args, **kwargs)
        planned(step_layout(runner))
        return out

    runner._prepare_inputs = prepared


def is_v2(runner: Any) -> bool:
    """Whether this is vLLM's V2 model runner (0.26 to 0.32), which keeps its tables elsewhere, and forms logits in
    `sample_tokens`."""
    return hasattr(runner, "prepare_inputs")


def settle_compiler() -> None:
    """Have torch (2.11 to 2.13) fix where it keeps compiled code and its precompiled headers, by the temporary folder
    that is in force now."""
    from torch._inductor import codecache

    codecache.cache_dir()


def can_sleep() -> bool:
    """Whether vLLM (0.26 to 0.32) can put an engine to sleep on this machine: on GPUs with its own allocator alone."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and current_platform.is_sleep_mode_available())


def free_gpu_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def choose_compile_cache() -> None:
    """On a processor, torch's own cache of compiled code alone: what vLLM (0.32) keeps besides for whole functions cannot
    be loaded there ("no attribute finalize_loading"), and each boot would compile anew."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model's modules run one by one though the engine has compiled them (0.26 to 0.32: `do_not_compile` of
    every module that `support_torch_compile` has wrapped)."""
    wrapped = [module for module in model.modules() if hasattr(module, "do_not_compile")]
    before = [module.do_not_compile for module in wrapped]
    for module in wrapped:
        module.do_not_compile = True
    try:
        # Some of vLLM's layers compile themselves where nothing else does.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, was in zip(wrapped, before, strict=True):
            module.do_not_compile = was


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


def kind(module: torch.nn.Module) -> str:
    """What a live module is, of the kinds that a decoder is made of; empty for any other (0.26 to 0.32: vLLM's classes;
    norms, rotations and activations also by the names that such classes have everywhere)."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    name = type(module).__name__
    match module:
        case Attention():
            return "attention"
        case linear.QKVParallelLinear():
            return "qkv"
        case linear.MergedColumnParallelLinear():
            return "merged"
        case linear.LinearBase() | torch.nn.Linear():
            return "linear"
        case vocab_parallel_embedding.ParallelLMHead():
            return "head"
        case vocab_parallel_embedding.VocabParallelEmbedding():
            return "embedding"
        case LogitsProcessor():
            return "logits"
    if hasattr(module, "moe_config") or "Experts" in name or "MoE" in name:
        return "experts"
    if "Norm" in name and isinstance(getattr(module, "weight", None), torch.Tensor):
        return "norm"
    if name.endswith("RotaryEmbedding"):
        return "rotary"
    return "act" if not list(module.parameters()) and name.endswith(ACTIVATIONS) else ""


ACTIVATIONS = ("AndMul", "MulAndSilu", "GELU", "SiLU", "SiLUActivation", "ReLU", "Activation", "GELUTanh", "Tanh")


def norm_kind(norm: torch.nn.Module) -> str:
    """Which formula of `norm_affine` a live norm is, by what it makes of numbers; empty where none is."""
    weight = norm.weight
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.inference_mode():
        out = norm(x.clone())
        out = (out[0] if isinstance(out, tuple) else out).float()
        for formula in ("rms", "rms_plus_one", "layer"):
            centred = x.float() - x.float().mean(-1, keepdim=True) if formula == "layer" else x.float()
            normalized = centred / (centred.square().mean(-1, keepdim=True) + norm_eps(norm)).sqrt()
            if (norm_affine(norm, normalized.to(weight), formula).float() - out).norm() < 0.02 * out.norm():
                return formula
    return ""


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


def weight(layer: torch.nn.Module, attribute: str) -> torch.Tensor:
    """A parameter of one module on this rank, as it was loaded: on the host and in the model's dtype.

    vLLM (0.32, CPU) packs the weights of linear layers for its kernels and empties the parameters, shuffles those of
    experts, and widens some biases to float32. Experts are in the module itself in 0.26, and in its `routed_experts` in
    0.32. Raises LookupError where the layer has no such parameter, or keeps it quantized.
    """
    layer = getattr(layer, "routed_experts", layer)
    value = getattr(layer, attribute, None)
    if not isinstance(value, torch.Tensor):
        raise LookupError(f"the engine's layer has no {attribute}")
    method = getattr(layer, "quant_method", None)
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        raise LookupError(f"the engine keeps this layer quantized ({type(method).__name__})")
    if not value.numel():
        if attribute != "weight" or not hasattr(layer, "input_size"):
            raise LookupError(f"the engine has emptied {attribute}")
        return _unpacked(layer, value)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if attribute in ("w13_weight", "w2_weight") and getattr(experts, "isa", None) and not getattr(
            experts, "_use_zentorch", False):
        return _unshuffled(value.detach(), attribute, experts)
    return value.detach().to(device="cpu", dtype=getattr(layer, "params_dtype", value.dtype))


# Rows of the identity that are pushed at once: a whole one of a wide layer takes gigabytes.
_ROWS = 512


@torch.inference_mode()
def _unpacked(layer: torch.nn.Module, emptied: torch.Tensor) -> torch.Tensor:
    """[out, in] of a linear layer whose weight is packed away, read back by pushing the identity through its kernel.

    Each sum has one term that is not zero, so every value is exact, but for the sign of zeros.
    """
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    columns = []
    for start in range(0, width, _ROWS):
        rows = torch.zeros(min(_ROWS, width - start), width, dtype=emptied.dtype, device=emptied.device)
        rows[:, start:].fill_diagonal_(1)
        columns.append(layer.quant_method.apply(layer, rows, None))
    found = torch.cat(columns).t().contiguous()
    if not found.isfinite().all():
        # Zero times infinity is not a number: one such weight spoils its whole row.
        raise LookupError("the weight holds NaN or infinities, and cannot be read back from its packed form")
    return found


@torch.inference_mode()
def _unshuffled(value: torch.Tensor, attribute: str, experts: Any) -> torch.Tensor:
    """The experts' weights [expert, rows, columns] in the order in which they were loaded, without what pads them.

    0.32, CPU: `CPUUnquantizedExperts` keeps each expert's in its kernel's order, which packing the places shows.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    count, rows, columns = value.shape
    places = torch.arange(rows * columns, dtype=torch.int32)
    packed = torch.zeros_like(places)
    for shift in range(0, max(1, (rows * columns - 1).bit_length()), 8):
        # Numbers below 256 are exact in every dtype.
        digit = (places >> shift & 255).to(value.dtype).view(1, rows, columns)
        packed |= cpu_prepack_moe_weight(digit, experts.isa).view(-1).int() << shift
    found = torch.empty_like(value).view(count, -1)
    found[:, packed.long()] = value.view(count, -1)
    found, width = found.view_as(value), experts.moe_config.intermediate_size_per_partition
    if attribute == "w13_weight":
        gate, up = found.chunk(2, dim=1)
        return torch.cat([gate[:, :width], up[:, :width]], dim=1)
    return found[:, :, :width].contiguous()


def sharding(layer: torch.nn.Module, attribute: str) -> Sharding:
    """How a parameter of a module is spread over ranks, by the module's class (vLLM 0.26 to 0.32).

    A parameter's own `output_dim` and `input_dim` say less (not which parts are fused), and an emptied one has none.
    """
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    moe = getattr(getattr(layer, "routed_experts", layer), "moe_config", None)
    if moe is not None:
        width = moe.intermediate_size_per_partition
        # Where gate and up rows alternate, a rank has a run of them.
        fused = () if "GptOss" in type(getattr(layer, "routed_experts", layer)).__name__ else (width, width)
        return {"w13_weight": Sharding(1, fused), "w13_bias": Sharding(1, fused), "w2_weight": Sharding(2),
                "w2_bias": Sharding(first=True)}.get(attribute, Sharding())
    if layer_is_whole(layer):
        return Sharding()
    if attribute == "sinks":
        return Sharding(0)
    match layer:
        case QKVParallelLinear():
            kv = layer.num_kv_heads
            widths = (layer.num_heads * layer.head_size, kv * layer.head_size, kv * layer.v_head_size)
            return Sharding(0, widths, (1, layer.num_kv_head_replicas, layer.num_kv_head_replicas))
        case MergedColumnParallelLinear():
            return Sharding(0, tuple(layer.output_partition_sizes))
        case ColumnParallelLinear() | VocabParallelEmbedding():
            return Sharding(0)
        case RowParallelLinear() if attribute == "weight":
            return Sharding(1)
    return Sharding()


def layer_is_whole(layer: torch.nn.Module) -> bool:
    """Whether a linear layer of a class that is spread over ranks is one that every rank has whole (0.26 to 0.32)."""
    return bool(getattr(layer, "disable_tp", False))


class Cut(NamedTuple):
    """What tensor parallelism leaves to the caller of a linear layer: its input is this rank's `rows` of the weight, its
    output this rank's `columns`, or a sum that is not `unreduced` yet."""

    rows: bool = False
    columns: bool = False
    unreduced: bool = False


def cut(layer: torch.nn.Module) -> Cut:
    """0.26 to 0.32: column-parallel layers gather only where they say so, row-parallel ones sum unless they say not."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    if layer_is_whole(layer):
        return Cut()
    match layer:
        case ColumnParallelLinear():
            return Cut(columns=not layer.gather_output)
        case RowParallelLinear():
            return Cut(rows=layer.input_is_parallel, unreduced=not layer.reduce_results)
    return Cut()


def is_elsewhere(module: torch.nn.Module) -> bool:
    """Whether a module only stands for one that another pipeline stage has (0.26 to 0.32)."""
    return type(module).__name__ == "PPMissingLayer"


def prepare_stage(runner: Any) -> None:
    """0.32, CPU: the runner of a later pipeline stage lacks the tensors that the stage before it fills."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", True) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device)


def end_workers(llm: Any) -> None:
    """End an executor's worker processes, and wait until they are gone (0.26 to 0.32)."""
    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()


# Of an engine that has lost worker processes: rank -> exit code, below 0 a signal.
_ended: dict[int, int] = {}


def note_ended_workers() -> None:
    """Have executors note which workers had ended before they end the others: what they raise does not say it (0.32)."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    _ended.clear()
    end = getattr(MultiprocExecutor, "_ensure_worker_termination", None)
    # Of another version, or noted already.
    if end is None or end.__module__ == __name__:
        return

    def noting(procs: list[Any]) -> None:
        # A process's pipes close a moment before it can be waited for.
        closed = connection.wait([proc.sentinel for proc in procs], timeout=0.05)
        for rank, proc in enumerate(procs):
            if proc.sentinel in closed:
                proc.join(1)
                _ended[rank] = proc.exitcode or 0
        end(procs)

    MultiprocExecutor._ensure_worker_termination = staticmethod(noting)


def killed_worker() -> tuple[int, int] | None:
    """The rank of a worker that a signal ended, and its exit code; the one that was killed where others fell with it."""
    killed = [(code != -signal.SIGKILL, rank, code) for rank, code in _ended.items() if code < 0]
    return min(killed)[1:] if killed else None


def says_dead(fault: Exception) -> bool:
    """Whether Ray (2.60) says that a worker process has ended: vLLM's executor over Ray keeps no word of it."""
    return type(fault).__name__ in ("ActorDiedError", "RayActorError", "ActorUnavailableError", "WorkerCrashedError")


def has_failed(llm: Any) -> bool:
    """Whether an executor has lost one of its worker processes (0.26 to 0.32: multiprocess)."""
    return bool(getattr(llm.llm_engine.engine_core.engine_core.model_executor, "is_failed", False))


class _Called:
    """Stands for an attention layer where a model asks for its `forward` by name, which would pass its hooks by."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)


def let_attention_be_hooked(model: torch.nn.Module) -> None:
    """0.32: the Transformers backend calls `module.attn.forward(q, k, v)`; the module tree keeps the layer itself."""
    if type(model).__name__.startswith("Transformers"):
        for module in model.modules():
            if isinstance(module._modules.get("attn"), torch.nn.Module) and hasattr(module.attn, "impl"):
                module.__dict__["attn"] = _Called(module.attn)


def product(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear layer's product without its bias (0.26 to 0.32: `quant_method.apply`, whatever the weight is packed as)."""
    if hasattr(layer, "quant_method"):
        return layer.quant_method.apply(layer, x, None)
    return torch.nn.functional.linear(x, layer.weight)


def attention_heads(attention: torch.nn.Module) -> tuple[int, int, int]:
    """(query heads, kv heads, head width) of this rank."""
    return attention.num_heads, attention.num_kv_heads, attention.head_size


class Scoring(NamedTuple):
    """What an attention layer does between q.k and the softmax.

    scale    factor on q.k               window  how many positions a query sees, itself included; None: all
    softcap  cap * tanh(score / cap)     slopes  [head], of a bias that is linear in the distance
    sinks    [head], one more score of each head, that no key stands for
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a scale and a window."""
        return self.softcap is None and self.slopes is None and self.sinks is None


def attention_scoring(attention: torch.nn.Module) -> Scoring:
    """How a live attention layer scores (0.26 to 0.32: attributes of the layer and of its backend's `impl`).

    Raises LookupError for a layer whose scores are something else.
    """
    impl = attention.impl
    # An enum whose members are texts.
    of_type, of_class = getattr(attention, "attn_type", "decoder"), type(attention).__name__
    odd = [what for what, found in (
        (f"is of type {of_type}", of_type != "decoder"),
        (f"is of a class of its own, {of_class}", of_class != "Attention"),
        ("has biases with a square root", getattr(attention, "use_alibi_sqrt", False)),
        ("looks at chunks", getattr(impl, "chunk_lookback", -1) > -1),
        ("scores in another way", not hasattr(impl, "scale")),
    ) if found]
    if odd:
        raise LookupError(f"the engine's attention {odd[0]}")
    # A backend writes "no softcap" as None or 0.
    return Scoring(float(impl.scale), getattr(attention, "sliding_window", None), getattr(impl, "logits_soft_cap", None) or None,
                   getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None))


def latent_scale(attention: torch.nn.Module) -> float:
    """The factor on q.k of a live layer of latent attention (0.32: `MLAAttention`, which has nothing else before the softmax,
    but for one whose indexer chooses keys). Raises LookupError for that one."""
    if getattr(attention, "use_sparse", False):
        raise LookupError("the engine's attention chooses the keys that it looks at")
    return float(attention.impl.scale)


def check_live(layer: torch.nn.Module) -> None:
    """Raises LookupError for a layer that cannot be run: where AMX multiplies for latent attention, vLLM (0.32) empties
    the projection of keys and values."""
    weight = getattr(layer, "weight", None)
    if weight is not None and not weight.numel():
        raise LookupError("the engine has packed the projection of keys and values away")


def mend_rotation(model: torch.nn.Module) -> None:
    """Let latent attention rotate by torch's operations where the model runs on a processor.

    0.32: the kernel there takes queries and keys for tensors without gaps, and `MultiHeadLatentAttentionWrapper` gives it
    the last columns of wider ones. It left the keys and most queries unrotated, and turned other numbers instead: which,
    the number of rows in the step said. Rotations that are stretched (`DeepseekScalingRotaryEmbedding`) have no kernel.
    """
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        rotary = getattr(module, "rotary_emb", None)
        if type(module).__name__ == "MultiHeadLatentAttentionWrapper" and rotary is not None:
            rotary._forward_method = rotary.forward_native


def forward_context(config: Any) -> contextlib.AbstractContextManager[None]:
    """What modules that ask for the running forward find when vlens runs them itself (0.26 to 0.32)."""
    from vllm.forward_context import set_forward_context

    return set_forward_context(None, config)


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


def forget_ranks() -> None:
    """Take down what the process keeps of ranks, where it keeps any (0.26 to 0.32)."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.cleanup_dist_env_and_memory()


def end_engine(llm: Any, last: bool) -> None:
    """Shut an `LLM` of this process down.

    0.32: the core's shutdown ends by taking down what the process keeps of its ranks, which its other engines use too.
    """
    from vllm.v1.engine import core

    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if not last:
        core.cleanup_dist_env_and_memory = lambda: None
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = cleanup_dist_env_and_memory
    if last:
        cleanup_dist_env_and_memory()
