#!/usr/bin/env python3
"""`bench --url` against `serve`, and `serve` with a synthetic model that has a vocabulary."""
import csv
import io
import json
import sqlite3
import unittest

from harness import ProgramTest, run, temporary_folder
from server_harness import Server


class BenchUrl(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--parallel", "4", "--max-queue", "64", "-c", "1024")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def bench(self, *arguments, url=None):
        return self.answer("bench", "--url", url or self.server.url, "-p", 64, "-n", 16, "-r", 2, *arguments)

    def test_measures_clients_through_every_api(self):
        for dialect in ("chat", "completions", "responses", "messages"):
            rows = json.loads(self.bench("--concurrency", "1,6", "--dialect", dialect, "-o", "json"))
            self.assertEqual([r["concurrency"] for r in rows], [1, 6])
            for row in rows:
                with self.subTest(dialect=dialect, clients=row["concurrency"]):
                    self.assertEqual((row["errors"], row["error"], row["model"]), (0, "", "plankton"))
                    self.assertEqual(row["n_requests"], 2 * row["concurrency"])
                    self.assertEqual(row["out_tokens"], 16 * row["n_requests"])
                    self.assertEqual(row["tokens_counted_by"], "usage")
                    self.assertTrue(32 <= row["prompt_tokens"] <= 128, row["prompt_tokens"])
                    self.assertAlmostEqual(row["out_ts"], row["out_tokens"] / row["seconds"], delta=0.01 * row["out_ts"])
                    for name in ("ttft", "itl", "e2e"):
                        self.assertTrue(row[f"{name}_ms_p50"] <= row[f"{name}_ms_p90"] <= row[f"{name}_ms_p99"], row)
                    self.assertGreater(row["ttft_ms_p50"], 0)
                    self.assertGreaterEqual(row["itl_ms_p50"], 0)  # nothing passes between tokens that are read at once
                    self.assertLess(row["ttft_ms_p50"], row["e2e_ms_p50"])

    def test_writes_the_formats_of_bench(self):
        table = self.bench("--concurrency", "2").splitlines()
        self.assertIn("first p50 ms", table[0])
        self.assertIn("pp64+tg16", table[2])
        rows = list(csv.DictReader(io.StringIO(self.bench("--concurrency", "1,2", "-o", "csv"))))
        self.assertEqual([r["concurrency"] for r in rows], ["1", "2"])
        database = sqlite3.connect(":memory:")
        database.executescript(self.bench("-o", "sql"))
        self.assertEqual(database.execute("SELECT concurrency, errors FROM test").fetchall(), [(1, 0)])
        before = temporary_folder(self) / "before.json"
        before.write_text(self.bench("-o", "json"))
        self.assertIn("ratio", self.bench("--compare", before, "-o", "json"))
        self.assertRegex(self.bench("--compare", before).splitlines()[2], r"\| +\d+\.\d{3} \|$")
        before.write_text(self.bench("--rate", 100, "-o", "json"))
        self.assertIsNone(json.loads(self.bench("--rate", 50, "--compare", before, "-o", "json"))[0]["ratio"])

    def test_sends_prompts_of_a_file_at_a_rate(self):
        prompts = temporary_folder(self) / "prompts.jsonl"
        lines = [f"What is {i} + {i}?" for i in range(10)] + [json.dumps({"prompt": "Say hello.", "max_tokens": 5})]
        prompts.write_text("\n".join(lines))
        for more, clients in ((), None), (("--concurrency", 2), 2):
            row = json.loads(self.answer("bench", "--url", self.server.url, "-n", 12, "--rate", 40, "--prompts", prompts,
                                         "-o", "json", *more))[0]
            self.assertEqual((row["errors"], row["n_requests"], row["out_tokens"]), (0, 11, 10 * 12 + 5))
            self.assertEqual((row["rate"], row["concurrency"], row["n_prompt"]), (40, clients, None))
            self.assertGreater(row["seconds"], 0.08)  # eleven at 40 a second
        self.assertIn("file+tg12", self.answer("bench", "--url", self.server.url, "-n", 12, "--prompts", prompts))
        row = json.loads(self.bench("--rate", 100, "-r", 7, "-o", "json"))[0]
        self.assertEqual(row["n_requests"], 7)
        for options in (["-p", 5, "--prompts", prompts], ["--prompts", "/nowhere"], ["--rate", "-1"]):
            self.refusal(2, "bench", "--url", self.server.url, *options)
        self.refusal(2, "bench", "--rate", 3)

    def test_says_what_is_wrong(self):
        self.assertIn("is a server there", self.refusal_of("http://127.0.0.1:1"))
        self.refusal(2, "bench", "--url", self.server.url, "-m", "model.gguf")
        self.refusal(2, "bench", "--url", self.server.url, "--dialect", "morse")
        self.refusal(2, "bench", "--url", self.server.url, "--concurrency", "0")

    def refusal_of(self, url):
        return self.refusal(2, "bench", "--url", url, "-n", 4)

    def test_counts_errors(self):
        # One is answered and one waits: of twelve who begin together others are sent away.
        with Server("--parallel", "1", "--max-queue", "1", "-c", "2048") as server:
            row = json.loads(self.bench("--concurrency", "12", "-o", "json", "-n", "1500", "-r", "1", url=server.url))[0]
            self.assertGreater(row["errors"], 0)
            self.assertRegex(row["error"], r"^status 503 \(.*try again later\)$")
        long = run("bench", "--url", self.server.url, "-p", "5000", "-n", "4", "-r", "2")
        self.assertRegex(long.stderr, r"2 of 2 requests failed, the last one with: status 400 \(.*maximum context length")
        with Server("--api-key", "secret", "-c", "1024") as server:
            self.refusal(2, "bench", "--url", server.url)
            self.bench("--api-key", "secret", url=server.url)


class Synthetic(ProgramTest):
    def test_serves_a_synthetic_model_with_text(self):
        model = temporary_folder(self) / "model.gguf"
        self.answer("synth", model, "--shape", "qwen35moe-tiny", "--vocab", 20000, "--text")
        with Server("-m", model, "--parallel", "2", "-c", "512") as server:
            row = json.loads(self.answer("bench", "--url", server.url, "--concurrency", 2, "-p", 64, "-n", 16, "-r", 1, "-o", "json"))[0]
            self.assertEqual((row["errors"], row["out_tokens"]), (0, 32))
        self.refusal(2, "synth", model, "--shape", "qwen35moe-tiny", "--vocab", 64, "--text")


if __name__ == "__main__":
    unittest.main()
