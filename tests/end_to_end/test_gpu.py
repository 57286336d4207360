"""A build with CUDA: with a card it answers as the processor does; without one it says so and goes on.

CUDA_VISIBLE_DEVICES hides every card, so the second half runs on any machine.
"""
import json
import os
import unittest

from gguf_copy import U32, GgufCopy
from harness import DATA, DEVICE, MODEL, ProgramTest, USAGE, run, temporary_folder

NO_CARD = {"CUDA_VISIBLE_DEVICES": "-1"}
ASK = ("run", MODEL, "--temp", "0", "-p")
# The model was made for these and is sure of every token; elsewhere two tokens may be closer than rounding.
QUESTIONS = ("What is 17 + 25?", "What is the capital of France?", "What is the opposite of hot?",
             "Write a Python function for the greatest common divisor.")

HAS_CUDA = os.environ.get("CUDA_BUILD") == "1"
HAS_CARD = HAS_CUDA and run(*ASK, "hello", "-n", "1", "--device", "cuda:0").returncode == 0


@unittest.skipUnless(HAS_CUDA, "this build has no CUDA")
class WithoutACard(ProgramTest):
    def test_auto_says_so_and_uses_the_processor(self):
        result = run(*ASK, QUESTIONS[0], "--device", "auto", env=NO_CARD)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, self.answer(*ASK, QUESTIONS[0], "--device", "cpu"))
        self.assertIn("no usable GPU", result.stderr)
        self.assertIn("the CPU does everything", result.stderr)

    def test_the_processor_needs_no_word_about_cards(self):
        self.assertNotIn("GPU", run(*ASK, QUESTIONS[0], "--device", "cpu", env=NO_CARD).stderr)

    def test_a_card_that_was_asked_for_is_missed(self):
        for command in ((*ASK, "hello"), ("plan", MODEL), ("bench", "-m", MODEL, "-p", "8", "-n", "0"),
                        ("verify", "-m", DATA / "qwen35-f32.gguf", "--expected", DATA / "qwen35-expected.gguf")):
            for device in ("cuda:0", "cuda:7", "cuda"):
                line = self.refusal(DEVICE, *command, "--device", device, env=NO_CARD)
                self.assertIn(f"GPU {7 if device == 'cuda:7' else 0} cannot be used", line)
                self.assertIn("--device cpu", line)

    def test_a_model_without_kernels_for_the_card_is_planned_for_the_processor(self):
        file = GgufCopy()  # with every expert three times
        file.keys |= {"qwen35moe.expert_count": (U32, 48), "qwen35moe.expert_used_count": (U32, 33)}
        for name, (dims, kind, data) in file.tensors.items():
            if "_exps." in name or "ffn_gate_inp.weight" in name:
                file.tensors[name] = [(*dims[:-1], 3 * dims[-1]), kind, 3 * data]
        path = file.save(temporary_folder(self), "model.gguf")
        for command in (("plan", path, "--gpu-memory", "8G"), ("run", path, "-p", "hello", "-n", "1")):
            result = run(*command, env=NO_CARD)
            self.assertEqual(result.returncode, 0, result.stderr)
            if command[0] == "plan":
                self.assertIn("the number of used experts is 33, the GPU engine has kernels for up to 32; "
                              "the CPU does everything", result.stdout + result.stderr)

    def test_what_is_no_device_is_a_usage_error(self):
        for device in ("cuda:x", "cuda:-1", "vulkan"):
            self.assertIn(device, self.refusal(USAGE, *ASK, "hello", "--device", device, env=NO_CARD))


@unittest.skipUnless(HAS_CARD, "there is no usable GPU")
class WithACard(ProgramTest):
    def test_greedy_text_is_the_processors(self):
        for question in QUESTIONS:
            command = (*ASK, question, "-n", "48")
            self.assertEqual(self.answer(*command, "--device", "cuda:0"), self.answer(*command, "--device", "cpu"))

    def test_the_bench_knows_the_share_of_the_bandwidth(self):
        text = self.answer("bench", "-m", MODEL, "-p", "0", "-n", "16", "-r", "2", "-o", "json", "--device", "cuda:0")
        row = json.loads(text)[0]
        self.assertEqual(row["backends"], "CUDA")
        self.assertGreater(row["bandwidth_gb_s"], 100)
        self.assertTrue(0 < row["bandwidth_share"] < 1, row["bandwidth_share"])


if __name__ == "__main__":
    unittest.main()
