#!/usr/bin/env python3
"""Bodies as real clients send them, two turns each: nothing of it is an error, and streams are in order."""
import json
import unittest

from server_harness import WEATHER, Server

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
QUESTION = "What is the weather in Paris?"


class TrafficTest(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        # Without the store of turns, what clients send back has to be enough.
        cls.server = Server("--parallel", "2", "-c", "8192", "--turn-store", "off")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def asked(self, path, body, **options):
        status, headers, reply = self.server.request("POST", path, body, **options)
        self.assertEqual(status, 200, reply)
        return headers, reply


class ClaudeCode(TrafficTest):
    HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
               "x-app": "cli", "User-Agent": "claude-cli/2.1.0 (external, cli)", "x-stainless-lang": "js", "Authorization": "Bearer none"}
    TOOLS = [
        {"name": "Bash", "description": "Executes a command", "eager_input_streaming": True, "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False, "required": ["command"],
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number", "maximum": 600000}, "run_in_background": {"type": "boolean"}}}},
        {"name": "TodoWrite", "description": "Keeps a list", "input_schema": {
            "type": "object", "additionalProperties": False, "required": ["todos"],
            "properties": {"todos": {"type": "array", "items": {
                "type": "object", "additionalProperties": False, "required": ["content", "status"],
                "properties": {"content": {"type": "string", "minLength": 1}, "status": {"type": "string", "enum": ["pending", "completed"]}}}}}}},
        {"name": "Ask", "description": "Asks", "defer_loading": True, "cache_control": {"type": "ephemeral"}, "input_schema": {
            "type": "object", "properties": {"answers": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}}}},
        {"name": "get_weather", "description": "Get the weather of a city",
         "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    BODY = {"model": "claude-sonnet-4-5-20250929", "max_tokens": 1000, "temperature": 0, "tools": TOOLS,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
                       {"type": "text", "text": "You are a helpful program.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            "metadata": {"user_id": "user_a_session_b"}, "thinking": {"type": "enabled", "budget_tokens": 512},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>\n"},
                                             {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "No skills are available."}]

    def stream(self, **more):
        """Blocks, the reason to stop and the usage; checks the order of events."""
        events = list(self.server.stream("/v1/messages?beta=true", {**self.BODY, **more}, headers=self.HEADERS))
        self.assertTrue(all(name == data["type"] for name, data in events))
        names = [name for name, _ in events]
        self.assertEqual((names[:2], names[-2:]), (["message_start", "ping"], ["message_delta", "message_stop"]))
        blocks, is_open = [], False
        for name, data in events[2:-2]:
            if name == "content_block_start":
                self.assertFalse(is_open)
                self.assertEqual(data["index"], len(blocks))
                blocks.append({**data["content_block"], "json": ""})
                is_open = True
            elif name == "content_block_delta":
                self.assertTrue(is_open)
                delta = data["delta"]
                for member, of in (("text", "text"), ("thinking", "thinking"), ("signature", "signature"), ("partial_json", "json")):
                    if member in delta:
                        blocks[-1][of] += delta[member]
            elif name == "content_block_stop":
                is_open = False
            else:
                self.assertEqual(name, "ping")
        self.assertFalse(is_open)
        for block in blocks:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
            if block["type"] == "thinking":
                self.assertTrue(block["signature"])
        end = events[-2][1]
        return blocks, end["delta"]["stop_reason"], end["usage"]

    def test_two_turns_with_a_tool(self):
        path = "/v1/messages/count_tokens?beta=true"
        headers, counted = self.asked(path, {**self.BODY, "messages": self.MESSAGES}, headers=self.HEADERS)
        self.assertNotIn("x-ignored-fields", headers)
        blocks, reason, usage = self.stream(messages=self.MESSAGES, tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True})
        self.assertEqual(([block["type"] for block in blocks], reason), (["thinking", "tool_use"], "tool_use"))
        self.assertEqual(usage["input_tokens"] + usage["cache_read_input_tokens"], counted["input_tokens"])
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "cache_control": {"type": "ephemeral"},
                  "content": [{"type": "text", "text": "Sunny"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}]}
        messages = self.MESSAGES + [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
        blocks, reason, second = self.stream(messages=messages)
        self.assertIn(reason, ("end_turn", "tool_use", "max_tokens"))
        # Thinking came back, so that all of the first turn was known.
        self.assertGreaterEqual(second["cache_read_input_tokens"], counted["input_tokens"])

    def test_choices_of_tools(self):
        for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
            for choice, calls in (({"type": "any"}, True), ({"type": "none"}, False)):
                blocks, reason, _ = self.stream(messages=self.MESSAGES, tool_choice=choice, thinking=thinking)
                called = any(block["type"] == "tool_use" for block in blocks)
                self.assertTrue(called == calls or (calls and reason == "max_tokens"), (choice, reason, blocks))

    def test_side_requests(self):
        schema = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 20}}, "required": ["title"], "additionalProperties": False}
        _, title = self.asked("/v1/messages?beta=true", {"model": "small", "max_tokens": 200, "temperature": 0, "tools": [], "messages": [{"role": "user", "content": "A title"}],
                                                         "output_config": {"format": {"type": "json_schema", "schema": schema}}})
        self.assertEqual(list(json.loads(title["content"][0]["text"])), ["title"])
        _, quota = self.asked("/v1/messages", {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "x"}})
        self.assertEqual((quota["stop_reason"], quota["usage"]["output_tokens"]), ("max_tokens", 1))


class Codex(TrafficTest):
    HEADERS = {"Accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "s-1", "conversation_id": "s-1", "OpenAI-Beta": "responses=experimental"}
    TOOLS = [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": {
            "type": "object", "additionalProperties": False, "required": ["command"],
            "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}}}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "function", "name": "get_weather", "description": "Get the weather of a city", "strict": False,
         "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}},
        {"type": "namespace", "name": "files", "description": "f", "tools": [{"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}}]},
        {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
    BODY = {"model": "gpt-5-codex", "instructions": "You are a helpful program.", "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "s-1", "text": {"verbosity": "low"}, "max_output_tokens": 1000, "temperature": 0}
    INPUT = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context><cwd>/tmp</cwd></environment_context>"}]},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]

    def stream(self, **more):
        events = list(self.server.stream("/v1/responses", {**self.BODY, **more}, headers=self.HEADERS))
        self.assertEqual([data["sequence_number"] for _, data in events], list(range(len(events))))
        self.assertTrue(all(name == data["type"] for name, data in events))
        last = events[-1][1]
        self.assertIn(last["type"], ("response.completed", "response.incomplete"))
        self.assertEqual(last["timings"]["predicted_n"], last["response"]["usage"]["output_tokens"])
        done = [data["item"] for name, data in events if name == "response.output_item.done"]
        self.assertEqual(done, last["response"]["output"])
        return last["response"]

    def test_two_turns_that_keep_their_reasoning(self):
        first = self.stream(input=self.INPUT, tool_choice={"type": "function", "name": "get_weather"})
        self.assertEqual([item["type"] for item in first["output"]], ["reasoning", "function_call"])
        reasoning, call = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"],
                  "output": [{"type": "input_text", "text": "Sunny"}, {"type": "input_image", "image_url": "data:image/png;base64," + PIXEL}]}
        echoed = {key: call[key] for key in ("type", "name", "arguments", "call_id")}

        def body(item):
            return {**self.BODY, "input": self.INPUT + item + [echoed, output]}

        # The text of the reasoning is dropped; its sealed copy stands for it.
        sealed = [{"type": "reasoning", "summary": [], "content": None, "encrypted_content": reasoning["encrypted_content"]}]
        plain = [{"type": "reasoning", "summary": [], "content": reasoning["content"]}]
        tokens = [self.asked("/v1/responses/input_tokens", body(item))[1]["input_tokens"] for item in (sealed, plain, [])]
        self.assertEqual(tokens[0], tokens[1])
        self.assertGreater(tokens[0], tokens[2])
        second = self.stream(input=body(sealed)["input"])
        self.assertGreaterEqual(second["usage"]["input_tokens_details"]["cached_tokens"], first["usage"]["input_tokens"])
        self.assertEqual(second["usage"]["input_tokens"], tokens[0])

    def test_a_history_of_everything(self):
        history = self.INPUT + [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAA-of-another-server"},
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "function_call_output", "call_id": "c1", "output": "a b"},
            {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "*** Begin Patch"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
            {"type": "function_call", "id": "fc_1", "call_id": "c3", "name": "list", "namespace": "files", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c3", "output": "{\"output\": \"x\"}"},
            {"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]}]
        headers, _ = self.asked("/v1/responses", {**self.BODY, "input": history, "max_output_tokens": 50}, headers=self.HEADERS)
        self.assertNotIn("x-ignored-fields", headers)
        self.assertEqual(headers["x-ignored-tools"], "web_search, local_shell")


class OpenAi(TrafficTest):
    BODY = {"model": "gpt-4o", "temperature": 0, "max_completion_tokens": 1000, "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u",
            "safety_identifier": "x", "verbosity": "low", "reasoning_effort": "low", "parallel_tool_calls": True, "tools": [WEATHER],
            "stop": None, "logit_bias": None, "audio": None, "functions": None, "prediction": None, "web_search_options": None, "modalities": ["text"]}
    MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "name": "bob", "content": [{"type": "text", "text": QUESTION}]}]

    def test_two_turns_with_a_tool(self):
        headers, first = self.asked("/v1/chat/completions", {**self.BODY, "messages": self.MESSAGES})
        self.assertNotIn("x-ignored-fields", headers)
        message = first["choices"][0]["message"]
        self.assertEqual((first["choices"][0]["finish_reason"], message["content"]), ("tool_calls", None))
        messages = self.MESSAGES + [{**message, "audio": None, "function_call": None},
                                    {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": [{"type": "text", "text": "Sunny"}]}]
        events = [data for _, data in self.server.stream("/v1/chat/completions", {
            **self.BODY, "messages": messages, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True, "include_obfuscation": False}})]
        self.assertEqual(events.pop(), "[DONE]")
        last = events.pop()
        self.assertEqual(last["choices"], [])
        self.assertGreaterEqual(last["usage"]["prompt_tokens_details"]["cached_tokens"], first["usage"]["prompt_tokens"])
        self.assertEqual([event["choices"][0]["finish_reason"] for event in events], [None] * (len(events) - 1) + ["stop"])
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        entries = [entry for event in events if event["choices"][0]["logprobs"] for entry in event["choices"][0]["logprobs"]["content"]]
        self.assertEqual("".join(entry["token"] for entry in entries).strip(), text.strip())

    def test_open_webui(self):
        messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PIXEL}}]},
                    {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More"}]
        events = [data for _, data in self.server.stream("/v1/chat/completions", {
            "model": "plankton", "messages": messages, "max_tokens": 20, "stream_options": {"include_usage": True},
            "user": {"name": "a", "id": "b", "email": "c", "role": "admin"}})]
        self.assertEqual(events[-1], "[DONE]")
        self.assertEqual(events[-2]["usage"]["completion_tokens"], events[-2]["usage"]["total_tokens"] - events[-2]["usage"]["prompt_tokens"])

    def test_what_cannot_be_read_is_named(self):
        for part in ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, {"type": "file", "file": {"file_id": "x"}},
                     {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PIXEL}}):
            status, _, reply = self.server.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]})
            self.assertEqual((status, reply["error"]["code"], reply["error"]["param"]), (400, "unsupported_parameter", "messages[0].content[1].type"))


if __name__ == "__main__":
    unittest.main()
