"""The only place that builds an engine. Every forced setting carries its reason.

Light until `boot` is called: what a query asks of an engine is checked against its `Plan` before torch is imported.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlens_cli import __version__
from vlens_cli.driver.graph import limits
from vlens_cli.driver.hide import hide_broken_packages
from vlens_cli.errors import INSTALL_HINT, LOG_HINT, PromptError, StartError, UsageError, VlensError, how_ended
from vlens_cli.families import Catalog, Dims
from vlens_cli.query import EngineSpec

if TYPE_CHECKING:
    from vlens_cli.driver.workers import Workers

# Imported by vLLM in every process that holds a rank.
WORKER = "vlens_cli.driver.worker.LensWorker"
# What a resident engine may keep for keys and values. On CPU the memory is touched at the first requests, and costs
# seconds a GiB.
KV_BYTES = 512 * 2**20
# Tokens of keys and values beyond one longest prompt, for requests that run beside it.
KV_TOKENS = 32 * 1024
# Room for blocks that are begun but not full, and for the engine's own empty block.
KV_SLACK_TOKENS = 512
DEFAULT_CHUNK = 2048
MAX_REQUESTS = 256

# Types of rotary scaling whose values were compared with transformers'; vLLM's `dynamic` is another formula.
ROTATIONS = ("default", "linear", "llama3", "yarn", "longrope")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Variables by which float32 products become TF32 on a GPU, three digits instead of seven -> the values that do not.
TF32 = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
TOO_LONG_HINT = "--max-len raises the limit as far as the model allows"
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class Plan:
    """What an engine will be started with, known before it is: the numbers that checks of a query need.

    dtype      the engine's, by its torch name    max_len   tokens that may be fed: a prompt and all but the last new one
    chunk      tokens of one forward at most      kv_bytes  memory for keys and values
    shortest_prompt  where an engine for long prompts gives short ones other values than the model's, else 1
    built      hook points in the compiled graph; None: the engine is eager
    buffer     bytes of device memory for what compiled mode captures in a step and edits
    notes      lines for the user, such as a length that was reduced
    """

    dtype: str
    max_len: int
    chunk: int
    kv_bytes: int
    notes: tuple[str, ...] = ()
    shortest_prompt: int = 1
    built: tuple[str, ...] | None = None
    buffer: int = 0

    @property
    def most_requests(self) -> int:
        """In one forward: vLLM refuses fewer tokens in it than requests."""
        return min(MAX_REQUESTS, self.chunk)


def plan(spec: EngineSpec, config: dict[str, Any], catalog: Catalog) -> Plan:
    """Choose dtype, lengths and memory from the config alone, so that a query is checked before any engine starts."""
    dtype = spec.dtype or checkpoint_dtype(config)
    dims = catalog.dims
    _check_ranks(spec, dims)
    # Of one rank.
    token_bytes = 2 * -(-dims.n_layers // spec.pp) * max(1, dims.n_kv_heads // spec.tp) * dims.d_head * BYTES[dtype]
    own, short = _own_length(config), check_rotation(config)
    if own < 1:
        raise StartError(f"config.json has no usable length: {own}", code="bad_config",
                         hint="compare its config.json with the original")
    held = max(KV_BYTES // token_bytes - KV_SLACK_TOKENS, 1)
    if spec.max_len is not None and spec.max_len > own:
        raise UsageError(f"--max-len {spec.max_len} is more than this model takes: {own}", code="max_len_too_long")
    max_len = spec.max_len or min(own, held, short or own)
    why = "where its rotation for short prompts ends" if max_len == short else (
        f"what {KV_BYTES >> 20} MiB of keys and values hold")
    notes = () if spec.max_len or max_len == own else (
        f"prompts are limited to {max_len} of the model's {own} tokens, {why} (--max-len raises it)",)
    if catalog.spec.structural:
        notes = (*notes, "no file describes this architecture: given is what its structure proves when the engine starts")
    notes += _tf32(dtype)
    tokens = max(max_len, min(held, KV_TOKENS)) + KV_SLACK_TOKENS
    # transformers changes over at short + 2; of short + 1 tokens no engine of vLLM's gives the model's own values.
    shortest = short + 2 if short and max_len > short else 1
    if catalog.spec.structural and spec.tp * spec.pp > 1:
        raise UsageError("several ranks take architectures that a file of vlens describes, and none describes this one",
                         hint="leave --tp and --pp out", code="ranks_unknown_family")
    if catalog.spec.structural and spec.compile_hooks is not None:
        # Graphs are built before the proof has said which reading of the module tree is right.
        raise UsageError("compiled mode takes architectures that a file of vlens describes, and none describes this one",
                         hint="leave --compile out", code="compile_unknown_family")
    built = None if spec.compile_hooks is None else limits.built(spec.compile_hooks, catalog)
    buffer = 0 if built is None else (spec.compile_buffer or limits.DEFAULT_BUFFER) << 20
    return Plan(dtype, max_len, spec.chunk or DEFAULT_CHUNK, tokens * token_bytes, notes, shortest, built, buffer)


def _check_ranks(spec: EngineSpec, dims: Dims) -> None:
    """Raises UsageError for ranks that this model cannot be spread over, or this vlens cannot use."""
    for what, count in (("query heads", dims.n_heads), ("columns of the MLP", dims.d_mlp)):
        if count % spec.tp:
            raise UsageError(f"--tp {spec.tp} does not divide this model's {count} {what}", code="ranks_do_not_fit",
                             hint=_tp_hint(dims))
    if max(dims.n_kv_heads, spec.tp) % min(dims.n_kv_heads, spec.tp):
        raise UsageError(f"--tp {spec.tp} and this model's {dims.n_kv_heads} key and value heads do not divide each other",
                         code="ranks_do_not_fit", hint=_tp_hint(dims))
    if spec.pp > dims.n_layers:
        raise UsageError(f"--pp {spec.pp} is more than this model's {dims.n_layers} layers", code="ranks_do_not_fit",
                         hint=f"--pp takes here 1 to {dims.n_layers}")
    if spec.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError("--executor ray needs the package ray, which is not installed here", code="no_ray",
                         hint="pip install ray, on every machine; ranks of one machine need none: --executor mp")
    if spec.executor is None and spec.tp * spec.pp == 1:
        return
    if spec.compile_hooks is not None:
        raise UsageError("compiled mode runs on one rank", hint="leave --compile out, or --tp, --pp and --executor",
                         code="compile_ranks")


def _tp_hint(dims: Dims) -> str:
    fits = [str(n) for n in range(2, 65) if not (dims.n_heads % n or dims.d_mlp % n or max(dims.n_kv_heads, n) % min(dims.n_kv_heads, n))]
    return f"--tp takes here {', '.join(['1', *fits])}"


def _tf32(dtype: str) -> tuple[str, ...]:
    """What makes float32 less than it says, as a note."""
    asked = [f"{name}={value}" for name, exact in TF32.items() if (value := os.environ.get(name, exact)) != exact]
    return (f"tf32: with {' '.join(asked)} a GPU multiplies float32 with three digits, and these values are not float32's",
            ) if asked and dtype == "float32" else ()


def check_rotation(config: dict[str, Any]) -> int | None:
    """The longest prompt that an engine feeds with a model's short set of rotary factors; None for models with one set.

    transformers chooses by each prompt's length, vLLM (0.26 to 0.32) once, by the engine's, which counts one token
    more than is fed. Raises StartError for a rotation that vLLM and transformers compute differently.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROTATIONS:
        raise StartError(f"the engine's rotation of this type is not known to equal the model's: {kind}",
                         hint=f"this version reads models with {', '.join(ROTATIONS)}", code="unknown_rotation")
    if kind != "longrope":
        return None
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return original - 1 if original else None


def _own_length(config: dict[str, Any]) -> int:
    """How many tokens the model takes: its config's length, stretched where its rotation says so."""
    own = min((config[k] for k in LENGTH_KEYS if isinstance(config.get(k), int)), default=2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in ("yarn", "linear"):
        own = max(own, int(rope.get("original_max_position_embeddings", own) * float(rope.get("factor", 1))))
    return own


def checkpoint_dtype(config: dict[str, Any]) -> str:
    """The dtype that the checkpoint says it has; float32 where it says nothing or something an engine cannot run."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.").strip()
    return named if named in BYTES else "float32"


def check_tokens(tokens: Sequence[int], d_vocab: int, plan: Plan, max_new_tokens: int = 1) -> None:
    """Refuse a prompt that the engine cannot take, with both numbers. Raises PromptError."""
    if not tokens:
        raise PromptError("a prompt has no tokens")
    outside = [t for t in tokens if not 0 <= t < d_vocab]
    if outside:
        raise PromptError(f"token id outside the vocabulary of {d_vocab}: {outside[0]}", code="bad_token")
    # The last generated token is not fed.
    longest = plan.max_len - max_new_tokens + 1
    if len(tokens) > longest:
        raise PromptError(f"a prompt of {len(tokens)} tokens is longer than this engine takes: {longest}",
                          hint=TOO_LONG_HINT, code="prompt_too_long")
    if len(tokens) < plan.shortest_prompt:
        raise PromptError(
            f"with --max-len {plan.max_len} the engine rotates as for long prompts; a prompt of {len(tokens)} tokens has "
            f"other values in this model, and at least {plan.shortest_prompt} are needed", code="prompt_too_short",
            hint=f"--max-len {plan.shortest_prompt - 2} for prompts up to that length",
        )


def engine_arguments(spec: EngineSpec, plan: Plan) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    return {
        "model": spec.model,
        # vLLM's own `auto` turns a fp32 checkpoint into fp16: other numbers than the checkpoint's.
        "dtype": plan.dtype,
        # It counts the token that is generated and not fed.
        "max_model_len": plan.max_len + 1,
        "max_num_batched_tokens": plan.chunk,
        "max_num_seqs": plan.most_requests,
        # By bytes, not as a share of the card or of memory: the engine stays, and leaves the rest to others.
        "kv_cache_memory_bytes": plan.kv_bytes,
        # A cached prefix is not computed: its rows would be missing, and a patched run's keys would be reused.
        "enable_prefix_caching": False,
        # Hooks registered after boot do not fire inside compiled graphs; the worker builds those of `built` in.
        "enforce_eager": plan.built is None,
        # vlens tokenizes once, itself; and a folder without a tokenizer must answer token ids.
        "skip_tokenizer_init": True,
        # Eager hooks must have finished a step before its captures are taken. In graphs all is in the stream's order.
        "async_scheduling": None if plan.built is not None else False,
        # Part of the key of vLLM's compile cache (0.26 to 0.32): a graph with other points, or none, is never served.
        "additional_config": additional(plan),
        "tensor_parallel_size": spec.tp,
        "pipeline_parallel_size": spec.pp,
        "distributed_executor_backend": executor(spec),
        # vLLM (0.26) takes two Ray nodes of one host for one whose processes see the devices of both.
        "disable_custom_all_reduce": executor(spec) == "ray",
        "disable_log_stats": True,
        # Where the unembedding cannot be used, the sampler's whole distribution is the answer.
        "max_logprobs": -1,
        "seed": 0,
    }


def executor(spec: EngineSpec) -> str:
    """vLLM's name of what runs the ranks: a single one lives in this process, where nothing is copied to and fro."""
    return spec.executor or ("uni" if spec.tp * spec.pp == 1 else "mp")


def workers(llm: Any, spec: EngineSpec) -> Workers:
    """How the driver calls the workers of an engine that `boot` built. Raises StartError."""
    from vlens_cli.driver.workers import LocalWorker, RemoteWorkers

    return LocalWorker(llm) if executor(spec) == "uni" else RemoteWorkers(llm, spec.tp, spec.pp)


def additional(plan: Plan) -> dict[str, Any]:
    """What vLLM hands to every worker for us."""
    if plan.built is None:
        return {}
    return {"vlens": {"version": __version__, "built": list(plan.built), "buffer": plan.buffer}}


def settle_products() -> None:
    """fp32 is fp32: Triton's attention kernel multiplies in TF32 otherwise, 1e-3 off (0.26, H200; with this 1e-6). In every
    process that holds a rank: no variable of ours reaches other machines."""
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


# The engines of this process: one that was dropped without being closed is none.
_running: weakref.WeakSet[Any] = weakref.WeakSet()


# What the user's environment says of what this process sets, for one kind of engine or another.
_RUNNER, _BIND = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_OMP_THREADS_BIND"
_asked = {name: os.environ.get(name) for name in (_RUNNER, _BIND)}


def _set(name: str, ours: str | None) -> None:
    """The user's value of a variable, else ours; what an engine before this one was given is gone."""
    os.environ.pop(name, None)
    value = _asked[name] or ours
    if value is not None:
        os.environ[name] = value


def prepare(compiled: bool = False, ranks: int = 1) -> None:
    """What must be so before vLLM is imported in this process, and before it builds an engine."""
    _set(_BIND, _shares(ranks) if ranks > 1 else None)
    # Workers in processes of their own are new ones: a fork would copy locks that others hold.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # The engine core in this process: captures are taken from it without serializing them.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # One token more than the model's own length is asked (see max_model_len); `plan` refuses lengths that are too long.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # Compiled, vLLM's own choice counts: its V2 runner is the fast one on GPUs.
    _set(_RUNNER, None if compiled else "0")
    settle_products()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hide_broken_packages()


def _shares(ranks: int) -> str:
    """Processors for each rank: on CPU, vLLM (0.32) wants a NUMA node a rank otherwise."""
    mine = sorted(os.sched_getaffinity(0))
    each = len(mine) // ranks
    shares = [",".join(map(str, mine[n * each : (n + 1) * each])) for n in range(ranks)]
    return "|".join(shares) if each else "nobind"


def boot(spec: EngineSpec, plan: Plan) -> Any:
    """A `vllm.LLM` with our worker in it.

    Raises StartError: vLLM missing or broken, the model refused, memory short.
    """
    prepare(plan.built is not None, spec.tp * spec.pp)
    if plan.built is not None or executor(spec) != "uni":
        _settle_compiler()
    with translated(), _scratch(), _children():
        from vllm import LLM

        from vlens_cli.driver import internals

        internals.inspect_models_in_process()
        if plan.built is not None:
            internals.choose_compile_cache()
        if _running:
            gc.collect()
        if not _running:
            # What an engine that failed to start has left: the next would go on with its ranks, whatever it needs.
            internals.forget_ranks()
        if executor(spec) == "mp":
            internals.note_ended_workers()
        try:
            llm = LLM(**engine_arguments(spec, plan), worker_cls=WORKER,
                      # Weights come from memory that can be taken away and given back at the same addresses.
                      enable_sleep_mode=internals.can_sleep())
        except Exception as fault:
            # Whatever vLLM makes of it.
            if killed := internals.killed_worker():
                raise worker_died(StartError, killed) from fault
            raise
        _running.add(llm)
        return llm


def _settle_compiler() -> None:
    """Let torch choose its folders for compiled code before `_scratch`: what it compiles later leans on what is there."""
    with translated():
        from vlens_cli.driver import internals

        internals.settle_compiler()


# Where vLLM's processes meet; a path of a socket has at most a hundred letters.
_SOCKETS = "VLLM_RPC_BASE_PATH"
LONGEST_FOLDER = 60


@contextmanager
def _scratch() -> Iterator[None]:
    """A folder for temporary files that goes when the engine is up, or broken off.

    vLLM (0.32) makes a file there through which ranks meet, and sockets of worker processes, and leaves them behind if it
    is not ended in order; ranks have met by then, and open sockets need no name.
    """
    with tempfile.TemporaryDirectory(prefix="vlens-") as folder, ExitStack() as stack:
        kept, tempfile.tempdir = tempfile.tempdir, folder
        if _SOCKETS not in os.environ:
            short = folder if len(folder) <= LONGEST_FOLDER else stack.enter_context(
                tempfile.TemporaryDirectory(prefix="vlens-", dir="/tmp"))
            os.environ[_SOCKETS] = short
            stack.callback(os.environ.pop, _SOCKETS, None)
        try:
            yield
        finally:
            tempfile.tempdir = kept


@contextmanager
def _children() -> Iterator[None]:
    """Within, new processes of `multiprocessing` run `child` first, and not the program that this process runs: a script
    without a main guard would start an engine in each, and packages must be hidden before vLLM is imported.

    `multiprocessing` looks for the program's name in its `__spec__`.
    """
    main = sys.modules["__main__"]
    kept = getattr(main, "__spec__", None)
    main.__spec__ = importlib.util.find_spec("vlens_cli.driver.child")
    try:
        yield
    finally:
        main.__spec__ = kept


@contextmanager
def translated() -> Iterator[None]:
    """vLLM's and torch's exceptions at start-up, as StartErrors: the seam."""
    try:
        yield
    except ImportError as fault:
        missing = fault.name in ("vllm", "torch", "transformers")
        raise StartError(
            "no engine is installed: vLLM is missing" if missing else f"the engine does not import: {one_line(fault)}",
            hint=INSTALL_HINT, code="no_engine",
        ) from fault
    except MemoryError as fault:
        raise StartError("the engine ran out of memory while starting", hint="try a smaller --max-len, or --dtype bfloat16",
                         code="out_of_memory") from fault
    except VlensError:
        raise
    except Exception as fault:
        # The seam: what vLLM, torch and pydantic raise for a model that they do not take has no common base.
        raise StartError(f"the engine did not start: {one_line(fault)}", hint=LOG_HINT, code="engine_failed") from fault


def worker_died(kind: type[VlensError], killed: tuple[int, int] | None) -> VlensError:
    """The error of an engine that has lost a worker process; `killed` is `internals.killed_worker`'s."""
    how = f": rank {killed[0]}, {how_ended(killed[1])}" if killed else ""
    return kind(f"a worker process of the engine has ended{how}; the engine ends too", code="worker_died",
                hint=f"lack of memory is a usual cause: `vlens doctor`, a smaller --max-len; {LOG_HINT}")


def one_line(fault: BaseException) -> str:
    """A foreign message as one line: pydantic and vLLM spread theirs over many."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = " ".join(lines[:3]) if lines else type(fault).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def shut_down(llm: Any) -> None:
    """End an engine that `boot` built, and give its memory back.

    What vLLM keeps of its ranks belongs to the process and to all of its engines: it goes with the last.
    """
    from vlens_cli.driver import internals

    _running.discard(llm)
    internals.end_engine(llm, last=not _running)
    del llm
    gc.collect()

