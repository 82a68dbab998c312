#!/usr/bin/env python3
"""Write the CycloneDX bill of materials of one vllm wheel, and validate it.

It names what the wheel is made from (the pinned upstream files and what those carry, our package)
and what it requires, at the versions that are pinned. Same wheel, same bytes. Needs
cyclonedx-python-lib; release.py runs it where that is.
"""

from __future__ import annotations

import argparse
import json
import tomllib
import zipfile
from datetime import datetime
from email.message import Message
from email.parser import HeaderParser
from hashlib import sha256
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
APACHE = "Apache-2.0"


def component(
    name: str, version: str | None, license_: str = "", digest: str = "", **more: str
) -> Component:
    """A library, of the package index unless `carried` says in which folder of the wheel it is."""
    carried = more.pop("carried", "")
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{carried and 'carried:'}{name}{version and f'@{version}'}",
        purl=None if carried else PackageURL("pypi", name=name.lower(), version=version),
        licenses=[LicenseFactory().make_from_string(license_)] if license_ else (),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else (),
        properties=[
            Property(name=f"s4kv:{k}", value=v)
            for k, v in {**more, **({"folder": carried} if carried else {})}.items()
        ],
    )


def required(metadata: Message) -> list[Component]:
    """Direct requirements that hold on Linux without an extra; a version where one is pinned."""
    found = {}
    for line in metadata.get_all("Requires-Dist") or []:
        r = Requirement(line)
        here = {"extra": "", "sys_platform": "linux", "platform_system": "Linux"}
        if r.marker and not r.marker.evaluate(here | {"platform_machine": "x86_64"}):
            continue
        pinned = [s.version for s in r.specifier if s.operator == "=="]
        what = {"required": str(r.specifier)} if r.specifier else {}
        found[r.name.lower()] = component(r.name, pinned[0] if pinned else None, **what)
    return list(found.values())


def carried(names: list[str]) -> list[Component]:
    """What upstream's wheel brings in folders of its own, by NOTICE's table."""
    table = tomllib.loads((ROOT / "vllm" / "carried.toml").read_text())
    return [
        component(name, None, row["license"], carried=row["folder"])
        for name, row in sorted(table.items())
        if any(n.startswith(row["folder"]) for n in names)
    ]


def make(wheel: Path, stamp: str) -> Bom:
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        read = next(n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(z.read(read).decode())
        info = json.loads(z.read("s4kv_ext/_build.json"))
    digest = sha256(wheel.read_bytes()).hexdigest()
    product = component("vllm", metadata["Version"], APACHE, digest, variant=info["variant"])
    pin = tomllib.loads((ROOT / "vllm" / "pin.toml").read_text())
    base = pin["wheel"][info["variant"]]
    made_from = [
        component(row["project"], pin["version"], APACHE, row["sha256"], file=row["file"])
        for row in (pin["source"], base)
    ]
    for part, row in zip(made_from, (pin["source"], base)):
        part.bom_ref.value = row["file"]
    ours = component("s4kv_ext", metadata["Version"], APACHE, carried="s4kv_ext/")
    parts, needs = [*made_from, ours, *carried(names)], required(metadata)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, digest), components=[*parts, *needs])
    bom.metadata.component = product
    bom.metadata.timestamp = datetime.fromisoformat(stamp)
    bom.register_dependency(product, [*parts, *needs])
    return bom


def run() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("wheel", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--time", required=True, help="ISO 8601; the commit's")
    args = ap.parse_args()
    text = JsonV1Dot6(make(args.wheel, args.time)).output_as_string(indent=1)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"s4kv: error: the SBOM is not valid CycloneDX: {wrong}")
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    run()
