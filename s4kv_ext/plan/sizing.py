"""How one model fits one machine: bytes, tokens, users, and instances for the users wanted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s4kv_ext.format import KV_CACHE_DTYPE
from s4kv_ext.plan import cache, memory, weights
from s4kv_ext.plan.gpus import GIB, Machine
from s4kv_ext.plan.memory import Limits

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from s4kv_ext.plan.cache import Cache
    from s4kv_ext.plan.weights import Weights

CONTEXT = 8192


class DoesNotFit(ValueError):
    """This machine, or this way to split the model over it, does not do; another may."""


@dataclass(frozen=True)
class Model:
    """dtype: as the user gave it. config: vLLM's view. refused: why int4_kivi does not take it."""

    name: str
    folder: Path
    dtype: str
    config: ModelConfig
    refused: str | None

    def weights(self, gpus: int) -> Weights:
        return weights.of(self.config, self.folder, gpus)


@dataclass(frozen=True)
class Row:
    """One KV cache dtype. token_bytes: on all GPUs of a server, of a request of the context.
    tokens: what the startup report will say. users: together on one server. step_bytes: that each
    GPU reads of the cache in a step of ``load`` users. instances: for the users wanted, or None."""

    dtype: str
    token_bytes: float
    tokens: int
    users: int
    load: int
    step_bytes: int
    instances: int | None = None

    def bound(self, weight_bytes: int) -> str:
        """By what the time of a decode step is bound: the larger of what it reads."""
        return "cache" if self.step_bytes > weight_bytes else "weights"


@dataclass(frozen=True)
class Plan:
    """All bytes are of one GPU. servers: that fit beside each other on the machine."""

    model: Model
    machine: Machine
    context: int
    users: int | None
    gpus: int
    limits: Limits
    weights: Weights
    activations: int
    cache_bytes: int
    workspace: int
    refused: str | None
    rows: list[Row] = field(default_factory=list)

    @property
    def servers(self) -> int:
        return self.machine.count // self.gpus

    @property
    def best(self) -> Row:
        """What to start with: int4_kivi, or else the model's own dtype, which costs no accuracy."""
        return self.rows[-1] if self.rows[-1].dtype == KV_CACHE_DTYPE else self.rows[0]


def load(path: Path, dtype: str = "auto") -> Model:
    """The model of a folder or of a config.json, as ``vllm serve --dtype`` would run it."""
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give a model's folder or its config.json")
    from vllm.config import ModelConfig

    from s4kv_ext import checks

    # It tells of lengths and dtypes that it chose; here they are figures in the plan.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        config = ModelConfig(model=str(folder), dtype=dtype, skip_tokenizer_init=True)
    except Exception as e:  # those of transformers and of the hub's library have no common type
        raise ValueError(
            f"vLLM does not take {folder}/config.json ({_what(e)}); give that of a model it serves"
        ) from None
    if config.is_attention_free or config.is_hybrid or config.is_encoder_decoder:
        raise ValueError(
            f"{folder}: only models whose every layer keeps keys and values can be planned, not "
            f"{config.hf_config.model_type}; start vllm serve and read its report"
        )
    refused = next((str(p) for p in checks.model_problems(config)), None)
    if refused is None and config.dtype not in checks.CUDA_DTYPES:
        refused = str(
            checks.Unsupported(
                f"model dtype {config.dtype} is not supported on GPUs",
                "use --dtype bfloat16 or float16",
            )
        )
    return Model(folder.resolve().name, folder, dtype, config, refused)


def _what(error: Exception) -> str:
    """What is wrong, in one line."""
    from pydantic import ValidationError

    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    lines = text.removeprefix("Value error, ").splitlines()
    return lines[0].strip() if lines else type(error).__name__


def make(
    model: Model,
    machine: Machine,
    context: int | None = None,
    users: int | None = None,
    gpus: int | None = None,
    limits: Limits | None = None,
) -> Plan:
    """Plan one server on ``gpus`` GPUs of the machine, by default on all. context: tokens of a
    request, prompt and answer; users: requests of so many at the same time.

    Raises ``DoesNotFit``.
    """
    config = model.config
    context = context or min(CONTEXT, config.max_model_len)
    if context > config.max_model_len:
        raise ValueError(
            f"--context {context} is too long for this model: use at most {config.max_model_len}"
        )
    gpus = gpus or machine.count
    _check_split(model, machine, gpus)
    limits = limits or Limits.default(machine.gpu.large)
    held = model.weights(gpus)
    activations = memory.activations(config, limits, gpus)
    left = memory.for_cache(machine.gpu.memory, held.gpu, activations, limits)
    if left <= 0:
        raise DoesNotFit(
            f"the weights take {held.gpu / GIB:.1f} GiB of each GPU and {machine.gpu.name} has "
            f"{machine.gpu.memory / GIB:.1f}: use more or larger GPUs"
        )
    refused = model.refused or _kernel_problem(model, machine, gpus)
    workspace = _workspace(machine) if refused is None else 0
    room = dict.fromkeys(cache.DTYPES, left)
    if refused is None:
        room[KV_CACHE_DTYPE] -= workspace
    else:
        del room[KV_CACHE_DTYPE]
    rows = [
        _row(cache.make(config, dtype, gpus), n, context, users, gpus, machine.count // gpus)
        for dtype, n in room.items()
    ]
    if not any(r.users for r in rows):
        raise DoesNotFit(
            f"{left / GIB:.1f} GiB of each GPU are left for the cache, less than one request of "
            f"{context} tokens takes: use a smaller --context, or more or larger GPUs"
        )
    return Plan(
        model, machine, context, users, gpus, limits, held, activations, left,
        workspace, refused, rows,
    )  # fmt: skip


def widest(model: Model, machine: Machine, **options: Any) -> Plan:
    """The plan that holds the most users on the whole machine, over all ways to split it."""
    plans, problem = [], None
    for gpus in range(1, machine.count + 1):
        if machine.count % gpus == 0:
            try:
                plans.append(make(model, machine, gpus=gpus, **options))
            except DoesNotFit as e:
                problem = e
    if not plans:
        assert problem is not None
        raise problem
    return max(plans, key=lambda p: (p.servers * p.best.users, -p.gpus))


def _row(kv: Cache, left: int, context: int, users: int | None, gpus: int, servers: int) -> Row:
    fit = kv.requests(left, context)
    # Users that do not fit wait for their turn, or go to another server.
    load = fit if users is None else min(users, fit)
    return Row(
        kv.dtype,
        gpus * kv.request_bytes(context) / context,
        kv.reported_tokens(left, context),
        fit,
        load,
        load * kv.request_bytes(context),
        -(-users // (fit * servers)) if users and fit else None,
    )


def _check_split(model: Model, machine: Machine, gpus: int) -> None:
    heads = model.config.model_arch_config.total_num_attention_heads
    kv = model.config.get_total_num_kv_heads()

    def splits(n: int) -> bool:
        return heads % n == 0 and (kv % n == 0 or n % kv == 0)

    if gpus > machine.count or machine.count % gpus:
        raise ValueError(f"--tp {gpus}: {machine} cannot be split so, use a divisor of its GPUs")
    if not splits(gpus):
        possible = [n for n in range(1, machine.count) if machine.count % n == 0 and splits(n)]
        raise DoesNotFit(
            f"{heads} heads ({kv} of keys and values) cannot be split over {gpus} GPUs: use --tp "
            f"{' or '.join(map(str, possible))}"
        )


def _kernel_problem(model: Model, machine: Machine, gpus: int) -> str | None:
    """Why int4_kivi's decode kernel does not fit this GPU, in one line, or None."""
    from s4kv_ext.checks import Unsupported
    from s4kv_ext.cuda_ops import decode_shape

    if (shared := machine.gpu.shared_bytes) is None:
        return None
    heads = cache.kv_heads(model.config, gpus)
    group = model.config.model_arch_config.total_num_attention_heads // gpus // heads
    size = model.config.get_head_size()
    try:
        decode_shape(heads, group, size, shared_bytes=shared, processors=1)
    except ValueError as e:
        return str(Unsupported(str(e)))
    return None


def _workspace(machine: Machine) -> int:
    from s4kv_ext.cuda_backend import workspace_bytes

    return workspace_bytes(machine.gpu.memory)
