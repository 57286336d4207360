#!/usr/bin/env bash
# Builds for the GPU of this machine, tests, verifies and measures, in one call:
#   tools/gpu_check.sh [MODEL.gguf]        without a model a synthetic 35B-A3B is written to /dev/shm
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/gpu-lab
cmake --preset gpu-lab > /dev/null
cmake --build "$build" -j "$(nproc)"
ctest --test-dir "$build" -R '^(kernels|model|engine)$' --output-on-failure

thermocline="$build/bin/thermocline"
for name in qwen35moe qwen35 laguna; do
  "$thermocline" verify -m "tests/data/$name-f32.gguf" --expected "tests/data/$name-expected.gguf" --device cuda:0 \
    --cache-type-k f32 --cache-type-v f32
done

model="${1:-/dev/shm/thermocline-35b-a3b.gguf}"
[ -f "$model" ] || "$thermocline" synth "$model" --shape qwen35moe-35b-a3b
"$build/bin/gpu_bench" "$model" --deep 16384
if command -v compute-sanitizer > /dev/null; then
  compute-sanitizer --tool memcheck "$build/bin/model_test" --gtest_filter='*Gpu*MatchesTheReference*:*Gpu*Trees*'
fi
