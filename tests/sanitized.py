#!/usr/bin/env python3
"""Runs a test of a build with a sanitizer and fails when the sanitizer reports anything, in whichever process.

    sanitized.py REPORTS COMMAND...     # REPORTS: a folder for this test

A program that a test starts may end by a signal, and its errors may be read by nobody: so reports are files. Tests see SANITIZED=1
and give slow programs more time.
"""
import os
import pathlib
import shutil
import subprocess
import sys

folder, command = pathlib.Path(sys.argv[1]), sys.argv[2:]
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
every = {"log_path": folder / "report", "exitcode": 99, "handle_sigbus": 0}  # a mapped file may become shorter: ours to handle
options = {
    "ASAN_OPTIONS": every | {"detect_leaks": 1, "allocator_may_return_null": 1},
    "UBSAN_OPTIONS": every | {"print_stacktrace": 1},
    "TSAN_OPTIONS": every | {"suppressions": pathlib.Path(__file__).with_name("tsan.supp"), "second_deadlock_stack": 1},
}
environment = dict(os.environ, SANITIZED="1")
for name, values in options.items():
    environment[name] = ":".join(f"{key}={value}" for key, value in values.items())
code = subprocess.run(command, env=environment).returncode
reports = sorted(folder.iterdir())
for report in reports[:5]:
    print(f"\n{report.name}:\n{report.read_text(errors='replace')[:20000]}")
if reports:
    print(f"{len(reports)} processes with reports, in {folder}")
sys.exit(code or bool(reports))
