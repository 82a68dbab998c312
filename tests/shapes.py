"""Config shapes of model families, small, for engines with dummy weights or none."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 128}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MISTRAL |= {"sliding_window": None}
GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "sliding_window": 1024,
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "sliding_window": 128,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "state_size": 16,
}
JAMBA = LLAMA | {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 256,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 1000,
}
LLAMA4_LIKE = LLAMA | {"attention_chunk_size": 1024}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}


def model(folder: Path, config: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
