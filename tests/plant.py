"""Plants the mistakes of tests/mutants.txt in a copy of ringattn.h, all of them at once.

  plant.py LIST HEADER > COPY

Each is in a copy of its function. The function calls that copy if the environment has MUTANT=n, the
mistake's number; without MUTANT the header is as it was. On standard error: a line for each mistake
whose text does not occur exactly once in a function of the header."""
import re
import sys

READ = """
#if defined(RINGATTN_IMPLEMENTATION) && !defined(RA__MUTANT)
#define RA__MUTANT
#include <stdlib.h>
static int ra__mutant;
__attribute__((constructor)) static void ra__mutant_read(void) {
    const char *text = getenv("MUTANT");
    ra__mutant = text ? atoi(text) : 0;
}
#endif
"""


# A function of KERNEL is RA__NAME(name).
HEAD = re.compile(r"^[a-zA-Z_][^;{}#]*?\b(RA__NAME\(\w+\)|\w+)\(([^()]*)\) \{\n", re.M)


def function_around(text, at):
    """The head of the function that holds text[at], and where it ends; None: there is none."""
    head = None
    for head in HEAD.finditer(text, max(0, at - 20000), at):
        pass
    end = head and text.find("\n}\n", head.end()) + 3
    return (head, end) if head and at < end else None


def plant(text, mistakes):
    functions = {}
    for number, name, old, new in mistakes:
        if text.count(old) != 1:
            print("%s: its text occurs %d times" % (name, text.count(old)), file=sys.stderr)
            continue
        at = text.index(old)
        place = function_around(text, at)
        if not place:
            print("%s: its text is in no function" % name, file=sys.stderr)
            continue
        functions.setdefault(place[0].start(), place + ([],))[2].append((number, at, old, new))
    for begin in sorted(functions, reverse=True):
        head, end, planted = functions[begin]
        body = text[head.end():end]
        names = [re.search(r"(\w+)(\[\w*\])*$", p.strip())[1] for p in head[2].split(",")]
        arguments = ", ".join(n for n in names if n != "void")
        copies, calls = "", ""
        for number, at, old, new in planted:
            copy = re.sub(r"\b(\w+)(\)?)$", r"\1_mutant_%d\2" % number, head[1])
            at -= head.end()
            copies += text[begin:head.start(1)] + copy + text[head.end(1):head.end()]
            copies += body[:at] + new + body[at + len(old):]
            how = "{ %s; return; }" if re.match(r"(\w+ )*void \w", head[0]) else "return %s;"
            how %= "%s(%s)" % (copy, arguments)
            calls += "    if (ra__mutant == %d) %s\n" % (number, how)
        text = text[:begin] + copies + head[0] + calls + body + text[end:]
    return READ + text


def main():
    with open(sys.argv[1]) as f:
        lines = [x.rstrip("\n").split(" | ") for x in f if not x.startswith("#")]
    mistakes = [(i + 1, x[0], x[2].replace("~", "\n"), x[3].replace("~", "\n"))
                for i, x in enumerate(x for x in lines if len(x) == 4)]
    with open(sys.argv[2]) as f:
        sys.stdout.write(plant(f.read(), mistakes))


main()
