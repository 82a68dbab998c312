#!/usr/bin/env python3
"""Build the documentation as web pages into site/, with every link checked.

README.md is the first page, and the pages it links under More come in its order; others follow. A
page may link to a file of the project: that file is then part of the site. mkdocs-material does the
work, in an environment of its own.

examples:
  build/docs.py
  build/docs.py --serve     and look at http://127.0.0.1:8001/ while you write
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import env
from common import ROOT, TREE, Stop, main, say

DOCS = ROOT / "docs"
STAGE = TREE / "docs"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CONFIG = """\
site_name: s4kv-vllm
docs_dir: pages
site_dir: {site}
strict: true
use_directory_urls: false
theme:
  name: material
  font: false  # nothing is loaded from elsewhere
  features: [navigation.instant, navigation.top, toc.integrate, content.code.copy]
markdown_extensions:
  - admonition
  - sane_lists
  - pymdownx.superfences
  - toc: {{permalink: true}}
validation:
  links: {{anchors: warn, not_found: warn, unrecognized_links: warn, absolute_links: warn}}
nav:
{nav}"""


def pages() -> list[str]:
    """docs/*.md, those that README links first, in its order."""
    more = (ROOT / "README.md").read_text().split("## More")[-1]
    linked = re.findall(r"\]\(docs/([\w/-]+\.md)", more)
    found = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))
    return [n for n in dict.fromkeys(linked) if n in found] + [n for n in found if n not in linked]


def title(text: str) -> str:
    return re.search(r"^# (.+)$", text, flags=re.M)[1]  # type: ignore[index]


def listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{n}]({n})\n" for n in names)


def carry(target: Path) -> str:
    """Put a file or folder of the project, which a page links, into the site; its place there."""
    place = Path("source") / target.relative_to(ROOT)
    into = STAGE / "pages" / place
    into.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        shutil.copytree(target, into, dirs_exist_ok=True)
        (into / "index.md").write_text(listing(target))
        return f"{place}/index.md"
    shutil.copy(target, into)
    return str(place)


def staged(source: Path, name: str) -> str:
    """A page's text, its links as they are in the site."""

    def change(match: re.Match[str]) -> str:
        link = match[2]
        target = Path(os.path.normpath(source.parent / link))
        if "://" in link or not target.exists() or not target.is_relative_to(ROOT):
            return match[0]  # of the web, or broken: mkdocs will say so
        if target == ROOT / "README.md":
            place = "index.md"
        elif target.is_relative_to(DOCS):
            place = str(target.relative_to(DOCS))
        else:
            place = carry(target)
        new = posixpath.relpath(place, posixpath.dirname(name) or ".")
        return f"{match[1]}{new}{match[3] or ''}{match[4]}"

    return LINK.sub(change, source.read_text())


def stage(site: Path) -> Path:
    """The site's source in a folder of its own; the configuration's path."""
    shutil.rmtree(STAGE / "pages", ignore_errors=True)
    shutil.copytree(DOCS, STAGE / "pages")
    nav = []
    for name, source in [("index.md", ROOT / "README.md"), *((n, DOCS / n) for n in pages())]:
        text = staged(source, name)
        (STAGE / "pages" / name).write_text(text)
        if "/" not in name:  # pages in folders are reached from the page that links them
            nav.append(f"  - {title(text)}: {name}\n")
    config = STAGE / "mkdocs.yml"
    config.write_text(CONFIG.format(site=site, nav="".join(nav)))
    return config


def make(config: Path) -> None:
    """The site; Stop where a link is broken. (mkdocs counts only the warnings that it shows.)"""
    command = [
        str(env.programs("docs") / "mkdocs"),
        "build",
        "--clean",
        "--config-file",
        str(config),
    ]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        told = [x for x in done.stderr.splitlines() if x.startswith(("WARNING", "ERROR"))]
        raise Stop("\n  ".join(["the site is not whole:", *(told or [done.stderr[-2000:]])]))


def build(site: Path) -> None:
    TREE.mkdir(exist_ok=True)
    make(stage(site))
    say(f"{site}: {len(pages()) + 1} pages")


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--serve", action="store_true", help="serve them too")
    args = ap.parse_args()
    site = ROOT / "site"
    build(site)
    if args.serve:
        say("http://127.0.0.1:8001/")
        env.call([sys.executable, "-m", "http.server", "-b", "127.0.0.1", "-d", site, "8001"])


if __name__ == "__main__":
    main(run)
