"""deploy/ by its linters, and what they cannot see: what its files say about each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from user_data import TEMPLATE, Stack, template

from s4kv_ext.guards import auth
from s4kv_ext.plan.gpus import INSTANCES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HERE = Path(__file__).parent

sys.path.insert(0, str(ROOT / "build"))
import env as build_env  # noqa: E402
import template as build_template  # noqa: E402

sys.path.remove(str(ROOT / "build"))


@pytest.fixture(scope="session")
def linters() -> Path:
    return build_env.programs("linters")


def lint(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_template_lints(linters: Path) -> None:
    lint(linters / "cfn-lint", "--non-zero-exit-code", "informational", TEMPLATE)


def test_checkov(linters: Path) -> None:
    """No finding, and no more skipped than is accounted for in the files."""
    files = ("-f", TEMPLATE, "-f", DEPLOY / "container" / "Dockerfile")
    told = json.loads(lint(linters / "checkov", *files, "--skip-download", "-o", "json"))
    results = {x["check_type"]: x["results"] for x in told}
    assert {k: [c["check_id"] for c in r["skipped_checks"]] for k, r in results.items()} == {
        "cloudformation": ["CKV_AWS_111"],
        "dockerfile": ["CKV_DOCKER_7"],
    }
    assert all(len(r["passed_checks"]) > 10 for r in results.values())


def test_scripts_lint() -> None:
    scripts = list(DEPLOY.rglob("*.sh"))
    assert len(scripts) >= 5
    lint(Path(sys.executable).with_name("shellcheck"), *scripts)


def test_the_container_file_lints(linters: Path) -> None:
    lint(linters / "hadolint", "--failure-threshold", "style", DEPLOY / "container" / "Dockerfile")


def test_the_template_holds_the_boot_script() -> None:
    text = TEMPLATE.read_text()
    assert build_template.filled(text) == text, "run: make template"


def test_the_template_fits() -> None:
    assert len(TEMPLATE.read_bytes()) < 51_200  # else it must be uploaded first
    ids = {"ModelId": "m" * 256, "ImageId": "ami-1", "VpcId": "v", "SubnetIds": "s"}
    names = ("StackName", "Region", "NoValue")
    known = {f"AWS::{x}": "x" * 128 for x in names} | dict.fromkeys(("Logs", "ApiKey"), "x" * 512)
    data = Stack(ids | {"ServeArguments": "a" * 2000}, known | {"StartHandle": "x" * 1024})
    assert len(data.user_data()) < 16_384


def test_the_template_knows_the_machines_that_plan_knows() -> None:
    assert template()["Parameters"]["InstanceType"]["AllowedValues"] == list(INSTANCES)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("AllowedCidr", ["", "10.0.0.0/16", "192.0.2.7/32"], ["0.0.0.0/0", "10.0.0.0/7", "10.0"]),
        ("ModelId", ["Qwen/Qwen3-8B", "s3://b/m"], ["a'; rm -rf /'", "$(x)", "", "-x"]),
        ("ServeArguments", ["", "--a 1 --b.c=d"], ["'", "`x`", "$x", '"', "a\nb", "\\"]),
        ("BundleSha256", ["", "0" * 64], ["0" * 63, "Z" * 64]),
        ("BundleKey", ["", "v1/s4kv-cuda.tar"], ["a'b", "a b"]),
        ("ArtifactBucket", ["", "a.bucket-1"], ["A", "a'b", "s3://x"]),
    ],
)  # fmt: skip
def test_parameters(name: str, good: list[str], bad: list[str]) -> None:
    """What goes into the script between single quotes cannot leave them."""
    pattern = template()["Parameters"][name]["AllowedPattern"]
    for value in good:
        assert re.fullmatch(pattern, value), value
    for value in bad:
        assert not re.fullmatch(pattern, value), value


def test_nothing_is_open_and_rights_are_few() -> None:
    """What checkov does not know: our own promises."""
    resources = template()["Resources"]
    assert "SecurityGroupIngress" not in resources["SecurityGroup"]["Properties"]
    assert resources["Ingress"]["Condition"] == "HasCidr"
    assert "KeyName" not in TEMPLATE.read_text()
    statements = [
        s
        for p in resources["Role"]["Properties"]["Policies"]
        for s in (p["Fn::If"][1] if "Fn::If" in p else p)["PolicyDocument"]["Statement"]
    ]
    statements = [s["Fn::If"][1] if "Fn::If" in s else s for s in statements]
    actions = [
        a for s in statements for a in [s["Action"]] for a in (a if isinstance(a, list) else [a])
    ]
    assert not [a for a in actions if "*" in a]
    wide = [s for s in statements if s["Resource"] == "*" and "Condition" not in s]
    assert len(wide) == 1
    assert all(a.startswith(("ssm:Update", "ssmmessages:")) for a in wide[0]["Action"])
    launch = resources["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    assert launch["MetadataOptions"]["HttpTokens"] == "required"
    assert all(d["Ebs"]["Encrypted"] is True for d in launch["BlockDeviceMappings"])


def test_the_script_ends_before_cloudformation_does() -> None:
    started = int(template()["Resources"]["Started"]["Properties"]["Timeout"])
    for minutes, t in template()["Mappings"]["Timeouts"].items():
        seconds = int(minutes) * 60
        assert t["Cloud"] in (f"PT{minutes}M", f"PT{int(minutes) // 60}H")
        # A last question of 30 s, a report of 90 s at most.
        assert seconds * 0.8 < int(t["Script"]) <= seconds - 120
        assert seconds < started


def test_the_alarms_watch_what_is_sent() -> None:
    alarms = [
        r["Properties"]
        for r in template()["Resources"].values()
        if r["Type"] == "AWS::CloudWatch::Alarm"
    ]
    assert {a["MetricName"] for a in alarms} == {"Ready", "disk_used_percent", "StatusCheckFailed"}
    script = (DEPLOY / "aws" / "ready-metric.sh").read_text()
    assert "--namespace s4kv --metric-name Ready" in script
    agent = json.loads((DEPLOY / "aws" / "cloudwatch-agent.json").read_text())["metrics"]
    assert agent["namespace"] == "s4kv"
    assert agent["aggregation_dimensions"] == [["Stack"]]  # the dimension of the alarm
    assert agent["metrics_collected"]["disk"]["measurement"] == ["used_percent"]


def test_packer(linters: Path) -> None:
    """It parses, and what it names is there. Packer's own check needs its plugin from the net."""
    file = DEPLOY / "image" / "s4kv.pkr.hcl"
    parsed = json.loads(lint(linters / "hcl2tojson", file))
    source = parsed["source"][0]["amazon-ebs"]["s4kv"]
    assert source["encrypt_boot"] == [True]
    assert source["metadata_options"][0]["http_tokens"] == ["required"]
    assert source["ssh_interface"] == ["session_manager"]
    used = set(re.findall(r"\bvar\.(\w+)", file.read_text()))
    assert used == {name for v in parsed["variable"] for name in v}
    for script in re.findall(r"\$\{path\.root\}/([\w.]+)", file.read_text()):
        assert (file.parent / script).exists()


def test_the_image_is_pinned_once() -> None:
    pin = re.compile(r"GPU AMI \(Ubuntu [\d.]+\) (\d{8})")
    texts = (p.read_text() for p in [*DEPLOY.rglob("*.hcl"), *(ROOT / "docs").glob("*.md")])
    found = [m for t in texts for m in pin.findall(t)]
    assert len(found) >= 2
    assert len(set(found)) == 1


VALUES = DEPLOY / "kubernetes" / "production-stack.yaml"
# The chart's templates take these, its schema does not name them.
UNNAMED = {"exec", "timeoutSeconds", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile",
           "allowPrivilegeEscalation", "capabilities", "rollingUpdate"}  # fmt: skip


def unknown(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Names that the schema has not. It allows any, and a misspelt one would do nothing."""
    if isinstance(value, list):
        return [x for v in value for x in unknown(v, schema.get("items", {}), at)]
    if not isinstance(value, dict) or not schema.get("properties"):
        return []
    known = schema["properties"]
    out = [f"{at}.{k}" for k in value if k not in known and k not in UNNAMED]
    return out + [x for k, v in value.items() for x in unknown(v, known.get(k, {}), f"{at}.{k}")]


def test_values_of_production_stack() -> None:
    values = yaml.safe_load(VALUES.read_text())
    schema = json.loads((HERE / "vendored" / "production-stack.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert not unknown(values, schema)
    (model,) = values["servingEngineSpec"]["modelSpec"]
    args = model["vllmConfig"]["extraArgs"]
    assert args[args.index("--kv-cache-dtype") + 1] == "int4_kivi"
    assert "lmcacheConfig" not in model  # KV connectors are refused
    # With a key every path needs it, and the chart's router reads metrics without one.
    assert values["servingEngineSpec"]["vllmApiKey"]
    assert {"name": auth.VARIABLE, "value": "/metrics"} in model["env"]


def test_llm_d(linters: Path, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which has kustomize in it")
    shutil.copytree(HERE / "llm-d", tmp_path, dirs_exist_ok=True)
    shutil.copytree(DEPLOY / "kubernetes" / "llm-d", tmp_path / "s4kv")
    built = tmp_path / "built.yaml"
    built.write_text(lint("kubectl", "kustomize", tmp_path / "s4kv"))
    lint(linters / "kubernetes-validate", "--strict", built)
    (deployment,) = yaml.safe_load_all(built.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--kv-cache-dtype=int4_kivi" in container["args"]
    assert "s4kv-vllm" in container["image"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"][:2] == ["s4kv", "ready"]
        assert "httpGet" not in container[probe]
        assert container[probe]["timeoutSeconds"] > int(container[probe]["exec"]["command"][-1])


def test_one_user_in_image_and_clusters() -> None:
    """Clusters check that the number is not 0; volumes belong to its group."""
    user = re.search(r"^USER (\d+):\1$", (DEPLOY / "container/Dockerfile").read_text(), re.M)
    assert user
    for path in (DEPLOY / "kubernetes").rglob("*.yaml"):
        for number in re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", path.read_text()):
            assert number == user[1]


def test_docs_name_what_is_there() -> None:
    """Parameters, outputs, files and make's targets of the two pages."""
    text = "".join((ROOT / "docs" / f"deploy-{x}.md").read_text() for x in ("aws", "kubernetes"))
    known = set(template()["Parameters"])
    given = set(re.findall(r"\b([A-Z][A-Za-z0-9]+)=(?!=)", text)) - {"Name", "Values"}
    given -= {x for x in given if x.isupper()}  # variables of make and docker
    assert given and given <= known
    table = text.split("| parameter |")[1].split("\n\n")[0]
    tabled = {
        x for row in re.findall(r"^\| (`.+?`) \|", table, re.M) for x in re.findall(r"\w+", row)
    }
    assert len(tabled) > 8 and tabled <= known
    outputs = set(re.findall(r"OutputKey=='(\w+)'", text)) | {"Tunnel"}
    assert outputs <= set(template()["Outputs"])
    for path in re.findall(r"\bdeploy/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^ +make (\w+)", text, re.M):
        assert f"\n{target}:" in makefile, target
    for flag in re.findall(r"-var (\w+)=", text):
        assert f'variable "{flag}"' in (DEPLOY / "image" / "s4kv.pkr.hcl").read_text()
