"""Everything but the KV cache must be equal on all sides: read from the servers themselves.

vLLM tells its whole configuration at /server_info in development mode, which servers started here
are in. Of other servers we have /v1/models, /version and the cache configuration in /metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from s4kv_ext.compare.client import Client

# What the dtype itself decides, and names of an instance.
MAY_DIFFER = re.compile(
    r"cache\.(cache_dtype|block_size|hash_block_size|num_gpu_blocks|num_cpu_blocks"
    r"|kv_cache_size_tokens|kv_cache_max_concurrency|calculate_kv_scales|engine"
    r"|_?\w*block_size\w*)"
    r"|config\.(instance_id|additional_config\.int4_kivi.*|attention_config\.backend"
    r"|compilation_config\.\w*(hash|cache_dir|time)\w*|\w+\.\w*(port|ports)\w*"
    r"|model_config\.served_model_name)"
    r"|env\.VLLM_(OBJECT_STORAGE_SHM_BUFFER_NAME|HOST_IP|PORT|DP_MASTER_\w+)"
)
SECRET = re.compile(r"token$|key$|password", re.IGNORECASE)


class Unequal(ValueError):
    """The sides would not be compared under the same conditions."""


def flat(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}")
    elif not SECRET.search(prefix):
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree)


def read(client: Client) -> dict[str, Any]:
    """What a server tells about itself: ``conditions`` by name, and what else is of use."""
    model = client.json("/v1/models")["data"][0]
    scrape = client.scrape()
    cache = scrape.cache_info()
    if not cache:
        raise ValueError(f"{client.url}/metrics has no vllm:cache_config_info: is it vLLM?")
    told = dict(flat(cache, "cache"))
    # An own name is not a condition, the folder or the hub name behind it is.
    told |= {"model": str(model.get("root")), "max_model_len": str(model.get("max_model_len"))}
    told["version"] = str(client.json("/version").get("version"))
    told["engines"] = str(scrape.engines())
    info = client.get("/server_info?config_format=json")
    whole = info.ok
    if whole:
        config = info.json()
        told |= dict(flat(config["vllm_config"], "config"))
        told |= dict(flat(config.get("vllm_env", {}), "env"))
    return {
        "model": model["id"],
        "root": model.get("root"),
        "max_model_len": int(model["max_model_len"]),
        "dtype": cache["cache_dtype"],
        "cache": cache,
        "engines": scrape.engines(),
        "whole": whole,
        "chunk": told.get("config.scheduler_config.max_num_batched_tokens"),
        "max_num_seqs": told.get("config.scheduler_config.max_num_seqs"),
        "conditions": told,
    }


def comparable(conditions: dict[str, str]) -> dict[str, str]:
    return {
        k: v
        for k, v in conditions.items()
        if not MAY_DIFFER.fullmatch(k) and not k.startswith("config.cache_config.")
    }  # the cache configuration is compared once, as /metrics tells it


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Each condition that is not equal, as a line."""
    x, y = comparable(a["conditions"]), comparable(b["conditions"])
    if not (a["whole"] and b["whole"]):  # only what both tell
        names = {"model", "max_model_len", "version", "engines"}
        x, y = ({k: v for k, v in c.items() if k in names or k[:6] == "cache."} for c in (x, y))
    keys = sorted(x.keys() | y.keys())
    return [
        f"{k}: {x.get(k, 'not set')[:80]} | {y.get(k, 'not set')[:80]}"
        for k in keys
        if x.get(k) != y.get(k)
    ]


def require_equal(names: tuple[str, str], a: dict[str, Any], b: dict[str, Any]) -> None:
    if wrong := differences(a, b):
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise Unequal(
            f"{names[0]} and {names[1]} differ in more than the KV cache: {'; '.join(wrong[:6])}"
            f"{more}; start both servers with the same flags but --kv-cache-dtype"
        )


def digest(conditions: dict[str, str]) -> str:
    """Equal where all compared conditions are equal."""
    text = json.dumps(comparable(conditions), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:12]
