"""What int4_kivi cannot do is refused before weights load, in one line that names a way out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from shapes import (
    BERT,
    BLOOM,
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    JAMBA,
    LLAMA,
    LLAMA4_LIKE,
    MAMBA,
    MISTRAL,
    QWEN2,
    QWEN3,
    WHISPER,
    model,
)


def create(path: str, **options):
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "kv_cache_dtype": "int4_kivi"} | options
    return EngineArgs(
        path, skip_tokenizer_init=True, load_format="dummy", **options
    ).create_engine_config()


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, MISTRAL], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_accepted(tmp_path, config, dtype):
    config = create(model(tmp_path, config), dtype=dtype)
    assert config.cache_config.cache_dtype == "int4_kivi"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *((LLAMA | {"head_dim": d}, f"head_dim {d} ") for d in (40, 80, 96, 112, 120, 256)),
        (MISTRAL | {"sliding_window": 1024}, "sliding-window"),
        (GEMMA2, "sliding-window"),
        (GEMMA2 | {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "soft-capping"),
        (GEMMA3, "sliding-window"),
        (GPT_OSS, "sliding-window"),
        (GPT_OSS | {"layer_types": ["full_attention"] * 2}, "learned attention sinks"),
        (DEEPSEEK, "MLA"),
        (MAMBA, "Mamba"),
        (JAMBA, "hybrid"),
        (WHISPER, "cross-attention"),
        (BLOOM, "ALiBi"),
        (LLAMA4_LIKE, "chunked-local"),
        (BERT, "text generation"),
    ],
    ids=lambda x: f"{x['model_type']}" if isinstance(x, dict) else x.strip().replace(" ", "-"),
)
def test_model_refused(tmp_path, config, words):
    from s4kv_ext.checks import Unsupported

    with pytest.raises(Unsupported) as e:
        create(model(tmp_path, config))
    print(e.value)
    assert words in str(e.value)
    assert "; use " in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"block_size": n}, f"--block-size {n}") for n in (1, 8, 16, 32, 128)),
        ({"attention_backend": "FLASH_ATTN"}, "backend FLASH_ATTN"),
        ({"attention_backend": "CPU_ATTN"}, "backend CPU_ATTN"),
        ({"kv_cache_dtype_skip_layers": ["0", "1"]}, "--kv-cache-dtype-skip-layers"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "OffloadingConnector",
        ),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        (
            {"kv_cache_memory_bytes": 1 << 60},
            "--kv-cache-memory-bytes asks for 1073741824 GiB and there are ",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 64,
                    "prompt_lookup_max": 4,
                }
            },
            "num_speculative_tokens 64",
        ),
        ({"additional_config": {"int4_kivi": {"keys": "rotated"}}}, "keys='rotated'"),
        ({"additional_config": {"int4_kivi": {"key": "plain"}}}, "key='plain'"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else x.strip("-").replace(" ", "-"),
)
def test_option_refused(tmp_path, options, words):
    from s4kv_ext.checks import Unsupported

    with pytest.raises(Unsupported) as e:
        create(model(tmp_path, LLAMA), **options)
    print(e.value)
    assert words in str(e.value)
    assert "; " in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("options", [{"block_size": 64}, {"attention_backend": "INT4_KIVI"}])
def test_option_accepted(tmp_path, options):
    create(model(tmp_path, LLAMA), **options)


@pytest.mark.parametrize("where", ["/proc/nowhere", "file/below"])
def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, where):
    """Said before weights load, not by a worker's stack trace when it compiles."""
    from s4kv_ext.checks import Unsupported

    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / where))
    with pytest.raises(Unsupported, match="set VLLM_CACHE_ROOT") as e:
        create(model(tmp_path, LLAMA))
    assert str(tmp_path / where) in str(e.value) and "\n" not in str(e.value)
    create(model(tmp_path, LLAMA), enforce_eager=True)


def test_others_are_not_checked(tmp_path):
    config = create(model(tmp_path, LLAMA | {"head_dim": 80}), kv_cache_dtype="auto", block_size=32)
    assert config.cache_config.cache_dtype == "auto"


def test_command_line_ends_in_one_line(tmp_path):
    """`vllm serve` says it in one line and exits with 1; nothing is left running."""
    path = model(tmp_path, LLAMA | {"head_dim": 80})
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        path,
        "--skip-tokenizer-init",
    ]
    run = subprocess.run(
        [*command, "--kv-cache-dtype", "int4_kivi", "--load-format", "dummy"],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        timeout=600,
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    print(last)
    assert "error: --kv-cache-dtype int4_kivi: head_dim 80 is not supported" in last
    assert "Traceback" not in run.stderr
