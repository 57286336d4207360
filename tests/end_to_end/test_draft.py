"""Drafting from the command line: the text of plain decoding, references, and what is refused."""
import json
import math
import pathlib
import struct
import tempfile
import unittest

from harness import DATA, MODEL, MODEL_ERROR, ROOT, USAGE, Gguf, ProgramTest, run, temporary_folder
from gguf_copy import ARRAY, U32, GgufCopy
from server_harness import Server

DRAFTER = ROOT / "models/plankton-draft-q8_0.gguf"
PROMPTS = ["Write a Python function that sorts a list with merge sort.", "What is 17 + 25?", "Tell me about the sea."]


class Text(ProgramTest):
    def test_is_that_of_plain_decoding(self):
        for prompt, more in zip(PROMPTS, (["--temp", "0"], ["--temp", "0.8", "-s", "3"], ["--temp", "0"])):
            arguments = ["run", "--device", "cpu", "-p", prompt, "-n", "60", *more]
            plain = self.answer(*arguments, "--draft", "none")
            for who in ("lookup", "mtp", "auto", DRAFTER):
                for budget in ("7", "auto"):
                    with self.subTest(prompt=prompt, who=str(who), budget=budget):
                        self.assertEqual(self.answer(*arguments, "--draft", who, "--draft-budget", budget), plain)

    def test_is_the_same_wherever_experts_are(self):
        arguments = ["run", "-p", PROMPTS[0], "-n", "40", "--temp", "0"]
        plain = self.answer(*arguments, "--device", "cpu", "--draft", "none")
        for where in (["--device", "sim", "--expert-cache", "30%"], ["--device", "sim", "--expert-cache", "20%", "--expert-ram", "50%"],
                      ["--device", "cpu", "--expert-ram", "40%"]):
            for who in ("none", "auto", "mtp"):
                with self.subTest(where=where, who=who):
                    self.assertEqual(self.answer(*arguments, *where, "--draft", who, "--draft-budget", "7"), plain)

    def test_leaves_the_heat_of_plain_decoding(self):
        folder = temporary_folder(self)
        for number, where in enumerate((["--device", "sim", "--expert-cache", "40%"], ["--device", "cpu", "--expert-ram", "50%"],
                                        ["--device", "cpu"])):
            heat = {}
            for who in ("none", "auto", "mtp", "lookup"):
                file = folder / f"{number}-{who}.heat"
                self.answer("run", *where, "-p", PROMPTS[0], "-n", "40", "--temp", "0", "--draft", who, "--draft-budget", "7",
                            "--heat-file", file)
                heat[who] = json.loads(file.read_text())
            for who in ("auto", "mtp", "lookup"):
                with self.subTest(where=where, who=who):
                    self.assertGreater(heat[who]["n_tokens"], 40)
                    self.assertEqual(heat[who], heat["none"])

    def test_ends_at_a_stop_text_inside_a_round(self):
        arguments = ["run", "--device", "cpu", "-p", PROMPTS[0], "-n", "80", "--temp", "0", "--stop", "return"]
        plain = json.loads(self.answer(*arguments, "--json", "--draft", "none"))
        drafted = json.loads(self.answer(*arguments, "--json", "--draft", "auto", "--draft-budget", "16"))
        self.assertEqual(drafted["choices"][0]["message"], plain["choices"][0]["message"])
        self.assertEqual(drafted["usage"]["completion_tokens"], plain["usage"]["completion_tokens"])
        # Nothing of what was guessed after it counts. The last token was chosen, and need not be computed.
        timings = drafted["timings"]
        self.assertLess(timings["draft_n_accepted"], drafted["usage"]["completion_tokens"])
        self.assertEqual(timings["draft_n_accepted"] + timings["draft_rounds"] + timings["plain_steps"] + 1,
                         drafted["usage"]["completion_tokens"])

    def test_ends_at_a_stop_text_on_a_server(self):
        body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 80, "temperature": 0, "stop": ["return"]}
        with Server("-c", "1024", "--parallel", "1", "--draft", "auto", "--draft-budget", "16") as server:
            self.assertEqual(server.get("/props")["speculation"]["policy"], "waiting: nothing was written yet")
            reply = server.post("/v1/chat/completions", body)
            usage, timings = reply["usage"], reply["timings"]
            self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
            self.assertLess(usage["completion_tokens_details"]["accepted_prediction_tokens"], usage["completion_tokens"])
            self.assertEqual(timings["draft_n_accepted"] + timings["draft_rounds"] + timings["plain_steps"] + 1,
                             usage["completion_tokens"])
            self.assertEqual(server.get("/props")["speculation"]["policy"], "on")
            plain = server.post("/v1/chat/completions", {**body, "stop": []})["choices"][0]["message"]["content"]
            self.assertEqual(reply["choices"][0]["message"]["content"], plain.split("return")[0])

    def test_says_what_drafting_did(self):
        result = run("run", "--device", "cpu", "-p", PROMPTS[0], "-n", "40", "--temp", "0", "--draft", "auto",
                     "--draft-budget", "7", "--json")
        timings = json.loads(result.stdout)["timings"]
        self.assertEqual(timings["drafter"], "dflash")
        self.assertGreater(timings["draft_n_accepted"], 0)
        self.assertGreaterEqual(timings["draft_n"], timings["draft_n_accepted"])
        self.assertEqual(sum(timings["draft_accepted_by_depth"]), timings["draft_n_accepted"])
        self.assertEqual(len(timings["draft_tried_by_depth"]), len(timings["draft_accepted_by_depth"]))
        self.assertEqual(timings["tokens_per_step"],
                         1 + timings["draft_n_accepted"] / (timings["draft_rounds"] + timings["plain_steps"]))
        for phase in ("draft_ms", "verify_ms", "commit_ms"):
            self.assertGreater(timings[phase], 0)
        self.assertEqual(timings["draft_state"], "on")
        self.assertGreater(timings["verify_experts_per_layer"], 0)
        self.assertEqual(timings["verify_cold_experts_per_layer"], 0)
        self.assertIn("draft dflash", result.stderr)
        self.assertIn("experts a layer to verify", result.stderr)
        plain = json.loads(self.answer("run", "--device", "cpu", "-p", PROMPTS[1], "-n", "4", "--json", "--draft", "none"))
        self.assertNotIn("draft_rounds", plain["timings"])

    def test_counts_the_cold_experts_of_a_round(self):
        timings = json.loads(self.answer("run", "--device", "sim", "--expert-cache", "30%", "-p", PROMPTS[0], "-n", "40",
                                         "--temp", "0", "--draft", "auto", "--draft-budget", "7", "--json"))["timings"]
        self.assertGreater(timings["verify_cold_experts_per_layer"], 0)
        self.assertLess(timings["verify_cold_experts_per_layer"], timings["verify_experts_per_layer"])

    def test_shows_drafts_in_a_trace(self):
        trace = temporary_folder(self) / "trace.json"
        self.answer("run", "--device", "cpu", "-p", PROMPTS[0], "-n", "24", "--temp", "0", "--draft", "auto",
                    "--draft-budget", "7", "--trace", trace)
        events = [event for event in json.loads(trace.read_text()) if event.get("cat") == "draft"]
        self.assertTrue(any(event["name"] == "draft" and event["args"]["nodes"] == 7 for event in events))
        self.assertTrue(any(event["name"] == "accepted" and event["args"]["accepted"] > 0 and event["args"]["experts"] > 0
                            for event in events))

    def test_shows_in_a_trace_what_the_planner_decided(self):
        trace = temporary_folder(self) / "trace.json"
        self.answer("run", "--device", "cpu", "-p", PROMPTS[0], "-n", "60", "--temp", "0", "--draft", DRAFTER, "--trace", trace)
        events = [event for event in json.loads(trace.read_text()) if event.get("cat") == "draft"]
        early = [event for event in events if event["name"] == "early draft"]
        self.assertTrue(all("nodes" not in event["args"] for event in early))
        choices = [event["args"] for event in events if event["name"] in ("verify", "only compare", "too expensive")]
        self.assertTrue(choices)
        for choice in choices:
            self.assertLessEqual(choice["nodes"], choice["of"])

    def test_knows_the_names_of_llama_cpp(self):
        arguments = ["run", "--device", "cpu", "-p", PROMPTS[1], "-n", "8", "--temp", "0"]
        plain = self.answer(*arguments)
        for names in (["-md", DRAFTER, "--draft-max", "6", "--draft-min", "1", "--spec-draft-p-min", "0.1"],
                      ["--spec-type", "draft-mtp"], ["--spec-type", "ngram-simple"], ["--spec-default"],
                      ["--spec-draft-model", DRAFTER, "--spec-type", "draft-dflash", "-ctkd", "q8_0"],
                      ["-md", DRAFTER, "--spec-draft-type-k", "q8_0", "--spec-draft-type-v", "f32"]):
            with self.subTest(names=names):
                self.assertEqual(self.answer(*arguments, *names), plain)

    def test_knows_the_variables_of_llama_cpp(self):
        # Those of now, and what they were called before.
        now = {"MODEL": ("model-draft", str(DRAFTER)), "N_MAX": ("spec-draft-n-max", "3"), "N_MIN": ("spec-draft-n-min", "2"),
               "P_MIN": ("spec-draft-p-min", "0.25"), "CACHE_TYPE_K": ("cache-type-k-draft", "q8_0"),
               "CACHE_TYPE_V": ("cache-type-v-draft", "f32")}
        before = {"MODEL": "MODEL_DRAFT", "N_MAX": "DRAFT_MAX", "N_MIN": "DRAFT_MIN", "P_MIN": "DRAFT_P_MIN",
                  "CACHE_TYPE_K": "CACHE_TYPE_K_DRAFT", "CACHE_TYPE_V": "CACHE_TYPE_V_DRAFT"}
        for names in ({f"LLAMA_ARG_SPEC_DRAFT_{name}": value for name, value in now.items()},
                      {f"LLAMA_ARG_{before[name]}": value for name, value in now.items()},
                      {"LLAMA_ARG_SPEC_TYPE": ("spec-type", "draft-mtp")}):
            shown = self.answer("run", "--print-config", env={name: value for name, (_, value) in names.items()})
            for name, (option, value) in names.items():
                self.assertRegex(shown, rf'(?m)^{option} = "?{value}"? +# environment: {name}$')

    def test_is_drafted_by_whom_the_command_line_names(self):
        arguments = ["run", "--device", "cpu", "-p", PROMPTS[0], "-n", "24", "--temp", "0", "--draft-budget", "4", "--json"]
        config = temporary_folder(self) / "config.toml"
        config.write_text('draft = "mtp"\n')
        file, missing = {"LLAMA_ARG_SPEC_DRAFT_MODEL": str(DRAFTER)}, {"LLAMA_ARG_MODEL_DRAFT": "/missing.gguf"}
        for who, more, env in ((None, ["--draft", "none"], file), ("lookup", ["--draft", "lookup"], missing),
                               ("dflash", ["-md", DRAFTER], {"THERMO_DRAFT": "lookup"}),
                               (None, ["--draft", "none"], {"THERMO_SPEC_DEFAULT": "1"}),
                               ("dflash", ["--config", config], file), ("mtp", ["--config", config], {}),
                               ("lookup", ["--spec-type", "ngram-mod,draft-mtp"], missing)):
            with self.subTest(more=more, env=env):
                timings = json.loads(self.answer(*arguments, *more, env=env))["timings"]
                self.assertEqual(timings.get("drafter"), who)
        self.assertNotIn("model-draft", self.answer("run", "--draft", "none", "--print-config", env=file))

    def test_takes_longer_drafts_than_there_are(self):
        result = run("run", "--device", "cpu", "-p", PROMPTS[1], "-n", "4", "--draft", "lookup", "--draft-max", "64")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("--draft-max 64: 63 is used", result.stderr)


class Measured(ProgramTest):
    """`bench --draft`: plain and drafted in turn, with an oracle as right as asked for."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.model, cls.drafter = (f"{cls.folder.name}/{name}.gguf" for name in ("model", "drafter"))
        for path, more in ((cls.model, ["qwen35moe-tiny", "--nextn", "--locality", "0.8"]), (cls.drafter, ["dflash-tiny"])):
            assert run("synth", path, "--shape", *more).returncode == 0

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def rows(self, *arguments):
        return json.loads(self.answer("bench", "-m", self.model, "--device", "cpu", "-n", "64", "-r", "1", "-o", "json", *arguments))

    def test_drafts_are_right_as_often_as_asked(self):
        for who in (self.drafter, "mtp", "lookup"):
            plain, sure = self.rows("--draft", who, "--oracle", "1", "--draft-budget", "4")
            self.assertEqual(plain["drafter"], "")
            self.assertEqual(plain["output_sha256"], sure["output_sha256"])
            self.assertGreater(sure["tokens_per_step"], 4.5)
            self.assertGreater(sure["ratio_to_plain"], 0)
            self.assertEqual(sure["draft_tried_by_depth"], sure["draft_accepted_by_depth"])
            self.assertEqual(sum(sure["draft_accepted_by_depth"]), sure["draft_n_accepted"])
            self.assertEqual(sure["draft_n_accepted"] + sure["draft_rounds"] + sure["plain_steps"], 64)
            never = self.rows("--draft", who, "--oracle", "0", "--draft-budget", "4")[1]
            self.assertEqual(never["draft_n_accepted"], 0)
            self.assertEqual([never["draft_tried_by_depth"], never["draft_accepted_by_depth"]], [[never["draft_rounds"]], [0]])
            self.assertEqual(never["tokens_per_step"], 1)

    def test_own_text_is_the_same_with_drafts(self):
        for flag in ("--draft", "-md"):
            plain, drafted = self.rows(flag, self.drafter, "--draft-budget", "7")
            self.assertEqual(plain["text_source"], "own")
            self.assertEqual(plain["output_sha256"], drafted["output_sha256"])

    def test_what_makes_no_sense_is_refused(self):
        for arguments in (["--oracle", "0.5"], ["--draft", "mtp", "--oracle", "2"], ["--draft", "mtp", "-p", "8"],
                          ["--draft", "mtp", "--rows", "4"], ["--draft", "mtp", "--oracle", "0.5", "--text", "own"]):
            with self.subTest(arguments=arguments):
                self.refusal(USAGE, "bench", "-m", self.model, "--device", "cpu", *arguments)
        self.refusal(USAGE, "synth", "/tmp/x.gguf", "--shape", "dflash-35b-a3b", "--layers", "4")
        self.refusal(USAGE, "synth", "/tmp/x.gguf", "--shape", "qwen35-tiny", "--locality", "0.5")
        self.assertIn("use --vocab 4096",
                      self.refusal(USAGE, "synth", "/tmp/x.gguf", "--shape", "qwen35-tiny", "--text"))


def write_checkpoint(drafter, folder, more=(), **changes):
    """The drafter of a GGUF file in llama.cpp's naming as its authors would publish it."""
    gguf = Gguf(drafter)
    value = lambda key: gguf.value(f"dflash.{key}")
    pattern = value("attention.sliding_window_pattern") or [False] * value("block_count")
    config = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": value("block_count"),
              "hidden_size": value("embedding_length"), "intermediate_size": value("feed_forward_length"),
              "num_attention_heads": value("attention.head_count"), "num_key_value_heads": value("attention.head_count_kv"),
              "head_dim": value("attention.key_length"), "max_position_embeddings": value("context_length"),
              "rms_norm_eps": value("attention.layer_norm_rms_epsilon"), "vocab_size": value("vocab_size"),
              "block_size": value("block_size"), "sliding_window": value("attention.sliding_window"),
              "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
              "dflash_config": {"mask_token_id": gguf.value("tokenizer.ggml.mask_token_id"),
                                "target_layer_ids": [layer - 1 for layer in value("target_layers")]},
              "rope_theta": value("rope.freq_base"), "is_causal": value("attention.causal")}
    if value("rope.scaling.type") == "yarn":
        config["rope_scaling"] = {"rope_type": "yarn", "factor": value("rope.scaling.factor"),
                                  "original_max_position_embeddings": value("rope.scaling.original_context_length"),
                                  "beta_fast": value("rope.scaling.yarn_beta_fast"), "beta_slow": value("rope.scaling.yarn_beta_slow")}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    directory, data = {}, b""
    for name in gguf.tensors:
        dims, bytes_ = gguf.floats(name)
        parts = name.split(".")
        if parts[0] == "blk":
            name = f"layers.{parts[1]}.{names[parts[2]]}.weight"
        name = {"enc.output_norm.weight": "hidden_norm.weight", "output_norm.weight": "norm.weight"}.get(name, name)
        directory[name] = {"dtype": "F32", "shape": dims[::-1], "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    for name in more:
        directory[name] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
        data += bytes(16)
    head = json.dumps(directory).encode()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


class Checkpoints(ProgramTest):
    """Drafters as they are published: config.json and model.safetensors."""

    def test_give_the_recorded_outputs(self):
        for target, name in (("qwen35moe", "qwen35moe"), ("qwen35", "qwen35"), ("laguna", "laguna"),
                             ("laguna", "laguna-bidirectional")):
            drafter = DATA / f"dflash-{name}-f32.gguf"
            if Gguf(drafter).value("general.architecture") != "dflash":
                continue
            with self.subTest(name=name), tempfile.TemporaryDirectory() as folder:
                write_checkpoint(drafter, pathlib.Path(folder))
                results = [self.answer("verify", "-m", DATA / f"{target}-f32.gguf", "--draft", who, "--expected",
                                       DATA / f"dflash-{name}-expected.gguf", "--tolerance", "1e-4", "--json")
                           for who in (folder, folder + "/model.safetensors", drafter)]
                self.assertEqual(results[0], results[1])
                checks = [json.loads(result)["tensors"] for result in results]
                self.assertEqual(checks[0], checks[2])

    def test_are_refused_where_they_do_not_fit(self):
        drafter, model = DATA / "dflash-qwen35moe-f32.gguf", DATA / "qwen35moe-f32.gguf"
        refused = lambda folder: self.refusal(MODEL_ERROR, "bench", "-m", model, "--device", "cpu", "-n", "4", "--draft", folder)
        for changes in ({"hidden_size": 32}, {"vocab_size": 77}, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 99]}},
                        {"architectures": ["DSparkDraftModel"]}, {"architectures": ["LlamaForCausalLMEagle3"]}, {"num_hidden_layers": 9}):
            with self.subTest(changes=changes), tempfile.TemporaryDirectory() as folder:
                write_checkpoint(drafter, pathlib.Path(folder), **changes)
                refused(folder)
        for name in ("layers.0.self_attn.q_proj.bias", "layers.1.self_attn.sinks", "markov_head.w1.weight", "confidence_head.weight",
                     "selector.weight", "t2d"):
            with self.subTest(name=name), tempfile.TemporaryDirectory() as folder:
                write_checkpoint(drafter, pathlib.Path(folder), [name])
                self.assertIn(name, refused(folder))
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(drafter, pathlib.Path(folder), ["layers.0.self_attn.rotary_emb.inv_freq"])
            self.answer("bench", "-m", model, "--device", "cpu", "-n", "4", "-r", "1", "--draft", folder)
            whole = pathlib.Path(folder) / "model.safetensors"
            whole.write_bytes(whole.read_bytes()[:-100])
            refused(folder)
            whole.unlink()
            refused(folder)


class References(ProgramTest):
    """Outputs that other implementations recorded."""

    def test_of_the_float_drafters(self):
        for target, names in (("qwen35moe", ["qwen35moe"]), ("qwen35", ["qwen35"]),
                              ("laguna", ["laguna", "laguna-bidirectional"])):
            for name in names:
                self.answer("verify", "-m", DATA / f"{target}-f32.gguf", "--draft", DATA / f"dflash-{name}-f32.gguf",
                            "--expected", DATA / f"dflash-{name}-expected.gguf", "--tolerance", "1e-4")

    def test_of_planktons_drafters(self):
        # Without a word about what is allowed, quantised ones may be off by what quantisation costs.
        for who, name in (("mtp", "mtp"), (DRAFTER, "draft")):
            arguments = ["verify", "-m", MODEL, "--draft", who, "--expected", DATA / f"plankton-{name}-expected.gguf"]
            self.answer(*arguments)
            for strict in (["--tolerance-rms", "0.01"], ["--tolerance", "1e-4"]):
                self.assertEqual(run(*arguments, *strict).returncode, 9)

    def test_of_draft_trees(self):
        for name in ("qwen35moe", "laguna"):
            self.answer("verify", "-m", DATA / f"{name}-f32.gguf", "--expected", DATA / f"tree-{name}-expected.gguf",
                        "--tolerance", "1e-4", "--device", "cpu")


class RecordedFiles(ProgramTest):
    """What a recorded file asks for: it may be long, and it may be wrong."""

    @staticmethod
    def floats(dims):
        return [dims, 0, bytes(4 * math.prod(dims))]

    @staticmethod
    def ints(values):
        return [[len(values)], 26, struct.pack(f"<{len(values)}i", *values)]

    def verify(self, model, expected, *arguments):
        return run("verify", "-m", model, "--expected", expected.save(temporary_folder(self), "expected.gguf"), "--device", "cpu", *arguments)

    def test_may_be_longer_than_a_thousand_tokens(self):
        reference, n = GgufCopy(DATA / "dflash-laguna-expected.gguf"), 1500
        reference.tensors["ids"] = self.ints([i % 200 for i in range(n)])
        for layer in (1, 3):
            dims, kind, data = reference.tensors[f"feature.{layer}"]
            reference.tensors[f"feature.{layer}"] = [[dims[0], n], kind, data * (n // dims[1])]
        reference.keys["anchors"] = (ARRAY, (U32, [5, 1490]))
        for part, dims in (("logits", [256, 6]), ("hidden", [64, 6])):
            reference.tensors[f"anchor.1490.{part}"] = self.floats(dims)
        result = self.verify(DATA / "laguna-f32.gguf", reference, "--draft", DATA / "dflash-laguna-f32.gguf")
        self.assertEqual(result.returncode, 9, result.stderr)
        self.assertIn("anchor.1490.logits", result.stdout)

    def test_of_the_next_token_block_may_have_more_rows_than_a_pass(self):
        reference, n = GgufCopy(DATA / "plankton-mtp-expected.gguf"), 10 * 39
        for name in ("ids", "hidden"):
            dims, kind, data = reference.tensors[name]
            reference.tensors[name] = [[*dims[:-1], n], kind, data * 10]
        reference.tensors["mtp.logits"] = self.floats([4096, n - 1])
        result = self.verify(MODEL, reference, "--draft", "mtp")
        self.assertEqual(result.returncode, 9, result.stderr)
        self.assertRegex(result.stdout, r"chain\.30\.ids .* 4 of 4")  # what comes before is as it was

    def test_of_a_tree_may_go_on_for_long(self):
        reference = GgufCopy(DATA / "tree-laguna-expected.gguf")
        reference.tensors["path.0.ids"] = self.ints([7] * 150)
        reference.tensors["path.0.logits"] = self.floats([256, 150])
        self.assertEqual(self.verify(DATA / "laguna-f32.gguf", reference).returncode, 9)

    def test_that_make_no_sense_are_refused_by_name(self):
        n = 14
        chain = [-1, *range(n - 1)]
        for tensor, values, words in (("tree.parents", [*chain[:-1], 99], "row 13 has parent 99"),
                                      ("tree.parents", [-5, *chain[1:]], "row 0 has parent -5"),
                                      ("tree.parents", chain[:-1], "14 tokens and 13 parents"),
                                      ("path.0.slots", [77], "row 77 is outside"),
                                      ("path.1.slots", [1, 0], "row 1 does not follow"),
                                      ("tree.tokens", [1] * 65, "at most 64")):
            with self.subTest(tensor=tensor, words=words):
                reference = GgufCopy(DATA / "tree-laguna-expected.gguf")
                reference.tensors[tensor] = self.ints(values)
                if tensor == "tree.tokens":
                    reference.tensors["tree.parents"] = self.ints([-1, *range(64)])
                result = self.verify(DATA / "laguna-f32.gguf", reference)
                self.assertEqual(result.returncode, MODEL_ERROR, result.stderr)
                self.assertIn("expected.gguf", result.stderr)
                self.assertIn(words, result.stderr)

    def test_that_are_constant_are_compared_by_their_size(self):
        # One token of a vocabulary of one has one logit, whatever came before it.
        model, reference = GgufCopy(DATA / "qwen3moe-f32.gguf"), GgufCopy(DATA / "qwen3moe-expected.gguf")
        for name in ("token_embd.weight", "output.weight"):
            dims, kind, data = model.tensors[name]
            model.tensors[name] = [[dims[0], 1], kind, data[:4 * dims[0]]]
        model.keys["qwen3moe.vocab_size"] = (U32, 1)
        path = model.save(temporary_folder(self), "one.gguf")
        reference.tensors = {"ids": self.ints([0] * 8), "logits": [[1, 8], 0, struct.pack("<8f", *[2.0] * 8)]}
        worst = self.verify(path, reference, "--json")
        errors = [e["relative"] for way in json.loads(worst.stdout)["ways"] for e in way["tensors"].values()]
        self.assertTrue(all(isinstance(error, float) for error in errors), errors)


class Refusals(ProgramTest):
    def test_of_what_makes_no_sense(self):
        for arguments in (["--draft", "16"], ["--draft", "auto", "--draft-budget", "0"],
                          ["--draft", "auto", "--draft-budget", "64"], ["--spec-type", "draft-simple"],
                          ["-hfd", "a/b"], ["--draft-budget", "x"], ["--draft", "-1"], ["--draft", ""],
                          ["--draft", "mtp", "--draft-max", "3", "--draft-min", "4"],
                          ["--draft", "mtp", "--draft-budget", "2", "--draft-min", "3"],
                          ["--draft", "mtp", "-md", DRAFTER], ["--draft", "lookup", "--spec-type", "draft-mtp"],
                          ["--spec-type", "ngram-whatever"], ["--spec-type", "ngram-mod,"], [MODEL, "--spec-type", "draft-dflash"],
                          ["--draft", "mtp", "--draft-budget", "7", "--draft-min", "5"]):
            with self.subTest(arguments=arguments):
                self.refusal(USAGE, "run", "--device", "cpu", "-p", "x", *arguments)

    def test_say_what_a_command_has_instead(self):
        for command, flag, words in (("run", "-td", "use -t for both"), ("run", "-cd", "use -c for both"), ("bench", "--spec-type", "`bench` have --draft"),
                                     ("tokenize", "-md", "`run`, `chat`, `serve`, `plan` and `bench`")):
            self.assertIn(words, self.refusal(USAGE, command, flag, "4"))

    def test_of_drafters_for_other_models(self):
        for name in ("dflash-qwen35-f32.gguf", "qwen35-f32.gguf", "missing.gguf"):
            with self.subTest(name=name):
                self.refusal(MODEL_ERROR, "run", "--device", "cpu", "-p", "x", "--draft", DATA / name)

    def test_of_mtp_without_the_block(self):
        self.refusal(USAGE, "bench", "-m", DATA / "laguna-f32.gguf", "--device", "cpu", "-n", "4", "-o", "json", "--draft", "mtp")

    def test_of_other_kinds_and_shapes(self):
        def eagle(gguf):
            gguf.put_string("general.architecture", b"eagle3")

        def dspark(gguf):
            gguf.put_string("general.architecture", b"dspark")

        def layers(gguf):
            gguf.put(gguf.values["dflash.target_layers"] + 12 + 8, "<i", 99)

        def width(gguf):
            gguf.put(gguf.values["dflash.embedding_length"], "<I", 512)

        def mask(gguf):
            gguf.put(gguf.values["tokenizer.ggml.mask_token_id"], "<I", 1 << 20)

        def shape(gguf):
            gguf.put(gguf.values["dflash.feed_forward_length"], "<I", 777)

        for change in (eagle, dspark, layers, width, mask, shape):
            with self.subTest(change=change.__name__):
                gguf = Gguf(DRAFTER)
                change(gguf)
                path = gguf.save(temporary_folder(self), "drafter.gguf")
                self.refusal(MODEL_ERROR, "run", "--device", "cpu", "-p", "x", "--draft", path)

    def test_of_a_damaged_drafter(self):
        damaged = Gguf(DRAFTER).data[:200000]
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(damaged)
            file.flush()
            self.refusal(MODEL_ERROR, "run", "--device", "cpu", "-p", "x", "--draft", file.name)


if __name__ == "__main__":
    unittest.main()
