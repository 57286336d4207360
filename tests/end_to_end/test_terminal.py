"""The rough edges of the command line: prompts from several places, words that mislead, interruptions, data for other programs."""
import fcntl
import json
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import time
import unittest

from harness import (DATA, DEVICE_FAULT, ENDLESS, Gguf, INTERRUPTED, MEMORY, MODEL, MODEL_ERROR, PROGRAM, ProgramTest, ROOT, SANITIZED,
                     USAGE, clean_environment, interrupt_until, run, temporary_folder)

GREEDY = ("--temp", "0")
ASK = ("-p", "hello", "-n", "4", *GREEDY)
QUICK = ("-p", "16", "-n", "4", "-r", "1", "--no-warmup", "--no-bandwidth")
TERMINATED, HUNG_UP, BELOW_TARGET = 143, 129, 9
NO_SPACE_TO_LIMIT = "a sanitizer reserves terabytes of address space"


def start(*arguments, **options):
    return subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=clean_environment(), **options)


def with_address_space(megabytes, *arguments):
    limit = megabytes << 20
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, env=clean_environment(), timeout=60,
                          stdin=subprocess.DEVNULL, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))


class QuestionAndDocument(ProgramTest):
    def setUp(self):
        self.whole = self.answer("run", "-p", "What is\n\n17 + 25?", *GREEDY)

    def test_stdin_comes_after_the_prompt(self):
        self.assertEqual(self.answer("run", "-p", "What is", *GREEDY, stdin="17 + 25?\n"), self.whole)

    def test_a_file_comes_after_the_prompt(self):
        path = temporary_folder(self) / "question.txt"
        path.write_text("17 + 25?\n")
        self.assertEqual(self.answer("run", "-p", "What is", "-f", path, *GREEDY), self.whole)
        self.assertEqual(self.answer("run", "-p", "What is", "-f", "-", *GREEDY, stdin="17 + 25?"), self.whole)

    def test_a_redirected_file_is_a_document_too(self):
        path = temporary_folder(self) / "question.txt"
        path.write_text("17 + 25?\n")
        with open(path) as file:
            done = subprocess.run([PROGRAM, "run", "-p", "What is", *GREEDY], stdin=file, capture_output=True, text=True,
                                  env=clean_environment(), timeout=120)
        self.assertEqual(done.stdout, self.whole)

    def test_a_redirected_model_is_no_document(self):
        with open(MODEL) as file:
            done = subprocess.run([PROGRAM, "run", "/dev/stdin", *ASK], stdin=file, capture_output=True, text=True,
                                  env=clean_environment(), timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_idle_pipe_says_what_is_waited_for(self):
        program = start("run", *ASK)
        self.assertIn(b"waiting for text on stdin", program.stderr.readline())
        program.communicate(timeout=60)
        self.assertEqual(program.returncode, 0)


class Words(ProgramTest):
    def test_an_empty_model_is_no_model(self):
        for command in (("run", "-m", "", *ASK), ("run", "", *ASK), ("bench", "-m", ""), ("plan", "-m", ""), ("chat", "")):
            self.assertIn("file or a folder was expected", self.refusal(USAGE, *command))

    def test_bench_measures_every_model(self):
        rows = json.loads(self.answer("bench", "-m", MODEL, "-m", DATA / "qwen35-f32.gguf", *QUICK, "-o", "json"))
        self.assertEqual([r["model_filename"] for r in rows],
                         [str(MODEL)] * 2 + [str(DATA / "qwen35-f32.gguf")] * 2)

    def test_llama_switches_for_what_is_always_so_are_accepted(self):
        plain = self.answer("run", *ASK)
        for switch in ("--offline", "--no-context-shift", "-st", "--no-warmup", "--perf", "--no-perf", "--verbose-prompt", "--no-display-prompt", "--simple-io",
                       "-fa", "--mlock"):
            with self.subTest(switch=switch):
                self.assertEqual(self.answer("run", switch, *ASK), plain)
        self.assertEqual(self.answer("run", "-fa", "on", *ASK), plain)
        for switch in ("--context-shift", "--display-prompt"):
            self.refusal(USAGE, "run", switch, *ASK)
        self.refusal(USAGE, "run", "-fa", "off", *ASK)

    def test_flash_attention_alone_is_on(self):
        self.answer("bench", "-fa", *QUICK)
        self.answer("bench", *QUICK, "-fa", "1")
        self.assertIn("leave -fa out", self.refusal(USAGE, "bench", "-fa", "0", *QUICK))

    def test_options_of_other_commands_are_told(self):
        options = {word for word in re.findall(r"(--[a-z][a-z-]+)", self.answer("serve", "--help-all"))}
        mine = {word for word in re.findall(r"(--[a-z][a-z-]+)", self.answer("run", "--help-all"))}
        for name in sorted(options - mine):
            with self.subTest(option=name):
                self.assertRegex(self.refusal(USAGE, "run", *ASK, name, "1"), "serve`|pages")
        # What llama-server has and this server has not is not said to be its option.
        for name in ("--ssl-key-file", "--ssl-cert-file", "--ui", "--webui", "--path", "--slot-save-path", "--slot-prompt-similarity"):
            for command in (("run", *ASK), ("chat",), ("serve",)):
                with self.subTest(option=name, command=command):
                    self.assertRegex(self.refusal(USAGE, *command, name, "x"), "server|slot|pages|unexpected argument")
        self.assertIn("`bench`", self.refusal(USAGE, "experts", "-o", "json"))
        self.assertNotIn("did you mean", self.refusal(USAGE, "run", *ASK, "-X"))

    def test_a_server_without_pages_is_what_no_ui_asks_for(self):
        for switch in ("--no-ui", "--no-webui"):
            self.answer("serve", switch, "--print-config")

    def test_a_context_beyond_the_training_length_is_noted(self):
        self.assertIn("trained for", run("run", *ASK, "-c", "8192").stderr)
        self.assertIn("trained for", run("plan", "-c", "8192").stderr)
        self.assertIn("trained for", run("bench", *QUICK, "-d", "5000").stderr)
        self.assertNotIn("trained for", run("run", *ASK, "-c", "2048").stderr)

    def test_too_many_threads_are_noted(self):
        self.assertIn("wait for each other", run("run", *ASK, "-t", "100").stderr)
        self.assertIn("wait for each other", run("bench", *QUICK, "-t", "100").stderr)
        self.assertNotIn("wait for each other", run("run", *ASK, "-t", "1").stderr)

    def test_an_answer_that_was_cut_is_noted(self):
        self.assertIn("cut after 4 tokens: raise -n", run("run", "-p", "hello", "--reasoning", "off", "-n", "4", *GREEDY).stderr)
        self.assertNotIn("cut after", run("run", "-p", "What is 17 + 25?", *GREEDY).stderr)
        self.assertIn("inside the reasoning: raise -n", run("run", "-p", "2+2", "-n", "2", *GREEDY).stderr)
        full = run("run", "-p", "2+2", "-c", "18", *GREEDY).stderr
        self.assertRegex(full, "the context of 18 tokens is full: the reasoning ends here; raise -c")
        self.assertNotIn("raise -n", full)

    def test_says_that_its_output_is_closed(self):
        done = subprocess.run([PROGRAM, "version"], stderr=subprocess.PIPE, text=True, env=clean_environment(),
                              preexec_fn=lambda: os.close(1))
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("stdout is closed", done.stderr)

    def test_prints_into_no_file_that_was_opened_for_something_else(self):
        log = temporary_folder(self) / "log.txt"  # its number was that of the closed descriptor
        command = [PROGRAM, "run", "-p", "What is 17 + 25?", "--reasoning", "off", *GREEDY, "-v", "--log-file", log]
        answer = self.answer(*command[1:-2])
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=clean_environment(),
                              preexec_fn=lambda: os.close(1))
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("stdout is closed", done.stderr)
        self.assertIn("loaded", log.read_text())
        self.assertNotIn(answer, log.read_text())
        noted = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=clean_environment(),
                               preexec_fn=lambda: os.close(2))
        self.assertEqual((noted.returncode, noted.stdout), (0, answer))
        self.assertNotIn("tok/s", log.read_text())

    def test_waits_for_a_reader_where_writing_does_not_block(self):
        ours, theirs = os.pipe()
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(theirs, False)
        program = subprocess.Popen([PROGRAM, "manual"], stdout=theirs, env=clean_environment())
        while program.poll() is None and select.select([], [theirs], [], 0)[1]:
            time.sleep(0.01)  # until there is no room
        os.close(theirs)
        with open(ours) as pipe:
            self.assertEqual(pipe.read(), self.answer("manual"))
        self.assertEqual(program.wait(), 0)

    @unittest.skipIf(SANITIZED, NO_SPACE_TO_LIMIT)
    def test_a_full_disk_leaves_no_conversation_and_one_line_about_the_log(self):
        folder = temporary_folder(self)
        done = subprocess.run([PROGRAM, "chat", "-v", "--log-file", folder / "log.txt"], input=f"/save {folder / 'talk.json'}\n",
                              capture_output=True, text=True, env=clean_environment(), timeout=60, restore_signals=False,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)))
        self.assertIn("talk.json cannot be written (File too large)", done.stderr)
        self.assertFalse((folder / "talk.json").exists())
        self.assertEqual(done.stderr.count("the log cannot be written"), 1, done.stderr)

    def test_a_folder_is_no_configuration_file(self):
        self.assertIn("this is a folder", self.refusal(USAGE, "run", *ASK, "--config", temporary_folder(self)))

    def test_a_configuration_has_a_name_and_no_other_one_in_it(self):
        self.assertIn("a file was expected", self.refusal(USAGE, "run", *ASK, "--config", ""))
        path = temporary_folder(self) / "config.toml"
        path.write_text('config = "other.toml"\n')
        self.assertIn("cannot name another", self.refusal(USAGE, "run", *ASK, "--config", path))

    def test_variables_that_say_nothing_are_named(self):
        self.assertIn("did you mean THERMO_TEMP?", run("run", *ASK, env={"THERMO_TEMPP": "0"}).stderr)
        self.assertIn("command line only", run("run", *ASK, env={"THERMO_TRACE": "x"}).stderr)
        self.assertNotIn("no effect", run("run", *ASK, env={"THERMO_MAX_ISA": "portable"}).stderr)

    def test_nothing_that_is_set_is_lost_silently(self):
        path = temporary_folder(self) / "config.toml"
        for text, names in (("[run]\ntemp = 0\n[engine]\ntemp = 1\n", "--temp"), ("repack = true\n[x]\nno-repack = true\n", "--repack")):
            path.write_text(text)
            self.assertRegex(self.refusal(USAGE, "run", *ASK, "--config", path), rf"config.toml:\d: .*{names}, which line \d sets too")
        for twice in (("-p", "a", "-p", "b"), ("-f", "x", "--file", "y")):
            self.assertIn("is given twice", self.refusal(USAGE, "run", *twice))
        self.assertIn("is given twice", self.refusal(USAGE, "tokenize", "--text", "a", "-p", "b"))

    def test_keys_are_not_shown(self):
        for command, arguments, env in (("serve", ("--api-key", "topsecret"), {}), ("serve", (), {"LLAMA_API_KEY": "topsecret"}),
                                        ("chat", ("--url", "http://x", "--api-key", "topsecret"), {})):
            shown = self.answer(command, *arguments, "--print-config", env=env)
            self.assertNotIn("topsecret", shown)
            self.assertIn("api-key is set, and not shown", shown)
        self.assertNotIn("admin:", self.refusal(USAGE, "serve", "--api-key", "admin:"))

    def test_keys_of_the_configuration_work_or_are_named(self):
        path = temporary_folder(self) / "config.toml"
        path.write_text('system-prompt = "You are Plankton."\nstop = ["STOP"]\n')
        self.assertIn('system-prompt = "You are Plankton."', self.answer("run", "--config", path, "--print-config"))
        path.write_text('trace = "x.json"\n')
        self.assertIn("command line only", self.refusal(USAGE, "run", *ASK, "--config", path))


class Interruptions(ProgramTest):
    def end(self, program, number=signal.SIGINT):
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
        return program.returncode, out, err.decode()

    def test_bench_exits_130_and_closes_its_json(self):
        program = start("bench", "-m", MODEL, "-p", "16", "-n", "2000", "-r", "1000", "--no-warmup", "--no-bandwidth", "-o", "json")
        self.assertEqual(os.read(program.stdout.fileno(), 1), b"[")
        time.sleep(1.0)
        code, out, _ = self.end(program)
        self.assertEqual(code, INTERRUPTED)
        json.loads(b"[" + out)

    def test_bench_does_not_wait_for_what_takes_long(self):
        program = start("bench", "-m", MODEL, "-p", "16", "-n", "0", "-r", "1", "--delay", "600", "--no-bandwidth", "-o", "json")
        self.assertEqual(os.read(program.stdout.fileno(), 1), b"[")
        code, out, err = self.end(program)
        self.assertEqual(code, INTERRUPTED, err)
        self.assertEqual(json.loads(b"[" + out), [])
        self.assertIn("interrupted: the test that was running is left out", err)

    def long_text(self):
        path = temporary_folder(self) / "long.txt"
        path.write_text("the sea is deep and cold " * 60000)
        return path

    def test_experts_exits_130_with_what_it_has(self):
        trace = temporary_folder(self) / "trace.json"
        program = start("experts", "-f", self.long_text(), "-b", "16", "--json", "--trace", trace)
        while program.poll() is None and not (trace.exists() and '"ph":"X"' in trace.read_text()):
            time.sleep(0.05)
        code, out, err = self.end(program)
        self.assertEqual(code, INTERRUPTED, err)
        json.loads(out)

    def test_chat_keeps_the_heat_file_however_it_ends(self):
        folder = temporary_folder(self)
        for name, number, code in (("term", signal.SIGTERM, TERMINATED), ("hup", signal.SIGHUP, HUNG_UP), ("int", signal.SIGINT, INTERRUPTED)):
            with self.subTest(name=name):
                path = folder / f"{name}.json"
                chat = start("chat", *ENDLESS, "--heat-file", path)
                chat.stdin.write(b"What is 17 + 25?\n")
                chat.stdin.flush()
                os.read(chat.stdout.fileno(), 1)  # the answer has begun
                if number == signal.SIGINT:  # one ends the answer, two more the conversation
                    interrupt_until(chat, b"(stopped)")
                    interrupt_until(chat, b"Ctrl-C again")
                chat.send_signal(number)
                chat.communicate(timeout=60)
                self.assertEqual(chat.returncode, code)
                self.assertTrue(path.exists())

    def test_a_perplexity_that_was_cut_short_says_so(self):
        program = start("perplexity", "-f", self.long_text())
        begin = b""
        while b"," not in begin:  # of the first chunk
            begin += os.read(program.stdout.fileno(), 1)
        code, out, err = self.end(program)
        self.assertEqual(code, INTERRUPTED, err)
        self.assertRegex(err, r"the estimate is of [0-9]+ of [0-9]+ chunks")
        self.assertRegex((begin + out).decode(), r",\nFinal estimate")

    def test_synth_leaves_no_partial_file(self):
        folder = temporary_folder(self)
        program = start("synth", folder / "big.gguf", "--shape", "qwen35moe-35b-a3b", "--layers", "6", "-t", "1")
        deadline = time.monotonic() + 30
        while not any(folder.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        code, _, err = self.end(program)
        self.assertEqual(code, INTERRUPTED, err)
        self.assertEqual(list(folder.iterdir()), [])

    def test_a_pipe_that_was_not_answered_is_a_failure(self):
        self.assertEqual(run("chat", "-c", "32", stdin="What is 17 + 25? " * 20 + "\n").returncode, USAGE)

    def test_a_fifo_is_no_model(self):
        path = temporary_folder(self) / "model.gguf"
        os.mkfifo(path)
        self.assertIn("not a regular file", self.refusal(MODEL_ERROR, "plan", path, timeout=20))

    @unittest.skipIf(SANITIZED, NO_SPACE_TO_LIMIT)
    def test_a_used_up_address_space_is_a_matter_of_memory(self):
        done = with_address_space(60, "run", MODEL, *ASK)
        self.assertEqual(done.returncode, MEMORY, done.stderr)

    @unittest.skipIf(SANITIZED, NO_SPACE_TO_LIMIT)
    def test_no_command_fails_otherwise_for_want_of_address_space(self):
        commands = (("run", *ASK), ("bench", *QUICK), ("serve", "--port", "0"), ("doctor",), ("chat",), ("experts",), ("verify",))
        for command in commands:
            for limit in (60, 80, 100):
                with self.subTest(command=command[0], limit=limit):
                    done = with_address_space(limit, *command)
                    self.assertIn(done.returncode, (0, MEMORY), done.stderr)

    @unittest.skipIf(SANITIZED, NO_SPACE_TO_LIMIT)
    def test_drafting_that_nobody_asked_for_by_name_is_left_out_for_want_of_address_space(self):
        ask = ("run", *ASK, "--device", "cpu", "-t", "2", "-c", "2048", "--draft")
        fits = next(limit for limit in range(60, 1000, 8) if with_address_space(limit, *ask, "none").returncode == 0)
        left_out = 0
        for limit in range(fits + 8, fits + 64, 4):
            with self.subTest(limit=limit):
                done = with_address_space(limit, *ask, "auto")
                self.assertEqual(done.returncode, 0, done.stderr)
                left_out += "nothing is drafted" in done.stderr
        self.assertGreater(left_out, 0)

    @unittest.skipIf(SANITIZED, NO_SPACE_TO_LIMIT)
    def test_measuring_the_bandwidth_is_not_worth_an_error(self):
        for command in (("doctor",), ("bench", "-m", MODEL, "-p", "16", "-n", "4", "-r", "1")):
            done = with_address_space(400, *command)  # for the model, not for a test of the memory
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_file_cut_during_bench_is_a_fault(self):
        path = temporary_folder(self) / "model.gguf"
        shutil.copy(MODEL, path)
        program = start("bench", "-m", path, "--no-repack", "-p", "0", "-n", "2000", "-r", "1000", "--no-warmup", "--no-bandwidth",
                        "-o", "json")
        os.read(program.stdout.fileno(), 1)
        time.sleep(1.0)
        os.truncate(path, 4096)
        _, err = program.communicate(timeout=120)
        self.assertEqual(program.returncode, DEVICE_FAULT, err)


class Progress(ProgramTest):
    """Long work is visible, in a window of any width."""

    def test_a_long_prompt_shows_how_far_it_is(self):
        document = temporary_folder(self) / "long.txt"
        document.write_text("the sea is deep and cold " * 20000)  # shown after two seconds, which no machine needs less than for it
        slow = ("run", "-f", document, "-n", "1", "-t", "1", "--isa", "portable", "-b", "16", "-c", "256K")
        for width in (80, 40):
            with self.subTest(width=width):
                shown = self.on_terminal(*slow, width=width, until=rb"\rprompt [^\r]*\rprompt [^\r]*\r")
                drawn = re.findall(r"\r(prompt [^\r\x1b]*)", shown[:shown.rindex("\r")])
                self.assertTrue(drawn)
                self.assertRegex(drawn[0], r"[0-9]+ %  [0-9]+ / [0-9]+ tokens")
                self.assertTrue(all(len(line) < width for line in drawn), drawn)

    def test_loading_shows_how_far_it_is(self):
        model = temporary_folder(self) / "model.gguf"
        self.answer("synth", model, "--shape", "qwen35moe-35b-a3b", "--layers", "1", "--vocab", "512")
        for width in (80, 40):
            drawn = re.findall(r"\r(repack [^\r\x1b]*)", self.on_terminal("bench", "-m", model, *QUICK, "-t", "1", width=width))
            self.assertTrue(drawn)
            self.assertTrue(all(len(line) < width for line in drawn), drawn)


class Data(ProgramTest):
    def test_a_plan_that_does_not_fit_says_so_in_json(self):
        total = int(pathlib.Path("/proc/meminfo").read_text().split()[1]) * 1024
        if total > 30 << 30:
            self.skipTest("16M tokens of context fit into this machine")
        result = run("plan", "-c", "16M", "-ctk", "f32", "-ctv", "f32", "--json")
        self.assertEqual(result.returncode, MEMORY)
        self.assertIs(json.loads(result.stdout)["fits"], False)
        context = re.search("the largest context that fits is ([0-9]+)", result.stderr)[1]
        self.answer("plan", "-c", int(context) // 2, "-ctk", "f32", "-ctv", "f32")

    def test_the_peak_memory_is_the_models(self):
        quick = ("bench", "-m", MODEL, "-p", "16", "-n", "4", "-r", "1", "--no-warmup", "-o", "json")
        with_test, without = (json.loads(self.answer(*quick, *extra))[0]["rss_peak_bytes"] for extra in ((), ("--no-bandwidth",)))
        self.assertLess(with_test, without * 1.2)

    def test_sql_columns_have_one_type(self):
        text = self.answer("bench", "-m", MODEL, *QUICK, "-o", "sql")
        database = sqlite3.connect(":memory:")
        database.executescript(text)
        names = [(row[1], row[2]) for row in database.execute("PRAGMA table_info(test)")]
        allowed = {"TEXT": {"text"}, "INTEGER": {"integer"}, "REAL": {"real", "integer"}}
        for name, kind in names:
            types = {t for t, in database.execute(f"SELECT DISTINCT typeof({name}) FROM test")} - {"null"}
            self.assertLessEqual(types, allowed[kind], name)

    def test_rows_without_a_counterpart_fail(self):
        folder = temporary_folder(self)
        (folder / "before.json").write_text(self.answer("bench", "-m", MODEL, *QUICK, "-o", "json"))
        # A share that no machine falls below, whatever else it does.
        compare = ("--compare", folder / "before.json", "--fail-below", "0.000001", "-o", "json")
        self.answer("bench", "-m", MODEL, *QUICK, *compare)
        result = run("bench", "-m", MODEL, "-p", "16,17", "-n", "4", "-r", "1", "--no-warmup", "--no-bandwidth", *compare)
        self.assertEqual(result.returncode, BELOW_TARGET, result.stderr)
        self.assertIn("1 of 3", result.stderr)

    def test_two_programs_that_share_a_heat_file_add_up(self):
        path = temporary_folder(self) / "heat.json"
        ask = ("run", "-p", "What is 17 + 25?", *GREEDY, "--heat-file", path)
        self.answer(*ask)
        once = json.loads(path.read_text())["n_tokens"]
        path.unlink()
        programs = [start(*ask) for _ in range(2)]
        for program in programs:
            program.communicate(timeout=60)
        self.assertEqual(json.loads(path.read_text())["n_tokens"], 2 * once)

    def test_a_heat_file_is_a_file(self):
        path = temporary_folder(self) / "heat.json"
        os.mkfifo(path)
        self.assertIn("it is a pipe", self.refusal(USAGE, "run", *ASK, "--heat-file", path, timeout=20))

    def test_a_model_without_attention_is_inspected(self):
        path = temporary_folder(self) / "model.gguf"
        self.answer("synth", path, "--shape", "qwen35-tiny", "--layers", "1")
        text = self.answer("inspect", path)
        self.assertIn("1: 0 attention, 1 DeltaNet", text)
        self.assertNotRegex(text, r"attention +0 heads|rotation +0")
        self.assertEqual(json.loads(self.answer("inspect", path, "--json"))["config"]["n_attention_layers"], 0)

    def test_a_check_that_passed_says_so(self):
        self.assertIn("check passed", run("bench", "-m", MODEL, *QUICK, "--check").stderr)

    def test_the_heat_map_says_how_many_experts_a_cell_is(self):
        folder = temporary_folder(self)
        model = folder / "many.gguf"
        self.answer("synth", model, "--shape", "qwen35moe-35b-a3b", "--layers", "1", "--vocab", "512")
        self.assertRegex(self.answer("experts", model, "--tokens", "16"), "a cell is the average of [0-9]+( to [0-9]+)? experts")

    def test_control_characters_of_files_and_names_do_not_reach_the_terminal(self):
        damaged = Gguf()
        damaged.put_string("general.architecture", b"\x1b[31m\x07evi")
        path = damaged.save(temporary_folder(self), "model\x1b[31m.gguf")
        for code, *command in ((0, "inspect", path), (MODEL_ERROR, "run", path, *ASK), (MODEL_ERROR, "plan", path),
                               (0, "inspect", path, "--template"), (USAGE, "te\x1b[31m")):
            with self.subTest(command=command[0]):
                shown = self.on_terminal(*command, code=code, NO_COLOR="1")
                self.assertIn("\ufffd" if "template" not in str(command) else "user", shown)
                self.assertNotRegex(shown, "[\x1b\x07]")

    def test_control_characters_do_not_reach_the_terminal(self):
        # A template writes them into the prompt; a model that continues its prompt would write them, too. What the program shows of
        # a model's text goes through one place, tried here with a bias that leaves it one token.
        escape, = json.loads(self.answer("tokenize", "-p", "\x1b", "--json"))["ids"]
        shown = self.on_terminal("run", "--raw", "-p", "a b", "-n", "3", "--logit-bias", f"{escape}+100", *GREEDY, NO_COLOR="1", TERM="dumb")
        self.assertNotIn("\x1b", shown)
        self.assertIn("\ufffd", shown)


class Perplexity(ProgramTest):
    def measure(self, *options):
        text = ROOT / "README.md"
        return json.loads(self.answer("perplexity", "-f", text, "-c", "128", "--chunks", "4", "--json", *options))

    def test_is_the_same_wherever_experts_are(self):
        plain = self.measure("--device", "cpu")
        self.assertEqual(plain["n_tokens"], 4 * 63)
        self.assertTrue(1 < plain["perplexity"] < 10_000, plain)
        for options in (("-t", "1"), ("-b", "16"), ("--device", "sim", "--expert-cache", "40%")):
            self.assertEqual(self.measure("--device", "cpu", *options)["perplexity"], plain["perplexity"], options)

    def test_a_cache_type_costs_less_than_can_be_measured(self):
        plain = self.measure("--device", "cpu")
        for kind in ("f32", "bf16", "q8_0"):
            other = self.measure("--device", "cpu", "-ctk", kind, "-ctv", kind)
            self.assertLess(abs(other["perplexity"] - plain["perplexity"]), plain["deviation"], kind)

    def test_four_bits_and_a_stretched_context_cost_something(self):
        plain = self.measure("--device", "cpu")["perplexity"]
        for options in (("-ctk", "q4_0", "-ctv", "q4_0"), ("--rope-scale", "4"), ("--rope-scaling", "yarn", "--rope-scale", "4")):
            other = self.measure("--device", "cpu", *options)["perplexity"]
            self.assertNotEqual(other, plain, options)
            self.assertLess(other, 10 * plain, options)
        self.assertEqual(self.measure("--device", "cpu", "--rope-scaling", "none")["perplexity"], plain)

    def test_chunks_of_the_training_length(self):
        whole = self.answer("perplexity", "-f", ROOT / "docs/server-api.md", "-c", "0", "--chunks", "1")
        self.assertTrue(whole.startswith("perplexity: 1 chunks of 4096 tokens\n"), whole)

    def test_prints_what_llama_prints(self):
        text = self.answer("perplexity", "-f", ROOT / "README.md", "-c", "64", "--chunks", "2")
        self.assertRegex(text, r"\[1\][0-9.]+,\[2\][0-9.]+,\nFinal estimate: PPL = [0-9.]+ \+/- [0-9.]+\n$")

    def test_refuses_a_text_that_is_too_short(self):
        self.assertIn("longer text", self.refusal(USAGE, "perplexity", stdin="short"))


if __name__ == "__main__":
    unittest.main()
