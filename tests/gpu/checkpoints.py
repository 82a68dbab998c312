"""Variants of the random model of engines.py, written as the Hub's checkpoints are: AWQ and GPTQ
weights, a LoRA adapter, and a model whose text repeats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.gpu.engines import HIDDEN, LAYERS, VOCABULARY, config, weights, write

GROUP = 128
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight columns is in which nibble, lowest first
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
MODULES = [name for names in PROJECTIONS.values() for name in names]
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
             "sym": True, "lm_head": False, "checkpoint_format": "gptq"},
}  # fmt: skip


def nibbles(x: Tensor) -> Tensor:
    """Eight of the last dimension into one int32, the first one lowest."""
    x = x.unflatten(-1, (-1, 8)).long() << (4 * torch.arange(8))
    packed = x.sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def awq(weight: Tensor) -> dict[str, Tensor]:
    """weight [out, in], as (code - zero) * scale; packed along out."""
    w = weight.float().T.unflatten(0, (-1, GROUP))  # [groups, GROUP, out]
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    code = (w / scale + zero).round().clamp(0, 15).flatten(0, 1)

    def pack(x: Tensor) -> Tensor:
        return nibbles(x.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    return {"qweight": pack(code), "qzeros": pack(zero[:, 0]), "scales": scale[:, 0].half()}


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """weight [out, in], as (code - 8) * scale; packed along in, zeros stored less one."""
    w = weight.float().T.unflatten(0, (-1, GROUP))
    scale = w.abs().amax(1, keepdim=True) / 7.5
    code = (w / scale + 8).round().clamp(0, 15).flatten(0, 1)
    return {
        "qweight": nibbles(code.T).T.contiguous(),
        "qzeros": nibbles(torch.full_like(scale[:, 0], 7)),
        "scales": scale[:, 0].half(),
        "g_idx": (torch.arange(len(code)) // GROUP).int(),
    }


def write_quantised(folder: Path, method: str) -> str:
    found = {}
    for name, w in weights().items():
        if "_proj" in name:
            parts = {"awq": awq, "gptq": gptq}[method](w)
            found |= {name.removesuffix("weight") + k: v.contiguous() for k, v in parts.items()}
        else:
            found[name] = w
    return write(folder, config() | {"quantization_config": CONFIGS[method]}, found)


def write_adapter(folder: Path, rank: int = 8) -> str:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    g = torch.Generator().manual_seed(1)
    found, base = {}, weights()
    for i in range(LAYERS):
        for part, names in PROJECTIONS.items():
            for name in names:
                path = f"model.layers.{i}.{part}.{name}"
                out, size = base[path + ".weight"].shape
                a = torch.randn(rank, size, generator=g) / size**0.5
                b = torch.randn(out, rank, generator=g) * 0.1
                prefix = f"base_model.model.{path}.lora_"
                found |= {prefix + "A.weight": a.bfloat16(), prefix + "B.weight": b.bfloat16()}
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
                "target_modules": MODULES, "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


CYCLE = 16


def write_echo(folder: Path, strength: float = 1.2) -> str:
    """Its likeliest next token is mostly the next of a cycle of CYCLE ids, so its text repeats."""
    found = weights()
    embed = found["model.embed_tokens.weight"].float()
    t = torch.arange(VOCABULARY)
    after = t // CYCLE * CYCLE + (t + 1) % CYCLE
    head = found["lm_head.weight"].float()
    head[after] += strength * embed / embed.norm(dim=1, keepdim=True)
    found["lm_head.weight"] = head.bfloat16()
    assert embed.shape[1] == HIDDEN
    return write(folder, config(), found)


def cycle(start: int, tokens: int) -> list[int]:
    return [start + i % CYCLE for i in range(tokens)]
