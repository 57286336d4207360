#!/usr/bin/env bash
# Everything that must hold on a GPU, in one call; ends with a table of the results.
#
#   tools/gpu_check.sh [--bin DIR] [--parts LIST] [--limit S] [--logs DIR] [--as LIST] [MODEL.gguf]
#
#   --as LIST     some of 75,80,86,89: the code for such cards, with their limits, on the card that is here: tests, verify,
#                 text and bench for each. With --bin DIR, DIR/as-75 and DIR/as-80 hold the programs.
#   --bin DIR     programs that are already built (thermocline, {device,kernels,model,engine}_test); nothing is built
#   --parts LIST  some of: tests,verify,text,generations,memcheck,racecheck,bench (default: all, in this order)
#   --limit S     most seconds for one step of a part, if its own limit is higher
#   --logs DIR    where the output of each part goes (default: build/gpu-check)
#   MODEL.gguf    what is benchmarked; without one a synthetic 35B-A3B is written to /dev/shm (20 GiB)
#
# Every part has a time limit. Exit status 1 when one of them failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

bin='' as='' parts=tests,verify,text,generations,memcheck,racecheck,bench longest=600 logs=build/gpu-check
model=/dev/shm/thermocline-35b-a3b.gguf
while [ $# -gt 0 ]; do
  case "$1" in
    --bin) bin=$2; shift 2 ;;
    --parts) parts=$2; shift 2 ;;
    --limit) longest=$2; shift 2 ;;
    --logs) logs=$2; shift 2 ;;
    --as) as=$2; shift 2 ;;
    -*) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *) model=$1; shift ;;
  esac
done
mkdir -p "$logs"

# Each kind of card in a call of its own. Code that is chosen by the compute capability is compiled by it, too: PTX of 7.5 knows no
# instruction of 8.0; 8.6 and 8.9 bring nothing that is used, but less shared memory. The PTX is assembled for the card that is here
# now and not by the driver, which would take minutes in every program.
if [ -n "$as" ]; then
  status=0
  here=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .) || exit 1
  [ "$parts" = tests,verify,text,generations,memcheck,racecheck,bench ] && parts=tests,verify,text,bench
  for sm in ${as//,/ }; do
    case $sm in
      75) ptx=75 ;;
      80 | 86 | 89) ptx=80 ;;
      *) echo "--as: '$sm' is not known, use some of 75,80,86,89"; exit 2 ;;
    esac
    if [ -n "$bin" ]; then
      programs=$bin/as-$ptx
    else
      cmake --preset cuda-check -B "build/as-$ptx" -DCMAKE_CUDA_ARCHITECTURES=OFF \
        -DCMAKE_CUDA_FLAGS="-gencode arch=compute_$ptx,code=sm_$here" > /dev/null &&
        cmake --build "build/as-$ptx" -j "$(nproc)" --target thermocline device_test kernels_test model_test engine_test || exit 1
      programs=build/as-$ptx/bin
    fi
    echo "==== as $sm"
    THERMO_MAX_SM=$sm tools/gpu_check.sh --bin "$programs" --parts "$parts" --limit "$longest" --logs "$logs/as-$sm" "$model" || status=1
  done
  exit $status
fi
if [ -z "$bin" ]; then
  cmake --preset gpu-lab > /dev/null && cmake --build --preset gpu-lab -j "$(nproc)" || exit 1
  bin=build/gpu-lab/bin
fi

thermocline="$bin/thermocline"
"$thermocline" run -q --device cuda:0 -n 1 -p hello > /dev/null || exit 1  # says why there is no GPU

table="$logs/table" failures="$logs/failures"
rm -f "$table" "$failures" "$logs"/*.log
# part NAME LIMIT_SECONDS COMMAND...: runs it, keeps its output, remembers how it went. Parts may run side by side.
part() {
  local name=$1 limit=$2 start=$SECONDS log="$logs/${1// /-}.log" result=ok
  shift 2
  echo "== $name"
  [ "$limit" -gt "$longest" ] && limit=$longest
  setsid timeout "$limit" "$@" > "$log" 2>&1 &
  local session=$! status=0
  wait "$session" || status=$?
  pkill -KILL -s "$session"  # what a time limit left: programs under a limit of their own
  if [ $status -ne 0 ]; then
    echo "$name" >> "$failures"
    result="FAILED ($status)"
    [ $status -eq 124 ] && result='OUT OF TIME'
    tail -n 30 "$log"
  fi
  printf '%-28s %-12s %5d s  %s\n' "$name" "$result" $((SECONDS - start)) "$(summary "$log")" >> "$table"
}
# The most informative line of a log.
summary() {
  grep -hE '^\[  PASSED  \]|^passed|^PASSED|same most likely' "$1" | tail -n 2 | tr -s ' ' | paste -sd ';'
}
# each PROCESSES SECONDS PROGRAM FILTER [COMMAND...]: every test of a program in a process of its own, under COMMAND. One that
# takes longer than SECONDS has failed.
# shellcheck disable=SC2016,SC2317  # called through bash -c
each() {
  local processes=$1 status=0 folder
  folder=$(mktemp -d)
  export seconds=$2 program=$3 folder
  "$program" --gtest_list_tests --gtest_filter="$4" | awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }' |
    xargs -P "$processes" -I{} bash -c 'test=$1 start=$SECONDS status=0; shift
      log=$folder/${test//\//-}
      timeout "$seconds" "$@" "$program" --gtest_filter="$test" > "$log" 2>&1 || status=$?
      echo "$((SECONDS - start)) s $test" >> "$folder/times"
      [ $status -eq 0 ] && exit
      if [ $status -eq 124 ]; then echo "OUT OF TIME $test"; else echo "FAILED $test"; fi
      grep -E "FAILED  \\]|Failure|=========" "$log" | head -n 20; tail -n 20 "$log"; exit 1' - {} "${@:5}" || status=$?
  echo "slowest: $(sort -rn "$folder/times" | head -n 5 | paste -sd ';')"
  cat "$folder"/* | awk '/^\[  PASSED  \]/ { passed += $4 } /(ERROR|RACECHECK) SUMMARY/ { found += $4 } END {
    print "passed " passed + 0 " tests, " found + 0 " reports" }'
  rm -r "$folder"
  return "$status"
}
export -f each
wants() { [[ ",$parts," == *",$1,"* ]]; }

cuda_tests='*Cuda*:*Gpu*'
if wants tests; then
  part 'kernels tests' 300 bash -c 'each "$@"' - "$(nproc)" 300 "$bin/kernels_test" "$cuda_tests"  # most of it is references on the CPU
  for name in device model engine; do  # some of these look at how much memory is free: one process
    part "$name tests" 300 "$bin/${name}_test" --gtest_filter="$cuda_tests-*AThousandGenerations*"
  done
fi
if wants verify; then
  for name in qwen35moe qwen35 laguna qwen3moe; do
    part "verify $name" 60 "$thermocline" verify -m "tests/data/$name-f32.gguf" --expected "tests/data/$name-expected.gguf" \
      --device cuda:0 --cache-type-k f32 --cache-type-v f32 --tolerance 1e-4
  done
  # A dense model in parts: the fixture, and FFNs of the real size.
  part 'verify qwen35 split' 60 "$thermocline" verify -m tests/data/qwen35-f32.gguf --expected tests/data/qwen35-expected.gguf \
    --device cuda:0 --expert-cache 40% --cache-type-k f32 --cache-type-v f32 --tolerance 1e-4
  part 'write qwen35' 60 "$thermocline" synth "$logs/qwen35.gguf" --shape qwen35-9b --layers 4 --vocab 4096 -q
  part 'verify qwen35 9b split' 60 "$thermocline" verify -m "$logs/qwen35.gguf" --tokens 70 --device cuda:0 \
    --expert-cache 40% --tolerance 1
  # Heads and experts of the real size, without a gate and a shared expert; single rows against larger steps.
  part 'write qwen3moe' 60 "$thermocline" synth "$logs/qwen3moe.gguf" --shape qwen3moe-30b-a3b --layers 3 --vocab 4096 -q
  part 'verify qwen3moe 30b' 60 "$thermocline" verify -m "$logs/qwen3moe.gguf" --tokens 70 --device cuda:0 --tolerance 1
  part 'verify qwen3moe 30b split' 60 "$thermocline" verify -m "$logs/qwen3moe.gguf" --tokens 70 --device cuda:0 \
    --expert-cache 40% --tolerance 1
  # The expected outputs are of full-precision weights, the file has four bits.
  part 'verify plankton' 60 "$thermocline" verify -m models/plankton-q4_k_m.gguf --expected tests/data/plankton-expected.gguf \
    --device cuda:0 --tolerance 2
fi
# Questions that the model was made for: it is sure of every token. Elsewhere two tokens may be closer than rounding.
# shellcheck disable=SC2317  # called through bash -c
same_text() {
  local question device
  for question in 'What is 17 + 25?' 'What is the capital of France?' 'What is the opposite of hot?' 'Count from 1 to 5.' \
    'What sound does a dog make?' 'Write a Python function for the greatest common divisor.'; do
    local answers=()
    for device in cpu cuda:0; do
      answers+=("$("$thermocline" run -m models/plankton-q4_k_m.gguf --temp 0 -n 64 -q -p "$question" --device "$device")") || return 1
    done
    printf '%s\n  %s\n' "$question" "${answers[0]}"
    [ "${answers[0]}" = "${answers[1]}" ] || { printf 'on the GPU:\n  %s\n' "${answers[1]}"; return 1; }
  done
}
if wants text; then
  for seed in 1 2 3; do  # the built-in text leaves it in doubt: every fourth token is closer to another than rounding
    part "greedy choices of plankton $seed" 60 "$thermocline" bench -m models/plankton-q4_k_m.gguf --device cuda:0 --check \
      --text random -s $seed -p 8 -n 0 -r 1
  done
  export thermocline; export -f same_text
  part 'greedy text of plankton' 60 bash -c same_text
fi
if wants generations; then
  part '1000 generations' 90 "$bin/engine_test" --gtest_filter='GpuEngine.*Memory*'
fi
# A sanitizer slows kernels down a hundredfold: few steps of whole models, and no tests that launch attention for hundreds of
# lengths, where others launch it for a few. racecheck looks at the first launches of each test only, the rest runs as usual. It also
# leaves out DecodeFfnCuda: in its narrowest shape the tool (of CUDA 13.0) reports a write by an instruction that is a NOP, and
# reads of a bulk copy that an mbarrier orders.
# What runs in the background takes turns on the card, and its references are computed on all cores meanwhile.
hundreds_of_lengths='AttentionCuda.GivesARowTheSameBits*'
sanitize() {
  local tool=$1 kernels=$2 launches=$3 models='*Gpu*PrefillDecodeAndTrees*:*GpuSplit*ExpertsMove*'
  local check=(compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 --launch-count "$launches")
  part "$tool kernels" 400 bash -c 'each "$@"' - 6 300 "$bin/kernels_test" "$kernels" "${check[@]}" &
  part "$tool model" 400 bash -c 'each "$@"' - 2 300 "$bin/model_test" "$models" "${check[@]}" &
}
if wants memcheck || wants racecheck; then
  if command -v compute-sanitizer > /dev/null; then
    wants memcheck && sanitize memcheck "*Cuda*-$hundreds_of_lengths" 0
    wants racecheck && sanitize racecheck "*Cuda*-$hundreds_of_lengths:DecodeFfnCuda.*" 100
    wait
  else
    printf '%-28s %-12s\n' sanitizers 'not here' >> "$table"
  fi
fi
if wants bench; then
  [ -f "$model" ] || part 'write a model' 300 "$thermocline" synth "$model" --shape qwen35moe-35b-a3b -q
  part bench 300 "$thermocline" bench -m "$model" --device cuda:0 -p 512,2048 -n 128 --rows '1-64*2' -d 0,16384 -r 3
  # Generation is measured cold and warm.
  part 'bench 60% of the experts' 120 "$thermocline" bench -m "$model" --device cuda:0 --expert-cache 60% -p 512,2048 -n 128,512 -r 2
  part 'bench no expert' 120 "$thermocline" bench -m "$model" --device cuda:0 --expert-cache 0 -p 2048 -n 128 -r 2
fi

echo
wants bench && grep -h '^|' "$logs"/bench*.log
echo
cat "$table"
[ ! -e "$failures" ]
