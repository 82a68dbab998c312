"""A wheel writer whose bytes depend on the members alone.

Members of the base wheel are copied raw (compressed as they are). Members of our own are stored
uncompressed: there are few, and what zlib makes of them differs from machine to machine.
"""

from __future__ import annotations

import csv
import io
import struct
import zipfile
from base64 import urlsafe_b64encode
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

STAMP = (2026, 1, 1, 0, 0, 0)


def record_hash(data: bytes) -> str:
    return "sha256=" + urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()


class Base:
    """The upstream wheel."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.file = path.open("rb")
        self.members = {i.filename: i for i in self.zip.infolist() if not i.is_dir()}
        self.info = next(n.split("/")[0] for n in self.members if n.endswith(".dist-info/RECORD"))
        rows = csv.reader(self.text("RECORD").splitlines())
        self.record = {name: (checksum, size) for name, checksum, size in rows}

    def text(self, name: str) -> str:
        return self.zip.read(f"{self.info}/{name}").decode()

    def raw(self, name: str) -> bytes:
        """The member's compressed bytes."""
        info = self.members[name]
        self.file.seek(info.header_offset + 26)
        name_size, extra_size = struct.unpack("<HH", self.file.read(4))
        self.file.seek(name_size + extra_size, 1)
        return self.file.read(info.compress_size)


class Wheel:
    """Whole when it is closed, and nothing before: ``with`` removes what an error left."""

    def __init__(self, path: Path, dist_info: str) -> None:
        self.path, self.dist_info = path, dist_info
        self.part = path.with_name(path.name + ".part")
        self.zip = zipfile.ZipFile(self.part, "w", strict_timestamps=True)
        self.rows: list[tuple[str, str, str]] = []

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            z: Any = self.zip
            z._didModify = False  # else it would go on writing, here or when it is collected
            with suppress(OSError):
                z.close()
            self.part.unlink(missing_ok=True)

    def add(self, name: str, data: bytes, *, executable: bool = False) -> None:
        info = zipfile.ZipInfo(name, STAMP)
        info.create_system = 3
        info.external_attr = (0o100755 if executable else 0o100644) << 16
        self.zip.writestr(info, data, zipfile.ZIP_STORED)
        self.rows.append((name, record_hash(data), str(len(data))))

    def copy(self, base: Base, name: str) -> None:
        """Raw: zipfile has no call for it, so the header and the bytes are written through."""
        old = base.members[name]
        info = zipfile.ZipInfo(name, old.date_time)
        info.create_system, info.external_attr = 3, old.external_attr
        info.compress_type, info.CRC = old.compress_type, old.CRC
        info.compress_size, info.file_size = old.compress_size, old.file_size
        z: Any = self.zip  # some of what is used here is private
        z.fp.seek(z.start_dir)
        info.header_offset = z.fp.tell()
        z.fp.write(info.FileHeader(zip64=False))
        z.fp.write(base.raw(name))
        z.start_dir = z.fp.tell()
        z.filelist.append(info)
        z.NameToInfo[name] = info
        z._didModify = True
        self.rows.append((name, *base.record[name]))

    def close(self) -> Path:
        record = f"{self.dist_info}/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*self.rows, (record, "", "")])
        self.add(record, text.getvalue().encode())
        self.zip.close()
        self.part.replace(self.path)
        return self.path
