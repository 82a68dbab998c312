"""The file of channel maps: what is written is read, and everything else is refused by name."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from shapes import LLAMA, QWEN2, model

from s4kv_ext import calibrate_cli, cli, map_file
from s4kv_ext.channel_map import allocate
from s4kv_ext.format import HEAD_SIZES, key_slots
from s4kv_ext.identity import Identity, fingerprint, model_files
from s4kv_ext.map_file import MapFile


def create(path: str, map_path: object, **options):
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "kv_cache_dtype": "int4_kivi", "load_format": "dummy"} | options
    own = {"int4_kivi": {"map": str(map_path)}}
    args = EngineArgs(path, skip_tokenizer_init=True, additional_config=own, **options)
    return args.create_engine_config()


def some_map(layers: int = 2, heads: int = 2, dim: int = 64) -> torch.Tensor:
    torch.manual_seed(layers * heads)
    return torch.stack([allocate(torch.rand(heads, dim).pow(8)) for _ in range(layers)])


def weights(folder: str, seed: int = 0, size: int = 100_000) -> None:
    torch.manual_seed(seed)
    save_file({"w": torch.randn(size)}, f"{folder}/model.safetensors")


def map_of(folder: str, **changes) -> MapFile:
    """A map that the model in the folder takes."""
    about = Identity("one", "", fingerprint(model_files(folder, None)))
    return replace(MapFile(some_map(), 64, about, 512), **changes)


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_what_is_written_is_read(tmp_path, dim):
    file = MapFile(some_map(3, 4, dim), dim, Identity("one/two", "ab12", "cd34"), 512)
    map_file.write(tmp_path / "map", file)
    again = map_file.read(tmp_path / "map")
    assert torch.equal(again.slot_channel, file.slot_channel)
    assert (again.head_dim, again.identity, again.tokens) == (dim, file.identity, 512)
    assert again.hash == file.hash and len(file.hash) == 16
    assert os.listdir(tmp_path) == ["map"]


def test_hash_is_of_the_map_alone():
    one, other = some_map(), some_map()
    about = Identity("", "", "")
    assert MapFile(one, 64, about, 1).hash == MapFile(other, 64, Identity("x", "", ""), 2).hash
    other[1, 1, 5] += 1
    assert map_file.digest(one) != map_file.digest(other)


def test_nothing_half_written(tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        map_file.write(tmp_path / "map", MapFile(some_map(), 64, Identity("", "", ""), 1))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_each_rank_takes_its_own_heads(kv_heads, ranks):
    """As QKVParallelLinear loads them, and ``of_all_heads`` puts them together again."""
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        return
    replicas = max(1, ranks // kv_heads)
    own = max(1, kv_heads // ranks)
    each = []
    for rank in range(ranks):
        part = map_file.heads_of_rank(kv_heads, rank, ranks)
        heads = range(kv_heads)[part]
        assert list(heads) == [rank // replicas * own + i for i in range(own)]
        each.append([torch.tensor([[float(h), rank % replicas] for h in heads])])
    (whole,) = calibrate_cli.of_all_heads(each, kv_heads)
    assert whole.tolist() == [[h, (replicas - 1) / 2] for h in range(kv_heads)]


def test_accepted(tmp_path):
    path = model(tmp_path, LLAMA)
    weights(path)
    map_file.write(tmp_path / "map", map_of(path))
    create(path, tmp_path / "map")


def no_file(tmp_path, path):
    return tmp_path / "nowhere", "there is no channel map"


def garbage(tmp_path, path):
    (tmp_path / "map").write_bytes(b"no safetensors\n" * 50)
    return tmp_path / "map", "cannot be read"


def a_folder(tmp_path, path):
    return tmp_path, "cannot be read"


def cut_short(tmp_path, path):
    map_file.write(tmp_path / "whole", map_of(path))
    (tmp_path / "map").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    return tmp_path / "map", "cannot be read"


def other_safetensors(tmp_path, path):
    return f"{path}/model.safetensors", "is no channel map"


def other_version(tmp_path, path, monkeypatch):
    monkeypatch.setattr(map_file, "FORMAT_VERSION", 77)
    map_file.write(tmp_path / "map", map_of(path))
    monkeypatch.undo()
    return tmp_path / "map", "has format version 77, this release has 1"


def flipped(tmp_path, path):
    map_file.write(tmp_path / "map", map_of(path))
    raw = bytearray((tmp_path / "map").read_bytes())
    raw[-2] ^= 1  # the last slot's channel
    (tmp_path / "map").write_bytes(raw)
    return tmp_path / "map", "is damaged"


def out_of_range(tmp_path, path):
    bad = some_map()
    bad[0, 0, -1] = 64
    map_file.write(tmp_path / "map", map_of(path, slot_channel=bad))
    return tmp_path / "map", "is damaged (a channel is out of range)"


def not_in_order(tmp_path, path):
    bad = some_map().flip(-1)
    map_file.write(tmp_path / "map", map_of(path, slot_channel=bad))
    return tmp_path / "map", "is damaged (channels are not in order"


def three_slots(tmp_path, path):
    bad = torch.zeros(2, 2, key_slots(64), dtype=torch.int16)
    map_file.write(tmp_path / "map", map_of(path, slot_channel=bad))
    return tmp_path / "map", "have more than two slots"


def other_layers(tmp_path, path):
    map_file.write(tmp_path / "map", map_of(path, slot_channel=some_map(3)))
    return tmp_path / "map", "of one with 3 layers, 2 KV heads, head_dim 64, the model has 2 layers"


def other_heads(tmp_path, path):
    map_file.write(tmp_path / "map", map_of(path, slot_channel=some_map(2, 4)))
    return tmp_path / "map", "4 KV heads, head_dim 64, the model has 2 layers, 2 KV heads"


def other_head_dim(tmp_path, path):
    map_file.write(tmp_path / "map", map_of(path, slot_channel=some_map(2, 2, 128), head_dim=128))
    return tmp_path / "map", "head_dim 128, the model has"


def other_weights(tmp_path, path):
    map_file.write(tmp_path / "map", map_of(path))
    weights(path, seed=1)
    return tmp_path / "map", "is of one, and llama has other weights"


def no_weights_to_compare(tmp_path, path):
    about = Identity("one", "ab12", "")
    map_file.write(tmp_path / "map", map_of(path, identity=about))
    return tmp_path / "map", "llama must be downloaded before"


REFUSED = [
    no_file, garbage, a_folder, cut_short, other_safetensors, other_version, flipped, out_of_range,
    not_in_order, three_slots, other_layers, other_heads, other_head_dim, other_weights,
    no_weights_to_compare,
]  # fmt: skip


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_refused(tmp_path, monkeypatch, make):
    from s4kv_ext.checks import Unsupported

    (tmp_path / "llama").mkdir()
    path = model(tmp_path / "llama", LLAMA)
    weights(path)
    more = [monkeypatch] if make is other_version else []
    file, words = make(tmp_path, path, *more)
    with pytest.raises(Unsupported) as e:
        create(path, file)
    print(e.value)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert str(e.value).endswith('; write a new one with `s4kv calibrate`, or leave out "map"')


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"map": 3}, "unknown setting map=3"),
        ({"maps": "x"}, "unknown setting maps='x'"),
        ({"map": "x", "keys": "plain"}, "plain keys have no channel map"),
        ("map", "unknown setting ='map'"),
        ({"keys": ["plain"]}, "unknown setting keys=['plain']"),
    ],
)
def test_settings_refused(tmp_path, own, words):
    from vllm.engine.arg_utils import EngineArgs

    from s4kv_ext.checks import Unsupported

    options = {"kv_cache_dtype": "int4_kivi", "load_format": "dummy", "dtype": "float32"}
    args = EngineArgs(
        model(tmp_path, LLAMA),
        skip_tokenizer_init=True,
        additional_config={"int4_kivi": own},
        **options,
    )
    with pytest.raises(Unsupported) as e:
        args.create_engine_config()
    print(e.value)
    assert words in str(e.value) and "; " in str(e.value) and "\n" not in str(e.value)


class TestIdentity:
    def test_config_and_every_kind_of_change_count(self, tmp_path):
        seen = {}
        for name, config, seed, size in (
            ("one", LLAMA, 0, 100_000),
            ("config", LLAMA | {"rope_theta": 1e6}, 0, 100_000),
            ("weights", LLAMA, 1, 100_000),
            ("size", LLAMA, 0, 100_001),
        ):
            folder = tmp_path / name
            folder.mkdir()
            weights(model(folder, config), seed, size)
            seen[name] = fingerprint(model_files(str(folder), None))
        print(seen)
        assert len(set(seen.values())) == 4

    def test_a_copy_is_the_same(self, tmp_path):
        seen = set()
        for name, more in (("one", {}), ("two", {"_name_or_path": "x", "torch_dtype": "float16"})):
            folder = tmp_path / name
            folder.mkdir()
            weights(model(folder, LLAMA | more))
            seen.add(fingerprint(model_files(str(folder), None)))
        assert len(seen) == 1

    def test_one_part_in_a_thousand_shows(self, tmp_path):
        """0.1 % of the bytes, in one run, of a file that is only sampled."""
        path = tmp_path / "model.safetensors"
        raw = bytearray(os.urandom(64 << 20))
        path.write_bytes(raw)
        one = fingerprint([path])
        for at in (0, 20 << 20, len(raw) - (64 << 10)):
            changed = bytearray(raw)
            changed[at : at + (64 << 10)] = bytes(64 << 10)
            path.write_bytes(changed)
            assert fingerprint([path]) != one, at

    def test_reads_little(self, tmp_path):
        """A model of 40 GB takes no longer than its samples; whole it would take half a minute."""
        path = tmp_path / "model.safetensors"
        with path.open("wb") as f:
            f.truncate(40 << 30)  # sparse
        start = time.perf_counter()
        fingerprint([path])
        seconds = time.perf_counter() - start
        print(f"{seconds:.2f} s")
        assert seconds < 5

    @pytest.mark.parametrize(
        ("mine", "other", "why"),
        [
            (("a", "b"), ("a", "c"), ""),
            (("a", "b"), ("", "b"), ""),
            (("", "b"), ("a", "b"), ""),
            (("a", "b"), ("x", "y"), "other weights"),
            (("", "b"), ("a", ""), "must be downloaded"),
            (("a", ""), ("", "b"), "must be downloaded"),
        ],
    )
    def test_either_is_enough(self, mine, other, why):
        told = Identity("one", *mine).differs(Identity("two", *other))
        assert why in told if why else told == ""

    def test_hub_cache(self, tmp_path, monkeypatch):
        """A hub's name stands for the files in its cache, once the weights are there."""
        snapshot = tmp_path / "models--org--name" / "snapshots" / ("c" * 40)
        snapshot.mkdir(parents=True)
        refs = tmp_path / "models--org--name" / "refs"
        refs.mkdir()
        (refs / "main").write_text("c" * 40)
        model(snapshot, LLAMA)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert model_files("org/name", None) == []
        weights(str(snapshot))
        found = model_files("org/name", None)
        assert [f.name for f in found] == ["config.json", "model.safetensors"]
        assert model_files("no/such", None) == [] and model_files("not a name!", None) == []


class TestCommand:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (
                ["--text", "nowhere.txt"],
                "nowhere.txt: No such file or directory; --text takes files",
            ),
            (["--text", "binary"], "is not UTF-8 text"),
            (["--text", "empty"], "is empty"),
            (["--text", "text", "--tokens", "0"], "--tokens 0"),
            (["--text", "text", "--length", "-1"], "--length -1"),
            (["--text", "text", "--out", "no/map"], "there is no folder no: make it"),
            (["/nowhere", "--text", "text"], "there is no model /nowhere: give a folder"),
        ],
    )
    def test_refused_before_anything_loads(self, tmp_path, monkeypatch, args, words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 10)
        (tmp_path / "empty").write_text("\n")
        (tmp_path / "text").write_text("words")
        model = [] if "/nowhere" in args else ["hub/name"]
        monkeypatch.setattr(sys, "argv", ["s4kv", "calibrate", *model, "-o", "map", *args])
        with pytest.raises(SystemExit) as e:
            cli.main()
        print(e.value)
        assert str(e.value).startswith("s4kv: error: ") and words in str(e.value)
        assert "\n" not in str(e.value) and not (tmp_path / "map").exists()

    def test_help_has_examples(self, capsys):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["calibrate", "--help"])
        told = capsys.readouterr().out
        assert "examples:" in told and "--additional-config" in told

    def test_engine_takes_an_object(self, capsys):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["calibrate", "x", "--text", "y", "-o", "z", "--engine", "[1]"])
        assert "no JSON object" in capsys.readouterr().err


def test_texts_share_the_tokens():
    ids = list(range(100))
    assert calibrate_cli.cut(ids, 50, 20) == [ids[:20], ids[20:40], ids[40:50]]
    assert calibrate_cli.cut(ids[:5], 50, 20) == [ids[:5]]


def test_shape_of_the_model(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model(tmp_path, QWEN2), skip_tokenizer_init=True, load_format="dummy")
    assert str(map_file.shape_of(args.create_model_config())) == (
        "2 layers, 2 KV heads, head_dim 128"
    )
