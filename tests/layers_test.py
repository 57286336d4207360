#!/usr/bin/env python3
"""Checks every #include of src/ against cmake/layers.txt, that nobody below cli names options, that the README
of every folder agrees, and that no script defines a test twice. A rule nobody checks leaks.

A folder that may include a single header of another one sees all that this header includes, and so on: what such a header
brings along stands in the table, too (`header.h -> folder folder/header.h`), so that it stays little.
"""

import ast
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
            folder, _, allowed = line.partition("->" if "->" in line else ":")
            layers[folder.strip()] = set(allowed.split())
    return layers


def brought_along(src, header):
    """Every header of ours that including `header` includes, itself left out."""
    seen, todo = set(), [header]
    while todo:
        for name in INCLUDE.findall((src / todo.pop()).read_text()):
            if name not in seen and (src / name).exists():
                seen.add(name)
                todo.append(name)
    return seen - {header}


def leaks(src, layers):
    for header, allowed in layers.items():
        if not header.endswith(".h"):
            continue
        for name in sorted(brought_along(src, header)):
            folder = name.split("/")[0]
            if folder != header.split("/")[0] and folder not in allowed and name not in allowed:
                yield f"{header} brings along {name}, which cmake/layers.txt does not allow it"
        for name in sorted(allowed):
            if name.endswith(".h") and name not in brought_along(src, header):
                yield f"cmake/layers.txt: {header} no longer brings along {name}; take it out"


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


def readmes(src, layers):
    """Every folder says what it is for and what it may include, as the table has it."""
    for folder, allowed in layers.items():
        if folder.endswith(".h") or not (src / folder).is_dir():
            continue
        path = src / folder / "README.md"
        text = path.read_text() if path.exists() else ""
        said = set(re.findall("`([^`]+)`", text.partition("May include ")[2].partition("\n\n")[0])) - {"cmake/layers.txt"}
        if not text:
            yield f"{folder}: no README.md that says what it is for and what it may include"
        elif said != allowed - {"*"}:
            yield f"{folder}/README.md: may include {sorted(said)}, but cmake/layers.txt says {sorted(allowed)}"


FLAG = re.compile(r'"(?:[^"]*[ (\'`])?--[a-z][a-z-]+[^"]*"')


def flags_in_messages(src):
    """Options belong to the command line; below it a message says what helps in its own words (base/error.h: Remedy)."""
    for path in sorted(src.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"} or path.relative_to(src).parts[0] == "cli":
            continue
        if re.search("_test|_bench", path.stem) or {"testing", "lab"} & set(path.parts):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FLAG.search(line.split("//")[0]):
                yield f"{path.relative_to(ROOT)}:{number}: an option of the command line in a message"


def hidden_tests(tests):
    """Python keeps the last of two classes or functions with one name; the tests of the first would never run."""
    for path in sorted(tests.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            seen = {}
            for node in scope.body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and seen.setdefault(node.name, node) is not node:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} hides the one of line {seen[node.name].lineno}"


def main():
    src, layers = ROOT / "src", read_layers(ROOT / "cmake" / "layers.txt")
    found = [*violations(src, layers), *leaks(src, layers), *flags_in_messages(src), *readmes(src, layers),
             *hidden_tests(ROOT / "tests")]
    print("\n".join(found) or "every include follows cmake/layers.txt")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
