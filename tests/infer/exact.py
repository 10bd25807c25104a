"""An exact pass over a model in a GGUF file: numpy in double precision, plain and slow, of the Llama
and Gemma 3 families.

    exact.py MODEL.gguf 1,2,3 PREDICT      prints the tokens that follow, the likeliest each time
"""
import sys

import gguf
import numpy as np


class Model:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.values = {k: f.contents() for k, f in reader.fields.items()
                       if not k.startswith("tokenizer.")}
        self.tensors = {t.name: t for t in reader.tensors}
        self.wide = {}
        self.arch = self.values["general.architecture"]
        self.layers = self.get("block_count")
        self.heads = self.get("attention.head_count")
        self.kv_heads = self.get("attention.head_count_kv")
        self.hidden = self.get("embedding_length")
        self.dim = self.get("attention.key_length", self.hidden // self.heads)
        self.gemma = self.arch == "gemma3"

    def get(self, key, otherwise=None):
        return self.values.get(f"{self.arch}.{key}", otherwise)

    def weight(self, name):
        if name not in self.wide:
            t = self.tensors[name]
            shape = [int(x) for x in reversed(t.shape)]
            self.wide[name] = gguf.quants.dequantize(t.data, t.tensor_type).reshape(shape)
        return self.wide[name]

    def norm(self, x, name):
        mean = (x * x).mean(-1, keepdims=True)
        return (x / np.sqrt(mean + self.get("attention.layer_norm_rms_epsilon"))
                * self.weight(name + ".weight"))

    def rotate(self, x, base):
        """x [tokens][heads][dim]: pairs are halves for Gemma, neighbours for Llama."""
        pairs = self.dim // 2
        frequency = (1 / base ** (np.arange(pairs) * 2.0 / self.dim)).astype(np.float32)
        angle = (np.arange(len(x), dtype=np.float32)[:, None] * frequency).astype(np.float64)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        y = np.empty_like(x)
        a, b = ((slice(0, pairs), slice(pairs, None)) if self.gemma
                else (slice(0, None, 2), slice(1, None, 2)))
        y[..., a] = x[..., a] * c - x[..., b] * s
        y[..., b] = x[..., a] * s + x[..., b] * c
        return y

    def attend(self, layer, y):
        n, name = len(y), f"blk.{layer}."
        local = self.gemma and (layer + 1) % 6 != 0
        base = 10000.0 if local else self.get("rope.freq_base", 10000.0)
        q, k, v = ((y @ self.weight(f"{name}attn_{x}.weight").T.astype(float))
                   .reshape(n, -1, self.dim) for x in "qkv")
        if self.gemma:
            q, k = self.norm(q, name + "attn_q_norm"), self.norm(k, name + "attn_k_norm")
        q, k = self.rotate(q, base), self.rotate(k, base)
        k, v = (np.repeat(x, self.heads // self.kv_heads, 1) for x in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.dim)
        far = np.arange(n)[:, None] - np.arange(n)[None]
        seen = (far >= 0) & (far < (self.get("attention.sliding_window") if local else n))
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        return o @ self.weight(name + "attn_output.weight").T.astype(float)

    def feed(self, layer, y):
        name = f"blk.{layer}.ffn_"
        gate, up = (y @ self.weight(name + x + ".weight").T.astype(float) for x in ("gate", "up"))
        if self.gemma:
            gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate ** 3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return (gate * up) @ self.weight(name + "down.weight").T.astype(float)

    def logits(self, tokens):
        """Of all tokens, [tokens][vocabulary]."""
        x = self.weight("token_embd.weight")[tokens].astype(np.float64)
        if self.gemma:
            x = x * np.sqrt(self.hidden)
        for i in range(self.layers):
            for part, norm, after in ((self.attend, "attn_norm", "post_attention_norm"),
                                      (self.feed, "ffn_norm", "post_ffw_norm")):
                y = part(i, self.norm(x, f"blk.{i}.{norm}"))
                x = x + (self.norm(y, f"blk.{i}.{after}") if self.gemma else y)
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return self.norm(x, "output_norm") @ self.weight(head).T.astype(float)


def main():
    model = Model(sys.argv[1])
    tokens = [int(x) for x in sys.argv[2].split(",")]
    start = len(tokens)
    for _ in range(int(sys.argv[3])):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    print(",".join(map(str, tokens[start:])))


if __name__ == "__main__":
    main()
