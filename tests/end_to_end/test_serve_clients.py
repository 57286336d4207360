#!/usr/bin/env python3
"""The `openai` and `@anthropic-ai/sdk` packages against `serve`. Skipped, with a message, where they are not installed:
tools/setup.sh test puts them into build/sdk."""
import os
import pathlib
import shutil
import subprocess
import unittest

from harness import ROOT
from server_harness import WIDE, Server

MODULES = pathlib.Path(os.environ.get("THERMO_SDK_MODULES", ROOT / "build/sdk"))


class Clients(unittest.TestCase):
    def test_clients_that_people_use(self):
        if shutil.which("node") is None or not (MODULES / "node_modules/openai").exists():
            self.skipTest(f"no Node, or no packages in {MODULES}: run tools/setup.sh test where npm can be reached")
        with Server("--parallel", "4", *WIDE) as server:
            done = subprocess.run(["node", str(ROOT / "tests/sdk/clients.mjs"), server.url, str(MODULES)], capture_output=True,
                                  text=True, timeout=600)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr + server.logged()[-3000:])
            print(done.stdout)


if __name__ == "__main__":
    unittest.main()
