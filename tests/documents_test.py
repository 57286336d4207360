#!/usr/bin/env python3
"""Runs the commands of README.md and docs/*.md as they are written.

A command is an indented line that begins with `thermocline` or `make`, or pipes into the program. Comments after two spaces and a #
are no part of it. Models that are not here (Qwen3.6..., MODEL.gguf) are links to the embedded one, so the same words run. Three kinds
are only read (`--print-config` is added): those that measure, those that write gigabytes, and those that download. `make test`, which
runs this, and what needs a card are left out.
"""
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
from harness import LEFT_OUT_IF_PORTABLE, PROGRAM, SLOW, clean_environment  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^ {4}((?:[^#\n|]*\| )?(?:(?:build/bin/)?thermocline|make|curl) [^\n]*)$", re.MULTILINE)
MODELS = ("Qwen3.6-35B-A3B-Q4_K_M.gguf", "MODEL.gguf", "model.gguf", "X")
TEXTS = ("book.txt", "TEXT")
# Measured elsewhere, with files of gigabytes that the lines before write; or from the network.
ONLY_READ = re.compile(r"(bench|serve) -m (s40|s8|laguna|dense|m)\.gguf|bench --url|synth .*(-a3b|-27b|-xs2)|OWNER/REPO")
LEFT_OUT = re.compile(r"^make test|gpu_check|\bbuild-cuda\b")


def commands(path):
    for match in COMMAND.finditer(re.sub(r"\\\n +", "", path.read_text())):  # lines that go on
        line = re.sub(r"\s{2,}#.*$", "", match[1]).strip()
        if not LEFT_OUT.search(line):
            yield line.replace("build/bin/thermocline", "thermocline")


class Documents(unittest.TestCase):
    """In a folder that has what the documents name."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("README.md", "Makefile", "tools", "models", "tests", "docs"):
            (self.folder / name).symlink_to(ROOT / name)
        for name in MODELS:
            (self.folder / name).symlink_to(ROOT / "models/plankton-q4_k_m.gguf")
        (self.folder / "drafter.gguf").symlink_to(ROOT / "models/plankton-draft-q8_0.gguf")
        for name in TEXTS:
            (self.folder / name).symlink_to(ROOT / "docs/quickstart.md")
        (self.folder / "bin").mkdir()
        (self.folder / "bin/thermocline").symlink_to(PROGRAM)
        home = self.folder / "home"
        home.mkdir()
        self.env = clean_environment(PATH=f"{self.folder}/bin:{os.environ['PATH']}", HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"))
        # The program is built already.
        (self.folder / "bin/make").write_text(f'#!/bin/sh\nexec /usr/bin/make -o build PROGRAM={shlex.quote(PROGRAM)} "$@"\n')
        (self.folder / "bin/make").chmod(0o755)

    def run_line(self, line):
        done = subprocess.run(["bash", "-ec", "set -o pipefail; " + line], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=3000 if SLOW else 300)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_commands_work_as_written(self):
        found = [(path, line) for path in DOCUMENTS for line in commands(path)]
        self.assertGreater(len(found), 50)
        if SLOW:
            print("commands with `bench`:", LEFT_OUT_IF_PORTABLE["documents_test.py, commands with `bench`"])
        for path, line in found:
            if line.startswith("curl") or (" serve " in line and not ONLY_READ.search(line)):
                continue
            with self.subTest(document=path.name, command=line):
                is_read = ONLY_READ.search(line) or (SLOW and "thermocline bench" in line)
                self.run_line(line + " --print-config" if is_read else line)

    def test_servers_answer_as_written(self):
        lines = {line for path in DOCUMENTS for line in commands(path)}
        if shutil.which("curl") is None:
            self.skipTest("there is no curl here")
        servers = sorted(line for line in lines if " serve " in line and not ONLY_READ.search(line))
        asked = sorted(line for line in lines if line.startswith("curl"))
        self.assertTrue(servers and asked)
        for line in servers:
            with self.subTest(command=line):
                server = subprocess.Popen(["bash", "-ec", "exec " + line], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                said = []
                for text in server.stderr:
                    said.append(text)
                    if "ready:" in text or "in use" in text:
                        break
                if "in use" in said[-1]:
                    server.communicate(timeout=60)
                    self.skipTest("the port of the documents is in use here")
                for question in asked:
                    self.run_line(question.replace("curl ", "curl --fail --silent --show-error ", 1))
                server.send_signal(signal.SIGTERM)
                server.communicate(timeout=60)
                self.assertEqual(server.returncode, 0)


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


class Makefile(unittest.TestCase):
    def test_the_help_lists_every_target_that_documents_name(self):
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
        shown = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", "help"], env=env, capture_output=True, text=True, check=True).stdout
        listed = {name for line in shown.splitlines() for name in line[:12].split()}
        pages = [path.read_text() for path in (*DOCUMENTS, ROOT / "CONTRIBUTING.md")]
        named = {name for page in pages for line in re.findall(r"^ {4}make ([a-z -]+)", page, re.MULTILINE) for name in line.split()}
        self.assertGreater(len(named), 5)
        self.assertEqual(named - listed, set())
        self.assertNotIn("$$", shown)


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
