"""`thermocline run`: what the embedded model answers, and in which form."""
import json
import subprocess

from harness import MODEL, PROGRAM, ProgramTest, clean_environment, run, temporary_folder

SUM = ("run", "-p", "What is 17 + 25?", "--temp", "0")


class Answers(ProgramTest):
    def test_adds_two_numbers(self):
        self.assertIn("42", self.answer(*SUM))

    def test_knows_a_capital(self):
        self.assertIn("Paris", self.answer("run", "-p", "What is the capital of France?", "--temp", "0"))

    def test_says_what_a_cold_expert_is(self):
        self.assertIn("expert", self.answer("run", "-p", "What is a cold expert?", "--temp", "0"))

    def test_writes_merge_sort_correctly(self):
        text = self.answer("run", "-p", "Write a Python function merge_sort.", "--temp", "0", "-n", "400")
        self.assertIn("def merge_sort", text)
        code = text.split("```")[1] if "```" in text else text
        code = code.removeprefix("python\n")
        names = {}
        exec(code, names)  # our own model, our own prompt, greedy: always the same text
        for items in ([], [1], [3, 1, 2], [5, 5, 1, -2, 9, 0]):
            self.assertEqual(names["merge_sort"](list(items)), sorted(items))

    def test_is_the_same_from_file_embedded_and_stdin(self):
        embedded = self.answer(*SUM)
        folder = temporary_folder(self)
        (folder / "prompt.txt").write_text("What is 17 + 25?\n")
        self.assertEqual(self.answer("run", MODEL, "-f", folder / "prompt.txt", "--temp", "0"), embedded)
        self.assertEqual(self.answer("run", "-m", MODEL, "--temp=0", stdin="What is 17 + 25?\n"), embedded)

    def test_is_the_same_for_every_cache_type_and_without_repacking(self):
        for extra in (["-ctk", "f32", "-ctv", "f32"], ["--no-repack"], ["-t", "1"], ["--isa", "portable"]):
            self.assertIn("42", self.answer(*SUM, *extra), extra)

    def test_repeats_itself_with_a_seed(self):
        ask = ("run", "-p", "Write a list of three fruits.", "--temp", "1", "-n", "40", "--seed", "7", "-q")
        self.assertEqual(self.answer(*ask), self.answer(*ask))

    def test_takes_a_system_prompt(self):
        reply = json.loads(self.answer(*SUM, "-sys", "You are Plankton.", "--json"))
        plain = json.loads(self.answer(*SUM, "--json"))
        self.assertGreater(reply["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"])

    def test_continues_a_raw_text(self):
        self.assertTrue(self.answer("run", "--raw", "-p", "def add(a, b):\n", "--temp", "0", "-n", "12").strip())


class Output(ProgramTest):
    def test_is_the_answer_alone_on_stdout(self):
        result = run(*SUM)
        self.assertNotIn("think", result.stdout)
        self.assertNotIn("tok/s", result.stdout)
        self.assertTrue(result.stdout.endswith("\n"))
        self.assertIn("embedded", result.stderr)
        self.assertIn("tok/s", result.stderr.strip().split("\n")[-1])

    def test_is_silent_on_stderr_when_quiet(self):
        self.assertEqual(run(*SUM, "--quiet").stderr, "")

    def test_has_no_colour_and_no_cursor_movement_in_pipes(self):
        result = run(*SUM, "-v", env={"TERM": "xterm-256color"})
        self.assertNotIn("\x1b", result.stdout + result.stderr)
        self.assertNotIn("\r", result.stdout + result.stderr)

    def test_colours_when_forced_but_never_in_json(self):
        self.assertIn("\x1b", run(*SUM, "--color", "always").stderr)
        self.assertIn("\x1b", run(*SUM, env={"CLICOLOR_FORCE": "1"}).stderr)
        self.assertNotIn("\x1b", run(*SUM, env={"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}).stderr)
        self.assertNotIn("\x1b", run(*SUM, "--color", "always", "--json").stdout)

    def test_shows_reasoning_on_stderr_when_asked(self):
        hidden, shown = run(*SUM, "--reasoning", "on"), run(*SUM, "--reasoning", "on", "--show-reasoning")
        self.assertEqual(hidden.stdout, shown.stdout)
        self.assertGreater(len(shown.stderr), len(hidden.stderr))

    def test_ends_before_a_stop_text(self):
        text = self.answer(*SUM, "--stop", "42")
        self.assertNotIn("42", text)

    def test_keeps_to_the_token_limit(self):
        reply = json.loads(self.answer(*SUM, "-n", "3", "--json"))
        self.assertEqual(reply["usage"]["completion_tokens"], 3)
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")

    def test_ends_quietly_when_the_reader_goes_away(self):
        done = subprocess.run(["bash", "-c", f"'{PROGRAM}' run -p 'Count.' -n 200 --ignore-eos -q | head -c 1; "
                               "exit ${PIPESTATUS[0]}"], capture_output=True, env=clean_environment(), timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, b""))


class OnATerminal(ProgramTest):
    def test_shows_the_reasoning_dim(self):
        seen = self.on_terminal(*SUM)
        self.assertIn("\x1b[2m", seen)
        seen = seen.replace("\x1b[2m", "").replace("\x1b[0m", "")
        self.assertLess(seen.index("17 + 25 = 42"), seen.index("17 + 25 is 42."))

    def test_has_no_colour_when_it_is_not_wanted(self):
        for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            seen = self.on_terminal(*SUM, "--progress", "off", **env)
            self.assertNotIn("\x1b", seen)
            self.assertIn("42", seen)

    def test_clears_its_progress_line(self):
        seen = self.on_terminal(*SUM, "--progress", "on", "--no-repack")
        if "\r" in seen.replace("\r\n", "\n"):  # a load this short may draw nothing
            self.assertIn("\r\x1b[K", seen)


class Json(ProgramTest):
    def test_is_a_chat_completion(self):
        reply = json.loads(self.answer(*SUM, "--json"))
        self.assertEqual(reply["object"], "chat.completion")
        self.assertTrue(reply["id"].startswith("chatcmpl-"))
        choice = reply["choices"][0]
        self.assertEqual(choice["message"]["role"], "assistant")
        self.assertIn("42", choice["message"]["content"])
        self.assertEqual(choice["finish_reason"], "stop")
        self.assertIsNone(choice["logprobs"])
        usage = reply["usage"]
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        for name in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms",
                     "predicted_per_second", "cache_n", "seed"):
            self.assertIn(name, reply["timings"])

    def test_separates_the_reasoning(self):
        on = json.loads(self.answer(*SUM, "--json", "--reasoning", "on"))
        off = json.loads(self.answer(*SUM, "--json", "--reasoning", "off"))
        self.assertGreater(on["usage"]["completion_tokens_details"]["reasoning_tokens"], 0)
        self.assertTrue(on["choices"][0]["message"]["reasoning_content"])
        self.assertNotIn("reasoning_content", off["choices"][0]["message"])
        self.assertEqual(off["usage"]["completion_tokens_details"]["reasoning_tokens"], 0)

    def test_has_logprobs_of_the_visible_tokens(self):
        reply = json.loads(self.answer(*SUM, "--json", "--logprobs", "3"))
        choice = reply["choices"][0]
        entries = choice["logprobs"]["content"]
        self.assertEqual(b"".join(bytes(e["bytes"]) for e in entries).decode(), choice["message"]["content"])
        for entry in entries:
            self.assertLessEqual(entry["logprob"], 0)
            self.assertEqual(len(entry["top_logprobs"]), 3)
            # Greedy: the chosen token is the most likely one.
            self.assertEqual(entry["top_logprobs"][0]["bytes"], entry["bytes"])

    def test_obeys_a_logit_bias(self):
        first = json.loads(self.answer(*SUM, "--json", "--logprobs", "0", "--reasoning", "off"))
        token = first["choices"][0]["logprobs"]["content"][0]["token"]
        ids = json.loads(self.answer("tokenize", "--text", token, "--json"))["ids"]
        banned = json.loads(self.answer(*SUM, "--json", "--logprobs", "0", "--reasoning", "off",
                                        "--logit-bias", f"{ids[0]}-inf"))
        self.assertNotEqual(banned["choices"][0]["logprobs"]["content"][0]["token"], token)


if __name__ == "__main__":
    import unittest
    unittest.main()
