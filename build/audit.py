#!/usr/bin/env python3
"""Look for known vulnerabilities of what requirements/ locks and of what .venv holds.

It asks the service that pip-audit asks, which is a web server: where that cannot be reached nothing
is checked, which is said and is no failure, except in CI (where the variable CI is set).

examples:
  build/audit.py
  make install audit       the product's own dependencies too
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

import env
from common import Stop, main, say


def audit(what: str, *flags: str) -> bool:
    """Whether nothing is known against it. ConnectionError where the service knows none of it."""
    command = [str(env.programs("audit") / "pip-audit"), "--progress-spinner=off", "-f", "json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        raise ConnectionError(done.stderr.strip().splitlines()[-1][:300]) from None
    asked = [p for p in packages if "vulns" in p]
    if not asked:  # an index without such a service says of each that it is not there
        raise ConnectionError(packages[0]["skip_reason"])
    unknown = [p["name"] for p in packages if "vulns" not in p]
    said = f"{what}: {len(asked)} packages" + (f", without {', '.join(unknown)}" if unknown else "")
    found = [
        f"{p['name']} {p['version']}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'none'}"
        for p in asked
        for v in p["vulns"]
    ]
    say("\n  ".join([said, *(found or ["nothing known"])]))
    return not found


def run() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sound = []
    try:
        for path in sorted(env.REQUIREMENTS.glob("*.txt")):
            sound.append(audit(path.name, "--disable-pip", "--require-hashes", "-r", str(path)))
        for site in env.VENV.glob("lib/python*/site-packages"):
            sound.append(audit(".venv", "--path", str(site)))
    except ConnectionError as e:
        if os.environ.get("CI"):
            raise Stop(f"the service of known vulnerabilities did not answer: {e}") from e
        say(f"skipped: the service of known vulnerabilities cannot be reached from here: {e}")
        return 0
    return 0 if all(sound) else 1


if __name__ == "__main__":
    main(run)
