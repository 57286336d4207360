"""A server for tests, and a client made of sockets and Python's own library."""
import contextlib
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from harness import PROGRAM, SANITIZED, SLOW, clean_environment

SUM = "What is 17 + 25?"
PARIS = "What is the weather in Paris?"
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
# For answers that a test ends, however fast the machine is and however long it keeps the test waiting: they would go on for
# minutes, and a stream that nobody reads pauses long before it is full.
WIDE = ("-c", "131072")
ENDLESS = {"max_tokens": 120_000, "ignore_eos": True}
PATIENCE = 300 if SLOW else 60  # seconds for what takes a moment on a quiet machine


class Server:
    """`thermocline serve` with the embedded model on a free port."""

    def __init__(self, *arguments, env=None, max_files=None):
        self.folder = tempfile.TemporaryDirectory()
        port_file = pathlib.Path(self.folder.name) / "port"
        self.log = open(pathlib.Path(self.folder.name) / "log", "w+")
        listen = [] if any(a in ("--host", "--listen") for a in arguments) else ["--port", "0"]
        limited = ["sh", "-c", f'ulimit -n {max_files}; exec "$0" "$@"'] if max_files else []
        self.process = subprocess.Popen([*limited, PROGRAM, "serve", "--port-file", str(port_file), *listen, *map(str, arguments)],
                                        stdout=subprocess.DEVNULL, stderr=self.log, env=clean_environment(**(env or {})))
        end = time.monotonic() + (600 if SLOW else 120)
        # The file comes when it listens; it is ready when it says so.
        while not (port_file.exists() and port_file.read_text().endswith("\n") and "\nready: " in f"\n{self.logged()}"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"the server did not start: {self.logged()}")
            time.sleep(0.02)
        self.url = port_file.read_text().split()[0]
        if self.url.startswith("http://"):
            self.host, port = self.url[7:].rsplit(":", 1)
            self.port = int(port)

    def logged(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def stop(self, how=signal.SIGTERM, timeout=PATIENCE):
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return code

    def close(self):
        if self.process.poll() is None and SANITIZED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()  # what is left at the end is looked for then
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def request(self, method, path, body=None, headers=None, timeout=120):
        """(status, headers, body as JSON or text)."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            text = reply.read().decode()
            is_json = reply.getheader("Content-Type", "").startswith("application/json")
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, json.loads(text) if is_json and text else text

    def get(self, path, **options):
        return self.request("GET", path, **options)[2]

    def post(self, path, body, **options):
        status, _, reply = self.request("POST", path, body, **options)
        if status != 200:
            raise AssertionError(f"{path}: {status} {reply}")
        return reply

    def stream(self, path, body, headers=None, timeout=120):
        """Yields (event name or None, data) of a stream; data is JSON, or the text of [DONE]."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}).encode(),
                               {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            if reply.status != 200:
                raise AssertionError(f"{path}: {reply.status} {reply.read()}")
            assert reply.getheader("Content-Type").startswith("text/event-stream"), reply.getheaders()
            name = None
            for raw in reply:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    yield name, line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                    name = None

    def raw(self, data, timeout=PATIENCE, half_close=False):
        """Sends bytes, returns all that comes back until the server closes or nothing more comes."""
        with socket.create_connection((self.host, self.port), timeout=timeout) as s:
            s.settimeout(timeout)
            with contextlib.suppress(OSError):
                s.sendall(data)
                if half_close:
                    s.shutdown(socket.SHUT_WR)
            out = b""
            with contextlib.suppress(OSError):
                while piece := s.recv(65536):
                    out += piece
            return out

    def wait_until_idle(self):
        wait_until(lambda: not any(slot["is_processing"] for slot in self.get("/slots")) and not self.get("/thermo/requests"),
                   lambda: f"still busy: {self.get('/slots')} {self.get('/thermo/requests')}")

    def wait_for_requests(self, n):
        """Until so many run or wait."""
        wait_until(lambda: len(self.get("/thermo/requests")) == n, lambda: f"not {n}: {self.get('/thermo/requests')}")


def wait_until(condition, complaint="it did not come"):
    """Until the condition gives something true, which is returned. A test that waits fails only where nothing happens at all."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(complaint() if callable(complaint) else complaint)
        time.sleep(0.02)
    return found


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def chat_text(events):
    """The text, reasoning, calls and finish of a chat stream."""
    text = reasoning = finish = ""
    calls = []
    for _, data in events:
        if data == "[DONE]":
            continue
        for choice in data["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return text, reasoning, calls, finish


class ServeTest(unittest.TestCase):
    """Tests that share one server."""
    maxDiff = None
    OPTIONS = ("--parallel", "4")

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.OPTIONS)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def refused(self, path, body, status, code=None, **options):
        got, headers, reply = self.server.request("POST", path, body, **options)
        self.assertEqual(got, status, reply)
        error = reply["error"]
        if code and "code" in error:
            self.assertEqual(error["code"], code, reply)
        return headers, error
