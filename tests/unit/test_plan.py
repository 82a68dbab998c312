"""`s4kv plan` says what the engine will: its pages exactly, a GPU's memory within 3 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from schedules import Settings, make_config
from shapes import GEMMA3, JAMBA, LLAMA, QWEN2, model
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from s4kv_ext import models
from s4kv_ext.cuda_backend import workspace_bytes
from s4kv_ext.plan import cache, cli, gpus, memory, report, sizing, weights
from s4kv_ext.plan.gpus import GIB, GPUS, INSTANCES, Machine
from s4kv_ext.plan.memory import Limits
from s4kv_ext.specs import recent_spec, sealed_spec

BENCH = Path(__file__).parents[2] / "bench"
RECORDED = {p: json.loads(p.read_text()) for p in sorted(BENCH.glob("results/engine_*.json"))}
ON_GPU = [p for p, run in RECORDED.items() if "gpu" in run["machine"]]
SHAPES = sorted(p.parent for p in BENCH.glob("models/*/config.json"))
BF16_LLAMA = LLAMA | {"torch_dtype": "bfloat16"}


def test_a_model_of_our_own_is_known_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("S4KV_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "smollm2"
    with pytest.raises(FileNotFoundError, match=rf"make serve MODEL=smollm2.* in {folder}$"):
        models.named(Path("smollm2"))
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert models.named(Path("smollm2")) == folder
    for other in ("/a/smollm2", "other"):
        assert models.named(Path(other)) == Path(other)
    (tmp_path / "smollm2").mkdir()
    assert models.named(Path("smollm2")) == Path("smollm2")


def engine_length(run: dict) -> int:
    """About max_model_len of a recorded run: the longest cell, and the tokens it decodes."""
    return max(max(map(int, name.split("x"))) for name in run["cells"]) + run["steps"] + 8


@pytest.mark.parametrize("path", ON_GPU, ids=lambda p: p.stem)
def test_kv_tokens_of_the_recorded_gpu_runs(path):
    """bench/one_engine.py: utilization 0.85, 256 sequences, dummy weights.

    The Qwen2.5-7B shape fixed memory.FIXED, so of it only the dtypes' ratios are put to the test.
    """
    run = RECORDED[path]
    folder = BENCH / "models" / run["model"]
    config = sizing.load(folder).config
    gpu = GPUS[run["machine"]["gpu"].split()[1]]
    limits = Limits(0.85, run["chunk"], 256)
    held = weights.of(config, folder, 1)
    left = memory.for_cache(gpu.memory, held.gpu, memory.activations(config, limits, 1), limits)
    recorded = {d: n for d, n in run["kv_tokens"].items() if d in cache.DTYPES}
    for dtype, tokens in recorded.items():
        room = left - (workspace_bytes(gpu.memory) if dtype == "int4_kivi" else 0)
        said = cache.make(config, dtype).reported_tokens(room, engine_length(run))
        print(f"{run['model']:14} {dtype:10} said {said:,}, recorded {tokens:,}")
        assert said == pytest.approx(tokens, rel=0.03)
    assert recorded


def test_kv_tokens_of_the_recorded_cpu_run(tmp_path):
    """SmolLM2-135M in float32, 6 GiB: there the cache's bytes are given."""
    run = RECORDED[BENCH / "results" / "engine_cpu.json"]
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = sizing.load(
        Path(model(tmp_path, LLAMA | smollm2 | {"hidden_size": 576})), "float32"
    ).config
    for dtype in ("auto", "int4_kivi"):
        kv = cache.make(config, dtype, block_size=128)  # vLLM's default on a CPU
        said = kv.reported_tokens(6 << 30, engine_length(run))
        print(f"{dtype} said {said:,}, recorded {run['kv_tokens'][dtype]:,}")
        assert said == pytest.approx(run["kv_tokens"][dtype], rel=1e-3)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("nbytes", [100 << 20, (1 << 30) + 12345])
@pytest.mark.parametrize("dtype", cache.DTYPES)
def test_what_the_engine_reports(tmp_path, dtype, nbytes, heads):
    """vLLM's own arithmetic over the same specs, for several lengths."""
    shape = QWEN2 | {"num_key_value_heads": heads, "torch_dtype": "bfloat16"}
    kv = cache.make(sizing.load(Path(model(tmp_path, shape))).config, dtype)
    if dtype == "int4_kivi":
        specs = {"a": sealed_spec(heads, 128), "a.recent": recent_spec(heads, 128, torch.bfloat16)}
    else:
        stored = torch.bfloat16 if dtype == "auto" else torch.uint8
        specs = {
            "a": FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype=stored)
        }
    layers = {f"{i}.{name}": spec for i in range(2) for name, spec in specs.items()}
    for length in (100, 512, 4000):
        config = make_config(Settings(max_model_len=length))
        config.cache_config.num_gpu_blocks_override = None
        made = get_kv_cache_configs(config, [dict(layers)], [nbytes])[0]
        assert kv.blocks(nbytes) == made.num_blocks
        assert kv.reported_tokens(nbytes, length) == get_kv_cache_capacity(config, made)[0]


def test_requests_that_run_together():
    kv = cache.Cache("auto", 10, lambda n: -(-n // 16), lambda n: -(-n // 16) + 2)
    assert kv.requests(10 * 101, 160) == 10  # a page is the null page
    assert kv.requests(10 * 100, 160) == 9
    assert kv.requests(10 * 13, 160) == 1
    assert kv.requests(10 * 12, 160) == 0  # it could decode, but not be prefilled


@pytest.mark.parametrize("folder", SHAPES, ids=lambda p: p.name)
def test_int4_kivi_has_room_for_more(folder):
    plan = sizing.make(sizing.load(folder), gpus.machine("L40S"))
    auto, fp8, int4 = plan.rows
    assert auto.tokens < fp8.tokens < int4.tokens and auto.users < fp8.users < int4.users
    assert auto.token_bytes > fp8.token_bytes > int4.token_bytes
    assert int4.tokens == pytest.approx(plan.cache_bytes / int4.token_bytes, rel=0.01)


@pytest.fixture
def llama(tmp_path) -> sizing.Model:
    return sizing.load(Path(model(tmp_path, BF16_LLAMA)))


class TestWeights:
    def test_the_parameters_of_known_models(self):
        """As their model cards count them, in billions."""
        known = {"qwen2.5-7b": 7.62, "llama-3.1-8b": 8.03, "llama-3.2-3b": 3.21}
        for name, billions in known.items():
            folder = BENCH / "models" / name
            w = weights.of(sizing.load(folder).config, folder, 1)
            assert w.parameters / 1e9 == pytest.approx(billions, abs=0.005)
            assert w.gpu == 2 * w.parameters

    def test_files_tell_the_same(self, llama):
        """Stored in float32, served in bfloat16."""
        from transformers import AutoModelForCausalLM

        said = llama.weights(1)
        AutoModelForCausalLM.from_config(llama.config.hf_config).float().save_pretrained(
            llama.folder, max_shard_size="1MB"
        )
        stored = llama.weights(1)
        assert stored.source == "from the safetensors" != said.source
        assert (stored.gpu, stored.step) == (said.gpu, said.step)
        for shard in list(llama.folder.glob("*.safetensors"))[:1]:
            shard.unlink()
        with pytest.raises(ValueError, match="finish the download"):
            llama.weights(1)

    def test_a_step_does_not_read_the_embedding_table(self, tmp_path, llama):
        table = 1000 * 256 * 2
        assert llama.weights(1).gpu - llama.weights(1).step == table
        tied = model(tmp_path / "tied", BF16_LLAMA | {"tie_word_embeddings": True})
        w = sizing.load(Path(tied)).weights(1)
        assert w.gpu == w.step == llama.weights(1).step

    def test_tensor_parallelism(self, llama):
        """Norms are on each GPU; two KV heads are split over two GPUs and repeated on four."""
        one, two, four = (llama.weights(n).gpu for n in (1, 2, 4))
        norms, kv = 5 * 256 * 2, 2 * 2 * (2 * 64) * 256 * 2
        assert two == (one - norms) // 2 + norms
        assert four == (one - norms - kv) // 4 + kv // 2 + norms

    @pytest.mark.parametrize(
        ("quantisation", "bits"),
        [
            ({"quant_method": "fp8"}, 8),
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.15625),
            ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.3125),
        ],
        ids=lambda x: x["quant_method"] if isinstance(x, dict) else "",
    )
    def test_quantised(self, llama, quantisation, bits):
        plain = llama.weights(1)
        llama.config.hf_config.quantization_config = quantisation
        outside = 2 * 1000 * 256 * 2 + 5 * 256 * 2  # embedding, output matrix, norms
        assert llama.weights(1).gpu == int((plain.gpu - outside) * bits / 16 + outside)

    def test_unknown_quantisation(self, llama):
        llama.config.hf_config.quantization_config = {"quant_method": "new"}
        with pytest.raises(ValueError, match=r"new cannot be counted.*safetensors"):
            llama.weights(1)


class TestMachines:
    def test_names(self):
        assert gpus.machine("g6e.xlarge") == Machine("g6e.xlarge", GPUS["L40S"], 1)
        assert gpus.machine("L40Sx2") == gpus.machine("l40s×2") == gpus.machine("NVIDIA L40S*2")
        assert gpus.machine("p4d.24xlarge").count == gpus.machine("H100x8").count == 8
        assert {name.split(".")[0] for name in INSTANCES} >= {"g5", "g6", "g6e", "p4d", "p5"}
        assert gpus.machine("A100-80GBx2") == Machine("A100-80GB×2", GPUS["A100-80GB"], 2)
        with pytest.raises(ValueError, match="is not known: use"):
            gpus.machine("T4")

    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("24GiB", 24 << 30),
            ("22587MiB", 22587 << 20),
            ("24 GB", 24 * 10**9),
            ("1.5g", 15 * 10**8),
        ],
    )
    def test_memory(self, text, nbytes):
        assert gpus.memory(text).gpu.memory == nbytes

    def test_memory_that_is_no_size(self):
        with pytest.raises(ValueError, match="--memory 24 is no size: use"):
            gpus.memory("24")

    def test_all_gpus_have_kernels(self):
        from s4kv_ext.checks import CAPABILITIES

        assert {g.capability for g in GPUS.values()} <= set(CAPABILITIES)


class TestPlan:
    def test_users_of_two_gpus(self, llama):
        """Half the KV heads on each: a request's bytes halve, those of a token stay."""
        one, two = (sizing.make(llama, gpus.machine(f"L4x{n}"), 4096) for n in (1, 2))
        assert two.gpus == 2 and two.servers == 1
        for a, b in zip(one.rows, two.rows, strict=True):
            assert a.token_bytes == pytest.approx(b.token_bytes)
            assert b.users == pytest.approx(2 * a.users, rel=0.01)

    def test_servers_beside_each_other(self, llama):
        plan = sizing.make(llama, gpus.machine("L4x4"), 4096, users=10**6, gpus=1)
        fit = plan.best.users
        assert plan.servers == 4 and plan.best.instances == -(-(10**6) // (4 * fit))
        assert "4 such servers fit" in report.text(plan)

    def test_heads_that_cannot_be_split(self):
        qwen = sizing.load(BENCH / "models" / "qwen2.5-7b")  # 28 heads
        with pytest.raises(sizing.DoesNotFit, match=r"28 heads .* --tp 1 or 2 or 4"):
            sizing.make(qwen, gpus.machine("p5.48xlarge"))
        assert sizing.widest(qwen, gpus.machine("p5.48xlarge")).gpus in (1, 2, 4)

    def test_weights_that_do_not_fit(self):
        llama8b = sizing.load(BENCH / "models" / "llama-3.1-8b")
        with pytest.raises(sizing.DoesNotFit, match=r"the weights take 15\.0 GiB"):
            sizing.make(llama8b, gpus.memory("12GiB"))
        with pytest.raises(sizing.DoesNotFit, match="less than one request"):
            sizing.make(llama8b, gpus.memory("17.2GiB"), 131072)

    def test_what_a_step_is_bound_by(self):
        qwen = sizing.load(BENCH / "models" / "qwen2.5-7b")
        plan = sizing.make(qwen, gpus.machine("H200"), 8192, users=64)
        bound = {r.dtype: r.bound(plan.weights.step) for r in plan.rows}
        assert bound == {"auto": "cache", "fp8": "cache", "int4_kivi": "weights"}

    def test_refused_models_are_planned_without_int4_kivi(self, tmp_path):
        gemma = sizing.load(Path(model(tmp_path, GEMMA3 | {"torch_dtype": "bfloat16"})))
        plan = sizing.make(gemma, gpus.machine("L4"))
        assert [r.dtype for r in plan.rows] == ["auto", "fp8"]
        assert plan.refused is not None and "sliding-window" in plan.refused
        assert plan.refused in report.text(plan) and plan.workspace == 0
        assert "--kv-cache-dtype auto" in report.command(plan)

    def test_float32_is_refused_on_gpus(self, tmp_path):
        refused = sizing.load(Path(model(tmp_path, LLAMA)), "float32").refused
        assert refused is not None and "use --dtype bfloat16" in refused

    def test_models_with_states(self, tmp_path):
        with pytest.raises(ValueError, match="keys and values"):
            sizing.load(Path(model(tmp_path, JAMBA)))

    def test_context_too_long(self, llama):
        with pytest.raises(ValueError, match=r"--context 5000 .* use at most 4096"):
            sizing.make(llama, gpus.machine("L4"), 5000)

    @pytest.mark.parametrize("config", [{}, {"model_type": "new"}, LLAMA | {"head_dim": "x"}])
    def test_configs_that_are_none(self, tmp_path, config):
        with pytest.raises(ValueError, match=r"^vLLM does not take .*; give that of") as e:
            sizing.load(Path(model(tmp_path, config)))
        print(e.value)
        assert "\n" not in str(e.value)

    def test_no_config(self, tmp_path):
        with pytest.raises(ValueError, match=r"no config\.json: give"):
            sizing.load(tmp_path)


class TestCommand:
    @pytest.fixture
    def s4kv(self, tmp_path, capsys):
        import argparse

        ap = argparse.ArgumentParser()
        cli.add(ap.add_subparsers())
        path = model(tmp_path, BF16_LLAMA)

        def run(*args: str) -> str:
            parsed = ap.parse_args(["plan", path, *args])
            assert parsed.run(parsed) == 0
            told = capsys.readouterr()
            assert told.err.startswith("s4kv: loading vLLM, which reads")
            return told.out

        return run

    def test_text(self, s4kv, tmp_path):
        out = s4kv("--gpu", "g6e.xlarge", "--context", "4096", "--users", "50", "--price", "2")
        assert "g6e.xlarge: 1 × L40S, 44.4 GiB each" in out
        assert f"vllm serve {tmp_path} --kv-cache-dtype int4_kivi --max-model-len 4096" in out
        assert "int4_kivi  1 × g6e.xlarge: 2.00 USD an hour, 0.0400 a user" in out
        assert max(map(len, out.split("vllm serve")[0].splitlines())) <= 100

    def test_no_price_is_invented(self, s4kv):
        assert "give --price" in s4kv("--memory", "24GiB")
        assert "USD an hour of one" in s4kv("--gpu", "L4")

    def test_json(self, s4kv):
        plan = json.loads(s4kv("--gpu", "L4x2", "--json"))
        assert plan["tensor_parallel_size"] == 2 and "--tensor-parallel-size 2" in plan["command"]
        assert list(plan["kv_cache_dtypes"]) == ["auto", "fp8", "int4_kivi"]
        known = sum(
            plan[f"{k}_bytes"] for k in ("weights", "activation", "fixed", "kv_cache", "unused")
        )
        assert known == pytest.approx(plan["gpu"]["bytes"], abs=1)

    def test_all_instances(self, s4kv):
        out = s4kv("--users", "5000")
        assert "machines for 5000 users" in out
        for name in ("g5.xlarge", "g6.48xlarge", "g6e.12xlarge", "p4d.24xlarge", "p5.48xlarge"):
            assert name in out
        assert len(json.loads(s4kv("--json"))["machines"]) == len(gpus.smallest())

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--gpu", "L40Sx2", "--tp", "3"], "--tp 3"),
            (["--users", "0"], "--users 0: use 1 or more"),
            (["--price", "1"], "--gpu"),
            (["--gpu-memory-utilization", "92"], "use a part"),
        ],
    )
    def test_bad_arguments(self, s4kv, args, words):
        with pytest.raises(ValueError, match=words):
            s4kv(*args)


def test_help_has_examples():
    done = subprocess.run(
        [sys.executable, "-m", "s4kv_ext.cli", "plan", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "s4kv plan /models/" in done.stdout


def test_memory_adds_up():
    limits = Limits(0.9)
    left = memory.for_cache(40 * GIB, 10 * GIB, 1 * GIB, limits)
    assert left == 36 * GIB - 11 * GIB - memory.FIXED
    assert memory.outside(40 * GIB, limits) == 4 * GIB
