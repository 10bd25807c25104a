"""Small vocabularies of each kind, trained on text of this repository, and texts with the tokens
that the libraries they come from cut them into."""
import os
import random

import gguf
import sentencepiece
import tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
NO_WORD = r"[^\r\n\p{L}\p{N}]?"
SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "gpt-2": [GPT2],
    "llama-bpe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST],
    "qwen35": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "smollm": [r"\p{N}", GPT2],
    "tekken": [f"{NO_WORD}[{UPPER}]*[{LOWER}]+|{NO_WORD}[{UPPER}]+[{LOWER}]*|\\p{{N}}" + SLASH],
    "gpt-4o": [f"{NO_WORD}[{UPPER}]*[{LOWER}]+{CONTRACTION}?|{NO_WORD}[{UPPER}]+[{LOWER}]*"
               f"{CONTRACTION}?|\\p{{N}}{{1,3}}" + SLASH],
    "deepseek-v3": [r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"
                    r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}
SPECIAL = ["<|begin|>", "<|end|>", "<|end|>!"]
SNIPPETS = ["it's", "I'LL", "we'Ve", "'", " ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\r\n", "1",
            "12", "12345", "naïve", "Straße", "Привет мир", "你好世界", "٣٤٥", "é", "e\u0301", "👍🏽",
            "\u00a0", "\u2003", "\u3000", "a", "the", "ring", "...", "!?\n", "{", "}", "->", "_x",
            "Ⅷ", "½", "नमस्ते", "<|end|>", "<|begin|>", "<|en", "0x1p-3", ",", " the", " 7",
            "HELLOworld", "McDonald's", "漢A", "ÄÖü", "क्षि", "\u0301", "\u0001", "\n/", "/",
            "ǅa", ".Net", "カナ", "€uro", "A", "ʰ", " _",
            "a\u0327\u0301\u0316", "\u1112\u1161\u11ab", "\u212b", "\ufb1d", "\u0958"]


def corpus():
    with open(os.path.join(HERE, "..", "..", "ringattn.h"), encoding="utf-8") as f:
        text = f.read()[:120000]
    return [text, "".join(SNIPPETS) * 20]


def texts(count=300):
    rng = random.Random(1)
    made = ["", " ", "a", " a", "a ", "\n", corpus()[0][:3000]]
    while len(made) < count:
        made.append("".join(rng.choice(SNIPPETS) for _ in range(rng.randint(1, 30))))
    return made


def begin(path, kind):
    out = gguf.GGUFWriter(path, "llama")
    out.add_tokenizer_model(kind)
    return out


def end(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def make_bpe(pre, folder):
    """A file with a byte-level BPE vocabulary, and functions that give the tokens of a text and the
    text of tokens."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        *(tokenizers.pre_tokenizers.Split(tokenizers.Regex(w), "isolated") for w in WORDS[pre]),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre == "qwen2":
        t.normalizer = tokenizers.normalizers.NFC()
    t.train_from_iterator(corpus(), tokenizers.trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    import json
    t.decoder = tokenizers.decoders.ByteLevel()
    model = json.loads(t.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    path = os.path.join(folder, f"vocabulary-{pre}.gguf")
    out = begin(path, "gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(vocabulary)
    out.add_token_types([3 if v in SPECIAL else 1 for v in vocabulary])
    out.add_token_merges(merges)
    out.add_add_bos_token(False)
    end(out)
    return path, lambda text: t.encode(text, add_special_tokens=False).ids, t.decode


def spm_bytes(sp, i):
    if sp.is_control(i):
        return b""
    piece = sp.id_to_piece(i)
    return bytes([int(piece[1:-1], 16)]) if sp.is_byte(i) else piece.replace("\u2581", " ").encode()


def make_spm(folder):
    """The same for SentencePiece: scores, and bytes for what is in no token."""
    path = os.path.join(folder, "vocabulary-spm.gguf")
    prefix = os.path.join(folder, "spm")
    with open(prefix + ".txt", "w", encoding="utf-8") as f:
        f.write("\n".join(x for x in corpus()[0].split("\n") if x.strip()))
    sentencepiece.SentencePieceTrainer.Train(
        input=prefix + ".txt", model_prefix=prefix, model_type="bpe", vocab_size=900,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.99, minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
    n = sp.vocab_size()
    out = begin(path, "llama")
    out.add_token_list([sp.id_to_piece(i) for i in range(n)])
    out.add_token_scores([sp.get_score(i) for i in range(n)])
    out.add_token_types([2 if sp.is_unknown(i) else 3 if sp.is_control(i) else
                         6 if sp.is_byte(i) else 1 for i in range(n)])
    out.add_unk_token_id(sp.unk_id())
    out.add_bos_token_id(sp.bos_id())
    out.add_add_bos_token(False)
    end(out)
    return path, sp.encode, lambda ids: b"".join(spm_bytes(sp, i) for i in ids).decode(
        errors="replace")


def make_all(folder):
    made = {pre: make_bpe(pre, folder) for pre in WORDS}
    made["spm"] = make_spm(folder)
    return made
