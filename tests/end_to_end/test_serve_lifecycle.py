#!/usr/bin/env python3
"""Clients that go away, the end of the server, its sockets, and options that need a server of their own."""
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import tempfile
import time
import unittest

from harness import SLOW
from server_harness import ENDLESS, PARIS, PATIENCE, WIDE, Server, ServeTest, ask, chat_text, wait_until


class Vanishing(ServeTest):
    OPTIONS = ("--parallel", "4", *WIDE)

    def n_steps(self):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.server.get("/metrics").splitlines()
                   if line.startswith("thermocline_steps_total{"))

    def test_a_client_that_goes_away_costs_nothing(self):
        body = json.dumps(ask("Write a long story.", **ENDLESS, stream=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        sockets = []
        for _ in range(12):  # some have slots, some wait
            s = socket.create_connection((self.server.host, self.server.port))
            s.sendall(head % len(body) + body)
            sockets.append(s)
        self.server.wait_for_requests(12)
        wait_until(lambda: self.n_steps() > 20)
        for s in sockets:
            s.close()
        self.server.wait_until_idle()
        steps = self.n_steps()
        time.sleep(0.2)
        self.assertLessEqual(self.n_steps(), steps + 1)  # one may have been running still

    def test_a_request_can_be_cancelled_by_its_id(self):
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", json.dumps(ask("Write a long story.", **ENDLESS, stream=True)),
                           {"X-Request-Id": "mine-1", "Content-Type": "application/json"})
        reply = connection.getresponse()
        self.assertEqual(reply.getheader("X-Request-Id"), "mine-1")
        self.assertEqual(self.server.request("DELETE", "/thermo/requests/mine-1")[0], 200)
        self.assertIn("cancelled", reply.read().decode())
        connection.close()
        self.server.wait_until_idle()


class Lifecycle(unittest.TestCase):
    def test_ends_in_good_order(self):
        n = 2000
        with Server("--parallel", "1", "--shutdown-grace", f"{PATIENCE}s") as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.request, "POST", "/v1/chat/completions", ask("Write a long story.", max_tokens=n, ignore_eos=True))
            # Where the answer is there already, it was not interrupted either.
            wait_until(lambda: asked.done() or any(slot["is_processing"] for slot in server.get("/slots")))
            server.process.send_signal(signal.SIGTERM)
            status, _, reply = asked.result()
            self.assertEqual(status, 200, reply)
            self.assertEqual(reply["usage"]["completion_tokens"], n)
            self.assertEqual(server.process.wait(PATIENCE), 0)

    def test_cuts_what_takes_too_long(self):
        with Server("--parallel", "1", "--shutdown-grace", "200ms", *WIDE) as server:
            stream = server.stream("/v1/chat/completions", ask("Write a long story.", **ENDLESS))
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            events = [data for _, data in stream]
            self.assertEqual(events[-2]["error"]["code"], "shutting_down")
            self.assertEqual(events[-1], "[DONE]")
            self.assertEqual(server.process.wait(PATIENCE), 0)

    def test_listens_on_all_addresses_of_a_name(self):
        with Server("--host", "localhost", "--port", "0", "-c", "512") as server:
            for host, port in (re.match(r"http://\[?([^\]]+?)\]?:(\d+)$", url).groups() for url in re.findall(r"listening on (\S+)", server.logged())):
                with socket.create_connection((host, int(port)), timeout=PATIENCE) as s:
                    s.sendall(b"GET /live HTTP/1.0\r\n\r\n")
                    self.assertIn(b"200 OK", s.recv(4096))
            known = {info[4][0] for info in socket.getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM)}
            with socket.socket(socket.AF_INET6) if socket.has_ipv6 else contextlib.nullcontext() as s:
                has_v6 = s is not None and "::1" in known and s.connect_ex(("::1", server.port)) == 0
            self.assertEqual(server.logged().count("listening on http://["), int(has_v6))

    def test_a_head_has_one_time(self):
        with Server("--header-timeout", "1s", "-c", "512") as server:
            with socket.create_connection((server.host, server.port), timeout=PATIENCE) as s:
                begin = time.monotonic()
                time.sleep(0.8)
                s.sendall(b"GET /live")
                self.assertEqual(s.recv(100), b"")
                self.assertLess(time.monotonic() - begin, 1.7)

    def test_a_unix_socket(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "t.sock"
            with Server("--host", str(path)) as server:
                with socket.socket(socket.AF_UNIX) as s:
                    s.connect(str(path))
                    s.sendall(b"GET /health HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n")
                    self.assertIn(b"200 OK", s.recv(65536))
                self.assertEqual(server.stop(), 0)
            self.assertFalse(path.exists())

    def test_a_unix_socket_that_is_trusted(self):
        def status(path, url):
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(str(path))
                s.sendall(f"GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                return int(s.recv(65536).split()[1])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "t.sock"
            listen = ("--listen", "http://127.0.0.1:0", "--listen", f"unix:{path}", "--api-key", "k")
            with Server(*listen, "--unix-trusted") as server:
                self.assertEqual(status(path, "/v1/models"), 200)
                self.assertEqual(server.request("GET", "/v1/models")[0], 401)
            with Server(*listen):
                self.assertEqual(status(path, "/v1/models"), 401)

    def test_tokens_may_share_an_event(self):
        counts = {}
        for wait in ("0", "1000"):
            with Server("--stream-coalesce-ms", wait, "-c", "512") as server:
                events = list(server.stream("/v1/chat/completions", ask("Count from one to ten.")))
                counts[wait] = (len(events), chat_text(events))
        self.assertEqual(counts["0"][1], counts["1000"][1])
        self.assertLess(counts["1000"][0], counts["0"][0])

    def test_calls_are_held_as_told(self):
        def arguments(server, properties):
            tool = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": {
                "type": "object", "properties": properties, "required": list(properties)}}}
            reply = server.post("/v1/chat/completions", ask(PARIS, tools=[tool]))
            return json.loads(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
        two_cities, other_name = {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, {"place": {"type": "string"}}
        for how in ("auto", "strict", "off"):
            with Server("--tool-grammar", how, "-c", "1024") as server:
                # The model wants to say {"city": "Paris"}.
                self.assertEqual(arguments(server, two_cities)["city"] == "Paris", how != "strict")
                self.assertEqual(list(arguments(server, other_name)), ["city"] if how == "off" else ["place"])

    def test_images_follow_the_policy(self):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        question = {"max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
        older = {"max_tokens": 1, "messages": question["messages"] + [{"role": "user", "content": "Hello"}]}
        for policy, expected in (("auto", (400, 200)), ("error", (400, 400)), ("placeholder", (200, 200))):
            with Server("--image-policy", policy, "-c", "512") as server:
                got = tuple(server.request("POST", "/v1/chat/completions", body)[0] for body in (question, older))
                self.assertEqual(got, expected, policy)

    def test_timeouts(self):
        with Server("--parallel", "1", "--timeout", "700ms", "--sse-ping-interval", "50ms", *WIDE) as server:
            status, _, reply = server.request("POST", "/v1/chat/completions", ask("Story.", **ENDLESS))
            self.assertEqual((status, reply["error"]["code"]), (504, "timeout"))


class LongTexts(unittest.TestCase):
    """Texts that nobody waits for any more. How far they are is told by the server's processor time, on a busy machine, too."""
    BODY = json.dumps({"content": " " * ((8 if SLOW else 32) << 20)}).encode()

    def seconds(self, server):
        fields = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def whole(self, server):
        """Seconds for the whole text."""
        times = []
        for _ in range(2):
            begin = self.seconds(server)
            self.assertEqual(server.request("POST", "/tokenize", self.BODY, timeout=600)[0], 200)
            times.append(self.seconds(server) - begin)
        return min(times)

    def ask(self, server):
        s = socket.create_connection((server.host, server.port), timeout=600)
        s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(self.BODY) + self.BODY)
        return s

    def test_a_client_that_goes_away_frees_the_worker(self):
        def n_gone():
            return sum(float(line.rsplit(" ", 1)[1]) for line in server.get("/metrics").splitlines()
                       if line.startswith("thermocline_http_requests_total{") and 'route="/tokenize"' in line and 'code="499"' in line)
        with Server("-c", "512") as server:
            whole = self.whole(server)
            shares = []
            while len(shares) < 3 and not any(share < 0.75 for share in shares):  # this test may have to wait for a core
                before, begin = n_gone(), self.seconds(server)
                with self.ask(server):
                    wait_until(lambda: self.seconds(server) > begin + 0.4 * whole)
                wait_until(lambda: n_gone() > before)  # when its work is over
                shares.append((self.seconds(server) - begin) / whole)
            self.assertLess(min(shares), 0.75, shares)

    def test_the_end_does_not_wait_for_a_text(self):
        replies = []
        while len(replies) < 3 and not any(b" 503 " in reply for reply in replies):
            with Server("-c", "512", "--shutdown-grace", "100ms") as server:
                whole, begin = self.whole(server), self.seconds(server)
                with self.ask(server) as s:
                    wait_until(lambda: self.seconds(server) > begin + 0.2 * whole)
                    server.process.send_signal(signal.SIGTERM)
                    reply = b""
                    with contextlib.suppress(OSError):
                        while piece := s.recv(65536):
                            reply += piece
                    replies.append(reply[:1000])
                self.assertEqual(server.process.wait(PATIENCE), 0)
        self.assertIn(b"HTTP/1.1 503 ", replies[-1])
        self.assertIn(b"the server is shutting down", replies[-1])


if __name__ == "__main__":
    unittest.main()
