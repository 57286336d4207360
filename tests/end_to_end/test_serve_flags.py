#!/usr/bin/env python3
"""Flags of `serve` that hold where a request says nothing, and what operators ask for."""
import concurrent.futures
import http.server
import json
import os
import pathlib
import signal
import tempfile
import threading
import time
import tomllib
import unittest

from gguf_copy import GgufCopy
from harness import MODEL, ProgramTest, USAGE, run, temporary_folder
from server_harness import PARIS, WEATHER, Server, ask, wait_until

SUM = "What is 17 + 25?"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def reasoned(server, **more):
    """The message, and how its reasoning ended."""
    reply = server.post(CHAT, ask(SUM, **more))
    return reply["choices"][0]["message"], reply["timings"]["reasoning_close"]


class Reasoning(unittest.TestCase):
    def test_has_a_budget_and_its_words(self):
        with Server("-c", "2048", "--reasoning-budget", "3", "--reasoning-budget-message", " Enough.") as server:
            message, close = reasoned(server)
            self.assertEqual(close, "budget")
            self.assertTrue(message["reasoning"].endswith(" Enough."), message)
            # What a request says comes first.
            self.assertEqual(reasoned(server, reasoning_budget_tokens=500)[1], "natural")
            self.assertEqual(server.get("/props")["reasoning"]["budget"], 3)

    # Every limit was ignored where the model opens the thought itself.
    def test_has_a_budget_where_the_template_opens_no_thought(self):
        template = run("inspect", "--template").stdout
        opens = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
        self.assertIn(opens, template)
        path = temporary_folder(self) / "t.jinja"
        path.write_text(template.replace(opens, "{{- '<|im_start|>assistant\\n' }}"))
        with Server("-c", "2048", "--chat-template-file", path) as server:
            open_end = {"max_tokens": 200, "logit_bias": {"</think>": -100}, "ignore_eos": True}
            message, close = reasoned(server, reasoning_budget_tokens=20, **open_end)
            self.assertEqual(close, "budget", message)
            self.assertTrue(message["content"], message)
            self.assertEqual(reasoned(server, **open_end)[1], "reserve")
            self.assertEqual(reasoned(server, reasoning_effort="none")[1], "none")

    def test_has_an_effort(self):
        with Server("-c", "2048", "--reasoning-effort", "none") as server:
            message, close = reasoned(server)
            self.assertEqual((close, "reasoning" in message), ("none", False))
            self.assertIn("reasoning", reasoned(server, reasoning_effort="low")[0])
            self.assertIn("reasoning", reasoned(server, chat_template_kwargs={"enable_thinking": True})[0])

    def test_can_stay_in_the_content(self):
        with Server("-c", "2048", "--reasoning-format", "none") as server:
            self.assertIn("</think>", reasoned(server)[0]["content"])
            message = reasoned(server, reasoning_format="deepseek")[0]
            self.assertNotIn("</think>", message["content"])
            self.assertIn("reasoning", message)
            status, _, reply = server.request("POST", CHAT, ask(SUM, reasoning_format="loud"))
            self.assertEqual((status, reply["error"]["param"]), (400, "reasoning_format"))
            # Calls are told from text there, too, and other APIs have a place for reasoning.
            for thinking in (True, False):
                called = server.post(CHAT, ask(PARIS, tools=[WEATHER], chat_template_kwargs={"enable_thinking": thinking}))["choices"][0]
                self.assertEqual(called["finish_reason"], "tool_calls", called)
                self.assertEqual(called["message"]["tool_calls"][0]["function"]["name"], "get_weather")
                self.assertNotIn("<tool_call>", called["message"]["content"] or "")
            blocks = server.post("/v1/messages", ask(SUM, max_tokens=500, thinking={"type": "enabled", "budget_tokens": 200}))["content"]
            self.assertEqual([block["type"] for block in blocks], ["thinking", "text"])

    def test_can_be_in_both_places(self):
        with Server("-c", "2048", "--reasoning-format", "deepseek-legacy") as server:
            message = reasoned(server)[0]
            self.assertTrue(message["content"].startswith(f"<think>\n{message['reasoning']}\n</think>\n\n"), message)
            self.assertIn("42", message["content"].split("</think>")[1])
            streamed = {"content": "", "reasoning": ""}
            for _, chunk in server.stream(CHAT, ask(SUM)):
                for choice in chunk["choices"] if chunk != "[DONE]" else []:
                    for name in streamed:
                        streamed[name] += choice["delta"].get(name) or ""
            self.assertEqual(streamed, {name: message[name] for name in streamed})
            # Sent back, it is the same conversation: everything of it is in memory.
            again = ask(SUM)
            again["messages"] += [message, {"role": "user", "content": "And 1 + 1?"}]
            timings = server.post(CHAT, again)["timings"]
            self.assertGreater(timings["cache_n"], 2 * timings["prompt_n"])

    def test_leaves_room_for_an_answer_whatever_the_limit_is(self):
        with Server("-c", "256", "--loop-guard", "off") as server:
            end = server.post("/tokenize", {"content": "</think>"})["tokens"]
            for limit in ({}, {"max_tokens": 180}, {"max_tokens": 100000}):
                message, close = reasoned(server, ignore_eos=True, logit_bias={str(id): -100 for id in end}, **limit)
                self.assertEqual(close, "reserve", limit)
                self.assertTrue(message["content"], limit)


class Tokens(unittest.TestCase):
    def test_special_ones_in_texts_are_read_when_told_to(self):
        body = {"messages": [{"role": "user", "content": "x<|im_end|>y"}]}
        with Server("-c", "512") as server:
            plain = server.post("/apply-template", body)
        with Server("-c", "512", "--parse-special-in-content") as server:
            read = server.post("/apply-template", body)
        self.assertLess(read["n_tokens"], plain["n_tokens"])
        self.assertEqual(read["prompt"], plain["prompt"])


class Runs(unittest.TestCase):
    PROMPT = "the cat and the dog and the cat and the dog and the"

    def write(self, server, **more):
        body = {"prompt": self.PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        return server.post("/v1/completions", {**body, **more})["choices"][0]["text"]

    def test_end_at_texts(self):
        dry = {"dry_multiplier": 100, "dry_allowed_length": 1}
        with Server("-c", "512") as server:
            plain = self.write(server)
            letters = sorted(set(self.PROMPT + plain))  # no run is longer than nothing
            self.assertLessEqual(len(letters), 32)
            self.assertNotEqual(self.write(server, **dry, dry_sequence_breakers=[]), plain)
            self.assertEqual(self.write(server, **dry, dry_sequence_breakers=letters), plain)
            self.assertIn("dry_sequence_breakers", server.get("/props")["sampling"]["supported"])
        with Server("-c", "512", "--dry-multiplier", "100", "--dry-allowed-length", "1",
                    *(flag for letter in letters for flag in ("--dry-sequence-breaker", letter))) as server:
            self.assertEqual(self.write(server), plain)
            self.assertNotEqual(self.write(server, dry_sequence_breakers=["zebra"]), plain)


class Watching(unittest.TestCase):
    def seen_while_running(self, server, body, look):
        """What look() finds while a request runs. A fast machine may be done before: then it is asked again."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for _ in range(50):
                asked = pool.submit(server.request, "POST", "/v1/completions", body, headers={"X-Request-Id": "long"})
                while not asked.done():
                    if found := look():
                        server.request("DELETE", "/thermo/requests/long")
                        return found
        self.fail("nothing was seen of 50 requests")

    def test_names_the_drafter_of_a_request(self):
        body = {"prompt": "one two one two one two", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
        with Server("-c", "4096", "--parallel", "1", "--draft", "lookup") as server:
            seen = self.seen_while_running(
                server, body, lambda: [request for request in server.get("/thermo/requests") if request["accept_len"]])
            self.assertEqual(seen[0]["drafter"], "lookup")
            self.assertGreaterEqual(seen[0]["accept_len"], 1.0)
        with Server("-c", "4096", "--parallel", "1", "--draft", "none") as server:
            seen = self.seen_while_running(server, body, lambda: server.get("/thermo/requests"))
            self.assertEqual((seen[0]["drafter"], seen[0]["accept_len"]), (None, None))
            busy = self.seen_while_running(
                server, body, lambda: [slot for slot in server.get("/slots") if slot["params"]])
            self.assertEqual(busy[0]["params"]["temperature"], 0)
            self.assertLessEqual(busy[0]["next_token"]["n_remain"], 3000)

    def test_counts_requests_by_key_and_lines_of_the_log(self):
        key = {"Authorization": "Bearer secret"}
        with Server("-c", "512", "--api-key", "ann:secret", "--metrics-per-key") as server:
            server.post(CHAT, ask(SUM, max_tokens=2), headers=key)
            text = server.get("/metrics", headers=key)
        self.assertIn('thermocline_requests_total{dialect="chat",outcome="ok",finish_reason="length",key="ann"} 1', text)
        self.assertRegex(text, r'thermocline_log_messages_total\{level="info"\} [1-9]')
        self.assertIn('thermocline_spec_rounds_total{drafter=', text)

    def test_writes_prompts_where_it_is_told_to(self):
        with tempfile.TemporaryDirectory() as folder:
            with Server("-c", "512", "--log-prompts", folder) as server:
                reply = server.post(CHAT, ask(SUM, reasoning_effort="none"), headers={"X-Request-Id": "a.b-1"})
                self.assertIn("prompts and answers are written to", server.logged())
                self.assertEqual(server.stop(), 0)
            path = pathlib.Path(folder) / f"{reply['id']}.json"
            self.assertEqual(path.stat().st_mode & 0o777, 0o600)
            written = json.loads(path.read_text())
        self.assertEqual(written["request_id"], "a.b-1")
        self.assertIn(SUM, written["prompts"][0])
        self.assertIn("42", written["answers"][0]["content"])

    def test_opens_its_log_again(self):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            with Server("-c", "512", "--log-file", log) as server:
                log.rename(pathlib.Path(folder) / "old")
                server.process.send_signal(signal.SIGHUP)
                end = time.monotonic() + 60
                while not log.exists():
                    self.assertLess(time.monotonic(), end)
                    time.sleep(0.02)
                server.post(CHAT, ask(SUM, max_tokens=1))
                self.assertEqual(server.stop(), 0)
            self.assertIn("chat ok", log.read_text())


class Fingerprints(ProgramTest):
    # Only the size of the file, its types and the device were in it.
    def test_differ_where_the_same_seed_may_give_another_text(self):
        def fingerprint(*flags):
            with Server("-c", "512", "--no-warmup", *flags) as server:
                return server.post(CHAT, ask(SUM, max_tokens=1))["system_fingerprint"]

        plain = fingerprint()
        self.assertEqual(fingerprint("-t", "1", "--parallel", "2"), plain)
        copy = GgufCopy()
        name, (dims, kind, data) = next(iter(copy.tensors.items()))
        copy.tensors[name] = [dims, kind, bytes([data[0] ^ 1]) + data[1:]]
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
            other = [fingerprint(*flags) for flags in (
                ("-m", copy.save(folder, "other.gguf")), ("-ctk", "q8_0"), ("-ctv", "f32"), ("--rope-scale", "2"),
                ("--chat-template-file", pathlib.Path(folder) / "t.jinja"))]
        self.assertEqual(len({plain, *other}), 6, (plain, other))


class Folders(ProgramTest):
    def test_keep_all_that_is_kept_in_one_place(self):
        with tempfile.TemporaryDirectory() as folder:
            with Server("-c", "512", "--state-dir", folder, "--cache-disk", "64M") as server:
                server.post(CHAT, ask(SUM))
                self.assertEqual(server.stop(), 0)
            kept = pathlib.Path(folder)
            self.assertEqual(sorted(path.name for path in kept.iterdir()), ["heat", "texts"])
            self.assertTrue(list((kept / "heat").glob("*.json")))
            self.assertTrue(list((kept / "texts").iterdir()))
        self.assertIn("make it first", self.refusal(USAGE, "serve", "--state-dir", "/nowhere/at/all"))


class Fit(ProgramTest):
    def plan(self, *flags):
        return json.loads(self.answer("plan", "--json", "--device", "cpu", *flags))

    def test_flags_of_llama_server_are_understood(self):
        long = self.plan("-fit", "off")["context"]
        self.assertEqual(self.plan("-c", "0", "--fit", "on", "-t", "1", "-tb", "1")["context"], min(long, 32768))
        self.assertEqual(self.plan("-fitc", "4096", "-fitt", "1024", "-c", "512")["context"], 512)
        self.assertIn("on, off", self.refusal(USAGE, "plan", "-fit", "maybe"))


    def test_the_shortest_context_is_long_enough_to_work_with(self):
        lines = self.answer("plan", "--help-all")
        self.assertIn("(default 8192)", lines)
        self.assertIn("(default 1024)", lines)

    def test_weights_are_loaded_in_the_ways_of_llama_server(self):
        mapped = self.plan("-lm", "mmap", "-c", "512")
        self.assertEqual(mapped["tiers"][0]["items"], self.plan("--no-repack", "-c", "512")["tiers"][0]["items"])
        self.assertIn("weights mapped: asked", mapped["decisions"])
        self.assertIn("weights repacked: default", self.plan("-lm", "none", "-c", "512")["decisions"])
        self.assertIn("mmap, mlock or none", self.refusal(USAGE, "plan", "-lm", "dio"))

    def test_cores_and_devices_can_be_chosen(self):
        cores = sorted(os.sched_getaffinity(0))
        one = run("run", "-p", SUM, "-n", "2", "-Cr", f"{cores[0]}-{cores[0]}", "--cpu-strict", "0", "--device", "cpu", "-v")
        self.assertIn(": 1 threads", one.stderr)
        self.assertIn("none of these cores", self.refusal(USAGE, "plan", "-C", "0x" + "8" + "0" * 255))
        self.assertIn("0xF0 for cores 4 to 7", self.refusal(USAGE, "plan", "--cpu-mask", "many"))
        self.assertIn("4-7", self.refusal(USAGE, "plan", "--cpu-range", "7-4"))
        self.assertIn("1 to 3 (higher)", self.refusal(USAGE, "plan", "--prio", "9"))
        self.assertIn("contradict", self.refusal(USAGE, "plan", "--device", "cpu", "-mg", "1"))
        devices = self.answer("--list-devices")
        self.assertRegex(devices, r"Available devices:\n(  cuda:.*\n)*  cpu: .* \(\d+ MiB, \d+ MiB free\)\n")
        self.assertEqual(devices.splitlines()[0], self.answer("serve", "--list-devices").splitlines()[0])
        self.assertEqual(self.answer("--completion-bash"), self.answer("completion", "bash"))

    def test_threads_wait_and_spread_as_told(self):
        asked = ("-p", SUM, "-n", "4", "--temp", "0", "--device", "cpu", "-t", "2")
        plain = self.answer("run", *asked)
        for flags in (["--poll", "0"], ["--poll", "100"], ["--numa", "distribute"], ["--numa", "isolate"], ["--numa", "numactl"]):
            self.assertEqual(self.answer("run", *asked, *flags), plain, flags)
        if not pathlib.Path("/sys/devices/system/node/node1").exists():
            log = run("run", *asked, "-v", env={"LLAMA_ARG_NUMA": "distribute"}).stderr
            self.assertIn("--numa distribute changes nothing: this machine has one memory node", log)
        self.assertIn("0 to 100", self.refusal(USAGE, "serve", "--poll", "101"))
        self.assertIn("distribute, isolate, numactl", self.refusal(USAGE, "serve", "--numa", "mirror"))
        rows = json.loads(self.answer("bench", "--device", "cpu", "-p", "0", "-n", "4", "-r", "1", "-o", "json", "--poll", "0,100",
                                      "--numa", "numactl", "--no-bandwidth"))
        self.assertEqual([row["poll"] for row in rows], [0, 100])
        self.assertIn("--poll", self.refusal(USAGE, "bench", "--poll", "200"))

    def test_threads_without_work_sleep_or_spin(self):
        for poll, spins in (("0", False), ("100", True)):
            with self.subTest(poll=poll), Server("-c", "512", "-t", "2", "--device", "cpu", "--poll", poll) as server:
                def is_spinning():
                    server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})  # threads have just been at work
                    time.sleep(0.01)
                    threads = pathlib.Path(f"/proc/{server.process.pid}/task").glob("*/stat")
                    return any(thread.read_text().rsplit(")")[1].split()[0] == "R" for thread in threads)
                # On a busy machine a look may come too late, or before a thread has come to sleep: others will not.
                wait_until(lambda: all(is_spinning() == spins for _ in range(4)))

    def test_experts_move_or_stay(self):
        asked = ("-p", SUM, "-n", "8", "--temp", "0", "--device", "sim", "--expert-cache", "30%", "--no-heat-file")
        self.assertIn(" 0 moved", run("run", *asked, "--expert-policy", "static").stderr)
        self.assertIn(" 0 moved", run("run", *asked, "--no-expert-swaps", env={"THERMO_EXPERT_POLICY": "auto"}).stderr)
        self.assertIn("auto, static", self.refusal(USAGE, "serve", "--expert-policy", "lru"))

    def test_what_a_server_does_not_have_is_advised_on(self):
        for flag, words in (("--grammar-file", "grammar or json_schema"), ("-j", "requests to a server bring their own"),
                            ("--ui-path", "has no web pages"), ("-ot", "--expert-cache"), ("--rope-freq-base", "model file")):
            self.assertIn(words, self.refusal(USAGE, "serve", flag, "x"))

    def test_lines_of_the_log_can_be_bare(self):
        def logged(*flags):
            result = run("run", "-p", SUM, "-n", "1", "--device", "cpu", "-lv", "3", "-q", *flags)
            return next(line for line in result.stderr.splitlines() if "loaded " in line)
        self.assertRegex(logged(), r"^\d\d:\d\d:\d\d\.\d+ I engine   loaded ")
        self.assertRegex(logged("--no-log-timestamps"), r"^I engine   loaded ")
        self.assertRegex(logged("--no-log-timestamps", "--no-log-prefix"), r"^loaded ")


class Card(ProgramTest):
    CARD = {"name": "plankton", "source": "a test", "sampling": {"temperature": 0.25, "top_k": 7}, "max_tokens": 300,
            "reasoning_efforts": {"low": 5}, "thinking_terminator": " So be it.", "reply_reserve": 10}

    def test_stands_between_options_and_the_file(self):
        folder = temporary_folder(self)
        model = folder / "mine.gguf"
        model.symlink_to(MODEL)
        with Server("-c", "2048", model) as server:
            self.assertIsNone(server.get("/props")["model_card"])
        (folder / "mine.card.json").write_text(json.dumps(self.CARD))
        with Server("-c", "2048", model, "--top-k", "9") as server:
            props = server.get("/props")
            self.assertEqual(props["model_card"]["values"], self.CARD)
            self.assertTrue(props["model_card"]["source"].endswith("mine.card.json"))
            params = props["default_generation_settings"]["params"]
            self.assertEqual((params["temperature"], params["top_k"], params["max_tokens"]), (0.25, 9, 300))
            self.assertEqual(props["reasoning"]["efforts"]["low"], 5)
            self.assertEqual(props["reasoning"]["efforts"]["high"], 32256)
            message, close = reasoned(server, reasoning_effort="low")
            self.assertEqual(close, "budget")
            self.assertTrue(message["reasoning"].endswith(" So be it."), message)
            end = server.post("/tokenize", {"content": "</think>"})["tokens"]
            reply = server.post(CHAT, ask(SUM, ignore_eos=True, max_tokens=100, logit_bias={str(id): -100 for id in end}))
            self.assertEqual(reply["timings"]["reasoning_close"], "reserve")
            self.assertGreater(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 80)
        (folder / "mine.card.json").write_text('{"temperature": 1}')
        self.assertIn("'temperature' is not known", self.refusal(USAGE, "run", model, "-p", SUM))


class Connect(ProgramTest):
    def test_prints_settings_of_clients(self):
        for client, words in (("claude", "ANTHROPIC_BASE_URL=http://h:1\n"), ("codex", 'base_url = "http://h:1/v1"\nwire_api = "responses"'),
                              ("opencode", '"baseURL": "http://h:1/v1"'), ("openwebui", "OPENAI_API_BASE_URL=http://h:1/v1"), ("env", "OPENAI_API_KEY=k\n")):
            for url in ("http://h:1/", "http://h:1/v1"):
                self.assertIn(words, self.answer("connect", client, "--url", url, "--api-key", "k"))
        for client, words in (("claude", "context is left out"), ("codex", "context is left out"), ("env", "")):
            self.assertIn(words, run("connect", client, "--url", "http://127.0.0.1:1").stderr)
        self.assertEqual(run("connect", "emacs").returncode, USAGE)

    # They did not know the context, and Codex not the key.
    def test_knows_what_the_server_says(self):
        with Server("-c", "4096", "--alias", "mine", "--api-key", "it's") as server:
            def text(client, *flags):
                return self.answer("connect", client, "--url", server.url, "--api-key", "it's", *flags)

            claude = text("claude")
            for line in ("ANTHROPIC_MODEL=mine", "CLAUDE_CODE_MAX_CONTEXT_TOKENS=4096", "CLAUDE_CODE_AUTO_COMPACT_WINDOW=4096",
                         "CLAUDE_CODE_MAX_OUTPUT_TOKENS=1024", "ANTHROPIC_AUTH_TOKEN='it'\\''s'"):
                self.assertIn(f"export {line}\n", claude)
            codex = tomllib.loads(text("codex", "-a", "other"))
            self.assertEqual((codex["model"], codex["model_provider"], codex["model_context_window"]), ("other", "thermocline", 4096))
            self.assertEqual(codex["model_providers"]["thermocline"], {
                "name": "thermocline", "base_url": server.url + "/v1", "wire_api": "responses", "env_key": "THERMOCLINE_API_KEY"})
            opencode = json.loads(text("opencode"))["provider"]["thermocline"]
            self.assertEqual(opencode["models"], {"mine": {"limit": {"context": 4096, "output": 1024}}})
            self.assertEqual(opencode["options"], {"baseURL": server.url + "/v1", "apiKey": "it's"})
            self.assertIn("give it with --api-key", run("connect", "codex", "--url", server.url).stderr)

    def test_says_that_a_server_is_still_loading(self):
        class Loading(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps({"object": "list", "status": "loading", "data": [{"id": "soon", "status": "loading"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Loading) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            done = run("connect", "claude", "--url", f"http://127.0.0.1:{server.server_port}")
            server.shutdown()
        self.assertIn("ANTHROPIC_MODEL=soon\n", done.stdout)
        self.assertIn("when its model is loaded", done.stderr)


if __name__ == "__main__":
    unittest.main()
