#!/usr/bin/env bash
# Installs the Debian packages that a set of tasks needs; does nothing if they are installed.
# usage: tools/setup.sh build|test|fuzz ...
set -euo pipefail

packages_build=(g++ cmake ninja-build ccache pkg-config nlohmann-json3-dev libtomlplusplus-dev libfmt-dev
                libspdlog-dev libutf8proc-dev libedit-dev libcurl4-openssl-dev libboost1.81-dev)
packages_test=(libgtest-dev libgmock-dev python3 python3-jinja2)
packages_fuzz=(clang libclang-rt-14-dev)

wanted=()
for task in "$@"; do
  list="packages_$task[@]"
  wanted+=("${!list}")
done

missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

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
