"""`s4kv doctor`: what it finds, and what it must not tell."""

from __future__ import annotations

import argparse
import getpass
import json
import subprocess

import pytest
import torch

from s4kv_ext import checks, cpu_ops, cuda_ops, doctor, install_check


@pytest.fixture
def run(monkeypatch, capsys):
    """Run it on an intact installation of a variant; its exit status, stdout and stderr."""

    def go(*args: str, variant: str = "cpu", state: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(install_check, "build_info", lambda: {"variant": variant})
        monkeypatch.setattr(install_check, "state", lambda: state)
        monkeypatch.setattr(install_check, "changed_members", list)
        monkeypatch.setattr(install_check, "repair", lambda: "pip install vllm")
        monkeypatch.setattr(doctor, "library_problems", lambda variant: iter(()))
        ap = argparse.ArgumentParser()
        doctor.add(ap.add_subparsers())
        parsed = ap.parse_args(["doctor", *args])
        status = parsed.run(parsed)
        told = capsys.readouterr()
        return status, told.out, told.err

    return go


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose torch sees one GPU of this name and compute capability."""

    def make(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
        monkeypatch.setattr(cuda_ops, "load", lambda: None)

    return make


def test_text_and_json_say_the_same(run):
    status, text, err = run()
    assert status == 0 and not err
    assert text.startswith("```\n") and text.endswith("```\n")  # an issue shows it as it is
    cpu_ops.load()
    assert f"int4_kivi     CPU kernels, {cpu_ops.isa()}" in text
    status, out, _ = run("--json")
    found = json.loads(out)
    assert found["int4_kivi"] == {"backend": f"CPU kernels, {cpu_ops.isa()}", "why_not": None}
    assert found["intact"] is True and found["problems"] == []
    for value in (found["python"], found["system"], *found["versions"].values()):
        assert value in text


def test_no_secrets(run, monkeypatch, tmp_path):
    """Not the values of variables, nor names of other variables, home, user or host."""
    user, home = "mallory", tmp_path / "mallory"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("VLLM_API_KEY", "sk-hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sk-hidden")
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    problem = f"{home}/venv/vllm/a.py not as built; so is /data/{user}/b.py"
    for args in ((), ("--json",)):
        status, out, err = run(*args, state=(problem,))
        assert status == 1
        assert "~/venv/vllm/a.py not as built; so is /data/USER/b.py" in out
        assert "VLLM_API_KEY" in out  # that it is set may be the cause
        for secret in ("hidden", "AWS", user, str(tmp_path)):
            assert secret not in out
        assert err == "to repair pip install vllm\n"


def test_a_home_folder_is_no_part_of_a_longer_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/bo")
    monkeypatch.setattr(getpass, "getuser", lambda: "bo")
    assert doctor.scrubbed(["/home/bob/x", "/home/bo/x", "/home/bo"]) == ["/home/bob/x", "~/x", "~"]
    monkeypatch.setenv("HOME", "/")
    assert doctor.scrubbed("/usr/lib/vllm") == "/usr/lib/vllm"


def test_a_user_without_a_name(monkeypatch):
    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert doctor.scrubbed({"a": ["x"], "b": 1}) == {"a": ["x"], "b": 1}


@pytest.mark.parametrize("capability", checks.CAPABILITIES)
def test_a_gpu_with_kernels(run, gpu, capability):
    gpu("NVIDIA X", capability)
    status, out, _ = run(variant="cuda")
    assert status == 0
    name = ".".join(map(str, capability))
    assert f"int4_kivi     CUDA kernels for compute capability {name}; torch sees 1 GPU with" in out


def test_a_gpu_without_kernels(run, gpu):
    gpu("Tesla T4", (7, 5))
    _, out, _ = run("--json", variant="cuda")
    why = json.loads(out)["int4_kivi"]["why_not"]
    assert "no kernels for Tesla T4 (compute capability 7.5), only for 8.0 or 8.6" in why
    assert why.endswith(checks.INSTEAD)


def test_no_driver(run, monkeypatch):
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check ...")

    monkeypatch.setattr(torch.cuda, "init", init)
    _, out, _ = run(variant="cuda")
    assert "int4_kivi     none: Found no NVIDIA driver on your system.\n" in out


def test_a_library_that_does_not_load(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_ops.load, "__defaults__", (tmp_path / "gone.so",))
    _, out, _ = run()
    assert "gone.so is missing: the installation is damaged" in out


def test_a_broken_installation_is_not_loaded(run, monkeypatch):
    monkeypatch.setattr(doctor, "_cpu", lambda: pytest.fail("loaded"))
    _, out, _ = run(state=("vllm 0.26.0 is installed in place of 0.25.1",))
    assert "int4_kivi     none: the installation is broken, see below" in out
    assert "WRONG         vllm 0.26.0" in out and "installation  not intact" in out


SMI = "580.159.04, NVIDIA L40S, 8.9, 46068 MiB, Enabled\n" * 2


@pytest.mark.parametrize(
    "status, out, driver, count",
    [(0, SMI, "580.159.04", 2), (0, "", None, 0), (9, "Failed to initialize NVML\n", "Failed", 0)],
)
def test_what_nvidia_smi_says(monkeypatch, status, out, driver, count):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    done = subprocess.CompletedProcess([], status, out, "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)
    found, gpus = doctor.nvidia()
    assert found == driver if status == 0 else driver in found
    assert len(gpus) == count
    wanted = {"name": "NVIDIA L40S", "capability": "8.9", "memory": "46068 MiB", "ecc": "Enabled"}
    assert all(g == wanted for g in gpus)


def test_nvidia_smi_that_says_nothing(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    done = subprocess.CompletedProcess([], 6, "", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)
    assert doctor.nvidia() == ("nvidia-smi ends with status 6", [])
