"""`thermocline chat` over a pipe, and Ctrl-C."""
import json
import os
import signal
import subprocess

from harness import ENDLESS, PROGRAM, INTERRUPTED, ProgramTest, USAGE, clean_environment, interrupt_until, run, temporary_folder
from server_harness import Server

CHAT = ("chat", "--temp", "0")


class Chat(ProgramTest):
    def test_answers_every_line(self):
        text = self.answer(*CHAT, stdin="What is 17 + 25?\nWhat is the capital of France?\n")
        self.assertIn("42", text)
        self.assertIn("Paris", text)

    def test_reuses_what_it_has_read(self):
        stderr = run(*CHAT, stdin="What is 17 + 25?\nWhat is 3 + 4?\n/stats\n").stderr
        self.assertIn("cached", stderr)

    def test_gives_the_first_answer_again_after_reset(self):
        once = self.answer(*CHAT, stdin="What is 17 + 25?\n")
        self.assertEqual(self.answer(*CHAT, stdin="What is 17 + 25?\n/reset\nWhat is 17 + 25?\n"), once * 2)

    def test_obeys_its_commands(self):
        folder = temporary_folder(self)
        result = run(*CHAT, stdin=f"/help\n/system You are brief.\n/system\n/think off\nWhat is 17 + 25?\n"
                     f"/save {folder}/talk.txt\n/sats\n/think maybe\n/exit\nnever read\n")
        self.assertEqual(result.returncode, 0, result.stderr)
        for text in ("/reset", "You are brief.", "reasoning is off", "did you mean /stats?", "on or off"):
            self.assertIn(text, result.stderr)
        saved = (folder / "talk.txt").read_text()
        self.assertIn("user: What is 17 + 25?", saved)
        self.assertIn("assistant: ", saved)
        self.assertNotIn("never", saved)

    def test_joins_lines_that_end_in_a_backslash(self):
        folder = temporary_folder(self)
        run(*CHAT, stdin=f"What is\\\n17 + 25?\n/save {folder}/talk.txt\n")
        self.assertIn("user: What is\n17 + 25?", (folder / "talk.txt").read_text())

    def test_survives_text_that_is_no_utf8(self):
        done = subprocess.run([PROGRAM, *CHAT], input=b"\xff\xfe\nWhat is 17 + 25?\n", capture_output=True,
                              env=clean_environment(), timeout=120)
        self.assertEqual(done.returncode, USAGE)
        self.assertIn(b"42", done.stdout)
        self.assertIn(b"not UTF-8", done.stderr)

    def test_says_when_the_conversation_is_too_long(self):
        result = run(*CHAT, "-c", "32", stdin="What is 17 + 25? " * 20 + "\n")
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("the context holds 32", result.stderr)


class Remote(ProgramTest):
    def test_talks_to_a_server(self):
        folder = temporary_folder(self)
        with Server("-c", "2048", "--api-key", "k") as server:
            asked = run("chat", "--url", f"{server.url}/", "--api-key", "k", "--temp", "0",
                        stdin=f"/system You are brief.\nWhat is 17 + 25?\nAnd what is the capital of France?\n/regen\n/stats\n/save {folder}/talk.json\n")
            self.assertEqual(asked.returncode, 0, asked.stderr)
            self.assertIn("42", asked.stdout)
            self.assertIn(server.url, asked.stderr)
            self.assertEqual([m["role"] for m in json.loads((folder / "talk.json").read_text())], ["system"] + 2 * ["user", "assistant"])
            local = self.answer(*CHAT, "-c", "2048", stdin="What is 17 + 25?\n")
            self.assertEqual(run("chat", "--url", server.url, "--api-key", "k", "--temp", "0", stdin="What is 17 + 25?\n").stdout, local)
            refused = run("chat", "--url", server.url, stdin="What is 17 + 25?\n")
            self.assertEqual(refused.returncode, USAGE)
            self.assertIn("401", refused.stderr)
            long = run("chat", "--url", server.url, "--api-key", "k", stdin="word " * 5000 + "\n")
            self.assertIn("maximum context length", long.stderr)
        gone = run("chat", "--url", server.url, stdin="hello\n")
        self.assertEqual(gone.returncode, USAGE)
        self.assertIn("cannot be reached", gone.stderr)
        for arguments, why in ((("model.gguf", "--url", "http://x"), "contradict"), (("--url", "x"), "http://"), (("--api-key", "k"), "--url"),
                               (("--url", "http://x", "--grammar", "root ::= \"x\""), "format"), (("--url", "http://x", "-n", "0"), "positive"),
                               (("--url", "http://x", "--stop", ""), "0 bytes"), (("--url", "http://x", "--chat-template-kwargs", "{x"), "JSON object"),
                               (("--url", "http://x", "--chat-template-kwargs", "[1]", "--reasoning", "on"), "JSON object")):
            done = run("chat", *arguments)
            self.assertEqual(done.returncode, USAGE, done.stderr)
            self.assertIn(why, done.stderr)


class Interrupt(ProgramTest):
    def start(self, *arguments):
        return subprocess.Popen([PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, env=clean_environment())

    def test_stops_an_answer_and_goes_on(self):
        chat = self.start("chat", *ENDLESS)
        chat.stdin.write(b"What is 17 + 25?\n")
        chat.stdin.flush()
        os.read(chat.stdout.fileno(), 1)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        out, err = chat.communicate(b"/stats\n/exit\n", timeout=60)
        self.assertEqual(chat.returncode, 0, err)
        self.assertIn(b"stopped", err)
        self.assertIn(b"2 messages", err)

    def test_leaves_after_two_at_the_prompt(self):
        chat = self.start("chat")
        chat.stdin.write(b"/help\n")
        chat.stdin.flush()
        while b"/exit" not in chat.stderr.readline():
            pass
        interrupt_until(chat, b"Ctrl-C again")
        chat.send_signal(signal.SIGINT)
        self.assertEqual(chat.wait(timeout=60), INTERRUPTED)
        for pipe in (chat.stdin, chat.stdout, chat.stderr):
            pipe.close()

    def test_ends_run_with_130(self):
        program = self.start("run", "-p", "What is 17 + 25?", *ENDLESS)
        program.stdin.close()  # no document follows
        program.stdin = None
        os.read(program.stdout.fileno(), 1)
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=60)
        self.assertEqual(program.returncode, INTERRUPTED)


if __name__ == "__main__":
    import unittest
    unittest.main()
