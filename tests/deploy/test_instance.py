"""An instance's first start, on a plain Debian with systemd: the template's user data, the image's
provisioning, the real units, the proxy and the CPU wheel. Only AWS itself is stood in for."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import plain_root
import pytest
from user_data import Stack

from s4kv_ext import models

pytestmark = pytest.mark.machine
ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "instance"
KEY = "a-key-that-nobody-else-may-see-0123456789"
MODEL = "s3://artifacts/smollm2"
CPU = "--dtype float32 --max-model-len 2048 --kv-cache-memory-bytes 268435456 --enforce-eager "
CPU += "--max-num-batched-tokens 512 --additional-config.int4_kivi.keys plain"  # starts sooner
KNOWN = {
    "AWS::StackName": "s4kv-test",
    "AWS::Region": "eu-west-1",
    "AWS::NoValue": "",
    "ApiKey": "arn:aws:secretsmanager:eu-west-1:1:secret:key",
    "Logs": "s4kv-test-Logs",
    "StartHandle": "http://127.0.0.1/signal?a=1&b=2",
}

sys.path.insert(0, str(ROOT / "build"))
import bundle as build_bundle  # noqa: E402
from common import TREE, cache_dir, digest, pins  # noqa: E402
from fetch import fetch  # noqa: E402

sys.path.remove(str(ROOT / "build"))


class Instance(plain_root.Machine):
    """An instance of the stack, as far as a test needs one."""

    def boot(self, *, seconds: int = 600, **parameters: str) -> tuple[int, str]:
        """Run the user data as cloud-init does; its status and the log."""
        given = {"ModelId": MODEL, "ArtifactBucket": "artifacts", "ServeArguments": CPU}
        ids = {"ImageId": "ami-1", "VpcId": "vpc-1", "SubnetIds": "subnet-1"}
        script = Stack(ids | given | parameters, KNOWN).user_data()
        # The time counts from the start of the machine, which this one shares with its host.
        up = int(float(Path("/proc/uptime").read_text().split()[0]))
        script, n = re.subn(r"(S4KV_SECONDS=)'\d+'", rf"\g<1>'{up + seconds}'", script)
        assert n == 1
        self.write("/root/user-data", script, 0o700)
        for name in ("s4kv-boot.log", "aws.jsonl", "signals.jsonl"):
            self.path(f"/var/log/{name}").unlink(missing_ok=True)
        return self.run("/root/user-data").returncode, self.read("/var/log/s4kv-boot.log")

    def calls(self, *what: str) -> list[dict]:
        """The calls of AWS's command line that begin so."""
        lines = map(json.loads, self.read("/var/log/aws.jsonl").splitlines())
        return [x for x in lines if tuple(x["args"][: len(what)]) == what]

    def signal(self) -> dict[str, str]:
        """What the stack was told, by both ways."""
        (told,) = map(json.loads, self.read("/var/log/signals.jsonl").splitlines())
        (call,) = self.calls("cloudformation", "signal-resource")
        assert call["args"][call["args"].index("--status") + 1] == told["Status"]
        assert told["UniqueId"] == "i-0123456789abcdef0"
        assert len(json.dumps(told)) < 4096  # what a wait condition takes
        return told

    def ready_metric(self) -> list[str]:
        self.path("/var/log/aws.jsonl").unlink(missing_ok=True)
        self.run("systemctl", "start", "s4kv-metric.service")
        return [x["args"][x["args"].index("--value") + 1] for x in self.calls("cloudwatch")]


def give_packages(machine: Instance) -> None:
    """Lend the environment that install.sh would fill the packages of .venv, but the product: pip
    then installs the wheels of the bundle and finds what they require."""
    mine = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    machine.binds[mine] = "/opt/lent"
    assert machine.chroot("python3", "-m", "venv", "--without-pip", "/opt/s4kv").returncode == 0
    (into,) = machine.path("/opt/s4kv/lib").glob("python3*/site-packages")
    for path in mine.iterdir():
        if not path.name.startswith(("vllm", "s4kv")):
            (into / path.name).symlink_to(f"/opt/lent/{path.name}")
    machine.write("/opt/s4kv/bin/pip", '#!/bin/sh\nexec /opt/s4kv/bin/python -m pip "$@"\n', 0o755)


@pytest.fixture(scope="module")
def bare() -> Iterator[Instance]:
    """A plain machine that runs, with AWS's programs, and a bundle and a model in the bucket."""
    plain_root.need()
    folder = TREE / f"instance-{os.getpid()}"
    machine = Instance(folder / "root")
    try:
        plain_root.make(machine.folder, cache_dir())
        bin_, agent = "/usr/local/bin", "/opt/aws/amazon-cloudwatch-agent/bin"
        for name, where in (("aws", bin_), ("amazon-cloudwatch-agent-ctl", agent)):
            machine.write(f"{where}/{name}", (STUBS / name).read_text(), 0o755)
        machine.write(f"{bin_}/cloud-init", "#!/bin/sh\n", 0o755)
        machine.write(f"{bin_}/signals", (STUBS / "signals.py").read_text(), 0o755)
        unit = f"[Service]\nExecStart={bin_}/signals\n[Install]\nWantedBy=basic.target\n"
        machine.write("/etc/systemd/system/signals.service", unit)
        machine.write("/var/lib/cloud/data/instance-id", "i-0123456789abcdef0\n")
        machine.write("/srv/secrets/key", KEY)
        bucket = machine.path("/srv/s3/artifacts")
        shutil.copytree(models.make(fetch(pins().files["model"]), "smollm2"), bucket / "smollm2")
        shutil.copy(build_bundle.build("cpu"), bucket / "bundle.tar")
        # Debian's package starts a server of its own, which an Ubuntu image has not.
        machine.chroot("systemctl", "disable", "nginx.service")
        machine.chroot("systemctl", "enable", "signals.service")
        machine.switch_on()
        yield machine
    finally:
        machine.switch_off()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def instance(bare: Instance) -> Instance:
    """An instance of the image: what Packer's script makes of the bare machine."""
    bare.switch_off()
    give_packages(bare)
    bare.write("/srv/provision.sh", (ROOT / "deploy/image/provision.sh").read_text(), 0o755)
    upload = "cp /srv/s3/artifacts/bundle.tar /tmp/ && exec /srv/provision.sh"
    done = bare.chroot("sh", "-c", upload, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    bare.switch_on()
    return bare


def test_no_bundle(bare: Instance) -> None:
    status, _ = bare.boot()
    assert status == 1
    assert "the image has no /opt/s4kv: give BundleKey" in bare.signal()["Reason"]


def test_another_bundle_than_was_meant(bare: Instance) -> None:
    status, _ = bare.boot(BundleKey="bundle.tar", BundleSha256="0" * 64)
    assert status == 1
    told = bare.signal()
    assert told["Status"] == "FAILURE"
    assert "bundle.tar has not the sha256 of BundleSha256" in told["Reason"]
    assert not bare.path("/opt/s4kv").exists()


def test_a_bundle_on_another_image(bare: Instance) -> None:
    """The error of what is called reaches the stack's events."""
    agent = bare.path("/opt/aws")
    agent.rename(agent.with_name("away"))
    sha = digest(bare.path("/srv/s3/artifacts/bundle.tar"))
    status, _ = bare.boot(BundleKey="bundle.tar", BundleSha256=sha)
    agent.with_name("away").rename(agent)
    assert status == 1
    assert "use the Deep Learning Base GPU AMI" in bare.signal()["Reason"]


def test_a_secret_that_may_not_be_read(instance: Instance) -> None:
    status, _ = instance.boot(ApiKeySecretArn="arn:aws:secretsmanager:eu-west-1:1:secret:other")
    assert status == 1
    assert "AccessDeniedException" in instance.signal()["Reason"]


def test_a_start_that_takes_too_long_ends_in_time(instance: Instance) -> None:
    start = time.monotonic()
    status, _ = instance.boot(seconds=4)
    assert time.monotonic() - start < 4 + 30 + 10  # the last question may take 30 s
    assert status == 1
    assert instance.signal()["Reason"].startswith("no completion came through the proxy in time")
    instance.run("systemctl", "kill", "--signal=KILL", "s4kv")
    instance.run("systemctl", "stop", "s4kv")


def test_a_failed_start_says_why(instance: Instance) -> None:
    once = instance.path("/etc/systemd/system/s4kv.service.d/once.conf")
    once.write_text("[Unit]\nStartLimitBurst=1\n")  # not six, which take minutes
    instance.run("systemctl", "reset-failed", "s4kv")
    status, log = instance.boot(ServeArguments="--no-such-flag")
    assert status == 1
    told = instance.signal()
    assert told["Status"] == "FAILURE"
    assert told["Reason"].startswith("the service failed and is not started again")
    assert "unrecognized arguments: --no-such-flag" in told["Reason"]  # the journal's last lines
    (call,) = instance.calls("logs", "put-log-events")
    assert "unrecognized arguments: --no-such-flag" in call["events"][0]["message"]
    assert KEY not in log + json.dumps(told) + json.dumps(call)
    assert instance.ready_metric() == ["0"]
    once.unlink()
    instance.run("systemctl", "reset-failed", "s4kv")


def test_success_is_a_completion_through_the_proxy(instance: Instance) -> None:
    status, log = instance.boot()
    assert status == 0, log + instance.run("journalctl", "-u", "s4kv", "-n", "60").stdout
    assert instance.signal()["Status"] == "SUCCESS"
    assert re.search(rf"ready: one token of {MODEL} in", log)
    assert KEY not in log
    proxy_log = instance.run("journalctl", "-u", "s4kv-proxy", "-o", "cat").stdout
    served = [json.loads(x) for x in proxy_log.splitlines() if x.startswith("{")]
    assert served[-1]["path"] == "/v1/completions"
    assert served[-1]["status"] == 200


def test_what_a_client_gets(instance: Instance) -> None:
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": [
        {"role": "user", "content": "What is the capital of France?"}]}  # fmt: skip
    ask = ("curl", "-s", "-w", "\n%{http_code}", "http://127.0.0.1:8080/v1/chat/completions")
    ask += ("-H", "Content-Type: application/json", "-d", json.dumps(body))
    text, _, code = instance.run(*ask, "-H", f"Authorization: Bearer {KEY}").stdout.rpartition("\n")
    assert code == "200", text
    assert "Paris" in json.loads(text)["choices"][0]["message"]["content"]
    assert instance.run(*ask).stdout.endswith("\n401")


def test_what_is_left_on_the_machine(instance: Instance) -> None:
    for name in ("api-key", "serve.env"):
        assert instance.path(f"/etc/s4kv/{name}").stat().st_mode & 0o077 == 0
    kept = instance.read("/var/log/agent.json")
    assert KNOWN["Logs"] in kept
    assert "@" not in kept
    for unit in ("s4kv", "s4kv-proxy", "s4kv-logfile", "s4kv-metric.timer"):  # after a reboot too
        assert instance.run("systemctl", "is-enabled", unit).stdout.strip() == "enabled"
    user = instance.run("systemctl", "show", "-P", "MainPID", "s4kv").stdout.strip()
    assert instance.run("stat", "-c", "%U", f"/proc/{user}").stdout.strip() == "s4kv"
    assert "Application startup complete" in instance.read("/var/log/s4kv/service.log")


def test_readiness_is_a_metric(instance: Instance) -> None:
    assert instance.ready_metric() == ["1"]
    instance.run("systemctl", "stop", "s4kv")
    assert instance.ready_metric() == ["0"]
