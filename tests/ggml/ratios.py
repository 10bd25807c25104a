"""Tokens per second with and without the plugin: ratios.py OFF.csv HOOK.csv, both from runs of
llama-bench in turn. Fails where the median ratio is below 0.98."""
import csv
import statistics
import sys


def read(path):
    runs, head = {}, None
    for row in csv.reader(open(path)):
        if row[0] == "build_commit":
            head = row
            continue
        x = dict(zip(head, row))
        runs.setdefault(tuple(x[k] for k in ("n_threads", "type_k", "n_prompt", "n_gen", "n_depth")),
                        []).append(float(x["avg_ts"]))
    return runs


off, hook, passed, failed = read(sys.argv[1]), read(sys.argv[2]), 0, 0
for key in off:
    a, b = statistics.median(off[key]), statistics.median(hook[key])
    good = b >= 0.98 * a
    passed, failed = passed + good, failed + (not good)
    print("%s threads, %s cache, prompt %s, text %s, depth %s: %.1f -> %.1f tokens/s, %.2f%s" %
          (*key, a, b, b / a, "" if good else " SLOWER"))
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or not passed)
