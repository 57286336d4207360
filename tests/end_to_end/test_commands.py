"""The smaller commands, the help, and where options come from."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

from harness import DATA, DEVICE, MODEL, MODEL_ERROR, ProgramTest, USAGE, run, temporary_folder

COMMANDS = ("run", "chat", "tokenize", "inspect", "plan", "verify", "perplexity", "bench", "experts", "synth", "doctor",
            "connect", "completion", "manual", "version")


class Tokenize(ProgramTest):
    def test_matches_the_reference(self):
        for case in json.loads((DATA / "plankton-tokens.json").read_text()):
            with self.subTest(text=case["text"]):
                out = json.loads(self.answer("tokenize", "-f", "-", "--json", stdin=case["text"]))
                self.assertEqual(out["ids"], case["ids"])

    def test_goes_back_to_the_text(self):
        for text in ("Hello, world!", "def f(x):\n    return x\n", "<|im_start|>user\nhi<|im_end|>", "日本語 🙂"):
            ids = self.answer("tokenize", "--text", text).strip()
            self.assertEqual(self.answer("tokenize", "--ids", ids), text + "\n")

    def test_reads_specials_as_text_when_asked(self):
        special = json.loads(self.answer("tokenize", "--text", "<|im_start|>", "--json"))
        plain = json.loads(self.answer("tokenize", "--text", "<|im_start|>", "--json", "--no-special"))
        self.assertEqual(special["n_tokens"], 1)
        self.assertGreater(plain["n_tokens"], 1)

    def test_counts(self):
        self.assertEqual(self.answer("tokenize", "--text", "Hello, world!", "--count"), "8\n")

    def test_refuses_ids_that_are_none(self):
        self.assertIn("not a token id", self.refusal(USAGE, "tokenize", "--ids", "1,x"))
        self.assertIn("outside", self.refusal(USAGE, "tokenize", "--ids", "99999"))
        self.refusal(USAGE, "tokenize", "--ids", "1", "--text", "a")


class Machine(ProgramTest):
    def test_doctor_gives_a_verdict_on_every_line(self):
        out = json.loads(self.answer("doctor", "--json"))
        names = [finding["name"] for finding in out["findings"]]
        for name in ("processor", "kernels", "cores", "numa", "memory", "huge pages", "memlock", "bandwidth", "disk", "gpu"):
            self.assertIn(name, names)
        for finding in out["findings"]:
            self.assertIn(finding["verdict"], ("ok", "warn", "fail"))
            self.assertEqual("remedy" in finding, finding["verdict"] != "ok", finding)
        for line in self.answer("doctor").splitlines()[1:]:
            self.assertRegex(line, r"^(ok  |warn|fail|    )  ")

    def test_plan_adds_up(self):
        plan = json.loads(self.answer("plan", MODEL, "-c", "1024", "--json"))
        host = plan["tiers"][0]
        self.assertEqual(plan["context"], 1024)
        self.assertEqual(host["planned"], sum(item["bytes"] for item in host["items"]))
        small = json.loads(self.answer("plan", MODEL, "-c", "1024", "-ctk", "q8_0", "-ctv", "q8_0", "--json"))
        self.assertLess(small["tiers"][0]["planned"], host["planned"])
        self.assertIn("kv f16/f16: default", plan["decisions"])
        self.assertIn("kv q8_0/q8_0: asked", small["decisions"])

        def cache(kind):
            out = json.loads(self.answer("plan", MODEL, "-c", "1024", "-ctk", kind, "-ctv", kind, "--json"))
            return next(item["bytes"] for item in out["tiers"][0]["items"] if item["name"] == "kv cache")
        self.assertEqual(cache("bf16"), cache("f16"))
        self.assertEqual(cache("auto"), cache("f16"))
        self.assertEqual(cache("q4_0") * 64, cache("f16") * 18)
        self.assertIn("total", self.answer("plan"))
        whole, auto, four = (json.loads(self.answer("plan", *arguments, "--json"))
                             for arguments in (("-c", "0"), ("-c", "auto"), ("-c", "1024", "-np", "4")))
        self.assertEqual(whole["context"], whole["context_train"])
        self.assertIn(f"ctx {whole['context']}: asked", whole["decisions"])
        self.assertEqual(auto["context"], min(auto["context_train"], 32768))
        one = json.loads(self.answer("plan", "-c", "1024", "--json"))
        self.assertEqual((one["parallel"], four["parallel"]), (1, 4))
        self.assertGreater(four["tiers"][0]["planned"], one["tiers"][0]["planned"])

    def test_plan_and_inspect_say_how_fast_it_will_be(self):
        cache = temporary_folder(self)
        env = {"XDG_CACHE_HOME": str(cache)}
        first = json.loads(self.answer("plan", "--json", env=env))["expected_speed"]
        self.assertGreater(first["prefill_tokens_per_second"], 0)
        self.assertGreater(first["decode_tokens_per_second"], 0)
        # Measured until two results agree, by four calls at most; the same numbers from then on, until it is asked for again.
        rates = cache / "thermocline/rates.json"
        kept = json.loads(rates.read_text())
        for machine in kept["machines"].values():
            self.assertEqual(machine["calls"], 1)
            machine["calls"] = 4
        rates.write_text(json.dumps(kept))
        self.assertEqual(json.loads(self.answer("inspect", "--json", env=env))["plan"]["expected_speed"], first)
        self.assertRegex(self.answer("plan", env=env), r"expected speed: prefill [0-9.]+, decode [0-9.]+ tokens/s")
        self.assertEqual(json.loads(rates.read_text()), kept)
        better = json.loads(self.answer("plan", "--measure", "--json", env=env))["expected_speed"]
        self.assertGreaterEqual(better["decode_tokens_per_second"], 0.99 * first["decode_tokens_per_second"])
        # Another number of threads is another machine; a damaged file is begun anew; the stand-in has no speed.
        self.answer("plan", "-t", "1", env=env)
        self.assertIn("1 threads", (cache / "thermocline/rates.json").read_text())
        (cache / "thermocline/rates.json").write_text("garbage")
        self.answer("plan", env=env)
        self.assertIsNone(json.loads(self.answer("plan", "--device", "sim", "--json", env=env))["expected_speed"])
        self.assertIsNone(json.loads(self.answer("plan", "--no-repack", "--json", env=env))["expected_speed"])

    def test_the_memory_of_a_card_has_no_effect_where_there_is_none(self):
        if os.environ.get("CUDA_BUILD", "0") not in ("0", "OFF", ""):
            self.skipTest("a build with CUDA plans for such a card")
        result = run("plan", "--gpu-memory", "12G")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("no CUDA", result.stderr)
        self.assertIn("a size was expected", self.refusal(USAGE, "plan", "--gpu-memory", "much"))

    def test_a_limit_of_the_link_needs_a_rate(self):
        for text in ("12G", "fast", "0/s", "12G/min"):
            self.assertIn("a rate of at least 1M/s was expected", self.refusal(USAGE, "plan", "--link-limit", text))

    def test_a_cap_hides_better_instruction_sets(self):
        kernels = json.loads(self.answer("doctor", "--json", env={"THERMO_MAX_ISA": "portable"}))
        self.assertIn("portable", json.dumps(kernels))
        self.assertNotIn("used: avx", json.dumps(kernels))
        result = run("run", "-p", "Hi", "-n", "2", "--isa", "avx2", env={"THERMO_MAX_ISA": "portable"})
        self.assertEqual(result.returncode, DEVICE, result.stderr)
        result = run("run", "-p", "Hi", "-n", "2", env={"THERMO_MAX_ISA": "sse9"})
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("THERMO_MAX_ISA is 'sse9', expected portable, avx2, avxvnni, avx512 or amx", result.stderr)

    def test_version(self):
        line = self.answer("version")
        self.assertTrue(line.startswith("thermocline "))
        self.assertEqual(self.answer("--version"), line)
        self.assertIn("commit", json.loads(self.answer("version", "--json")))


class Results(ProgramTest):
    # What a script left empty was left out, and a check passed without checking.
    def test_an_empty_file_is_none(self):
        for arguments in (("verify", "--expected", ""), ("run", "-p", "x", "--grammar-file", ""), ("run", "-p", "x", "-f", ""),
                          ("chat", "-p", "x", "--url", ""), ("run", "-p", "x", "--trace", "")):
            self.assertIn("was expected; leave the option out", self.refusal(USAGE, *arguments), arguments)

    def test_names_of_other_encodings_are_shown(self):
        path = os.fsencode(temporary_folder(self)) + b"/x\xff.gguf"
        for arguments in (("synth", os.fsdecode(path), "--shape", "qwen35-tiny", "--json"),
                          ("verify", "-m", os.fsdecode(path), "--tokens", "5", "--json")):
            self.assertIn("\ufffd", json.dumps(json.loads(self.answer(*arguments)), ensure_ascii=False))
        self.assertIn("\ufffd", self.answer("connect", "codex", "-a", os.fsdecode(b"\xff")))

    # Such a path was an error of the program.
    def test_names_that_no_folder_can_have_are_refused(self):
        for arguments in (("version", "--state-dir", "x" * 300), ("version", "--log-file", "x" * 300 + "/log.txt"),
                          ("serve", "--log-prompts", "x" * 300), ("list", "--models-dir", "x" * 300)):
            self.assertIn("x" * 300, self.refusal(USAGE, *arguments))

    # A folder was an error of the program, and what never ends took all memory.
    def test_bench_reads_files_that_end(self):
        for option in ("--text", "--compare"):
            for path, why in ((DATA, "this is a folder"), ("/dev/zero", "has more than 64.00 MiB")):
                self.assertIn(why, self.refusal(USAGE, "bench", "-p", "4", "-n", "0", option, path))

    def test_plan_does_without_rates_that_cannot_be_read(self):
        folder = temporary_folder(self)
        (folder / "rates.json").mkdir()
        self.answer("plan", "--state-dir", folder)

    def test_an_error_is_one_line_whatever_a_name_holds(self):
        self.assertIn("a\\nb.gguf", self.refusal(MODEL_ERROR, "inspect", "a\nb.gguf"))

    def test_perplexity_has_chunks(self):
        self.assertIn("--chunks: 0 cannot be used", self.refusal(USAGE, "perplexity", "--chunks", "0", stdin="a text"))

    def test_connect_needs_a_url(self):
        for url in ("foo", "ftp://127.0.0.1"):
            self.assertIn(f"--url: '{url}' cannot be used", self.refusal(USAGE, "connect", "claude", "--url", url))
            self.assertIn(f"--url: '{url}' cannot be used", self.refusal(USAGE, "bench", "--url", url))
        self.assertIn("no client is named", self.refusal(USAGE, "connect"))

    def test_verify_names_a_bad_chunk(self):
        self.assertIn("--chunks: '5x' cannot be used", self.refusal(USAGE, "verify", "--chunks", "5x"))

    # What the caller had was counted as taken.
    def test_the_memory_plan_is_not_called_wrong(self):
        path = temporary_folder(self) / "x.gguf"
        self.answer("synth", path, "--shape", "qwen35moe-tiny", "--vocab", 131072)
        result = run("bench", "-m", path, "-p", "8", "-n", "2", "-r", "1", "--check")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("memory plan", result.stderr)

    def test_a_trace_of_drafts_can_be_summed_up(self):
        tool = pathlib.Path(__file__).parents[2] / "tools/trace_report.py"
        trace = temporary_folder(self) / "trace.json"
        self.answer("run", "-p", "Count from 1 to 5.", "-n", "24", "--temp", "0", "--draft", "lookup", "--trace", trace)
        done = subprocess.run([sys.executable, tool, trace, "--above", "1e9"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = subprocess.run([sys.executable, tool, trace.with_name("none")], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)


class Help(ProgramTest):
    def test_fits_80_columns(self):
        for command in COMMANDS:
            for option in ("-h", "--help-all"):
                for line in self.answer(command, option).splitlines():
                    self.assertLessEqual(len(line), 80, f"{command} {option}: {line}")

    def test_examples_can_be_pasted(self):
        for command in COMMANDS:
            _, found, examples = self.answer(command, "-h").partition("\nExamples\n")
            for line in examples.partition("\n\n")[0].replace(" \\\n", "").splitlines():
                self.assertRegex(line, r"^  \S.*thermocline |^  thermocline ", f"{command}: {line}")

    def test_lists_every_command(self):
        text = self.answer("help")
        self.assertEqual(self.answer("--help"), text)
        for command in COMMANDS:
            self.assertIn(f"\n  {command} ", text)
            self.assertEqual(self.answer("help", command), self.answer(command, "--help"))

    def test_shows_more_with_help_all(self):
        self.assertNotIn("--cache-type-k", self.answer("run", "-h"))
        self.assertIn("-ctk, --cache-type-k TYPE", self.answer("run", "--help-all"))


    def test_inspect_shows_a_stretched_rotation(self):
        laguna = os.path.join(DATA, "laguna-f32.gguf")  # its window stays as it is
        text = self.answer("inspect", laguna, "--rope-scaling", "yarn", "--rope-scale", "2")
        self.assertIn("16 dims, base 500000, YaRN x2 from 2048; 32 dims, base 10000\n", text)
        self.assertRegex(text, r"training context +4096\n")
        self.assertNotIn("YaRN", self.answer("inspect", laguna, "--rope-scaling", "none"))
        self.assertIn("linear x4", self.answer("inspect", MODEL, "--rope-scale", "4"))
        text = self.answer("inspect", MODEL, "--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "1K")
        self.assertIn("YaRN x4 from 1024", text)
        env = {"LLAMA_ARG_ROPE_SCALING_TYPE": "yarn", "LLAMA_ARG_ROPE_SCALE": "4", "LLAMA_ARG_YARN_ORIG_CTX": "1024"}
        self.assertIn("YaRN x4 from 1024", self.answer("inspect", MODEL, env=env))


class Completion(ProgramTest):
    def test_scripts_parse(self):
        for shell, check in (("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])):
            script = self.answer("completion", shell)
            self.assertIn("--ctx-size" if shell != "fish" else "ctx-size", script)
            if shutil.which(check[0]) is None:
                continue
            path = temporary_folder(self) / "script"
            path.write_text(script)
            done = subprocess.run([*check, str(path)], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""), shell)

    def test_bash_completes_commands_options_and_values(self):
        script = self.answer("completion", "bash")

        def complete(*words):
            line = " ".join(f"'{word}'" for word in words)
            code = (f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _thermocline; "
                    "printf '%s\\n' \"${COMPREPLY[@]}\"")
            return subprocess.run(["bash", "-c", code], capture_output=True, text=True).stdout.split()
        self.assertEqual(complete("thermocline", "tok"), ["tokenize"])
        self.assertIn("--ctx-size", complete("thermocline", "run", "--ctx"))
        self.assertEqual(complete("thermocline", "run", "-ctk", "q"), ["q8_0", "q4_0"])
        self.assertEqual(complete("thermocline", "completion", "z"), ["zsh"])

    def test_refuses_other_shells(self):
        self.refusal(USAGE, "completion", "tcsh")
        self.refusal(USAGE, "completion")


class Sources(ProgramTest):
    def config(self, text):
        path = temporary_folder(self) / "config.toml"
        path.write_text(text)
        return path

    def test_option_wins_over_environment_over_file(self):
        path = self.config("temp = 0.1\n[sampling]\ntop_k = 7\nmin-p = 0.5\n")
        env = {"THERMO_CONFIG": str(path), "THERMO_TOP_K": "8", "LLAMA_ARG_THREADS": "1"}
        text = self.answer("run", "--min-p", "0.25", "--print-config", env=env)
        self.assertRegex(text, r"temp = 0\.1 +# file: .*config\.toml:1")
        self.assertRegex(text, r"top-k = 8 +# environment: THERMO_TOP_K")
        self.assertRegex(text, r"min-p = 0\.25 +# option")
        self.assertRegex(text, r"threads = 1 +# environment: LLAMA_ARG_THREADS")

    def test_order_decides_between_options_that_contradict_each_other(self):
        config = self.config('listen = ["http://127.0.0.1:1"]\nno-auth = true\n[cache]\ncache-disk = "1G"\n'
                             'expert-cache = "50%"\ngrammar = "root ::= [a-z]"\nsystem-prompt = "Be brief."\nheat-file = "heat.json"\n')
        for command, arguments, env, counts, left_out in (
                ("run", ["--expert-cache", "1G"], {"LLAMA_ARG_CPU_MOE": "1"}, "expert-cache", "cpu-moe"),
                ("run", ["-ncmoe", "2"], {"THERMO_EXPERT_CACHE": "1G"}, "n-cpu-moe", "expert-cache"),
                ("run", ["--config", config], {"LLAMA_ARG_CPU_MOE": "1"}, "cpu-moe", "expert-cache"),
                ("run", [], {"THERMO_EXPERT_CACHE": "1G", "LLAMA_ARG_CPU_MOE": "1"}, "expert-cache", "cpu-moe"),
                ("run", ["--device", "sim"], {"LLAMA_ARG_N_GPU_LAYERS": "0"}, "device", "gpu-layers"),
                ("run", ["-ngl", "99"], {"THERMO_DEVICE": "cpu"}, "gpu-layers", "device"),
                ("run", ["--device", "cpu"], {"LLAMA_ARG_MAIN_GPU": "1"}, "device", "main-gpu"),
                ("run", ["-t", "1"], {"LLAMA_ARG_THREADS_BATCH": "8"}, "threads", "threads-batch"),
                ("run", ["--no-repack"], {"LLAMA_ARG_NO_MMAP": "1"}, "repack", "mmap"),
                ("run", ["-j", "{}", "--config", config], {}, "json-schema", "grammar"),
                ("run", ["--raw", "--config", config], {}, "raw", "system-prompt"),
                ("run", ["-sysf", "x", "--config", config], {}, "system-prompt-file", "system-prompt"),
                ("run", ["--no-heat-file", "--config", config], {}, "no-heat-file", "heat-file"),
                ("run", ["--reasoning", "on"], {"LLAMA_ARG_REASONING_BUDGET": "0"}, "reasoning", "reasoning-budget"),
                ("run", ["model.gguf"], {"LLAMA_ARG_HF_REPO": "a/b", "LLAMA_ARG_HF_FILE": "c"}, "model", "hf-repo"),
                ("bench", ["model.gguf"], {"LLAMA_ARG_MODEL": "other.gguf"}, "model", "hf-repo"),
                ("serve", ["--port", "2", "--config", config], {}, "port", "listen"),
                ("serve", ["--stdio", "--config", config], {}, "stdio", "listen"),
                ("serve", ["--api-key", "x", "--config", config], {}, "api-key", "no-auth"),
                ("serve", ["--no-auth"], {"LLAMA_API_KEY": "x"}, "no-auth", "api-key"),
                ("serve", ["--cache-ram", "off", "--config", config], {}, "cache-ram", "cache-disk")):
            with self.subTest(command=command, arguments=arguments, env=env):
                text = self.answer(command, *arguments, "--print-config", env=env)
                shown = r"(?m)^(# )?%s (=|is set)"  # a key is not
                self.assertRegex(text, shown % counts)
                self.assertNotRegex(text, shown % left_out)
                self.assertNotIn("other.gguf", text)
        # Compatible ones stay, and a word about a variable is said where it counts, without its value.
        text = self.answer("run", "-ngl", "99", "--print-config", env={"THERMO_DEVICE": "cuda:1"})
        self.assertRegex(text, r'device = "cuda:1"')
        self.assertIn("threads-batch = 4", self.answer("run", "-t", "4", "--print-config", env={"LLAMA_ARG_THREADS_BATCH": "4"}))
        log = run("version", "-v", env={"LLAMA_LOG_COLORS": "never"}).stderr
        self.assertIn("LLAMA_LOG_COLORS is used for --color", log)
        self.assertNotIn("is used for", run("version", "-v", "--color", "auto", env={"LLAMA_LOG_COLORS": "never"}).stderr)

    def test_what_is_meant_for_a_server_stands_in_nobodys_way(self):
        config = self.config(f'model = "{MODEL}"\ngrammar = "root ::= [a-z]"\n[server]\napi-key = ["me:abc", "admin:def"]\nalias = "a,b"\n')
        for arguments, env in ((["chat", "-n", "1"], {"THERMO_API_KEY": "abc", "THERMO_ALIAS": "x"}), (["chat", "-n", "1", "--config", config], {}),
                               (["connect", "env", "--config", config], {}),
                               (["bench", "--print-config", "--url", "http://x", "--config", config], {"LLAMA_ARG_HF_REPO": "a/b"}),
                               (["chat", "--print-config", "--url", "http://x", "--config", config], {"LLAMA_ARG_HF_REPO": "a/b"})):
            with self.subTest(arguments=arguments, env=env):
                self.assertNotRegex(self.answer(*arguments, env=env), "model|alias|grammar|hf-repo|api-key|abc")
        self.assertIn("api-key is set", self.answer("chat", "--url", "http://x", "--print-config", env={"THERMO_API_KEY": "abc"}))
        # A server that the file names is not left out for what it cannot do.
        there = self.config('url = "http://127.0.0.1:1"\n')
        self.assertIn("a format of the answer cannot be sent", self.refusal(USAGE, "chat", "--config", there, "--grammar", "root ::= [a-z]"))
        self.assertIn("model = ", self.answer("chat", "-m", MODEL, "--config", there, "--print-config"))
        for command in ("chat", "bench"):
            self.assertIn("--api-key needs --url", self.refusal(USAGE, command, "--api-key", "abc"))

    def test_the_command_line_wins_where_options_set_the_same(self):
        for arguments, env, shown in ((["-v"], {"LLAMA_LOG_VERBOSITY": "0"}, True), (["-lv", "0"], {"LLAMA_LOG_VERBOSITY": "5"}, False)):
            result = run("run", "-p", "Hi", "-n", "1", "--device", "cpu", *arguments, env=env)
            self.assertEqual("loaded " in result.stderr, shown, result.stderr)
        plan = json.loads(self.answer("plan", "--repack", "-c", "512", "--json", env={"LLAMA_ARG_LOAD_MODE": "mmap"}))
        self.assertIn("weights repacked: default", plan["decisions"])

    def test_prints_a_file_that_it_reads_again(self):
        text = self.answer("run", "--temp", ".5", "--no-repack", "-l", "5+1", "--print-config")
        again = self.answer("run", "--config", self.config(text), "--print-config")
        self.assertEqual([line.split("  #")[0] for line in again.splitlines()],
                         [line.split("  #")[0] for line in text.splitlines()])

    # Texts that look like numbers became other texts, and control characters broke the file.
    def test_prints_texts_that_it_reads_again(self):
        texts = ["5", "5.0", "1e5", "-0", "+5", "007", ".5", "99999999999999999999", "a\tb\r\x01\x7f\n\"\\", "é"]
        text = self.answer("run", *(f"--stop={text}" for text in texts), "--print-config")
        again = self.answer("run", "--config", self.config(text), "--print-config")
        self.assertEqual(again.split("  #")[0], text.split("  #")[0])

    def test_refuses_an_unknown_key_with_its_line(self):
        line = self.refusal(USAGE, "run", "-p", "x", "--config", self.config("temp = 0\n\ntop_q = 3\n"))
        self.assertIn("config.toml:3", line)
        self.assertIn("did you mean", line)

    def test_skips_keys_of_other_commands(self):
        self.answer("version", "--config", self.config("temp = 0\nctx_size = 128\n"))

    def test_refuses_broken_files_and_values(self):
        self.assertIn("TOML", self.refusal(USAGE, "run", "-p", "x", "--config", self.config("temp = = 0\n")))
        self.assertIn("config.toml:1", self.refusal(USAGE, "run", "-p", "x", "--config", self.config("temp = 77\n")))
        self.assertIn("/nowhere", self.refusal(USAGE, "run", "-p", "x", "--config", "/nowhere"))

    def test_makes_no_folder_for_a_log(self):
        folder = temporary_folder(self) / "mistyped"
        self.assertIn("does not exist", self.refusal(USAGE, "version", "--log-file", folder / "log.txt"))
        self.assertFalse(folder.exists())
        self.assertIn("THERMO_TEMP", self.refusal(USAGE, "run", "-p", "x", env={"THERMO_TEMP": "warm"}))

    def test_negated_flags_in_every_source(self):
        for env, arguments in (({"THERMO_REPACK": "off"}, ()), ({"LLAMA_ARG_NO_REPACK": "1"}, ()),
                               ({}, ("--no-repack",)), ({}, ("--repack=off",))):
            self.assertIn("repack = false", self.answer("run", *arguments, "--print-config", env=env))
        # In a file only true and false were understood: no-repack = 1 was taken as the opposite.
        for key, is_on in (("repack = 1", True), ('repack = "yes"', True), ("repack = 0", False), ("no-repack = 1", False),
                           ('no_repack = "on"', False), ('no-repack = "off"', True), ("no-repack = 0", True)):
            self.assertIn(f"repack = {str(is_on).lower()}", self.answer("run", "--config", self.config(key), "--print-config"), key)
        self.assertIn("config.toml:1: no-repack: 'perhaps'",
                      self.refusal(USAGE, "run", "--config", self.config('no-repack = "perhaps"'), "--print-config"))

    def test_options_may_come_first(self):
        self.assertIn("42", self.answer("--temp", "0", "-q", "run", "-p", "What is 17 + 25?"))

    def test_writes_the_log_as_json(self):
        path = temporary_folder(self) / "log.json"
        self.answer("run", "-p", "hi", "-n", "2", "--verbosity", "3", "--log-file", path)
        for line in path.read_text().splitlines():
            self.assertIn("level", json.loads(line))


if __name__ == "__main__":
    unittest.main()
