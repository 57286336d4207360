"""Model files as other converters write them: they run and give the same text, or one sentence says why not."""
import json
import unittest

from gguf_copy import ARRAY, BOOL, F32, I32, STRING, U32, GgufCopy
from harness import DATA, MODEL_ERROR, ProgramTest, temporary_folder

SUM = ("-p", "What is 17 + 25?", "--temp", "0")


class Variants(ProgramTest):
    def setUp(self):
        self.folder = temporary_folder(self)

    def adds_up(self, file):
        self.assertEqual(self.answer("run", file.save(self.folder, "model.gguf"), *SUM).strip(), "17 + 25 is 42.")

    def test_runs_with_the_pre_tokenizer_of_qwen3(self):
        file = GgufCopy()
        file.keys["tokenizer.ggml.pre"] = (STRING, b"qwen2")
        self.adds_up(file)

    def test_ignores_special_tokens_that_there_are_not(self):
        file = GgufCopy()
        file.keys["tokenizer.ggml.padding_token_id"] = (I32, -1)
        file.keys["tokenizer.ggml.bos_token_id"] = (U32, 1 << 20)
        self.adds_up(file)

    def test_takes_the_usual_head_where_the_file_names_none(self):
        file = GgufCopy()
        for key in ("key_length", "value_length"):
            del file.keys[f"qwen35moe.attention.{key}"]
        self.adds_up(file)

    def verify(self, name, change):
        file = GgufCopy(DATA / f"{name}-f32.gguf")
        change(file.keys)
        path = file.save(self.folder, "variant.gguf")
        self.answer("verify", "-m", path, "--expected", DATA / f"{name}-expected.gguf", "--tolerance", "1e-4")

    def test_reads_key_heads_layer_by_layer(self):
        self.verify("qwen35moe", lambda keys: keys.update(
            {"qwen35moe.attention.head_count_kv": (ARRAY, (I32, [0, 0, 0, 2]))}))
        file = GgufCopy(DATA / "qwen35moe-f32.gguf")
        file.keys["qwen35moe.attention.head_count_kv"] = (ARRAY, (I32, [0, 0, 4, 2]))
        line = self.refusal(MODEL_ERROR, "plan", file.save(self.folder, "two.gguf"))
        self.assertIn("head_count_kv is 2 in one layer and 4 in another", line)

    def test_reads_windows_layer_by_layer(self):
        self.verify("laguna", lambda keys: keys.update(
            {"laguna.attention.sliding_window_pattern": (ARRAY, (BOOL, [False, True, True, True, False]))}))

    def verify_in_floats(self, file):
        out = json.loads(self.answer("verify", "-m", file.save(self.folder, "variant.gguf"), "--tokens", "30", "--json"))
        self.assertEqual(out["compared_with"], "a float evaluation of the same weights")

    # Lists of each layer that are no integers were an error of `verify` alone.
    def test_evaluates_in_floats_whatever_a_file_lists_of_each_layer(self):
        self.answer("synth", self.folder / "laguna.gguf", "--shape", "laguna-tiny")
        file = GgufCopy(self.folder / "laguna.gguf")
        types = [b"full_attention"] + [b"sliding_attention"] * 3 + [b"full_attention"]
        file.keys["laguna.attention.layer_types"] = (ARRAY, (STRING, types))
        file.keys["laguna.dense_layers"] = (ARRAY, (I32, [0]))
        self.verify_in_floats(file)
        file = GgufCopy()  # its next-token block is left out
        n_blocks = file.keys["qwen35moe.block_count"][1]
        file.keys["qwen35moe.remarks"] = (ARRAY, (F32, [0.5] * n_blocks))
        self.verify_in_floats(file)

    def test_says_so_where_a_model_gives_no_numbers(self):
        file = GgufCopy()
        down = file.tensors["blk.2.ffn_down_exps.weight"]
        down[2] = b"\xff" * len(down[2])
        path = file.save(self.folder, "damaged.gguf")
        for options in ((), ("--temp", "1"), ("--draft", "mtp"), ("--device", "sim", "--expert-cache", "40%")):
            with self.subTest(options=options):
                self.assertIn("weights are damaged", self.refusal(MODEL_ERROR, "run", path, *SUM, *options))


if __name__ == "__main__":
    unittest.main()
