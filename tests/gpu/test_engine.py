"""int4_kivi in the engine on a GPU: the same model with a full-precision cache is the judge.

The model has random weights, so nothing has to be downloaded. Its attention is broad and its values
have no structure, which is the worst case for four bits: in chunks of 2048 the CPU backend in
float32 differs from a full-precision cache by 0.072 of the spread of the log-probabilities, in
chunks of 256 by 0.139, and bf16 arithmetic by 0.016. The limits leave room for bf16 on top.
"""

from __future__ import annotations

import gc
import json
import os

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LAYERS, HIDDEN, VOCABULARY = 4, 1024, 2048


@pytest.fixture(scope="module", params=[128, 64], ids=lambda d: f"head_dim{d}")
def model(request, tmp_path_factory):
    from safetensors.torch import save_file

    dim, folder = request.param, tmp_path_factory.mktemp("model")
    heads, kv_heads = HIDDEN // dim, max(2, HIDDEN // dim // 4)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(dim)

    def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5
        return x.bfloat16()

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random(VOCABULARY, HIDDEN, gain=3.0),
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        weights |= {
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
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def start():
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    running = []

    def stop() -> None:
        while running:
            running.pop().llm_engine.engine_core.shutdown()
            gc.collect()
            cleanup_dist_env_and_memory()

    def start(model: str, **options):
        stop()
        defaults = {
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 32,
            "gpu_memory_utilization": 0.2,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
            "kv_cache_dtype": "int4_kivi",
        }
        running.append(LLM(model, **(defaults | options)))
        return running[-1]

    yield start
    stop()


def prompts(lengths, seed: int = 0) -> list[dict]:
    g = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(10, VOCABULARY - 10, (n,), generator=g).tolist()}
        for n in lengths
    ]


def forced(llm, lengths) -> torch.Tensor:
    """Log-probability of every prompt token."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    out = []
    for p, o in zip(prompts(lengths), llm.generate(prompts(lengths), params, use_tqdm=False)):
        ids = p["prompt_token_ids"]
        out += [e[t].logprob for e, t in zip(o.prompt_logprobs[1:], ids[1:])]
    return torch.tensor(out)


def greedy(llm, lengths, tokens: int = 200) -> list[list[int]]:
    """Twice: the second time through prefix hits, where the pool was large enough to keep all."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    outs = [llm.generate(prompts(lengths), params, use_tqdm=False) for _ in range(2)]
    hits = [o.num_cached_tokens for o in outs[1]]
    assert all(h in (0, max(0, n - 65) // 64 * 64) for h, n in zip(hits, lengths)), hits
    return [list(o.outputs[0].token_ids) for out in outs for o in out]


def pages_are_back(llm) -> bool:
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


LENGTHS = (1, 15, 63, 65, 129, 200, 1000, 3001, 5000)


def test_forced_logprobs_and_text(model, start):
    """Chunks of 2048 and of 256 beside a bf16 cache; graphs beside eager."""
    want = forced(start(model, kv_cache_dtype="auto"), LENGTHS)
    for chunk, limit in ((2048, 0.10), (256, 0.18)):
        llm = start(model, max_num_batched_tokens=chunk)
        got = forced(llm, LENGTHS)
        error = (got - want).abs().mean().item()
        spread = want.std().item()
        print(f"chunk {chunk}: |dlogp| {error:.4f} of a spread of {spread:.3f}")
        assert error < limit * spread
        graphs = greedy(llm, LENGTHS)
        assert pages_are_back(llm)
    eager = greedy(start(model, max_num_batched_tokens=256, enforce_eager=True), LENGTHS)
    same = [sum(a == b for a, b in zip(x, y)) / len(x) for x, y in zip(graphs, eager)]
    print("tokens equal, graphs and eager:", [f"{x:.2f}" for x in same])
    assert sum(same) / len(same) > 0.9


def test_many_requests_and_preemption(model, start):
    """A pool for a few of 32 requests: all end, pages come back, the log-probabilities hold."""
    lengths = [300 + 37 * i for i in range(32)]
    want = forced(start(model, kv_cache_dtype="auto"), lengths)
    llm = start(model, num_gpu_blocks_override=200, max_num_batched_tokens=512, max_model_len=2048)
    assert all(len(x) == 200 for x in greedy(llm, lengths[:8]))
    error = (forced(llm, lengths) - want).abs().mean().item()
    print(f"|dlogp| {error:.4f} of a spread of {want.std().item():.3f}")
    assert error < 0.18 * want.std().item()
    assert pages_are_back(llm)
