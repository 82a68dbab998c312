#!/usr/bin/env python3
"""Write what nginx compares keys with: proxy_key.py KEYFILE OUT.

OUT gets a salted hash of the key in KEYFILE, in nginx's own terms, and belongs to whom its folder
does. Another salt each time.
"""

import base64
import hashlib
import os
import re
import secrets
import sys

ALLOWED = r"[A-Za-z0-9._~+/=-]{32,256}"


def main(key_file: str, out: str) -> None:
    try:
        with open(key_file) as f:
            key = f.read().strip()
    except (OSError, UnicodeDecodeError) as e:
        sys.exit(f"s4kv-proxy: no key: {e}")
    if not re.fullmatch(ALLOWED, key):
        sys.exit(
            f"s4kv-proxy: the key in {key_file} must be 32 to 256 letters, digits and ._~+/=-; "
            "make one: openssl rand -hex 32"
        )
    salt = secrets.token_hex(32)
    hashed = hashlib.md5((salt + key).encode(), usedforsecurity=False).digest()
    told = base64.urlsafe_b64encode(hashed).decode().rstrip("=")
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        folder = os.stat(os.path.dirname(out))
        os.fchown(f.fileno(), folder.st_uid, folder.st_gid)
        f.write(f'secure_link_md5 "{salt}$token";\nsecure_link "{told}";\n')


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
