"""Holds examples/ring_infer.c against the libraries that the models come from.

    check.py RING_INFER TOKENS FOLDER [OVER_MPI...]

RING_INFER and TOKENS are the built programs, FOLDER is for models, each OVER_MPI is a command that
starts three ranks. For every family: the logits of 512 tokens are those of transformers in f32 to
1e-4 for 1, 2, 3 and 5 ranks and chunks of 1, 7 and 128 tokens, and the tokens that follow are the
same for all of them, with guesses and without, by threads and by processes over TCP, shared memory
and MPI. For every kind of vocabulary: texts are cut into the tokens of tokenizers and
sentencepiece, and a model that has it continues a text and a file with the text of the right tokens.
"""
import os
import socket
import subprocess
import sys

import numpy as np

import make_models
import make_vocabularies

RANKS, CHUNKS, PREDICT = (1, 2, 3, 5), (1, 7, 128), 24
counts = {"passed": 0, "failed": 0}


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
    """Three ranks that are processes: over TCP, if three ports are free, shared memory and MPI."""
    path, tokens, _ = make_models.make("qwen3", folder)
    options = [path, "--ids", "--tokens", ",".join(map(str, tokens)), "--predict", str(PREDICT),
               "--cache", "f32"]
    expected = [b"%d" % x for x in generate(program, path, tokens) or [-1]]
    apart = [program] + options + ["--at", ",".join(free_ports(3)), "--rank"]
    others = [subprocess.Popen(["timeout", "120"] + apart + [str(r)]) for r in (1, 2)]
    got = run(apart + ["0"]).stdout.split()
    check(all(each.wait() == 0 for each in others), "TCP: a rank failed")
    check(got == expected, "TCP: other tokens follow")
    for guesses in ([], ["--speculate", "4"]):
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


def check_vocabulary(program, name, path, encode):
    texts = make_vocabularies.texts()
    stdin = b"".join(b"%d\n" % len(t.encode()) + t.encode() for t in texts)
    lines = run([program, path], input=stdin).stdout.decode().split("\n")
    other = back = 0
    for i, text in enumerate(texts):
        got = lines[2 * i] if 2 * i + 1 < len(lines) else "none"
        other += got.split() != [str(x) for x in encode(text)]
        special = name != "spm" and any(s in text for s in make_vocabularies.SPECIAL)
        back += not special and lines[2 * i + 1:2 * i + 2] != ["1"]
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
    ring_infer, tokens, folder = sys.argv[1:4]
    os.makedirs(folder, exist_ok=True)
    for name, (path, encode, decode) in make_vocabularies.make_all(folder).items():
        check_vocabulary(tokens, name, path, encode)
        check_text(ring_infer, name, path, encode, decode, folder)
    for name in make_models.MODELS:
        check_model(ring_infer, name, folder)
    check_processes(ring_infer, folder, sys.argv[4:])
    check_refusals(ring_infer)
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    return counts["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
