#!/usr/bin/env python3
"""tools/eval_code.py: what it makes of answers, and that the number of clients does not matter."""
import contextlib
import http.server
import io
import json
import os
import pathlib
import resource
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/end_to_end")]
import eval_code  # noqa: E402
from server_harness import PATIENCE, Server, wait_until  # noqa: E402

MEAN = {"task_id": "t/mean", "prompt": "def mean(values):\n    \"\"\"The mean.\"\"\"\n", "entry_point": "mean",
        "test": "def check(candidate):\n    assert candidate([1, 2, 3]) == 2\n"}
RIGHT = "def mean(values):\n    return sum(values) / len(values)\n"
SECONDS, MEMORY = 2, 256 << 20  # for answers that never end


def judge(code, seconds=60):
    return eval_code.execute(MEAN, code, seconds, MEMORY)


def n_processes():
    """Processes that run answers for this test."""
    n, program = 0, str(ROOT / "tools/run_answer.py").encode()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            n += program in path.read_bytes()
    return n


class Judge(unittest.TestCase):
    def test_a_right_and_a_wrong_answer(self):
        self.assertEqual(judge(RIGHT), "passed")
        self.assertEqual(judge("def mean(values):\n    return 0\n"), "failed")
        self.assertEqual(judge("def mean(values:\n"), "failed")
        self.assertEqual(judge(""), "failed")

    def test_an_endless_answer(self):
        start = time.monotonic()
        self.assertEqual(judge("def mean(values):\n    while True:\n        pass\n", SECONDS), "timeout")
        self.assertEqual(judge("import time\ntime.sleep(1000)\n", SECONDS), "timeout")
        self.assertLess(time.monotonic() - start, 2 * SECONDS + PATIENCE)
        wait_until(lambda: n_processes() == 0)

    def test_a_forking_answer(self):
        for how in ("os.fork()", "assert os.system('sleep 100') == 0", "__import__('subprocess').Popen(['sleep', '100'])",
                    "__import__('multiprocessing').Process(target=print).start()", "os.execv('/bin/sleep', ['sleep', '100'])"):
            self.assertEqual(judge(f"import os\n{how}\n{RIGHT}"), "failed", how)
        bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
        self.assertEqual(judge(bomb, SECONDS), "timeout")
        wait_until(lambda: n_processes() == 0)

    def test_a_memory_hungry_answer(self):
        self.assertEqual(judge("def mean(values):\n    return len(bytearray(1 << 32))\n"), "memory")
        self.assertEqual(judge("x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n"), "memory")

    def test_an_answer_that_reaches_out(self):
        for code in ("import socket\nsocket.socket()\n", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1', timeout=1)\n",
                     "open('file', 'w')\n", "open('/tmp/thermocline-eval', 'a')\n", "import os\nos.unlink('/tmp')\n", "import os\nos.kill(os.getppid(), 9)\n",
                     "import os\nos.mkdir('x')\n", "import os\nos.utime('.')\n", "import os\nos.setxattr('.', 'user.a', b'b')\n",
                     "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 1)\n", "import os\nos.sched_setaffinity(os.getppid(), {0})\n",
                     "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"):
            self.assertEqual(judge(code + RIGHT), "failed", code)

    def test_an_answer_that_pretends(self):
        for code in ("import sys\nsys.exit(0)\n", "import os\nos._exit(0)\n", "print('passed')\nraise SystemExit\n"):
            self.assertEqual(judge(code + RIGHT), "failed", code)

    def test_an_answer_that_claims_to_pass(self):
        """Frames of the caller once held the secret that meant "passed"; and whoever shares a process with a test can bend it."""
        frames = """
import os, sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, str) and len(value) == 32:
            os.write(1, f"\\n{value}\\n".encode())
    frame = frame.f_back
os._exit(0)
"""
        agrees = "class Agrees:\n    def __eq__(self, other):\n        return True\n\ndef mean(values):\n    return Agrees()\n"
        frame = "import sys\ndef mean(values):\n    sys._getframe(1).f_globals['check'] = print\n    sys._getframe(1).f_locals.clear()\n    return 0\n"
        builtin = "import builtins, json, os\nbuiltins.AssertionError = os._exit = json.dumps = lambda *a: 0\ndef mean(values):\n    return 0\n"
        talks = """
import os
for fd in range(3, 20):
    for line in ('{"defined": true}', '{"value": true, "args": {"list": []}}', '{"raised": "SystemExit", "text": "0"}', '[]'):
        try:
            os.write(fd, line.encode() + b"\\n")
        except OSError:
            pass
os._exit(0)
"""
        for code in (frames, "def mean(values):\n    exec(" + repr(frames) + ", {})\n", agrees, frame, builtin, talks):
            with self.subTest(code):
                self.assertEqual(judge(code), "failed")

    def test_what_a_test_may_do_with_a_function(self):
        """Calls go to another process: arguments, results and exceptions must arrive as they were."""
        test = """
def check(candidate):
    import math
    values = [0, -1, 10 ** 6000, True, None, 0.1, math.inf, 1j, 'h\\u00e9\\ud800', b'\\x00', (1, [2]), {3}, frozenset({4}), {(1, 2): [None]}, bytearray(b'a')]
    for value in values:
        result = candidate(value)
        assert result == value and type(result) is type(value), value
    assert math.isnan(candidate(math.nan))
    assert candidate(value=[5]) == helper(4)
    numbers, table = [2, 1], {1: 2}
    candidate(numbers, True), candidate(table, True)
    assert numbers == [2, 1, 'new'] and table == {1: 2, 'new': 0}
    for wrong in (KeyError, ValueError, UnicodeDecodeError):
        try:
            candidate(wrong.__name__, True)
        except (wrong, RuntimeError) as error:
            assert type(error) is wrong or wrong is UnicodeDecodeError
        else:
            assert False
"""
        problem = {"prompt": "def helper(n):\n    return [n + 1]\n\ndef same(value, change=False):\n", "entry_point": "same", "test": test}
        code = """
def same(value, change=False):
    if change and isinstance(value, str):
        raise {"KeyError": KeyError(1), "ValueError": ValueError("no")}.get(value) or UnicodeDecodeError("utf-8", b"", 0, 1, "no")
    if change:
        value.append("new") if isinstance(value, list) else value.setdefault("new", 0)
    return value
"""
        self.assertEqual(eval_code.execute(problem, code, 60, MEMORY), "passed")
        problem["test"] = "def check(candidate):\n    candidate(print)\n"
        self.assertEqual(eval_code.execute(problem, code, 60, MEMORY), "not judged")

    def test_threads_and_output_are_fine(self):
        threads = "import threading\nt = threading.Thread(target=print, args=('x' * 1000,))\nt.start()\nt.join()\nprint('some output')\n"
        self.assertEqual(judge(threads + RIGHT), "passed")

    def test_what_an_answer_prints_takes_no_memory_here(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
        self.assertEqual(judge(f"for _ in range(256):\n    print('x' * (1 << 20))\n{RIGHT}"), "passed")
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 128 << 10)

    def test_the_problems_of_our_own(self):
        problems = [json.loads(line) for line in eval_code.OWN_PROBLEMS.read_text().splitlines()]
        self.assertEqual(len(problems), 20)
        for problem in problems:
            with self.subTest(problem["task_id"]):
                self.assertEqual(eval_code.execute(problem, problem["prompt"] + problem["canonical_solution"], 60, MEMORY), "passed")
                self.assertEqual(eval_code.execute(problem, problem["prompt"] + "    return 'nothing'\n", 60, MEMORY), "failed")

    def test_finds_the_function_in_an_answer(self):
        problem = {**MEAN, "prompt": "import math\n\n" + MEAN["prompt"]}
        body = "    return sum(values) / len(values)\n"
        for text in (f"Here:\n```python\n{RIGHT}```\nDone.", RIGHT, f"```\n{RIGHT}", f"```python\n{body}```", body, f"```py\nx = 1\n```\n```python\n{RIGHT}```"):
            code = eval_code.code_of(problem, text, "chat")
            self.assertIn("import math", code)
            self.assertEqual(judge(code), "passed", code)
        self.assertEqual(judge(eval_code.code_of(MEAN, body, "completion")), "passed")


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers a question with what `answers` has for its first word."""
    answers = {}

    def do_GET(self):
        body = json.dumps({"uses": {"device": 3, "host": 1}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = next(answer for name, answer in self.answers.items() if name in body["messages"][0]["content"])
        self.send_response(200 if text else 503)
        self.end_headers()
        for event in ({"choices": [{"delta": {"content": text}}]}, {"choices": [], "usage": {"completion_tokens": 7}, "timings": {"draft_n": 10, "draft_n_accepted": 4}}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


class Report(unittest.TestCase):
    def run_tool(self, *arguments):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = eval_code.main(list(map(str, arguments)))
        return code, out.getvalue()

    def test_prints_what_happened(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        Fake.answers = {"f_right": "def f_right():\n    return 1\n", "f_wrong": "def f_wrong():\n    return 2\n",
                        "f_endless": "def f_endless():\n    while 1: pass\n", "f_fork": "import os\ndef f_fork():\n    return os.fork()\n",
                        "f_hungry": "def f_hungry():\n    return 'x' * (1 << 33)\n", "f_none": ""}
        with tempfile.TemporaryDirectory() as folder:
            problems = pathlib.Path(folder) / "problems.jsonl"
            problems.write_text("".join(json.dumps({"task_id": n, "prompt": f"def {n}():\n", "entry_point": n,
                                                    "test": "def check(f):\n    assert f() == 1\n"}) + "\n" for n in Fake.answers))
            answers = pathlib.Path(folder) / "answers.jsonl"
            url = f"http://127.0.0.1:{server.server_port}/v1"
            code, out = self.run_tool(problems, "--url", url, "--execute", "--time", 12, "--memory", 256, "--clients", 3, "--json", "--answers", answers)
            self.assertEqual(code, 0)
            report = json.loads(out)
            self.assertEqual(report["tasks"], {"f_right": "passed", "f_wrong": "failed", "f_endless": "timeout", "f_fork": "failed",
                                               "f_hungry": "memory", "f_none": "no answer"})
            self.assertAlmostEqual(report["pass_at_1"], 1 / 6)
            self.assertAlmostEqual(report["acceptance"], 0.4)
            self.assertEqual(len(answers.read_text().splitlines()), 6)
            _, out = self.run_tool(problems, "--url", url)
            self.assertIn("pass@1       n/a", out)
            for word in ("tokens/s", "first token", "acceptance", "hot share"):
                self.assertIn(word, out)
        self.assertEqual(self.run_tool("--url", "http://127.0.0.1:1", "--limit", 1)[0], 1)

    def test_refuses_before_it_asks(self):
        for arguments in (["/nowhere"], [ROOT / "README.md"], ["--answers", "/nowhere/answers"]):  # this one came after all the work
            error = io.StringIO()
            with contextlib.redirect_stderr(error):
                self.assertEqual(eval_code.main(["--url", "http://127.0.0.1:1", "--limit", "1", *map(str, arguments)]), 2)
            self.assertTrue(error.getvalue().startswith("error: "), error.getvalue())
            self.assertNotIn("no problem was answered", error.getvalue())
        for arguments in (["--clients", "0"], ["--extra", "{x"], ["--extra", "5"], ["--limit", "-1"]):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                eval_code.parse_options(arguments)

    def test_as_many_pass_with_one_client_as_with_eight(self):
        with Server("--parallel", "8", "-c", "1024") as server, tempfile.TemporaryDirectory() as folder:
            runs = []
            for clients in (1, 8):
                answers = pathlib.Path(folder) / f"{clients}.jsonl"
                code, out = self.run_tool("--url", server.url, "--execute", "--clients", clients, "--max-tokens", 200, "--json", "--answers", answers,
                                          "--temperature", 0.8, "--time", 20)
                self.assertEqual(code, 0)
                report = json.loads(out)
                self.assertEqual((report["problems"], report["errors"]), (20, 0))
                self.assertIsNotNone(report["pass_at_1"])
                runs.append((report["pass_at_1"], report["tasks"], [json.loads(line)["text"] for line in answers.read_text().splitlines()]))
            self.assertEqual(runs[0], runs[1])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    unittest.main()
