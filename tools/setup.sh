#!/usr/bin/env bash
# Installs the Debian packages that a set of tasks needs; does nothing if they are installed.
# usage: tools/setup.sh build|test|fuzz ...
# shellcheck disable=SC2034  # the lists are read by their names
set -euo pipefail

packages_build=(g++ cmake ninja-build ccache pkg-config nlohmann-json3-dev libtomlplusplus-dev libfmt-dev
                libspdlog-dev libutf8proc-dev libedit-dev libcurl4-openssl-dev libboost1.81-dev libzstd-dev)
packages_test=(libgtest-dev libgmock-dev python3 python3-jinja2)
packages_fuzz=(clang libclang-rt-14-dev)

wanted=()
for task in "$@"; do
  list="packages_${task}[@]"
  wanted+=("${!list}")
done
# Node and npm are often there from elsewhere.
if [[ " $* " == *" test "* ]]; then
  for program in node:nodejs npm:npm; do
    command -v "${program%:*}" >/dev/null || wanted+=("${program#*:}")
  done
fi

missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done

# The client packages of tests/sdk, pinned, into build/sdk. Without npm or the registry their test is skipped.
install_clients() {
  local here; here=$(cd "$(dirname "$0")/.." && pwd)
  cmp -s "$here/tests/sdk/package.json" "$here/build/sdk/package.json" && [ -d "$here/build/sdk/node_modules/openai" ] && return
  if ! command -v npm >/dev/null; then
    echo "tools/setup.sh: there is no npm, so the tests with client packages will be skipped" >&2
    return
  fi
  mkdir -p "$here/build/sdk"
  cp "$here"/tests/sdk/package*.json "$here/build/sdk/"
  (cd "$here/build/sdk" && npm ci --no-audit --no-fund --silent >/dev/null 2>&1) || {
    rm -rf "$here/build/sdk"
    echo "tools/setup.sh: npm cannot fetch the client packages, so their tests will be skipped" >&2
  }
}
finish() {
  for task in "$@"; do [ "$task" = test ] && install_clients; done
  exit 0
}
[ ${#missing[@]} -eq 0 ] && finish "$@"

if ! command -v apt-get >/dev/null; then
  echo "tools/setup.sh: this system has no apt-get; install what these Debian packages hold: ${missing[*]}" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "tools/setup.sh: run as root, or install: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"
finish "$@"
