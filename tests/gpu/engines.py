"""Engines on a GPU, and models of random weights for them, so that nothing has to be downloaded.

The attention of such a model is broad and its values have no structure, which is the worst case for
four bits: in chunks of 2048 the CPU backend in float32 differs from a full-precision cache by 0.072
of the spread of the log-probabilities, in chunks of 256 by 0.139, and bf16 arithmetic by 0.016. The
limits leave room for bf16 on top.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

LAYERS, HIDDEN, VOCABULARY = 4, 1024, 2048
LIMIT = {2048: 0.10, 256: 0.18}  # of the spread, by chunk
DEFAULTS = {
    "skip_tokenizer_init": True,
    "max_model_len": 8192,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.2,
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    "kv_cache_dtype": "int4_kivi",
}


def config(dim: int = 128) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // dim,
        "num_key_value_heads": max(2, HIDDEN // dim // 4),
        "head_dim": dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def weights(dim: int = 128) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    heads, kv_heads = HIDDEN // dim, max(2, HIDDEN // dim // 4)

    def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5
        return x.bfloat16()

    found = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random(VOCABULARY, HIDDEN, gain=3.0),
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        found |= {
            p + "self_attn.q_proj.weight": random(heads * dim, HIDDEN, gain=1.6),
            p + "self_attn.k_proj.weight": random(kv_heads * dim, HIDDEN, gain=1.6),
            p + "self_attn.v_proj.weight": random(kv_heads * dim, HIDDEN),
            p + "self_attn.o_proj.weight": random(HIDDEN, heads * dim, gain=2.0),
            p + "mlp.gate_proj.weight": random(2 * HIDDEN, HIDDEN),
            p + "mlp.up_proj.weight": random(2 * HIDDEN, HIDDEN),
            p + "mlp.down_proj.weight": random(HIDDEN, 2 * HIDDEN),
            p + "input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        }
    return found


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


class Engines:
    """One engine at a time, in this process; asked for what is running, it gives that."""

    def __init__(self) -> None:
        self.running: Any = None
        self.key = ""

    def stop(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        if self.running is not None:
            self.running.llm_engine.engine_core.shutdown()
        self.running, self.key = None, ""
        gc.collect()
        cleanup_dist_env_and_memory()
        type(current_platform)._global_graph_pool = None  # torch has freed it with its last graph

    def __call__(self, model: str, **options: Any) -> Any:
        from vllm import LLM

        options = DEFAULTS | options
        key = json.dumps([model, options], sort_keys=True)
        if key != self.key or not pages_are_back(self.running):  # a test has failed
            self.stop()
            self.running = LLM(model, **options)
            self.key = key
        return self.running


def prompts(lengths: Any, seed: int = 0) -> list[dict[str, list[int]]]:
    g = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(10, VOCABULARY - 10, (n,), generator=g).tolist()}
        for n in lengths
    ]


def prompt_logprobs(out: Any) -> list[float]:
    ids = out.prompt_token_ids
    return [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], ids[1:])]


def forced(llm: Any, asked: Any, tokens: int = 1, **options: Any) -> torch.Tensor:
    """Log-probability of every prompt token. With more `tokens`, short requests decode while the
    prompts of long ones are computed."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    outs = llm.generate(asked, params, use_tqdm=False, **options)
    return torch.tensor([x for out in outs for x in prompt_logprobs(out)])


def leads(outs: Any, others: Any) -> list[float]:
    """Where two greedy texts of a prompt part: by how much the first's token was ahead, in nats.

    ``outs`` were generated with two or more logprobs. Texts of random weights part soon; numerics
    explain that where the lead is small.
    """
    found = []
    for out, other in zip(outs, others, strict=True):
        a, b = out.outputs[0], other.outputs[0].token_ids
        at = next((i for i, (x, y) in enumerate(zip(a.token_ids, b)) if x != y), None)
        if at is not None:
            best, second = sorted((x.logprob for x in a.logprobs[at].values()), reverse=True)[:2]
            found.append(best - second)
    print("leads where the texts part:", [f"{x:.2f}" for x in found])
    return found


def pool(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def pages_are_back(llm: Any) -> bool:
    return pool(llm).get_num_free_blocks() == pool(llm).num_gpu_blocks - 1
