"""Files that are broken or hostile: an error that says which file, where, and what to do; nothing
outside of the target is touched. Channel maps and tasks have more in tests of their own."""

from __future__ import annotations

import json
import re
import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from project import MESSAGE, ROOT, Project

from s4kv_ext import map_file
from s4kv_ext.compare import tasks
from s4kv_ext.format import key_slots
from s4kv_ext.identity import Identity

BARE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


PINS = {
    "no TOML": (lambda t: "[\n" + t, "line 1"),
    "no table": (lambda t: t.replace("[source]", "[sauce]"), "has no 'source'"),
    "a field more": (lambda t: t + 'more = "x"\n', "more"),
    "a field less": (lambda t: re.sub(r'sha256 = "\w+"\n', "", t, count=1), "sha256"),
    "a path that climbs": (lambda t: t.replace('file = "', 'file = "../../', 1), "file of"),
    "an absolute path": (lambda t: t.replace('file = "', 'file = "/etc/', 1), "file of"),
    "an option": (lambda t: t.replace('project = "', 'project = "--index-url=', 1), "project of"),
    "no hash": (lambda t: re.sub(r'sha256 = "\w', 'sha256 = "', t, count=1), "sha256 of"),
    "a number": (lambda t: re.sub(r'sha256 = "\w+"', "sha256 = 5", t, count=1), "pin.toml"),
    "a version that is a path": (lambda t: t.replace('"9.9"', '"../9.9"'), "version"),
    "a revision that is text": (lambda t: t.replace("revision = 1", 'revision = "1"'), "revision"),
    "NUL": (lambda t: "\0" + t, "line 1"),
}


@pytest.mark.parametrize("name", PINS)
def test_a_broken_pin(project: Project, name: str) -> None:
    spoil, told = PINS[name]
    pin = project.root / "vllm" / "pin.toml"
    pin.write_text(spoil(pin.read_text()))
    error = project.bad("fetch")
    assert str(pin) in error and told in error and "git checkout vllm/pin.toml" in error, error
    assert "Traceback" not in error


def entry(name: str, **about: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"vllm-9.9/{name}")
    for field, value in about.items():
        setattr(info, field, value)
    return info


ESCAPES = {
    "a path that climbs": [entry("vllm/../../../escaped")],
    "a link to outside": [entry("vllm/link", type=tarfile.SYMTYPE, linkname="../../../..")],
    "a hard link to outside": [entry("vllm/l", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a device": [entry("vllm/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
}


@pytest.mark.parametrize("name", ESCAPES)
def test_an_archive_that_reaches_out(project: Project, name: str) -> None:
    path = project.cache / "vllm-9.9.tar.gz"
    old = sha256(path.read_bytes()).hexdigest()
    with tarfile.open(path, "w:gz") as tar:
        for info in ESCAPES[name]:
            tar.addfile(info, BytesIO(b"") if info.isreg() else None)
    pin = project.root / "vllm" / "pin.toml"
    pin.write_text(pin.read_text().replace(old, sha256(path.read_bytes()).hexdigest()))
    before = {p for p in project.root.parent.rglob("*") if "build-tree" not in p.parts}
    error = project.bad("apply")
    assert str(path) in error and "Traceback" not in error, error
    assert not project.src.exists()
    after = {p for p in project.root.parent.rglob("*") if "build-tree" not in p.parts}
    assert not {p for p in after - before if "__pycache__" not in p.parts and p.suffix != ".lock"}


@pytest.mark.parametrize(
    "target", ["../escaped", "/tmp/s4kv-escaped", ".git/hooks/post-commit", "vllm/../../escaped"]
)
def test_a_patch_that_reaches_out(project: Project, target: str) -> None:
    project.patches.mkdir()
    head = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    head += "From: a <a@b>\nDate: Mon, 30 Nov 2026 11:06:10 +0000\nSubject: [PATCH] " + MESSAGE
    diff = f"\ndiff --git a/{target} b/{target}\nnew file mode 100755\n--- /dev/null\n"
    diff += f"+++ b/{target}\n@@ -0,0 +1 @@\n+echo hello\n"
    (project.patches / "0001-out.patch").write_text(head + diff)
    (project.patches / "series").write_text("0001-out.patch\n")
    error = project.bad("apply")
    assert "0001-out.patch" in error and "Traceback" not in error, error
    assert not list(project.root.parent.rglob("*escaped*"))
    assert not Path("/tmp/s4kv-escaped").exists()
    assert not project.src.exists()


@pytest.mark.parametrize("name", ["../x.patch", "/etc/passwd"])
def test_a_series_that_names_what_is_outside(project: Project, name: str) -> None:
    project.patches.mkdir()
    (project.root / "x.patch").write_text("")
    (project.patches / "series").write_text(f"{name}\n")
    assert "outside of patches/" in project.bad("apply")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
SCHEMAS = st.dictionaries(
    st.sampled_from(["type", "$ref", "$schema", "$id", "properties", "pattern", "enum", "anyOf"]),
    JSON | st.sampled_from(["#", "#/a", "object", "http://127.0.0.1:1/", "file:///etc/passwd"]),
)
LINES = st.dictionaries(st.sampled_from([*tasks.FIELDS, "other"]), JSON | SCHEMAS, max_size=4)


@settings(BARE, max_examples=300)
@given(line=JSON | LINES, raw=st.binary(max_size=20))
def test_any_task_file_is_read_or_refused_by_line(tmp_path: Path, line, raw: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(line).encode() + b"\n" + raw)
    try:
        for task in tasks.load(path):
            assert tasks.score(task, "{}") in (None, 0.0, 1.0) or task.match == "prefix"
    except ValueError as e:
        assert str(path) in str(e)


def test_a_schema_that_refers_to_elsewhere_only_further_in() -> None:
    """What no probe at load has come to is an answer that does not fit, not a stack trace."""
    schema = {"properties": {"a": {"properties": {"b": {"$ref": "http://127.0.0.1:1/x"}}}}}
    task = tasks.read({"prompt": "x", "schema": schema}, "g", "1")
    assert tasks.score(task, '{"a": {"b": 1}}') == 0.0
    assert tasks.score(task, '{"a": 1}') == 1.0
    assert tasks.score(task, "[" * 100_000) == 0.0


def sound_map() -> bytes:
    import tempfile

    channels = torch.sort(torch.arange(key_slots(64)) % 64).values.to(torch.int16).expand(2, 2, -1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map"
        map_file.write(path, map_file.MapFile(channels, 64, Identity("m", "r", "w"), 9))
        map_file.read(path)
        return path.read_bytes()


SOUND = sound_map()


@settings(BARE, max_examples=300)
@given(
    cut=st.integers(0, len(SOUND)),
    at=st.integers(0, 600),
    new=st.binary(max_size=12),
    longer=st.binary(max_size=5),
)
def test_any_map_file_is_the_map_or_refused(tmp_path: Path, cut, at, new, longer) -> None:
    path = tmp_path / "map"
    spoilt = SOUND[:at] + new + SOUND[at + len(new) :]
    path.write_bytes((spoilt[:cut] if cut % 2 else spoilt) + longer)
    try:
        read = map_file.read(path)
    except map_file.BadMap as e:
        assert str(path) in str(e)
    else:  # what does not matter was changed: a name, the number of tokens
        assert read.hash == map_file.digest(read.slot_channel) and read.shape.head_dim == 64


@pytest.mark.parametrize(
    "about",
    [
        *({"head_dim": h} for h in ("0", "-64", "9" * 5000, "64.0", "nan", "")),
        *({"tokens": "x"}, {"hash": "../.."}, {"format_version": "1" * 5000}),
    ],
)
def test_a_map_with_hostile_metadata(tmp_path: Path, about: dict[str, str]) -> None:
    from safetensors.torch import save_file

    sound = {
        "format": map_file.KIND, "format_version": "1", "model": "m", "revision": "r",
        "weights": "w", "layers": "2", "kv_heads": "2", "head_dim": "64", "hash": "0",
        "tokens": "9",
    }  # fmt: skip
    for shape in ((2, 2, key_slots(64)), (0, 2, key_slots(64)), (2, 2, 0), (0,)):
        tensor = torch.zeros(shape, dtype=torch.int16)
        save_file({map_file.TENSOR: tensor}, tmp_path / "map", metadata=sound | about)
        with pytest.raises(map_file.BadMap, match=re.escape(str(tmp_path / "map"))) as told:
            map_file.read(tmp_path / "map")
        assert len(str(told.value)) < 6000


def test_nothing_unpickles() -> None:
    """No code of ours runs what a file says."""
    for path in (*(ROOT / "s4kv_ext").rglob("*.py"), *(ROOT / "build").glob("*.py")):
        text = path.read_text()
        for word in ("pickle", "torch.load", "yaml.load", "shelve", "marshal", "eval(", "exec("):
            hits = [x for x in text.splitlines() if word in x and f"literal_{word}" not in x]
            assert not hits, f"{path}: {hits}"
