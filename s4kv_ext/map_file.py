"""Channel maps in a file: safetensors, one tensor ``slot_channel`` [layers, H, S] int16.

H is all KV heads of the model, whatever the number of ranks that made it. The metadata says which
model the map is of, and what made it:

    format, format_version    "int4_kivi channel map", format.FORMAT_VERSION
    model, revision, weights  the name it was called by, and ``identity.py``
    layers, kv_heads, head_dim
    hash                      of the map itself: equal maps have equal hashes
    tokens                    how many tokens of text chose it
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from s4kv_ext.format import FORMAT_VERSION, key_slots
from s4kv_ext.identity import Identity

if TYPE_CHECKING:
    from vllm.config import ModelConfig

KIND = "int4_kivi channel map"
TENSOR = "slot_channel"
REMEDY = 'write a new one with `s4kv calibrate`, or leave out "map"'


class BadMap(ValueError):
    """The file is no channel map, or one of something else; one line, REMEDY says what to do."""


@dataclass(frozen=True)
class Shape:
    """Of a model as a whole, not of one rank."""

    layers: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.kv_heads} KV heads, head_dim {self.head_dim}"


@dataclass(frozen=True)
class MapFile:
    """slot_channel [layers, H, S] int16."""

    slot_channel: Tensor
    head_dim: int
    identity: Identity
    tokens: int

    @property
    def hash(self) -> str:
        return digest(self.slot_channel)

    @property
    def shape(self) -> Shape:
        layers, kv_heads, _ = self.slot_channel.shape
        return Shape(layers, kv_heads, self.head_dim)

    def of_rank(self, rank: int, ranks: int) -> list[Tensor]:
        """The layers' maps [H, S] for the KV heads of one tensor-parallel rank."""
        return list(self.slot_channel[:, heads_of_rank(self.shape.kv_heads, rank, ranks)])


def heads_of_rank(kv_heads: int, rank: int, ranks: int) -> slice:
    """As vLLM's QKVParallelLinear gives them out: with more ranks than heads they are copied."""
    own = max(1, kv_heads // ranks)
    first = rank // max(1, ranks // kv_heads) * own
    return slice(first, first + own)


def of_all_ranks(ranks: list[list[Tensor]], kv_heads: int) -> list[Tensor]:
    """The layers' maps of all heads, from those of each rank: the inverse of ``of_rank``.

    A head that several ranks hold is taken once, unless they have other maps for it.
    """
    layers = []
    for parts in zip(*ranks, strict=True):
        whole = torch.cat(parts)
        copies = whole.unflatten(0, (-1, max(1, len(whole) // kv_heads)))
        same = bool((copies == copies[:, :1]).all())
        layers.append(copies[:, 0] if same else whole)
    return layers


def digest(layers: Iterable[Tensor]) -> str:
    """16 hex digits of the values of a map, given by layers, or as one tensor."""
    h = hashlib.sha256()
    for slot_channel in layers:
        h.update(slot_channel.contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def shape_of(model: ModelConfig) -> Shape:
    return Shape(
        model.get_total_num_hidden_layers(),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )


def write(path: Path, file: MapFile) -> None:
    """Whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    about = {
        "format": KIND,
        "format_version": FORMAT_VERSION,
        **vars(file.identity),
        **vars(file.shape),
        "hash": file.hash,
        "tokens": file.tokens,
    }
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(
            {TENSOR: file.slot_channel.contiguous()},
            fresh,
            metadata={name: str(value) for name, value in about.items()},
        )
        fresh.replace(path)
    except SafetensorError as e:  # what the system said, such as no space
        raise OSError(f"cannot write {path}: {e}") from None
    finally:
        fresh.unlink(missing_ok=True)


def read(path: str | Path) -> MapFile:
    """Raises BadMap if it is not a channel map of this format, whole and sound."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            about, names = f.metadata() or {}, list(f.keys())
            slot_channel = f.get_tensor(TENSOR) if TENSOR in names else None
    except FileNotFoundError:
        raise BadMap(f"there is no channel map {path}") from None
    except (OSError, SafetensorError) as e:
        raise BadMap(f"the channel map {path} cannot be read ({e})") from None
    if about.get("format") != KIND or slot_channel is None:
        raise BadMap(f"{path} is no channel map")
    if (version := about.get("format_version")) != str(FORMAT_VERSION):
        raise BadMap(
            f"the channel map {path} has format version {version}, this release has "
            f"{FORMAT_VERSION}"
        )
    try:
        file = MapFile(
            slot_channel,
            int(about["head_dim"]),
            Identity(about["model"], about["revision"], about["weights"]),
            int(about["tokens"]),
        )
        check_values(file)
        if file.hash != about["hash"]:
            raise ValueError("its hash is another")
    except (KeyError, ValueError) as e:
        raise BadMap(f"the channel map {path} is damaged ({e})") from None
    return file


def check_values(file: MapFile) -> None:
    """What the kernels rely on; raises ValueError."""
    m = file.slot_channel
    if m.dtype != torch.int16 or m.ndim != 3 or m.shape[2] != key_slots(file.head_dim):
        raise ValueError(f"{m.dtype} {list(m.shape)} for head_dim {file.head_dim}")
    if not m.numel():
        raise ValueError("it is empty")
    if m.min() < 0 or m.max() >= file.head_dim:
        raise ValueError("a channel is out of range")
    if (m.diff() < 0).any() or (m[..., 2:] == m[..., :-2]).any():
        raise ValueError("channels are not in order, or have more than two slots")


def check(path: str, model: ModelConfig) -> None:
    """Raise BadMap unless the file is a map of this very model; reads a few MiB of its weights."""
    file, wanted = read(path), shape_of(model)
    if file.shape != wanted:
        raise BadMap(
            f"the channel map {path} is of {file.identity.model} with {file.shape}, "
            f"the model has {wanted}"
        )
    if why := file.identity.differs(Identity.of(model)):
        raise BadMap(f"the channel map {path} is of {file.identity.model}, {why}")
