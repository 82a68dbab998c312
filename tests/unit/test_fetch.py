"""The pinned files: through pip's own index, verified, resumed, shared between runs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = os.urandom(3_000_000)
NAME = "demo-1.0-cp38-abi3-plan9_mips.whl"  # no tag of any machine that runs this
FETCH = """
import sys
sys.path.insert(0, sys.argv[1])
from common import Pinned, main
from fetch import fetch
main(lambda: print(fetch(Pinned("demo", sys.argv[2], sys.argv[3]))))
"""


class Index:
    """A small package index that can misbehave."""

    def __init__(self) -> None:
        self.ranges = True
        self.cut = 0  # how many replies to break off in the middle
        self.stall = False  # send half, then nothing
        self.asked: list[str | None] = []  # the Range header of each download
        index = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if "/simple/" in self.path:
                    page = f'<a href="/files/{NAME}">{NAME}</a>'.encode()
                    self.send_response(200)
                    self.send_header("Content-Type", "text/html")
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                    return
                wanted = self.headers.get("Range")
                index.asked.append(wanted)
                start = int(wanted[6:-1]) if wanted and index.ranges else 0
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(DATA) - start))
                self.end_headers()
                body = DATA[start:]
                if index.cut:
                    index.cut -= 1
                    body = body[: len(body) // 2]
                if index.stall:
                    self.wfile.write(body[: len(body) // 2])
                    time.sleep(30)
                self.wfile.write(body)
                self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.server.shutdown()


def command(file: str, digest: str) -> list[str]:
    return [sys.executable, "-c", FETCH, str(ROOT / "build"), file, digest]


def environment(cache: Path, **settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "S4KV_"))}
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept | proxies | {"PIP_CONFIG_FILE": os.devnull, "S4KV_CACHE": str(cache)} | settings


def run(
    cache: Path, digest: str = "", limit: int = 0, **settings: str
) -> subprocess.CompletedProcess[str]:
    """``limit``: bytes that a file may have, as on a full disk."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        command(NAME, digest or sha256(DATA).hexdigest()),
        preexec_fn=full if limit else None,
        env=environment(cache, **settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_download_then_cache_without_network(tmp_path: Path, index: Index) -> None:
    done = run(tmp_path, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / NAME).read_bytes() == DATA
    assert done.stdout.strip() == str(tmp_path / NAME)
    again = run(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple/")
    assert again.returncode == 0
    assert len(index.asked) == 1


def test_extra_index_and_missing_local_places(tmp_path: Path, index: Index) -> None:
    done = run(
        tmp_path,
        PIP_NO_INDEX="0",
        PIP_INDEX_URL="file:///nowhere/simple",
        PIP_EXTRA_INDEX_URL=index.url,
        PIP_FIND_LINKS="/nowhere/wheels",
    )
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_find_links_folder(tmp_path: Path, scheme: str) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / NAME).write_bytes(DATA)
    done = run(tmp_path / "cache", PIP_NO_INDEX="1", PIP_FIND_LINKS=f"{scheme}{links}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cache" / NAME).read_bytes() == DATA


def test_wrong_hash_stops_with_both_and_keeps_nothing(tmp_path: Path, index: Index) -> None:
    done = run(tmp_path, "0" * 64, PIP_INDEX_URL=index.url)
    assert done.returncode == 1
    assert "0" * 64 in done.stderr
    assert sha256(DATA).hexdigest() in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == []


def test_a_damaged_cached_file_is_named_not_replaced(tmp_path: Path, index: Index) -> None:
    (tmp_path / NAME).write_bytes(b"damaged")
    done = run(tmp_path, PIP_INDEX_URL=index.url)
    assert done.returncode == 1
    assert f"rm {tmp_path / NAME}" in done.stderr
    assert (tmp_path / NAME).read_bytes() == b"damaged"


def test_resume(tmp_path: Path, index: Index) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:1_000_000])
    done = run(tmp_path, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert index.asked == ["bytes=1000000-"]
    assert not (tmp_path / f"{NAME}.part").exists()


def test_a_server_without_ranges_starts_again(tmp_path: Path, index: Index) -> None:
    index.ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:1_000_000])
    done = run(tmp_path, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_broken_connection_is_resumed(tmp_path: Path, index: Index) -> None:
    index.cut = 1
    done = run(tmp_path, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert index.asked[0] is None
    assert index.asked[1] == f"bytes={len(DATA) // 2}-"


def test_two_runs_at_once_download_once(tmp_path: Path, index: Index) -> None:
    runs = [
        subprocess.Popen(
            command(NAME, sha256(DATA).hexdigest()),
            env=environment(tmp_path, PIP_INDEX_URL=index.url),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [r.wait(120) for r in runs] == [0, 0]
    assert len(index.asked) == 1


def test_ctrl_c_leaves_what_was_fetched(tmp_path: Path, index: Index) -> None:
    index.stall = True
    process = subprocess.Popen(
        command(NAME, sha256(DATA).hexdigest()),
        env=environment(tmp_path, PIP_INDEX_URL=index.url),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    part = tmp_path / f"{NAME}.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 1_000_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert part.stat().st_size > 1_000_000
    index.stall = False
    assert run(tmp_path, PIP_INDEX_URL=index.url).returncode == 0


def test_a_full_disk_and_then_a_free_one(tmp_path: Path, index: Index) -> None:
    done = run(tmp_path, limit=1_000_000, PIP_INDEX_URL=index.url)
    assert done.returncode == 1
    assert f"s4kv: error: cannot write {tmp_path / NAME}.part: " in done.stderr
    assert "Traceback" not in done.stderr and len(index.asked) == 1
    assert run(tmp_path, PIP_INDEX_URL=index.url).returncode == 0
    assert index.asked[1] == "bytes=1000000-"


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    no_folder = run(tmp_path / "file" / "cache", PIP_NO_INDEX="1")
    not_found = run(tmp_path, PIP_NO_INDEX="1")
    for done, text in ((no_folder, "cannot make the cache folder"), (not_found, "has no demo")):
        assert done.returncode == 1
        assert text in done.stderr
        assert "Traceback" not in done.stderr
