#!/usr/bin/env bash
# Prints the CMake arguments for what this machine has: a build for its own card if there is a card that works and an nvcc
# that can compile for it, otherwise a build for the processor. The reason goes to stderr.
set -euo pipefail

oldest_nvcc=12.4

# nvcc is often not in PATH; if the environment names one, use that.
find_nvcc() {
  if [ -n "${CUDACXX:-}" ]; then echo "$CUDACXX"; return; fi
  command -v nvcc && return
  for candidate in "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" /opt/cuda/bin/nvcc; do
    [ -x "$candidate" ] && { echo "$candidate"; return; }
  done
  return 0
}

processor_only() {
  echo "CUDA: $1; building for the processor" >&2
  echo "-DTHERMO_CUDA=OFF"
  exit 0
}

cards=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || cards=""
[ -n "$cards" ] || processor_only "no GPU that works"
nvcc=$(find_nvcc)
[ -n "$nvcc" ] || processor_only "there is a GPU, but no nvcc (install the CUDA toolkit $oldest_nvcc or newer)"
version=$("$nvcc" --version 2>/dev/null | sed -nE 's/.*release ([0-9]+\.[0-9]+).*/\1/p') || version=""
[ -n "$version" ] || processor_only "$nvcc does not say its version"
[ "$(printf '%s\n%s\n' "$oldest_nvcc" "$version" | sort -V | head -n 1)" = "$oldest_nvcc" ] ||
  processor_only "$nvcc is release $version, expected $oldest_nvcc or newer"

echo "CUDA: building for $(echo "$cards" | head -n 1) with $nvcc $version" >&2
echo "-DTHERMO_CUDA=ON -DCMAKE_CUDA_COMPILER=$nvcc -DCMAKE_CUDA_ARCHITECTURES=native"
