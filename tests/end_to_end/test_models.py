"""Models by name: pull, list, rm and -hf, against a hub on this machine that is honest, slow to finish, or lies."""
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

from harness import DATA, INTERRUPTED, MODEL, PROGRAM, ProgramTest, USAGE, clean_environment, run

DOWNLOAD = 8
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "somebody/Plankton-GGUF"


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files` as a repository. `behave(handler, body, begin)` may answer a file instead; True: it did."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.behave, self.api = {}, [], None, None
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass  # clients go away in these tests

    def listing(self):
        return {"sha": COMMIT, "siblings": [
            {"rfilename": name, "size": len(body), "lfs": {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}}
            for name, body in self.files.items()] + [{"rfilename": "README.md", "size": 7}]}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server
        hub.requests.append((self.path, dict(self.headers)))
        if self.path.startswith("/api/models/"):
            if hub.api and hub.api(self):
                return
            if not self.path.startswith(f"/api/models/{REPO}/"):
                return self.reply(404, b"{}")
            return self.reply(200, json.dumps(hub.listing()).encode())
        name = self.path.split(f"/resolve/{COMMIT}/")[-1].replace("%20", " ")
        if name not in hub.files:
            return self.reply(404, b"")
        begin = int(self.headers["Range"].split("=")[1].rstrip("-")) if "Range" in self.headers else 0
        if not (hub.behave and hub.behave(self, hub.files[name], begin)):
            self.send_file(hub.files[name], begin)

    def send_file(self, body, begin):
        if begin >= len(body):
            return self.reply(416, b"")
        self.reply(206 if begin else 200, body[begin:],
                   {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"} if begin else {})

    def reply(self, status, body, headers=None, length=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


class HubTest(ProgramTest):
    def setUp(self):
        self.hub = Hub()
        self.hub.files = {"Plankton-Q4_K_M.gguf": MODEL.read_bytes(), "mmproj-F16.gguf": b"no model"}
        self.home = pathlib.Path(tempfile.mkdtemp())
        self.env = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home / "hf"), "HOME": str(self.home), "HF_TOKEN": "",
                    "HF_HUB_CACHE": "", "XDG_DATA_HOME": "", "XDG_CACHE_HOME": "", "OLLAMA_MODELS": ""}
        self.folder = self.home / "hf/hub/models--somebody--Plankton-GGUF"

    def tearDown(self):
        self.hub.shutdown()
        self.hub.server_close()
        shutil.rmtree(self.home)

    def pull(self, *more, name=f"hf:{REPO}"):
        return pathlib.Path(self.answer("pull", name, *more, env=self.env).strip())

    def refused(self, *arguments, code=DOWNLOAD):
        return self.refusal(code, *arguments, env=self.env)

    def n_file_requests(self):
        return sum("/resolve/" in path for path, _ in self.hub.requests)


class Pull(HubTest):
    def test_keeps_what_the_hugging_face_tools_would_keep(self):
        path = self.pull()
        self.assertEqual(path, self.folder / "snapshots" / COMMIT / "Plankton-Q4_K_M.gguf")
        self.assertEqual(path.read_bytes(), MODEL.read_bytes())
        blob = self.folder / "blobs" / hashlib.sha256(MODEL.read_bytes()).hexdigest()
        self.assertTrue(path.is_symlink())
        self.assertEqual(path.resolve(), blob.resolve())
        self.assertFalse(os.path.isabs(os.readlink(path)), "the cache may be moved")
        self.assertEqual((self.folder / "refs/main").read_text(), COMMIT)
        self.assertEqual([p.name for p in (self.folder / "blobs").iterdir()], [blob.name])
        before = self.n_file_requests()
        self.assertIn("already", run("pull", REPO, env=self.env).stderr)
        self.assertEqual(self.n_file_requests(), before, "nothing is fetched twice")

    # With files in the place of folders these were errors of the program.
    def test_a_cache_that_cannot_be_written_fails_the_download(self):
        self.hub.files = {"Small-Q4_K_M.gguf": b"GGUF" * 10}
        for name in ("blobs", "snapshots", "refs"):
            shutil.rmtree(self.home / "hf", ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.folder / name).touch()
            self.assertIn(f"/{name}", self.refused("pull", f"hf:{REPO}"))

    def test_takes_all_parts_of_a_split_model(self):
        body = MODEL.read_bytes()
        self.hub.files = {f"q8/Big-Q8_0-0000{i}-of-00002.gguf": body[:1000 * i] for i in (1, 2)}
        report = json.loads(self.answer("pull", f"{REPO}:q8_0", "--json", env=self.env))
        self.assertEqual(report["bytes"], 3000)
        self.assertTrue(report["path"].endswith("q8/Big-Q8_0-00001-of-00002.gguf"))
        self.assertEqual(len(list((self.folder / "blobs").iterdir())), 2)

    def test_goes_on_where_it_broke_off(self):
        begins = []

        def break_off(handler, body, begin):
            begins.append(begin)
            end = begin + 3_000_000
            if end < len(body):  # promises all, sends a part, closes
                handler.reply(206 if begin else 200, body[begin:end], length=len(body) - begin,
                              headers={"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"} if begin else {})
                handler.close_connection = True
                return True
        self.hub.behave = break_off
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())
        self.assertEqual(begins, sorted(begins))
        self.assertGreater(begins[-1], 3_000_000)

    def test_an_interrupt_keeps_what_came_and_the_next_run_goes_on(self):
        first, over = threading.Event(), threading.Event()
        self.addCleanup(over.set)

        def slow(handler, body, begin):
            if begin:
                return False
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body[:2_000_000])
            first.set()
            over.wait(120)  # the rest does not come
            return True
        self.hub.behave = slow
        process = subprocess.Popen([PROGRAM, "pull", REPO], env=clean_environment(**self.env), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.assertTrue(first.wait(60))
        partial = []
        for _ in range(300):
            partial = list((self.folder / "blobs").glob("*.incomplete"))
            if partial and partial[0].stat().st_size == 2_000_000:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        over.set()
        self.assertEqual((process.returncode, stdout), (INTERRUPTED, ""), stderr)
        self.assertEqual(partial[0].stat().st_size, 2_000_000)
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())
        self.assertEqual(self.hub.requests[-1][1]["Range"], "bytes=2000000-")

    def test_a_server_that_ignores_the_offset_sends_everything_again(self):
        (self.folder / "blobs").mkdir(parents=True)
        name = hashlib.sha256(MODEL.read_bytes()).hexdigest()
        (self.folder / "blobs" / f"{name}.incomplete").write_bytes(MODEL.read_bytes()[:5000])
        self.hub.behave = lambda handler, body, begin: handler.send_file(body, 0) or True
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())

    def test_what_was_too_long_or_wrong_is_begun_again(self):
        (self.folder / "blobs").mkdir(parents=True)
        partial = self.folder / "blobs" / f"{hashlib.sha256(MODEL.read_bytes()).hexdigest()}.incomplete"
        partial.write_bytes(b"x" * (MODEL.stat().st_size + 1))
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())
        self.answer("rm", REPO, env=self.env)
        partial.parent.mkdir(parents=True)
        partial.write_bytes(b"x" * 1000)
        self.assertIn("damaged on the way", self.refused("pull", REPO))
        self.assertFalse(partial.exists(), "the next try must not meet it")
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())

    def test_lies_are_found(self):
        truth = self.hub.listing
        for lie, sentence in ((lambda h, b, _: h.reply(200, b + b"more") or True, "sends"),
                              (lambda h, b, _: h.reply(200, b[:-4]) or True, "sends"),
                              (lambda h, b, _: h.reply(200, b"\0" + b[1:]) or True, "damaged on the way")):
            with self.subTest(sentence=sentence):
                self.hub.behave = lie
                self.assertIn(sentence, self.refused("pull", REPO))
                self.assertFalse(list(self.folder.glob("snapshots/*/*")))
                self.assertFalse(list(self.folder.glob("blobs/*")))
        self.hub.behave = None
        for change in ({"sha": "../../x"}, {"siblings": "none"}, {"sha": 7}):
            with self.subTest(change=change):
                self.hub.listing = lambda: {**truth(), **change}
                self.assertIn("is it a Hugging Face endpoint", self.refused("pull", REPO))
        self.hub.listing = lambda: {"sha": COMMIT, "siblings": [{"rfilename": "../../../out-Q4_K_M.gguf", "size": 5},
                                                               {"rfilename": "/etc/out-Q4_K_M.gguf", "size": 5}]}
        self.assertIn("no GGUF file", self.refused("pull", REPO, code=USAGE))
        self.hub.listing = lambda: {"sha": COMMIT, "siblings": [{"rfilename": "a-Q4_K_M.gguf", "size": 1 << 60}]}
        self.assertIn("free", self.refused("pull", REPO))

    def test_passing_trouble_is_waited_out(self):
        answers = [500, 503, 429]
        self.hub.behave = lambda handler, body, begin: bool(answers) and (handler.reply(answers.pop(), b"") or True)
        self.assertEqual(self.pull().read_bytes(), MODEL.read_bytes())

    def test_lasting_trouble_is_told(self):
        for status, sentence in ((401, "accept its terms"), (403, "accept its terms"), (404, "no such repository"), (500, "answered 500")):
            with self.subTest(status=status):
                self.hub.api = lambda handler: handler.reply(status, b"<html>") or True
                self.assertIn(sentence, self.refused("pull", REPO))
        self.hub.api = lambda handler: handler.reply(200, b"<html>") or True
        self.assertIn("is it a Hugging Face endpoint", self.refused("pull", REPO))
        self.hub.api = None
        self.hub.behave = lambda handler, body, begin: handler.reply(403, b"") or True
        self.assertIn("accept its terms", self.refused("pull", REPO))
        self.env["HF_ENDPOINT"] = "http://127.0.0.1:1"
        self.assertIn("cannot be reached", self.refused("pull", REPO))
        self.env["HF_ENDPOINT"] = "ftp://somewhere"
        self.assertIn("HF_ENDPOINT", self.refused("pull", REPO, code=USAGE))

    def test_the_token_goes_to_the_hub_and_not_where_it_redirects(self):
        store = Hub()
        store.files = self.hub.files
        self.addCleanup(store.server_close)
        self.addCleanup(store.shutdown)
        self.hub.behave = lambda handler, body, begin: handler.reply(
            302, b"", {"Location": handler.path and store.url.replace("127.0.0.1", "localhost") + handler.path}) or True
        (self.home / "hf").mkdir()
        (self.home / "hf/token").write_text("from-file\n")
        self.pull()
        self.assertEqual({headers.get("Authorization") for _, headers in self.hub.requests}, {"Bearer from-file"})
        self.assertEqual({headers.get("Authorization") for _, headers in store.requests}, {None})
        self.answer("rm", REPO, env=self.env)
        self.pull("--hf-token", "from-option")
        self.assertEqual(self.hub.requests[-1][1]["Authorization"], "Bearer from-option")

    def test_endless_redirects_end(self):
        self.hub.api = lambda handler: handler.reply(302, b"", {"Location": handler.path}) or True
        self.assertIn("302", self.refused("pull", REPO))

    def test_two_at_once_fetch_it_once(self):
        def slowly(handler, body, begin):
            time.sleep(1)
        self.hub.behave = slowly
        both = [subprocess.Popen([PROGRAM, "pull", REPO], env=clean_environment(**self.env), stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE) for _ in range(2)]
        for process in both:
            _, stderr = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, stderr)
        self.assertEqual(self.n_file_requests(), 1)

    def test_what_is_no_name_is_refused(self):
        for name in ("x", "hf:", "a/b/c", "a/b:", "../x:y"):
            self.assertIn("expected", self.refused("pull", name, code=USAGE))
        self.assertIn("it has no Q2_K (there are Q4_K_M)", self.refused("pull", f"{REPO}:Q2_K", code=USAGE))
        self.assertIn("which model", self.refused("pull", code=USAGE))


class Use(HubTest):
    def test_a_command_downloads_once_and_then_needs_no_network(self):
        ask = ["-p", "What is 17 + 25?", "--temp", "0", "-n", "12"]
        plain = self.answer("run", "-m", MODEL, *ask)
        self.assertEqual(self.answer("run", "-hf", REPO, *ask, env=self.env), plain)
        self.hub.shutdown()
        for names in (["-hf", f"{REPO}:Q4_K_M"], ["-m", f"hf:{REPO}"], ["--hf-repo", REPO, "--hf-file", "Plankton-Q4_K_M.gguf"],
                      ["-hf", REPO, "--offline"]):
            with self.subTest(names=names):
                self.assertEqual(self.answer("run", *names, *ask, env={**self.env, "HF_ENDPOINT": "http://127.0.0.1:1"}), plain)
        self.assertIn("plankton", self.answer("inspect", f"hf:{REPO}", env=self.env).lower())
        rows = json.loads(self.answer("bench", "-hf", REPO, "-p", "8", "-n", "2", "-r", "1", "-o", "json", env=self.env))
        self.assertTrue(rows[0]["model_filename"].endswith("Plankton-Q4_K_M.gguf"))

    def test_what_makes_no_sense_is_refused(self):
        self.assertIn("both name a model", self.refused("run", "-m", MODEL, "-hf", REPO, "-p", "x", code=USAGE))
        self.assertIn("--hf-repo", self.refused("run", "-hff", "a.gguf", "-p", "x", code=USAGE))
        self.assertIn("--offline forbids", self.refused("run", "-hf", REPO, "--offline", "-p", "x"))
        self.assertEqual(self.hub.requests, [])


class List(HubTest):
    def test_finds_models_of_all_programs(self):
        self.assertIn("no models yet", run("list", env=self.env).stderr)
        self.pull()
        studio = self.home / ".lmstudio/models/someone/Tiny-GGUF"
        studio.mkdir(parents=True)
        shutil.copy(DATA / "qwen35-f32.gguf", studio / "tiny-F32.gguf")
        ollama = self.home / ".ollama/models"
        for folder in ("manifests/registry.ollama.ai/library/tiny", "blobs"):
            (ollama / folder).mkdir(parents=True)
        shutil.copy(DATA / "laguna-f32.gguf", ollama / "blobs/sha256-abc")
        (ollama / "manifests/registry.ollama.ai/library/tiny/latest").write_text(json.dumps({"layers": [
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../etc"},
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:def"}]}))
        (ollama / "manifests/registry.ollama.ai/library/tiny/broken").write_text("{")
        mine = self.home / "mine"
        mine.mkdir()
        (mine / "part-00001-of-00002.gguf").write_bytes(b"GGUF")
        (mine / "bad.gguf").write_bytes(b"not a model")
        found = {m["name"]: m for m in json.loads(self.answer("list", "--json", "--models-dir", mine, env=self.env))["models"]}
        self.assertEqual({name: (m["source"], m["architecture"], m["complete"]) for name, m in found.items()}, {
            f"hf:{REPO}:Q4_K_M": ("hugging face", "qwen35moe", True),
            "someone/Tiny-GGUF/tiny-F32.gguf": ("lm studio", "qwen35", True),
            "tiny:latest": ("ollama", "laguna", True),
            "part-00001-of-00002.gguf": ("folder", None, False),
            "bad.gguf": ("folder", None, True)})
        table = self.answer("list", "--models-dir", mine, env=self.env)
        self.assertIn("incomplete", table)
        self.assertIn("unreadable", table)
        self.assertEqual(len(self.answer("list", "--paths", "--models-dir", mine, env=self.env).splitlines()), 5)
        self.assertIn("no folder", self.refused("list", "--models-dir", mine / "none", code=USAGE))

    def test_rm_deletes_what_is_named_and_nothing_else(self):
        self.hub.files["Plankton-Q8_0.gguf"] = (DATA / "qwen35-f32.gguf").read_bytes()
        first, second = self.pull(name=f"{REPO}:Q4_K_M"), self.pull(name=f"{REPO}:Q8_0")
        self.assertIn("there is no such model", self.refused("rm", f"{REPO}:Q2_K", code=USAGE))
        self.answer("rm", f"hf:{REPO}:q4_k_m", env=self.env)
        self.assertFalse(first.exists())
        self.assertTrue(second.exists())
        self.assertEqual(len(list((self.folder / "blobs").iterdir())), 1)
        self.answer("rm", REPO, env=self.env)
        self.assertFalse(self.folder.exists())
        self.assertIn("nothing of it", self.refused("rm", REPO, code=USAGE))
        self.assertIn("which model", self.refused("rm", code=USAGE))


if __name__ == "__main__":
    unittest.main()
