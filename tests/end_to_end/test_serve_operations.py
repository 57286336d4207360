#!/usr/bin/env python3
"""What an operator sees of `serve`: metrics, the live view, heat."""
import base64
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import metrics_format
from harness import PROGRAM, SANITIZED, clean_environment
from server_harness import ENDLESS, PATIENCE, WEATHER, WIDE, Server, ask, wait_until

SUM = ask("What is 17 + 25?")
ROUTER = {"thermocline_requests_waiting", "thermocline_requests_running", "thermocline_kv_cache_usage_ratio", "thermocline_cache_config_info"}


def heat_of(path):
    heat = json.loads(pathlib.Path(path).read_text())
    assert heat["format"] == "thermocline-heat"
    return heat["n_tokens"]


class Start(unittest.TestCase):
    def test_warms_up_unseen(self):
        for option in ("--warmup", "--no-warmup"):
            with Server(option, "-c", "512") as server:
                _, samples = metrics_format.parse(server.get("/metrics"))
                counted = {name: value for name, _, value in samples}
                self.assertEqual([value for name, _, value in samples if name == "thermocline_steps_total"], [0, 0, 0, 0])
                self.assertEqual(counted["thermocline_prefix_cache_tokens"], 0)
                self.assertEqual("warmed up" in server.logged(), option == "--warmup")
                # The first request waits for no memory.
                server.post("/v1/chat/completions", SUM)

                def kept():
                    _, samples = metrics_format.parse(server.get("/metrics"))
                    values = {name: value for name, _, value in samples}
                    done = values["thermocline_prefix_cache_tokens"] > 0 and values["thermocline_prefix_cache_uncopied_tokens"] == 0
                    return values if done else None
                waits = wait_until(kept)["thermocline_prefix_cache_memory_waits_total"]
                self.assertEqual(waits == 0, option == "--warmup")

    def test_tells_its_supervisor(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            path = str(pathlib.Path(folder) / "notify")
            listener.bind(path)
            listener.settimeout(0.1)
            heard, over = [], threading.Event()

            def listen():  # all the time: a full socket takes no more messages
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        heard.append(listener.recv(1000))
            reader = threading.Thread(target=listen)
            reader.start()
            try:
                with Server("-c", "512", env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"}) as server:
                    wait_until(lambda: heard.count(b"WATCHDOG=1") >= 2)
                    server.post("/v1/chat/completions", SUM)
                    server.stop()
                    wait_until(lambda: heard[-1] == b"STOPPING=1")
                    self.assertIn("prompt tokens computed", server.logged())
            finally:
                over.set()
                reader.join()
            self.assertIn(b"READY=1\nSTATUS=ready", heard)
            self.assertTrue(any(one.startswith(b"STATUS=loading the model: ") for one in heard), heard)
            self.assertIn(b"STATUS=ready, 0 running, 0 waiting", heard)

    def test_takes_sockets_of_its_supervisor(self):
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as tcp, \
                socket.socket(socket.AF_UNIX) as local:
            path = pathlib.Path(folder) / "s.sock"
            local.bind(str(path))
            local.listen()
            port_file = pathlib.Path(folder) / "port"
            # The descriptors have to be 3 and 4, and LISTEN_PID the program's own.
            script = f'import os\nos.dup2({tcp.fileno()}, 60); os.dup2({local.fileno()}, 61); os.dup2(60, 3); os.dup2(61, 4)\n' \
                     'os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2")\nos.execv(os.sys.argv[1], os.sys.argv[1:])'
            process = subprocess.Popen([sys.executable, "-c", script, PROGRAM, "serve", "-c", "512", "--port", "1", "--port-file", port_file],
                                       pass_fds=(tcp.fileno(), local.fileno()), stderr=subprocess.DEVNULL, env=clean_environment())
            try:
                wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") == 2)
                port = tcp.getsockname()[1]
                self.assertEqual(port_file.read_text(), f"http://127.0.0.1:{port}\nunix:{path}\n")
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                with contextlib.closing(connection):
                    def health():
                        connection.request("GET", "/health")
                        reply = connection.getresponse()
                        reply.read()
                        return reply.status
                    wait_until(lambda: health() == 200)
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(path))
                    client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    self.assertIn(b" 200 ", client.recv(100))
            finally:
                process.terminate()
                self.assertEqual(process.wait(PATIENCE), 0)
            self.assertTrue(path.exists())  # it belongs to the supervisor

    def test_reads_keys_again(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "keys"
            path.write_text("old\n")
            with Server("-c", "512", "--api-key-file", path) as server:
                def status(key):
                    return server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0]

                def wait_for(text):
                    wait_until(lambda: text in server.logged(), text)
                self.assertEqual((status("old"), status("new")), (200, 401))
                path.write_text("new\n")
                server.process.send_signal(signal.SIGHUP)
                wait_for("keys were read again")
                self.assertEqual((status("old"), status("new")), (401, 200))
                path.write_text("# none\n")
                server.process.send_signal(signal.SIGHUP)
                wait_for("keys stay as they are")
                self.assertEqual((status("old"), status("new")), (401, 200))
                self.assertEqual(server.stop(), 0)


class Signals(unittest.TestCase):
    def test_ends_in_good_order_while_it_loads(self):
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                port_file = pathlib.Path(folder) / "port"
                process = subprocess.Popen([PROGRAM, "serve", "--port", "0", "--port-file", port_file], stderr=subprocess.PIPE,
                                           env=clean_environment(), text=True)
                wait_until(port_file.exists)
                process.terminate()
                _, log = process.communicate(timeout=PATIENCE)
                self.assertEqual(process.returncode, 0, log)
        self.assertIn("shutting down", log)

    def test_a_second_signal_ends_it_at_once(self):
        for second in (signal.SIGTERM, signal.SIGINT):
            with Server("--parallel", "1", "--shutdown-grace", f"{PATIENCE}s", *WIDE) as server:
                stream = server.stream("/v1/chat/completions", ask("Write a long story.", **ENDLESS))
                next(stream)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: "shutting down" in server.logged())
                server.process.send_signal(second)
                self.assertEqual(server.process.wait(PATIENCE), 130)

    def test_a_hangup_stops_nothing(self):
        with Server("-c", "512") as server:
            server.process.send_signal(signal.SIGHUP)
            self.assertEqual(server.get("/health"), {"status": "ok"})
            self.assertEqual(server.post("/v1/chat/completions", ask("x", max_tokens=1))["usage"]["completion_tokens"], 1)
            self.assertIsNone(server.process.poll())


class Counting(unittest.TestCase):
    def counters(self, server, name):
        return {line.split(" ")[0][len(name):]: float(line.split(" ")[1]) for line in server.get("/metrics").splitlines()
                if line.startswith(name + "{")}

    def test_counts_replies_with_their_status(self):
        with Server("-c", "512", "--max-body-size", "1K", "--body-timeout", "300ms") as server:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{}\r\n"
            for data, code in ((head.format(9, "") + "{", 408), (head.format(5000, ""), 413), (head.format(9, "X: " + "x" * 40000 + "\r\n"), 431),
                               ("GET /nothing HTTP/1.0\r\n\r\n", 404), ("GET /live HTTP/1.0\r\n\r\n", 200)):
                self.assertIn(f"HTTP/1.1 {code} ".encode(), server.raw(data.encode()))
            with socket.create_connection((server.host, server.port)) as s:
                s.sendall(head.format(9, "").encode())  # and it goes away
            counters = wait_until(lambda: (found := self.counters(server, "thermocline_http_requests_total")) and
                                  any('code="499"' in labels for labels in found) and found)
            chat = 'method="POST",route="/v1/chat/completions"'
            for labels in (f'{chat},code="408"', f'{chat},code="413"', f'{chat},code="499"', 'method="GET",route="/live",code="200"',
                           'method="other",route="other",code="404"'):
                self.assertEqual(counters.get(f"{{{labels}}}"), 1, (labels, counters))
            self.assertEqual(sum(n for labels, n in counters.items() if 'code="431"' in labels), 1, counters)

    def test_groups_memory_as_dashboards_do(self):
        with Server("-c", "512", "--device", "sim", "--max-decode-stall-ms", "250") as server:
            text = server.get("/metrics")
            self.assertIn("thermocline_decode_stall_limit_seconds 0.25\n", text)
            kinds = set(re.findall(r'^thermocline_host_memory_bytes\{kind="(\w+)"\}', text, re.MULTILINE))
            self.assertLessEqual(kinds, {"experts", "cache", "pinned", "other"})
            self.assertGreaterEqual(kinds, {"cache", "other"})
            kinds = set(re.findall(r'^thermocline_device_memory_bytes\{device="[^"]+",kind="(\w+)"\}', text, re.MULTILINE))
            self.assertIn("free", kinds)
            self.assertLessEqual(kinds, {"weights", "experts", "kv", "scratch", "free"})

    def test_a_client_that_leaves_early_is_counted(self):
        with Server("-c", "512") as server:
            body = json.dumps(ask("word " * 2_000_000)).encode()
            with socket.create_connection((server.host, server.port)) as s:
                s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: self.counters(server, "thermocline_cancelled_total") == {'{phase="queued"}': 1})
            self.assertEqual(self.counters(server, "thermocline_requests_total"), {'{dialect="chat",outcome="cancelled",finish_reason=""}': 1})
            self.assertEqual(self.counters(server, "thermocline_prompt_tokens_total"), {})

    def test_counts_what_was_computed_for_an_answer_that_was_cancelled(self):
        with Server(*WIDE, "--parallel", "1") as server:
            with contextlib.closing(server.stream("/v1/chat/completions", ask("Write a long story.", **ENDLESS))) as stream:
                for _ in range(5):
                    next(stream)
            server.wait_until_idle()
            line = wait_until(lambda: re.search(r"cancelled phase=decode prompt=(\d+) \(0 cached\) out=(\d+) ttft=(\S+)s (\S+) tok/s", server.logged()))
            n_prompt, n_out = int(line[1]), int(line[2])
            self.assertGreater(n_out, 0)
            self.assertGreater(float(line[4]), 0)
            self.assertEqual(self.counters(server, "thermocline_prompt_tokens_total"), {'{source="computed"}': n_prompt, '{source="cached"}': 0})
            self.assertEqual(sum(self.counters(server, "thermocline_generated_tokens_total").values()), n_out)

    def test_counts_and_logs_what_failed_once(self):
        with Server(*WIDE, "--parallel", "1", "--max-queue", "0", "--log-format", "json") as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.request, "POST", "/v1/chat/completions", ask("Write a long story.", **ENDLESS), headers={"X-Request-Id": "one"})
            wait_until(lambda: server.get("/slots")[0]["next_token"]["n_decoded"] > 0)
            self.assertEqual(server.request("GET", "/ready")[0], 503)
            with socket.create_connection((server.host, server.port), timeout=PATIENCE) as s:  # before its body is there
                s.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
                self.assertIn(b"server_is_overloaded", s.recv(65536))
            self.assertEqual(server.request("POST", "/v1/messages", b"no JSON", headers={"X-Request-Id": "two"})[0], 529)
            server.request("DELETE", "/thermo/requests/one")
            self.assertEqual(asked.result()[0], 503)
            server.wait_until_idle()
            self.assertEqual(self.counters(server, "thermocline_request_errors_total"),
                             {'{code="cancelled"}': 1, '{code="server_is_overloaded"}': 2})
            self.assertEqual(self.counters(server, "thermocline_requests_total"),
                             {'{dialect="chat",outcome="cancelled",finish_reason=""}': 1,
                              '{dialect="messages",outcome="rejected",finish_reason=""}': 1,
                              '{dialect="responses",outcome="rejected",finish_reason=""}': 1})
            self.assertEqual(self.counters(server, "thermocline_http_requests_total").get('{method="GET",route="/ready",code="503"}'), 1)
            lines = [json.loads(line) for line in server.logged().splitlines() if line.startswith("{")]
            found = [line for line in lines if line.get("req") in ("one", "two")]
            self.assertEqual([line["req"] for line in found], ["two", "one"], found)
            self.assertEqual({k: found[0][k] for k in ("method", "path", "status", "code")},
                             {"method": "POST", "path": "/v1/messages", "status": 529, "code": "server_is_overloaded"})
            self.assertEqual({k: found[1][k] for k in ("dialect", "outcome", "phase")}, {"dialect": "chat", "outcome": "cancelled", "phase": "decode"})
            self.assertIn("cancelled phase=decode", found[1]["msg"])

    def test_says_at_the_start_what_it_is(self):
        with Server("-c", "512", "--api-key", "name:secret") as server:
            for line in (r"server   thermocline \d+\.\d+\.\d+ .*, model plankton", r"server   requests need one of 1 key$",
                         r"server   plan: .* in main memory: .*kv cache", r"server   listening on http://127.0.0.1:"):
                self.assertRegex(server.logged(), re.compile(line, re.MULTILINE))


class Health(unittest.TestCase):
    def test_asks_the_engine_itself(self):
        with Server("--api-key", "k", "-c", "512") as server:
            self.assertEqual(server.get("/health"), {"status": "ok"})
            self.assertEqual(server.request("GET", "/health?deep=1")[0], 401)
            status, _, reply = server.request("GET", "/health?deep=1", headers={"Authorization": "Bearer k"})
            self.assertEqual((status, reply["status"]), (200, "ok"))
            self.assertGreater(reply["ms"], 0)

    def test_keeps_connections_alive_with_spaces(self):
        with Server("-c", "512", "--timeout", "60s") as server:
            for body, key in ((SUM, "choices"), ({**SUM, "n": 99}, "error")):
                status, _, reply = server.request("POST", "/v1/chat/completions", body, headers={"X-Keepalive": "whitespace"})
                self.assertIn(key, reply)
                self.assertEqual(status, 200 if key == "choices" else 400)  # refused before anything was sent

    def test_logs_traces(self):
        with Server("-c", "512") as server:
            trace = "0af7651916cd43dd8448eb211c80319c"
            for header in (f"00-{trace}-b7ad6b7169203331-01", "00-" + "x" * 60, "", "-"):
                server.post("/v1/chat/completions", SUM, headers={"traceparent": header})
            self.assertEqual(server.logged().count("trace="), 1)
            self.assertIn(f"trace={trace}", server.logged())


class Metrics(unittest.TestCase):
    def test_are_in_order_under_load(self):
        with Server("--parallel", "2", *WIDE, "--draft", "lookup") as server:
            fresh = server.get("/metrics")
            server.post("/v1/chat/completions", SUM)
            server.post("/v1/chat/completions", ask("What is the weather in Paris?", tools=[WEATHER]))
            server.post("/v1/chat/completions", ask("A name.", json_schema={"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}))
            server.post("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]})
            server.request("POST", "/v1/chat/completions", {"messages": []})
            stream = server.stream("/v1/completions", {"prompt": "One day", **ENDLESS})
            next(stream)
            stream.close()  # a client that goes away
            wait_until(lambda: "thermocline_cancel_latency_seconds_count" in server.get("/metrics"))
            server.wait_until_idle()
            text = server.get("/metrics")
            _, headers, openly = server.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
        for one in (fresh, text):
            self.assertEqual(metrics_format.problems(one), [])
            self.assertIn(metrics_format.promtool(one), ([], None))
        families, samples = metrics_format.parse(text)
        values = {(name, tuple(labels.values())): value for name, labels, value in samples}
        self.assertLessEqual(ROUTER, set(families))
        self.assertEqual(values["thermocline_queue_limit", ()], 64)
        for kind in ("prefill", "decode"):
            self.assertGreater(values["thermocline_steps_total", (kind,)], 0)
        self.assertIn(("thermocline_steps_total", ("verify",)), values)
        names = {name for name, _, _ in samples}
        for name in ("thermocline_cancelled_total", "thermocline_cancel_latency_seconds_count", "thermocline_grammar_compile_seconds_count",
                     "thermocline_structured_outputs_total", "thermocline_host_memory_bytes", "thermocline_spec_rounds_total", "process_threads"):
            self.assertIn(name, names)
        self.assertEqual(headers["content-type"], "application/openmetrics-text; version=1.0.0; charset=utf-8")
        self.assertTrue(openly.endswith("\n# EOF\n"))
        heads = [line.split()[1:4] for line in openly.splitlines() if line.startswith("# TYPE")]
        self.assertEqual(len({name for _, name, _ in heads}), len(families))
        self.assertEqual({name + "_total" * (kind == "counter") for _, name, kind in heads}, set(families))
        self.assertEqual({line.split("{")[0].split()[0] for line in openly.splitlines() if not line.startswith("#")}, names)
        self.assertRegex(openly, r'thermocline_request_duration_seconds_bucket{dialect="chat",le="1\.0"} \d+\n')
        info = next(labels for name, labels, _ in samples if name == "thermocline_cache_config_info")
        self.assertGreater(int(info["block_size"]) * int(info["num_gpu_blocks"]), 0)

    def test_under_the_names_of_other_servers(self):
        with Server("-c", "1024", "--metrics-compat", "llamacpp,vllm") as server:
            fresh = server.get("/metrics")
            reply = server.post("/v1/chat/completions", SUM)
            list(server.stream("/v1/chat/completions", SUM))
            text = server.get("/metrics")
        for one in (fresh, text):
            # Their names have colons, which the rules advise against; nothing else is wrong with them.
            plain = one.replace("llamacpp:", "llamacpp_").replace("vllm:", "vllm_")
            self.assertEqual(metrics_format.problems(plain), [])
            self.assertIn(metrics_format.promtool(plain), ([], None))
        families, samples = metrics_format.parse(text)
        self.assertEqual(len([name for name in families if name.startswith("llamacpp:")]), 14)
        self.assertEqual(len([name for name in families if name.startswith("vllm:")]), 14)
        values = {}
        for name, labels, value in samples:
            if "le" not in labels:
                values[name] = values.get(name, 0) + value
            if name.startswith("vllm:"):
                self.assertEqual(labels["model_name"], "plankton")
        usage = reply["usage"]
        self.assertEqual(values["vllm:prompt_tokens_total"], 2 * usage["prompt_tokens"])
        self.assertEqual(values["vllm:prompt_tokens_total"], values["llamacpp:prompt_tokens_total"] + values["llamacpp:prompt_tokens_cached_total"])
        self.assertEqual(values["vllm:prefix_cache_hits_total"], values["llamacpp:prompt_tokens_cached_total"])
        self.assertGreater(values["vllm:prefix_cache_hits_total"], 0)
        self.assertEqual(values["llamacpp:tokens_predicted_total"], 2 * usage["completion_tokens"])
        self.assertEqual(values["vllm:generation_tokens_total"], 2 * usage["completion_tokens"])
        self.assertEqual(values["vllm:request_success_total"], 2)
        self.assertEqual(values["llamacpp:n_busy_slots_per_decode"], 1)
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            self.assertEqual(values[f"vllm:{name}_seconds_count"], 2, name)
        self.assertGreater(values["vllm:inter_token_latency_seconds_count"], 2)

    def test_the_checker_finds_faults(self):
        good = "# HELP a_total x\n# TYPE a_total counter\na_total{l=\"v\"} 1\n"
        self.assertEqual(metrics_format.problems(good), [])
        for bad in (good + good, good.rstrip("\n"), good.replace("counter", "gauge"), good.replace("a_total", "a"), good.replace("HELP a_total x\n", "x\n"),
                    good.replace(" 1", " x"), good.replace("l=\"v\"", "l=v"), good + "b 1\n", good + "a_total{l=\"v\"} 2\n", good.replace(" 1", " -1"),
                    "# HELP h x\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n"):
            self.assertNotEqual(metrics_format.problems(bad), [], bad)


class LiveView(unittest.TestCase):
    def watch(self, server, query, enough, headers={}):
        """Events of the live view until there are enough: [(name, data)]."""
        connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/thermo/live" + query, headers=headers)
            reply = connection.getresponse()
            self.assertEqual(reply.status, 200)
            events, name, end = [], None, time.monotonic() + PATIENCE
            while not enough(events):
                self.assertLess(time.monotonic(), end, events[-3:])
                line = reply.readline().decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    events.append((name, json.loads(line[6:])))
            return events

    def test_shows_requests_speeds_and_heat(self):
        def ticks(events):
            return [data for name, data in events if name == "tick"]

        def states(events):
            return {data["state"] for name, data in events if name == "request"}

        def heats(events):
            return [data for name, data in events if name == "heat" and data["max"] > 0]

        def enough(events):
            return len(ticks(events)) > 5 and any(t["decode_tps"] for t in ticks(events)) and \
                states(events) & {"prefill", "content", "reasoning"} and heats(events)
        with Server("--parallel", "2", *WIDE) as server:
            streams = [server.stream("/v1/completions", {"prompt": f"Day {i}", **ENDLESS}) for i in range(2)]
            over = threading.Event()

            def read(stream):
                for _ in stream:
                    if over.is_set():
                        return stream.close()
            threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
            for thread in threads:
                thread.start()
            try:
                events = self.watch(server, "?hz=5&heat=1", enough)
            finally:
                over.set()
                for thread in threads:
                    thread.join()
            self.assertEqual(events[0][0], "hello")
            self.assertEqual(events[0][1]["model"], "plankton")
            self.assertGreater(max(t["decode_tps"] or 0 for t in ticks(events)), 0)
            self.assertTrue(all(t["spec"] is None and t["gpu"] == [] and len(t["slots"]) == 2 for t in ticks(events)))
            # The thread that looks is one; others compute. What the processor does not count is null.
            self.assertGreater(max(t["cpu"]["threads_busy"] or 0 for t in ticks(events)), 1)
            counted = pathlib.Path("/sys/fs/resctrl/mon_data").exists()
            self.assertTrue(counted or all(t["cpu"]["mem_bw_bps"] is None for t in ticks(events)))
            heat = heats(events)[-1]
            self.assertEqual(len(base64.b64decode(heat["w"])), sum(heat["n_expert"]))
            self.assertEqual(server.request("GET", "/thermo/live?hz=99")[0], 400)
            wait_until(lambda: self.count_viewers(server) == 16)  # viewers who leave are forgotten

    def count_viewers(self, server):
        """How many may join at once."""
        sockets = []
        try:
            for n in range(17):
                connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
                sockets.append(connection)
                connection.request("GET", "/thermo/live?hz=0.2")
                if connection.getresponse().status != 200:
                    return n
            return 17
        finally:
            for connection in sockets:
                connection.close()

    def test_shows_warnings_to_administrators(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "keys"
        path.write_text("admin:root\nann:secret\n")
        with Server("-c", "512", "--api-key-file", path) as server:
            def logs(events):
                return [data for name, data in events if name == "log"]

            def enough(events):
                if len(events) == 2:  # somebody watches
                    path.write_text("# none\n")
                    server.process.send_signal(signal.SIGHUP)
                return logs(events)
            events = self.watch(server, "?hz=5", enough, {"Authorization": "Bearer root"})
            log = logs(events)[0]
            self.assertEqual((log["level"], log["component"]), ("warning", "server"))
            self.assertIn("keys stay as they are", log["msg"])
            self.assertRegex(log["ts"], r"^\d{4}-\d\d-\d\dT.*Z$")

            warned = server.logged().count("keys stay as they are")
            path.unlink()

            def some_ticks(events):
                if len(events) == 2:
                    server.process.send_signal(signal.SIGHUP)
                return len(events) > 2 and server.logged().count("keys stay as they are") > warned and len(events) > 8
            self.assertEqual(logs(self.watch(server, "?hz=5", some_ticks, {"Authorization": "Bearer secret"})), [])

    def test_compares_the_plan_with_what_was_taken(self):
        with Server("-c", "512", "--cache-ram", "64") as server:
            tier = server.get("/thermo/plan")["tiers"][0]
            self.assertGreater(tier["planned"], tier["planned_at_load"] + (63 << 20))  # the cache comes later
            text = server.get("/metrics")
            self.assertNotIn("the memory plan was wrong", server.logged())
        if tier["taken_at_load"] is None:
            self.assertTrue(SANITIZED)
            return
        self.assertLess(abs(tier["taken_at_load"] - tier["planned_at_load"]), 64 << 20)
        self.assertIn(f'thermocline_memory_taken_bytes{{tier="host"}} {tier["taken_at_load"]}', text)
        self.assertIn(f'thermocline_memory_planned_bytes{{tier="host"}} {tier["planned_at_load"]}', text)

    def test_limits_viewers(self):
        with Server("-c", "512") as server:
            self.assertEqual(self.count_viewers(server), 16)
            wait_until(lambda: self.count_viewers(server) == 16)
            self.assertEqual(server.stop(), 0)

    def test_props_and_requests(self):
        with Server("--parallel", "1", *WIDE) as server:
            props = server.get("/props")
            for name in ("plan", "limits", "tools", "structured", "sampling"):
                self.assertIn(name, props)
            self.assertIn("GET /thermo/live", props["api"]["endpoints"])
            stream = server.stream("/v1/completions", {"prompt": "One day", **ENDLESS})
            for _ in range(20):
                next(stream)
            request = server.get("/thermo/requests")[0]
            self.assertGreater(request["tps"], 0)
            self.assertEqual(request["queue_position"], 0)
            self.assertEqual(server.get("/slots?prompt=1")[0]["prompt"], "One day")
            self.assertNotIn("prompt", server.get("/slots")[0])
            stream.close()
            server.wait_until_idle()
            self.assertIsNone(server.get("/slots?prompt=1")[0]["prompt"])

    def test_prompts_are_for_administrators(self):
        with Server("--api-key", "user:u,admin:a", "-c", "512") as server:
            for key, status in (("u", 403), ("a", 200)):
                self.assertEqual(server.request("GET", "/slots?prompt=1", headers={"Authorization": f"Bearer {key}"})[0], status)

    def test_a_client_that_does_not_read_is_paused(self):
        with Server("--parallel", "1", *WIDE) as server, socket.create_connection((server.host, server.port)) as client:
            body = json.dumps({"prompt": "One day", "stream": True, "logprobs": 20, **ENDLESS}).encode()
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: [one["state"] for one in server.get("/thermo/requests")] == ["paused"])


class Heat(unittest.TestCase):
    def test_is_saved_while_it_runs_and_survives_a_kill(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "heat.json"
            with Server("--heat-file", path, "--heat-save-interval", "200ms", "-c", "512") as server:
                server.post("/v1/chat/completions", SUM)
                wait_until(path.exists)
                first = heat_of(path)
                self.assertGreater(first, 0)
                # Killed while it writes again and again: what is there is whole.
                for _ in range(6):
                    server.post("/v1/chat/completions", SUM)
                    self.assertGreaterEqual(heat_of(path), first)
                server.stop(signal.SIGKILL)
            saved = heat_of(path)
            with Server("--heat-file", path, "-c", "512") as server:
                server.post("/v1/chat/completions", SUM)
                self.assertEqual(server.stop(), 0)
            self.assertGreater(heat_of(path), saved)  # saved at the end, on top of what was there

    def test_is_shown_and_reset_on_demand(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "heat.json"
            with Server("--heat-file", path, "-c", "512") as server:
                server.post("/v1/chat/completions", SUM)
                wait_until(lambda: server.get("/thermo/experts")["n_tokens"])  # a copy is made after it was asked for
                self.assertFalse(path.exists())
                server.post("/thermo/heat", {"action": "save"})
                wait_until(path.exists)
                self.assertGreater(heat_of(path), 0)
                self.assertEqual(server.request("POST", "/thermo/heat", {"action": "melt"})[0], 400)

                for action, expected in (("reset", 0), ("load", heat_of(path))):
                    server.post("/thermo/heat", {"action": action})
                    wait_until(lambda: server.get("/thermo/experts")["n_tokens"] == expected, action)

    def test_orders_need_an_administrator(self):
        with Server("--api-key", "user:u,admin:a", "-c", "512") as server:
            for key, status in (("u", 403), ("a", 200)):
                self.assertEqual(server.request("POST", "/thermo/heat", {"action": "save"}, headers={"Authorization": f"Bearer {key}"})[0], status)


if __name__ == "__main__":
    unittest.main()
