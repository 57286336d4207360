"""`thermocline chat` at a terminal: a pseudo-terminal plays the person, keys and all."""
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
import unittest

from harness import INTERRUPTED, PROGRAM, ProgramTest, clean_environment, run, temporary_folder

LEFT, RIGHT, UP, HOME, END = "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[H", "\x1b[F"
BACKSPACE, CTRL_C, CTRL_D = "\x7f", "\x03", "\x04"
QUICK = ("chat", "--temp", "0", "--reasoning", "off", "-n", "8")


class Screen:
    """A program at a terminal of its own."""

    def __init__(self, *arguments, width=80, state, term="xterm", color=False):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.fd = leader
        env = clean_environment(XDG_STATE_HOME=str(state), TERM=term, LC_ALL="C.UTF-8", NO_COLOR="" if color else "1")
        self.program = subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=follower, stdout=follower, stderr=follower,
                                        env=env, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(follower)
        self.text = self.all = ""
        self.wait_for("> " if not color else "> |>\x1b\\[0m ")

    def read(self, seconds):
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return False
        try:
            block = os.read(self.fd, 65536)
        except OSError:  # the program has ended
            return False
        self.text += block.decode(errors="replace")
        self.all += block.decode(errors="replace")
        return bool(block)

    def wait_for(self, pattern, seconds=60):
        """Reads until the pattern is on the screen; what was read before is forgotten."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            if time.monotonic() > deadline or (not self.read(1.0) and self.program.poll() is not None):
                raise AssertionError(f"{pattern!r} did not come: {self.text!r}")
        self.text = self.text[found.end():]
        return found

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys):
        data = keys.encode() if isinstance(keys, str) else keys
        while data:
            data = data[os.write(self.fd, data[:512]):]
            self.read(0.01)  # a terminal shows what is typed; nobody may wait for anybody

    def send(self, line):
        """A message and its answer: the statistics that follow it, then the next prompt."""
        self.type(line + "\r")
        self.wait_for(r"tok/s.*?> ")

    def command(self, line, answer=r"\("):
        self.type(line + "\r")
        return self.wait_for(answer + ".*?> ")

    def leave(self, keys="/exit\r"):
        self.type(keys)
        while self.read(5.0):
            pass
        code = self.program.wait(timeout=30)
        os.close(self.fd)
        return code


class Prompt(ProgramTest):
    def setUp(self):
        self.folder = temporary_folder(self)

    def screen(self, *arguments, **options):
        return Screen(*QUICK, *arguments, state=self.folder / "state", **options)

    def messages(self, screen):
        """What the program holds as messages of the user."""
        path = self.folder / f"talk{time.monotonic_ns()}.json"
        screen.command(f"/save {path}")
        return [m["content"] for m in json.loads(path.read_text()) if m["role"] == "user"]

    def test_a_paste_of_several_lines_is_one_message(self):
        screen = self.screen()
        screen.type("\x1b[200~one\rtwo\r\nthree\nfour\rfive\x1b[201~")
        time.sleep(0.3)
        screen.send("")
        self.assertEqual(len(self.messages(screen)), 1)
        self.assertEqual(self.messages(screen)[0].replace("\n\n", "\n"), "one\ntwo\nthree\nfour\nfive")
        self.assertEqual(screen.leave(), 0)

    def test_a_line_can_be_edited_with_the_arrows(self):
        screen = self.screen()
        screen.send("Whot is 17 + 25" + HOME + RIGHT * 2 + RIGHT + BACKSPACE + "a" + END + "!" + LEFT + RIGHT + BACKSPACE + "?")
        self.assertEqual(self.messages(screen), ["What is 17 + 25?"])
        screen.leave()

    def test_history_is_kept_from_session_to_session(self):
        first = self.screen()
        first.send("What is 17 + 25?")
        first.leave()
        self.assertEqual((self.folder / "state/thermocline/history").stat().st_mode & 0o777, 0o600)
        second = self.screen()
        second.type(UP * 2)  # the last one is /exit
        second.send("")
        self.assertEqual(self.messages(second), ["What is 17 + 25?"])
        second.leave()

    def test_history_can_be_off(self):
        screen = self.screen("--no-history")
        screen.send("What is 17 + 25?")
        screen.leave()
        self.assertFalse((self.folder / "state").exists())

    # The place of the cursor in the larger window was written to in the smaller one.
    def test_a_window_may_become_small_while_a_line_is_typed(self):
        for term in ("xterm", "dumb"):
            screen = self.screen(term=term)
            for rows, columns in ((1, 80), (24, 5), (5, 20), (1, 1), (2, 3), (24, 80)):
                screen.type(("x" * 300 + LEFT) if rows < 24 else "\u65e5" * 40)
                screen.resize(rows, columns)
                time.sleep(0.3)  # the program looks ten times a second
                screen.type("y")
            screen.type(CTRL_C)
            screen.wait_for(r"to leave.*> ")
            screen.type("What is 17 + 25?")
            screen.wait_for(r"25\?")
            screen.resize(24, 60)
            screen.wait_for(r"> What is 17 \+ 25\?")  # it is shown again
            screen.type("5" + BACKSPACE)
            screen.send("")
            self.assertEqual(self.messages(screen), ["What is 17 + 25?"])
            self.assertEqual(screen.leave(), 0)

    def test_long_lines_are_not_cut(self):
        text = "What is 17 + 25? " * 340  # 5780 characters; a terminal that waits for whole lines ends at 4095
        screen = self.screen("-c", "4096")
        screen.send(text.strip())
        self.assertEqual(self.messages(screen), [text.strip()])
        screen.leave()

    def test_a_narrow_window_and_wide_characters_do_no_harm(self):
        text = "Wie heißt die Hauptstadt von Frankreich, und was ist 日本語 auf Deutsch?"
        screen = self.screen(width=40)
        screen.send(text)
        self.assertEqual(self.messages(screen), [text])
        screen.leave()

    def test_blocks_and_backslashes_make_one_message(self):
        screen = self.screen()
        screen.type('"""one\r')
        screen.type("two\r")
        screen.send('three"""')
        screen.type("four\\\r")
        screen.send("five")
        self.assertEqual(self.messages(screen), ["one\ntwo\nthree", "four\nfive"])
        screen.leave()

    def test_tab_completes_commands_and_files(self):
        (self.folder / "notes.txt").write_text("the sea")
        screen = self.screen()
        screen.command("/sta\t", "messages")
        screen.command(f"/fi\t{self.folder}/no\t", "notes.txt is attached")
        screen.type("/s\t")
        screen.wait_for("/system.*/set.*/stats.*/save")
        screen.type(BACKSPACE * 2)
        screen.leave()

    def test_interrupts(self):
        screen = self.screen("--ignore-eos", "-n", "120000", "-c", "131072")
        screen.type("half a line" + CTRL_C)
        screen.wait_for(r"Ctrl-C again.*?> ")
        screen.type("What is 17 + 25?\r")
        screen.wait_for("42")  # it goes on until the context is full, which no machine reaches within a minute
        screen.type(CTRL_C)
        screen.wait_for(r"\(stopped\).*?> ")
        screen.command("/stats", "2 messages")
        screen.type(CTRL_C)
        screen.wait_for("Ctrl-C again.*?> ")
        self.assertEqual(screen.leave(CTRL_C), INTERRUPTED)

    def test_a_byte_that_is_no_utf8_takes_no_key_along(self):
        screen = self.screen()
        screen.type(b"caf\xe9\r")
        screen.wait_for(r"tok/s.*?> ")
        self.assertEqual(self.messages(screen), ["caf\ufffd"])
        self.assertEqual(screen.leave(b"\xe9\x08\x08/exit\r"), 0)

    def test_pastes_are_asked_for_where_the_terminal_knows_them(self):
        for term, asks in (("xterm", True), ("dumb", False), ("", False)):
            screen = self.screen(term=term)
            self.assertEqual(screen.leave(), 0)
            self.assertEqual("\x1b[?2004" in screen.all, asks, term)

    def test_only_the_prompt_is_bold(self):
        screen = self.screen(color=True)
        screen.type("/help\r")
        screen.wait_for("/exit ")
        self.assertEqual(screen.leave(), 0)
        self.assertIn("\x1b[1m", screen.all)
        for after in screen.all.split("\x1b[1m")[1:]:  # all that followed was bold, after the end of the program, too
            self.assertRegex(after, r"^>\x1b\[0m ")

    def test_ctrl_d_leaves(self):
        self.assertEqual(self.screen().leave(CTRL_D), 0)

    def test_save_asks_before_it_overwrites(self):
        path = self.folder / "talk.txt"
        path.write_text("precious")
        screen = self.screen()
        screen.type(f"/save {path}\r")
        screen.wait_for(r"overwrite it\? \[y/N\] ")
        screen.command("n", "not saved")
        self.assertEqual(path.read_text(), "precious")
        screen.type(f"/save {path}\r")
        screen.wait_for(r"overwrite it\? \[y/N\] ")
        screen.command("y", "saved 0 messages")
        screen.leave()

    def test_edit_offers_the_last_message(self):
        screen = self.screen()
        screen.send("What is 17 + 2?")
        screen.type("/edit\r")
        screen.wait_for(re.escape("> What is 17 + 2?"))
        screen.send(BACKSPACE + "5?")
        self.assertEqual(self.messages(screen), ["What is 17 + 25?"])
        screen.leave()


class Commands(ProgramTest):
    """The commands of a conversation, over a pipe."""

    def setUp(self):
        self.folder = temporary_folder(self)

    def talk(self, *lines, arguments=(), code=0):
        path = self.folder / f"talk{time.monotonic_ns()}.json"
        result = run(*QUICK, *arguments, stdin="\n".join([*lines, f"/save {path}", ""]))
        self.assertEqual(result.returncode, code, result.stderr)
        return [(m["role"], m["content"]) for m in json.loads(path.read_text())], result

    def test_undo_regen_and_edit(self):
        plain, _ = self.talk("What is 17 + 25?")
        self.assertEqual(len(plain), 2)
        self.assertEqual(self.talk("What is 17 + 25?", "hello", "/undo")[0], plain)
        again, result = self.talk("What is 17 + 25?", "/regen")
        self.assertEqual(again, plain)
        self.assertEqual(result.stdout, (plain[1][1] + "\n") * 2)
        self.assertEqual(self.talk("What is 3 + 4?", "/edit What is 17 + 25?")[0], plain)
        for command in ("/undo", "/regen", "/edit x"):
            self.assertIn("there is no", self.talk(command)[1].stderr)

    def test_load_goes_on_with_a_saved_conversation(self):
        messages, _ = self.talk("/system You are Plankton.", "What is 17 + 25?")
        path = self.folder / "saved.json"
        path.write_text(json.dumps([{"role": role, "content": content} for role, content in messages]))
        self.assertEqual(self.talk(f"/load {path}")[0], messages)
        self.assertEqual(run(*QUICK, stdin="/load /nowhere.json\n").returncode, 2)

    def test_file_attaches_a_text(self):
        (self.folder / "notes.txt").write_text("17 + 25?")
        messages, result = self.talk(f"/file {self.folder}/notes.txt", "What is")
        self.assertEqual(messages[0], ("user", "What is\n\n17 + 25?"))
        self.assertIn("attached", result.stderr)

    def test_set_changes_an_option(self):
        _, result = self.talk("/set temp 0.2", "/set predict 3", "What is 17 + 25?", "/set temp hot", "/set nothing 1", "/set temp")
        for text in ("(temp is 0.2)", "cut after 3 tokens", "'hot' cannot be used", "unknown option --nothing", "a name and a value"):
            self.assertIn(text, result.stderr)

    def test_a_first_message_can_be_given(self):
        messages, _ = self.talk(arguments=("-p", "What is 17 + 25?"))
        self.assertEqual(messages[0], ("user", "What is 17 + 25?"))

    def test_context_shift_forgets_the_oldest(self):
        lines = [f"What is {i} + 25?" for i in range(30)]
        result = run(*QUICK, "-c", "256", stdin="\n".join(lines) + "\n")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--context-shift", result.stderr)
        messages, result = self.talk(*lines, arguments=("-c", "256", "--context-shift"))
        self.assertIn("forgotten", result.stderr)
        self.assertEqual(messages[-2], ("user", lines[-1]))
        self.assertIn("conversation", self.refusal(2, "run", "-p", "x", "--context-shift"))
        # Answers have room, as long as one message does not fill the context.
        questions = [f"Write a program that sorts {what} with merge sort." for what in ("numbers", "words", "dates", "files")]
        _, result = self.talk(*questions, arguments=("-c", "256", "--context-shift", "-n", "100"))
        self.assertIn("forgotten", result.stderr)
        self.assertNotIn("the context is full", result.stderr)
        # A message that cannot be answered costs no earlier one, and a full context is not answered with the option that is on.
        messages, result = self.talk("What is 17 + 25?", "word " * 300, arguments=("-c", "64", "--context-shift"), code=2)
        self.assertIn("the context holds 64: shorten it", result.stderr)
        self.assertEqual(messages[0], ("user", "What is 17 + 25?"))
        _, result = self.talk("What is 17 + 25?", arguments=("-c", "28", "--context-shift", "-n", "500", "--ignore-eos"))
        self.assertIn("a larger -c", result.stderr)
        self.assertNotIn("--context-shift", result.stderr)

    def test_save_does_not_overwrite_over_a_pipe(self):
        path = self.folder / "talk.txt"
        path.write_text("precious")
        self.assertEqual(run(*QUICK, stdin=f"/save {path}\n").returncode, 2)
        self.assertEqual(path.read_text(), "precious")


if __name__ == "__main__":
    unittest.main()
