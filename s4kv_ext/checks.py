"""What int4_kivi cannot do is refused here, before any weights load: one line that says what,
why and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import psutil
import torch

from s4kv_ext import map_file, settings
from s4kv_ext.cuda_ops import MAX_QUERIES
from s4kv_ext.format import BLOCK, DTYPES, HEAD_SIZES, KV_CACHE_DTYPE, RECENT

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

INSTEAD = "use --kv-cache-dtype auto"
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0))
CUDA_DTYPES = (torch.bfloat16, torch.float16)


class Unsupported(ValueError):
    """int4_kivi does not work with this model or these options."""

    def __init__(self, what: str, remedy: str = INSTEAD) -> None:
        super().__init__(f"--kv-cache-dtype {KV_CACHE_DTYPE}: {what}; {remedy}")


def check_config(config: VllmConfig) -> None:
    """Called at the end of ``EngineArgs.create_engine_config``; raises ``Unsupported``."""
    from s4kv_ext import install_check

    if config.cache_config.cache_dtype != KV_CACHE_DTYPE:
        install_check.warn()
        return
    install_check.require()
    for problem in chain(_options(config), model_problems(config.model_config), _settings(config)):
        raise problem


def _options(config: VllmConfig) -> Iterator[Unsupported]:
    from vllm import envs

    cache, parallel = config.cache_config, config.parallel_config
    yield from _platform(config)
    if cache.user_specified_block_size and cache.block_size != BLOCK:
        yield Unsupported(
            f"--block-size {cache.block_size} does not fit, a sealed block has {BLOCK} tokens",
            f"leave --block-size out or set it to {BLOCK}",
        )
    backend = config.attention_config.backend
    if backend is not None and backend.name != "INT4_KIVI":
        yield Unsupported(
            f"attention backend {backend.name} cannot read it", "leave --attention-backend out"
        )
    if cache.kv_cache_dtype_skip_layers:
        yield Unsupported(
            "--kv-cache-dtype-skip-layers is not supported, all layers share pages of one size",
            f"leave it out or {INSTEAD}",
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield Unsupported(
            "it needs the hybrid KV cache manager (sealed and recent pages are two groups)",
            "leave out --disable-hybrid-kv-cache-manager",
        )
    if transfer := config.kv_transfer_config:
        yield Unsupported(
            f"KV connectors are not supported yet ({transfer.kv_connector}): "
            "they expect one page for every token",
            f"leave out --kv-transfer-config and --kv-offloading-size, or {INSTEAD}",
        )
    for flag, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield Unsupported(f"{flag} {size} is not supported yet", f"set it to 1 or {INSTEAD}")
    if (asked := cache.kv_cache_memory_bytes or 0) > (have := _memory()):
        yield Unsupported(
            f"--kv-cache-memory-bytes asks for {asked / (1 << 30):.0f} GiB and there are "
            f"{have / (1 << 30):.0f} in all",
            "set it to what is left beside the model",
        )
    if config.compilation_config.mode and (why := _unwritable(Path(envs.VLLM_CACHE_ROOT))):
        yield Unsupported(
            f"the compiled model cannot be kept in {envs.VLLM_CACHE_ROOT}: {why}",
            "set VLLM_CACHE_ROOT to a folder that can be written, or use --enforce-eager",
        )
    if envs.VLLM_BATCH_INVARIANT:
        yield Unsupported(
            "VLLM_BATCH_INVARIANT=1 is not supported: what is sealed depends on the chunks",
            f"unset it or {INSTEAD}",
        )
    if draft := config.speculative_config:
        if draft.method not in ("ngram", "suffix"):
            yield Unsupported(
                f"speculative method {draft.method} is not supported yet, its draft layers would "
                "share the cache",
                f"use ngram or {INSTEAD}",
            )
        elif draft.num_speculative_tokens >= RECENT:
            yield Unsupported(
                f"num_speculative_tokens {draft.num_speculative_tokens} is too large",
                f"use less than {RECENT}: only accepted tokens may be sealed",
            )


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there; it is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as e:
        return e.strerror
    return None


def _memory() -> int:
    """Bytes of the GPU, or of the whole machine where the cache lies there."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return psutil.virtual_memory().total
    return current_platform.get_device_total_memory()


def _platform(config: VllmConfig) -> Iterator[Unsupported]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        yield Unsupported(f"no kernels for {current_platform.device_name}, only for CPU and CUDA")
        return
    try:
        require_capability(
            current_platform.get_device_name(), current_platform.get_device_capability()
        )
    except Unsupported as e:
        yield e
    if config.model_config.dtype not in CUDA_DTYPES:
        yield Unsupported(
            f"model dtype {config.model_config.dtype} is not supported on GPUs",
            "use --dtype bfloat16 or float16",
        )
    if (draft := config.speculative_config) and draft.num_speculative_tokens >= MAX_QUERIES:
        yield Unsupported(
            f"num_speculative_tokens {draft.num_speculative_tokens} is too large for the GPU "
            f"kernel, which decodes {MAX_QUERIES} tokens of a request at a time",
            f"use at most {MAX_QUERIES - 1}",
        )


def require_capability(gpu: str, capability: tuple[int, int] | None) -> None:
    """Raise Unsupported unless there are kernels for this GPU; ``s4kv doctor`` asks too."""
    if capability is None or tuple(capability) not in CAPABILITIES:
        have = "unknown" if capability is None else ".".join(map(str, capability))
        known = _list(".".join(map(str, c)) for c in CAPABILITIES)
        raise Unsupported(f"no kernels for {gpu} (compute capability {have}), only for {known}")


def model_problems(model: ModelConfig) -> Iterator[Unsupported]:
    """What only the model decides; ``s4kv plan`` asks too."""
    text = model.hf_text_config

    def has(*names: str) -> str | None:
        return next((n for n in names if getattr(text, n, None)), None)

    kinds = set(getattr(text, "layer_types", None) or ())
    if model.use_mla:
        yield Unsupported("MLA attention is not supported, it has one latent instead of K and V")
    if model.is_attention_free or model.is_hybrid:
        yield Unsupported("Mamba and hybrid models are not supported, they keep states, not keys")
    if model.is_encoder_decoder:
        yield Unsupported("cross-attention (encoder-decoder models) is not supported")
    if model.runner_type != "generate":
        yield Unsupported(f"it is for text generation, not for runner type {model.runner_type}")
    if model.is_mm_prefix_lm:
        yield Unsupported("bidirectional attention over a prefix is not supported")
    if model.attention_chunk_size is not None or "chunked_attention" in kinds:
        yield Unsupported("chunked-local attention is not supported")
    window = model.get_sliding_window()
    if "sliding_attention" in kinds or (window and not kinds):
        yield Unsupported(
            f"sliding-window attention is not supported (window {window}), "
            "a window's cache is small as it is"
        )
    if name := has("attn_logit_softcapping"):
        yield Unsupported(f"logit soft-capping is not supported ({name})")
    if model.hf_config.model_type in ("gpt_oss", "mimo_v2_flash", "laguna"):
        yield Unsupported(
            f"learned attention sinks ({model.hf_config.model_type}) are not supported"
        )
    if name := has("alibi", "use_alibi"):
        yield Unsupported(f"ALiBi is not supported ({name})")
    if model.hf_config.model_type in ("bloom", "mpt", "step1"):
        yield Unsupported(f"ALiBi is not supported ({model.hf_config.model_type})")
    if name := has("num_kv_shared_layers"):
        yield Unsupported(f"layers that share a KV cache are not supported ({name})")
    if (size := model.get_head_size()) not in HEAD_SIZES:
        yield Unsupported(f"head_dim {size} is not supported, only {_list(HEAD_SIZES)}")
    if model.dtype not in DTYPES:
        yield Unsupported(f"model dtype {model.dtype} is not supported, only {_list(DTYPES)}")


def _settings(config: VllmConfig) -> Iterator[Unsupported]:
    for what, remedy in settings.problems(settings.given(config)):
        yield Unsupported(what, remedy)  # what follows counts on the settings being sound
        return
    if path := settings.map_path(config):
        try:
            map_file.check(path, config.model_config)
        except map_file.BadMap as e:
            yield Unsupported(str(e), map_file.REMEDY)


def check_layer(*, head_size: int, attn_type: str, **options: Any) -> None:
    """Refuse what only a layer knows of itself; reached where ``check_config`` knew no better."""
    if head_size not in HEAD_SIZES:
        raise Unsupported(f"head_dim {head_size} is not supported, only {_list(HEAD_SIZES)}")
    if attn_type != "decoder":
        raise Unsupported(f"{attn_type} attention is not supported")
    for name, value in options.items():
        if value:
            raise Unsupported(f"attention with {name} is not supported")


def _list(items: Any) -> str:
    return " or ".join(str(x) for x in items)
