"""An unmodified llama.cpp from package registries: the shared object of xllamacpp, which exports the
whole C API, called through cffi. The declarations are those that llama-cpp-py-sync ships for nearly
the same release; its own libraries need a newer glibc than Debian 12 has and are not loaded."""
import ctypes
import glob
import importlib.util
import os
import re
import sys

import cffi
import numpy as np


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        sys.exit(f"there is no package {package}")
    return os.path.dirname(spec.origin)


def library():
    """ENGINE names another library, without models."""
    return os.environ.get("ENGINE") or glob.glob(folder_of("xllamacpp") + "/xllamacpp*.so")[0]


GGUF = """
struct gguf_context *gguf_init_empty(void);
void gguf_free(struct gguf_context *);
void gguf_set_val_u32(struct gguf_context *, const char *, uint32_t);
void gguf_set_val_f32(struct gguf_context *, const char *, float);
void gguf_set_val_str(struct gguf_context *, const char *, const char *);
void ggml_backend_load_all(void);
"""
EXACT = """
typedef struct exact { int replace; int64_t nodes, holes; double worst; } exact;
bool exact_node(struct ggml_tensor *, bool, void *);
void exact_weights(struct ggml_tensor *, void *);
"""

# Random models: what differs from SHAPE, for each architecture. Windows are shorter than the texts.
SHAPE = {"vocab_size": 512, "context_length": 4096, "embedding_length": 256, "block_count": 3,
         "feed_forward_length": 384, "attention.head_count": 8, "attention.head_count_kv": 2,
         "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64,
         "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
RANDOM = {
    "llama": {},
    "qwen3": {"attention.key_length": 128, "attention.value_length": 128,
              "rope.dimension_count": 128, "attention.head_count": 4, "rope.freq_base": 1e6},
    "gemma2": {"attention.sliding_window": 96, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, "block_count": 4},
    "gemma3": {"attention.sliding_window": 96, "attention.key_length": 256, "block_count": 7,
               "attention.value_length": 256, "rope.dimension_count": 256,
               "attention.head_count": 4, "attention.head_count_kv": 1},
    "gpt-oss": {"attention.sliding_window": 96, "block_count": 4, "expert_count": 4,
                "expert_used_count": 2, "expert_feed_forward_length": 96},
    "deepseek2": {"attention.key_length": 576, "attention.value_length": 512,
                  "attention.key_length_mla": 192, "attention.value_length_mla": 128,
                  "attention.q_lora_rank": 128, "attention.kv_lora_rank": 512,
                  "attention.head_count": 4, "attention.head_count_kv": 1, "expert_count": 4,
                  "expert_used_count": 2, "expert_shared_count": 1, "expert_weights_scale": 1.0,
                  "expert_feed_forward_length": 96, "leading_dense_block_count": 1,
                  "expert_gating_func": 2},
}


class Engine:
    """One model: a file, or an architecture of RANDOM. Contexts are made and freed by the caller.
    exact: the shared object of exact.c."""

    def __init__(self, model, trace=False, exact=None):
        text = open(folder_of("llama_cpp_py_sync") + "/_cffi_bindings.py").read()
        self.ffi = ffi = cffi.FFI()
        ffi.cdef(re.search(r'_LLAMA_H_CDEF = """(.*?)"""', text, re.S).group(1) + GGUF + EXACT)
        ctypes.CDLL(library(), mode=ctypes.RTLD_GLOBAL)
        self.lib = lib = ffi.dlopen(library())
        self.exact = exact and ffi.dlopen(os.path.abspath(exact))
        said = sys.stderr.write if trace else len
        self.log = ffi.callback("void(enum ggml_log_level, const char *, void *)",
                                lambda level, s, user: [said(ffi.string(s).decode()), None][1])
        lib.llama_log_set(self.log, ffi.NULL)
        lib.ggml_backend_load_all()
        lib.llama_backend_init()
        p = lib.llama_context_default_params()
        if (p.n_ctx, p.n_batch, p.n_ubatch, p.type_k, p.type_v) != (512, 2048, 512, 1, 1):
            sys.exit("the declarations are not those of the library")
        self.model = self.random(model) if model in RANDOM else lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params())
        if self.model == ffi.NULL:
            sys.exit("no model " + model)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.size = lib.llama_vocab_n_tokens(self.vocab)

    def random(self, arch):
        lib, meta = self.lib, self.lib.gguf_init_empty()
        lib.gguf_set_val_str(meta, b"general.architecture", arch.encode())
        lib.gguf_set_val_str(meta, b"tokenizer.ggml.model", b"none")
        for key, value in {**SHAPE, **RANDOM[arch]}.items():
            set = lib.gguf_set_val_f32 if isinstance(value, float) else lib.gguf_set_val_u32
            set(meta, f"{arch}.{key}".encode(), value)
        model = lib.llama_model_init_from_user(
            meta, self.ffi.addressof(self.exact, "exact_weights"), self.ffi.NULL,
            lib.llama_model_default_params())
        lib.gguf_free(meta)
        return model

    def judge(self, replace=False):
        """For contexts: nodes are compared with double precision, or become exact."""
        return self.ffi.new("exact *", {"replace": replace})

    def context(self, n=2048, threads=1, cache="f16", flash=-1, ubatch=512, sequences=1,
                unified=True, embeddings=False, judge=None):
        p = self.lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n, n, ubatch, sequences
        p.n_threads = p.n_threads_batch = threads
        p.type_k = p.type_v = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}[cache]
        p.flash_attn_type, p.kv_unified, p.embeddings = flash, unified, embeddings
        if embeddings:
            p.attention_type, p.pooling_type = 1, 1    # every token sees all others; their mean
        if judge:
            p.cb_eval, p.cb_eval_user_data = self.ffi.addressof(self.exact, "exact_node"), judge
        c = self.lib.llama_init_from_model(self.model, p)
        if c == self.ffi.NULL:
            sys.exit("no context")
        return c

    def free(self, c):
        self.lib.llama_free(c)

    def tokens(self, text):
        data = text.encode()
        out = self.ffi.new("llama_token[]", len(data) + 8)
        n = self.lib.llama_tokenize(self.vocab, data, len(data), out, len(out), True, False)
        return list(out[0:n])

    def feed(self, c, rows, first=0, every=False, sequences=1):
        """rows: the tokens of one sequence, or lists of them. Returns logits of the last token of
        each sequence, or of all tokens."""
        rows = rows if sequences > 1 else [rows]
        n = sum(len(r) for r in rows)
        b = self.lib.llama_batch_init(n, 0, 1)
        b.n_tokens, at = n, 0
        for s, row in enumerate(rows):
            for i, token in enumerate(row):
                b.token[at], b.pos[at], b.n_seq_id[at] = token, first + i, 1
                b.seq_id[at][0], b.logits[at] = s, every or i == len(row) - 1
                at += 1
        if self.lib.llama_decode(c, b):
            sys.exit("llama_decode failed")
        which = [i for i in range(n) if b.logits[i]]
        out = np.array([np.frombuffer(self.ffi.buffer(
            self.lib.llama_get_logits_ith(c, i), self.size * 4), np.float32) for i in which])
        self.lib.llama_batch_free(b)
        return out

    def greedy(self, c, prompt, n):
        """n tokens, and the logits of each."""
        logits, tokens, first = [self.feed(c, prompt)[-1]], [], len(prompt)
        for i in range(n):
            tokens.append(int(np.argmax(logits[-1])))
            if i < n - 1:
                logits.append(self.feed(c, tokens[-1:], first + i)[-1])
        return tokens, np.array(logits)

    def perplexity(self, tokens, window, **how):
        """exp of the mean loss of the second half of each window, as llama-perplexity has it; and
        each loss."""
        losses, half, step = [], window // 2, 256
        for at in range(0, len(tokens) - window + 1, window):
            c = self.context(n=window, **how)
            part = tokens[at:at + window]
            self.feed(c, part[:half])
            for first in range(half, window, step):    # logits of large vocabularies take memory
                x = self.feed(c, part[first:first + step], first, every=True)
                next = part[first + 1:first + step + 1]
                x = x[:len(next)] - x[:len(next)].max(axis=1, keepdims=True)
                x -= np.log(np.exp(x).sum(axis=1, keepdims=True, dtype=np.float64))
                losses += [float(-a) for a in x[np.arange(len(next)), next]]
            self.free(c)
        return float(np.exp(np.mean(losses))), losses


def nodes(path, device, threads, most):
    """Runs tests/ggml/nodes.c on a device of the engine."""
    lib = ctypes.CDLL(library(), mode=ctypes.RTLD_GLOBAL)
    lib.ggml_backend_load_all()
    f = ctypes.CDLL(os.path.abspath(path)).nodes_run
    f.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
    return f(device.encode(), threads, most)
