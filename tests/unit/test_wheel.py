"""The wheels of both variants, as files: names, metadata, members, hashes, and the same twice."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from email.parser import HeaderParser
from hashlib import sha256
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
sys.path.insert(0, str(BUILD))  # first: there is a distribution that is called wheel too

import native as build_native  # noqa: E402
import wheel as build_wheel  # noqa: E402
from common import Stop, pins  # noqa: E402
from fetch import fetch  # noqa: E402

sys.path.remove(str(BUILD))

VARIANTS = {"cpu": f"{pins().version}+cpu.s4kv.", "cuda": f"{pins().version}+s4kv."}


@dataclass
class Built:
    variant: str
    path: Path
    alias: Path

    def __post_init__(self) -> None:
        self.zip = zipfile.ZipFile(self.path)
        self.names = self.zip.namelist()
        self.info = next(n.split("/")[0] for n in self.names if n.endswith("/METADATA"))
        self.version = self.path.name.split("-")[1]
        self.metadata = HeaderParser().parsestr(self.text(f"{self.info}/METADATA"))
        self.requires = self.metadata.get_all("Requires-Dist") or []

    def text(self, name: str) -> str:
        return self.zip.read(name).decode()


@pytest.fixture(scope="module", params=list(VARIANTS))
def built(request: pytest.FixtureRequest) -> Built:
    return make(request.param)


def make(variant: str) -> Built:
    if variant == "cuda" and not build_native.nvcc():
        pytest.skip("no nvcc here: the CUDA wheel cannot be compiled")
    return Built(variant, *build_wheel.build(variant))


def test_names_and_versions_agree(built: Built) -> None:
    assert built.version == VARIANTS[built.variant] + str(pins().revision)
    assert built.metadata["Name"] == "vllm"
    assert built.metadata["Version"] == built.version
    assert built.info == f"vllm-{built.version}.dist-info"
    scope: dict[str, object] = {}
    exec(built.text("vllm/_version.py"), scope)
    assert scope["__version__"] == scope["version"] == built.version
    local = built.version.partition("+")[2]
    assert scope["__version_tuple__"] == (*map(int, pins().version.split(".")), local)
    tags = [x.partition(": ")[2] for x in built.text(f"{built.info}/WHEEL").splitlines()]
    assert built.path.stem.endswith(tags[-1])
    assert "Root-Is-Purelib: false" in built.text(f"{built.info}/WHEEL")


def test_no_newer_c_library_than_upstreams_wheel_needs(built: Built) -> None:
    """On whatever system it is built: Ubuntu 22.04 is among those that docs/ name, glibc 2.35."""
    library = built.zip.read(f"s4kv_ext/libs4kv_{built.variant}.so")
    needed = max(int(n) for n in re.findall(rb"GLIBC_2\.(\d+)", library))
    print(f"{built.variant}: glibc 2.{needed}")
    upstreams = Path(pins().files[built.variant].file)
    assert built.path.stem.split("-")[-1] == upstreams.stem.split("-")[-1]


def test_record_is_complete_and_right(built: Built) -> None:
    rows = list(csv.reader(StringIO(built.text(f"{built.info}/RECORD"))))
    assert sorted(r[0] for r in rows) == sorted(built.names)
    assert len(set(built.names)) == len(built.names)
    for name, digest, size in rows:
        if name.endswith("/RECORD"):
            continue
        data = built.zip.read(name)
        value = urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={value}", str(len(data))), name


def test_members(built: Built) -> None:
    base = zipfile.ZipFile(fetch(pins().files[built.variant]))
    theirs = {i.filename: i for i in base.infolist() if i.filename.startswith("vllm/")}
    ours = {i.filename: i for i in built.zip.infolist()}
    source = build_wheel.tracked()
    assert set(theirs) <= set(ours), "a file of upstream's wheel is lost"
    assert set(source) <= set(ours), "a file of the source is lost"
    for name, old in theirs.items():
        new = ours[name]
        assert (new.external_attr >> 16) & 0o111 == (old.external_attr >> 16) & 0o111, name
        if name in source and name != "vllm/_version.py":
            assert built.zip.read(name) == source[name].read_bytes(), name
        elif name not in source:
            assert (new.CRC, new.file_size) == (old.CRC, old.file_size), name
    extra = {n.split("/")[0] for n in ours if n not in theirs and n not in source}
    assert extra == {"s4kv_ext", built.info}


def test_extension_and_what_it_records(built: Built) -> None:
    import json

    info = json.loads(built.text("s4kv_ext/_build.json"))
    assert (info["version"], info["variant"]) == (built.version, built.variant)
    assert f"torch=={info['torch']}" in built.requires
    assert set(build_wheel.patched()) | {"vllm/_version.py"} <= set(info["files"])
    for name, digest in info["files"].items():
        assert sha256(built.zip.read(name)).hexdigest() == digest, name
    members = [n for n in built.names if n.startswith("s4kv_ext/")]
    assert set(info["files"]) >= {n for n in members if n != "s4kv_ext/_build.json"}
    assert ("s4kv_ext/libs4kv_cpu.so" in members) == (built.variant == "cpu")
    assert not [n for n in members if "csrc" in n or "__pycache__" in n]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_no_path_of_this_machine_in_the_library(variant: str) -> None:
    path = ROOT / "s4kv_ext" / f"libs4kv_{variant}.so"
    if not path.exists():
        pytest.skip("not compiled here")
    library = path.read_bytes()
    for word in (str(ROOT), "/tmp/s4kv-", "tmpxft_"):
        assert word.encode() not in library, word


def test_a_folder_of_somebody_else_is_not_compiled_in(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    place = Path("/tmp/s4kv-" + "test" * 4)
    place.symlink_to(tmp_path)
    try:
        with pytest.raises(Stop, match="is somebody else's"), build_native.fixed_folder("test" * 4):
            pass
        assert (tmp_path / "kept").exists()
    finally:
        place.unlink()


def test_requirements(built: Built) -> None:
    upstream = zipfile.ZipFile(fetch(pins().files[built.variant]))
    metadata = next(n for n in upstream.namelist() if n.endswith(".dist-info/METADATA"))
    theirs = (
        HeaderParser().parsestr(upstream.read(metadata).decode()).get_all("Requires-Dist") or []
    )
    for name in ("torch", "torchaudio", "torchvision"):
        assert [r for r in built.requires if re.fullmatch(rf"{name}==[0-9.]+", r)], name
    if built.variant == "cuda":
        assert built.requires == theirs
    for kept in ("transformers>=5.5.3", "torchcodec>=0.14"):
        assert any(r.startswith(kept) for r in built.requires)
    assert not [r for r in built.requires if "+cpu" in r]


def test_entry_points_and_licences(built: Built) -> None:
    text = built.text(f"{built.info}/entry_points.txt")
    assert "vllm = vllm.entrypoints.cli.main:main" in text
    assert "s4kv = s4kv_ext.cli:main" in text
    for name in built.metadata.get_all("License-File") or []:
        assert f"{built.info}/licenses/{name}" in built.names
    assert "SmolLM2" in built.text(f"{built.info}/licenses/s4kv/NOTICE")


def test_alias(built: Built) -> None:
    alias = zipfile.ZipFile(built.alias)
    info = f"s4kv_vllm-{built.version}.dist-info"
    metadata = HeaderParser().parsestr(alias.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "s4kv-vllm"
    assert f"vllm=={built.version}" in (metadata.get_all("Requires-Dist") or [])
    guard = alias.read("s4kv_guard.py")
    assert guard == (ROOT / "s4kv_ext" / "install_check.py").read_bytes()


def test_same_inputs_same_bytes(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_wheel, "DIST", tmp_path)
    for write, first in (
        (build_wheel.write_vllm, built.path),
        (build_wheel.write_alias, built.alias),
    ):
        again = write(pins(), built.variant)
        assert again.name == first.name
        assert again.read_bytes() == first.read_bytes()


def test_python_of_the_cuda_wheel_imports(tmp_path: Path) -> None:
    """Without a GPU: the pure-Python parts, from the wheel and not from what is installed."""
    cuda = make("cuda")
    kept = [n for n in cuda.names if n.endswith((".py", ".json"))]
    cuda.zip.extractall(tmp_path, kept)
    code = (
        "import vllm, vllm.version, vllm.config.cache, vllm.sampling_params, s4kv_ext.format;"
        "import typing; assert 'int4_kivi' in typing.get_args(vllm.config.cache.CacheDType);"
        "print(vllm.__version__, vllm.__file__, s4kv_ext.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    version, *files = done.stdout.split()[-3:]
    assert version == cuda.version
    assert all(f.startswith(str(tmp_path)) for f in files)


def test_notice_names_what_the_wheel_carries(built: Built) -> None:
    """Each row is in NOTICE, and each folder of others in a wheel is a row."""
    table = tomllib.loads((ROOT / "vllm" / "carried.toml").read_text())
    notice = built.text(f"{built.info}/licenses/s4kv/NOTICE")
    for name, row in table.items():
        assert f"  {name}, {row['license']}, {row['by']}: {row['folder']}\n" in notice
    folders = [row["folder"] for row in table.values()]
    others = [
        n for n in built.names if n.startswith(("vllm/third_party/", "vllm/vllm_flash_attn/"))
    ]
    for name in others:
        assert name == "vllm/third_party/__init__.py" or name.startswith(tuple(folders)), name
