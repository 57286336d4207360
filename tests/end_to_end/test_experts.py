"""Hot and cold experts as a user sees them: budgets, heat files, traces, the heat map, the sweep of bench.

Everything runs on the stand-in device, so it needs no GPU.
"""
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time

from harness import (DATA, MODEL, MODEL_ERROR, PROGRAM, ProgramTest, USAGE, clean_environment, run, temporary_folder)

SIM = ("--device", "sim")
ASK = ("run", "-p", "What is 17 + 25?", "--temp", "0", "--reasoning", "off", "-n", "16")
QUICK = ("bench", "-p", "24", "-n", "12", "-r", "2", "--no-bandwidth")
LAYERS, EXPERTS, ACTIVE = 8, 16, 4  # of the embedded model


def read_heat(path):
    """A reader of heat files written from docs/experts.md."""
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    assert data["format"] == "thermocline-heat" and data["version"] == 1
    assert len(data["heat"]) == data["n_layers"]
    return data


def read_trace(path, ended=True):
    """The events of a trace; one without an end is what a killed run leaves."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return json.loads(text if ended else text + "]")


def synth(folder, shape, *arguments):
    path = folder / (shape + ".gguf")
    result = run("synth", path, "--shape", shape, "-q", *arguments)
    assert result.returncode == 0, result.stderr
    return path


class Budgets(ProgramTest):
    def bench(self, *arguments):
        return json.loads(self.answer(*QUICK, *SIM, "-o", "json", *arguments))

    def test_logits_are_the_same_for_every_budget(self):
        for architecture in ("qwen35moe", "laguna", "qwen3moe"):
            for budget in ("0", "1%", "30%", "60%", "100%", "auto"):
                with self.subTest(architecture=architecture, budget=budget):
                    out = json.loads(self.answer(
                        "verify", "-m", DATA / f"{architecture}-f32.gguf", "--expected",
                        DATA / f"{architecture}-expected.gguf", "--tolerance", "1e-4", "--json", *SIM,
                        "--expert-cache", budget))
                    self.assertTrue(out["passed"])

    def test_logits_are_the_same_with_experts_in_the_file(self):
        for arguments in ((*SIM, "--expert-cache", "30%"), ("--device", "cpu")):
            for ram in ("0", "50%"):
                self.assertIn("the rest in the file",
                              self.answer("plan", DATA / "laguna-f32.gguf", *arguments, "--expert-ram", ram))
                out = json.loads(self.answer(
                    "verify", "-m", DATA / "laguna-f32.gguf", "--expected", DATA / "laguna-expected.gguf",
                    "--tolerance", "1e-4", "--json", *arguments, "--expert-ram", ram))
                self.assertTrue(out["passed"], (arguments, ram))

    def test_an_answer_says_where_the_experts_were(self):
        result = run(*ASK, *SIM, "--expert-cache", "60%")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("42", result.stdout)
        self.assertRegex(result.stderr, r"experts \d+\.\d % hot, \d+ moved")
        self.assertEqual(run(*ASK, *SIM, "--expert-cache", "60%", "-q").stderr, "")

    def test_a_budget_below_the_floor_is_said_and_works(self):
        result = run(*ASK, *SIM, "--expert-cache", "10%")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("42", result.stdout)
        self.assertRegex(result.stderr, r"for experts hold 1 of each layer, but it takes 8 or more")
        # Not even one expert.
        result = run(*ASK, *SIM, "--expert-cache", "1000")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("experts 0.0 % hot", result.stderr)

    def test_the_sweep_goes_from_nothing_to_everything(self):
        rows = self.bench("--sweep-expert-cache", "0,30-90+30,100", "--heat", "warm")
        self.assertEqual([r["expert_cache"] for r in rows[::2]], ["0%", "30%", "60%", "90%", "100%"])
        total = rows[0]["expert_total_bytes"]
        self.assertGreater(total, 1 << 20)
        for row in rows:
            share = int(row["expert_cache"].rstrip("%")) / 100
            self.assertLessEqual(row["expert_resident_bytes"], row["expert_cache_bytes"])
            self.assertAlmostEqual(row["expert_cache_bytes"] / total, share, places=5)
            self.assertEqual(row["backends"], "sim")
            self.assertGreater(row["avg_ts"], 0)
        for test in (0, 1):  # prompt, generation
            hits = [r["expert_hit_ratio"] for r in rows[test::2]]
            self.assertEqual((hits[0], hits[-1]), (0.0, 1.0))
            self.assertEqual(hits, sorted(hits))
            cold = lambda r: r["cpu_bytes_per_token"] + r["fetched_bytes_per_token"]  # dealt by measured times
            self.assertGreater(cold(rows[test]), 0)
            self.assertEqual(cold(rows[test - 2]), 0)
            self.assertEqual(rows[test - 2]["moe_stall_ns"], 0)
            self.assertEqual(rows[test - 2]["all_hot_ratio"], 1.0)

    def test_the_sweep_prints_a_table_and_csv(self):
        text = self.answer(*QUICK, *SIM, "--sweep-expert-cache", "--heat", "cold")
        header = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
        self.assertEqual(header[-6:], ["hot %", "moved", "cpu MiB/t", "link MiB/t", "disk MiB/t", "stall us/t"])
        shares = [line.split("|")[header.index("expert_cache") + 1].strip() for line in text.splitlines()[2:14]]
        self.assertEqual(shares[::2], ["0%", "20%", "40%", "60%", "80%", "100%"])
        rows = list(csv.DictReader(io.StringIO(self.answer(*QUICK, *SIM, "--sweep-expert-cache", "0,100", "--heat", "cold", "-o", "csv"))))
        self.assertEqual([r["expert_hit_ratio"] for r in rows], ["0.000000"] * 2 + ["1.000000"] * 2)

    def test_plain_runs_have_no_expert_columns(self):
        row = json.loads(self.answer(*QUICK, "--device", "cpu", "-o", "json"))[0]
        self.assertIsNone(row["expert_hit_ratio"])
        self.assertNotIn("hot %", self.answer(*QUICK, "--device", "cpu"))

    def test_llama_spellings_are_budgets(self):
        self.assertEqual(self.bench("-ncmoe", LAYERS)[0]["expert_hit_ratio"], 0.0)
        half = self.bench("-ncmoe", LAYERS // 2)[0]
        self.assertAlmostEqual(half["expert_cache_bytes"] / half["expert_total_bytes"], 0.5, places=4)
        self.assertEqual(half["n_cpu_moe"], LAYERS // 2)
        self.assertIn("experts 0.0 % hot", run(*ASK, *SIM, "-cmoe").stderr)
        self.assertIn("experts 0.0 % hot", run(*ASK, *SIM, "--n-cpu-moe", "99").stderr)
        self.assertIn("experts 100.0 % hot", run(*ASK, *SIM, env={"LLAMA_ARG_N_CPU_MOE": "0"}).stderr)

    def test_swaps_can_be_switched_off(self):
        self.assertGreater(sum(r["expert_moves"] for r in self.bench("--expert-cache", "60%", "--no-warmup")), 0)
        self.assertEqual(sum(r["expert_moves"] for r in self.bench("--expert-cache", "60%", "--no-expert-swaps")), 0)

    def test_ten_thousand_tokens_with_swaps_take_no_more_memory(self):
        # A prompt borrows slots and gives them back: experts move in every repetition.
        rows = json.loads(self.answer("bench", "-p", "0", "-n", "0", *("-pg", "40,10") * 4, "-r", "50", "--no-bandwidth", *SIM,
                                      "--expert-cache", "40%", "--heat", "warm", "-o", "json"))
        self.assertEqual([len(r["samples_ns"]) for r in rows], [50] * 4)
        for row in rows:
            self.assertGreater(row["expert_moves"], 50)
        # The first test touches everything; after it, a byte lost for each expert moved or token run would show.
        self.assertLess(rows[-1]["rss_peak_bytes"] - rows[0]["rss_peak_bytes"], 4 << 20)

    def test_pinned_layers_are_wholly_hot(self):
        row = self.bench("--expert-cache", "60%", "--pin-layers", "4", "--no-expert-swaps")[1]
        self.assertGreaterEqual(row["all_hot_ratio"], 0.5)
        row = self.bench("--expert-cache", "60%", "--no-expert-swaps")[1]
        self.assertLess(row["all_hot_ratio"], 0.5)

    def test_skewed_routing_hits_more_often(self):
        folder = temporary_folder(self)
        hits = []
        for skew in ("0", "0.7"):
            model = synth(folder, "qwen35moe-tiny", "--skew", skew, "--seed", "3")
            rows = json.loads(self.answer("bench", "-m", model, "-p", "0", "-n", "256", "-r", "2", "--no-bandwidth", *SIM,
                                          "--expert-cache", "40%", "-o", "json"))
            hits.append(rows[0]["expert_hit_ratio"])
        self.assertGreater(hits[1], hits[0] + 0.05)

    def test_the_plan_shows_the_budget(self):
        self.assertRegex(self.answer("plan", *SIM, "--expert-cache", "40%"), r"expert budget +5\.83 MiB   of 14\.56 MiB")
        plan = json.loads(self.answer("inspect", *SIM, "--expert-cache", "40%", "--json"))["plan"]
        self.assertIn("expert budget", [item["name"] for item in plan["device_items"]])
        self.assertIn("expert budget", self.answer("inspect", *SIM, "--expert-cache", "40%"))

    def test_a_cache_that_is_not_used_is_said(self):
        self.assertIn("no effect", run(*ASK, "--device", "cpu", "--expert-cache", "40%").stderr)
        self.assertNotIn("no effect", run(*ASK, "--device", "cpu").stderr)

    def test_a_dense_model_is_split_in_parts(self):
        dense = synth(temporary_folder(self), "qwen35-tiny")
        self.assertRegex(self.answer("plan", dense, *SIM, "--expert-cache", "50%"), r"FFN parts +[0-9.]+ KiB   of ")
        rows = json.loads(self.answer("bench", "-m", dense, "-p", "0", "-n", "16", "-r", "1", "--no-bandwidth", *SIM,
                                      "--expert-cache", "50%", "-o", "json"))
        self.assertEqual(len(rows), 1)
        self.assertAlmostEqual(rows[0]["expert_hit_ratio"], 0.5, delta=0.01)
        texts = {self.answer("verify", "-m", dense, "--tokens", "40", *SIM, "--expert-cache", share).splitlines()[-1]
                 for share in ("100%", "50%", "0")}
        self.assertEqual(len(texts), 1)


class HeatFiles(ProgramTest):
    def setUp(self):
        self.folder = temporary_folder(self)
        self.heat = self.folder / "model.heat"

    def ask(self, *arguments):
        result = run(*ASK, *SIM, "--expert-cache", "60%", "--heat-file", self.heat, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("42", result.stdout)
        return result.stderr

    def test_a_run_writes_one_and_the_next_goes_on_with_it(self):
        self.ask()
        first = read_heat(self.heat)
        self.assertEqual((first["architecture"], first["n_layers"], first["n_active"]), ("qwen35moe", LAYERS, ACTIVE))
        for layer in first["heat"]:
            self.assertEqual(len(layer), EXPERTS)
            # Every token uses the active experts once; a use loses half of its weight in 2048 tokens.
            self.assertAlmostEqual(sum(layer), ACTIVE * first["n_tokens"], delta=0.02 * ACTIVE * first["n_tokens"])
        self.ask()
        self.assertEqual(read_heat(self.heat)["n_tokens"], 2 * first["n_tokens"])
        self.assertEqual([p.name for p in self.folder.iterdir()], ["model.heat"])

    def test_every_device_counts_the_same(self):
        self.ask()
        other = self.folder / "cpu.heat"
        self.answer(*ASK, "--device", "cpu", "--heat-file", other)
        ours, theirs = read_heat(self.heat), read_heat(other)
        if ours["n_tokens"] == theirs["n_tokens"]:  # near ties may end an answer sooner
            near = sum(abs(a - b) for x, y in zip(ours["heat"], theirs["heat"]) for a, b in zip(x, y))
            self.assertLess(near, 0.1 * sum(map(sum, ours["heat"])))

    def test_a_file_of_another_model_is_named_and_left_alone(self):
        model = synth(self.folder, "qwen35moe-tiny")
        self.answer("experts", model, "-p", "a few words", "--heat-file", self.heat)
        before = self.heat.read_bytes()
        notes = self.ask()
        self.assertIn("another model", notes)
        self.assertIn("Synthetic qwen35moe-tiny", notes)
        self.assertIn("the embedded model", notes)
        self.assertEqual(self.heat.read_bytes(), before)

    def test_garbage_is_said_and_left_alone(self):
        good = None
        for content in (b"", b"garbage", b"{}", b"\x00\xff" * 1000, b'{"format": "thermocline-heat", "version": 9}', None):
            if content is None:
                self.heat.unlink()
                self.ask()
                good = self.heat.read_bytes()
                content = good[:len(good) // 2]
            self.heat.write_bytes(content)
            notes = self.ask()
            self.assertIn(str(self.heat), notes)
            self.assertEqual(self.heat.read_bytes(), content)

    def test_a_hot_file_gives_better_hits_from_the_start(self):
        bench = (*QUICK, *SIM, "--expert-cache", "40%", "--no-expert-swaps", "--no-warmup", "-o", "json")
        cold = json.loads(self.answer(*bench))
        self.answer("experts", "--heat-file", self.heat, "-p", " ".join(["water and fish in the lake"] * 20))
        for row in cold:
            self.assertEqual(row["heat_state"], "cold")
        warm = json.loads(self.answer(*bench, "--heat-file", self.heat))
        self.assertEqual(warm[0]["heat_state"], str(self.heat))
        self.assertGreater(sum(r["expert_hit_ratio"] for r in warm), sum(r["expert_hit_ratio"] for r in cold))

    def test_bench_begins_cold_and_warm(self):
        bench = (*QUICK, *SIM, "--expert-cache", "40%", "-o", "json")
        states = lambda *more: [r["heat_state"] for r in json.loads(self.answer(*bench, *more)) if r["n_gen"] > 0]
        self.assertEqual(states(), ["cold", "warm"])
        self.assertEqual(states("--heat", "warm"), ["warm"])
        self.assertEqual(states("--heat", "warm,cold"), ["warm", "cold"])
        self.assertEqual(states("--no-warmup"), ["cold"])
        self.assertIn("cold, warm", self.refusal(USAGE, *bench, "--heat", "tepid"))
        self.assertIn("--heat-file", self.refusal(USAGE, *bench, "--heat", "cold", "--heat-file", self.heat))

    def test_a_path_that_cannot_be_written_is_refused_before_loading(self):
        self.assertIn("--heat-file", self.refusal(USAGE, *ASK, "--heat-file", "/nowhere/x.heat"))
        self.assertIn("folder", self.refusal(USAGE, *ASK, "--heat-file", self.folder))


class KeptHeat(ProgramTest):
    """Heat that is kept without being asked for, in the user's cache folder."""

    def setUp(self):
        self.folder = temporary_folder(self)
        self.cache = self.folder / "cache"

    def ask(self, *arguments, model=MODEL):
        question = ("run", model, "-p", "Water and fish in the lake. " * 8, "--temp", "0", "-n", "48", "--ignore-eos",
                    *SIM, "--expert-cache", "40%", "--no-expert-swaps")
        result = run(*question, *arguments, env={"XDG_CACHE_HOME": str(self.cache)})
        self.assertEqual(result.returncode, 0, result.stderr)
        return float(re.search(r"experts ([0-9.]+) % hot", result.stderr)[1]), result.stdout

    def files(self):
        folder = self.cache / "thermocline/heat"
        return sorted(folder.iterdir()) if folder.exists() else []

    def test_the_second_start_is_warm(self):
        cold, text = self.ask()
        warm, again = self.ask()
        self.assertEqual(again, text)
        self.assertGreater(warm, cold + 5)
        # As warm as a start from a heat file that was asked for.
        asked = self.folder / "asked.heat"
        self.ask("--heat-file", asked)
        self.assertEqual(self.ask("--heat-file", asked)[0], warm)
        self.assertEqual(len(self.files()), 1)

    def test_it_is_found_by_what_the_model_is(self):
        self.ask()
        other = self.folder / "renamed.gguf"
        shutil.copy(MODEL, other)
        before = read_heat(self.files()[0])["n_tokens"]
        self.ask(model=other)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(read_heat(self.files()[0])["n_tokens"], 2 * before)
        for seed in (1, 2):
            model = self.folder / f"{seed}.gguf"
            self.answer("synth", model, "--shape", "qwen35moe-tiny", "--seed", seed)
            self.answer("bench", "-m", model, *QUICK[1:], env={"XDG_CACHE_HOME": str(self.cache)})
        self.assertEqual(len(self.files()), 1, "bench keeps no heat")

    def test_nothing_is_kept_when_it_is_off(self):
        cold, _ = self.ask("--no-heat-file")
        self.assertEqual(self.files(), [])
        self.ask()
        self.assertEqual(self.ask("--no-heat-file")[0], cold)

    def test_a_damaged_file_is_begun_anew_and_a_folder_that_is_none_is_no_error(self):
        self.ask()
        self.files()[0].write_text("garbage")
        self.ask()
        self.assertGreater(read_heat(self.files()[0])["n_tokens"], 0)
        self.cache = self.folder / "no folder"
        self.cache.write_text("")
        self.ask()

    def test_bench_and_perplexity_begin_the_same_whatever_was_run(self):
        bench = ("bench", *QUICK[1:], *SIM, "--expert-cache", "40%", "--no-expert-swaps", "--heat", "cold", "-o", "json")
        env = {"XDG_CACHE_HOME": str(self.cache)}
        hits = lambda: [r["expert_hit_ratio"] for r in json.loads(self.answer(*bench, env=env))]
        before = hits()
        self.ask()
        self.assertEqual(hits(), before)

    def test_chat_and_serve_keep_it_too(self):
        run("chat", "--temp", "0", stdin="What is 17 + 25?\n", env={"XDG_CACHE_HOME": str(self.cache)})
        self.assertEqual(len(self.files()), 1)


class Traces(ProgramTest):
    def setUp(self):
        self.path = temporary_folder(self) / "trace.json"

    def test_shows_the_lanes_of_a_split_run(self):
        self.answer(*ASK, *SIM, "--expert-cache", "40%", "--trace", self.path)
        events = read_trace(self.path)
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.assertEqual(list(lanes.values()), ["step", "device", "cpu", "fetch", "copy", "disk"])
        for step in (e for e in events if e["ph"] == "X" and e["tid"] == 0):
            self.assertEqual({"rows", "off_core_us", "worker_off_core_us", "preempted", "disk_faults"}, set(step["args"]))
            for key in ("off_core_us", "worker_off_core_us"):
                self.assertLessEqual(step["args"][key], step["dur"] + 1)
        used = {lanes[e["tid"]] for e in events if e["ph"] == "X"}
        self.assertTrue({"step", "device", "cpu", "copy"} <= used, used)
        for event in events:
            if event["ph"] != "X":
                continue
            self.assertGreaterEqual(event["dur"], 0)
            self.assertLess(event["dur"], 60e6)
            if "layer" in event.get("args", {}):
                self.assertIn(event["args"]["layer"], range(LAYERS))

    def test_shows_reads_from_the_file(self):
        model = synth(temporary_folder(self), "qwen35moe-tiny", "--quant", "Q8_0")
        rows = json.loads(self.answer(*QUICK, "-m", model, "--device", "cpu", "--expert-ram", "50%", "-o", "json", "--trace",
                                      self.path))
        self.assertGreater(rows[0]["disk_bytes_per_token"], 0)
        self.assertIn(5, {e["tid"] for e in read_trace(self.path) if e["ph"] == "X"})

    def test_is_readable_after_a_kill(self):
        process = subprocess.Popen([PROGRAM, "bench", "-p", "0", "-n", "2000", "-r", "1000", "--no-bandwidth", *SIM,
                                    "--expert-cache", "40%", "--trace", str(self.path)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=clean_environment())
        try:
            for _ in range(300):
                time.sleep(0.1)
                if self.path.exists() and self.path.stat().st_size > 100_000:
                    break
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        # Written in whole lines, but the kill may cut the last one.
        text = self.path.read_text()
        events = json.loads(text[:text.rindex("},\n") + 1] + "]")
        self.assertGreater(len(events), 500)

    def test_a_path_that_cannot_be_written_is_refused_before_loading(self):
        self.assertIn("--trace", self.refusal(USAGE, *ASK, "--trace", "/nowhere/x.json"))
        if os.geteuid() != 0:
            self.assertIn("--trace", self.refusal(USAGE, *ASK, "--trace", "/proc/x.json"))


class HeatMaps(ProgramTest):
    UTF8 = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}

    def test_draws_a_line_for_each_layer(self):
        lines = self.answer("experts", "--expert-cache", "40%", env=self.UTF8).splitlines()
        self.assertIn("qwen35moe", lines[0])
        self.assertIn("1024 tokens", lines[1])
        self.assertRegex(lines[2], r"51 of 128 experts, at least 6 in a layer\): \d+\.\d % of the uses are hot")
        rows = [line for line in lines if re.match(r" +\d+ [ ░▒▓█]{16} ", line)]
        self.assertEqual(len(rows), LAYERS)
        for row in rows:
            top10, top25, top50, entropy, hot = map(float, row[23:].split())
            self.assertTrue(10 <= top10 <= top25 <= top50 <= 100, row)
            self.assertTrue(0 < entropy <= 1, row)
            self.assertTrue(30 <= hot <= 100, row)
        self.assertTrue(any("mean" in line for line in lines))

    def test_is_plain_where_the_terminal_is(self):
        text = self.answer("experts", "--tokens", "64", env={"LANG": "C", "LC_ALL": "C"})
        self.assertTrue(text.isascii())
        self.assertNotIn("\x1b", self.answer("experts", "--tokens", "64", env=self.UTF8))
        self.assertIn("\x1b[3", self.answer("experts", "--tokens", "64", "--color", "always", env=self.UTF8))

    def test_json_has_every_number(self):
        out = json.loads(self.answer("experts", "--tokens", "100", "--expert-cache", "30%", "--json"))
        self.assertEqual((out["n_layers"], out["n_active"], out["n_tokens"]), (LAYERS, ACTIVE, 100))
        cache = out["expert_cache"]
        self.assertLessEqual(cache["hot_bytes"], cache["budget_bytes"])
        self.assertEqual(cache["n_hot"], sum(len(layer["hot"]) for layer in out["layers"]))
        for layer in out["layers"]:
            heat = sorted(layer["heat"], reverse=True)
            self.assertEqual(layer["n_used"], sum(h > 0 for h in heat))
            self.assertAlmostEqual(layer["top50"], sum(heat[:8]) / sum(heat), places=5)
            hottest = sorted(range(EXPERTS), key=lambda e: (-layer["heat"][e], e))
            self.assertEqual(layer["hot"], hottest[:len(layer["hot"])])

    def test_lists_a_layer(self):
        text = self.answer("experts", "--tokens", "64", "--layer", "3", "--top", "5", "--expert-cache", "20%")
        rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
        self.assertEqual([int(r[0]) for r in rows], [1, 2, 3, 4, 5])
        heat = [float(r[2]) for r in rows]
        self.assertEqual(heat, sorted(heat, reverse=True))
        self.assertEqual({r[-1] for r in rows}, {"hot", "cold"})

    def test_sorts(self):
        order = " .:*#"[::-1]
        for line in self.answer("experts", "--sort", env={"LANG": "C", "LC_ALL": "C"}).splitlines():
            if re.match(r" +\d+ [#*:. ]{16} ", line):
                marks = [order.index(c) for c in line[6:22]]
                self.assertEqual(marks, sorted(marks), line)

    def test_shows_a_saved_file_without_the_model(self):
        folder = temporary_folder(self)
        heat = folder / "saved.heat"
        live = json.loads(self.answer("experts", "--tokens", "200", "--heat-file", heat, "-p", "fish and water " * 90,
                                      "--json"))
        saved = json.loads(self.answer("experts", "--heat-file", heat, "--json"))
        self.assertEqual(saved["n_tokens"], 200)
        for a, b in zip(live["layers"], saved["layers"]):
            for x, y in zip(a["heat"], b["heat"]):
                self.assertAlmostEqual(x, y, delta=1e-4 * max(1, x))
        self.assertIn("hot", self.answer("experts", "--heat-file", heat, "--expert-cache", "40%"))
        # A size means something only together with a model.
        self.assertIn("-m", run("experts", "--heat-file", heat, "--expert-cache", "4M").stderr)
        self.assertIn("of the uses are hot", self.answer("experts", MODEL, "--heat-file", heat, "--expert-cache", "4M"))

    def test_reads_files_and_models_without_a_vocabulary(self):
        folder = temporary_folder(self)
        text = folder / "text.txt"
        text.write_text("The lake is deep and the water is cold. " * 20)
        for shape in ("qwen35moe-tiny", "qwen3moe-tiny", "laguna-tiny"):
            model = synth(folder, shape)
            for device in ("sim", "cpu"):
                out = json.loads(self.answer("experts", model, "-f", text, "--device", device, "--json"))
                self.assertGreater(out["n_tokens"], 100)
                self.assertEqual(out["source"], str(text))
        self.assertIn("dense", self.answer("experts", model))  # laguna begins with a dense layer

    def test_reads_texts_longer_than_the_context(self):
        out = json.loads(self.answer("experts", "-c", "64", "--tokens", "300", "--json"))
        self.assertEqual(out["n_tokens"], 300)

    def test_refuses_what_it_cannot_show(self):
        folder = temporary_folder(self)
        dense = synth(folder, "qwen35-tiny")
        self.assertIn("no experts", self.refusal(MODEL_ERROR, "experts", dense))
        self.assertIn("cannot be read", self.refusal(USAGE, "experts", "--heat-file", folder / "missing.heat"))
        (folder / "bad.heat").write_text("garbage")
        self.assertIn("not a heat file", self.refusal(USAGE, "experts", "--heat-file", folder / "bad.heat"))
        self.assertIn("0 to 7", self.refusal(USAGE, "experts", "--tokens", "8", "--layer", "8"))
        self.assertIn("exclude", self.refusal(USAGE, "experts", "-p", "x", "-f", "y"))
        self.assertIn("empty", self.refusal(USAGE, "experts", "-p", ""))
        moe = synth(folder, "qwen35moe-tiny")
        self.answer("experts", moe, "-p", "words", "--heat-file", folder / "moe.heat")
        line = self.refusal(USAGE, "experts", MODEL, "--heat-file", folder / "moe.heat")
        self.assertIn("Synthetic qwen35moe-tiny", line)
        self.assertIn("another model", line)
        laguna = synth(folder, "laguna-tiny")
        self.assertIn("dense", self.refusal(USAGE, "experts", laguna, "--layer", "0"))


class Refusals(ProgramTest):
    def test_budgets_that_are_none(self):
        for option in ("--expert-cache", "--expert-ram"):
            for value in ("150%", "-5%", "-4G", "much", "", "nan%", "1e99G"):
                with self.subTest(option=option, value=value):
                    line = self.refusal(USAGE, *ASK, f"{option}={value}")
                    self.assertIn(option, line)
                    self.assertIn("expected", line)
        for value in ("-1", "x", "99999999"):
            self.assertIn("--pin-layers", self.refusal(USAGE, *ASK, f"--pin-layers={value}"))
            self.assertIn("--n-cpu-moe", self.refusal(USAGE, *ASK, f"--n-cpu-moe={value}"))

    def test_the_sweep_takes_shares(self):
        for value in ("150", "-1", "x", "0,", "20-10"):
            result = run(*QUICK, *SIM, f"--sweep-expert-cache={value}")
            self.assertEqual(result.returncode, USAGE, result.stderr)
            self.assertIn("--sweep-expert-cache", result.stderr.splitlines()[-1])

    def test_three_words_for_one_thing(self):
        self.assertIn("one of them", self.refusal(USAGE, *ASK, "--expert-cache", "1G", "-cmoe"))
        self.assertIn("one of them", self.refusal(USAGE, *ASK, "-ncmoe", "3", "-cmoe"))
        result = run(*QUICK, "--sweep-expert-cache", "--trace", "/tmp/never-written.json")
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("--trace", result.stderr)
        result = run(*QUICK, "--expert-cache", "1G", "--sweep-expert-cache")
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("one of them", result.stderr)

    def test_options_of_others_have_advice(self):
        self.assertIn("--expert-cache", self.refusal(USAGE, *ASK, "-ot", "exps=CPU"))
        self.assertIn("auto, static", self.refusal(USAGE, *ASK, "--expert-policy", "lru"))


class Settings(ProgramTest):
    def test_come_from_the_environment_and_the_file(self):
        folder = temporary_folder(self)
        config = folder / "config.toml"
        config.write_text('[experts]\nexpert_cache = "40%"\nexpert-ram = "auto"\nexpert_swaps = false\npin_layers = 2\n'
                          f'heat_file = "{folder}/x.heat"\n')
        printed = self.answer("run", "-p", "x", "--config", config, "--print-config",
                              env={"THERMO_EXPERT_RAM": "50%", "LLAMA_ARG_CPU_MOE": "off"})
        for line in ('expert-cache = "40%"', 'expert-ram = "50%"', "expert-swaps = false", "pin-layers = 2",
                     "heat-file = "):
            self.assertIn(line, printed)
        config.write_text('expert_cache = "150%"\n')
        self.assertIn("config.toml:1", self.refusal(USAGE, "run", "-p", "x", "--config", config))

    def test_are_in_the_help_and_the_completions(self):
        self.assertIn("experts", self.answer("help"))
        for command in ("run", "chat", "verify", "bench", "plan", "inspect", "experts"):
            text = self.answer(command, "--help-all")
            for option in ("--expert-cache", "--expert-ram", "--pin-layers", "--expert-swaps", "--heat-file", "--trace",
                           "--n-cpu-moe"):
                self.assertIn(option, text, command)
        for shell in ("bash", "zsh", "fish"):
            script = self.answer("completion", shell)
            for word in ("experts", "expert-cache", "sweep-expert-cache"):
                self.assertIn(word, script)


if __name__ == "__main__":
    import unittest
    unittest.main()
