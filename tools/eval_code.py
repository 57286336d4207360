#!/usr/bin/env python3
"""How many code problems a served model solves: pass@1, and how fast it was.

    thermocline serve -m MODEL.gguf &
    tools/eval_code.py --execute                                   # twenty small problems of our own
    tools/eval_code.py HumanEval.jsonl --execute --clients 8 --url http://127.0.0.1:8080
    tools/eval_code.py HumanEval.jsonl --answers answers.jsonl     # only asks; any other judge can run them

Problems are in HumanEval's format: one JSON object to a line with task_id, prompt, entry_point and test. --execute runs what
the model wrote, each answer in a process of its own that may use so much time and memory, start no process, reach no network
and change no file (see run_answer.py). Python's own library only.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

import run_answer

HERE = pathlib.Path(__file__).resolve().parent
OWN_PROBLEMS = HERE / "code_problems.jsonl"
QUESTION = "Complete this Python function. Answer with the whole function in one Python code block.\n\n```python\n{prompt}\n```"
TIMEOUTS = (-24, -9)  # SIGXCPU, and SIGKILL after it
STOPS = ["\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("]


class Client:
    """One connection after the other to a server of the OpenAI API."""

    def __init__(self, url, key=""):
        parts = urllib.parse.urlsplit(url)
        self.kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.port, self.prefix = parts.hostname, parts.port, parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def open(self, method, path, body=None, timeout=3600):
        connection = self.kind(self.host, self.port, timeout=timeout)
        connection.request(method, self.prefix + path, None if body is None else json.dumps(body).encode(), self.headers)
        return connection, connection.getresponse()

    def get(self, path):
        """JSON, or None where there is none."""
        try:
            connection, reply = self.open("GET", path, timeout=30)
            text = reply.read()
            connection.close()
            return json.loads(text) if reply.status == 200 else None
        except (OSError, ValueError):
            return None

    def stream(self, path, body):
        """The text of an answer, and what was measured."""
        start = time.monotonic()
        connection, reply = self.open("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {reply.read(500).decode(errors='replace')}")
        text, first, n_events, usage, timings, finish = "", None, 0, {}, {}, ""
        for raw in reply:
            if not raw.startswith(b"data: ") or raw.startswith(b"data: [DONE]"):
                continue
            event = json.loads(raw[6:])
            if "error" in event:
                raise RuntimeError(f"{path}: {event['error']}")
            usage, timings = event.get("usage") or usage, event.get("timings") or timings
            for choice in event.get("choices", []):
                delta = choice.get("delta", {})
                piece = choice.get("text") or delta.get("content") or ""
                if piece or delta.get("reasoning_content"):
                    n_events += 1
                    first = first if first is not None else time.monotonic() - start
                text += piece
                finish = choice.get("finish_reason") or finish
        connection.close()
        return {"text": text, "first_token_s": first, "seconds": time.monotonic() - start, "finish": finish,
                "tokens": usage.get("completion_tokens", n_events), "drafted": timings.get("draft_n", 0),
                "accepted": timings.get("draft_n_accepted", 0)}


def code_of(problem, text, mode):
    """The program that an answer means: its function, with what the problem begins with."""
    prompt = problem["prompt"]
    if mode == "completion":
        return prompt + text
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    definition = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(problem['entry_point'])}\b", re.MULTILINE)
    whole = [block for block in blocks + [text] if definition.search(block)]
    if not whole:
        return prompt + (blocks[0] if blocks else text)
    head = prompt[:definition.search(prompt).start()] if definition.search(prompt) else ""  # imports and helpers
    return head + "\n" + whole[0]


def test_of(problem):
    """What the judge runs: the helpers in the prompt, which tests call, too, and the test."""
    for prompt in (problem["prompt"], problem["prompt"] + "\n    pass\n", ""):  # a function without a body is completed
        with contextlib.suppress(SyntaxError, ValueError):
            compile(prompt, "prompt", "exec")
            return f"{prompt}\n\n{problem['test']}\n"


def start(role, folder, limits, name, code, **pipes):
    """A process of run_answer.py. It reads its code before anything else."""
    process = subprocess.Popen([sys.executable, "-I", "-B", str(HERE / "run_answer.py"), role, *map(str, limits), name,
                                *map(str, pipes.get("pass_fds", ()))], stdin=subprocess.PIPE, cwd=folder, env={}, start_new_session=True, **pipes)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(code).encode() + b"\n")
        process.stdin.flush()
    return process


def execute(problem, code, seconds, memory):
    """"passed", or why not: "failed", "timeout", "memory", "not judged" (the test passes a function something that is no data)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        limits, name = (seconds, memory), problem["entry_point"]
        answer = stack.enter_context(start("answer", folder, limits, name, code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        stack.callback(answer.kill)
        judge = stack.enter_context(start("judge", folder, limits, name, test_of(problem), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                          pass_fds=(answer.stdout.fileno(), answer.stdin.fileno())))
        stack.callback(judge.kill)
        answer.stdin.close()  # the judge has them now
        answer.stdout.close()
        try:
            verdict = judge.wait(timeout=seconds + 1)
            if verdict == run_answer.ENDED:
                verdict = answer.wait(timeout=seconds + 1)
                verdict = verdict if verdict in (run_answer.MEMORY, *TIMEOUTS) else run_answer.FAILED
        except subprocess.TimeoutExpired:
            return "timeout"
    return {run_answer.PASSED: "passed", run_answer.MEMORY: "memory", run_answer.UNFIT: "not judged",
            **dict.fromkeys(TIMEOUTS, "timeout")}.get(verdict, "failed")


def ask(client, problem, options):
    sampling = {"temperature": options.temperature, "seed": options.seed, "max_tokens": options.max_tokens, "model": options.model}
    if options.mode == "completion":
        return client.stream("/v1/completions", {**sampling, "prompt": problem["prompt"], "stop": STOPS})
    turns = [{"role": "user", "content": QUESTION.format(prompt=problem["prompt"].rstrip())}]
    return client.stream("/v1/chat/completions", {**sampling, "messages": turns, **options.extra})


def solve(client, problem, options):
    result = {"task_id": problem["task_id"], "result": "not run"}
    try:
        result.update(ask(client, problem, options))
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        return {**result, "result": "no answer", "error": str(error), "text": ""}
    result["code"] = code_of(problem, result["text"], options.mode)
    if options.execute:
        result["result"] = execute(problem, result["code"], options.time, options.memory << 20)
    return result


def expert_uses(client):
    """(uses of hot experts, all uses) so far; None where the server does not say."""
    experts = client.get("/thermo/experts")
    if not experts or "uses" not in experts:
        return None
    uses = experts["uses"]
    return uses.get("device", 0), sum(uses.values())


def summary_of(results, seconds, before, after):
    done = [r for r in results if r["result"] != "no answer"]
    first = [r["first_token_s"] for r in done if r["first_token_s"] is not None]
    executed = any("code" in r and r["result"] != "not run" for r in results)
    drafted, accepted = (sum(r.get(name, 0) for r in done) for name in ("drafted", "accepted"))
    uses = after[1] - before[1] if before and after else 0
    return {"problems": len(results), "errors": len(results) - len(done),
            "pass_at_1": sum(r["result"] == "passed" for r in results) / len(results) if executed else None,
            "tokens": sum(r["tokens"] for r in done), "seconds": seconds, "tokens_per_s": sum(r["tokens"] for r in done) / max(seconds, 1e-9),
            "first_token_ms_p50": 1e3 * statistics.median(first) if first else None, "first_token_ms_max": 1e3 * max(first) if first else None,
            "acceptance": accepted / drafted if drafted else None, "hot_share": (after[0] - before[0]) / uses if uses else None,
            "results": {name: sum(r["result"] == name for r in results) for name in sorted({r["result"] for r in results})}}


def show(summary):
    def number(name, scale=1.0, digits=3, unit=""):
        return "n/a" if summary[name] is None else f"{summary[name] * scale:.{digits}f}{unit}"
    print(f"pass@1       {number('pass_at_1')}  ({', '.join(f'{n} {name}' for name, n in summary['results'].items())})")
    print(f"tokens/s     {number('tokens_per_s', digits=1)}  ({summary['tokens']} tokens in {summary['seconds']:.1f} s)")
    print(f"first token  {number('first_token_ms_p50', digits=0, unit=' ms')}  (longest {number('first_token_ms_max', digits=0, unit=' ms')})")
    print(f"acceptance   {number('acceptance', 100, 1, ' %')}")
    print(f"hot share    {number('hot_share', 100, 1, ' %')}")


def json_object(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="?", default=str(OWN_PROBLEMS), help="file of problems (default: our own)")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="", help="API key")
    parser.add_argument("--model", default="default", help="name sent to the server")
    parser.add_argument("--clients", type=int, default=1, help="problems asked at once")
    parser.add_argument("--limit", type=int, default=0, help="only the first N problems")
    parser.add_argument("--mode", choices=["chat", "completion"], default="chat", help="ask for the function, or let the prompt be continued")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--extra", type=json_object, default={}, metavar="JSON", help="more members of a chat request")
    parser.add_argument("--execute", action="store_true", help="run what the model wrote")
    parser.add_argument("--time", type=int, default=10, help="seconds that an answer may run")
    parser.add_argument("--memory", type=int, default=512, help="MiB that it may use")
    parser.add_argument("--answers", help="write the answers here, one JSON object to a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.clients, options.time, options.memory) < 1 or options.limit < 0:
        parser.error("--clients, --time and --memory are at least 1, and --limit at least 0")
    if options.execute and (sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64")):
        parser.error("--execute needs Linux on x86-64 or arm64: answers cannot be held to limits here")
    return options


def read_problems(path):
    """Raises ValueError for a line that is no problem."""
    problems = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                problem = json_object(line)
            except ValueError:
                problem = {}
            if not all(isinstance(problem.get(name), str) for name in ("task_id", "prompt", "entry_point", "test")):
                raise ValueError(f"{path}:{number}: an object with task_id, prompt, entry_point and test was expected")
            problems.append(problem)
    return problems


def main(arguments=None):
    options = parse_options(arguments)
    client, results = Client(options.url, options.key), []
    with contextlib.ExitStack() as stack:
        try:  # before hours of work
            problems = read_problems(options.problems)[:options.limit or None]
            answers = stack.enter_context(open(options.answers, "w", encoding="utf-8")) if options.answers else None
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        before, start = expert_uses(client), time.monotonic()
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(options.clients))
        for result in pool.map(lambda problem: solve(client, problem, options), problems):
            results.append(result)
            if answers:
                answers.write(json.dumps({**result, "completion": result.get("code", "")}) + "\n")
                answers.flush()
    summary = summary_of(results, time.monotonic() - start, before, expert_uses(client))
    if options.json:
        print(json.dumps({**summary, "tasks": {r["task_id"]: r["result"] for r in results}}, indent=2))
    else:
        show(summary)
    if summary["errors"] == len(results):
        print(f"error: no problem was answered; is a server at {options.url}? {results[0].get('error', '') if results else ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
