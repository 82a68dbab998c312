"""docs/deploy.md names files, units, ports and flags: they are those of deploy/machine."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from machine import MACHINE

from s4kv_ext import cli

ROOT = MACHINE.parents[1]
TEXT = (ROOT / "docs" / "deploy.md").read_text()
COMMANDS = [x[4:] for x in TEXT.splitlines() if re.match(r"    \S", x)]
UNITS = {unit.stem for unit in MACHINE.glob("*.service")}
INSTALLED = {"/etc/s4kv/api-key", "/etc/s4kv/tls.key", "/etc/s4kv/shipped/", "/etc/s4kv"}
"""Beside what the installer lays with DESTDIR."""


def words(command: str) -> list[str]:
    return [x for x in shlex.split(command, comments=True) if x != "sudo"]


def run(*command: object) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command):
    run("bash", "-n", "-c", command)
    name, *rest = words(command)
    if name == "make":
        run("make", "-n", *rest)
    elif name == "deploy/machine/install.sh":
        assert (ROOT / name).stat().st_mode & 0o111
    elif name.endswith("s4kv"):
        args = cli.parser().parse_args(rest)
        assert args.run and name == "/opt/s4kv/bin/s4kv"
    elif name in ("systemctl", "journalctl"):
        named = {x for x in rest if x.startswith("s4kv")}
        assert named and named <= UNITS
        assert name == "journalctl" or rest[0] in ["status", "restart", "enable", "disable", "edit"]
    elif name == "curl":
        port, path = re.findall(r"http://127.0.0.1:(\d+)(/\S+)", command)[0]
        conf = (MACHINE / "nginx.conf").read_text()
        assert f"listen {port};" in conf or (f"127.0.0.1:{port};" in conf and path == "/metrics")
    else:
        assert name in ("nano", "openssl", "rm", "userdel"), "say here how to check it"


def test_there_are_commands():
    assert len(COMMANDS) > 15


def test_files_that_it_names_are_installed(tmp_path):
    subprocess.run(
        [MACHINE / "install.sh"],
        env={"PATH": "/usr/bin:/bin", "DESTDIR": str(tmp_path)},
        check=True,
    )
    for path in re.findall(r"(?:/etc|/usr/local)/[\w./-]*\w/?", TEXT):
        assert path in INSTALLED or (tmp_path / path[1:]).exists(), path
    for name in re.findall(r"`(\w+\.(?:sh|env|service|conf|py))`", TEXT.partition("## Install")[0]):
        assert (MACHINE / name).is_file(), name


def test_figures_are_those_of_the_files():
    conf, unit = (MACHINE / "nginx.conf").read_text(), (MACHINE / "s4kv.service").read_text()
    for said, in_file in (
        ("| body | 16 MiB |", "client_max_body_size 16m;"),
        ("| headers | 8 KB each, 32 KB in all |", "large_client_header_buffers 4 8k;"),
        ("of up to 64 letters", "{1,64}$"),
        ("| silence of the engine | 1 h;", "proxy_read_timeout 1h;"),
        ("10 s in the headers", "client_header_timeout 10s;"),
        ("30 s in the body", "client_body_timeout 30s;"),
        ("60 s in the answer", "send_timeout 60s;"),
    ):
        assert said in TEXT and in_file in conf, said
    for said, in_file in (
        ("at most 30 minutes", "TimeoutStartSec=30min"),
        ("no token for 60 s", "WatchdogSec=60\n"),
        ("after 2 s, later up to 60 s", "RestartSec=2\nRestartSteps=5\nRestartMaxDelaySec=60\n"),
        ("six starts in two hours", "StartLimitIntervalSec=2h\nStartLimitBurst=6\n"),
        ("after 120 s they are cut off", "--shutdown-timeout 120 "),
        ("cannot reach 169.254.169.254", "IPAddressDeny=169.254.169.254 "),
    ):
        assert said in TEXT and in_file in unit, said


def test_links():
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
