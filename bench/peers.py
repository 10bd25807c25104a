"""The same attention by other libraries and by ringattn.h, in turn, on this machine.

  make bench-peers                    all of it, about ten minutes
  make bench-peers ONLY="decode bf16" rows with all of these words: prefill, short, decode,
                                      backward, f32, bf16, f16, q8_0, full, causal, D64, D128, Tq8,
                                      threads1, threads2
  bench/peers.py --quick              short sequences, two turns: to see that all of it works
  bench/peers.py --processor-time     on a machine that is busy with other work, for threads1 alone
  bench/peers.py --svg FILE           where the picture goes; --draw draws it from the last run

Others are PyTorch (scaled_dot_product_attention and its autograd), ONNX Runtime
(MultiHeadAttention, GroupQueryAttention), OpenVINO (ScaledDotProductAttention, with a state for
cached keys) and, over caches in f16 and q8_0, ggml (ggml_flash_attn_ext out of the wheel of
pywhispercpp, built for AVX2). They are installed by pip into build/peers/venv, about 6 GB and two
minutes, since torch brings CUDA's libraries; what cannot be installed is skipped. Where a library
has several ways to compute a row, the fastest one counts. Each result is compared with the others'
and with a reference in double precision before anything is timed.

You will see one line a row: our median time, and for each other library how many times as long it
takes (median of the ratios of calls made in turn, and their spread, (p90 - p10) over the median).
build/bench-peers.json has them all, build/bench-peers.svg draws those of one thread."""
import argparse
import collections
import ctypes
import json
import math
import os
import subprocess
import sys
import time

import picture

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOME = os.path.join(ROOT, "build", "peers")
PYTHON = os.path.join(HOME, "venv", "bin", "python")
PACKAGES = {"numpy": ["numpy"], "onnxruntime": ["onnxruntime", "onnx"], "openvino": ["openvino"],
            "pywhispercpp": ["pywhispercpp"], "torch": ["torch"]}


# ---------------------------------------------------------------------------- environment
def has_package(name):
    return subprocess.run([PYTHON, "-c", "import " + ", ".join(PACKAGES[name])],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def make_environment():
    """Installs what is missing; says what cannot be had."""
    os.makedirs(HOME, exist_ok=True)
    if not os.path.exists(PYTHON):
        print("making build/peers/venv", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", os.path.join(HOME, "venv")]).returncode:
            print("skipped: python3 -m venv does not work here")
            return
    for name, packages in PACKAGES.items():
        if has_package(name):
            continue
        print("installing", name, flush=True)
        path = os.path.join(HOME, "pip-%s.log" % name)
        with open(path, "w") as log:
            command = [PYTHON, "-m", "pip", "install", "--no-input"] + packages
            try:
                subprocess.run(command, stdout=log, stderr=log, timeout=1200)
            except subprocess.TimeoutExpired:
                pass
        if not has_package(name):
            print("skipped: %s cannot be installed, see build/peers/pip-%s.log" % (name, name))


if __name__ == "__main__" and os.path.abspath(sys.prefix) != os.path.join(HOME, "venv"):
    if not {"--draw", "-h", "--help"} & set(sys.argv):
        make_environment()
    if os.path.exists(PYTHON):
        os.execv(PYTHON, [PYTHON] + sys.argv)

try:
    import numpy as np
except ImportError:
    print("skipped: nothing can be compared without numpy")
    sys.exit(0)


def optional(name):
    try:
        return __import__(name)
    except ImportError:
        print("skipped: no", name)
        return None


# ---------------------------------------------------------------------------- rows and data
# name: prefill, short (2 to 32 queries over a cache), decode (one query), backward; causal: queries
# are the last positions. Tensors are [heads][tokens][dim].
Row = collections.namedtuple("Row", "name dtype causal dim tq tk hq hkv threads")


def words_of(row):
    return [row.name, row.dtype, "causal" if row.causal else "full", "D%d" % row.dim,
            "Tq%d" % row.tq, "Tk%d" % row.tk, "threads%d" % row.threads]


def all_rows(quick):
    tokens, cache = (512, 2048) if quick else (4096, 32768)
    rows = []
    for threads in (1, 2):
        for dtype in ("f32", "bf16"):
            for name in ("prefill", "backward"):
                for dim in (64, 128):
                    for causal in (False, True):
                        rows.append(Row(name, dtype, causal, dim, tokens, tokens, 8, 8, threads))
            for tq in (1, 2, 4, 8, 16, 32):
                name = "decode" if tq == 1 else "short"
                rows.append(Row(name, dtype, True, 128, tq, cache, 32, 8, threads))
        for dtype in ("f16", "q8_0"):
            for tq in (1, 8):
                name = "decode" if tq == 1 else "short"
                rows.append(Row(name, dtype, True, 128, tq, cache, 32, 8, threads))
    order = {"prefill": 0, "decode": 1, "short": 1, "backward": 2}
    return sorted(rows, key=lambda r: (r.threads, order[r.name], r.dtype != "f32"))


def to_bf16(x):
    """Nearest even, as uint16."""
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(h):
    return (h.astype(np.uint32) << 16).view(np.float32)


def to_q8_0(x):
    """Blocks of a scale in f16 and 32 int8, as bytes."""
    blocks = x.reshape(-1, 32)
    scale = (abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    whole = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127)
    packed = np.concatenate([scale.view(np.uint8), whole.astype(np.int8).view(np.uint8)], 1)
    return packed.reshape(x.shape[:-1] + (-1,)), (whole * scale).astype(np.float32).reshape(x.shape)


class Data:
    """q, k, v: f32 whose values have the row's dtype. raw: the same as stored. Of f16 and q8_0 only
    k and v."""

    def __init__(self, row):
        rng = np.random.default_rng(1)
        self.raw, self.dtype = {}, row.dtype
        shapes = {"q": (row.hq, row.tq), "k": (row.hkv, row.tk), "v": (row.hkv, row.tk)}
        if row.name == "backward":
            shapes["do"] = (row.hq, row.tq)
        for name, (heads, tokens) in shapes.items():
            x = rng.standard_normal((heads, tokens, row.dim), dtype=np.float32)
            if row.dtype == "bf16":
                self.raw[name] = to_bf16(x)
                x = from_bf16(self.raw[name])
            elif row.dtype == "f16" and name != "q":
                self.raw[name] = x.astype(np.float16)
                x = self.raw[name].astype(np.float32)
            elif row.dtype == "q8_0" and name != "q":
                self.raw[name], x = to_q8_0(x)
            else:
                self.raw[name] = x
            setattr(self, name, x)

    def out(self, shape):
        return np.zeros(shape, np.uint16 if self.dtype == "bf16" else np.float32)

    def plain(self, x):
        return from_bf16(x) if x.dtype == np.uint16 else np.array(x, np.float32)


def reference(row, data, head, i):
    """One row of the output in double precision."""
    kv = head // (row.hq // row.hkv)
    seen = row.tk - row.tq + i + 1 if row.causal else row.tk
    k, v = (x[kv, :seen].astype(np.float64) for x in (data.k, data.v))
    s = k @ data.q[head, i].astype(np.float64) / math.sqrt(row.dim)
    p = np.exp(s - s.max())
    return p @ v / p.sum()


def mask_of(row, tk, folded):
    """[rows][keys], True where a query sees a key. folded: the queries of a group of heads follow
    one another as rows of one head."""
    one = np.arange(tk)[None, :] <= np.arange(tk - row.tq, tk)[:, None]
    return np.tile(one, (row.hq // row.hkv, 1)) if folded else one


# ---------------------------------------------------------------------------- the libraries
# A form is one way to compute a row: run() is timed, before() is not; result() returns f32 arrays,
# the output or the gradients of q, k and v.
Form = collections.namedtuple("Form", "peer form run result before", defaults=[lambda: None])


CACHES = ("f32", "bf16", "f16", "q8_0")            # dtypes of K and V; q of the last two is f32


class Ours:
    ADDRESSES = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv")

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.peers_create.restype = ctypes.c_void_p
        self.lib.peers_run.argtypes = self.lib.peers_destroy.argtypes = [ctypes.c_void_p]
        self.lib.peers_error.argtypes = [ctypes.c_void_p]
        self.lib.peers_error.restype = self.lib.peers_isa.restype = ctypes.c_char_p
        self.isa = self.lib.peers_isa().decode()

    def call(self, row, arrays, backward):
        shape = (ctypes.c_int64 * 9)(CACHES.index(row.dtype), row.causal, row.tq, row.tk, row.hq,
                                     row.hkv, row.dim, row.threads, backward)
        data = (ctypes.c_void_p * 9)(*[arrays[n].ctypes.data if n in arrays else None
                                       for n in self.ADDRESSES])
        return self.lib.peers_create(shape, data)

    def run(self, call):
        if self.lib.peers_run(call) != 0:
            raise RuntimeError("ringattn.h: " + self.lib.peers_error(call).decode())

    def forms(self, row, data):
        a = dict(data.raw)
        a["o"] = data.out((row.hq, row.tq, row.dim))
        if row.name == "backward":
            a["lse"] = np.zeros((row.hq, row.tq), np.float32)
            for name in ("q", "k", "v"):
                a["d" + name] = data.out(a[name].shape)
            self.run(self.call(row, a, False))
        call = self.call(row, a, row.name == "backward")
        names = ("dq", "dk", "dv") if row.name == "backward" else ("o",)
        return [Form("ringattn.h", self.isa, lambda: self.run(call),
                     lambda: [data.plain(a[n]) for n in names])]


class Torch:
    def __init__(self):
        self.torch = optional("torch")
        self.version = self.torch and "PyTorch " + self.torch.__version__

    def tensor(self, data, name):
        raw = data.raw[name][None]
        if data.dtype == "bf16":
            return self.torch.from_numpy(raw.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(raw)

    def forms(self, row, data):
        if not self.torch:
            return []
        torch, sdpa = self.torch, self.torch.nn.functional.scaled_dot_product_attention
        t = {name: self.tensor(data, name) for name in data.raw}
        torch.set_num_threads(row.threads)
        if row.name == "backward":
            return self.backward(row, t, sdpa)
        if row.hq == row.hkv:
            return [self.form("", row, lambda: sdpa(t["q"], t["k"], t["v"], is_causal=row.causal))]
        group = row.hq // row.hkv
        folded = t["q"].view(1, row.hkv, group * row.tq, row.dim)
        masks = [None if row.tq == 1 else torch.from_numpy(mask_of(row, row.tk, f)) for f in (0, 1)]
        return [self.form("enable_gqa", row,
                          lambda: sdpa(t["q"], t["k"], t["v"], attn_mask=masks[0],
                                       enable_gqa=True)),
                self.form("folded", row,
                          lambda: sdpa(folded, t["k"], t["v"], attn_mask=masks[1]))]

    def form(self, name, row, call):
        kept = []

        def run():
            with self.torch.no_grad():
                kept[:] = [call()]

        return Form("PyTorch", name, run, lambda: [self.array(kept[0], row)],
                    lambda: self.torch.set_num_threads(row.threads))

    @staticmethod
    def array(x, row):
        return x.float().numpy().reshape(-1, row.tq if x.shape[-2] % row.tq == 0 else x.shape[-2],
                                         row.dim)

    def backward(self, row, t, sdpa):
        leaves, kept = [t[n].detach().clone().requires_grad_(True) for n in ("q", "k", "v")], []
        out = sdpa(*leaves, is_causal=row.causal)

        def run():
            kept[:] = self.torch.autograd.grad(out, leaves, t["do"], retain_graph=True)

        return [Form("PyTorch", "autograd", run, lambda: [x[0].float().numpy() for x in kept],
                     lambda: self.torch.set_num_threads(row.threads))]


class OnnxRuntime:
    def __init__(self):
        self.ort = optional("onnxruntime") if optional("onnx") else None
        self.version = self.ort and "ONNX Runtime " + self.ort.__version__

    def session(self, node, inputs, outputs, threads):
        from onnx import TensorProto, helper
        types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}

        def values(arrays):
            return [helper.make_tensor_value_info(n, types[a.dtype], a.shape)
                    for n, a in arrays.items()]

        graph = helper.make_graph([node], "attention", values(inputs), values(outputs))
        model = helper.make_model(graph, ir_version=9, opset_imports=[
            helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)])
        options = self.ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        return self.ort.InferenceSession(model.SerializeToString(), options,
                                         providers=["CPUExecutionProvider"])

    def form(self, name, node, inputs, outputs, row):
        """outputs with the name of an input plus _out share its memory."""
        session = self.session(node, inputs, outputs, row.threads)
        binding, kept = session.io_binding(), {}
        for n, a in inputs.items():
            kept[n] = self.ort.OrtValue.ortvalue_from_numpy(a)
            binding.bind_ortvalue_input(n, kept[n])
        for n, a in outputs.items():
            kept[n] = kept[n[:-4]] if n.endswith("_out") else \
                self.ort.OrtValue.ortvalue_from_numpy(a)
            binding.bind_ortvalue_output(n, kept[n])

        def result():
            o = kept["o"].numpy().reshape(row.tq, row.hq, row.dim)
            return [np.ascontiguousarray(o.transpose(1, 0, 2))]

        return Form("ONNX Runtime", name, lambda: session.run_with_iobinding(binding), result)

    @staticmethod
    def flat(x):
        """[heads][tokens][dim] to [1][tokens][heads * dim]."""
        return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(1, x.shape[1], -1)

    def mha(self, row, data):
        from onnx import helper
        node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["o"],
                                domain="com.microsoft", num_heads=row.hq,
                                unidirectional=int(row.causal))
        inputs = {n: self.flat(getattr(data, n)) for n in ("q", "k", "v")}
        return self.form("MultiHeadAttention", node, inputs, {"o": np.zeros_like(inputs["q"])}, row)

    def gqa(self, row, data):
        """New keys are those of the queries; the others are in the cache, which is shared between
        input and output so that nothing is copied."""
        from onnx import helper
        new = row.tk - row.tq
        names = ["q", "k", "v", "past_k", "past_v", "seqlens", "total"]
        node = helper.make_node("GroupQueryAttention", names, ["o", "past_k_out", "past_v_out"],
                                domain="com.microsoft", num_heads=row.hq, kv_num_heads=row.hkv)
        inputs = {"q": self.flat(data.q), "k": self.flat(data.k[:, new:]),
                  "v": self.flat(data.v[:, new:]), "past_k": data.k[None].copy(),
                  "past_v": data.v[None].copy(), "seqlens": np.array([row.tk - 1], np.int32),
                  "total": np.array([row.tk], np.int32)}
        outputs = {"o": np.zeros_like(inputs["q"]), "past_k_out": inputs["past_k"],
                   "past_v_out": inputs["past_v"]}
        return self.form("GroupQueryAttention f32", node, inputs, outputs, row)

    def forms(self, row, data):
        """f32 alone; over a cache that is held against rows in bf16 too."""
        if not self.ort or row.name == "backward":
            return []
        if row.hq != row.hkv:
            return [self.gqa(row, data)]
        if row.dtype == "bf16":
            return []
        return [self.mha(row, data)] + ([self.gqa(row, data)] if row.causal else [])


class OpenVino:
    def __init__(self):
        self.ov = optional("openvino")
        self.version = self.ov and "OpenVINO " + self.ov.__version__.split("-")[0]

    def tensor(self, x):
        if x.dtype == np.uint16:
            return self.ov.Tensor(x, x.shape, self.ov.Type.bf16)
        return self.ov.Tensor(x)

    def request(self, results, sinks, parameters, row):
        from openvino import opset13 as op
        model = self.ov.Model([op.result(x) for x in results], sinks, parameters)
        compiled = self.ov.Core().compile_model(model, "CPU", {
            "INFERENCE_NUM_THREADS": row.threads, "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": row.dtype, "KV_CACHE_PRECISION": row.dtype})
        return compiled.create_infer_request()

    def form(self, name, request, row, data, before=lambda: None):
        def run():
            request.start_async()
            request.wait()

        def result():
            o = request.get_output_tensor(0).data
            o = from_bf16(o.view(np.uint16)) if row.dtype == "bf16" else np.array(o)
            return [o.reshape(row.hq, row.tq, row.dim)]

        return Form("OpenVINO", name, run, result, before)

    def whole(self, row, data):
        from openvino import opset13 as op
        kind = self.ov.Type.bf16 if row.dtype == "bf16" else self.ov.Type.f32
        arrays = [data.raw[n][None] for n in ("q", "k", "v")]
        inputs = [op.parameter(a.shape, kind) for a in arrays]
        o = op.scaled_dot_product_attention(*inputs, causal=row.causal)
        request = self.request([o], [], inputs, row)
        for i, a in enumerate(arrays):
            request.set_input_tensor(i, self.tensor(a))
        return self.form("", request, row, arrays)

    def state(self, name, new, beam, row, kind):
        """The cache as a state to which `new` is appended; its heads are repeated in the graph,
        which the plug-in turns into one node that does not repeat them."""
        from openvino import opset13 as op

        def numbers(*x):
            return op.constant(np.array(x, np.int64))

        axis = [op.constant(np.array(i, np.int64)) for i in range(3)]
        zero = op.convert(op.constant(np.float32(0)), row.dtype)
        empty = op.broadcast(zero, numbers(1, row.hkv, 0, row.dim))
        shape = self.ov.PartialShape([-1, row.hkv, -1, row.dim])
        past = op.gather(op.read_value(empty, name, kind, shape), beam, axis[0])
        both = op.concat([past, new], 2)
        sink, group, size = op.assign(both, name), row.hq // row.hkv, op.shape_of(both)
        sizes = op.concat([op.gather(size, numbers(0, 1), axis[0]), numbers(group),
                           op.gather(size, numbers(2, 3), axis[0])], 0)
        repeated = op.broadcast(op.unsqueeze(both, axis[2]), sizes,
                                broadcast_spec="BIDIRECTIONAL")
        return sink, op.reshape(repeated, numbers(0, row.hq, -1, row.dim), True)

    def cached(self, row, data):
        """Each call appends its tokens: after some calls the cache is a little longer than ours."""
        from openvino import opset13 as op
        kind = self.ov.Type.bf16 if row.dtype == "bf16" else self.ov.Type.f32
        inputs = [op.parameter(self.ov.PartialShape([1, heads, -1, row.dim]), kind)
                  for heads in (row.hq, row.hkv, row.hkv)]
        beam = op.parameter(self.ov.PartialShape([-1]), self.ov.Type.i32)
        sinks, caches = zip(*[self.state(n, x, beam, row, kind)
                              for n, x in (("k", inputs[1]), ("v", inputs[2]))])
        inputs.append(beam)
        if row.tq > 1:
            inputs.append(op.parameter(self.ov.PartialShape([1, 1, -1, -1]), kind))
        o = op.scaled_dot_product_attention(inputs[0], *caches, *inputs[4:], causal=False)
        request = self.request([o], list(sinks), inputs, row)
        old, kept = row.tk - row.tq, []
        for i, n in enumerate(("q", "k", "v")):
            kept.append(np.ascontiguousarray(data.raw[n][None, :, old if i else 0:]))
            request.set_input_tensor(i, self.tensor(kept[-1]))
        kept.append(np.zeros(1, np.int32))
        request.set_input_tensor(3, self.tensor(kept[-1]))
        for state in request.query_state():
            first = np.ascontiguousarray(data.raw[state.name][None, :, :old])
            state.state = self.tensor(first)
        calls = [0]

        def before():
            if row.tq > 1:
                seen = mask_of(row, row.tk + calls[0] * row.tq, False)
                m = np.where(seen, np.float32(0), np.float32(-1e30))[None, None]
                kept[4:] = [to_bf16(m) if row.dtype == "bf16" else m]
                request.set_input_tensor(4, self.tensor(kept[4]))
            calls[0] += 1

        return self.form("state", request, row, kept, before)

    def forms(self, row, data):
        if not self.ov or row.name == "backward":
            return []
        return [self.whole(row, data) if row.hq == row.hkv else self.cached(row, data)]


class GgmlInit(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_size_t), ("memory", ctypes.c_void_p),
                ("no_alloc", ctypes.c_bool)]


class GgmlPlan(ctypes.Structure):          # what follows the first two fields differs by version
    _fields_ = [("work_bytes", ctypes.c_size_t), ("work", ctypes.c_void_p),
                ("rest", ctypes.c_uint8 * 128)]


class Ggml:
    """ggml_flash_attn_ext on its CPU back end, out of the shared objects of a wheel."""
    TYPES = {"f32": 0, "f16": 1, "q8_0": 8}

    def __init__(self):
        package = optional("pywhispercpp")
        self.version = None
        if not package:
            return
        folder = os.path.join(os.path.dirname(os.path.dirname(package.__file__)),
                              "pywhispercpp.libs")
        try:
            for name in ("libgomp", "libggml-base", "libggml-cpu"):
                path = [x for x in os.listdir(folder) if x.startswith(name + "-")]
                lib = ctypes.CDLL(os.path.join(folder, path[0]), mode=ctypes.RTLD_GLOBAL)
                self.base, self.cpu = (lib, None) if name == "libggml-base" else \
                    (getattr(self, "base", None), lib)
            self.declare()
        except (OSError, IndexError, AttributeError) as e:
            print("skipped: ggml out of pywhispercpp:", e)
            return
        self.cpu.ggml_cpu_init()
        self.version = "ggml " + path[0].split(".so.")[-1]

    def declare(self):
        p, i, n, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
        base = {"init": (p, [GgmlInit]), "new_tensor_3d": (p, [p, i, n, n, n]), "free": (None, [p]),
                "get_data": (p, [p]), "new_graph": (p, [p]), "build_forward_expand": (None, [p, p]),
                "flash_attn_ext": (p, [p, p, p, p, p, f, f, f])}
        cpu = {"cpu_init": (None, []), "graph_plan": (GgmlPlan, [p, i, p]),
               "graph_compute": (i, [p, ctypes.POINTER(GgmlPlan)])}
        for lib, names in ((self.base, base), (self.cpu, cpu)):
            for name, (result, arguments) in names.items():
                function = getattr(lib, "ggml_" + name)
                function.restype, function.argtypes = result, arguments

    def tensor(self, context, dtype, array, tokens, dim):
        t = self.base.ggml_new_tensor_3d(context, self.TYPES[dtype], dim, tokens, array.shape[0])
        array = np.ascontiguousarray(array)
        ctypes.memmove(self.base.ggml_get_data(t), array.ctypes.data, array.nbytes)
        return t

    def forms(self, row, data):
        if not self.version or row.dtype not in ("f16", "q8_0"):
            return []
        size = sum(x.nbytes for x in data.raw.values()) + 8 * row.tq * row.hq * row.dim
        size += 4 * row.tk * row.tq + (16 << 20)
        context = self.base.ggml_init(GgmlInit(size, None, False))
        q = self.tensor(context, "f32", data.raw["q"], row.tq, row.dim)
        k, v = (self.tensor(context, row.dtype, data.raw[n], row.tk, row.dim) for n in ("k", "v"))
        mask = None
        if row.tq > 1:
            seen = np.where(mask_of(row, row.tk, False), 0, -np.inf).astype(np.float16)[None]
            mask = self.tensor(context, "f16", seen, row.tq, row.tk)
        out = self.base.ggml_flash_attn_ext(context, q, k, v, mask, 1 / math.sqrt(row.dim), 0, 0)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, out)
        plan = self.cpu.ggml_graph_plan(graph, row.threads, None)
        work = np.zeros(plan.work_bytes + 64, np.uint8)
        plan.work = work.ctypes.data

        def run(kept=(work, plan)):
            if self.cpu.ggml_graph_compute(graph, ctypes.byref(plan)) != 0:
                raise RuntimeError("ggml_graph_compute failed")

        def result():
            at = ctypes.cast(self.base.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
            o = np.ctypeslib.as_array(at, (row.tq, row.hq, row.dim))
            return [np.ascontiguousarray(o.transpose(1, 0, 2))]

        return [Form("ggml", "", run, result)]


# ---------------------------------------------------------------------------- measuring
def quantile(x, p):
    return float(np.quantile(np.array(x), p))


def spread(x):
    return (quantile(x, 0.9) - quantile(x, 0.1)) / quantile(x, 0.5)


clock = time.perf_counter


def seconds(form):
    form.before()
    time.sleep(0.01)                       # threads of the one before have stopped to spin
    start = clock()
    form.run()
    return clock() - start


def errors(row, data, forms):
    """Runs each form once and returns its largest error: forward against some rows in double
    precision and against ours everywhere; gradients against ours, in units of the largest."""
    found, ours = [], None
    rng = np.random.default_rng(2)
    picks = [(int(rng.integers(row.hq)), int(rng.integers(row.tq))) for _ in range(6)]
    for form in forms:
        seconds(form)
        got = form.result()
        if ours is None:
            ours = got
        if row.name == "backward":
            worst = max(float(abs(x - y).max() / abs(y).max()) for x, y in zip(got, ours))
        else:
            worst = max(float(abs(got[0][h, i] - reference(row, data, h, i)).max())
                        for h, i in picks)
            worst = max(worst, float(abs(got[0] - ours[0]).max()))
        found.append(worst)
    return found


def tolerance(row):
    """Of unit-normal data: bf16 rounds outputs up to 4 to 8 bits, and weights; ggml rounds queries
    to the dtype of the cache."""
    return {"bf16": 0.06, "f16": 5e-3, "q8_0": 2e-2}.get(row.dtype, 2e-4)


def measure(row, libraries, turns, budget):
    """Rows of the JSON file, one a library."""
    data = Data(row)
    forms = []
    for library in libraries:
        if row.dtype in ("f16", "q8_0") and not isinstance(library, (Ours, Ggml)):
            continue
        try:
            forms += library.forms(row, data)
        except Exception as e:             # go on with the next row
            print("skipped: %s for %s: %s" % (type(library).__name__, " ".join(words_of(row)),
                                              str(e).strip().split("\n")[-1][:120]))
    wrong = errors(row, data, forms)
    for form, e in zip(forms, wrong):
        if not e <= tolerance(row):
            print("differs: %s %s by %.2g in %s" % (form.peer, form.form, e,
                                                    " ".join(words_of(row))))
    kept = [(f, e) for f, e in zip(forms, wrong) if e <= tolerance(row)]
    if not kept or kept[0][0].peer != "ringattn.h":
        return []
    best = {}
    for form, e in kept:
        t = min(seconds(form), seconds(form))
        if form.peer not in best or t < best[form.peer][0]:
            best[form.peer] = (t, form, e)
    once = sum(t for t, _, _ in best.values())
    turns = max(turns, min(15, int(budget / once)))
    times = {peer: [] for peer in best}
    for _ in range(turns):
        for peer, (_, form, _) in best.items():
            times[peer].append(seconds(form))
    return [result_of(row, peer, best[peer], times) for peer in best if peer != "ringattn.h"]


def result_of(row, peer, best, times):
    ours, theirs = times["ringattn.h"], times[peer]
    ratios = [t / o for t, o in zip(theirs, ours)]
    return {"name": row.name, "dtype": row.dtype, "mask": "causal" if row.causal else "none",
            "Dk": row.dim, "Dv": row.dim, "Tq": row.tq, "Tk": row.tk, "Hq": row.hq, "Hkv": row.hkv,
            "threads": row.threads, "peer": peer, "form": best[1].form, "turns": len(ratios),
            "ours_s": quantile(ours, 0.5), "ours_spread": spread(ours),
            "peer_s": quantile(theirs, 0.5), "peer_spread": spread(theirs),
            "ratio": quantile(ratios, 0.5), "ratio_spread": spread(ratios), "error": best[2]}


def print_row(row, results, seconds_s):
    print("%-52s %9.2f ms " % (" ".join(words_of(row)), results[0]["ours_s"] * 1e3), end="")
    for r in results:
        name = r["peer"] + (" " + r["form"] if r["form"] else "")
        print("  %.2f x (%.0f %%) %s" % (r["ratio"], r["ratio_spread"] * 100, name), end="")
    print("  [error %.1g, %.0f s]" % (max(r["error"] for r in results), seconds_s), flush=True)


# ---------------------------------------------------------------------------- the picture
COLOURS = {"PyTorch": "#d1495b", "ONNX Runtime": "#2a6fbb", "OpenVINO": "#2a9d6f",
           "ggml": "#8d6cab"}
TITLES = {"prefill": "Prefill, 8 heads", "cache": "Queries over a cache, 32 query and 8 kv heads",
          "backward": "Backward, 8 heads"}


def section_of(r):
    return "cache" if r["name"] in ("decode", "short") else r["name"]


def label_of(r):
    if section_of(r) == "cache":
        return "%s, %d quer%s, %d keys" % (r["dtype"], r["Tq"], "y" if r["Tq"] == 1 else "ies",
                                           r["Tk"])
    return "%s, %s, D = %d, %d tokens" % (r["dtype"], "causal" if r["mask"] == "causal" else "full",
                                          r["Dk"], r["Tq"])


class Drawing(picture.Picture):
    colours = COLOURS

    def head(self, info):
        self.title("How many times as long others take as ringattn.h", info["machine"] +
                   ", one thread", "the nearest one")
        self.legend({peer: next((v for v in info["versions"] if v.startswith(peer)), peer)
                     for peer in COLOURS})


def draw(info, path):
    results = [r for r in info["rows"] if r["threads"] == 1]
    if not results:
        return
    drawing = Drawing([r["ratio"] for r in results])
    drawing.head(info)
    for section, title in TITLES.items():
        lines = {}
        for r in results:
            if section_of(r) == section:
                lines.setdefault(label_of(r), []).append(r)
        if lines:
            drawing.section(title, [(label, [(r["peer"], r["ratio"]) for r in of])
                                    for label, of in lines.items()])
    with open(path, "w") as f:
        f.write(drawing.text())
    print("drawn:", os.path.relpath(path))


# ---------------------------------------------------------------------------- summary
# The least that ours should be ahead, one thread, N = 4096: what the row is held against, and which
# rows and libraries. Peers None: all of them.
TARGETS = [
    (1.12, "f32 full", dict(name="prefill", dtype="f32", mask="none"),
     ("ONNX Runtime", "OpenVINO")),
    (1.4, "f32 causal, GroupQueryAttention", dict(name="prefill", dtype="f32", mask="causal"),
     ("ONNX Runtime",)),
    (2.4, "f32 causal, the rest", dict(name="prefill", dtype="f32", mask="causal"),
     ("PyTorch", "OpenVINO")),
    (1.5, "bf16 full", dict(name="prefill", dtype="bf16", mask="none"), ("OpenVINO",)),
    (4.5, "bf16 full", dict(name="prefill", dtype="bf16", mask="none"), ("PyTorch",)),
    (3.0, "bf16 causal", dict(name="prefill", dtype="bf16", mask="causal"), None),
    (3.0, "decode f32", dict(name="decode", dtype="f32"), ("ONNX Runtime", "OpenVINO")),
    (4.0, "decode bf16", dict(name="decode", dtype="bf16"), ("ONNX Runtime", "OpenVINO")),
    (3.0, "decode f16", dict(name="decode", dtype="f16"), ("ggml",)),
    (3.0, "decode q8_0", dict(name="decode", dtype="q8_0"), ("ggml",)),
    (1.8, "8 queries, f32", dict(name="short", dtype="f32", Tq=8), None),
    (1.8, "32 queries, f32", dict(name="short", dtype="f32", Tq=32), None),
    (3.0, "8 queries, bf16 against any dtype", dict(name="short", dtype="bf16", Tq=8), None),
    (3.0, "32 queries, bf16 against any dtype", dict(name="short", dtype="bf16", Tq=32), None),
    (2.4, "backward f32", dict(name="backward", dtype="f32"), None),
    (2.5, "backward bf16", dict(name="backward", dtype="bf16"), None),
]


def against_any_dtype(r, results):
    """The ratio with the faster of the library's own dtypes."""
    same = [x for x in results if all(x[n] == r[n] for n in ("name", "mask", "Dk", "Tq", "threads",
                                                              "peer"))]
    return min([r["ratio"]] + [x["peer_s"] / r["ours_s"] for x in same])


def print_targets(results):
    print("\none thread, at the least              target  measured")
    for target, title, fields, peers in TARGETS:
        found = [r for r in results if r["threads"] == 1 and (not peers or r["peer"] in peers)
                 and all(r[n] == v for n, v in fields.items())]
        if "any dtype" in title:
            ratios = [against_any_dtype(r, results) for r in found]
        else:
            ratios = [r["ratio"] for r in found]
        if ratios:
            print("%-38s %5.2f x %7.2f x  %s" % (title, target, min(ratios), "" if
                                                min(ratios) >= target else "missed"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default=os.path.join(ROOT, "build/release/bench/peers.so"))
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=os.path.join(ROOT, "build/bench-peers.json"))
    parser.add_argument("--svg", default=os.path.join(ROOT, "build/bench-peers.svg"))
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        global clock
        clock = time.process_time
    if args.draw:
        with open(args.json) as f:
            draw(json.load(f), args.svg)
        return 0
    ours = Ours(args.lib)
    libraries = [ours, Torch(), OnnxRuntime(), OpenVino(), Ggml()]
    versions = [x.version for x in libraries[1:] if x.version]
    info = {"machine": picture.machine(), "isa": ours.isa, "versions": versions, "rows": []}
    print("machine  %s\nours     takes %s\nothers   %s\n" % (info["machine"], ours.isa,
                                                             ", ".join(versions)), flush=True)
    begin = time.time()
    for row in all_rows(args.quick):
        if not set(args.only.replace(",", " ").split()) <= set(words_of(row)):
            continue
        start = time.time()
        results = measure(row, libraries, 2 if args.quick else 5, 0.5 if args.quick else 2.0)
        if results:
            print_row(row, results, time.time() - start)
            info["rows"] += results
    if not args.quick:
        print_targets(info["rows"])
    print("\n%d rows in %.0f s" % (len(info["rows"]), time.time() - begin))
    with open(args.json, "w") as f:
        json.dump(info, f, indent=1)
    draw(info, args.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
