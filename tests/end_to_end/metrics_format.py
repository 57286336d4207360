"""A checker of Prometheus' text format, for what `promtool check metrics` says about it. Python's own library only."""
import math
import re
import shutil
import subprocess

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
TYPES = ("counter", "gauge", "histogram", "summary", "untyped")
# Units that have a base unit, as promtool's linter lists them.
BAD_UNITS = ("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kilobytes", "megabytes", "gigabytes", "percent",
             "bits", "kelvin", "fahrenheit")
SHORT_UNITS = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "m", "h", "d")


def parse(text):
    """({name: (type, help)}, [(name, labels, value)]); raises ValueError with the line that is wrong."""
    families, samples, closed, current = {}, [], set(), None
    for number, line in enumerate(text.split("\n"), 1):
        def wrong(why):
            return ValueError(f"line {number}: {why}: {line}")
        if not line:
            continue
        if line.startswith("# HELP ") or line.startswith("# TYPE "):
            parts = line.split(" ", 3)
            if len(parts) < 4 or not NAME.fullmatch(parts[2]):
                raise wrong("no name or no text")
            kind, help_text = families.get(parts[2], (None, None))
            if parts[2] in closed:
                raise wrong("a family in two places")
            if current and current != parts[2]:
                closed.add(current)
            current = parts[2]
            if parts[1] == "HELP":
                if help_text is not None:
                    raise wrong("a second HELP")
                families[current] = (kind, parts[3])
            else:
                if kind is not None or parts[3] not in TYPES:
                    raise wrong("a second TYPE, or an unknown one")
                families[current] = (parts[3], help_text)
            continue
        if line.startswith("#"):
            continue
        name = NAME.match(line)
        if not name:
            raise wrong("no name")
        rest, labels = line[name.end():], {}
        if rest.startswith("{"):
            at = 1
            while rest[at] != "}":
                label = LABEL.match(rest[:rest.rindex("}")], at)
                if not label or label[1] in labels:
                    raise wrong("a label")
                labels[label[1]] = label[2]
                at = label.end()
            rest = rest[at + 1:]
        fields = rest.split()
        if len(fields) not in (1, 2) or not rest.startswith(" "):
            raise wrong("no value")
        value = float(fields[0].replace("Inf", "inf"))
        family = next((f for f in (name[0], re.sub(r"_(bucket|sum|count)$", "", name[0])) if f in families), None)
        if family != current:
            raise wrong("a sample outside its family")
        samples.append((name[0], labels, value))
    return families, samples


def problems(text):
    """What is wrong; empty: nothing."""
    try:
        families, samples = parse(text)
    except ValueError as error:
        return [str(error)]
    if not text.endswith("\n"):
        return ["the last line has no end"]
    found, seen = [], set()
    for name, labels, value in samples:
        series = (name, tuple(sorted(labels.items())))
        if series in seen:
            found.append(f"{series}: twice")
        seen.add(series)
        family = name if name in families else re.sub(r"_(bucket|sum|count)$", "", name)
        if families[family][0] == "counter" and not (value >= 0 and math.isfinite(value)):
            found.append(f"{series}: a counter of {value}")
        if families[family][0] != "histogram" and "le" in labels:
            found.append(f"{series}: le is for histograms")
    for name, (kind, help_text) in families.items():
        words = name.split("_")
        if not help_text:
            found.append(f"{name}: no help")
        if kind is None:
            found.append(f"{name}: no type")
        if (kind == "counter") != name.endswith("_total"):
            found.append(f"{name}: _total is the end of counters")
        if kind not in ("histogram", "summary") and words[-1] in ("bucket", "sum", "count"):
            found.append(f"{name}: the end of histograms")
        if any(unit in words for unit in BAD_UNITS) or words[-1] in SHORT_UNITS:
            found.append(f"{name}: not a base unit")
        if any(word in words for word in TYPES) or ":" in name or name != name.lower():
            found.append(f"{name}: a name against the rules")
        if kind == "histogram":
            found += histogram_problems(name, [s for s in samples if s[0].startswith(name + "_")])
    return found


def histogram_problems(name, samples):
    found, series = [], {}
    for sample, labels, value in samples:
        key = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
        entry = series.setdefault(key, {"buckets": [], "count": None, "sum": None})
        if sample == name + "_bucket":
            entry["buckets"].append((float(labels["le"].replace("Inf", "inf")), value))
        else:
            entry[sample[len(name) + 1:]] = value
    for key, entry in series.items():
        bounds = [bound for bound, _ in entry["buckets"]]
        counts = [count for _, count in entry["buckets"]]
        if bounds != sorted(set(bounds)) or not bounds or bounds[-1] != math.inf:
            found.append(f"{name}{key}: bounds")
        elif counts != sorted(counts) or counts[-1] != entry["count"] or entry["sum"] is None:
            found.append(f"{name}{key}: counts")
    return found


def promtool(text):
    """The same of promtool itself; None where it is not installed."""
    program = shutil.which("promtool")
    if not program:
        return None
    result = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True)
    return (result.stdout + result.stderr).splitlines() if result.returncode else []
