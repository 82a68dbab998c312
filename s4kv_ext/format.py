"""The int4_kivi cache format: every size, and the one boundary, are defined here.

Each attention layer has two kinds of pages of equal size in one pool:

``sealed``  one page holds BLOCK tokens of every KV head in int4. Keys are quantised per channel
            over the block, values per token after a Hadamard rotation.
``recent``  one page holds as many tokens as fit, in the model's dtype: the first SINKS tokens of
            a sequence, and everything that is not sealed yet.

Which tokens are sealed follows from the computed length alone: ``sealed_tokens``.

Slotted keys
    A block has ``key_slots(head_dim)`` int4 slots a token and KV head. A channel owns none, one or
    two of them (``channel_map.py``). Reading a key back is one sum:

        key[token, c] = 2**key_exponent * (key_offset[c] + sum over the slots s of c of
                                           key_scale[s] * key_code[token, s])

    The second slot of a channel is the low nibble of an 8-bit code and its scale is 1/16 of the
    first's; a channel without a slot is its block mean. An unused slot has channel -1, scale 0.

Values
        rotated[token, j] = value_offset[token] + value_scale[token] * value_code[token, j]
        value[token]      = 2**value_exponent / head_dim * hadamard(rotated[token])

    ``hadamard`` is the unnormalised transform, so both factors are exact powers of two.

Sinks
    The first SINKS tokens are always read from the recent pages that hold them. Block 0 is
    quantised as if each of them had the key and value of token SINKS, so that they do not widen
    anybody's range.

Numbers
    Scales and offsets are float16. Each end of the range from the least to the largest, lo and hi,
    stays or moves by 0.3 (hi - lo) / steps, whichever errs least; then offsets are rounded down and
    scales up. So no end is further than half a step from a code, and nothing is clipped.
    The two exponents (int8, one pair a page and head) first bring the largest magnitude of the
    block into [16, 32): any finite float32 input comes back finite, with

        |error| <= scale/2
        scale <= ((hi - lo) (1 + 0.61/steps) + 2**-10 |lo|) / steps * (1 + 2**-10) + 2**-23 u

    where steps is 15 or 255 and u = 2**key_exponent; a channel without a slot errs by hi - lo and
    what rounding its mean to float16 adds. hi and lo are those of a key channel in the block. For a
    value they are those of the rotated token and steps is 15: scale/2 bounds each rotated entry,
    and thereby each entry of the value. A constant comes back exactly, but for float16's rounding.

Bytes of one head of a sealed page, in this order (``packing.py`` orders the codes within):

    key_code      BLOCK * key_slots / 2
    key_scale     key_slots * 2
    key_offset    head_dim * 2
    value_code    BLOCK * head_dim / 2
    value_scale   BLOCK * 2
    value_offset  BLOCK * 2
    exponents     32: int8 key_exponent, int8 value_exponent, 30 bytes of zero
"""

from __future__ import annotations

import itertools

import torch

KV_CACHE_DTYPE = "int4_kivi"
FORMAT_VERSION = 1

BLOCK = 64
"""Tokens in a sealed page."""
RECENT = 64
"""The newest tokens of a sequence, at least, that are in the model's dtype."""
SINKS = 16
"""The first tokens of a sequence; they stay in the model's dtype."""
EXTRA_SLOTS = 16
"""Key slots beyond one a channel."""
HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_PAD = 32  # keeps every head's part of a page 32-byte aligned


def key_slots(head_dim: int) -> int:
    """int4 key slots a token and KV head."""
    return head_dim + EXTRA_SLOTS


def sections(head_dim: int) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each section of one head's part of a sealed page."""
    slots = key_slots(head_dim)
    sizes = {
        "key_code": BLOCK * slots // 2,
        "key_scale": slots * 2,
        "key_offset": head_dim * 2,
        "value_code": BLOCK * head_dim // 2,
        "value_scale": BLOCK * 2,
        "value_offset": BLOCK * 2,
        "exponents": _PAD,
    }
    ends = list(itertools.accumulate(sizes.values()))
    return {name: (end - sizes[name], sizes[name]) for name, end in zip(sizes, ends, strict=True)}


def head_page_bytes(head_dim: int) -> int:
    """Bytes one KV head takes of a page: 5184 at head_dim 64, 9536 at 128."""
    return sum(sections(head_dim)["exponents"])


def recent_page_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens in a recent page: the largest power of two that fits, 16 in bf16 and 8 in fp32."""
    fit = head_page_bytes(head_dim) // (2 * head_dim * dtype.itemsize)
    return min(SINKS, 1 << (fit.bit_length() - 1))


def sealed_tokens(num_computed: int) -> int:
    """How many leading tokens are sealed once ``num_computed`` tokens are computed."""
    return max(0, (num_computed - RECENT) // BLOCK * BLOCK)
