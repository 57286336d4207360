"""Everything a user can get wrong: one clear message each, and the right exit code."""
import math
import os
import pathlib
import shutil
import struct
import subprocess
import unittest

from harness import (DATA, DEVICE, DEVICE_FAULT, Gguf, MEMORY, MODEL, MODEL_ERROR, PROGRAM, ProgramTest, USAGE,
                     clean_environment, run, temporary_folder)

ASK = ("-p", "hello")


class Files(ProgramTest):
    def setUp(self):
        self.folder = temporary_folder(self)

    def refuse_model(self, path, *words):
        for command in (("run", path, *ASK), ("plan", path), ("chat", path)):
            line = self.refusal(MODEL_ERROR, *command)
            for word in words:
                self.assertIn(word, line, command)

    def test_refuses_a_missing_file(self):
        self.refuse_model(self.folder / "nothing.gguf", "nothing.gguf")

    def test_refuses_an_empty_file(self):
        (self.folder / "empty.gguf").touch()
        self.refuse_model(self.folder / "empty.gguf", "empty.gguf")

    def test_refuses_a_file_that_is_no_gguf(self):
        (self.folder / "text.gguf").write_text("hello " * 100)
        self.refuse_model(self.folder / "text.gguf", "text.gguf")

    # This was an error of the program.
    def test_refuses_a_folder_that_cannot_be_read(self):
        locked = self.folder / "locked"
        locked.mkdir(mode=0)
        self.folder.chmod(0o755)
        everybody = {"user": 65534, "extra_groups": []} if os.geteuid() == 0 else {}  # root may read it
        try:
            result = subprocess.run([PROGRAM, "inspect", locked], capture_output=True, text=True, env=clean_environment(), **everybody)
        except PermissionError as error:
            self.skipTest(f"needs a program that everybody may start: {error}")
        self.assertEqual(result.returncode, MODEL_ERROR, result.stderr)
        self.assertRegex(result.stderr, "^error: .*locked: this folder cannot be read: Permission denied; check its permissions\n$")

    def test_refuses_a_truncated_file(self):
        data = MODEL.read_bytes()
        for size in (10, 1000, 100_000, len(data) // 2, len(data) - 1):
            path = self.folder / f"cut{size}.gguf"
            path.write_bytes(data[:size])
            self.refuse_model(path, path.name)

    def test_says_so_when_the_file_becomes_shorter_while_it_runs(self):
        path = self.folder / "model.gguf"
        for options in ((), ("--no-repack",), ("--device", "sim", "--expert-cache", "40%")):
            with self.subTest(options=options):
                shutil.copy(MODEL, path)
                # More text than a pipe holds: it cannot end before it is read.
                with subprocess.Popen([PROGRAM, "run", path, *ASK, "-c", "131072", "-n", "120000", "--ignore-eos", "-q", *options],
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env=clean_environment()) as program:
                    self.assertTrue(program.stdout.read(1))  # it is writing
                    os.truncate(path, 4096)
                    _, errors = program.communicate(timeout=60)
                self.assertEqual(program.returncode, DEVICE_FAULT, errors)
                line = errors.decode().rstrip("\n").split("\n")[-1]
                self.assertRegex(line, "^error: .*model.gguf became shorter while it was in use")

    def test_refuses_a_tensor_that_ends_past_the_file(self):
        file = Gguf()
        name = "blk.3.ffn_down_exps.weight"
        file.put(file.tensors[name]["offset"], "<Q", len(file.data) // 32 * 32)
        self.refuse_model(file.save(self.folder, "past.gguf"), name)

    def test_refuses_an_unknown_architecture(self):
        file = Gguf()
        file.put_string("general.architecture", b"qwen99moe")
        self.refuse_model(file.save(self.folder, "arch.gguf"), "qwen99moe", "give a model")

    def test_refuses_an_unknown_tensor_type(self):
        file = Gguf()
        file.put(file.tensors["blk.3.ffn_down_exps.weight"]["type"], "<I", 9999)
        self.refuse_model(file.save(self.folder, "type.gguf"), "blk.3.ffn_down_exps.weight", "9999")

    def test_refuses_a_tensor_of_the_wrong_shape(self):
        file = Gguf()
        place = file.tensors["blk.3.ffn_gate_exps.weight"]["dims"]
        file.put(place + 8, "<Q", 128)  # half the rows: still inside the file
        line = self.refusal(MODEL_ERROR, "run", file.save(self.folder, "shape.gguf"), *ASK)
        self.assertIn("blk.3.ffn_gate_exps.weight", line)

    def test_refuses_numbers_that_no_model_can_have(self):
        for name, at in (("output_norm.weight", 3), ("blk.1.ffn_gate_inp.weight", 1000)):
            file = Gguf()
            dims, _ = file.floats(name)
            start = file.data_at + struct.unpack_from("<Q", file.data, file.tensors[name]["offset"])[0]
            file.put(start + 4 * at, "<f", math.nan)
            line = self.refusal(MODEL_ERROR, "run", file.save(self.folder, "nan.gguf"), *ASK)
            self.assertIn(f"tensor {name} ", line)
            self.assertIn(f"at element {at} of {math.prod(dims)}", line)

    def test_refuses_a_model_without_a_vocabulary(self):
        self.assertIn("vocabulary", self.refusal(MODEL_ERROR, "run", DATA / "qwen35moe-f32.gguf", *ASK))

    def test_opens_the_only_model_of_a_folder(self):
        shutil.copy(MODEL, self.folder / "one.gguf")
        (self.folder / "mmproj-F16.gguf").touch()  # what lies beside models
        (self.folder / "one.imatrix.gguf").touch()
        self.assertIn("42", self.answer("run", self.folder, "-p", "What is 17 + 25?", "--temp", "0"))

    def test_refuses_a_folder_with_no_or_several_models(self):
        self.assertIn("no .gguf", self.refusal(MODEL_ERROR, "run", self.folder, *ASK))
        for name in ("one", "two"):
            shutil.copy(MODEL, self.folder / f"{name}.gguf")
        line = self.refusal(MODEL_ERROR, "run", self.folder, *ASK)
        self.assertIn("one.gguf, two.gguf", line)

    def test_refuses_a_later_part_of_a_split_model(self):
        shutil.copy(MODEL, self.folder / "m-00002-of-00003.gguf")
        self.assertIn("first part", self.refusal(MODEL_ERROR, "run", self.folder / "m-00002-of-00003.gguf", *ASK))

    def test_says_what_would_fit_when_memory_is_short(self):
        total = int(pathlib.Path("/proc/meminfo").read_text().split()[1]) * 1024
        if total > 40 << 30:
            self.skipTest("16M tokens of context fit into this machine")
        for command in (("plan",), ("run", *ASK)):
            line = self.refusal(MEMORY, *command, "-c", "16M", "-ctk", "f32", "-ctv", "f32")
            self.assertIn("available", line)

    def test_names_the_option_of_a_cache_that_does_not_fit(self):
        self.assertRegex(self.refusal(MEMORY, "serve", "--cache-ram", "100T"), "--cache-ram: 100.* do not fit, .*: give less, or auto")

    def test_refuses_an_address(self):
        self.assertIn("hf:owner/repo", self.refusal(USAGE, "run", "https://example.org/model.gguf", *ASK))

    def test_says_how_a_repository_is_named(self):
        for command in (("pull",), ("run", *ASK, "-m"), ("run", *ASK, "-hf")):
            self.assertTrue(self.refusal(USAGE, *command, "https://huggingface.co/o/r").endswith("write hf:o/r"), command)
        self.assertIn("write hf:o/r:Q8_0", self.refusal(USAGE, "run", "hf.co/o/r:Q8_0", *ASK))
        self.assertIn("the repository of this name is hf:o/r:Q8_0", self.refusal(MODEL_ERROR, "run", "o/r:Q8_0", *ASK))
        self.assertEqual(self.refusal(USAGE, "run", *ASK, "-hf", "x").count("'x'"), 1)


class Prompts(ProgramTest):
    def test_refuses_a_prompt_longer_than_the_context(self):
        line = self.refusal(USAGE, "run", "-p", "hello " * 500, "-c", "128")
        self.assertIn("context holds 128", line)
        self.assertIn("--ctx-size", line)

    def test_refuses_a_prompt_longer_than_the_training_length(self):
        result = run("run", "-p", "hello " * 9000)
        self.assertEqual(result.returncode, USAGE, result.stderr)
        self.assertIn("context holds 4096", result.stderr)

    def test_refuses_an_empty_prompt(self):
        self.assertIn("empty", self.refusal(USAGE, "run", "-p", ""))
        self.assertIn("empty", self.refusal(USAGE, "run", stdin=""))

    def test_refuses_missing_files(self):
        self.assertIn("/nowhere", self.refusal(USAGE, "run", "-f", "/nowhere"))

    def test_refuses_texts_that_never_end(self):
        self.assertIn("more than 64.00 MiB", self.refusal(USAGE, "run", "-f", "/dev/zero"))
        with open("/dev/zero", "rb") as zeros:
            result = subprocess.run([PROGRAM, "run", "-f", "-"], stdin=zeros, capture_output=True, text=True,
                                    env=clean_environment(), timeout=120)
        self.assertEqual(result.returncode, USAGE, result.stderr)
        self.assertIn("stdin has more than 64.00 MiB", result.stderr)

    def test_refuses_text_that_is_no_utf8(self):
        folder = temporary_folder(self)
        (folder / "latin1.txt").write_bytes(b"caf\xe9 au lait")
        self.assertIn("not UTF-8", self.refusal(USAGE, "run", "-f", folder / "latin1.txt"))


class Options(ProgramTest):
    def test_suggests_the_nearest_option(self):
        for wrong, right in (("--tmep", "--temp"), ("--ctx-sise", "--ctx-size"), ("--no-repak", "--no-repack"),
                             ("--top_kk", "--top-k")):
            self.assertIn(f"did you mean {right}?", self.refusal(USAGE, "run", *ASK, wrong, "1"), wrong)

    def test_suggests_the_nearest_command(self):
        self.assertIn("did you mean chat?", self.refusal(USAGE, "caht"))
        self.assertIn("help", self.refusal(USAGE, "xyzzy"))

    def test_refuses_values_out_of_range(self):
        for option, value in (("--temp", "-1"), ("--temp", "9"), ("--temp", "warm"), ("--temp", "nan"),
                              ("--top-p", "1.5"), ("--min-p", "-0.1"), ("--repeat-penalty", "0"), ("--seed", "x"),
                              ("--seed", "-2"), ("-n", "0"), ("-n", "-5"), ("-c", "-1"), ("-c", "many"),
                              ("-c", "99999999999"), ("-t", "5000"), ("-ctk", "q9_9"), ("--isa", "sse9"),
                              ("--logprobs", "21"), ("--logit-bias", "x"), ("--logit-bias", "99999999+1"),
                              ("--reasoning", "maybe"), ("--color", "purple"), ("--verbosity", "9"),
                              ("--chat-template-kwargs", "{"), ("--chat-template-kwargs", "[]"), ("--stop", ""),
                              ("--device", "toaster"), ("-b", "0")):
            with self.subTest(option=option, value=value):
                self.refusal(USAGE, "run", *ASK, "--json", f"{option}={value}")

    def test_names_the_option_and_the_value(self):
        line = self.refusal(USAGE, "run", *ASK, "--temp", "warm")
        self.assertIn("--temp", line)
        self.assertIn("'warm'", line)
        self.assertIn("q8_0", self.refusal(USAGE, "run", *ASK, "-ctk", "q5_1"))

    def test_says_which_numbers_an_option_takes(self):
        self.assertIn("-1 or a whole number from 0", self.refusal(USAGE, "run", *ASK, "--seed", "1e99"))
        self.assertIn("and from 0 to 18446744073709551615", self.refusal(USAGE, "bench", "--seed", "9" * 22))
        self.assertIn("-c: '100M' cannot be used", self.refusal(USAGE, "run", *ASK, "-c", "100M"))

    def test_asks_for_a_text(self):
        for command in ("tokenize", "perplexity"):
            done = subprocess.run([PROGRAM, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=clean_environment())
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
            self.assertIn("no text was given", done.stderr)

    def test_an_empty_key_is_no_key(self):
        self.assertIn("a key was expected", self.refusal(USAGE, "serve", "--api-key", ""))

    def test_says_that_a_server_cannot_be_reached(self):
        self.assertIn("the server cannot be reached", self.refusal(USAGE, "bench", "--url", "http://127.0.0.1:9"))

    def test_refuses_a_missing_value(self):
        self.assertIn("needs a value", self.refusal(USAGE, "run", "-p"))
        self.assertIn("needs a value", self.refusal(USAGE, "run", "-p", "--temp", "0"))

    def test_refuses_options_that_contradict(self):
        self.assertIn("--json", self.refusal(USAGE, "run", *ASK, "--logprobs", "2"))
        self.assertIn("--raw", self.refusal(USAGE, "run", *ASK, "--raw", "-sys", "x"))
        self.refusal(USAGE, "run", *ASK, "--no-mmap", "--no-repack")
        self.assertIn("use -t", self.refusal(USAGE, "run", *ASK, "-t", "2", "-tb", "1"))
        self.assertIn("use -t", self.refusal(USAGE, "run", *ASK, "-tb", "1"))
        self.assertIn("both name", self.refusal(USAGE, "run", MODEL, "-m", MODEL, *ASK))

    def test_says_what_to_use_instead_of_llama_options(self):
        for option, word in (("-ot", "dynamic"), ("--lora", "merge"), ("--mmproj", "text"), ("--rpc", "remote"),
                             ("--mirostat", "--temp"), ("--rope-freq-base", "model file"),
                             ("--port", "`serve`"), ("-cnv", "chat"), ("--context-shift", "-c"), ("-mu", "-m")):
            with self.subTest(option=option):
                line = self.refusal(USAGE, "run", *ASK, option, "x")
                self.assertIn(option, line)
                self.assertIn(word, line)

    def test_says_what_is_wrong_with_a_stretched_context(self):
        for options, word in ((["--rope-scaling", "yarn"], "--rope-scale"), (["--rope-scaling", "ntk"], "linear"),
                              (["--rope-scaling", "none", "--rope-scale", "2"], "leave one out"),
                              (["--yarn-orig-ctx", "4K"], "--rope-scaling yarn"), (["--rope-scale", "0.5"], "--rope-scale"),
                              (["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-beta-fast", "1"], "slow end"),
                              (["--yarn-ext-factor", "2"], "--yarn-ext-factor")):
            for command in (["run", *ASK], ["plan"], ["inspect"], ["bench", "-p", "8", "-n", "0"], ["verify", "--tokens", "4"]):
                with self.subTest(command=command[0], options=options):
                    self.assertIn(word, self.refusal(USAGE, *command, *options))

    def test_refuses_templates_that_are_broken(self):
        self.assertIn("--chat-template", self.refusal(USAGE, "run", *ASK, "-q", "--chat-template", "{% if %}"))
        self.assertIn("no roles", self.refusal(USAGE, "run", *ASK, "--chat-template", "{{ raise_exception('no roles') }}"))
        self.assertIn("chatml", self.refusal(USAGE, "run", *ASK, "--chat-template", "llama9"))
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        self.assertIn("; give another template, or continue a text without one (--chat-template-file, --raw)",
                      self.refusal(USAGE, "run", *ASK, "--chat-template", endless))

    @unittest.skipIf(os.environ.get("CUDA_BUILD") == "1", "this build has CUDA: see test_gpu.py")
    def test_refuses_a_gpu_in_a_build_without_one(self):
        self.assertIn("no CUDA", self.refusal(DEVICE, "run", *ASK, "--device", "cuda:0"))
        result = run("run", *ASK, "-ngl", "99", "-n", "4")  # as llama.cpp: a word, and on
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("no CUDA", result.stderr)

    def test_says_what_to_type(self):
        self.assertIn("connect", self.refusal(USAGE, "conect", "codex"))
        self.assertIn("run", self.refusal(USAGE))

    def test_refuses_too_many_arguments(self):
        self.assertIn("unexpected", self.refusal(USAGE, "run", MODEL, "what", "is", "this"))


if __name__ == "__main__":
    unittest.main()
