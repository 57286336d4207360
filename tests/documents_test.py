#!/usr/bin/env python3
"""Runs every command of README.md and docs/*.md that needs neither a GPU nor a model of someone else, as it is written.

A command is an indented line of a block that begins with `thermocline` (or a pipe into it). Comments after two spaces and a # are
no part of it. What names a file that is not here needs a foreign model, and is left out; `make` is tested by building.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
from harness import PROGRAM, clean_environment  # noqa: E402

COMMAND = re.compile(r"^ {4}((?:[^#\n]*\| )?(?:build/bin/)?thermocline [^\n]*)$", re.MULTILINE)
FOREIGN = re.compile(r"Qwen|OWNER/REPO|Laguna|MODEL|model\.gguf|cuda|bench|\.\.\.|chat$|/dev/shm|35b|synth|sweep|\bX\b")


def commands(path):
    for match in COMMAND.finditer(re.sub(r"\\\n +", "", path.read_text())):  # lines that go on
        line = re.sub(r"\s{2,}#.*$", "", match[1]).strip()
        if not FOREIGN.search(line):
            yield line


class Documents(unittest.TestCase):
    def test_commands_work_as_written(self):
        documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        found = [(path, line) for path in documents for line in commands(path)]
        self.assertGreater(len(found), 4)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "thermocline").symlink_to(PROGRAM)
            env = clean_environment(PATH=f"{folder}:{os.environ['PATH']}")
            for path, line in found:
                with self.subTest(document=path.name, command=line):
                    line = line.replace("build/bin/thermocline", "thermocline")
                    done = subprocess.run(["bash", "-ec", line], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                                          text=True, timeout=300)
                    self.assertEqual(done.returncode, 0, done.stderr)


class Lists(unittest.TestCase):
    """What the documents list is what there is."""

    def setUp(self):
        self.page = (ROOT / "docs" / "terminal.md").read_text()

    def run_program(self, *arguments, **options):
        return subprocess.run([PROGRAM, *arguments], env=clean_environment(), capture_output=True, text=True, timeout=60, **options)

    def test_the_commands_of_chat(self):
        listed = set(re.findall(r"^\| `(/[a-z]+)", self.page, re.MULTILINE))
        shown = set(re.findall(r"^  (/[a-z]+)", self.run_program("chat", input="/help\n").stderr, re.MULTILINE))
        self.assertEqual(listed, shown)

    def test_the_exit_codes(self):
        manual = self.run_program("manual").stdout
        codes = set(re.findall(r"^\.TP\n\\fB(\d+)\\fR", manual, re.MULTILINE))
        listed = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", self.page, re.MULTILINE))))
        self.assertEqual(listed, codes)

    def test_the_example_configuration(self):
        text = (ROOT / "docs" / "config.toml").read_text()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.toml"
            path.write_text(re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE))
            done = self.run_program("run", "--config", str(path), "--print-config")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('ctx-size = "32K"', done.stdout)


class Install(unittest.TestCase):
    def test_the_manual_is_a_manual(self):
        manual = subprocess.run([PROGRAM, "manual"], capture_output=True, text=True, env=clean_environment()).stdout
        self.assertTrue(manual.startswith(".TH THERMOCLINE 1"))
        for word in ("run", "chat", r"\-\-expert\-cache", r"\-\-fail\-below", "EXIT STATUS"):
            self.assertIn(word, manual)
        for line in manual.splitlines():
            if line.startswith("."):
                self.assertRegex(line, r"^\.(TH|SH|SS|TP|PP|nf|fi)\b")

    def test_install_and_uninstall_are_each_others_opposite(self):
        with tempfile.TemporaryDirectory() as folder:
            make = ["make", "-C", str(ROOT), f"PREFIX={folder}", f"PROGRAM={PROGRAM}", "-o", "build"]
            env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
            done = subprocess.run([*make, "install"], capture_output=True, text=True, env=env)
            self.assertEqual(done.returncode, 0, done.stderr)
            files = {str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*") if p.is_file()}
            self.assertIn("bin/thermocline", files)
            self.assertIn("share/man/man1/thermocline.1", files)
            self.assertEqual(len(files), 6)
            self.assertTrue(all((pathlib.Path(folder) / name).stat().st_size > 100 for name in files))
            subprocess.run([*make, "uninstall"], capture_output=True, check=True, env=env)
            self.assertEqual([p for p in pathlib.Path(folder).rglob("*") if p.is_file()], [])


if __name__ == "__main__":
    unittest.main()
