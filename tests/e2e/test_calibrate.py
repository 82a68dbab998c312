"""`s4kv calibrate` and an engine that takes its map."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from s4kv_ext import calibrate, channel_map, map_file

TOKENS = 256
TEXT = Path(__file__).parents[2] / "LICENSE"
BIN = Path(sys.executable).parent
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def made(model_path, tmp_path_factory):
    """The command's output, and the file that it wrote."""
    out = tmp_path_factory.mktemp("calibrate") / "map.safetensors"
    command = [BIN / "s4kv", "calibrate", model_path(), "--text", TEXT, "-o", out]
    command += ["--tokens", TOKENS, "--dtype", "float32"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=ENV, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done, out


def runner(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def maps(llm) -> torch.Tensor:
    """[layers, H, S] as the layers have it."""
    layers = calibrate.layers(llm.llm_engine.vllm_config)
    return torch.stack([impl.slot_channel for impl in layers])


def chosen_by(llm, ids: list[int]) -> torch.Tensor:
    return torch.stack([channel_map.allocate(w) for w in calibrate.weigh(runner(llm), [ids])])


def text_ids(llm, tokens: int, skip: int = 0) -> list[int]:
    return llm.get_tokenizer()(TEXT.read_text())["input_ids"][skip : skip + tokens]


def logprobs(llm) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    ids = text_ids(llm, 700, skip=1000)
    (out,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
    return [
        entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)
    ]


def test_it_says_what_it_wrote(made):
    done, out = made
    file = map_file.read(out)
    last = done.stdout.strip().splitlines()[-1]
    print(last)
    assert last == f"{out}: 30 layers, 3 KV heads, head_dim 64, {TOKENS} tokens, hash {file.hash}"
    assert file.identity.model == "smollm2" and len(file.identity.weights) == 16
    assert f"{TOKENS} tokens: " in done.stderr  # progress


def test_a_map_is_what_calibrating_gives(made, start_engine):
    """Every start chooses the same; a file's map is used, and counts."""
    file = map_file.read(made[1])
    options = {"max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 1}
    llm = start_engine(**options)
    default, by_default = maps(llm), logprobs(llm)
    for impl, row in zip(
        calibrate.layers(llm.llm_engine.vllm_config), chosen_by(llm, text_ids(llm, TOKENS))
    ):
        impl.slot_channel = row
    again, by_calibrating = maps(llm), logprobs(llm)
    print(f"hash of the file {file.hash}, chosen again {map_file.digest(again)}")
    assert map_file.digest(again) == file.hash

    llm = start_engine(**options, additional_config={"int4_kivi": {"map": str(made[1])}})
    by_file = logprobs(llm)
    difference = max(abs(a - b) for a, b in zip(by_file, by_calibrating, strict=True))
    from_default = max(abs(a - b) for a, b in zip(by_file, by_default, strict=True))
    print(f"|dlogp| beside calibrating {difference:.1e}, beside the default {from_default:.1e}")
    assert torch.equal(maps(llm), file.slot_channel)
    assert difference < 1e-4 < from_default
    random = chosen_by(llm, calibrate.random_ids(llm.llm_engine.vllm_config))
    assert torch.equal(random, default)


def test_map_of_another_model_is_refused(made, model_path):
    """The other has the same shapes; it is told before any weights load."""
    command = [BIN / "vllm", "serve", model_path("smollm2-outlier"), "--dtype", "float32"]
    command += ["--kv-cache-dtype", "int4_kivi"]
    command += ["--additional-config", f'{{"int4_kivi": {{"map": "{made[1]}"}}}}']
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=ENV, timeout=900
    )
    last = done.stderr.strip().splitlines()[-1]
    print(last)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is of smollm2, and smollm2-outlier has other weights; write a new one" in last
    assert "Loading safetensors" not in done.stdout + done.stderr
