# Everything a fresh Debian 12 machine needs: `make run` and `make test` install packages, build, and go.
BUILD := build
JOBS  := $(shell nproc)
PROGRAM := $(BUILD)/bin/thermocline
MACHINE  = $(shell tools/cuda_flags.sh)

.PHONY: help run test test-cuda build setup setup-test asan tsan fuzz fuzz-build install uninstall bench format clean

help:  ## list the targets
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/; s/\$$\$$/$$/g' | expand -t 12

run: build  ## build, then answer a prompt with the embedded model
	$(PROGRAM) run -p "What is 17 + 25?" --temp 0

test: setup-test  ## build, then run every test that this machine can
	cmake --preset cpu $(MACHINE)
	cmake --build --preset cpu -j $(JOBS)
	ctest --preset cpu -j $(JOBS) --no-tests=error
	@$(MAKE) --no-print-directory fuzz-build test-cuda

NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
test-cuda: setup-test  ## compile the CUDA parts and test the program without a card; skipped without nvcc
	@if grep -qs '^THERMO_CUDA:BOOL=ON' $(BUILD)/CMakeCache.txt; then \
	  echo "CUDA: compiled and tested with the rest, for the card of this machine"; \
	elif [ -z "$(NVCC)" ]; then \
	  echo "CUDA: skipped, there is no nvcc on this machine; the CUDA parts were not compiled"; \
	else set -ex; \
	  cmake --preset cuda-check -DCMAKE_CUDA_COMPILER=$(NVCC); \
	  cmake --build --preset cuda-check -j $(JOBS) --target thermocline device_test kernels_test model_test engine_test; \
	  ctest --preset cuda-check --no-tests=error; \
	fi

build: setup  ## build build/bin/thermocline, for the GPU where there is one and nvcc
	cmake --preset cpu -DTHERMO_TESTS=OFF $(MACHINE)
	cmake --build --preset cpu -j $(JOBS) --target thermocline

setup:
	@tools/setup.sh build

setup-test:
	@tools/setup.sh build test

asan tsan: setup-test  ## every test under address and undefined-behaviour, or thread sanitizer
	cmake --preset $@
	cmake --build --preset $@ -j $(JOBS)
	ctest --preset $@ -j $(JOBS) --no-tests=error

FUZZ_SECONDS := 60
fuzz-build: setup-test  ## compile the fuzz targets with clang
	@tools/setup.sh fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS) --target fuzz_targets

fuzz: fuzz-build  ## coverage-guided fuzzing with clang, FUZZ_SECONDS for each target
	for program in $(BUILD)/fuzz/bin/fuzz_*; do \
	  target=$${program##*/fuzz_}; mkdir -p $(BUILD)/fuzz/corpus-$$target && \
	  $$program -max_total_time=$(FUZZ_SECONDS) -max_len=65536 $(BUILD)/fuzz/corpus-$$target $(BUILD)/fuzz/seeds-$$target || exit 1; \
	done

# The program, its manual page, completions and an example of a configuration.
PREFIX ?= /usr/local
DEST   = $(DESTDIR)$(PREFIX)
INSTALLED = bin/thermocline share/man/man1/thermocline.1 share/bash-completion/completions/thermocline \
  share/zsh/site-functions/_thermocline share/fish/vendor_completions.d/thermocline.fish share/doc/thermocline/config.toml
install: build  ## install for everybody; PREFIX=$$HOME/.local for yourself
	for file in $(INSTALLED); do mkdir -p "$(DEST)/$$(dirname $$file)" || exit 1; done
	install -m 755 $(PROGRAM) "$(DEST)/bin/thermocline"
	$(PROGRAM) manual > "$(DEST)/share/man/man1/thermocline.1"
	$(PROGRAM) completion bash > "$(DEST)/share/bash-completion/completions/thermocline"
	$(PROGRAM) completion zsh > "$(DEST)/share/zsh/site-functions/_thermocline"
	$(PROGRAM) completion fish > "$(DEST)/share/fish/vendor_completions.d/thermocline.fish"
	install -m 644 docs/config.toml "$(DEST)/share/doc/thermocline/config.toml"

uninstall:  ## remove what install wrote
	for file in $(INSTALLED); do rm -f "$(DEST)/$$file"; done

bench: build  ## measure prefill and decode of the embedded model
	$(PROGRAM) bench

format:  ## format every source file
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

clean:  ## remove everything that was built
	rm -rf $(BUILD)
