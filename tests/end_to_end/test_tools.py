#!/usr/bin/env python3
"""synth, inspect, verify and bench, driven as a user would. Needs THERMOCLINE, the path of the program."""

import csv
import io
import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import tempfile
import time
import unittest

from harness import PROGRAM, SANITIZED, clean_environment

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "tests", "data")
MODELS = os.path.join(ROOT, "models")

SHAPES = ["qwen35moe-tiny", "qwen35-tiny", "laguna-tiny", "qwen3moe-tiny"]
QUANTS = ["Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q3_K_M", "Q2_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
          "IQ4_NL", "IQ4_XS", "MXFP4", "F16", "BF16", "F32"]
ISAS = ["portable", "avx2", "avxvnni", "avx512", "amx"]
ENVIRONMENT = clean_environment()

# The fields of llama-bench, in its order, then ours.
LLAMA_FIELDS = """build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
    model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode
    main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides load_mode embeddings no_op_offload
    no_host fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts""".split()
OUR_FIELDS = """n_parallel text_source heat_state expert_cache_bytes experts_hot expert_hit_ratio expert_moves
    bytes_h2d cpu_busy_ratio gpu_busy_ratio moe_stall_ns drafter accept_len vram_peak_bytes rss_peak_bytes
    power_avg_watts joules_per_token p50_ns p99_ns output_sha256 bytes_per_token read_gb_s bandwidth_gb_s
    bandwidth_share""".split()


def run(*arguments, code=0):
    """Runs the program and checks its exit code; returns stdout."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    if done.returncode != code:
        raise AssertionError(f"{arguments}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return done.stdout if code == 0 or done.stdout else done.stderr


def failure(*arguments, code):
    """The last line on stderr of a run that must fail."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    if done.returncode != code:
        raise AssertionError(f"{arguments}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return done.stderr.strip().splitlines()[-1]


def available_isas():
    found = []
    for isa in ISAS:
        done = subprocess.run([PROGRAM, "verify", "-m", os.path.join(DATA, "qwen35-f32.gguf"), "--isa", isa, "--tokens",
                               "4", "--tolerance", "1e9"], capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            found.append(isa)
        elif done.returncode != 6:
            raise AssertionError(f"--isa {isa}: exit {done.returncode}\n{done.stderr}")
    return found


def gguf(metadata, tensors):
    """A GGUF file: metadata of strings, tensors as (name, dims, type id, bytes)."""
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + struct.pack("<I", 8) + text(value)
    data = b""
    for name, dims, type_id, payload in tensors:
        head += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", type_id, len(data))
        data += payload + b"\0" * (-len(payload) % 32)
    return head + b"\0" * (-len(head) % 32) + data


class ToolsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="thermocline-tools-")
        cls.models = {}
        for shape in SHAPES:
            cls.models[shape] = os.path.join(cls.folder, shape + ".gguf")
            run("synth", cls.models[shape], "--shape", shape)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as out:
            out.write(data)
        return self.path(name)


class SynthTest(ToolsTest):
    def test_every_shape_and_type_loads_and_agrees_with_itself(self):
        for i, shape in enumerate(SHAPES):
            # Under a sanitizer every type with one shape: its kernels are the same in all.
            for quant in QUANTS[i::len(SHAPES)] if SANITIZED else QUANTS:
                with self.subTest(shape=shape, quant=quant):
                    out = self.path("model.gguf")
                    summary = json.loads(run("synth", out, "--shape", shape, "--quant", quant, "--seed", 3, "--json"))
                    facts = json.loads(run("inspect", out, "--json"))
                    self.assertTrue(facts["runnable"])
                    self.assertEqual(facts["warnings"], [])
                    self.assertEqual(facts["n_tensors"], summary["n_tensors"])
                    self.assertEqual(facts["n_params"], summary["n_params"])
                    self.assertEqual(facts["tensor_bytes"], summary["tensor_bytes"])
                    self.assertEqual(facts["file_type"], quant)
                    self.check_ways(out, quant.endswith(("F16", "F32")))

    def check_ways(self, model, is_float):
        """A quantised model agrees with the floats of its own weights as far as rounding activations lets it, and all ways give the
        same bits on the processor."""
        out = json.loads(run("verify", "-m", model, "--tokens", 70, "--chunks", "7,64", "--json"))
        self.assertTrue(out["passed"], out)
        self.assertEqual(out["compared_with"], "each other" if is_float else "a float evaluation of the same weights")
        for way in out["ways"]:
            self.assertEqual("tensors" in way, not is_float or way["name"] == "draft trees", way)
            if way["name"] != "token by token":
                self.assertEqual(way["from_token_by_token"]["largest"], 0, way)

    def test_the_bound_of_rounding_is_near_what_rounding_does(self):
        out = json.loads(run("verify", "-m", os.path.join(MODELS, "plankton-q4_k_m.gguf"), "--tokens", 20, "--json"))
        rms = [out["ways"][0]["tensors"][f"hidden.{k}"] for k in range(1, 9)]
        for error in rms:  # a bound that is never met would find nothing
            self.assertEqual(error["judged_by"], "rms")
            self.assertGreater(error["rms"], error["allowed"] / 8)
            self.assertLess(error["rms"], error["allowed"])

    def test_same_seed_same_file_whatever_the_threads(self):
        files = []
        for name, threads, seed in [("a", 1, 5), ("b", 3, 5), ("c", 1, 6)]:
            run("synth", self.path(name), "--shape", "qwen35moe-tiny", "-t", threads, "--seed", seed)
            with open(self.path(name), "rb") as f:
                files.append(f.read())
        self.assertEqual(files[0], files[1])
        self.assertNotEqual(files[0], files[2])

    def test_options_change_the_file(self):
        out = self.path("model.gguf")
        run("synth", out, "--shape", "qwen35moe-tiny", "--layers", 3, "--vocab", 1024, "--context", "4K", "--nextn",
            "--skew", 0.7)
        config = json.loads(run("inspect", out, "--json"))["config"]
        self.assertEqual((config["n_layer"], config["n_nextn"], config["n_vocab"], config["n_ctx_train"]),
                         (3, 1, 1024, 4096))
        self.check_ways(out, False)

    def test_refuses_what_makes_no_sense(self):
        out = self.path("x.gguf")
        self.assertIn("--shape", failure("synth", out, code=2))
        self.assertIn("OUT", failure("synth", "--shape", "qwen35-tiny", code=2))
        self.assertIn("shape", failure("synth", out, "--shape", "gpt", code=2))
        self.assertIn("layers", failure("synth", out, "--shape", "qwen35-tiny", "--layers", 99, code=2))
        self.assertIn("experts", failure("synth", out, "--shape", "qwen35-tiny", "--skew", 0.5, code=2))
        self.assertIn("next-token", failure("synth", out, "--shape", "laguna-tiny", "--nextn", code=2))
        self.assertIn("cannot write", failure("synth", self.path("nothing/x.gguf"), "--shape", "qwen35-tiny", code=2))
        self.assertFalse(os.path.exists(out))
        self.assertFalse(os.path.exists(out + ".partial"))

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_says_when_the_disk_is_too_small(self):
        self.assertIn("not a regular file", failure("synth", "/dev/full", "--shape", "qwen35-tiny", code=2))
        free = shutil.disk_usage(self.folder).free
        if free < 400e9:  # otherwise the large one might fit
            message = failure("synth", self.path("big.gguf"), "--shape", "qwen35-27b", "--quant", "F32", "--vocab", "16384K",
                              code=2)
            self.assertIn("free some space", message)


class InspectTest(ToolsTest):
    def test_shows_every_part_of_a_model(self):
        text = run("inspect", self.models["qwen35moe-tiny"], "--tensors", "--metadata")
        for word in ["qwen35moe", "routed experts", "shared expert", "DeltaNet", "router", "Memory plan",
                     "blk.0.ffn_down_exps.weight", "qwen35moe.ssm.state_size"]:
            self.assertIn(word, text)
        kinds = {k["kind"]: k for k in json.loads(run("inspect", self.models["laguna-tiny"], "--json"))["kinds"]}
        self.assertEqual(set(kinds), {"embedding", "attention", "router", "routed experts", "shared expert", "dense FFN",
                                      "norms", "output"})

    def test_shows_the_embedded_model_and_its_template(self):
        facts = json.loads(run("inspect", "--json"))
        self.assertTrue(facts["runnable"] and facts["has_chat_template"])
        self.assertEqual(facts["tokenizer"]["pre"], "qwen35")
        self.assertIn("next-token block", [k["kind"] for k in facts["kinds"]])
        self.assertGreater(facts["plan"]["total_bytes"], 0)
        self.assertIn("<|im_start|>", run("inspect", "--template"))

    def test_shows_files_that_are_no_models_we_run(self):
        for path in [os.path.join(MODELS, "plankton-draft-q8_0.gguf"), os.path.join(DATA, "laguna-expected.gguf")]:
            facts = json.loads(run("inspect", path, "--json"))
            self.assertFalse(facts["runnable"])
            self.assertNotIn("plan", facts)
            self.assertGreater(len(facts["tensors"]), 0)
            self.assertIn("Metadata", run("inspect", path))

    def test_refuses_what_is_no_gguf_file(self):
        self.assertIn("nothing", failure("inspect", self.path("nothing"), code=3))
        failure("inspect", self.write("noise", b"noise" * 100), code=3)
        self.assertIn("chat template", failure("inspect", self.models["qwen35-tiny"], "--template", code=3))


class VerifyTest(ToolsTest):
    def test_references_agree_on_every_code_path(self):
        isas = available_isas()
        self.assertIn("portable", isas)
        for i, name in enumerate(["qwen35moe", "qwen35", "laguna", "qwen3moe"]):
            for k, isa in enumerate(isas):
                # Under a sanitizer each instruction set reads repacked weights for every other model, and the file for the others.
                for repack in ["--repack", "--no-repack"][(i + k) % 2::2] if SANITIZED else ["--repack", "--no-repack"]:
                    with self.subTest(name=name, isa=isa, repack=repack):
                        out = json.loads(run("verify", "-m", os.path.join(DATA, name + "-f32.gguf"), "--expected",
                                             os.path.join(DATA, name + "-expected.gguf"), "--tolerance", 1e-4, "--isa",
                                             isa, repack, "--json"))
                        self.assertTrue(out["passed"])
                        self.assertEqual(out["isa"], isa)
                        ways = {w["name"]: w for w in out["ways"]}
                        self.assertEqual(set(ways), {"token by token", "at once", "chunks of 7", "chunks of 63",
                                                     "chunks of 64", "chunks of 65", "with another", "draft trees"})
                        for way in ways.values():
                            self.assertEqual(way["argmax_equal"], 100)
                        self.assertIn("hidden.0", ways["at once"]["tensors"])
                        self.assertIn("branches", ways["draft trees"]["tensors"])

    def test_plankton_agrees_with_its_full_precision_reference(self):
        out = json.loads(run("verify", "-m", os.path.join(MODELS, "plankton-q4_k_m.gguf"), "--expected",
                             os.path.join(DATA, "plankton-expected.gguf"), "--tolerance", 2, "--json"))
        for way in out["ways"]:
            self.assertGreaterEqual(way["argmax_equal"], 37)

    def test_past_the_tolerance_it_exits_with_9(self):
        arguments = ["verify", "-m", os.path.join(DATA, "qwen35-f32.gguf"), "--expected",
                     os.path.join(DATA, "qwen35-expected.gguf")]
        self.assertIn("FAILED", run(*arguments, "--tolerance", 1e-9, code=9))
        self.assertIn("passed", run(*arguments))
        # A cache of eight bits is further off than rounding.
        self.assertFalse(json.loads(run(*arguments, "-ctk", "q8_0", "-ctv", "q8_0", "--json", "--tolerance", 1e-4,
                                        code=9))["passed"])

    def test_refuses_a_wrong_reference(self):
        model = os.path.join(DATA, "qwen35-f32.gguf")  # 256 tokens, 64 wide, 4 layers

        def message(tensors):
            path = self.write("reference.gguf", gguf({"general.architecture": "expected"}, tensors))
            return failure("verify", "-m", model, "--expected", path, code=3)

        ids = ("ids", [2], 26, struct.pack("<2i", 1, 2))
        logits = ("logits", [256, 2], 0, bytes(4 * 512))
        self.assertIn("ids", message([logits]))
        self.assertIn("logits", message([ids]))
        self.assertIn("ids", message([("ids", [2], 0, bytes(8)), logits]))
        self.assertIn("256", message([("ids", [2], 26, struct.pack("<2i", 1, 256)), logits]))
        self.assertIn("ids[0] is -1", message([("ids", [2], 26, struct.pack("<2i", -1, 2)), logits]))
        self.assertIn("logits", message([ids, ("logits", [256, 3], 0, bytes(4 * 768))]))
        self.assertIn("not numbers", message([ids, ("logits", [256, 2], 0, struct.pack("<f", float("nan")) * 512)]))
        self.assertIn("hidden.1", message([ids, logits, ("hidden.0", [64, 2], 0, bytes(512))]))
        self.assertIn("hidden.0", message([ids, logits, ("hidden.0", [32, 2], 0, bytes(256))]))
        self.assertIn("hidden.5", message([ids, logits] + [(f"hidden.{k}", [64, 2], 0, bytes(512)) for k in range(6)]))
        self.assertIn("logits", failure("verify", "-m", model, "--expected",
                                        os.path.join(DATA, "plankton-expected.gguf"), code=3)
                      .replace("ids", "logits"))
        self.assertIn("missing", failure("verify", "-m", model, "--expected", self.path("missing.gguf"), code=3))

    def test_a_damaged_reference_is_an_error_and_never_a_crash(self):
        with open(os.path.join(DATA, "qwen35-expected.gguf"), "rb") as f:
            good = f.read()
        model = os.path.join(DATA, "qwen35-f32.gguf")
        for cut in [0, 3, 24, 100, 400, len(good) // 2, len(good) - 1]:
            with self.subTest(cut=cut):
                failure("verify", "-m", model, "--expected", self.write("cut.gguf", good[:cut]), code=3)

    def test_refuses_options_that_make_no_sense(self):
        model = self.models["qwen35-tiny"]
        failure("verify", "-m", model, "--chunks", "0", code=2)
        failure("verify", "-m", model, "--chunks", "7,x", code=2)
        self.assertIn("-c", failure("verify", "-m", model, "-c", 20, code=2))


class BenchTest(ToolsTest):
    QUICK = ["-p", "16", "-n", "4", "-r", "2", "--no-warmup", "--no-bandwidth"]

    def bench(self, *arguments, shape="qwen35moe-tiny", code=0):
        return run("bench", "-m", self.models[shape], *self.QUICK, *arguments, code=code)

    def test_json_has_the_fields_of_llama_bench_and_ours(self):
        for shape in SHAPES:
            rows = json.loads(self.bench("-pg", "8,2", "-d", "0,32", "-o", "json", shape=shape))
            self.assertEqual([(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows],
                             [(16, 0, 0), (0, 4, 0), (8, 2, 0), (16, 0, 32), (0, 4, 32), (8, 2, 32)])
            for row in rows:
                self.assertEqual(list(row)[:len(LLAMA_FIELDS)], LLAMA_FIELDS)
                self.assertEqual([f for f in row if f in OUR_FIELDS], OUR_FIELDS)
                self.assertEqual(len(row["samples_ns"]), 2)
                self.assertGreater(row["avg_ts"], 0)
                self.assertAlmostEqual(row["samples_ts"][0],
                                       (row["n_prompt"] + row["n_gen"]) / row["samples_ns"][0] * 1e9, delta=1e-3 *
                                       row["samples_ts"][0])
                self.assertEqual(row["read_gb_s"] is None, row["n_prompt"] > 0)
                self.assertEqual(len(row["output_sha256"]), 64)
                self.assertEqual(row["text_source"], "builtin (words)")

    def test_same_work_same_fingerprint(self):
        first, second = (json.loads(self.bench("-o", "json")) for _ in range(2))
        self.assertEqual([r["output_sha256"] for r in first], [r["output_sha256"] for r in second])

    def test_several_sequences_in_a_step(self):
        for shape in SHAPES:
            rows = json.loads(self.bench("--parallel", "1,3", "-d", "0,8", "-o", "json", shape=shape))
            rows = [row for row in rows if row["n_gen"] > 0]
            self.assertEqual([(r["n_parallel"], r["n_gen"], r["n_depth"]) for r in rows], [(1, 4, 0), (3, 4, 0), (1, 4, 8), (3, 4, 8)])
            for row in rows:
                self.assertAlmostEqual(row["samples_ts"][0] * row["samples_ns"][0] * 1e-9, 4 * row["n_parallel"], places=3)
        self.assertIn("tg4 x 3", self.bench("--parallel", "3"))

    def test_csv_sql_and_json_lines_parse(self):
        rows = list(csv.reader(io.StringIO(self.bench("-o", "csv"))))
        self.assertEqual(rows[0][:len(LLAMA_FIELDS)], LLAMA_FIELDS)
        self.assertEqual(rows[0][len(LLAMA_FIELDS):len(LLAMA_FIELDS) + len(OUR_FIELDS)], OUR_FIELDS)
        self.assertEqual([len(r) for r in rows], [len(rows[0])] * 3)
        database = sqlite3.connect(":memory:")
        database.executescript(self.bench("-o", "sql"))
        self.assertEqual(database.execute("SELECT n_prompt, n_gen FROM test").fetchall(), [(16, 0), (0, 4)])
        lines = [json.loads(line) for line in self.bench("-o", "jsonl").splitlines()]
        self.assertEqual(len(lines), 2)

    def test_markdown_shows_what_was_chosen(self):
        text = self.bench("-t", "1,2", "-ctk", "q8_0", "--text", "random")
        header = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
        self.assertEqual(header[:5], ["model", "size", "params", "backend", "ngl"])
        self.assertEqual(header[-4:], ["test", "t/s", "GB/s", "% of read bw"])
        self.assertIn("threads", header)
        self.assertIn("type_k", header)
        self.assertIn("text", header)
        self.assertEqual(sum(1 for line in text.splitlines() if "tg4" in line), 2)
        self.assertIn("±", text)
        self.assertTrue(text.rstrip().splitlines()[-1].startswith("build: "))

    def test_takes_options_of_llama_bench(self):
        table = run("bench", *self.QUICK, "--progress", "-lm", "mmap,none", "--no-bandwidth")
        self.assertIn("load_mode", table)
        rows = json.loads(run("bench", *self.QUICK, "-lm", "mmap,none", "-o", "json", "--no-bandwidth"))
        self.assertEqual({row["load_mode"] for row in rows}, {"mmap", "none"})

    def test_measures_the_share_of_the_read_bandwidth(self):
        rows = json.loads(run("bench", "-m", self.models["qwen35-tiny"], "-p", 0, "-n", 4, "-r", 1, "-t", 1, "-o", "json"))
        self.assertGreater(rows[0]["bandwidth_gb_s"], 0.1)
        if rows[0]["bandwidth_share"] is not None:  # it is where the caches are smaller than this model
            self.assertAlmostEqual(rows[0]["bandwidth_share"], rows[0]["read_gb_s"] / rows[0]["bandwidth_gb_s"], places=4)

    def test_the_embedded_model_reads_real_text(self):
        rows = json.loads(run("bench", *self.QUICK, "-o", "json", "--check"))
        self.assertEqual([r["text_source"] for r in rows], ["builtin", "builtin"])
        text = self.write("text.txt", b"A text of our own. " * 10)
        rows = json.loads(run("bench", *self.QUICK, "-o", "json", "--text", text))
        self.assertEqual(rows[0]["text_source"], text)

    def test_compares_with_an_earlier_run(self):
        before = self.write("before.json", self.bench("-o", "json").encode())
        self.assertIn("ratio", self.bench("--compare", before))
        self.bench("--compare", before, "--fail-below", "0.000001")
        self.assertIn("--fail-below", failure("bench", "-m", self.models["qwen35moe-tiny"], *self.QUICK, "--compare",
                                              before, "--fail-below", 1000, code=9))
        failure("bench", "-m", self.models["qwen35moe-tiny"], *self.QUICK, "--compare", self.write("bad", b"{]"), code=2)

    def test_stays_valid_json_when_interrupted(self):
        with open(self.path("interrupted.json"), "w+") as out:
            process = subprocess.Popen([PROGRAM, "bench", "-m", self.models["qwen35moe-tiny"], "-p", "8", "-n", "100",
                                        "-r", "1", "-d", "0-1900+2", "--no-bandwidth", "-o", "json"], stdout=out,
                                       stderr=subprocess.PIPE, text=True)
            while out.tell() == 0 and process.poll() is None:  # the first bytes are there: the tests are running
                time.sleep(0.1)
                out.seek(0, os.SEEK_END)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, notes = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 130, notes)
            out.seek(0)
            self.assertIsInstance(json.load(out), list)

    def test_refuses_what_it_cannot_do(self):
        model = self.models["qwen35-tiny"]
        for arguments in [["-p", "x"], ["-p", "0", "-n", "0"], ["-p", "4-1"], ["-pg", "5"], ["-o", "xml"], ["-ctk", "q3"],
                          ["-np", "0"], ["--concurrency", "4"], ["--spec-type", "dflash"], ["-ncmoe", "x"], ["--expert-cache", "150%"],
                          ["--fail-below", "0.9"], ["--isa", "sse9"]]:
            with self.subTest(arguments=arguments):
                failure("bench", "-m", model, *arguments, code=2)
        run("bench", "-m", model, *self.QUICK, "-ngl", 0, "-fa", 1, "-np", 1, "-ncmoe", 0)
        self.assertIn("no-such-file", failure("bench", "-m", model, "--text", self.path("no-such-file"), code=2))


if __name__ == "__main__":
    unittest.main()
