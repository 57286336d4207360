#!/usr/bin/env python3
"""`serve --stdio`: many requests over one pipe."""
import json
import queue
import subprocess
import threading
import time
import unittest

from harness import PROGRAM, clean_environment, run
from server_harness import ENDLESS, PATIENCE, WEATHER, WIDE, Server, ask

SUM = ask("What is 17 + 25?")
LONG = {"prompt": "One day", "temperature": 0, "ignore_eos": True}


class Pipe:
    """The program, and the lines that it writes."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([PROGRAM, "serve", "--stdio", *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=clean_environment())
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.ready = self.next()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def next(self):
        return self.lines.get(timeout=PATIENCE)

    def send(self, op, id=None, **members):
        self.write(json.dumps({"op": op, **({"id": id} if id else {}), **members}) + "\n")

    def write(self, text):
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def until(self, id, *events):
        """All lines up to the event of the id."""
        lines = []
        while not lines or not (lines[-1].get("id") == id and lines[-1]["event"] in (events or ("done", "error"))):
            lines.append(self.next())
        return lines

    def close(self):
        self.process.stdin.close()
        code = self.process.wait(PATIENCE)
        self.reader.join()
        self.process.stdout.close()
        return code

    def end(self):
        self.process.kill()
        if not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


def text_of(lines, id):
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or ""
                   for line in lines if line.get("id") == id and line["event"] == "tokens"
                   for choice in line["data"]["choices"])


class Stdio(unittest.TestCase):
    OPTIONS = ("--parallel", 2, "-c", 1024)

    def setUp(self):
        self.pipe = Pipe(*self.OPTIONS)
        self.addCleanup(self.pipe.end)

    def test_says_what_it_serves_and_ends_with_its_input(self):
        self.assertEqual((self.pipe.ready["event"], self.pipe.ready["model"], self.pipe.ready["n_ctx"], self.pipe.ready["slots"]),
                         ("ready", "plankton", 1024, 2))
        self.pipe.send("start", "a", body=SUM)
        self.pipe.process.stdin.close()  # what was asked is answered first
        lines = self.pipe.until("a")
        self.assertIn("42", text_of(lines, "a"))
        self.assertEqual(self.pipe.process.wait(PATIENCE), 0)

    def test_answers_many_at_once_as_the_server_does(self):
        prompts = [f"What is {i} + {2 * i}?" for i in range(8)]
        with Server("--parallel", "2", "-c", "1024") as server:
            whole = [server.post("/v1/chat/completions", ask(p))["choices"][0]["message"]["content"] for p in prompts]
        for i, prompt in enumerate(prompts):
            self.pipe.send("start", f"r{i}", body=ask(prompt))
        lines, open_ids = [], {f"r{i}" for i in range(8)}
        while open_ids:
            line = self.pipe.next()
            lines.append(line)
            if line["event"] == "done":
                self.assertEqual(line["finish_reason"], "stop")
                open_ids.remove(line["id"])
        for i, expected in enumerate(whole):
            self.assertEqual(text_of(lines, f"r{i}"), expected)
            mine = [line for line in lines if line.get("id") == f"r{i}"]
            self.assertEqual((mine[0]["event"], mine[-1]["event"]), ("start", "done"))
        usage = [line["data"]["usage"] for line in lines if line["event"] == "tokens" and line["data"].get("usage")]
        self.assertEqual(len(usage), 8)

    def test_speaks_every_api(self):
        turns = [{"role": "user", "content": "What is the weather in Paris?"}]
        tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
        self.pipe.send("start", "m", api="messages", body={"max_tokens": 200, "messages": turns, "tools": [tool], "temperature": 0})
        lines = self.pipe.until("m")
        self.assertEqual((lines[-1]["finish_reason"], lines[-1]["can_continue"]), ("tool_calls", False))
        self.assertTrue(any(line["data"].get("content_block", {}).get("type") == "tool_use" for line in lines if line["event"] == "tokens"))
        self.pipe.send("start", "r", api="responses", body={"input": "What is 17 + 25?", "temperature": 0})
        lines = self.pipe.until("r")
        self.assertEqual([line["data"]["type"] for line in lines if line["event"] == "tokens"][-1], "response.completed")

    def test_goes_on_where_an_answer_ended(self):
        for seed in ({}, {"temperature": 1.0, "seed": 11}):
            body = {**LONG, **seed}
            self.pipe.send("start", "whole", api="completions", body={**body, "max_tokens": 60})
            whole = text_of(self.pipe.until("whole"), "whole")
            self.pipe.send("start", "part", api="completions", body={**body, "max_tokens": 7})
            lines = self.pipe.until("part")
            for n in (1, 22, 30):
                self.assertTrue(lines[-1]["can_continue"], lines[-1])
                self.pipe.send("continue", "part", max_tokens=n)
                more = self.pipe.until("part")
                usage = [line["data"]["usage"] for line in more if line["event"] == "tokens" and line["data"].get("usage")][0]
                self.assertEqual(usage["completion_tokens"], n)
                # At most the tokens that a step had not computed are read again.
                self.assertLess(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], 32)
                lines += more
            self.assertEqual(text_of(lines, "part"), whole)

    def test_goes_on_with_log_probabilities(self):
        def tokens(lines):
            found = []
            for line in lines:
                for choice in line["data"]["choices"] if line["event"] == "tokens" else []:
                    lists = choice.get("logprobs") or {}
                    found += list(zip(lists["tokens"], lists["token_logprobs"])) if "tokens" in lists else []
                    found += [(e["token"], e["logprob"]) for e in lists.get("content") or []]
            return found
        for api, body in (("completions", {**LONG, "logprobs": 1}), ("chat", ask("Count from one to ten.", logprobs=True, reasoning_effort="none"))):
            self.pipe.send("start", "whole", api=api, body={**body, "max_tokens": 26})
            whole = self.pipe.until("whole")
            self.pipe.send("start", "part", api=api, body={**body, "max_tokens": 5})
            lines = self.pipe.until("part")
            for n in (1, 8, 12):
                self.pipe.send("continue", "part", max_tokens=n)
                lines += self.pipe.until("part")
            self.assertEqual(text_of(lines, "part"), text_of(whole, "whole"))
            self.assertEqual(tokens(lines), tokens(whole))

    def test_goes_on_under_a_schema(self):
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
                  "required": ["name", "n"], "additionalProperties": False}
        body = ask("Give me a name.", reasoning_effort="none", json_schema=schema)
        self.pipe.send("start", "a", body={**body, "max_tokens": 3})
        lines = self.pipe.until("a")
        while lines[-1]["can_continue"]:
            self.pipe.send("continue", "a", max_tokens=2)
            lines += self.pipe.until("a")
        answer = json.loads(text_of(lines, "a"))
        self.assertEqual(set(answer), {"name", "n"})

    def test_ends_a_thought_that_goes_on(self):
        body = ask("What is 17 + 25?", logit_bias={"</think>": -100}, ignore_eos=True, seed=1, reasoning_budget_tokens=900)
        self.pipe.send("start", "a", body={**body, "max_tokens": 600})
        while "reasoning_content" not in json.dumps(self.pipe.until("a", "tokens")):  # the first line has the role alone
            pass
        self.pipe.send("cancel", "a")
        self.assertTrue(self.pipe.until("a")[-1]["can_continue"])
        self.pipe.send("continue", "a", max_tokens=300)
        lines = self.pipe.until("a")
        self.assertTrue(text_of(lines, "a"), "the thought left nothing for the answer")

    # Its reasoning was counted again.
    def test_counts_what_a_run_wrote(self):
        self.pipe.send("start", "a", body=ask("What is 17 + 25?", seed=1, max_tokens=20))
        lines = self.pipe.until("a")
        while lines[-1]["can_continue"]:
            self.pipe.send("continue", "a", max_tokens=4)
            lines = self.pipe.until("a")
            for usage in [line["data"].get("usage") for line in lines if line["event"] == "tokens"]:
                if usage:
                    self.assertLessEqual(usage["completion_tokens_details"]["reasoning_tokens"], usage["completion_tokens"])

    def test_says_how_full_the_context_is(self):
        self.pipe.send("start", "a", api="completions", body={**LONG, "max_tokens": 4000})
        self.assertTrue(self.pipe.until("a")[-1]["can_continue"])
        self.pipe.send("continue", "a", max_tokens=10)
        error = self.pipe.until("a")[-1]
        self.assertEqual(error["event"], "error", error)
        self.assertGreater(error["data"]["error"]["n_prompt_tokens"], 1000, error)

    def bare(self, n_tokens):
        """The program with one long request, and nobody who reads."""
        process = subprocess.Popen([PROGRAM, "serve", "--stdio", "-c", "4096"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env=clean_environment())
        self.addCleanup(lambda: (process.kill(), process.wait()))
        process.stdin.write((json.dumps({"op": "start", "id": "a", "api": "completions", "body": {**LONG, "max_tokens": n_tokens}}) + "\n").encode())
        process.stdin.flush()
        return process

    def test_a_reader_that_stops_reading_stops_nothing_for_good(self):
        process = self.bare(4000)
        time.sleep(2)  # more is written than a pipe and the queue behind it hold
        process.stdin.close()
        lines = [json.loads(line) for line in process.stdout]
        self.assertEqual((lines[-1]["event"], lines[-1]["finish_reason"]), ("done", "length"))
        self.assertEqual(process.wait(PATIENCE), 0)
        process.stdout.close()

    def test_ends_when_nobody_reads(self):
        process = self.bare(4000)
        process.stdout.readline()
        process.stdout.close()
        self.assertEqual(process.wait(PATIENCE), 0)
        process.stdin.close()

    def test_does_not_listen(self):
        result = run("serve", "--stdio", "--listen", "http://127.0.0.1:0")
        self.assertEqual(result.returncode, 2)


class Orders(unittest.TestCase):
    """Orders for answers that would not end otherwise."""
    OPTIONS = ("--parallel", 2, *WIDE)
    setUp = Stdio.setUp

    def test_cancels_one_and_not_the_other(self):
        self.pipe.send("start", "a", api="completions", body={**LONG, **ENDLESS})
        self.pipe.send("start", "b", api="completions", body={**LONG, "max_tokens": 300})
        self.pipe.send("start", "c", api="completions", body={**LONG, "max_tokens": 5})  # waits for a slot
        lines = self.pipe.until("a", "tokens")
        self.pipe.send("cancel", "c")
        self.pipe.send("cancel", "a")
        # c may even end before a has begun: requests that come together are prepared side by side.
        while len(done := {line["id"]: line for line in lines if line["event"] in ("done", "error")}) < 3:
            lines.append(self.pipe.next())
        self.assertEqual(done["a"]["finish_reason"], "cancelled")
        self.assertEqual(done["b"]["finish_reason"], "length")
        self.assertIn(done["c"]["finish_reason"], ("cancelled", "length"))
        # A cancelled answer goes on, too.
        self.pipe.send("continue", "a", max_tokens=10)
        lines += self.pipe.until("a")
        part = text_of(lines, "a")
        n_events = sum(line.get("id") == "a" and line["event"] == "tokens" for line in lines)
        self.pipe.send("start", "d", api="completions", body={**LONG, "max_tokens": n_events + 64})  # an event is seldom more than a token
        whole = text_of(self.pipe.until("d"), "d")
        n = min(len(part), len(whole))
        self.assertGreater(n, 10)
        self.assertEqual(part[:n], whole[:n])

    def test_cancels_what_has_not_begun(self):
        start = {"op": "start", "id": "a", "api": "completions", "body": {**LONG, **ENDLESS}}
        for _ in range(20):
            self.pipe.write(json.dumps(start) + '\n{"op":"cancel","id":"a"}\n')
            self.assertEqual(self.pipe.until("a")[-1]["finish_reason"], "cancelled")

    def test_lists_and_refuses(self):
        self.pipe.send("start", "a", api="completions", body={**LONG, **ENDLESS})
        self.pipe.until("a", "tokens")
        self.pipe.send("list", "which")
        listed = self.pipe.until("which", "list")[-1]
        self.assertEqual([(r["id"], r["dialect"]) for r in listed["requests"]], [("a", "completions")])
        for line, status in (('{"op":"start","id":"a","body":{}}', 400), ('{"op":"continue","id":"a"}', 400), ('{"op":"cancel","id":"zz"}', 404),
                             ('{"op":"cancel","id":"a","run":77}', 404), ('{"op":"start","id":"x","body":{"messages":[]}}', 400)):
            self.pipe.write(line + "\n")
            id = json.loads(line)["id"]
            self.assertEqual(self.pipe.until(id, "error")[-1]["status"], status, line)
        self.pipe.write("nonsense\n")
        while (line := self.pipe.next())["event"] != "error":
            pass
        self.assertEqual(line["data"]["error"]["code"], "invalid_json")
        self.pipe.send("cancel", "a")
        self.assertEqual(self.pipe.until("a")[-1]["finish_reason"], "cancelled")
        self.assertEqual(self.pipe.close(), 0)


if __name__ == "__main__":
    unittest.main()
