"""Bytes of a model's weights on one GPU, without loading any.

If the folder has safetensors, their headers tell; else the model's architecture is built from its
config without memory, and the quantisation that the config names is applied to the matrices of the
layers. Tensor parallelism splits matrices and repeats vectors; key and value projections are split
over no more GPUs than there are KV heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FLOATS = {"F32", "F16", "BF16"}
EMBEDDING = re.compile(r"(embed_tokens|wte|embedding)\b")


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True)
class Weights:
    """gpu: bytes on each GPU. step: bytes that each GPU reads of them in a decode step: all but an
    embedding table that is not the output matrix too. parameters: None if they are packed."""

    gpu: int
    step: int
    parameters: int | None
    source: str


def of(model: ModelConfig, folder: Path, gpus: int) -> Weights:
    """The weights of ``model`` split over ``gpus`` GPUs."""
    tensors = list(_stored(model, folder))
    source = "from the safetensors"
    if not tensors:
        tensors, source = list(_built(model)), "from the config"
    quantised = _quantisation(model) is not None
    kv_heads = model.get_total_num_kv_heads()
    tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
    gpu = step = 0.0
    for t in tensors:
        share = t.nbytes / _parts(t, gpus, kv_heads)
        gpu += share
        if tied or not EMBEDDING.search(t.name):
            step += share
    count = None if quantised and source.endswith("safetensors") else sum(map(_size, tensors))
    return Weights(int(gpu), int(step), count, source)


def _size(tensor: Tensor) -> int:
    n = 1
    for side in tensor.shape:
        n *= side
    return n


def _parts(tensor: Tensor, gpus: int, kv_heads: int) -> int:
    if len(tensor.shape) < 2:
        return 1
    if re.search(r"\b[kv]_proj\b", tensor.name):
        return min(gpus, kv_heads)
    return gpus


def _stored(model: ModelConfig, folder: Path) -> Iterator[Tensor]:
    """The tensors of the folder's safetensors; floats are converted to the model's dtype."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: Iterable[str] = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
        if missing := [f for f in files if not f.is_file()]:
            raise ValueError(f"{missing[0]} is missing: finish the download of the model")
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    converted = _quantisation(model) is None
    for file in files:
        with file.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            tensor = Tensor(name, tuple(entry["shape"]), end - start)
            if converted and entry["dtype"] in FLOATS:
                tensor = Tensor(name, tensor.shape, _size(tensor) * model.dtype.itemsize)
            yield tensor


def _built(model: ModelConfig) -> Iterator[Tensor]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    bits = _quantisation(model)
    built = None
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                built = kind.from_config(model.hf_config)
            break
        except (ValueError, AttributeError, KeyError, TypeError):
            continue
    if built is None:
        raise ValueError(
            f"the weights of {model.hf_config.model_type} cannot be counted from its config: "
            "give a folder that has its safetensors too"
        )
    for name, p in built.named_parameters():
        packed = bits is not None and p.ndim >= 2 and ".layers." in name
        width = bits / 8 if packed and bits is not None else model.dtype.itemsize
        yield Tensor(name, tuple(p.shape), p.numel() * width)


def _quantisation(model: ModelConfig) -> float | None:
    """Bits of a weight in the layers' matrices, scales counted; None if they are not quantised.

    Groups of int4 weights have a float16 scale and a zero point as wide as a weight each.
    """
    config: dict[str, Any] | None = getattr(model.hf_config, "quantization_config", None)
    if not config:
        return None
    method = config.get("quant_method", "")
    bits, group = 0, 0
    if method in ("awq", "gptq"):
        bits, group = config.get("bits", 4), config.get("group_size", 128)
    elif method in ("fp8", "fbgemm_fp8"):
        bits = 8
    elif method == "compressed-tensors":
        scheme = next(iter(config["config_groups"].values()))["weights"]
        bits, group = scheme["num_bits"], scheme.get("group_size") or 0
    elif method == "bitsandbytes":
        bits, group = (4, 64) if config.get("load_in_4bit") else (8, 0)
    if not bits:
        raise ValueError(
            f"weights quantised by {method or 'an unnamed method'} cannot be counted from the "
            "config: give a folder that has the safetensors too"
        )
    return bits + (16 + bits) / group if group > 0 else bits
