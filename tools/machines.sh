#!/usr/bin/env bash
# Which speed can a person expect? For each of some machines, which this one plays with limits: what `plan` expects and what
# `bench` measures, as a table.
#
#   tools/machines.sh [--bin DIR] [--limit S] [--logs DIR] [--files DIR] [--synth "OPTIONS"] [--prompt N] [--answer N] [MACHINE...]
#
#   MACHINE        MODEL,MEMORY,LINK,CORES. MODEL: a GGUF file or a shape of `synth`. MEMORY: of the card (8G), all: what is free
#                  there, cpu: no card, sim40: the stand-in with 40 % of the experts. LINK: bytes a second to the card (12G/s), or -.
#                  Without any: cards of 8 to 24 GiB with 35B-A3B, Laguna XS.2 and dense 27B, and processors alone
#   --bin DIR      where thermocline is (default: build/bin)
#   --limit S      begin nothing after so many seconds (default 600)
#   --logs DIR     where the outputs go (default: build/machines)
#   --files DIR    where models are written, one at a time, and removed (default: /dev/shm, at most 20 GiB)
#   --synth LIST   more options of `synth`: "--layers 4 --vocab 4096"
#   --prompt N, --answer N   tokens that are read and written (default 512 and 64)
#
# Machines of one model should follow each other: a shape is written when its first one begins. After the table come the numbers that
# explain it. Exit status 1: one of them failed.
set -uo pipefail

bin=build/bin limit=600 logs=build/machines files=/dev/shm synth='' prompt=512 answer=64
while [ $# -gt 0 ]; do
  case "$1" in
    --bin) bin=$2; shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --logs) logs=$2; shift 2 ;;
    --files) files=$2; shift 2 ;;
    --synth) synth=$2; shift 2 ;;
    --prompt) prompt=$2; shift 2 ;;
    --answer) answer=$2; shift 2 ;;
    -*) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *) break ;;
  esac
done
if [ $# -eq 0 ]; then
  moe=qwen35moe-35b-a3b laguna=laguna-xs2 dense=qwen35-27b
  set -- $moe,8G,25G/s,8 $moe,12G,25G/s,8 $moe,16G,25G/s,8 $moe,24G,25G/s,8 $moe,8G,12G/s,4 $moe,16G,12G/s,16 \
    $moe,cpu,-,16 $moe,cpu,-,8 $moe,cpu,-,4 \
    $laguna,8G,25G/s,8 $laguna,16G,25G/s,16 $laguna,12G,12G/s,8 $laguna,24G,25G/s,8 \
    $dense,8G,25G/s,8 $dense,12G,25G/s,16 $dense,24G,25G/s,8 $dense,cpu,-,16
fi
mkdir -p "$logs"
export XDG_CACHE_HOME="$logs/cache"  # what this machine reaches is measured afresh
rm -rf "$XDG_CACHE_HOME"
thermocline="$bin/thermocline"
cores=$(nproc)

# number FILE KEY: all values of a key of a JSON file in its usual layout, one a line.
number() { sed -n "s/^ *\"$2\": \(-\{0,1\}[0-9][0-9.e+-]*\),\{0,1\}$/\1/p" "$1"; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (a > 0 && b > 0) printf "%.2f", a / b }'; }
tokens() { awk -v x="$1" 'BEGIN { if (x > 0) printf(x < 100 ? "%.1f" : "%.0f", x) }'; }

rows=() details=() failed=0 written='' shape=''
remove_model() { [ -n "$written" ] && rm -f "$written"; written='' shape=''; }
trap remove_model EXIT
for machine in "$@"; do
  if [ "$SECONDS" -ge "$limit" ]; then
    echo "out of time: $machine and what follows"
    break
  fi
  IFS=, read -r model memory link threads <<< "$machine"
  if [ "$threads" -gt "$cores" ]; then
    echo "left out, $cores cores here: $machine"
    continue
  fi
  file=$model
  if [ ! -f "$model" ]; then
    file="$files/machines-$model.gguf"
    if [ "$shape" != "$model" ]; then
      remove_model
      written=$file
      # shellcheck disable=SC2086  # several options
      "$thermocline" synth "$file" --shape "$model" $synth -q || { failed=1; continue; }
      shape=$model
    fi
  fi
  args=(-t "$threads")
  case $memory in
    cpu) args+=(--device cpu) ;;
    sim*) args+=(--device sim --expert-cache "${memory#sim}%") ;;
    all) args+=(--device cuda:0) ;;
    *) args+=(--device cuda:0 --gpu-memory "$memory") ;;
  esac
  [ "$link" != - ] && args+=(--link-limit "$link")
  log="$logs/${machine//[\/,]/_}"
  start=$SECONDS
  if ! "$thermocline" plan "$file" "${args[@]}" --json > "$log-plan.json" 2> "$log.log" ||
    ! "$thermocline" bench -m "$file" "${args[@]}" -p "$prompt" -n "$answer" -r 1 --heat cold -o json > "$log-bench.json" 2>> "$log.log"; then
    failed=1
    echo "FAILED: $machine"
    tail -n 5 "$log.log"
    continue
  fi
  { read -r read_speed; read -r write_speed; } <<< "$(number "$log-bench.json" avg_ts)"
  expected_read=$(number "$log-plan.json" prefill_tokens_per_second)
  expected_write=$(number "$log-plan.json" decode_tokens_per_second)
  rows+=("| $(basename "$model" .gguf) | $memory | $link | $threads | $(tokens "$expected_write") | $(tokens "$write_speed") | $(
    ratio "$expected_write" "$write_speed") | $(tokens "$expected_read") | $(tokens "$read_speed") | $(ratio "$expected_read" "$read_speed") |")
  detail="$machine: $((SECONDS - start)) s"
  # What explains it, prefill / decode.
  for key in load_seconds bandwidth_gb_s expert_total_bytes expert_resident_bytes expert_hit_ratio all_hot_ratio cpu_bytes_per_token \
    fetched_bytes_per_token streamed_bytes_per_token moe_stall_ns foreseen_ratio parcels_sent parcels_in_time parcels_used; do
    values=$(number "$log-bench.json" $key | paste -sd /)
    [ -n "$values" ] && detail+=", $key $values"
  done
  details+=("$detail")
  echo "$machine: $((SECONDS - start)) s"
done

echo
echo "Tokens a second, expected by plan, measured by bench -p $prompt -n $answer -r 1 --heat cold, and the first over the second."
echo
echo '| model | card | link | cores | decode expected | measured | ratio | prefill expected | measured | ratio |'
echo '|---|---|---|---|---|---|---|---|---|---|'
printf '%s\n' "${rows[@]}"
echo
printf '%s\n' "${details[@]}"
echo
"$thermocline" doctor
cat "$XDG_CACHE_HOME/thermocline/rates.json"
exit $failed
