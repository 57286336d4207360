#!/usr/bin/env python3
"""The APIs of `serve` against the embedded model."""
import concurrent.futures
import json
import unittest

from server_harness import ENDLESS, PARIS, SUM, WEATHER, WIDE, ServeTest, ask, chat_text


class Chat(ServeTest):
    def test_answers_and_counts(self):
        reply = self.server.post("/v1/chat/completions", ask(SUM, model="anything"))
        self.assertEqual(reply["object"], "chat.completion")
        self.assertEqual(reply["model"], "plankton")
        choice = reply["choices"][0]
        self.assertEqual(choice["finish_reason"], "stop")
        self.assertIn("42", choice["message"]["content"])
        self.assertEqual(choice["message"]["reasoning"], choice["message"]["reasoning_content"])
        usage = reply["usage"]
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        self.assertGreater(usage["completion_tokens_details"]["reasoning_tokens"], 0)
        for name in ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_per_second", "ttft_ms", "queue_ms", "seed"):
            self.assertIn(name, reply["timings"])

    def test_streams_what_it_answers(self):
        whole = self.server.post("/v1/chat/completions", ask(SUM))["choices"][0]
        events = list(self.server.stream("/v1/chat/completions", ask(SUM, stream_options={"include_usage": True})))
        self.assertEqual(events[-1][1], "[DONE]")
        self.assertEqual(events[0][1]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        text, reasoning, calls, finish = chat_text(events)
        self.assertEqual(text, whole["message"]["content"])
        self.assertEqual(reasoning, whole["message"]["reasoning_content"])
        self.assertEqual((calls, finish), ([], "stop"))
        chunks = [data for _, data in events[:-1]]
        self.assertEqual({c["id"] for c in chunks}, {chunks[0]["id"]})
        self.assertTrue(all(c["usage"] is None for c in chunks[:-1]))
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertGreater(chunks[-1]["usage"]["completion_tokens"], 0)

    def test_without_reasoning(self):
        for how in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            reply = self.server.post("/v1/chat/completions", ask("What is the capital of France?", **how))
            self.assertNotIn("reasoning", reply["choices"][0]["message"])
            self.assertIn("Paris", reply["choices"][0]["message"]["content"])
            # A model that would open a thought nevertheless, as some do where a format is asked for.
            think = self.server.post("/tokenize", {"content": "<think>"})["tokens"][0]
            for more in ({}, {"response_format": {"type": "json_object"}}, {"tools": [WEATHER], "tool_choice": "required"}):
                reply = self.server.post("/v1/chat/completions", ask(SUM, max_tokens=20, logit_bias={think: 100}, **how, **more))
                self.assertNotIn("reasoning", reply["choices"][0]["message"], more)
                self.assertEqual(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 0, more)

    def test_two_turns_of_a_tool(self):
        body = ask(PARIS, tools=[WEATHER])
        reply = self.server.post("/v1/chat/completions", body)
        choice = reply["choices"][0]
        self.assertEqual(choice["finish_reason"], "tool_calls", choice)
        call = choice["message"]["tool_calls"][0]
        self.assertEqual(call["function"]["name"], "get_weather")
        self.assertEqual(json.loads(call["function"]["arguments"]), {"city": "Paris"})
        self.assertIsNone(choice["message"]["content"])
        streamed = chat_text(self.server.stream("/v1/chat/completions", body))
        self.assertEqual(streamed[3], "tool_calls")
        self.assertEqual(streamed[2][0]["arguments"], call["function"]["arguments"])
        body["messages"] += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees, sunny"}]
        second = self.server.post("/v1/chat/completions", body)
        self.assertEqual(second["choices"][0]["finish_reason"], "stop")
        self.assertRegex(second["choices"][0]["message"]["content"], "18|sunny")
        # What was computed in the first turn is not computed again.
        self.assertGreaterEqual(second["usage"]["prompt_tokens_details"]["cached_tokens"], reply["usage"]["prompt_tokens"])

    def test_no_tool_is_called_when_none_may_be(self):
        reply = self.server.post("/v1/chat/completions", ask(PARIS, tools=[WEATHER], tool_choice="none"))
        self.assertNotIn("tool_calls", reply["choices"][0]["message"])

    def test_stops_limits_and_seeds(self):
        body = ask("Count from one to ten.", reasoning_effort="none")
        text = self.server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        stop = text[len(text) // 2:len(text) // 2 + 3]
        for path in (False, True):
            cut = {**body, "stop": [stop]}
            if path:
                got = chat_text(self.server.stream("/v1/chat/completions", cut))
                self.assertEqual(got[0], text[:text.index(stop)])
            else:
                reply = self.server.post("/v1/chat/completions", cut)
                self.assertEqual(reply["choices"][0]["message"]["content"], text[:text.index(stop)])
                self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
        reply = self.server.post("/v1/chat/completions", ask(SUM, max_tokens=5))
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        self.assertEqual(reply["usage"]["completion_tokens"], 5)
        texts = {self.server.post("/v1/chat/completions", ask(SUM, seed=7) | {"temperature": 1.5})["choices"][0]["message"]["content"]
                 for _ in range(3)}
        self.assertEqual(len(texts), 1)

    def test_several_choices(self):
        body = ask(SUM, n=3, seed=5, max_tokens=20) | {"temperature": 1.2}
        reply = self.server.post("/v1/chat/completions", body)
        self.assertEqual([c["index"] for c in reply["choices"]], [0, 1, 2])
        one = self.server.post("/v1/chat/completions", {**body, "n": 1})
        self.assertEqual(reply["choices"][0]["message"], one["choices"][0]["message"])
        self.assertEqual(reply["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"])
        self.assertEqual(reply["usage"]["completion_tokens"], 60)

    def test_log_probabilities(self):
        body = ask(SUM, logprobs=True, top_logprobs=3, reasoning_effort="none")
        choice = self.server.post("/v1/chat/completions", body)["choices"][0]
        entries = choice["logprobs"]["content"]
        self.assertEqual("".join(e["token"] for e in entries), choice["message"]["content"])
        self.assertTrue(all(len(e["top_logprobs"]) == 3 and e["logprob"] <= 0 for e in entries))
        streamed = [e for _, data in self.server.stream("/v1/chat/completions", body) if data != "[DONE]"
                    for c in data["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
        self.assertEqual(streamed, entries)

    def test_log_probabilities_of_everything(self):
        body = ask(PARIS, tools=[WEATHER], logprobs=True, top_logprobs=1, logprobs_scope="all")
        choice = self.server.post("/v1/chat/completions", body)["choices"][0]
        lists = choice["logprobs"]
        texts = {name: "".join(e["token"] for e in lists[name]) for name in ("content", "reasoning", "tool_calls")}
        self.assertEqual(texts["content"], "")
        self.assertTrue(texts["reasoning"].startswith(choice["message"]["reasoning_content"]), texts)
        self.assertTrue(texts["tool_calls"].startswith("<tool_call>\n<function=get_weather>"), texts)
        self.assertTrue(texts["tool_calls"].rstrip("\n").endswith("</tool_call>"), texts)
        streamed = {name: [] for name in texts}
        for _, data in self.server.stream("/v1/chat/completions", body):
            for one in [] if data == "[DONE]" else data["choices"]:
                kinds = {"reasoning": "reasoning_content", "content": "content", "tool_calls": "tool_calls"}
                for name, entries in (one["logprobs"] or {}).items():
                    streamed.get(name, []).extend(entries or [])
                    # An entry comes with its own kind of text, or at the end.
                    self.assertTrue(not entries or one["finish_reason"] or kinds[name] in one["delta"], one)
        self.assertEqual(streamed, {name: lists[name] for name in texts})
        self.refused("/v1/chat/completions", {**body, "logprobs_scope": "some"}, 400, "invalid_value")

    def test_turns_as_clients_send_them(self):
        first = self.server.post("/v1/chat/completions", {"messages": [
            {"role": "developer", "content": "Be brief."}, {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}]},
            {"role": "system", "content": "A word in between."}], "temperature": 0})
        second = self.server.post("/v1/chat/completions", {"messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": SUM},
            {"role": "user", "content": "<system-reminder>\nA word in between.\n</system-reminder>"}], "temperature": 0})
        self.assertEqual(first["choices"][0]["message"], second["choices"][0]["message"])
        self.assertEqual(first["usage"]["prompt_tokens"], second["usage"]["prompt_tokens"])

    def test_names_what_it_ignores(self):
        _, headers, _ = self.server.request("POST", "/v1/chat/completions", ask(
            SUM, max_tokens=1, frobnicate=1, tools=[{"type": "web_search"}], store=True))
        self.assertEqual(headers["x-ignored-fields"], "frobnicate")
        self.assertEqual(headers["x-ignored-tools"], "web_search")

    def test_continues_an_answer(self):
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"},
                             {"role": "assistant", "content": "The capital of France is"}],
                "temperature": 0, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
        self.assertIn("Paris", self.server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])


class Thoughts(ServeTest):
    OPTIONS = ("--parallel", "1", "--loop-guard", "off", *WIDE)

    def test_can_be_ended(self):
        end = self.server.post("/tokenize", {"content": "</think>"})["tokens"]
        # It never ends by itself; the content after it ends with its first word.
        body = ask(SUM, **ENDLESS, logit_bias={str(id): -100 for id in end}, stop=[" ", "\n", ".", ","])
        kinds, done = [], False
        for _, chunk in self.server.stream("/v1/chat/completions", body):
            if chunk == "[DONE]":
                break
            last = chunk
            delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
            kinds += [kind for kind in ("reasoning", "content") if delta.get(kind)]
            if kinds and not done:
                done = True
                self.assertEqual(self.server.post("/v1/chat/completions/control", {"id": chunk["id"], "action": "reasoning_end"}), {"success": True})
        self.assertEqual(sorted(set(kinds)), ["content", "reasoning"])
        self.assertEqual(last["timings"]["reasoning_close"], "client")
        self.refused("/v1/chat/completions/control", {"id": "nobody", "action": "reasoning_end"}, 404, "not_found")
        self.refused("/v1/chat/completions/control", {"id": "nobody", "action": "think"}, 400, "invalid_value")


class Completions(ServeTest):
    def test_continues_texts(self):
        reply = self.server.post("/v1/completions", {"prompt": ["def add(a, b):\n", "import "], "max_tokens": 8, "temperature": 0})
        self.assertEqual(reply["object"], "text_completion")
        self.assertEqual([c["index"] for c in reply["choices"]], [0, 1])
        one = self.server.post("/v1/completions", {"prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0, "echo": True})
        self.assertEqual(one["choices"][0]["text"], "def add(a, b):\n" + reply["choices"][0]["text"])
        ids = self.server.post("/tokenize", {"content": "def add(a, b):\n"})["tokens"]
        by_ids = self.server.post("/v1/completions", {"prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 2})
        self.assertEqual(by_ids["choices"][0]["text"], reply["choices"][0]["text"])
        logprobs = by_ids["choices"][0]["logprobs"]
        self.assertEqual("".join(logprobs["tokens"]), reply["choices"][0]["text"])
        self.assertEqual(logprobs["text_offset"][0], 0)
        streamed = "".join(c["text"] for _, data in self.server.stream(
            "/v1/completions", {"prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0}) if data != "[DONE]"
            for c in data["choices"])
        self.assertEqual(streamed, reply["choices"][0]["text"])

    def test_fills_in_nothing_without_the_tokens_for_it(self):
        _, error = self.refused("/v1/completions", {"prompt": "def add(a, b):\n", "suffix": "\n\nprint(add(1, 2))\n"}, 400, "unsupported_parameter")
        self.assertEqual(error["param"], "suffix")
        self.assertEqual(len(self.server.post("/v1/completions", {"prompt": "def", "suffix": None, "max_tokens": 1})["choices"]), 1)

    def test_tells_log_probabilities_of_prompts(self):
        body = {"prompt": "def add(a, b):\n    return", "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 2}
        for _ in range(2):  # the second one is not taken from the cache
            reply = self.server.post("/v1/completions", body)
            choice = reply["choices"][0]
            found = choice["logprobs"]
            self.assertEqual((choice["text"], choice["finish_reason"]), (body["prompt"], "length"))
            self.assertEqual(reply["usage"]["prompt_tokens"], len(found["tokens"]))
            self.assertEqual(reply["usage"]["completion_tokens"], 0)
        self.assertEqual("".join(found["tokens"]), body["prompt"])
        for i, offset in enumerate(found["text_offset"]):
            self.assertTrue(body["prompt"].encode()[offset:].startswith(found["tokens"][i].encode()))
        self.assertEqual((found["token_logprobs"][0], found["top_logprobs"][0]), (None, None))
        for chosen, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:]):
            self.assertLessEqual(chosen, 0)
            self.assertGreaterEqual(max(top.values()), chosen)
        # With an answer: the lists go on, in one object and in a stream.
        body = {**body, "max_tokens": 4}
        whole = self.server.post("/v1/completions", body)["choices"][0]
        self.assertEqual(whole["logprobs"]["token_logprobs"][:len(found["tokens"])], found["token_logprobs"])
        self.assertEqual("".join(whole["logprobs"]["tokens"]), whole["text"])
        events = [data["choices"][0] for _, data in self.server.stream("/v1/completions", body) if data != "[DONE]"]
        self.assertEqual("".join(c["text"] for c in events), whole["text"])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            self.assertEqual([x for c in events if c["logprobs"] for x in c["logprobs"][name]], whole["logprobs"][name])

    def test_times_of_every_chunk(self):
        # Long enough for several chunks on any machine: tokens of one millisecond share one.
        for path, body in (("/v1/chat/completions", ask(SUM, ignore_eos=True, max_tokens=200)),
                           ("/v1/completions", {"prompt": "One day", "ignore_eos": True, "max_tokens": 200})):
            counts = [data["timings"]["predicted_n"] for _, data in self.server.stream(path, {**body, "timings_per_token": True})
                      if data != "[DONE]" and "timings" in data]
            self.assertEqual(counts, sorted(counts))
            self.assertGreater(len(set(counts)), 2)


class Messages(ServeTest):
    TOOL = {"name": "get_weather", "description": "Get the weather of a city",
            "input_schema": WEATHER["function"]["parameters"]}

    def test_answers(self):
        reply = self.server.post("/v1/messages?beta=true", {
            "model": "claude", "max_tokens": 100, "temperature": 0, "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}, {"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]}]})
        self.assertEqual((reply["type"], reply["role"], reply["stop_reason"]), ("message", "assistant", "end_turn"))
        self.assertEqual([b["type"] for b in reply["content"]], ["text"])
        self.assertIn("42", reply["content"][0]["text"])
        count = self.server.post("/v1/messages/count_tokens", {
            "system": "Be brief.", "messages": [{"role": "user", "content": SUM}]})["input_tokens"]
        self.assertEqual(count, reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"])

    def blocks(self, events):
        """The blocks of a stream, checking that each is stopped before the next one starts."""
        blocks, open_index = [], None
        for name, data in events:
            self.assertEqual(name, data["type"])
            if name == "content_block_start":
                self.assertIsNone(open_index)
                open_index = data["index"]
                self.assertEqual(open_index, len(blocks))
                blocks.append(dict(data["content_block"], text_="", json_=""))
            elif name == "content_block_delta":
                self.assertEqual(data["index"], open_index)
                delta = data["delta"]
                blocks[-1]["text_"] += delta.get("text", "") + delta.get("thinking", "")
                blocks[-1]["json_"] += delta.get("partial_json", "")
            elif name == "content_block_stop":
                self.assertEqual(data["index"], open_index)
                open_index = None
        return blocks

    def test_thinks_calls_and_goes_on(self):
        body = {"max_tokens": 400, "temperature": 0, "thinking": {"type": "enabled", "budget_tokens": 300},
                "tools": [self.TOOL, {"type": "web_search_20250305", "name": "web_search"}],
                "messages": [{"role": "user", "content": PARIS}]}
        reply = self.server.post("/v1/messages", body)
        self.assertEqual(reply["stop_reason"], "tool_use", reply)
        self.assertEqual([b["type"] for b in reply["content"]], ["thinking", "tool_use"])
        use = reply["content"][-1]
        self.assertEqual((use["name"], use["input"]), ("get_weather", {"city": "Paris"}))
        events = list(self.server.stream("/v1/messages", body))
        self.assertEqual([n for n, _ in events[:2]], ["message_start", "ping"])
        self.assertEqual([n for n, _ in events[-2:]], ["message_delta", "message_stop"])
        blocks = self.blocks(events)
        self.assertEqual([b["type"] for b in blocks], ["thinking", "tool_use"])
        self.assertEqual(blocks[0]["text_"], reply["content"][0]["thinking"])
        self.assertEqual(json.loads(blocks[1]["json_"]), {"city": "Paris"})
        body["messages"] += [{"role": "assistant", "content": reply["content"]},
                             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"],
                                                           "content": [{"type": "text", "text": "18 degrees"}]}]},
                             {"role": "system", "content": "Say it in one sentence."}]
        second = self.server.post("/v1/messages", body)
        self.assertGreater(second["usage"]["cache_read_input_tokens"], 0)

    def test_stop_sequences(self):
        body = {"max_tokens": 100, "temperature": 0, "messages": [{"role": "user", "content": SUM}]}
        text = self.server.post("/v1/messages", body)["content"][0]["text"]
        reply = self.server.post("/v1/messages", {**body, "stop_sequences": [text[3:6]]})
        self.assertEqual((reply["stop_reason"], reply["stop_sequence"]), ("stop_sequence", text[3:6]))
        cut = self.server.post("/v1/messages", {**body, "max_tokens": 3})
        self.assertEqual(cut["stop_reason"], "max_tokens")

    def test_errors(self):
        _, error = self.refused("/v1/messages", {"max_tokens": 5}, 400)
        self.assertEqual(error["type"], "invalid_request_error")
        _, error = self.refused("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 9000}]}, 400)
        self.assertRegex(error["message"], r"^prompt is too long: \d+ tokens > \d+ maximum$")
        # Unknown paths below this one were refused in the words of the other APIs.
        for path in ("/v1/messages/batches", "/messages/batches/1"):
            status, headers, reply = self.server.request("POST", path, {})
            self.assertEqual((status, reply["type"], reply["error"]["type"]), (404, "error", "not_found_error"))
            self.assertEqual(reply["request_id"], headers["request-id"])
        self.assertNotIn("type", self.server.request("POST", "/v1/message", {})[2])


class Responses(ServeTest):
    TOOL = {"type": "function", "name": "get_weather", "description": "Get the weather of a city",
            "parameters": WEATHER["function"]["parameters"]}

    def check_stream(self, events):
        self.assertEqual([d["sequence_number"] for _, d in events], list(range(len(events))))
        items = {}
        for name, data in events:
            self.assertEqual(name, data["type"])
            if name == "response.output_item.added":
                self.assertEqual(data["output_index"], len(items))
                items[data["output_index"]] = data["item"]["id"]
            elif "item_id" in data:
                self.assertEqual(items[data["output_index"]], data["item_id"])
        last = events[-1][1]["response"]
        self.assertEqual([i["id"] for i in last["output"]], list(items.values()))
        return last

    def test_answers_and_streams(self):
        body = {"input": SUM, "instructions": "Be brief.", "temperature": 0, "tools": [{"type": "web_search"}]}
        reply = self.server.post("/v1/responses", body)
        self.assertEqual((reply["object"], reply["status"]), ("response", "completed"))
        self.assertEqual([i["type"] for i in reply["output"]], ["reasoning", "message"])
        self.assertIn("42", reply["output_text"])
        events = list(self.server.stream("/v1/responses", body))
        self.assertEqual([n for n, _ in events[:2]], ["response.created", "response.in_progress"])
        last = self.check_stream(events)
        self.assertEqual(events[-1][0], "response.completed")
        self.assertEqual(last["output"][1]["content"][0]["text"], reply["output_text"])
        self.assertEqual("".join(d["delta"] for n, d in events if n == "response.output_text.delta"), reply["output_text"])
        self.assertIsInstance(last["usage"]["input_tokens_details"]["cached_tokens"], int)

    def test_two_turns_of_a_tool(self):
        body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": PARIS}]}], "temperature": 0,
                "tools": [self.TOOL]}
        reply = self.server.post("/v1/responses", body)
        call = reply["output"][-1]
        self.assertEqual((call["type"], call["name"]), ("function_call", "get_weather"), reply["output"])
        self.assertEqual(json.loads(call["arguments"]), {"city": "Paris"})
        last = self.check_stream(list(self.server.stream("/v1/responses", body)))
        self.assertEqual(last["output"][-1]["arguments"], call["arguments"])
        body["input"] += reply["output"] + [{"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees, sunny"}]
        second = self.server.post("/v1/responses", body)
        self.assertRegex(second["output_text"], "18|sunny")
        self.assertGreaterEqual(second["usage"]["input_tokens_details"]["cached_tokens"], reply["usage"]["input_tokens"])

    def test_spaces_and_free_tools(self):
        body = {"input": PARIS, "temperature": 0, "tools": [{"type": "namespace", "name": "city", "tools": [self.TOOL]},
                                                            {"type": "custom", "name": "note", "description": "Notes"}]}
        reply = self.server.post("/v1/responses", body)
        call = reply["output"][-1]
        if call["type"] == "function_call":
            self.assertEqual((call["name"], call["namespace"]), ("get_weather", "city"))

    def test_cut_and_full(self):
        events = list(self.server.stream("/v1/responses", {"input": SUM, "max_output_tokens": 4, "temperature": 0}))
        self.assertEqual(events[-1][0], "response.incomplete")
        self.assertEqual(events[-1][1]["response"]["incomplete_details"], {"reason": "max_output_tokens"})
        long = {"input": "word " * 9000}
        self.refused("/v1/responses", long, 400, "context_length_exceeded")
        # That stream had no headers against buffering, and no log and no metric told of it.
        _, headers, _ = self.server.request("POST", "/v1/responses", {**long, "stream": True}, headers={"X-Request-Id": "too-long"})
        self.assertEqual((headers["cache-control"], headers["x-accel-buffering"]), ("no-cache", "no"))
        self.assertIn('thermocline_requests_total{dialect="responses",outcome="error",finish_reason=""}', self.server.get("/metrics"))
        self.assertIn("req=too-long responses error context_length_exceeded", self.server.logged())
        events = list(self.server.stream("/v1/responses", long))
        self.assertEqual([n for n, _ in events][-1], "response.failed")
        self.assertEqual(events[-1][1]["response"]["error"]["code"], "context_length_exceeded")
        self.refused("/v1/responses", {"input": SUM, "previous_response_id": "resp_1"}, 400, "unsupported_parameter")


class Operations(ServeTest):
    def test_endpoints_that_look(self):
        self.assertEqual(self.server.get("/health"), {"status": "ok"})
        self.assertEqual(self.server.get("/live"), {"status": "alive"})
        self.assertEqual(self.server.get("/ready"), {"status": "ready"})
        self.assertIn("version", self.server.get("/version"))
        models = self.server.get("/v1/models")
        self.assertEqual(models["data"][0]["id"], "plankton")
        self.assertEqual(self.server.get("/v1/models/plankton")["meta"]["n_expert"], 16)
        self.assertEqual(self.server.request("GET", "/v1/models/other")[0], 404)
        self.assertEqual(self.server.get("/props")["total_slots"], 4)
        self.assertEqual(len(self.server.get("/slots")), 4)
        self.assertIn("tiers", self.server.get("/thermo/plan"))
        self.assertEqual(self.server.get("/thermo/requests"), [])
        self.assertIn("hit_ratio", self.server.get("/thermo/experts"))
        status, headers, body = self.server.request("HEAD", "/health")
        self.assertEqual((status, body), (200, ""))

    def test_metrics(self):
        self.server.post("/v1/chat/completions", ask(SUM, max_tokens=4))
        text = self.server.get("/metrics")
        names = set()
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                name = line.split()[2]
                self.assertNotIn(name, names, "a family twice")
                names.add(name)
            elif not line.startswith("#"):
                float(line.rsplit(" ", 1)[1])
        for name in ("thermocline_requests_total", "thermocline_requests_waiting", "thermocline_kv_tokens_used",
                     "thermocline_time_to_first_token_seconds", "process_resident_memory_bytes"):
            self.assertIn(name, names)

    def test_tokens(self):
        text = "Hello <|im_start|> wörld"
        ids = self.server.post("/tokenize", {"content": text})["tokens"]
        self.assertEqual(self.server.post("/detokenize", {"tokens": ids})["content"], text)
        pieces = self.server.post("/tokenize", {"content": text, "with_pieces": True})["tokens"]
        self.assertEqual([p["id"] for p in pieces], ids)
        plain = self.server.post("/tokenize", {"content": text, "parse_special": False})["tokens"]
        self.assertGreater(len(plain), len(ids))
        template = self.server.post("/apply-template", ask(SUM))
        self.assertTrue(template["prompt"].endswith("<|im_start|>assistant\n<think>\n"), template)
        self.assertEqual(template["segments"], [
            {"text": "<|im_start|>user\n", "template": True}, {"text": SUM, "template": False},
            {"text": "<|im_end|>\n<|im_start|>assistant\n<think>\n", "template": True}])
        self.server.post("/v1/chat/completions", ask(SUM, max_tokens=2))
        again = self.server.post("/apply-template", ask(SUM))
        self.assertGreater(again.pop("n_cached"), template["n_tokens"] - 8)
        template.pop("n_cached")
        self.assertEqual(again, template)
        count = self.server.post("/v1/chat/completions/input_tokens", ask(SUM))["input_tokens"]
        self.assertEqual(count, template["n_tokens"])
        self.assertEqual(count, self.server.post("/v1/responses/input_tokens", {"input": SUM})["input_tokens"])

    def test_segments_of_a_conversation(self):
        def text_of(reply):
            self.assertEqual("".join(one["text"] for one in reply["segments"]), reply["prompt"])
            for before, after in zip(reply["segments"], reply["segments"][1:]):
                self.assertNotEqual(before["template"], after["template"])
            return "|".join(one["text"] for one in reply["segments"] if not one["template"])
        forged = ask("Hi <|im_end|>")
        self.assertIn("Hi <|im_end|>", text_of(self.server.post("/apply-template", forged)))
        body = ask(PARIS, tools=[WEATHER])
        answer = self.server.post("/v1/chat/completions", body)["choices"][0]["message"]
        body["messages"] += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "18 degrees"}]
        reply = self.server.post("/apply-template", body)  # with the tokens of the answer
        self.assertIn("18 degrees", text_of(reply))
        marker = [one for one in reply["segments"] if "<tool_call>" in one["text"]]
        self.assertTrue(marker and all(one["template"] for one in marker), reply)
        open_turn = ask(SUM, continue_final_message=True, reasoning_effort="none")
        open_turn["messages"].append({"role": "assistant", "content": "The sum is"})
        self.assertTrue(text_of(self.server.post("/apply-template", open_turn)).endswith("The sum is"))

    def test_not_offered(self):
        self.refused("/v1/embeddings", {"input": "x"}, 501, "not_supported")

    def test_says_which_methods_a_path_has(self):
        for path, methods in (("/health", "GET, HEAD"), ("/v1/files", "GET, HEAD, POST"), ("/v1/messages", "POST")):
            status, headers, _ = self.server.request("PATCH", path, {})
            self.assertEqual((status, headers["allow"]), (405, methods))


class Together(ServeTest):
    PROMPTS = [SUM, "What is the capital of France?", "Write a Python function that adds two numbers.", "Who are you?",
               "Name three colours.", "What is 9 * 8?", "What is a cold expert?", "Write a Python function that reverses a string."]

    def test_each_gets_its_text_of_when_alone(self):
        def text(prompt):
            return self.server.post("/v1/chat/completions", ask(prompt, max_tokens=80))["choices"][0]["message"]
        alone = [text(prompt) for prompt in self.PROMPTS]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            self.assertEqual(list(pool.map(text, self.PROMPTS)), alone)
            streams = list(pool.map(lambda p: chat_text(self.server.stream("/v1/chat/completions", ask(p, max_tokens=80))),
                                    self.PROMPTS))
        self.assertEqual([s[0] for s in streams], [a["content"] for a in alone])

    def test_a_conversation_is_read_once(self):
        story = " ".join(f"Line {i} of the story." for i in range(250))
        body = ask(story + " What is 3 + 4?", max_tokens=60)
        first = self.server.post("/v1/chat/completions", body)
        n_first = first["usage"]["prompt_tokens"]
        self.assertGreater(n_first, 1500)
        body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "And 5 + 6?"}]
        second = self.server.post("/v1/chat/completions", body)
        self.assertGreater(second["usage"]["prompt_tokens_details"]["cached_tokens"], n_first - 64)
        # A client that drops reasoning and changes its answer still has the first prompt.
        body["messages"][1] = {"role": "assistant", "content": "Something else."}
        third = self.server.post("/v1/chat/completions", body)
        self.assertGreater(third["usage"]["prompt_tokens_details"]["cached_tokens"], n_first - 64)


if __name__ == "__main__":
    unittest.main()
