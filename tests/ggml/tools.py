"""Programs of a llama.cpp, with the plugin and without:

    tools.py FOLDER PLUGIN.so MODEL.gguf STEP...

FOLDER has programs built from source, or is xllamacpp: then the server is the one inside that
package, and the first three steps are not possible.

    bench       llama-bench starts and computes
    cli         llama-cli answers
    perplexity  llama-perplexity beside its own figure
    server      two clients at once with long prompts, cancelled requests, a slot saved and restored
    shift       a text that is longer than the server's context
    draft       speculative decoding: the text is that without a draft model
    embedding   vectors of a server, which attends without a causal mask

Every step demands that nodes were taken, and that none are with RINGATTN_GGML=off."""
import ctypes
import http.client
import json
import os
import pydoc_data.topics
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

folder, plugin, model = sys.argv[1:4]
english = " ".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
passed = failed = 0


def verdict(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok    " if good else "FAIL  ") + what, flush=True)


def variables(mode):
    """The third one makes programs look at the first one that have the CPU backend linked in."""
    return dict(os.environ, GGML_BACKEND_PATH=os.path.abspath(plugin), RINGATTN_GGML=mode,
                LLAMA_ARG_OVERRIDE_TENSOR="^$=CPU", RINGATTN_GGML_TRACE="1")


def taken_of(said):
    found = re.search(r"ringattn: (\d+) nodes taken", said)
    return int(found.group(1)) if found else 0


def program(mode, name, *args):
    """Returns what it wrote, nodes taken, and 1 if it ended well."""
    run = subprocess.run([os.path.join(folder, name), "-m", model, *args], env=variables(mode),
                         capture_output=True, text=True, timeout=3000, stdin=subprocess.DEVNULL)
    if run.returncode:
        print(run.stdout[-1000:], run.stderr[-3000:], "exit status", run.returncode)
    return run.stdout + run.stderr, taken_of(run.stderr), run.returncode == 0


def arguments(o):
    """Options of llama-server."""
    out = ["-np", str(o.get("slots", 1)), "-c", str(o["context"]), "--threads", "1", "--no-warmup"]
    if "unified" in o:
        out.append("--kv-unified" if o["unified"] else "--no-kv-unified")
    if "save" in o:
        out += ["--slot-save-path", o["save"]]
    if o.get("shift"):
        out.append("--context-shift")
    if o.get("draft"):
        out += ["-md", model, "--spec-type", "draft-simple", "--spec-draft-n-max", "6"]
    if o.get("embedding"):
        out += ["-ub", "1024", "--embeddings", "--pooling", "mean", "--attention", "non-causal"]
    return out


def serve(o):
    """The same options for the server inside xllamacpp, until stdin ends."""
    import xllamacpp
    folder = os.path.dirname(xllamacpp.__file__)
    file = next(f for f in os.listdir(folder) if f.startswith("xllamacpp.") and f.endswith(".so"))
    ctypes.CDLL(os.path.join(folder, file)).ggml_backend_load_all()
    p = xllamacpp.CommonParams()
    p.model.path, p.n_parallel, p.n_ctx = model, o.get("slots", 1), o["context"]
    p.port, p.warmup = o["port"], False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.endpoint_slots, p.ctx_shift = True, o.get("shift", False)
    p.kv_unified = o.get("unified", True)
    if "save" in o:
        p.slot_save_path = o["save"] + "/"
    if o.get("draft"):
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        p.speculative.draft.mparams.path, p.speculative.draft.n_max = model, 6
        p.speculative.draft.cpuparams.n_threads = 1
        p.speculative.draft.cpuparams_batch.n_threads = 1
    if o.get("embedding"):
        p.embedding, p.n_ubatch = True, 1024
        p.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        p.attention_type = xllamacpp.llama_attention_type.LLAMA_ATTENTION_TYPE_NON_CAUSAL
    server = xllamacpp.Server(p)
    sys.stdin.read()
    del server


class Server:
    """One server. `taken` is known after `end`."""

    def __init__(self, mode, **options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        if folder == "xllamacpp":
            what = [sys.executable, __file__, folder, plugin, model, "--serve",
                    json.dumps(dict(options, port=self.port))]
        else:
            what = [os.path.join(folder, "llama-server"), "-m", model, "--host", "127.0.0.1",
                    "--port", str(self.port), *arguments(options)]
        self.process = subprocess.Popen(what, env=variables(mode), stdin=subprocess.PIPE,
                                        stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                if self.get("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.end()
        sys.exit("the server does not start: " + self.said[-3000:])

    def get(self, how, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1200)
        c.request(how, path, json.dumps(body) if body is not None else None,
                  {"Content-Type": "application/json"})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, json.loads(data) if data else {}

    def text(self, prompt, n=24, **more):
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False,
                "ignore_eos": True, "return_tokens": True, "n_probs": 2, **more}
        status, r = self.get("POST", "/completion", body)
        if status != 200:
            print("status", status, r)
        return r

    def abandon(self, prompt, seconds):
        """A client that goes away before it has an answer."""
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("POST", "/completion", json.dumps(
            {"prompt": prompt, "n_predict": 500, "stream": True, "cache_prompt": False}),
            {"Content-Type": "application/json"})
        time.sleep(seconds)
        c.sock.shutdown(socket.SHUT_RDWR)
        c.close()

    def end(self):
        """Returns 1 if it ended by itself when it was asked to."""
        self.process.stdin.close()
        if folder != "xllamacpp":
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = None
        self.said = open(self.log.name, errors="replace").read()
        self.taken = taken_of(self.said)
        return status == 0


def same(a, b):
    """How many tokens two answers begin with in common."""
    x, y = a.get("tokens", []), b.get("tokens", [])
    return next((i for i in range(min(len(x), len(y))) if x[i] != y[i]), min(len(x), len(y)))


def gap(answer, at):
    """How much likelier the first choice was than the second one, as a difference of logarithms."""
    if at == len(answer.get("tokens", [])):
        return 0
    a, b = answer["completion_probabilities"][at]["top_logprobs"]
    return a["logprob"] - b["logprob"]


def alike(all, others):
    """Answers to the same prompts: tokens in common, and where they part how near the choice was."""
    n = [same(a, b) for a, b in zip(all, others)]
    gaps = [gap(a, i) for a, i in zip(all, n)]
    return max(gaps) < 0.5, "%s of 24 tokens, then choices by %s" % (
        n, ", ".join("%.3f" % g for g in gaps))


def step_bench():
    for mode in ("off", "hook"):
        said, taken, good = program(mode, "llama-bench", "-p", "64", "-n", "4", "-t", "1", "-r", "1",
                                    "-o", "csv")
        verdict(good and (taken > 0) == (mode == "hook"), f"llama-bench, {mode}: {taken} nodes taken")


def step_cli():
    said, taken, good = program("hook", "llama-cli", "-p", "Name a colour.", "-n", "16", "-t", "1",
                                "--temp", "0", "--single-turn", "--simple-io")
    verdict(good and taken > 0, f"llama-cli answers, {taken} nodes taken")


def step_perplexity():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write(english[:40000])
        f.flush()
        for cache in ("f16", "q8_0"):
            found = {}
            for mode in ("off", "hook"):
                said, taken, good = program(mode, "llama-perplexity", "-f", f.name, "-c", "1024",
                                            "-t", "1", "--chunks", "4", "-ctk", cache, "-ctv", cache)
                value = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
                found[mode] = good and value and (float(value.group(1)), taken)
            good = found["off"] and found["hook"]
            verdict(good and abs(found["hook"][0] / found["off"][0] - 1) < 0.01 and
                    found["hook"][1] > 0 and found["off"][1] == 0,
                    f"llama-perplexity, {cache} cache: {found}")


def together(server, prompts):
    """Answers to several clients at the same time."""
    answers = [None] * len(prompts)

    def ask(i):
        answers[i] = server.text(prompts[i])

    all = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for t in all:
        t.start()
    for t in all:
        t.join()
    return answers


def saved_slot(server, prompt):
    """Goes on from a slot that was saved, erased and restored; and from one that was not."""
    on = {"id_slot": 0, "cache_prompt": True, "n": 16}
    first = server.text(prompt, **on)
    more = prompt + first["content"]
    s, r = server.get("POST", "/slots/0?action=save", {"filename": "slot.bin"})
    plain = server.text(more, **on)
    server.get("POST", "/slots/0?action=erase", {})
    t, q = server.get("POST", "/slots/0?action=restore", {"filename": "slot.bin"})
    restored = server.text(more, **on)
    good = (s, t) == (200, 200) and r.get("n_saved", 0) > 300 and \
        q.get("n_restored") == r.get("n_saved") and restored["timings"]["prompt_n"] < 40
    return good, same(plain, restored), restored["timings"]["prompt_n"]


def step_server():
    size = 2000 if folder == "xllamacpp" else 12000    # tokens: about a quarter of it
    prompts = [english[:size], english[20000:20000 + size * 5 // 4]]
    for unified in (True, False):
        with tempfile.TemporaryDirectory() as slots:
            server = Server("hook", slots=2, context=8192, save=slots, unified=unified)
            alone = [server.text(p) for p in prompts]
            both = together(server, prompts)
            for i in range(3):
                server.abandon(english[i * 9000:i * 9000 + 20000], 0.3 + 0.5 * i)
            after = together(server, prompts)
            kept = saved_slot(server, english[40000:42000])
            good = server.end()
        own = Server("off", slots=2, context=8192, unified=unified)
        without = [own.text(p) for p in prompts]
        own.end()
        what = "server, " + ("one cache for all" if unified else "a cache per client")
        verdict(all(len(a.get("tokens", [])) == 24 for x in (alone, both, after, without)
                    for a in x), f"{what}: all answers are whole")
        for name, other in (("two clients at once beside one alone", both),
                            ("the same after three cancelled requests", after),
                            ("one alone beside one without the plugin", without)):
            good, says = alike(alone, other)
            verdict(good, f"{what}: {name}: {says}")
        verdict(kept[0] and kept[1] >= 12, f"{what}: a slot saved, erased and restored goes on: "
                f"{kept[1]} of 16 tokens the same, {kept[2]} tokens read again")
        verdict(good and server.taken > 1000 and own.taken == 0,
                f"{what}: ends when asked to, {server.taken} nodes taken")


def step_shift():
    server = Server("hook", context=256, shift=True)
    r = server.text(english[:400], 400, n_keep=16)
    good = server.end()
    verdict(len(r.get("tokens", [])) == 400 and good and server.taken > 0,
            f"server: 400 tokens in a context of 256, {server.taken} nodes taken")


def step_draft():
    found = []
    for draft in (False, True):
        server = Server("hook", context=2048, draft=draft)
        found.append(server.text(english[:2000], 48))
        good = server.end()
    used = found[1].get("timings", {}).get("draft_n_accepted", 0)
    at = same(*found)
    verdict(good and used > 0 and server.taken > 0 and gap(found[0], at) < 0.5,
            f"server with a draft model: {used} guesses accepted, {at} of 48 tokens as without, "
            f"{server.taken} nodes taken")


def step_embedding():
    found = {}
    for mode in ("off", "hook"):
        server = Server(mode, context=1024, embedding=True)
        _, r = server.get("POST", "/embedding", {"content": english[:1500]})
        server.end()
        v = r[0]["embedding"]
        found[mode] = (v[0] if isinstance(v[0], list) else v, server.taken)
    (a, none), (b, taken) = found["off"], found["hook"]
    far = sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)
    verdict(far < 1e-2 and none == 0 and taken > 0,
            f"server: embeddings are {far:.1e} apart from those without, {taken} nodes taken")


if sys.argv[4] == "--serve":
    serve(json.loads(sys.argv[5]))
    sys.exit()
for s in sys.argv[4:]:
    globals()["step_" + s]()
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or not passed)
