#!/usr/bin/env python3
"""Text with drafts against text without, over 200 prompts: code, chat, arithmetic, tool calls and free text.

Every drafter and budget, greedy and with a seed. On the processor all texts must be equal. A full run takes hours on two cores;
--prompts and --budgets make it shorter.

    tests/draft_parity.py [--program build/bin/thermocline] [--model FILE --drafter FILE] [--device cpu] [--prompts 200]
"""
import argparse
import itertools
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOUNS = ["list", "string", "number", "file", "tree", "word", "date", "matrix", "queue", "name"]
VERBS = ["sorts", "reverses", "counts", "prints"]
TOPICS = ["the sea", "a lighthouse", "winter", "a small town", "the moon", "bread", "a river", "old maps", "bees", "rain"]
TOOLS = ('<tools>{"name": "get_weather", "parameters": {"city": "string"}}\n{"name": "search", "parameters": {"query": "string"}}'
         "</tools>\nCall a tool. ")


def prompts():
    pairs = list(itertools.product(VERBS, NOUNS))
    code = [f"Write a Python function that {verb} a {noun}." for verb, noun in pairs]
    chat = [f"{start} {topic}?" for topic in TOPICS for start in ("What do you know about", "Why do people like",
                                                                 "How would you describe", "What is special about")]
    sums = [f"What is {7 * i + 3} {'+-*'[i % 3]} {5 * i + 2}?" for i in range(40)]
    tools = [TOOLS + f"{ask} {topic}." for topic in TOPICS for ask in ("Search for", "What is the weather near",
                                                                      "Find news about", "Look up")]
    free = [f"{ask} {topic}." for topic in TOPICS for ask in ("Tell me a story about", "Write a poem about",
                                                             "Write a letter about", "Describe")]
    # One of each kind in turn, so that a short run sees all of them.
    return [prompt for five in zip(code, chat, sums, tools, free) for prompt in five]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/bin/thermocline"))
    parser.add_argument("--model", default="")
    parser.add_argument("--drafter", default=str(ROOT / "models/plankton-draft-q8_0.gguf"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--budgets", default="1,7,16,63")
    parser.add_argument("-n", type=int, default=96)
    options = parser.parse_args()

    def text(prompt, sampling, *draft):
        command = [options.program, "run", "--quiet", "--device", options.device, "-p", prompt, "-n", str(options.n), *sampling, *draft]
        if options.model:
            command += ["-m", options.model]
        return subprocess.run(command, capture_output=True, check=True).stdout

    n_texts = n_different = 0
    for i, prompt in enumerate(prompts()[:options.prompts]):
        for sampling in (["--temp", "0"], ["--temp", "0.8", "--seed", str(i)]):
            plain = text(prompt, sampling, "--draft", "none")
            for who, budget in itertools.product(("lookup", "mtp", options.drafter), options.budgets.split(",")):
                n_texts += 1
                if text(prompt, sampling, "--draft", who, "--draft-budget", budget) != plain:
                    n_different += 1
                    print(f"differs: {who} budget {budget} {' '.join(sampling)}: {prompt}", flush=True)
    print(f"{n_texts} texts, {n_different} differ")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
