"""uv does not read pip's configuration: this tells it the same by flags and environment."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common import Stop

# A later section wins over an earlier one, as in pip.
SECTIONS = ("global", "install", ":env:")
LISTS = {  # pip's name: uv's flag; pip takes several values, split at white space
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraint",
}
SINGLES = {
    "index-url": "--index-url",
    "keyring-provider": "--keyring-provider",
}
ENVIRONMENT = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
FALSE = ("0", "false", "no", "off", "")


def pip_settings(python: str) -> dict[str, str]:
    """`pip config list`, environment included, one value a name."""
    done = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Stop(f"pip config list failed: {done.stderr.strip()}")
    found: dict[str, dict[str, str]] = {s: {} for s in SECTIONS}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name.lower().replace("_", "-")] = ast.literal_eval(value)
    return {k: v for s in SECTIONS for k, v in found[s].items()}


def is_there(location: str) -> bool:
    """False for a local place that does not exist: pip ignores those, uv stops."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).exists()
    return bool(parts.scheme) or Path(location).expanduser().exists()


def uv_settings(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Flags and environment for uv that mean what pip's settings mean."""
    # pip takes the best version of all indexes; uv by default stops at the first that has the name.
    flags = ["--index-strategy", "unsafe-best-match"]
    for name, flag in LISTS.items():
        for value in settings.get(name, "").split():
            if name == "trusted-host" or is_there(value):
                flags += [flag, value]
    for name, flag in SINGLES.items():
        if settings.get(name) and (name != "index-url" or is_there(settings[name])):
            flags += [flag, settings[name]]
    if settings.get("no-index", "0").lower() not in FALSE:
        flags += ["--no-index"]
    if settings.get("pre", "0").lower() not in FALSE:
        flags += ["--prerelease", "allow"]
    env = {
        variable: settings[name]
        for name, variable in ENVIRONMENT.items()
        if settings.get(name) and variable not in os.environ
    }
    return flags, env
