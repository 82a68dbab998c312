"""The documentation: its commands are tested or marked, its links hold, its figures are the code's.

Each block of commands (indented by four, or a fence of sh, bash, console or python) has a comment
above it, with an empty line between:

    <!-- tested: tests/e2e/test_server.py::test_paris -->     the tests that run it, with commas
    <!-- needs: GPU -->                                       what no test here has, one of NEEDS

Anything else that is shown as it is goes into a fence of another language (text, json, …).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt

from s4kv_ext import cli, format
from s4kv_ext.backend import RecentBackend
from s4kv_ext.packing import LanePacking
from s4kv_ext.quantize import dequantize, quantize

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = ("sh", "bash", "console", "python")
NEEDS = (
    "GPU",
    "AWS",
    "Kubernetes",
    "Prometheus",
    "a Git host",
    "a machine of its own",
    "an editor",
    "containers",
    "hours",
    "network",
)


@dataclass
class Block:
    page: str
    line: int
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        above = ""
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
            shell = token.type == "code_block" or (
                token.type == "fence" and token.info.split(" ")[0] in COMMANDS
            )
            if shell:
                assert token.map
                name = str(page.relative_to(ROOT))
                yield Block(name, token.map[0] + 1, above.strip(), token.content)
            above = token.content if token.type == "html_block" else ""


@pytest.mark.parametrize("block", list(blocks()), ids=str)
def test_commands_are_tested_or_marked(block: Block) -> None:
    match = re.fullmatch(r"<!-- (tested|needs): (.+) -->", block.mark)
    assert match, f"{block}: say which test runs this, or what it needs: see the head of this file"
    for item in re.split(r", ", match[2]):
        if match[1] == "needs":
            assert item in NEEDS, f"{block}: needs one of {', '.join(NEEDS)}"
            continue
        file, _, name = item.partition("::")
        assert (ROOT / file).is_file(), f"{block}: there is no {file}"
        if name:
            text = (ROOT / file).read_text()
            assert re.search(rf"(def|class) {name}\b", text), f"{block}: no {name} in {file}"


def words(text: str) -> list[list[str]]:
    """Commands of a block, continued lines joined, comments left out."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    parts = [p for line in lines for p in re.split(r" && |; ", line.split(" # ")[0])]
    return [p.split() for p in parts if p.strip()]


def test_targets_and_scripts_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks():
        for command in words(block.text):
            if command[0] == "make":
                # The first word after make, and those after it that are no prose.
                named = re.findall(r"^[a-z-]+$", command[1])
                assert all(f"\n{t}:" in makefile for t in named), f"{block}: make {command[1]}"
            elif re.match(r"(bench|build|deploy|\.ci)/", command[0]):
                assert (ROOT / command[0]).exists(), f"{block}: {command[0]}"


def test_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Of s4kv by its own help, of `vllm serve` by the source."""
    source = "".join(
        (ROOT / "vllm" / "src" / "vllm" / name).read_text()
        for name in ("engine/arg_utils.py", "entrypoints/openai/cli_args.py")
    )
    helps: dict[str, str] = {}
    for block in blocks():
        for command in words(block.text):
            program = command[0].rpartition("/")[2]
            ours = " ".join(command).split(" -- ")
            if program == "s4kv" and len(command) > 1:
                name = command[1]
                if name not in helps:
                    with pytest.raises(SystemExit):
                        cli.parser().parse_args([name, "--help"])
                    helps[name] = capsys.readouterr().out
                for option in re.findall(r"(?<= )--[a-z][a-z-]*", ours[0]):
                    assert option in helps[name], f"{block}: s4kv {name} {option}"
            engine = " ".join(ours[1:]) if program == "s4kv" else ""
            if command[:2] == ["vllm", "serve"]:
                engine = " ".join(command)
            for option in re.findall(r"(?<= )--([a-z][a-z-]*)", f" {engine}"):
                assert re.search(rf"\b{option}\b|\b{option.replace('-', '_')}\b", source), (
                    f"{block}: vllm serve --{option}"
                )


# The page about the format.

FORMAT = (ROOT / "docs" / "format.md").read_text()


@pytest.mark.parametrize("dim", format.HEAD_SIZES)
def test_sizes_of_the_format_page(dim: int) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", FORMAT, flags=re.M)
    column = 1 + 2 * format.HEAD_SIZES.index(dim)
    told = {row[0]: (int(row[column]), int(row[column + 1])) for row in rows}
    assert told == format.sections(dim)
    assert list(told) == list(format.sections(dim))
    size = format.head_page_bytes(dim)
    recent = {
        format.recent_page_tokens(dim, dtype) * 2 * dim * dtype.itemsize for dtype in format.DTYPES
    }
    (used,) = recent
    assert f"| bytes of a KV head, head_dim {dim} | {size} | {used} of {size} |" in FORMAT
    bits = [f"{format.head_page_bytes(d) * 8 / (2 * format.BLOCK * d):.2f}" for d in (64, 128)]
    assert f"| a sealed page | {' | '.join(bits)} |" in FORMAT


def test_numbers_of_the_format_page() -> None:
    assert f"Format version {format.FORMAT_VERSION}." in FORMAT
    assert f"max(0, (n - {format.RECENT}) // {format.BLOCK} * {format.BLOCK})" in FORMAT
    assert all(
        f"| tokens | {format.BLOCK} | 16 in bfloat16 and float16, 8 in" in FORMAT for _ in [0]
    )
    assert f"The first {format.SINKS} tokens stay" in FORMAT
    assert f"there are head_dim + {format.EXTRA_SLOTS} slots" in FORMAT
    # Keys, then values, without gaps between the heads.
    assert RecentBackend.get_kv_cache_shape(9, 16, 2, 64) == (9, 2, 2, 16, 64)


@pytest.mark.parametrize("dim", format.HEAD_SIZES)
def test_the_code_of_the_format_page_reads_a_page(dim: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", FORMAT, flags=re.S)
    scope: dict[str, object] = {}
    exec(code, scope)
    torch.manual_seed(dim)
    key, value = torch.randn(2, format.BLOCK, 2, dim) * torch.tensor([3e4, 1e-3]).view(2, 1, 1, 1)
    slots = torch.arange(format.key_slots(dim), dtype=torch.int16)
    slots[dim:] = -1  # one slot a channel, and 16 without one
    slot_channel = torch.stack((slots, slots.clone()))
    # The second head: two slots for the first 16 channels.
    slot_channel[1] = torch.arange(dim).repeat_interleave(2)[: len(slots)].to(torch.int16)
    slot_channel[1] = slot_channel[1].sort().values
    block = quantize(key, value, slot_channel, has_sinks=False)
    page = LanePacking().pack(block)
    expected = dequantize(block, slot_channel)
    for head in range(2):
        read = scope["read_head"](  # type: ignore[operator]
            page[head].numpy().tobytes(), slot_channel[head].tolist(), dim
        )
        for got, want in zip(read, expected):
            torch.testing.assert_close(torch.tensor(got), want[:, head], rtol=1e-5, atol=1e-7)


# The site.


@pytest.fixture(scope="module")
def builder():
    sys.path.insert(0, str(ROOT / "build"))
    import docs

    sys.path.remove(str(ROOT / "build"))
    return docs


def test_the_site_is_built_and_every_page_is_in_it(builder, tmp_path: Path) -> None:
    builder.build(tmp_path / "site")
    home = (tmp_path / "site" / "index.html").read_text()
    for name in builder.pages():
        assert (tmp_path / "site" / name).with_suffix(".html").is_file()
        if "/" not in name:
            assert f'href="{Path(name).with_suffix(".html")}"' in home, f"{name} is not in the menu"
    assert "source/s4kv_ext/format.py" in (tmp_path / "site" / "format.html").read_text()
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'<(?:script|link rel="stylesheet)[^>]+"https?://[^"]+"', home)


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](install.md#nowhere)"])
def test_a_broken_link_fails_the_build(builder, tmp_path: Path, link: str) -> None:
    config = builder.stage(tmp_path / "site")
    page = config.parent / "pages" / "size.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    with pytest.raises(builder.Stop, match="nowhere"):
        builder.make(config)
