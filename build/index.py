"""A static package index of some wheels: the simple API in HTML and JSON, with relative links.

index.html of each project is what every server gives for its folder. index.json is the same by
PEP 691, for a server that chooses by the Accept header. Metadata lies beside each wheel (PEP 714),
so that a resolver need not fetch 250 MB to read it.
"""

from __future__ import annotations

import json
import zipfile
from email.parser import HeaderParser
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common import digest

PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><meta name="pypi:repository-version" content="1.1">
<title>{title}</title></head><body>
{body}</body></html>
"""


def metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        return z.read(name)


def entry(wheel: Path) -> dict[str, Any]:
    """One file as PEP 691 has it; its METADATA is written beside the wheel."""
    data = metadata(wheel)
    wheel.with_name(f"{wheel.name}.metadata").write_bytes(data)
    headers = HeaderParser().parsestr(data.decode())
    return {
        "filename": wheel.name,
        "url": f"../../{quote(wheel.name)}",
        "hashes": {"sha256": digest(wheel)},
        "size": wheel.stat().st_size,
        "requires-python": headers["Requires-Python"],
        "core-metadata": {"sha256": sha256(data).hexdigest()},
        "version": headers["Version"],
        "name": headers["Name"],
    }


def anchor(file: dict[str, Any]) -> str:
    return (
        f'<a href="{file["url"]}#sha256={file["hashes"]["sha256"]}" '
        f'data-requires-python="{escape(file["requires-python"])}" '
        f'data-core-metadata="sha256={file["core-metadata"]["sha256"]}">{file["filename"]}</a><br>\n'
    )


def write(folder: Path, wheels: list[Path]) -> None:
    """The index of wheels that lie in the folder above `folder`."""
    projects: dict[str, list[dict[str, Any]]] = {}
    for wheel in wheels:
        file = entry(wheel)
        projects.setdefault(file.pop("name").lower().replace("_", "-"), []).append(file)
    meta = {"api-version": "1.1"}
    for name, files in projects.items():
        place = folder / name
        place.mkdir(parents=True)
        body = "".join(map(anchor, files))
        (place / "index.html").write_text(PAGE.format(title=name, body=body))
        versions = sorted({f.pop("version") for f in files})
        page = {"meta": meta, "name": name, "versions": versions, "files": files}
        (place / "index.json").write_text(json.dumps(page, indent=1) + "\n")
    body = "".join(f'<a href="{name}/">{name}</a><br>\n' for name in projects)
    (folder / "index.html").write_text(PAGE.format(title="s4kv-vllm", body=body))
    root = {"meta": meta, "projects": [{"name": name} for name in projects]}
    (folder / "index.json").write_text(json.dumps(root, indent=1) + "\n")
