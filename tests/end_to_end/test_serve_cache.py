#!/usr/bin/env python3
"""Conversations with `serve` that go on: what is read again, what is repeated, and who waits for whom."""
import concurrent.futures
import json
import pathlib
import re
import signal
import tempfile
import unittest

from harness import USAGE, ProgramTest, run
from server_harness import ENDLESS, WEATHER, WIDE, Server, ask, wait_until

CHAT = "/v1/chat/completions"
PARIS = "What is the weather in Paris?"
LIMIT = 64 << 20


def metric(server, name):
    """Values of a metric by its labels."""
    lines = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", server.get("/metrics"), re.M)
    return {labels: float(value) for labels, value in lines}


def talk(server, messages, **more):
    return server.post(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 40, **more})


class Conversations(unittest.TestCase):
    maxDiff = None

    def long_chat(self, **more):
        """The messages of a conversation of 3000 tokens, with its first answer, and that reply."""
        words = " ".join(f"fact {i}: {i * 37 % 101} plus {i * 53 % 97}" for i in range(210))
        messages = [{"role": "system", "content": "You answer briefly."},
                    {"role": "user", "content": f"Remember this: {words}. What is 17 + 25?"}]
        reply = talk(self.server, messages, **more)
        self.assertGreater(reply["usage"]["prompt_tokens"], 2500)
        return messages, reply

    def test_the_second_turn_reads_what_is_new(self):
        for parallel in (1, 2):
            with Server("--parallel", parallel, "-c", 4096, "--cache-ram", "64M") as self.server:
                messages, first = self.long_chat()
                self.assertEqual(first["timings"]["cache_n"], 0)
                for i in range(20):
                    talk(self.server, [messages[0], {"role": "user", "content": f"What is {i} + {i}?"}])
                    self.assertLessEqual(metric(self.server, "thermocline_cache_bytes")['tier="ram"'], 1.01 * LIMIT)
                # As most clients do, without the reasoning; and with other space around the text.
                content = first["choices"][0]["message"]["content"]
                again = messages + [{"role": "assistant", "content": f" {content}\n"},
                                    {"role": "user", "content": "And 3 more?"}]
                second = talk(self.server, again)
                old = first["usage"]["total_tokens"]
                self.assertGreater(second["timings"]["cache_n"], old - 64)
                self.assertGreater(metric(self.server, "thermocline_turn_store_splices_total")[""], 0)
                self.assertEqual(second["usage"]["prompt_tokens_details"]["cached_tokens"], second["timings"]["cache_n"])

                # An edited turn begins at the point before it.
                edited = again[:3] + [{"role": "user", "content": "And 4 more?"}]
                third = talk(self.server, edited)
                self.assertGreater(third["timings"]["cache_n"], old - 64)
                edited[1] = {"role": "user", "content": "Forget it."}
                self.assertGreater(talk(self.server, edited)["timings"]["cache_n"], 0)  # the system prompt

    def test_a_mark_inside_a_turn_is_a_place_to_come_back_to(self):
        book = " ".join(f"fact {i}: {i * 37 % 101} plus {i * 53 % 97}" for i in range(60))
        with Server("--parallel", 1, "-c", 4096, "--cache-ram", "64M") as server:
            def read(mark, question):
                block = {"type": "text", "text": f"{mark} {book}.\n"}
                if mark == "marked":
                    block["cache_control"] = {"type": "ephemeral"}
                reply = server.post("/v1/messages", {"max_tokens": 4, "messages": [
                    {"role": "user", "content": [block, {"type": "text", "text": question}]}]})
                return reply["usage"]
            for mark in ("plain", "marked"):
                first, second = read(mark, "What is 17 + 25?"), read(mark, "Which fact is the last one?")
                self.assertLess(first["cache_read_input_tokens"], 64)
                n_total = second["cache_read_input_tokens"] + second["input_tokens"]
                self.assertEqual(second["cache_read_input_tokens"] > n_total - 64, mark == "marked")

    def test_answers_do_not_depend_on_the_cache(self):
        def converse(server):
            replies = []
            messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": PARIS}]
            for text in ("It is 21 degrees and sunny.", "What is 17 + 25?", "Say it again."):
                reply = talk(server, messages, tools=[WEATHER], max_tokens=120)
                message = reply["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                replies.append((message["content"], message.get("reasoning"),
                                [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]))
                messages.append({"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})})
                messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text} if calls else
                                {"role": "user", "content": text})
                talk(server, [{"role": "user", "content": f"Another one: {text}"}], max_tokens=8)
            return replies

        texts = []
        for options in (("--cache-ram", "64M"), ("--cache-ram", "off")):
            with Server("--parallel", 1, *options) as server:
                texts.append(converse(server))
                hits = metric(server, "thermocline_prompt_tokens_total").get('source="cached"', 0)
                self.assertEqual(hits > 0, options[1] != "off")
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0][0][2], [("get_weather", {"city": "Paris"})])

    def test_tells_where_a_prompt_left_a_known_text(self):
        with Server("--parallel", 1, "--verbosity", "5") as server:
            talk(server, [{"role": "user", "content": "My favourite number is 17. " * 20 + "What is it?"}], max_tokens=8)
            talk(server, [{"role": "user", "content": "My favourite number is 17. " * 19 + "My favourite animal is a heron."}],
                 max_tokens=8)
            self.assertRegex(server.logged(), r"leaves a known text at token \d+ \(cached \d+\): .*animal.* instead of ")
            self.assertGreater(metric(server, "thermocline_prompt_divergence_tokens_total")[""], 0)


class Disk(unittest.TestCase):
    def test_a_conversation_goes_on_after_a_restart(self):
        with tempfile.TemporaryDirectory() as folder:
            options = ("-c", "2048", "--cache-disk", "100M", "--cache-dir", folder)
            messages = [{"role": "user", "content": " ".join(f"word{i}" for i in range(300))}]
            with Server(*options) as server:
                first = talk(server, messages, max_tokens=20, temperature=0)
                self.assertEqual(server.stop(), 0)
            messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            with Server("-c", "2048") as server:
                want = talk(server, messages, max_tokens=20, temperature=0)
            for how in (signal.SIGKILL, signal.SIGTERM):
                with Server(*options) as server:
                    second = talk(server, messages, max_tokens=20, temperature=0)
                    self.assertGreater(second["timings"]["cache_n"], first["usage"]["prompt_tokens"] - 64)
                    self.assertEqual(second["choices"][0]["message"]["content"], want["choices"][0]["message"]["content"])
                    self.assertGreater(server.get("/props")["cache"]["disk_bytes_used"], 0)
                    server.stop(how)
            self.assertFalse([path for path in pathlib.Path(folder).rglob("*.tmp")])

    def test_options_belong_together(self):
        self.assertIn("--cache-disk", run("serve", "--cache-dir", "/tmp").stderr)


class Slices(unittest.TestCase):
    def test_more_requests_than_slots_share_them(self):
        bodies = [ask(f"Count from {i} to a hundred.", max_tokens=150, ignore_eos=True) for i in range(6)]
        with Server("--parallel", 1, "--cache-ram", "off") as server:
            alone = [server.post(CHAT, body)["choices"][0]["message"] for body in bodies]
        with Server("--parallel", 2, "--quantum", 32, *WIDE) as server, concurrent.futures.ThreadPoolExecutor(6) as pool:
            # Both slots are taken by answers that do not end: without slices nobody else would ever be answered.
            streams = [server.stream("/v1/completions", {"prompt": f"Day {i}", **ENDLESS}) for i in range(2)]
            for stream in streams:
                next(stream)
            replies = list(pool.map(lambda body: server.post(CHAT, body), bodies))
            for stream in streams:
                stream.close()
            server.wait_until_idle()
            self.assertGreater(metric(server, "thermocline_time_slices_total")[""], 0)
            computed = metric(server, "thermocline_prompt_tokens_total")['source="computed"']
            endless = sum(len(server.post("/tokenize", {"content": f"Day {i}"})["tokens"]) for i in range(2))
            self.assertLessEqual(computed, endless + sum(reply["usage"]["prompt_tokens"] for reply in replies))
            wait_until(lambda: metric(server, "thermocline_requests_parked")[""] == 0)
        for reply, message in zip(replies, alone):
            self.assertEqual(reply["choices"][0]["message"]["content"], message["content"])
            self.assertEqual(reply["choices"][0]["message"].get("reasoning"), message.get("reasoning"))


class Options(ProgramTest):
    def test_counts_the_cache(self):
        plan = json.loads(self.answer("plan", "--cache-ram", "64", "--json"))  # a plain number is MiB, as in llama-server
        items = {item["name"]: item["bytes"] for item in plan["tiers"][0]["items"]}
        self.assertEqual(items["prefix cache"], LIMIT)
        with Server("--cache-ram", "64M", "--turn-store", "1M") as server:
            items = {item["name"]: item["bytes"] for item in server.get("/thermo/plan")["tiers"][0]["items"]}
            self.assertEqual(items["prefix cache"], LIMIT)
            self.assertEqual(metric(server, "thermocline_cache_limit_bytes"), {'tier="ram"': LIMIT, 'tier="disk"': 0, 'tier="turn_store"': 1 << 20})
            self.assertEqual(server.get("/props")["cache"]["ram_bytes_max"], LIMIT)
        with Server(env={"LLAMA_ARG_CACHE_RAM": "32"}) as server:
            self.assertEqual(server.get("/props")["cache"]["ram_bytes_max"], 32 << 20)

    def test_sends_others_to_the_server(self):
        for command in ("run", "chat"):
            for option in ("--cache-ram", "-cram", "--quantum", "--turn-store", "--checkpoint-every", "--reasoning-preserve"):
                self.assertIn("is an option of `serve`", self.refusal(USAGE, command, option, "1"))
        self.refusal(USAGE, "serve", "--cache-ram", "some")


if __name__ == "__main__":
    unittest.main()
