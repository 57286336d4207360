#!/usr/bin/env python3
"""Details of the APIs of `serve` that clients rarely use, each with what the server promises of it."""
import concurrent.futures
import contextlib
import gzip
import json
import socket
import unittest

from server_harness import ENDLESS, WEATHER, WIDE, Server, ask, wait_until

SUM = "What is 17 + 25?"
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


class DetailsTest(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.server = Server("--parallel", "2", "-c", "2048")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def refused(self, path, body, param=None):
        status, _, reply = self.server.request("POST", path, body)
        self.assertEqual(status, 400, reply)
        if param:
            self.assertEqual(reply["error"]["param"], param, reply)


class Stops(DetailsTest):
    def test_end_a_thought_where_they_are_told_to(self):
        body = ask(SUM, stop=["= 4"])
        whole = self.server.post(CHAT, body)["choices"][0]["message"]
        self.assertIn("= 4", whole["reasoning"])
        choice = self.server.post(CHAT, {**body, "stop_scope": "all"})["choices"][0]
        self.assertEqual(choice["message"]["reasoning"], whole["reasoning"].split("= 4")[0])
        self.assertEqual((choice["message"]["content"], choice["finish_reason"]), ("", "stop"))
        self.refused(CHAT, {**body, "stop_scope": "some"}, "stop_scope")

    def test_cut_a_call_where_they_are_told_to(self):
        body = ask("What is the weather in Paris?", tools=[WEATHER], stop=["aris"])
        whole = self.server.post(CHAT, body)["choices"][0]
        self.assertEqual((whole["message"]["tool_calls"][0]["function"]["arguments"], whole["finish_reason"]),
                         ('{"city": "Paris"}', "tool_calls"))
        cut = self.server.post(CHAT, {**body, "stop_scope": "all", "reasoning_effort": "none"})["choices"][0]
        self.assertEqual((cut["message"]["tool_calls"][0]["function"]["arguments"], cut["finish_reason"]), ('{"city": "P', "stop"))


    # They were held back with the model's own end: never written, and the text went on without them.
    def test_by_token_hold_where_the_own_end_of_a_model_is_ignored(self):
        body = ask(SUM, reasoning_effort="none", logprobs=True)
        whole = self.server.post(CHAT, body)["choices"][0]
        tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
        last = self.server.post("/tokenize", {"content": tokens[-1]})["tokens"]
        self.assertEqual(len(last), 1, tokens)
        at = tokens.index(tokens[-1])
        for more in ({"ignore_eos": True}, {"min_tokens": len(tokens)}):
            cut = self.server.post(CHAT, {**body, **more, "stop_token_ids": last, "max_tokens": 3 * len(tokens)})["choices"][0]
            self.assertEqual((cut["message"]["content"], cut["finish_reason"]), ("".join(tokens[:at]), "stop"), more)


class Numbers(DetailsTest):
    def test_ids_are_those_of_the_vocabulary(self):
        for id in (-1, 2**31, 2**32, 2**32 + 5, 2**63, 2**64 - 1, 4096, 1.0, "5", None):
            self.refused("/detokenize", {"tokens": [id]}, "tokens")
            self.refused(CHAT, ask(SUM, stop_token_ids=[5, id]), "stop_token_ids")
            self.refused(COMPLETIONS, {"prompt": [5, id]}, "prompt")
        self.assertEqual(self.server.post("/detokenize", {"tokens": [4095, 0]})["content"].encode()[-1:], b"!")

    def test_more_tokens_than_there_are_is_all_there_are(self):
        for n in (2**31, 2**40 + 1, 2**63 - 1):
            reply = self.server.post(CHAT, ask(SUM, max_tokens=n))
            self.assertEqual(reply["choices"][0]["finish_reason"], "stop")

    def test_are_said_as_they_were_meant(self):
        reply = self.server.post(RESPONSES, {"input": SUM, "max_output_tokens": 1, "top_p": 0.95, "temperature": 0.7})
        self.assertEqual((reply["top_p"], reply["temperature"]), (0.95, 0.7))
        self.assertEqual(self.server.get("/props")["default_generation_settings"]["params"]["top_p"], 0.95)

    def test_offsets_count_characters(self):
        prompt = "Grüße an 🙂 alle"
        lists = self.server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0})["choices"][0]["logprobs"]
        self.assertEqual(lists["text_offset"][-1] + len(lists["tokens"][-1]), len(prompt))
        for token, offset in zip(lists["tokens"], lists["text_offset"]):
            if "\ufffd" not in token:
                self.assertTrue(prompt[offset:].startswith(token), (token, offset))


class Heads(DetailsTest):
    def test_replies_are_not_to_be_stored(self):
        bodies = {CHAT: ask(SUM, max_tokens=1), COMPLETIONS: {"prompt": "x", "max_tokens": 1},
                  MESSAGES: {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, RESPONSES: {"input": "x", "max_output_tokens": 1}}
        for path, body in bodies.items():
            for more in ({}, {"X-Keepalive": "whitespace"}):
                self.assertEqual(self.server.request("POST", path, body, headers=more)[1]["cache-control"], "no-store")

    def test_of_a_stream_alone(self):
        self.assertEqual(self.server.request("HEAD", "/thermo/live", timeout=20)[::2], (200, ""))

    def test_words_in_any_case(self):
        body = json.dumps(ask(SUM, max_tokens=1)).encode()
        with socket.create_connection((self.server.host, self.server.port), timeout=20) as s:
            s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nExpect: 100-Continue\r\n\r\n".encode())
            self.assertTrue(s.recv(1000).startswith(b"HTTP/1.1 100 Continue"))
        packed = gzip.compress(b'{"content": "x"}')
        self.assertEqual(self.server.request("POST", "/tokenize", packed, headers={"Content-Encoding": "GZip"})[0], 200)
        self.assertEqual(self.server.request("POST", "/tokenize", b'{"content": "x"}', headers={"Content-Encoding": "Identity"})[0], 200)

    def test_names_with_codes(self):
        self.assertEqual(self.server.get("/v1/models/%70lankton")["id"], "plankton")
        self.assertEqual(self.server.request("GET", "/v1/models/plankton%2")[0], 404)

    def test_who_was_cancelled_does_not_try_again(self):
        with Server("--parallel", "1", *WIDE) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.request, "POST", COMPLETIONS, {"prompt": "One day", **ENDLESS}, headers={"X-Request-Id": "to-cancel"})
            wait_until(lambda: server.request("DELETE", "/thermo/requests/to-cancel")[0] == 200)
            status, headers, reply = asked.result()
        self.assertEqual((status, reply["error"]["code"], headers["x-should-retry"]), (503, "cancelled", "false"))


class Contents(DetailsTest):
    def same(self, path, one, other):
        """Both bodies give the same prompt."""
        texts = [self.server.post(path, body) for body in (one, other)]
        self.assertEqual(texts[0], texts[1])

    def test_may_be_nothing(self):
        empty, null = ([{"role": "user", "content": content}] for content in ("", None))
        self.same("/apply-template", {"messages": empty}, {"messages": null})
        self.same("/v1/messages/count_tokens", {"messages": empty}, {"messages": null})

    def test_of_results_may_be_documents(self):
        def body(content):
            return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}]}
        parts = [{"type": "text", "text": "one "}, {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "two "}},
                 {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "three "}]},
                 {"type": "tool_reference", "tool_name": "four"}]
        self.same("/v1/messages/count_tokens", body("one two three four"), body(parts))
        for source in ({"data": "x"}, {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, {}):
            status, _, reply = self.server.request("POST", MESSAGES, body([{"type": "document", "source": source}]))
            self.assertEqual((status, reply["error"]["type"]), (400, "invalid_request_error"))

    def test_of_hosted_tools_are_shown_as_they_are(self):
        output = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
        items = [{"role": "user", "content": "x"}, {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}]
        with_list = {"input": items + [{"type": "shell_call_output", "call_id": "c", "output": output}]}
        with_text = {"input": items + [{"type": "shell_call_output", "call_id": "c", "output": json.dumps(output, separators=(",", ":"))}]}
        self.same("/v1/responses/input_tokens", with_list, with_text)


class Reasoning(DetailsTest):
    def test_is_asked_for_in_words_that_fit(self):
        for value in (True, 5, "low", []):
            self.refused(CHAT, ask(SUM, reasoning=value), "reasoning")
        for path, body in ((CHAT, ask(SUM)), (RESPONSES, {"input": SUM})):
            self.refused(path, {**body, "reasoning": {"effort": 5}}, "reasoning.effort")
        _, headers, _ = self.server.request("POST", CHAT, ask(SUM, max_tokens=1, reasoning={"effort": "low", "exclude": True}))
        self.assertEqual(headers["x-ignored-fields"], "reasoning.exclude")
        # The plain name comes first, and null says nothing.
        off = self.server.post(CHAT, ask(SUM, reasoning={"effort": "high"}, reasoning_effort="none", chat_template_kwargs={"enable_thinking": None}))
        self.assertNotIn("reasoning", off["choices"][0]["message"])


class Sessions(DetailsTest):
    # The user was taken for the conversation although a header named it.
    def test_are_named_by_the_body_then_by_headers_then_by_the_user(self):
        def session(path, body, header):
            with contextlib.closing(self.server.stream(path, {**ask(SUM), **ENDLESS, **body}, {"X-Session-Id": header} if header else None)) as stream:
                next(stream)
                found = self.server.get("/thermo/requests")[0]["session"]
            self.server.wait_until_idle()
            return found

        h, u, k = (session(CHAT, {"prompt_cache_key": name}, None) for name in "huk")
        self.assertEqual(len({h, u, k}), 3)
        self.assertEqual(session(CHAT, {"user": "u"}, None), u)
        self.assertEqual(session(CHAT, {"user": "u"}, "h"), h)
        self.assertEqual(session(CHAT, {"user": "u", "prompt_cache_key": "k"}, "h"), k)
        self.assertEqual(session(MESSAGES, {"metadata": {"user_id": "u"}}, None), u)
        self.assertEqual(session(MESSAGES, {"metadata": {"user_id": "u"}}, "h"), h)


class Formats(DetailsTest):
    MANY = " | ".join(f'"x" [0-9] "{i}"' for i in range(10000, 14500))

    def test_that_cannot_be_followed_are_refused_before_anything_is_written(self):
        for path, body in ((CHAT, ask(SUM, stream=True)), (RESPONSES, {"input": SUM}), (COMPLETIONS, {"prompt": SUM})):
            status, _, reply = self.server.request("POST", path, {**body, "grammar": f'root ::= "a" ({self.MANY})'})
            self.assertEqual((status, reply["error"]["code"], reply["error"]["param"]), (400, "invalid_grammar", "grammar"))

    def test_that_are_lost_on_the_way_end_the_answer_with_an_error(self):
        body = {"grammar": f"root ::= [a-w]{{200}} ({self.MANY})", "max_tokens": 300}
        status, _, reply = self.server.request("POST", COMPLETIONS, {"prompt": SUM, **body})
        self.assertEqual((status, reply["error"]["code"]), (400, "invalid_grammar"))
        events = [data for _, data in self.server.stream(CHAT, ask(SUM, reasoning_effort="none", **body))]
        self.assertEqual((events[-2]["error"]["code"], events[-1]), ("invalid_grammar", "[DONE]"))
        text = "".join(choice["delta"].get("content", "") for data in events[:-2] for choice in data["choices"])
        self.assertRegex(text, "^[a-w]*$")


class Bodies(DetailsTest):
    def test_of_several_gzip_members_are_one_text(self):
        packed = gzip.compress(b'{"content": "x') + gzip.compress(b' y"}')
        status, _, reply = self.server.request("POST", "/tokenize", packed, headers={"Content-Encoding": "gzip"})
        self.assertEqual((status, reply), (200, self.server.post("/tokenize", {"content": "x y"})))


class Busy(unittest.TestCase):
    def test_says_when_to_come_back(self):
        long = {"prompt": "One day", **ENDLESS}
        with Server("--parallel", "1", "--max-queue", "1", "--quantum", "0", *WIDE) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.request, "POST", COMPLETIONS, long, headers={"X-Request-Id": f"long-{i}"}) for i in range(2)]
            server.wait_for_requests(2)
            wait_until(lambda: server.request("GET", "/ready")[0] != 200)
            ready = server.request("GET", "/ready")
            self.assertEqual((ready[0], ready[2]["reason"]), (503, "server_is_overloaded"))
            for name, value in (("retry-after", "1"), ("retry-after-ms", "1000"), ("x-should-retry", "true")):
                self.assertEqual(ready[1][name], value)
            for i in range(2):
                server.request("DELETE", f"/thermo/requests/long-{i}")
            self.assertEqual({one.result()[0] for one in asked}, {503})


if __name__ == "__main__":
    unittest.main()
