"""Download one file of one project, or list its files, through pip's own finder and session.

Run by fetch.py and releases.py with an interpreter that has pip: PROJECT FILE PART downloads,
PROJECT alone prints each file and its sha256, as the index gives it. `pip download` would do for
wheels of this platform only, and for a source archive it runs the project's build backend; the
finder and the session beneath it give the link and the bytes alone, with every setting of pip
(index, find-links, proxy, certificate, login) in force. Tried with pip 22.3 to 26.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
import time
from pathlib import Path

CHUNK = 1 << 18
ATTEMPTS = 5
UNWRITABLE = (errno.EACCES, errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.EDQUOT)


class AnyFile:
    """Stands in for pip's link evaluator: the wanted file, or all, whatever tags and platform."""

    def __init__(self, project: str, wanted: str | None, found: object, skipped: object) -> None:
        self.project_name = project
        self.wanted, self.found, self.skipped = wanted, found, skipped

    def evaluate_link(self, link):
        if self.wanted in (None, link.filename):
            return self.found, "0"
        return self.skipped, "not the wanted file"


class Progress:
    """A bar on a terminal, a line each ten seconds elsewhere."""

    def __init__(self, name: str, done: int, total: int) -> None:
        self.name, self.done, self.total = name, done, total
        self.begun, self.start = time.monotonic(), done
        self.tty = sys.stderr.isatty()
        self.shown = 0.0 if self.tty else self.begun

    def add(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.shown > (0.2 if self.tty else 10):
            self.shown = now
            self.show(end="" if self.tty else "\n")

    def show(self, end: str) -> None:
        rate = (self.done - self.start) / max(time.monotonic() - self.begun, 1e-3) / 1e6
        size = f"{self.done / 1e6:.0f} MB"
        if self.total:
            share = min(self.done / self.total, 1)
            bar = "#" * int(share * 24)
            size = f"[{bar:<24}] {share:4.0%} of {self.total / 1e6:.0f} MB"
        head = "\r" if self.tty else ""
        sys.stderr.write(f"{head}s4kv: {self.name} {size}, {rate:.1f} MB/s  {end}")
        sys.stderr.flush()


def open_pip():
    """pip's session and finder, set up as its own `download` command sets them up."""
    from pip._internal.commands.download import DownloadCommand

    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--no-cache-dir", "x"])
    if not sys.stdin.isatty():
        options.no_input = True
    return command, options


def reason(warning: str) -> str:
    """What a warning of pip comes down to: the innermost message of a failed connection."""
    inner = re.findall(r"(?:[A-Z][a-z]+ [^'<>]*: )?\[Errno [^'<>\]]*\][^'<>)]*", warning)
    return (inner[-1] if inner else warning).strip()[:200]


def download(session, url: str, name: str, part: Path) -> None:
    """Bytes of `url` into `part`, going on after what it already holds."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    reply = session.get(url, stream=True, headers=headers)
    if reply.status_code == 416:  # nothing is left, or the file shrank: the hash will tell
        return
    reply.raise_for_status()
    if reply.status_code != 206:
        have = 0
    left = int(reply.headers.get("Content-Length") or 0)
    if shutil.disk_usage(part.parent).free < left:
        raise SystemExit(f"s4kv: error: {part.parent} has no room for {left / 1e6:.0f} MB")
    bar = Progress(name, have, have + left if left else 0)
    with part.open("ab" if have else "wb") as out:
        while chunk := reply.raw.read(CHUNK):
            out.write(chunk)
            bar.add(len(chunk))
    bar.show(end="\n")
    if left and bar.done != bar.total:
        raise ConnectionError(f"the connection closed after {bar.done} of {bar.total} bytes")


def run(project: str, wanted: str | None = None, part: Path | None = None) -> None:
    heard: list[str] = []

    class Ear(logging.Handler):  # pip's warnings are of use only where nothing was found
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.INFO and "Location" not in record.msg:
                heard.append(record.getMessage())

    logging.getLogger("pip").addHandler(Ear())
    logging.getLogger("pip").setLevel(logging.INFO)
    logging.getLogger("pip").propagate = False
    try:
        from pip._internal.index.package_finder import LinkType

        command, options = open_pip()
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options=options, session=session)
            stand_in = AnyFile(project, wanted, LinkType.candidate, LinkType.format_invalid)
            finder.make_link_evaluator = lambda name: stand_in
            links = [c.link for c in finder.find_all_candidates(project)]
            if not links:
                why = f" ({reason(heard[-1])})" if heard else ""
                what = f"file {wanted}" if wanted else "files"
                raise SystemExit(f"s4kv: error: pip's index has no {project} {what}{why}")
            if wanted is None or part is None:
                for link in links:
                    digest = link.hash if link.hash_name == "sha256" else ""
                    print(link.filename, digest, flush=True)
            else:
                fetch_any(session, links, wanted, part)
    except (ImportError, AttributeError, TypeError) as e:
        import pip

        raise SystemExit(
            f"s4kv: error: pip {pip.__version__} is not one this can drive ({e}); "
            "python -m pip install 'pip<27'"
        ) from e


def fetch_any(session, links, wanted: str, part: Path) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        link = links[(attempt - 1) % len(links)]
        try:
            download(session, link.url_without_fragment, wanted, part)
            return
        except Exception as e:  # of pip's vendored requests and urllib3, which have no public name
            if isinstance(e, OSError) and e.errno in UNWRITABLE:
                raise SystemExit(f"s4kv: error: cannot write {part}: {e.strerror}") from e
            told = " ".join(str(e).split())[:200] or type(e).__name__
            if attempt == ATTEMPTS:
                raise SystemExit(f"s4kv: error: {wanted}: {told}") from e
            print(f"\ns4kv: {told}; trying again", file=sys.stderr, flush=True)
            time.sleep(2 ** (attempt - 1))


if __name__ == "__main__":
    try:
        if len(sys.argv) == 2:
            run(sys.argv[1])
        else:
            run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(130)
