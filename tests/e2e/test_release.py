"""make release: refusals, and a release of the CPU variant, installed from its index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "build"))

import checkout as source  # noqa: E402
import env as build_env  # noqa: E402
import metadata  # noqa: E402
import wheel as build_wheel  # noqa: E402
from common import TREE, pins  # noqa: E402
from release import released  # noqa: E402

sys.path.remove(str(ROOT / "build"))

VERSION = released(pins())
JSON = "application/vnd.pypi.simple.v1+json"


def git(*args: str, cwd: Path) -> str:
    who = ["-c", "user.name=tester", "-c", "user.email=tester"]
    return subprocess.check_output(["git", *who, *args], cwd=cwd, text=True).strip()


def commit(root: Path) -> None:
    git("add", "-A", cwd=root)
    git("commit", "-qm", "x", cwd=root)


class Checkout:
    """This tree as it is, committed in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in filter(None, git(*names, cwd=ROOT).split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
        # As it is between two releases, whatever the tree's own says.
        (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- int4_kivi\n")
        git("init", "-q", cwd=root)
        build_env.tools()
        (root / "build-tree").mkdir()
        for name in ("tools",):
            (root / "build-tree" / name).symlink_to(TREE / name)

    def head(self, text: str) -> None:
        """What is unreleased, under another heading."""
        path = self.root / "CHANGELOG.md"
        old = path.read_text()
        assert "## Unreleased\n" in old
        path.write_text(old.replace("## Unreleased\n", f"## {text}\n", 1))

    def release(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.root / "build" / "release.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def refusal(self, *args: str) -> str:
        done = self.release(*args)
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines()
        return line


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = Checkout(tmp_path_factory.mktemp("release") / "project")
    commit(made.root)
    return made


@pytest.fixture(scope="module")
def out(checkout: Checkout) -> Path:
    """The release; its second build is the one that this checkout is tested with."""
    if edits := source.local_edits():
        pytest.skip(f"vllm/src has {edits}: the wheel here is not that of patches/")
    if "## Unreleased\n" in (checkout.root / "CHANGELOG.md").read_text():
        checkout.head(f"{VERSION} (2026-11-30)")
        commit(checkout.root)
    wheels = build_wheel.build("cpu")
    done = checkout.release(VERSION, "--variant", "cpu", "--against", str(wheels[0].parent))
    assert done.returncode == 0, done.stderr
    assert "2 wheels, the same in two builds" in done.stderr
    return checkout.root / "release" / VERSION


def test_refusals_name_the_remedy(checkout: Checkout) -> None:
    line = checkout.refusal("9.9+s4kv.1")
    assert f"and so {VERSION}, not 9.9+s4kv.1: release that one, or change revision" in line
    line = checkout.refusal(VERSION)
    assert f"head what is Unreleased with '## {VERSION} (date)'" in line
    (checkout.root / "stray").touch()
    line = checkout.refusal(VERSION)
    assert "(stray): commit or stash them" in line
    (checkout.root / "stray").unlink()
    checkout.head(VERSION)
    assert "(CHANGELOG.md): commit" in checkout.refusal(VERSION)
    # A heading without a text, and the heading of another release.
    text = f"# Changelog\n\n## {VERSION}\n\n## {VERSION}0\n- x\n"
    (checkout.root / "CHANGELOG.md").write_text(text)
    commit(checkout.root)
    assert "no section" in checkout.refusal(VERSION)
    git("reset", "-q", "--hard", "HEAD~", cwd=checkout.root)


def test_builds_that_differ_are_refused(checkout: Checkout, out: Path, tmp_path: Path) -> None:
    for path in out.glob("*.whl"):
        shutil.copy(path, tmp_path)
    alias = next(tmp_path.glob("s4kv_vllm*.whl"))
    alias.write_bytes(alias.read_bytes().replace(b"s4kv-doctor", b"s4kv-Doctor"))
    sys.path.insert(0, str(ROOT / "build"))
    from common import Stop
    from release import compare

    first, second = sorted(out.glob("*.whl")), sorted(tmp_path.glob("*.whl"))
    with pytest.raises(Stop, match=r"s4kv_vllm.* is not reproducible"):
        compare(first, second)
    with pytest.raises(Stop, match="different names"):
        compare(first, second[:1])


def test_sums_changes_and_sbom(out: Path) -> None:
    rows = [x.split("  ") for x in (out / "SHA256SUMS").read_text().splitlines()]
    assert {n for _, n in rows} == {p.name for p in out.iterdir() if p.is_file()} - {"SHA256SUMS"}
    for digest, name in rows:
        assert sha256((out / name).read_bytes()).hexdigest() == digest
    changes = (out / "CHANGES.md").read_text()
    assert changes.startswith(f"# s4kv-vllm {VERSION}\n") and "int4_kivi" in changes
    (path,) = out.glob("*.cdx.json")
    bom = json.loads(path.read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["version"] == metadata.version(pins(), "cpu")
    found = {c["name"]: c for c in bom["components"]}
    assert found["torch"]["version"] == metadata.torch_pins()["torch"].partition("==")[2]
    assert found["oneDNN"]["licenses"][0]["license"]["id"] == "Apache-2.0"
    assert "DeepGEMM" not in found  # the CUDA wheel alone carries it
    hashes = {h["content"] for c in bom["components"] for h in c.get("hashes", [])}
    assert {pins().files["source"].sha256, pins().files["cpu"].sha256} <= hashes


class Handler(SimpleHTTPRequestHandler):
    """A server that chooses by the Accept header, as PEP 691 has it."""

    def log_message(self, *args: object) -> None:
        pass

    def send_head(self):
        if self.path.endswith("/") and JSON in self.headers.get("Accept", ""):
            self.path += "index.json"
        return super().send_head()

    def guess_type(self, path: str) -> str:  # type: ignore[override]
        return JSON if str(path).endswith("index.json") else super().guess_type(path)


@pytest.fixture
def served(out: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(out)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple/"
    server.shutdown()


def test_pip_and_uv_install_from_the_index(out: Path, served: str, tmp_path: Path) -> None:
    """pip from the folder, by HTML; uv through a server, by JSON; no requirements, for speed."""
    version = metadata.version(pins(), "cpu")
    wanted = [f"vllm=={version}", f"s4kv-vllm=={version}"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    for name, index in (("pip", f"{out.as_uri()}/simple/"), ("uv", served)):
        python = build_env.make_venv(tmp_path / name)
        if name == "pip":
            install = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
        else:
            uv = build_env.tools() / "uv"
            install = [str(uv), "pip", "install", "-q", "--no-cache", "--python", str(python)]
        install += ["--no-deps", "--index-url", index]
        subprocess.run([*install, *wanted], env=clean, check=True)
        code = (
            "from importlib.metadata import version as v; from s4kv_guard import doctor;"
            "import s4kv_ext.install_check as i; print(v('vllm'), v('s4kv-vllm'))"
        )
        told = subprocess.check_output([str(python), "-c", code], text=True)
        assert told.split() == [version, version]


def test_a_constraint_keeps_the_version(out: Path, tmp_path: Path) -> None:
    """What docs/install.md says of `pip install -U vllm`, with a higher stock vLLM in reach."""
    from test_installation import stub

    version = metadata.version(pins(), "cpu")
    python = build_env.make_venv(tmp_path / "env")
    links = tmp_path / "links"
    links.mkdir()
    for name in (version, "99.0"):
        stub(links, "vllm", name)
    (tmp_path / "constraints.txt").write_text(f"vllm=={version}\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    clean |= {"PIP_CONFIG_FILE": os.devnull}

    def pip(*args: str, **more: str) -> str:
        command = [str(python), "-m", "pip", "install", "-q", "--no-index", "-f", str(links)]
        subprocess.run([*command, *args], env=clean | more, check=True)
        code = "from importlib.metadata import version as v; print(v('vllm'))"
        return subprocess.check_output([str(python), "-c", code], text=True).strip()

    assert pip(f"vllm=={version}") == version
    constraints = str(tmp_path / "constraints.txt")
    assert pip("-U", "vllm", PIP_CONSTRAINT=constraints) == version
    assert pip("-U", "vllm") == "99.0"
