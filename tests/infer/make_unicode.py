"""Writes examples/infer/unicode_tables.h from the Unicode database of the package unicodedata2.

    make_unicode.py > examples/infer/unicode_tables.h      with unicodedata2 16.0.0
"""
import sys

import unicodedata2 as unicode

EVERY = range(0x110000)
# The letters of the vocabulary of DeepSeek LLM: those with a case, of an older Unicode.
CASED = ("A-Z a-z µ À-Ö Ø-ö ø-ƺ Ƽ-ƿ Ǆ-ʓ ʕ-ʯ Ͱ-ͳ Ͷ-ͷ ͻ-ͽ \u037f Ά Έ-Ί Ό Ύ-Ρ Σ-ϵ Ϸ-ҁ Ҋ-ԯ Ա-Ֆ Ⴀ-Ⴥ Ꭰ-Ᏽ "
         "ᏸ-ᏽ Ა-Ჺ Ჽ-Ჿ ᴀ-ᴫ ᵫ-ᵷ ᵹ-ᶚ Ḁ-ἕ Ἐ-Ἕ ἠ-ὅ Ὀ-Ὅ ὐ-ὗ Ὑ Ὓ Ὕ Ὗ-\u1f7d ᾀ-ᾴ ᾶ-ᾼ \u1fbe ῂ-ῄ ῆ-ῌ ῐ-\u1fd3 ῖ-\u1fdb "
         "ῠ-Ῥ ῲ-ῴ ῶ-ῼ ℂ ℇ ℊ-ℓ ℕ ℙ-ℝ ℤ \u2126 ℨ \u212a-ℭ ℯ-ℴ ℹ ℼ-ℿ ⅅ-ⅉ ⅎ Ↄ-ↄ Ⰰ-ⱻ Ȿ-ⳤ Ⳬ-ⳮ Ⳳ-ⳳ Ꙁ-ꙭ Ꚁ-ꚛ "
         "Ꜣ-ꝯ ꝱ-ꞇ Ꞌ-ꞎ ꭰ-ꮿ ﬀ-ﬆ ﬓ-ﬗ Ａ-Ｚ ａ-ｚ 𐐀-𐑏 𐒰-𐓓 𐓘-𐓻 𐲀-𐲲 𐳀-𐳲 𑢠-𑣟 𞤀-𞥃")
HEAD = """/* Written by tests/infer/make_unicode.py from Unicode %s; unicode.h says what is in it. */
#if !defined(INFER_UNICODE_TABLES_H)
#define INFER_UNICODE_TABLES_H

#include <stdint.h>
"""


def ranges(holds):
    """First and last of every run of characters."""
    found, start = [], None
    for c in (*EVERY, None):
        if c is not None and holds(c):
            start = c if start is None else start
        elif start is not None:
            found.append((start, (c or 0x110000) - 1))
            start = None
    return found


def table(kind, name, groups):
    lines = ["   "]
    for group in groups:
        item = " " + ",".join(map(str, group)) + ","
        if len(lines[-1]) + len(item) > 100:
            lines.append("   ")
        lines[-1] += item
    print(f"static const {kind} unicode_{name} = {{\n" + "\n".join(lines)[:-1] + "\n};\n")


def gaps(found):
    at = 0
    for first, last in found:
        yield first - at, last - first
        at = last


def categories():
    kind = [unicode.category(chr(c)) for c in EVERY]
    cased = [part.split("-") for part in CASED.split()]
    for name, holds in (("letters", lambda c: kind[c][0] == "L"),
                        ("numbers", lambda c: kind[c][0] == "N"),
                        ("marks", lambda c: kind[c][0] == "M"),
                        ("capitals", lambda c: kind[c] in ("Lu", "Lt")),
                        ("smalls", lambda c: kind[c] == "Ll"),
                        ("signs", lambda c: kind[c][0] in "PS"),
                        ("punctuation", lambda c: kind[c][0] == "P")):
        table("uint32_t", name + "[]", gaps(ranges(holds)))
    table("uint32_t", "cased[]", gaps([(ord(p[0]), ord(p[-1])) for p in cased]))


def compositions():
    """Characters with their two parts, or one and 0. Hangul follows from arithmetic."""
    parts = {}
    for c in EVERY:
        both = unicode.decomposition(chr(c))
        if both and both[0] != "<":
            parts[c] = [int(x, 16) for x in both.split()] + [0]
    items = [(c, *p[:2]) for c, p in sorted(parts.items())]
    table("uint32_t", "parts[]", items)
    joins = [(a, b, i) for i, (c, a, b) in enumerate(items)
             if b and unicode.normalize("NFC", chr(a) + chr(b)) == chr(c)]
    table("uint16_t", "joins[]", [(i,) for _, _, i in sorted(joins)])
    marks = []
    for c in EVERY:
        order = unicode.combining(chr(c))
        if order and marks and marks[-1][1:] == [c - 1, order]:
            marks[-1][1] = c
        elif order:
            marks.append([c, c, order])
    table("uint32_t", "orders[]", marks)


def main():
    sys.stdout.reconfigure(encoding="utf-8")
    print(HEAD % unicode.unidata_version)
    categories()
    compositions()
    print("#endif")


if __name__ == "__main__":
    main()
