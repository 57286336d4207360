#!/usr/bin/env python3
"""Checks every #include of src/ against cmake/layers.txt. A rule nobody checks leaks."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def read_layers(path):
    layers = {}
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            folder, _, allowed = line.partition(":")
            layers[folder.strip()] = set(allowed.split())
    return layers


def violations(src, layers):
    for path in sorted(src.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        folder = path.relative_to(src).parts[0]
        if folder not in layers:
            yield f"{path.relative_to(ROOT)}: folder {folder} is not in cmake/layers.txt"
            continue
        allowed = layers[folder]
        for name in INCLUDE.findall(path.read_text()):
            target = name.split("/")[0]
            if "*" in allowed or target == folder or target in allowed or name in allowed:
                continue
            # Tests may look at anything: they sit beside the code, not inside it.
            if path.stem.endswith("_test") or "testing" in path.parts:
                continue
            yield f"{path.relative_to(ROOT)}: {folder} may not include {name}"


def main():
    found = list(violations(ROOT / "src", read_layers(ROOT / "cmake" / "layers.txt")))
    print("\n".join(found) or "every include follows cmake/layers.txt")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
