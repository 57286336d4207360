#!/usr/bin/env python3
"""What a trace of --trace says in numbers: each lane's events, and the steps that took long and why.

    trace_report.py FILE [--above MS]

A step is long when it took MS (default 5) more than the median step of as many rows. These explain a long step:

- the thread that runs the step, or a worker, was without a core for longer than usual, by at least half of that excess;
- any threads lost their cores more often than usual;
- more pages than usual were read from disk;
- the events of all lanes together took longer than usual in such a step, by at least half of the excess.

Swaps explain nothing: no step waits for one, and on a GPU a swap is drawn until the end of the step that found it. Exit
code 1: a long step that nothing explains.
"""
import argparse
import collections
import json
import signal
import statistics
import sys

LANES = ["step", "device", "cpu", "fetch", "copy", "disk"]


def load(path):
    with open(path, encoding="utf-8") as file:
        text = file.read().rstrip()
    if not text.endswith("]"):  # the program was killed: what is whole counts
        text = text[:text.rindex("}") + 1] + "]" if text.endswith("}") else text[:text.rindex("},\n") + 1] + "]"
    return [e for e in json.loads(text) if e["ph"] == "X"]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def overlap(event, begin, end):
    return max(0.0, min(end, event["ts"] + event["dur"]) - max(begin, event["ts"]))


def lane_table(events):
    groups = collections.defaultdict(list)
    for e in events:
        groups[(e["tid"], e["name"])].append(e["dur"])
    print(f"{'lane':<8}{'event':<24}{'count':>9}{'total ms':>12}{'p50 us':>11}{'p99 us':>11}{'max us':>11}")
    for (tid, name), durations in sorted(groups.items()):
        print(f"{LANES[tid]:<8}{name:<24}{len(durations):>9}{sum(durations) / 1e3:>12.1f}{percentile(durations, .5):>11.1f}"
              f"{percentile(durations, .99):>11.1f}{max(durations):>11.1f}")


def busy_by_name(events, first, begin, end):
    """Microseconds of each (lane, event) inside [begin, end]; events are sorted by their begin."""
    busy = collections.Counter()
    for i in range(first, len(events)):
        e = events[i]
        if e["ts"] >= end:
            break
        busy[(e["tid"], e["name"])] += overlap(e, begin, end)
    return busy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--above", type=float, default=5.0, metavar="MS")
    arguments = parser.parse_args()
    try:
        events = sorted(load(arguments.file), key=lambda e: e["ts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{arguments.file}: this is no trace that can be read ({error}); give a file of --trace", file=sys.stderr)
        return 2
    if not events:
        print("the trace has no events")
        return 0
    lane_table(events)

    steps = [e for e in events if "rows" in e["args"]]  # the lane also has what drafting did
    others = [e for e in events if LANES[e["tid"]] not in ("step", "copy")]
    longest = max((e["dur"] for e in others), default=0.0)
    medians, preempted, disk_faults, off_core, worker_off_core = {}, {}, {}, {}, {}
    for rows in {e["args"]["rows"] for e in steps}:
        alike = [e for e in steps if e["args"]["rows"] == rows]
        medians[rows] = statistics.median(e["dur"] for e in alike)
        preempted[rows] = percentile([e["args"].get("preempted", 0) for e in alike], .95)
        disk_faults[rows] = percentile([e["args"].get("disk_faults", 0) for e in alike], .95)
        off_core[rows] = statistics.median(e["args"].get("off_core_us", 0) for e in alike)
        worker_off_core[rows] = statistics.median(e["args"].get("worker_off_core_us", 0) for e in alike)

    # Each step's lanes; an event that began before the step may reach into it.
    usual, per_step, first = collections.defaultdict(list), [], 0
    keys = {(e["tid"], e["name"]) for e in others}
    for step in steps:
        begin, end = step["ts"], step["ts"] + step["dur"]
        while first < len(others) and others[first]["ts"] + longest < begin:
            first += 1
        busy = busy_by_name(others, first, begin, end)
        per_step.append(busy)
        for key in keys:
            usual[(step["args"]["rows"], key)].append(busy[key])
    typical = {key: statistics.median(values) for key, values in usual.items()}

    n_long = n_unexplained = 0
    for step, busy in zip(steps, per_step):
        rows = step["args"]["rows"]
        excess = step["dur"] - medians[rows]
        if excess < arguments.above * 1e3:
            continue
        n_long += 1
        more = {key: us - typical[(rows, key)] for key, us in busy.items()}
        key, us = max(more.items(), key=lambda item: item[1], default=((0, "nothing"), 0.0))
        reasons = []
        if sum(max(0.0, extra) for extra in more.values()) >= excess / 2:
            reasons.append(f"mostly {LANES[key[0]]} '{key[1]}', {us / 1e3:.2f} ms more than usual")
        taken, faults = step["args"].get("preempted", 0), step["args"].get("disk_faults", 0)
        alone = step["args"].get("off_core_us", 0) - off_core[rows]
        if alone >= excess / 2:
            reasons.append(f"its thread was {alone / 1e3:.2f} ms longer without a core than usual")
        worker = step["args"].get("worker_off_core_us", 0) - worker_off_core[rows]
        if worker >= excess / 2:
            reasons.append(f"a worker was {worker / 1e3:.2f} ms longer without a core than usual")
        if taken > preempted[rows]:
            reasons.append(f"threads lost their cores {taken} times, usually {preempted[rows]} at most")
        if faults > disk_faults[rows]:
            reasons.append(f"{faults} pages came from disk, usually {disk_faults[rows]} at most")
        n_unexplained += not reasons
        print(f"\nstep of {rows} rows at {step['ts'] / 1e3:.1f} ms took {step['dur'] / 1e3:.2f} ms, usually {medians[rows] / 1e3:.2f}: "
              + ("; ".join(reasons) or "NOT EXPLAINED"))
    print(f"\n{len(steps)} steps, {n_long} of them {arguments.above:g} ms above the median, {n_unexplained} not explained")
    return 1 if n_unexplained else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into head
    sys.exit(main())
