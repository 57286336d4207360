"""What the end-to-end tests share: how to run the program, and GGUF files damaged in known ways.

The program is $THERMOCLINE, else build/bin/thermocline. Plain Python, no packages.
"""
import math
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("THERMOCLINE", str(ROOT / "build/bin/thermocline"))
MODEL = ROOT / "models/plankton-q4_k_m.gguf"
DATA = ROOT / "tests/data"
SANITIZED = bool(os.environ.get("SANITIZED"))  # see tests/sanitized.py
PORTABLE = os.environ.get("THERMO_MAX_ISA") == "portable"
SLOW = SANITIZED or PORTABLE  # programs are much slower then, and get more time
# All that THERMO_MAX_ISA=portable leaves out, with the reason that the tests print.
LEFT_OUT_IF_PORTABLE = {
    "documents_test.py, commands with `bench`": "they measure for minutes with portable code or a sanitizer, so they are only read (--print-config)",
    "test_serve_load.py, Speed": "ratios of speeds are those of vector instructions",
}

USAGE, MODEL_ERROR, MEMORY, DEVICE, DEVICE_FAULT, INTERRUPTED = 2, 3, 4, 6, 7, 130

# What the machine was measured to do is kept for all tests of a script: each `plan` would measure it again. Heat is not kept.
CACHE = tempfile.TemporaryDirectory(prefix="thermocline-cache-")
(pathlib.Path(CACHE.name) / "thermocline").mkdir()
(pathlib.Path(CACHE.name) / "thermocline/heat").symlink_to("/dev/null/no-folder")


def clean_environment(**extra):
    """The environment without settings and configuration files of the person who runs the tests."""
    env = {k: v for k, v in os.environ.items()
           if k in ("THERMO_MAX_ISA", "THERMO_DEVICE") or (not k.startswith(("THERMO_", "LLAMA_", "CLICOLOR")) and k != "NO_COLOR")}
    env["XDG_CONFIG_HOME"] = "/dev/null"  # which nobody, root included, can make a folder of
    env["XDG_CACHE_HOME"] = CACHE.name
    env.update(extra)
    return env


def run(*arguments, stdin="", env=None, timeout=120):
    timeout *= 10 if SLOW else 1
    return subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, encoding="utf-8",
                          errors="surrogateescape", timeout=timeout, env=clean_environment(**(env or {})))


# An answer in a wide context is more text than a pipe holds: it cannot end before a test reads it, however long that takes.
ENDLESS = ("-c", "131072", "-n", "120000", "--ignore-eos", "--reasoning", "off", "--temp", "0")


def interrupt_until(program, text, patience=5.0):
    """Ctrl-C until the program says this on stderr. One that comes between two messages may be lost; two that come before the
    program looks are one."""
    seen, pipes = b"", [program.stderr, program.stdout]
    while text not in seen and program.poll() is None:
        program.send_signal(signal.SIGINT)
        end = time.monotonic() + patience
        while text not in seen and pipes and (left := end - time.monotonic()) > 0:
            for pipe in select.select(pipes, [], [], left)[0]:  # a program that nobody reads cannot say anything
                block = os.read(pipe.fileno(), 65536)
                if not block:
                    pipes.remove(pipe)
                if pipe is program.stderr:
                    seen += block


class ProgramTest(unittest.TestCase):
    maxDiff = None

    def answer(self, *arguments, **options):
        """Runs a command that has to succeed; returns its stdout."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}\nstdout: {result.stdout}\nstderr: {result.stderr}")
        return result.stdout

    def refusal(self, code, *arguments, **options):
        """Runs a command that has to fail with this code; returns the last line on stderr."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, code, f"{arguments}\nstdout: {result.stdout}\nstderr: {result.stderr}")
        self.assertEqual(result.stdout, "", "a failure leaves stdout empty")
        lines = result.stderr.rstrip("\n").split("\n")
        self.assertTrue(lines[-1].startswith("error: "), result.stderr)
        self.assertNotIn("\x1b", result.stderr)
        return lines[-1]


    def on_terminal(self, *arguments, code=0, width=80, until=None, **env):
        """stdout and stderr together, as a person sees them; `until`: a pattern, after which the program need not go on."""
        try:
            ours, theirs = pty.openpty()
        except OSError as error:
            self.skipTest(f"needs a pseudo-terminal (/dev/pts): {error}")
        termios.tcsetwinsize(theirs, (24, width))
        program = subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
                                   env=clean_environment(**({"TERM": "xterm-256color"} | env)))
        os.close(theirs)
        seen = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other end was closed
                break
            if not block:
                break
            seen += block
            if until and re.search(until, seen):
                program.kill()
                code = -signal.SIGKILL
        os.close(ours)
        self.assertEqual(program.wait(timeout=60), code, seen)
        return seen.decode(errors="replace" if until else "strict")


class Gguf:
    """A GGUF file as bytes, with the offsets of what the tests change."""
    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, path=MODEL):
        self.data = bytearray(pathlib.Path(path).read_bytes())
        self.at = 8
        n_tensors, n_keys = self._take("<QQ")
        self.values = {}   # key -> place of the value
        self.kinds = {}    # key -> its type
        self.tensors = {}  # name -> dict of places
        for _ in range(n_keys):
            key = self._string().decode()
            kind, = self._take("<I")
            self.values[key] = self.at
            self.kinds[key] = kind
            self._skip(kind)
        for _ in range(n_tensors):
            name = self._string().decode()
            n_dims, = self._take("<I")
            place = {"dims": self.at, "n_dims": n_dims}
            self.at += 8 * n_dims
            place["type"] = self.at
            place["offset"] = self.at + 4
            self.at += 12
            self.tensors[name] = place
        self.data_at = (self.at + 31) // 32 * 32

    def value(self, key):
        """The value of a key; None when it is not there."""
        if key not in self.values:
            return None
        self.at = self.values[key]
        return self._read(self.kinds[key])

    def _read(self, kind):
        if kind == 8:
            return self._string().decode()
        if kind == 9:
            element, count = self._take("<IQ")
            return [self._read(element) for _ in range(count)]
        return self._take("<" + self.SCALARS[kind])[0]

    def floats(self, name):
        """Dimensions and bytes of a float32 tensor."""
        place = self.tensors[name]
        assert struct.unpack_from("<I", self.data, place["type"])[0] == 0, name
        dims = list(struct.unpack_from(f"<{place['n_dims']}Q", self.data, place["dims"]))
        at = self.data_at + struct.unpack_from("<Q", self.data, place["offset"])[0]
        return dims, bytes(self.data[at:at + 4 * math.prod(dims)])

    def _take(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def _string(self):
        size, = self._take("<Q")
        self.at += size
        return bytes(self.data[self.at - size:self.at])

    def _skip(self, kind):
        if kind == 8:
            self._string()
        elif kind == 9:
            element, count = self._take("<IQ")
            for _ in range(count):
                self._skip(element)
        else:
            self._take("<" + self.SCALARS[kind])

    def put(self, place, form, value):
        struct.pack_into(form, self.data, place, value)

    def put_string(self, key, text):
        """Only a text of the same length: everything after it stays where it is."""
        place = self.values[key]
        size, = struct.unpack_from("<Q", self.data, place)
        assert len(text) == size, (key, size)
        self.data[place + 8:place + 8 + size] = text

    def save(self, folder, name):
        path = pathlib.Path(folder) / name
        path.write_bytes(self.data)
        return path


def temporary_folder(test):
    folder = tempfile.TemporaryDirectory()
    test.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name)
