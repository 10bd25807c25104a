"""Small random models of each family that examples/ring_infer.c runs: made by transformers, written
as GGUF by the gguf package, with the logits that transformers computes in f32 for 512 tokens.

    make_models.py FOLDER      writes NAME.gguf and, for the caller, returns what was expected
"""
import os
import sys

import gguf
import numpy as np
import torch
import transformers

VOCABULARY, TOKENS = 320, 512
SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
             rms_norm_eps=1e-5, attn_implementation="eager", tie_word_embeddings=False)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=128, rope_theta=500000.0)

YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256,
                 rope_theta=10000.0)
GEMMA = dict(head_dim=32, sliding_window=50, num_hidden_layers=7, query_pre_attn_scalar=32,
             hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)

OSS = dict(head_dim=32, sliding_window=50, num_local_experts=5, num_experts_per_tok=2,
           rope_parameters=dict(YARN_ROPE, truncate=False))

# name: family, changes of the shape, type of the matrices in the file
MODELS = {
    "llama": ("Llama", {}, "F32"),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=1), "F32"),
    "llama-rope3": ("Llama", dict(rope_parameters=LLAMA3_ROPE), "F32"),
    "llama-linear": ("Llama", dict(rope_parameters=dict(
        rope_type="linear", factor=4.0, rope_theta=10000.0)), "F32"),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN_ROPE), "F32"),
    "llama-q4_0": ("Llama", {}, "Q4_0"),
    "llama-q5_1": ("Llama", {}, "Q5_1"),
    "llama-bf16": ("Llama", {}, "BF16"),
    "llama-f16": ("Llama", {}, "F16"),
    "llama-q8": ("Llama", {}, "Q8_0"),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=32), "F32"),
    "mistral-window": ("Mistral", dict(sliding_window=100), "F32"),
    "qwen2": ("Qwen2", dict(num_key_value_heads=4), "F32"),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=37,
                                   max_window_layers=0, tie_word_embeddings=True), "F32"),
    "qwen3": ("Qwen3", dict(head_dim=32), "F32"),
    "gemma2": ("Gemma2", dict(GEMMA, final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
               "F32"),
    "gemma3": ("Gemma3Text", GEMMA, "F32"),
    "qwen3moe": ("Qwen3Moe", dict(head_dim=32, num_experts=6, num_experts_per_tok=3,
                                  moe_intermediate_size=64, norm_topk_prob=True), "F32"),
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2), "Q8_0"),
    "gpt-oss": ("GptOss", OSS, "F32"),
    "gpt-oss-mxfp4": ("GptOss", OSS, "MXFP4"),
}


def random_model(name, words):
    """A model with weights that make attention matter: scores of about 1, norms of about 1."""
    family, changes, _ = MODELS[name]
    config = getattr(transformers, family + "Config")(**{**SHAPE, **changes, "vocab_size": words})
    torch.manual_seed(len(name) * 1000 + sum(name.encode()))
    model = getattr(transformers, family.replace("Text", "") + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() > 1 and not key.endswith("bias"):
                p.normal_(0, 1.4 / p.shape[1 if "GptOss" in family else -1] ** 0.5)
            elif "sinks" in key:
                p.normal_(1, 1)
            elif "norm" in key:
                p.uniform_(0.7, 1.5)
                if "Gemma" in family:
                    p.sub_(1)          # Gemma multiplies by 1 + p, and the file has 1 + p
            else:
                p.normal_(0, 0.3)
    return model, config


def rounded(weight, kind):
    """A matrix as the file stores it, and what that is in f32."""
    if kind == "F32":
        return weight, weight
    kind = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weight, kind)
    return stored, gguf.quants.dequantize(stored, kind).reshape(weight.shape)


def interleaved(weight, heads):
    """llama.cpp turns pairs (2 i, 2 i + 1) where transformers turns (i, i + D / 2)."""
    shape = weight.shape
    return (weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2)
            .reshape(shape))


def parts(key, p, arch):
    """The tensors of the file that a parameter becomes: experts have gate and up in one, in turn or
    one after the other, and some are transposed."""
    layer, _, rest = key[len("model.layers."):].partition(".")
    start, oss = f"blk.{layer}.", arch == "gpt-oss"
    if rest == "self_attn.sinks":
        return [(start + "attn_sinks.weight", p)]
    if rest.startswith(("mlp.router.", "mlp.gate.")):
        return [(start + "ffn_gate_inp." + rest.rpartition(".")[2], p)]
    if oss and rest == "post_attention_layernorm.weight":
        return [(start + "post_attention_norm.weight", p)]
    if not rest.startswith("mlp.experts."):
        return [(file_name(key, arch), p)]
    end = ".bias" if rest.endswith("bias") else ".weight"
    if oss and p.dim() == 3:
        p = p.transpose(1, 2)
    if "down" in rest:
        return [(start + "ffn_down_exps" + end, p)]
    half = p.shape[1] // 2
    gate, up = (p[:, ::2], p[:, 1::2]) if oss else (p[:, :half], p[:, half:])
    return [(start + "ffn_gate_exps" + end, gate), (start + "ffn_up_exps" + end, up)]


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def file_name(key, arch):
    if arch.startswith("gemma") and "layernorm" in key:
        for old, new in (("pre_feedforward_layernorm", "ffn_norm"),
                         ("post_feedforward_layernorm", "post_ffw_norm"),
                         ("post_attention_layernorm", "post_attention_norm")):
            if old in key:
                return f"blk.{key.split('.')[2]}.{new}.weight"
    if not key.startswith("model.layers."):
        return NAMES[key]
    layer, _, rest = key[len("model.layers."):].partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_values(out, config, arch, window):
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_dimension_count(dim)
    out.add_rope_freq_base(rope["rope_theta"])
    if window:
        out.add_sliding_window(window)
    experts = getattr(config, "num_local_experts", 0)
    if experts:
        out.add_expert_count(experts)
        out.add_expert_used_count(config.num_experts_per_tok)
        out.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None)
                                           or config.intermediate_size)
    if rope.get("rope_type") == "yarn":
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(rope["factor"])
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(rope["factor"])


def rope_factors(model):
    """What llama3 divides the frequencies by."""
    rotary = model.model.rotary_emb
    dim = rotary.inv_freq.shape[0] * 2
    theta = model.config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, dim, 2).double() / dim)
    return (plain / rotary.inv_freq.double()).float().numpy()


def make(name, folder, vocabulary=None):
    """Writes folder/name.gguf; returns its path, tokens and the logits expected for them. The
    vocabulary is that of another GGUF file; None: there is none."""
    family, changes, kind = MODELS[name]
    fields = gguf.GGUFReader(vocabulary).fields if vocabulary else {}
    words = len(fields["tokenizer.ggml.tokens"].data) if fields else VOCABULARY
    model, config = random_model(name, words)
    arch = {"Llama": "llama", "Mistral": "llama", "Mixtral": "llama",
            "GptOss": "gpt-oss"}.get(family, family.lower().replace("text", ""))
    path = os.path.join(folder, name + ".gguf")
    out = gguf.GGUFWriter(path, arch)
    write_values(out, config, arch, changes.get("sliding_window"))
    for key in (k for k in fields if k.startswith("tokenizer.")):
        out.add_key_value(key, fields[key].contents(), *fields[key].types[:2])
    if "rope3" in name:
        out.add_tensor("rope_freqs.weight", rope_factors(model))
    with torch.no_grad():
        tensors = [(key, *part) for key, p in model.named_parameters()
                   for part in parts(key, p, arch)]
        for key, name, p in tensors:
            weight = np.ascontiguousarray(p.numpy())
            stored = weight
            matrix = p.dim() > 1 and not name.endswith((".bias", "gate_inp.weight"))
            if matrix:
                stored, exact = rounded(weight, kind)
                p.copy_(torch.from_numpy(np.ascontiguousarray(exact)))
            if "gemma" in arch and p.dim() == 1:
                stored = weight + 1
            if arch == "llama" and ("q_proj" in key or "k_proj" in key):
                heads = (config.num_attention_heads if "q_proj" in key
                         else config.num_key_value_heads)
                stored = interleaved(stored, heads)
            raw = gguf.GGMLQuantizationType[kind] if matrix and kind != "F32" else None
            out.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    tokens = np.random.default_rng(len(name)).integers(0, words, TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return path, tokens.tolist(), logits


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    for each in MODELS:
        made, _, expected = make(each, sys.argv[1])
        print(made, os.path.getsize(made), "bytes, logits up to", np.abs(expected).max())
