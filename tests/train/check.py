"""Steps of examples/ring_train.c beside the same in PyTorch, in float64 and float32: the loss of every
step, every gradient of the first, and the weights after the last.

    check.py STEPS      STEPS: the program made of tests/train/steps.c
"""
import math
import os
import struct
import subprocess
import sys
import tempfile

import torch

MODEL = ("--quiet --layers 2 --hidden 64 --heads 4 --kv-heads 2 --feed 96 --tokens 2048 "
         "--warm-up 5 --rate 0.003 --seed 5 --groups 2 --save 1000000").split()
BOTH = (torch.float64, torch.float32)
LINES = [("--steps 20 --ranks 1", BOTH), ("--steps 2 --ranks 2 --recompute", BOTH[:1]),
         ("--steps 20 --ranks 4 --documents --recompute", BOTH),
         ("--steps 2 --ranks 2 --untied --documents", BOTH[:1]),
         ("--steps 2 --ranks 8", BOTH[:1]),
         ("--steps 2 --ranks 4 --layout contiguous --documents", BOTH[:1])]
NAMES = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")


class Run:
    def __init__(self, path):
        with open(path, "rb") as f:
            data = f.read()
        head = struct.unpack_from("<11q", data)
        (self.layers, self.heads, self.kv_heads, self.dim, self.hidden, self.feed, self.tied, self.steps,
         self.sequences, self.context, self.size) = head
        at = 88
        floats = torch.frombuffer(bytearray(data[at:at + 12 * self.size]), dtype=torch.float32)
        self.first, self.grad, self.last = floats.view(3, self.size)
        at += 12 * self.size
        self.loss = struct.unpack_from(f"<{self.steps}d", data, at)
        at += 8 * self.steps
        self.text = torch.frombuffer(bytearray(data[at:]), dtype=torch.uint8).long().view(
            self.steps, self.sequences, self.context + 1)

    def shapes(self):
        q, kv, h, f = self.heads * self.dim, self.kv_heads * self.dim, self.hidden, self.feed
        yield "embedding", (256, h)
        for layer in range(self.layers):
            for name, shape in zip(NAMES, [(h,), (q, h), (kv, h), (kv, h), (h, q), (h,), (f, h), (f, h), (h, f)]):
                yield f"{layer}.{name}", shape
        yield "output_norm", (h,)
        if not self.tied:
            yield "output", (256, h)

    def cut(self, flat):
        out, at = {}, 0
        for name, shape in self.shapes():
            n = math.prod(shape)
            out[name] = flat[at:at + n].view(shape)
            at += n
        assert at == self.size
        return out


def norm(x, w):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def rope(x):
    tokens, dim = x.shape[0], x.shape[2]
    f = 1e6 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    a = torch.arange(tokens, dtype=torch.float64)[:, None] * f
    cos, sin = a.cos().to(x.dtype)[:, None], a.sin().to(x.dtype)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def loss_of(run, w, text, documents):
    n = run.context
    tokens, labels = text[:n], text[1:]
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    if documents:
        document = (tokens == 0).long().cumsum(0)
        sees &= document[:, None] == document[None]
    x = w["embedding"][tokens]
    for i in range(run.layers):
        p = {name: w[f"{i}.{name}"] for name in NAMES}
        y = norm(x, p["attn_norm"])
        q = rope((y @ p["q"].T).view(n, run.heads, run.dim))
        k = rope((y @ p["k"].T).view(n, run.kv_heads, run.dim))
        v = (y @ p["v"].T).view(n, run.kv_heads, run.dim)
        k, v = (z.repeat_interleave(run.heads // run.kv_heads, 1) for z in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(run.dim)
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", weights, v).reshape(n, -1) @ p["o"].T
        y = norm(x, p["ffn_norm"])
        x = x + (torch.nn.functional.silu(y @ p["gate"].T) * (y @ p["up"].T)) @ p["down"].T
    out = w["embedding"] if run.tied else w["output"]
    return torch.nn.functional.cross_entropy(norm(x, w["output_norm"]) @ out.T, labels, reduction="sum")


def rate(step, steps):
    if step < 5:
        return 0.003 * (step + 1) / 5
    part = min((step - 5) / max(steps - 5, 1), 1)
    return 0.003 * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))


def compare(line, program, folder, dtype, bars):
    out = os.path.join(folder, "out")
    subprocess.run([program, out, os.path.join(folder, "text"), *MODEL, "--out", os.path.join(folder, "run"),
                    *line.split()], check=True)
    for name in os.listdir(folder):
        if name.startswith("run"):
            os.remove(os.path.join(folder, name))
    run = Run(out)
    w = {name: x.to(dtype).clone().requires_grad_() for name, x in run.cut(run.first).items()}
    decay = [x for x in w.values() if x.dim() > 1]
    still = [x for x in w.values() if x.dim() == 1]
    adam = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": still, "weight_decay": 0}],
                             lr=0, betas=(0.9, 0.95), eps=1e-8)
    worst = {"loss": 0.0, "gradient": 0.0, "weights": 0.0}
    for step in range(run.steps):
        adam.zero_grad()
        total = 0.0
        for text in run.text[step]:
            loss = loss_of(run, w, text, "--documents" in line) / (run.sequences * run.context)
            loss.backward()
            total += loss.item()
        worst["loss"] = max(worst["loss"], abs(run.loss[step] - total) / total)
        if step == 0:
            for name, g in run.cut(run.grad).items():
                off = (g.to(dtype) - w[name].grad).abs().max() / w[name].grad.abs().max()
                worst["gradient"] = max(worst["gradient"], off.item())
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        for group in adam.param_groups:
            group["lr"] = rate(step, run.steps)
        adam.step()
    for name, x in run.cut(run.last).items():
        # By their rms: a first step of Adam is a sign, so a weight whose gradient is as small as its
        # error may move anywhere.
        moved = (w[name] - run.cut(run.first)[name]).norm()
        worst["weights"] = max(worst["weights"], ((x.to(dtype) - w[name]).norm() / moved).item())
    ok = all(worst[k] <= bars[k] for k in worst)
    print(f"{'ok  ' if ok else 'FAIL'} {line}, {str(dtype)[6:]}: " +
          ", ".join(f"{k} {worst[k]:.1e} of {bars[k]:.0e}" for k in worst), flush=True)
    return ok


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    good = total = 0
    with tempfile.TemporaryDirectory() as folder:
        words = [b"ring ", b"rank ", b"token ", b"a ", b"the ", b"of\n"]
        pick = torch.randint(0, 6, (4000,)).tolist()
        os.mkdir(os.path.join(folder, "text"))         # each file is a document
        for i in range(40):
            with open(os.path.join(folder, "text", f"{i:02}"), "wb") as f:
                f.write(b"".join(words[j] for j in pick[i * 90:i * 90 + 30 + 5 * (i % 13)]))
        for line, dtypes in LINES:
            for dtype in dtypes:
                total += 1
                good += compare(line, sys.argv[1], folder, dtype,
                                {"loss": 1e-6, "gradient": 4e-6, "weights": 2e-4})
    print(f"{good} passed, {total - good} failed")
    return good != total


if __name__ == "__main__":
    sys.exit(main())
