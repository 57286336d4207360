#!/usr/bin/env python3
"""tools/cuda_flags.sh with fake programs for each kind of machine: a card or none, an nvcc of some version or none."""
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OFF = "-DTHERMO_CUDA=OFF"
CARD = "#!/bin/sh\necho 'NVIDIA Some Card'\n"
BROKEN_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n"


def nvcc(release):
    return f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n"


class CudaFlags(unittest.TestCase):
    def flags(self, **programs):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in programs.items():
                path = pathlib.Path(folder) / name.replace("_", "-")
                path.write_text(text)
                path.chmod(0o755)
            # CUDA_HOME names no folder, so that only the programs above count.
            env = {"PATH": f"{folder}:/usr/bin:/bin", "CUDA_HOME": f"{folder}/none"}
            result = subprocess.run([ROOT / "tools" / "cuda_flags.sh"], env=env, capture_output=True, text=True, check=True)
            return result.stdout.strip().replace(folder, "BIN"), result.stderr

    def test_a_card_and_a_compiler_give_a_build_for_that_card(self):
        flags, why = self.flags(nvidia_smi=CARD, nvcc=nvcc("13.0"))
        self.assertEqual(flags, "-DTHERMO_CUDA=ON -DCMAKE_CUDA_COMPILER=BIN/nvcc -DCMAKE_CUDA_ARCHITECTURES=native")
        self.assertIn("NVIDIA Some Card", why)
        self.assertIn("-DTHERMO_CUDA=ON", self.flags(nvidia_smi=CARD, nvcc=nvcc("12.4"))[0])

    def test_anything_less_gives_a_build_for_the_processor_and_a_reason(self):
        for reason, programs in {
            "no GPU": {"nvcc": nvcc("13.0"), "nvidia_smi": "#!/bin/sh\nexit 127\n"},
            "no GPU that works": {"nvcc": nvcc("13.0"), "nvidia_smi": BROKEN_DRIVER},
            "release 11.8": {"nvidia_smi": CARD, "nvcc": nvcc("11.8")},
            "release 12.3": {"nvidia_smi": CARD, "nvcc": nvcc("12.3")},
            "version": {"nvidia_smi": CARD, "nvcc": "#!/bin/sh\nexit 1\n"},
        }.items():
            flags, why = self.flags(**programs)
            self.assertEqual(flags, OFF, reason)
            self.assertIn(reason, why)

    @unittest.skipIf(os.path.exists("/usr/bin/nvcc") or os.path.exists("/opt/cuda"), "this machine has an nvcc in a usual place")
    def test_a_card_without_a_compiler_says_what_to_install(self):
        flags, why = self.flags(nvidia_smi=CARD)
        self.assertEqual(flags, OFF)
        self.assertIn("install the CUDA toolkit", why)


if __name__ == "__main__":
    unittest.main()
