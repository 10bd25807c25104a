"""llama.cpp with and without the plugin of examples/ggml, in turn, on this machine: llama-bench,
wall clock, tokens per second.

  bench/plugin.py LLAMA-BENCH MODEL.gguf     an hour or two for a model of 135M weights
      --plugin FILE                          default: build/libggml-ringattn.so
      --threads 2,1   --caches f16,q8_0
      --prompts 512,1024,2048,4096,8192,16384   --depths 0,4096,8192,16384,32768
      --turns 3                              of prompts and depths up to 4096; beyond that, one
      --quick                                prompts of 64 and 128, one depth: to see that it works
      --draw                                 table and picture from the last run

You will see one line a measurement. build/bench-plugin.json has them all, build/bench-plugin.md is
the table, build/bench-plugin.svg the picture. The last line counts what is at least 0.98 times as
fast as without as passed. A turn without nodes that the plugin has taken is an error. On a machine
that has other work the figures mean nothing: threads of llama.cpp wait by spinning."""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

import picture

LEAST, LARGE = 0.98, 4096
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def numbers(s):
    return [int(x) for x in s.split(",")]


def all_tests(args):
    """What llama-bench is called with: one prompt length, or text at one depth."""
    for cache in args.caches.split(","):
        for n in numbers(args.prompts):
            yield {"cache": cache, "prompt": n, "text": 0, "depth": 0}
        for n in numbers(args.depths):
            yield {"cache": cache, "prompt": 0, "text": args.text, "depth": n}


def name_of(test):
    return "pp%d" % test["prompt"] if test["prompt"] else "tg%(text)d @ d%(depth)d" % test


def tokens_per_second(args, test, mode, repeats):
    """By number of threads, a list."""
    env = dict(os.environ, GGML_BACKEND_PATH=os.path.abspath(args.plugin), RINGATTN_GGML=mode,
               RINGATTN_GGML_TRACE="1")
    run = subprocess.run(
        [args.bench, "-m", args.model, "-t", args.threads, "-p", str(test["prompt"]),
         "-n", str(test["text"]), "-d", str(test["depth"]), "-ctk", test["cache"],
         "-ctv", test["cache"], "-fa", "1", "-r", str(repeats), "-o", "json"],
        env=env, capture_output=True, text=True)
    if run.returncode:
        sys.exit("llama-bench failed: " + run.stderr[-2000:])
    taken = re.search(r"ringattn: (\d+) nodes taken", run.stderr)
    if (mode == "off") != (taken is None or taken.group(1) == "0"):
        sys.exit("nodes taken with RINGATTN_GGML=%s: %s\n%s" % (
            mode, taken and taken.group(1), run.stderr[-2000:]))
    return {r["n_threads"]: r["samples_ts"] for r in json.loads(run.stdout)}


def measure(args, test):
    """Turns of both, each beginning with the other one; one result per number of threads."""
    large = max(test["prompt"], test["depth"]) > LARGE
    turns = 1 if large else args.turns
    seen = {"off": {}, "hook": {}}
    for turn in range(turns):
        for mode in ("off", "hook") if turn % 2 == 0 else ("hook", "off"):
            found = tokens_per_second(args, test, mode, 1 if large and test["prompt"] else 3)
            for threads, samples in found.items():
                seen[mode].setdefault(threads, []).extend(samples)
    for threads in seen["off"]:
        off, hook = (statistics.median(seen[m][threads]) for m in ("off", "hook"))
        yield dict(test, name=name_of(test), threads=threads, off=off, hook=hook,
                   ratio=hook / off, samples={m: seen[m][threads] for m in seen})


def table(info):
    """Markdown: one line a test, columns for caches and threads."""
    caches = sorted({r["cache"] for r in info["rows"]})
    threads = sorted({r["threads"] for r in info["rows"]})
    columns = [(c, t) for c in caches for t in threads]
    heads = ["%s, %d thread%s" % (c, t, "s"[:t > 1]) for c, t in columns]
    lines = ["| | " + " | ".join(heads) + " |",
             "|---" * (len(columns) + 1) + "|"]
    found = {(r["name"], r["cache"], r["threads"]): r for r in info["rows"]}
    for name in dict.fromkeys(r["name"] for r in info["rows"]):
        cells = []
        for c, t in columns:
            r = found.get((name, c, t))
            cells.append("%.4g -> %.4g (%.2f)" % (r["off"], r["hook"], r["ratio"]) if r else "")
        lines.append("| " + " | ".join([name] + cells) + " |")
    return "\n".join(lines) + "\n"


class Drawing(picture.Picture):
    colours = {"f16": "#d1495b", "q8_0": "#2a6fbb"}


def draw(info, args):
    with open(args.json[:-len("json")] + "md", "w") as f:
        f.write(table(info))
    print("\n" + table(info))
    drawing = Drawing([r["ratio"] for r in info["rows"]])
    drawing.title("How many times as fast llama.cpp is with ringattn.h",
                  "%s; %s" % (info["machine"], info["model"]), "the least")
    drawing.legend({cache: cache + " cache" for cache in Drawing.colours})
    for threads in sorted({r["threads"] for r in info["rows"]}):
        for kind, title in (("prompt", "Prompts"), ("text", "Text")):
            lines = {}
            for r in info["rows"]:
                if r["threads"] == threads and r[kind]:
                    lines.setdefault(r["name"], []).append((r["cache"], r["ratio"]))
            if lines:
                drawing.section("%s, %d thread%s" % (title, threads, "s"[:threads > 1]),
                                list(lines.items()))
    with open(args.json[:-len("json")] + "svg", "w") as f:
        f.write(drawing.text())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench")
    parser.add_argument("model")
    parser.add_argument("--plugin", default=os.path.join(ROOT, "build/libggml-ringattn.so"))
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--caches", default="f16,q8_0")
    parser.add_argument("--prompts", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--depths", default="0,4096,8192,16384,32768")
    parser.add_argument("--text", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", default=os.path.join(ROOT, "build/bench-plugin.json"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.depths, args.text, args.turns = "64,128", "128", 4, 1
    if args.draw:
        with open(args.json) as f:
            draw(json.load(f), args)
        return 0
    info = {"machine": picture.machine(), "model": os.path.basename(args.model), "rows": []}
    print("machine  %s\nmodel    %s" % (info["machine"], info["model"]), flush=True)
    for test in all_tests(args):
        for r in measure(args, test):
            info["rows"].append(r)
            print("%-5s %-16s %d threads  %8.2f -> %8.2f tokens/s  %.2f%s" % (
                r["cache"], r["name"], r["threads"], r["off"], r["hook"], r["ratio"],
                "" if r["ratio"] >= LEAST else "  SLOWER"), flush=True)
        with open(args.json, "w") as f:          # a run that is stopped leaves what it has
            json.dump(info, f, indent=1)
    draw(info, args)
    good = sum(r["ratio"] >= LEAST for r in info["rows"])
    print("%d passed, %d failed" % (good, len(info["rows"]) - good))
    return good < len(info["rows"])


if __name__ == "__main__":
    sys.exit(main())
