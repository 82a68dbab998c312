"""What is compiled for one processor is not loaded on another."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """What a compiler looks at that builds for this very machine: instructions and model. The same
    text on every core and at every start."""
    told = ("flags", "Features", "model name", "CPU part")  # x86-64 and ARM
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(told)}))
