"""Holds examples/ring_infer.c against the libraries that the models come from.

    check.py RING_INFER TOKENS WIDEN FOLDER DOWNLOADS [OVER_MPI...]

RING_INFER, TOKENS and WIDEN are the built programs, FOLDER is for models, DOWNLOADS has packages
with models (wheels) and with llama.cpp's vocabularies (a source archive), each OVER_MPI is a command
that starts three ranks. For every family: the logits of 512 tokens are those of transformers in f32 to
1e-4 for 1, 2, 3 and 5 ranks and chunks of 1, 7 and 128 tokens, and the tokens that follow are the
same for all of them, with guesses and without, by threads and by processes over TCP, shared memory
and MPI. For every kind of vocabulary: texts are cut into the tokens of tokenizers and
sentencepiece, and a model that has it continues a text and a file with the text of the right tokens.
Quantised blocks are widened to the bits of the gguf package. Models as packages ship them continue a
prompt as an exact pass does.
"""
import glob
import os
import signal
import socket
import subprocess
import sys
import tarfile
import unicodedata
import zipfile

import gguf
import numpy as np

import exact
import make_models
import make_vocabularies

RANKS, CHUNKS, PREDICT = (1, 2, 3, 5), (1, 7, 128), 24
WIDENED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
           "IQ4_XS", "MXFP4")
counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print("FAIL", what)


def run(command, **more):
    return subprocess.run(command, capture_output=True, timeout=120, **more)


def generate(program, path, tokens, *options):
    """What follows the tokens; None: it failed."""
    got = run([program, path, "--ids", "--cache", "f32", "--tokens", ",".join(map(str, tokens)),
               "--predict", str(PREDICT), *options])
    if got.returncode:
        print(got.stderr.decode()[-300:])
        return None
    return [int(x) for x in got.stdout.split()]


def check_model(program, name, folder):
    path, tokens, expected = make_models.make(name, folder)
    logits = os.path.join(folder, "logits.bin")
    worst, first = 0, None
    for ranks in RANKS:
        for chunk in CHUNKS:
            what = f"{name}, {ranks} ranks, chunks of {chunk}"
            follows = generate(program, path, tokens, "--ranks", str(ranks), "--chunk", str(chunk),
                               "--logits", logits)
            if follows is None:
                check(False, what)
                continue
            got = np.fromfile(logits, np.float32).reshape(-1, expected.shape[1])[:len(tokens)]
            far = float(np.abs(got - expected).max()) if len(got) == len(tokens) else np.inf
            worst, first = max(worst, far), first or follows
            check(far <= 1e-4, f"{what}: logits differ by {far:.2e}")
            check(follows == first, f"{what}: other tokens follow")
    guessed = generate(program, path, tokens, "--ranks", "2", "--speculate", "4")
    check(guessed == first, f"{name}: other tokens follow with guesses")
    print(f"{name:16} logits up to {np.abs(expected).max():.1f}, at most {worst:.1e} away")
    os.remove(path)


def free_ports(count):
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    at = ["127.0.0.1:%d" % each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return at


def check_processes(program, folder, over_mpi):
    """Three ranks that are processes: over TCP, if three ports are free, shared memory and MPI. If
    they split products, of experts too, the text is the same."""
    path, tokens, _ = make_models.make("gpt-oss-mxfp4", folder)
    expected = generate(program, path, tokens)
    for more in ("yes", "no"):
        got = generate(program, path, tokens, "--shm", "--ranks", "3", "--split", more)
        check(got == expected, f"experts, --split {more}: other tokens follow")
    path, tokens, _ = make_models.make("qwen3", folder)
    options = [path, "--ids", "--tokens", ",".join(map(str, tokens)), "--predict", str(PREDICT),
               "--cache", "f32"]
    expected = [b"%d" % x for x in generate(program, path, tokens) or [-1]]
    apart = [program] + options + ["--at", ",".join(free_ports(3)), "--rank"]
    others = [subprocess.Popen(["timeout", "120"] + apart + [str(r)]) for r in (1, 2)]
    got = run(apart + ["0"]).stdout.split()
    check(all(each.wait() == 0 for each in others), "TCP: a rank failed")
    check(got == expected, "TCP: other tokens follow")
    for guesses in ([], ["--speculate", "4"], ["--speculate", "4", "--split", "yes"]):
        got = run([program] + options + ["--shm", "--ranks", "3"] + guesses).stdout.split()
        check(got == expected, "shared memory: other tokens follow")
        for command in over_mpi:
            got = run(command.split() + options + guesses).stdout.split()
            check(got == expected, f"{command}: other tokens follow")


def check_refusals(program):
    """Values out of range: a sentence that names the limits. No file is opened before."""
    start = [program, "none.gguf", "--tokens", "1"]
    for options, says in ((["--ranks", "65"], "no whole number from 1 to 64"),
                          (["--ranks", "0"], "no whole number from 1 to 64"),
                          (["--threads", "x"], "no whole number from 1 to 1024"),
                          (["--seed", "99999999999999999999"], "no whole number from 0 to 92233"),
                          (["--top-p", "2"], "'2' is no number from 0 to 1"),
                          (["--at", "x", "--rank", "0"], "lists 1; 2 to 64 addresses"),
                          (["--at", "x:1,,y:1", "--rank", "2"], "2 is not in 0..1"),
                          (["--at", "x:1,y:1", "--rank", "0", "--ranks", "2"], "--at says how many"),
                          (["--rank", "0"], "--at and --rank go together")):
        done = subprocess.run(start + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=60)
        check(done.returncode == 1 and says.encode() in done.stderr,
              f"{' '.join(options)}: {done.stderr.decode(errors='replace')}")


def check_widening(program):
    """Random blocks of every quantised type have the bits of the gguf package. NaNs are equal."""
    for name in WIDENED:
        kind = gguf.GGMLQuantizationType[name]
        raw = np.random.default_rng(int(kind)).integers(
            0, 256, (2000, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        got = np.frombuffer(run([program, str(int(kind))], input=raw.tobytes()).stdout, np.float32)
        with np.errstate(all="ignore"):
            want = gguf.quants.dequantize(raw, kind).ravel()
        same = len(got) == len(want) and (
            (got.view(np.uint32) == want.view(np.uint32)) | np.isnan(got) & np.isnan(want)).all()
        check(same, f"{name}: blocks are widened to other floats")


def check_split(program, folder):
    """A model in three files gives the text of one file; a part alone is refused."""
    path, tokens, _ = make_models.make("qwen3", folder)
    want = generate(program, path, tokens)
    reader = gguf.GGUFReader(path)
    parts = [f"{path[:-5]}-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for i, part in enumerate(parts):
        out = gguf.GGUFWriter(part, "qwen3")
        for key, field in reader.fields.items() if i == 0 else ():
            if "." in key and key != "general.architecture":
                out.add_key_value(key, field.contents(), *field.types[:2])
        out.add_uint16("split.no", i)
        out.add_uint16("split.count", 3)
        out.add_int32("split.tensors.count", len(reader.tensors))
        for t in reader.tensors[i::3]:
            out.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        make_vocabularies.end(out)
    check(generate(program, parts[0], tokens) == want, "three files: other tokens follow")
    done = run([program, parts[1], "--tokens", "1", "--ids"])
    check(done.returncode == 1 and b"file 2 of 3" in done.stderr, "the second of three files")
    os.remove(parts[2])
    done = run([program, parts[0], "--tokens", "1", "--ids"])
    check(done.returncode == 1 and b"00003-of-00003" in done.stderr, "a missing file")


def check_ends(program, folder):
    """Ranks that differ say so within seconds; a full disk and a full context have a status."""
    path, _, _ = make_models.make("qwen3", folder)
    start = [program, path, "--ids", "--tokens", "1,2,3", "--predict", "8"]
    at = ",".join(free_ports(2))
    other = subprocess.Popen(start + ["--at", at, "--rank", "1", "--seed", "2"],
                             stderr=subprocess.PIPE)
    done = run(start + ["--at", at, "--rank", "0"])
    check(done.returncode == 1 and b"differs from rank 0 in the seed" in done.stderr and
          b"differs from rank 1 in the seed" in other.communicate(timeout=30)[1] and
          other.returncode == 1, f"ranks that differ: {done.stderr.decode()}")
    check(run(start + ["--context", "6"]).returncode == 2, "a full context")
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, timeout=60)
    check(done.returncode == 1 and b"cannot be written" in done.stderr, "a full disk")


def unpack(downloads, folder):
    """Files of the packages; models in parts are put together. Returns the folder's models."""
    for wheel in glob.glob(os.path.join(downloads, "*.whl")):
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder, [n for n in z.namelist() if ".gguf" in n])
    for archive in glob.glob(os.path.join(downloads, "*.tar.gz")):
        with tarfile.open(archive) as t:
            t.extractall(folder, [m for m in t if "/ggml-vocab-" in m.name], filter="data")
    found = glob.glob(os.path.join(folder, "**", "*.gguf"), recursive=True)
    parts = sorted(glob.glob(os.path.join(folder, "**", "*.gguf.part*"), recursive=True))
    if parts:
        whole = os.path.join(folder, os.path.basename(parts[0]).rsplit(".", 1)[0])
        with open(whole, "wb") as out:
            for part in parts:
                with open(part, "rb") as f:
                    out.write(f.read())
        found.append(whole)
    return [f for f in found if "ggml-vocab-" not in f]


def check_turns(program, path):
    """A second turn of a chat gets the text of a run with both turns as one prompt, whether the
    first text has ended or was cut. A text ends before a stop text. Ctrl-C ends it with figures."""
    start = [program, path, "--cache", "f32", "--predict"]
    form = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
    for predict in ("4", "60"):
        first = run([*start, predict, "--prompt", form % "Name one colour."]).stdout.decode()
        both = form % "Name one colour." + first + "<|im_end|>\n" + form % "And a fruit?"
        want = run([*start, predict, "--prompt", both]).stdout.decode()
        for ranks in ("1", "3"):
            got = run([*start, predict, "--chat", "chatml", "--interactive", "--ranks", ranks,
                       "--shm"], input=b"Name one colour.\nAnd a fruit?\n").stdout.decode()
            check(got == f"{first}\n{want}\n", f"turns: {got!r} for {first!r}, {want!r}")
    text = run([*start, "24", "--prompt", "One, two, three, four,"]).stdout.decode()
    stop = text[len(text) // 2:len(text) // 2 + 5]
    for more in ([], ["--ranks", "3", "--speculate", "4"]):
        got = run([*start, "24", "--prompt", "One, two, three, four,", "--stop", "@@", "--stop",
                   stop, *more]).stdout.decode()
        check(got == text[:text.index(stop)], f"--stop {stop!r}: {got!r}")
    for more in ([], ["--ranks", "3", "--shm"]):
        with subprocess.Popen([*start, "8000", "--prompt", "One, two,", "--stop", "@@", *more],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as text:
            text.stdout.read(5)
            text.send_signal(signal.SIGINT)
            says = text.communicate(timeout=60)[1]
            check(text.returncode == 130 and b"tokens/s" in says, f"Ctrl-C: {says.decode()}")


def check_packages(program, tokens, downloads, folder):
    """Models of packages, unchanged: the likeliest tokens are those of an exact pass, on 3 ranks.
    Vocabularies of llama.cpp: its test texts have the tokens that it expects."""
    models = unpack(downloads, folder)
    for path in models:
        model = exact.Model(path)
        prompt = np.random.default_rng(1).integers(5, 30000, 20).tolist()
        follows = generate(program, path, prompt, "--ranks", "3") or []
        if "smollm2" in path.lower():
            check_turns(program, path)
        best = model.logits(prompt + follows)[len(prompt) - 1:-1].argmax(-1).tolist()
        logits = model.logits(prompt)[:-1]
        odds = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), prompt[1:]]
        says = run([program, path, "--perplexity", "--tokens", ",".join(map(str, prompt)),
                    "--cache", "f32", "--ranks", "2"]).stdout.split()
        check(len(says) == 2 and abs(float(says[0]) / np.exp(odds.mean()) - 1) < 1e-4 and
              int(says[1]) == len(prompt) - 1, f"{path}: perplexity {says}, {np.exp(odds.mean())}")
        check(len(follows) > 4 and best == follows, f"{path}: {follows}, exactly {best}")
    vocabularies = glob.glob(os.path.join(folder, "**", "ggml-vocab-*.inp"), recursive=True)
    held = 0
    for path in sorted(vocabularies):
        with open(path, encoding="utf-8") as f:
            texts = f.read().split("\n__ggml_vocab_test__\n")
        with open(path[:-3] + "out", encoding="utf-8") as f:
            want = [line.split() for line in f.read().split("\n")]
        stdin = b"".join(b"%d\n" % len(t.encode()) + t.encode() for t in texts)
        done = run([tokens, path[:-4], "plain"], input=stdin)
        got = [line.split() for line in done.stdout.decode().split("\n")[::2]]
        held += done.returncode == 0
        if done.returncode == 0:
            check(got[:len(texts)] == want[:len(texts)], f"{path}: other tokens")
    check(not vocabularies or held >= 14, f"only {held} vocabularies are read")
    counts["skipped"] += (not models) + (not vocabularies)


def check_vocabulary(program, name, path, encode):
    texts = make_vocabularies.texts()
    stdin = b"".join(b"%d\n" % len(t.encode()) + t.encode() for t in texts)
    lines = run([program, path], input=stdin).stdout.decode().split("\n")
    other = back = 0
    for i, text in enumerate(texts):
        got = lines[2 * i] if 2 * i + 1 < len(lines) else "none"
        other += got.split() != [str(x) for x in encode(text)]
        special = name != "spm" and any(s in text for s in make_vocabularies.SPECIAL)
        whole = name != "qwen2" or unicodedata.is_normalized("NFC", text)
        back += not special and whole and lines[2 * i + 1:2 * i + 2] != ["1"]
    check(other == 0, f"{name}: {other} of {len(texts)} texts have other tokens")
    check(back == 0, f"{name}: {back} of {len(texts)} texts do not come back")


def check_text(program, name, vocabulary, encode, decode, folder):
    """The text that follows a text is that of the tokens that follow its tokens."""
    path, _, _ = make_models.make("qwen3", folder, vocabulary)
    for i, text in enumerate(["Once upon a time,", make_vocabularies.texts()[-1]]):
        more = ["--cache", "f32", "--predict", str(PREDICT), "--ranks", str(1 + i)]
        follows = generate(program, path, encode(text)) or [0]
        with open(os.path.join(folder, "prompt.txt"), "w", encoding="utf-8", newline="") as f:
            f.write(text)
        for given in (["--prompt", text], ["--file", f.name, "--speculate", "4"]):
            got = run([program, path, *given, *more]).stdout.decode(errors="replace")
            check(got == decode(follows), f"{name}: other text follows {given}: {got!r}")


def main():
    ring_infer, tokens, widen, folder, downloads = sys.argv[1:6]
    os.makedirs(folder, exist_ok=True)
    check_widening(widen)
    check_split(ring_infer, folder)
    check_ends(ring_infer, folder)
    check_packages(ring_infer, tokens, downloads, os.path.join(folder, "packages"))
    for name, (path, encode, decode) in make_vocabularies.make_all(folder).items():
        check_vocabulary(tokens, name, path, encode)
        check_text(ring_infer, name, path, encode, decode, folder)
    for name in make_models.MODELS:
        check_model(ring_infer, name, folder)
    check_processes(ring_infer, folder, sys.argv[6:])
    check_refusals(ring_infer)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return counts["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
