#!/usr/bin/env python3
"""The experts of a served model one by one: uses, heat and where they are; and heat in files."""
import base64
import csv
import http.client
import io
import json
import pathlib
import struct
import tempfile
import unittest

import metrics_format
from server_harness import PATIENCE, Server, ask, wait_until

SUM = ask("What is 17 + 25?")
SPLIT = ("-c", "1024", "--device", "sim", "--expert-cache", "40%")


def experts_of(server, query=""):
    """After the engine has counted and nothing moves."""
    server.wait_until_idle()
    server.get("/thermo/experts")  # what is shown is the copy after it
    return wait_until(lambda: (lambda e: e if e["layers"] and e["n_tokens"] else None)(server.get("/thermo/experts" + query)))


def flat(experts, key):
    return [value for layer in experts["layers"] for value in layer[key]]


def samples_of(server):
    _, samples = metrics_format.parse(server.get("/metrics"))
    return [(name, labels, value) for name, labels, value in samples]


class Experts(unittest.TestCase):
    def test_on_the_processor_are_all_in_main_memory(self):
        with Server("-c", "512") as server:
            server.post("/v1/chat/completions", SUM)
            experts = experts_of(server)
            self.assertEqual(set(flat(experts, "tier")), {"host"})
            n_used = server.get("/v1/models")["data"][0]["meta"]["n_expert_used"]
            for layer in experts["layers"]:
                if layer["uses"]:
                    self.assertEqual(sum(layer["uses"]), n_used * experts["n_tokens"])
                    self.assertEqual([use > 0 for use in layer["uses"]], [heat > 0 for heat in layer["heat"]])
            self.assertEqual(set(flat(experts, "last_promoted_ms")), {None})

            def tiers():
                found = {labels["tier"]: value for name, labels, value in samples_of(server) if name == "thermocline_experts"}
                return found or None
            self.assertEqual(wait_until(tiers), {"device": 0, "host": len(flat(experts, "tier")), "file": 0, "moving": 0})

    def test_that_are_split_say_where_they_are(self):
        with Server(*SPLIT, "--metrics-per-layer") as server:
            for text in ("What is 17 + 25?", "Name three colours.", "Who are you? " * 100):
                server.post("/v1/chat/completions", ask(text))
            experts = experts_of(server)
            tiers = flat(experts, "tier")
            self.assertLessEqual(set(tiers), {"device", "host", "moving"})
            self.assertAlmostEqual(tiers.count("device") / len(tiers), 0.4, delta=0.1)
            self.assertTrue(any(ms is not None and ms >= 0 for ms in flat(experts, "last_promoted_ms")))
            # All uses have a tier, a lane and a phase.
            n_uses = sum(experts["uses"].values())
            self.assertGreater(n_uses, 0)
            self.assertEqual(n_uses, sum(experts["lanes"].values()))
            self.assertEqual(n_uses, sum(phase["uses"] for phase in experts["phases"].values()))
            self.assertGreater(experts["evicted"], 0)
            self.assertTrue(all(0 < phase["hit_ratio"] < 1 for phase in experts["phases"].values()))
            samples = samples_of(server)
            moves = {labels["direction"]: value for name, labels, value in samples if name == "thermocline_expert_moves_total"}
            self.assertGreater(moves["promote"], 0)
            self.assertGreater(moves["demote"], 0)
            self.assertEqual({labels["tier"] for name, labels, _ in samples if name == "thermocline_expert_uses_total"}, {"device", "host", "file"})

            stalls = {labels["lane"]: value for name, labels, value in samples if name == "thermocline_moe_stall_seconds_total"}
            self.assertEqual(set(stalls), {"cpu", "gpu", "copy", "file"})
            self.assertGreater(stalls["gpu"], 0)
            self.assertGreater(stalls["copy"], 0)

            def by_layer():
                return [labels for name, labels, _ in samples_of(server) if name == "thermocline_expert_hit_ratio" and "layer" in labels]
            self.assertGreater(len(wait_until(by_layer)), 1)

    def test_in_the_file_are_told_from_those_in_memory(self):
        with Server("-c", "512", "--expert-ram", "40%") as server:
            server.post("/v1/chat/completions", SUM)
            experts = experts_of(server)
            self.assertEqual(set(flat(experts, "tier")), {"host", "file"})
            self.assertEqual(experts["uses"]["device"], 0)
            self.assertGreater(experts["uses"]["host"], 0)
            self.assertEqual(experts["hit_ratio"], experts["uses"]["host"] / sum(experts["uses"].values()))

    def test_have_other_forms_and_windows(self):
        with Server("-c", "512") as server:
            server.post("/v1/chat/completions", SUM)
            experts = experts_of(server)
            uses = flat(experts, "uses")
            rows = list(csv.DictReader(io.StringIO(server.get("/thermo/experts?format=csv"))))
            self.assertEqual([int(row["uses"]) for row in rows], uses)
            self.assertEqual({row["tier"] for row in rows}, {"host"})
            connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
            connection.request("GET", "/thermo/experts?format=bin")
            data = connection.getresponse().read()
            connection.close()
            records = list(struct.iter_unpack("<QfBxxx", data))
            self.assertEqual([record[0] for record in records], uses)
            self.assertEqual({record[2] for record in records}, {1})
            # After a while nothing was used of late.
            wait_until(lambda: sum(flat(experts_of(server, "?window=1s"), "uses")) == 0)
            self.assertEqual(flat(experts_of(server, "?window=all"), "uses"), uses)
            for query in ("?format=xml", "?window=2s"):
                status, _, reply = server.request("GET", "/thermo/experts" + query)
                self.assertEqual(status, 400)
                self.assertIn("expected", reply["error"]["message"])

    def test_are_in_the_live_view(self):
        with Server(*SPLIT) as server:
            server.post("/v1/chat/completions", SUM)
            connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
            connection.request("GET", "/thermo/live?hz=5&heat=1")
            reply = connection.getresponse()
            name, heat, tick = None, None, None
            while not (heat and heat["max"] > 0 and tick and tick["experts"]["hot"]):
                line = reply.readline().decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and name in ("heat", "tick"):
                    data = json.loads(line[6:])
                    heat, tick = (data, tick) if name == "heat" else (heat, data)
            connection.close()
            n = sum(heat["n_expert"])
            packed = base64.b64decode(heat["r"])
            self.assertEqual(len(packed), (n + 3) // 4)
            tiers = [packed[i // 4] >> 2 * (i % 4) & 3 for i in range(n)]
            self.assertIn(2, tiers)  # device
            self.assertIn(1, tiers)  # main memory
            self.assertEqual(tick["experts"]["hot"] + tick["experts"]["cold"], n)
            self.assertEqual(len(heat["layer_hit"]), len(heat["n_expert"]))


class HeatFiles(unittest.TestCase):
    def test_have_names(self):
        with tempfile.TemporaryDirectory() as folder:
            with Server("-c", "512", "--heat-file", pathlib.Path(folder) / "heat.json") as server:
                server.post("/v1/chat/completions", SUM)
                n_tokens = experts_of(server)["n_tokens"]
                server.post("/thermo/heat", {"action": "save", "name": "monday"})
                saved = pathlib.Path(folder) / "monday.json"
                wait_until(saved.exists)
                self.assertEqual(json.loads(saved.read_text())["n_tokens"], n_tokens)
                server.post("/thermo/heat", {"action": "reset"})
                wait_until(lambda: server.get("/thermo/experts")["n_tokens"] == 0)
                server.post("/thermo/heat", {"action": "load", "name": "monday"})
                wait_until(lambda: server.get("/thermo/experts")["n_tokens"] == n_tokens)
                for name, action, status in (("../x", "save", 400), (".x", "save", 400), ("tuesday", "load", 404), ("x", "reset", 400)):
                    self.assertEqual(server.request("POST", "/thermo/heat", {"action": action, "name": name})[0], status, name)
        with Server("-c", "512", "--no-heat-file") as server:
            status, _, reply = server.request("POST", "/thermo/heat", {"action": "save", "name": "x"})
            self.assertEqual(status, 400)
            self.assertIn("a heat file", reply["error"]["message"])


if __name__ == "__main__":
    unittest.main()
