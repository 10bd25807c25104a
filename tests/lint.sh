#!/bin/sh
# What a script can check of the house style. Prints FILE:LINE: rule: what is wrong for each finding
# and the measured figures; exits 1 if there was a finding. First it proves on a bad sample that
# every rule can find something.
#
#   lint.sh               the repository
#   lint.sh --only ROOT   another tree, without the proof

root=$(cd "$(dirname "$0")/.." && pwd)

# ------------------------------------------------------------------------------ C, by its tokens
# Walks a C file character by character, without comments and string contents, one declaration at
# depth 0 after another. `text` is the declaration up to its ; or {. Mode "header" adds the rules
# that hold for ringattn.h alone; in mode "test" functions may have any number of parameters.
# Figures are printed as "figure length LINES NAME LINE".
walk='
function finding(line, rule, what) { printf "%s:%d: %s: %s\n", name, line, rule, what }

# Blanks out comments and the text between quotes; the state lasts over lines.
function strip(s,    out, n, i, c, d) {
    out = ""; n = length(s)
    for (i = 1; i <= n; i++) {
        c = substr(s, i, 1); d = substr(s, i, 2)
        if (comment) { if (d == "*/") { comment = 0; i++; out = out " " } }
        else if (quote != "") {
            if (c == "\\") i++
            else if (c == quote) { quote = ""; out = out c }
        }
        else if (d == "/*") { comment = 1; i++ }
        else if (d == "//") break
        else { if (c == "\"" || c == "\047") quote = c; out = out c }
    }
    quote = ""
    return out
}

# The last parenthesis at depth 0 of a signature: its number of parameters; "called" is its name.
function parameters(s,    n, i, c, depth, commas, start, inside) {
    n = length(s); commas = 0; called = ""; inside = ""
    for (i = 1; i <= n; i++) {
        c = substr(s, i, 1)
        if (c == "(") { if (++depth == 1) { start = i; commas = 0 } }
        else if (c == ")") { if (--depth == 0) inside = substr(s, start + 1, i - start - 1) }
        else if (c == "," && depth == 1) commas++
    }
    called = substr(s, 1, start - 1)
    sub(/[ \t]+$/, "", called); sub(/\)$/, "", called); sub(/^.*[^A-Za-z0-9_]/, "", called)
    gsub(/[ \t]/, "", inside)
    if (called == "TEST") called = "TEST(" inside ")"
    return inside == "" || inside == "void" ? 0 : commas + 1
}

function open_brace(    t) {
    t = text; gsub(/[ \t]+/, " ", t); sub(/^ /, "", t); sub(/ $/, "", t)
    if (depth == 0 && t ~ /^extern "" ?$/) { text = ""; return }
    if (depth++ > 0) return
    function_line = 0
    if (t ~ /\)$/ && t !~ /=/ && t !~ /^(typedef|enum|union) / && t !~ /^struct [^ ]*$/) {
        function_line = text_line
        if (code ~ /^[ \t]*\{/) finding(FNR, "opening", "{ of a function is on a line of its own")
        count = parameters(t); function_name = called
        if (mode != "test" && count > 8 && called != "ra_attention_simple" && called !~ /sendrecv/)
            finding(text_line, "parameters", called " has " count ", at most 8")
    }
}

function close_brace(    n) {
    if (depth == 0) { text = ""; return }
    if (--depth > 0) return
    if (function_line) {
        n = FNR - function_line + 1
        print "figure length " n " " function_name " " function_line
        if (n > 70) finding(function_line, "length", function_name " has " n " lines, at most 70")
        text = ""; text_line = 0; function_line = 0
    }
}

function end_statement(    t) {
    if (depth > 0) return
    t = text; gsub(/[ \t]+/, " ", t); sub(/^ /, "", t)
    if (mode == "header" && t ~ /\([^*]/ && t !~ /=/ &&
        (t ~ /^(static|RA__[A-Z]+) / || (t ~ /[ *]ra__[a-z0-9_]+ ?\(/ && t !~ /^typedef/)))
        finding(text_line, "forward", "a private function is declared ahead: " substr(t, 1, 60))
    text = ""; text_line = 0
}

{
    code = strip($0)
    if (directive) { directive = code ~ /\\$/; next }
    if (code ~ /^[ \t]*#/) {
        directive = code ~ /\\$/
        next
    }
    if (mode == "header" && code ~ /(^|[^A-Za-z0-9_>.])[a-z]*(printf|abort|exit|getenv|puts) *\(/ &&
        code !~ /\(\*/)
        finding(FNR, "calls", "a library neither prints nor leaves nor reads the environment")
    n = length(code)
    for (i = 1; i <= n; i++) {
        c = substr(code, i, 1)
        if (c == "{") { open_brace(); if (depth <= 1) text = text " " }
        else if (c == "}") close_brace()
        else if (c == ";") end_statement()
        else if (depth == 0) {
            if (text_line == 0 && c !~ /[ \t]/) text_line = FNR
            text = text c
        }
    }
    text = text " "
}
END { if (depth != 0) finding(FNR, "braces", "unbalanced, the walk is not to be trusted") }
'

# ------------------------------------------------------------------------------ header, by lines
header='
function finding(line, rule, what) { printf "%s:%d: %s: %s\n", name, line, rule, what }
function room(s) { sub(/^.*==== /, "", s); sub(/ *\*\/.*$/, "", s); sub(/ +$/, "", s); return s }

FNR == 1 && $0 !~ /^\/\*/ { finding(1, "head", "the file starts with a comment") }
!head_end && /\*\// { head_end = FNR }
!head_end || head_end == FNR {
    head = head $0 "\n"
    if (/SPDX-License-Identifier:/) spdx = 1
}
/^\/\* -+ for maintainers/ { guide = 1 }
guide && match($0, /^ \*   [A-Z][A-Z0-9]*( [A-Z][A-Z0-9]*)*  +[^ ]/) {
    entry = substr($0, 6); sub(/  +.*$/, "", entry)
    listed[++rooms] = entry
}
guide && /\*\// { guide = 0 }
/^\/\* =+ [^ ]/ {
    title = room($0)
    match($0, /=+/)
    if (RLENGTH != 74) finding(FNR, "banner", RLENGTH " signs instead of 74: " title)
    if (title == "API") api = FNR
    if (title ~ /^[A-Z][A-Z0-9]*( [A-Z][A-Z0-9]*)*$/) {
        built[++found] = title
        built_at[found] = FNR
        where = title
    }
}
/stops reading here/ && api && !stop { stop = FNR }
/^[ \t]*#[ \t]*include/ && api && !stop && !/<std(def|int)\.h>/ {
    finding(FNR, "includes", "the API needs stddef.h and stdint.h alone")
}
/^[ \t]*#[ \t]*(if|ifdef|ifndef|elif)/ {
    conditionals++
    if (where !~ /PLATFORM|DISPATCH|KERNEL|CLOCK|ATOMIC|SCALAR|AVX|AMX/) outside++
    line = $0
    while (match(line, /RINGATTN_[A-Z0-9_]+/)) {
        m = substr(line, RSTART, RLENGTH)
        if (m != "RINGATTN_H" && !(m in macro)) { macro[m] = FNR; macros++ }
        line = substr(line, RSTART + RLENGTH)
    }
}
/^[ \t]*#[ \t]*define[ \t]+RA__/ {
    m = $0; sub(/^[ \t]*#[ \t]*define[ \t]+/, "", m); sub(/[^A-Za-z0-9_].*$/, "", m)
    if (!(m in defined_at)) defined_at[m] = FNR
}
/^[ \t]*#[ \t]*undef[ \t]+RA__/ {
    m = $0; sub(/^[ \t]*#[ \t]*undef[ \t]+/, "", m); sub(/[^A-Za-z0-9_].*$/, "", m)
    undefined[m] = 1
}
END {
    if (!spdx) finding(1, "head", "no SPDX-License-Identifier in the head comment")
    if (!api) finding(1, "banner", "there is no banner of the API")
    if (!stop) finding(1, "api", "no sign says where the API stops")
    for (i = 1; i <= found || i <= rooms; i++)
        if (built[i] != listed[i])
            finding(built_at[i] + 0, "contents", "room " (i in built_at ? built[i] : "none") \
                ", the table of contents has " (i <= rooms ? listed[i] : "none") " here")
    if (macros > 10) finding(1, "macros", macros " configuration macros, at most 10")
    for (m in macro)
        if (index(head, m) == 0) finding(macro[m], "macros", m " is not in the head comment")
    for (m in defined_at)
        if (!(m in undefined) && m != "RA__IMPLEMENTED" && m !~ /^RA__BODY/)
            finding(defined_at[m], "undef", m " is still defined at the end")
    if (conditionals > FNR * 8 / 1000)
        finding(1, "conditionals", conditionals " in " FNR " lines, at most 8 in a thousand")
    printf "figure lines %d, head %d, API %d, rooms %d\n", FNR, head_end, stop - api, found
    printf "figure configuration macros %d, conditionals %d (%.1f in a thousand lines), ", \
        macros, conditionals, conditionals * 1000 / FNR
    printf "%d outside platform and kernels\n", outside
}
'

# ------------------------------------------------------------------------------ sentences
# What a user reads, README.md and the comments of ringattn.h up to the stop sign: at most 30 words
# and one parenthesis per sentence. Code, tables and lists of words (indented further than their
# paragraph) are left out.
prose='
function judge(    n, words, part, i, whole) {
    gsub(/[.:;]\)/, ")", text)
    n = split(text, part, /[.!?:;] +|[.!?:;]$/)
    for (i = 1; i <= n; i++) {
        words = split(part[i], ignored, " +")
        if (words > 30) printf "%s:%d: sentence: %d words of 30: %.60s\n", name, at, words, part[i]
        whole = part[i]
        gsub(/\([^()]* [-+*\/=] [^()]*\)/, "", part[i])        # a formula
        if (gsub(/(^| )\(/, "", part[i]) > 1)
            printf "%s:%d: sentence: more than one parenthesis: %.60s\n", name, at, whole
    }
    text = ""
}
function add(line) {
    sub(/^ +/, "", line); sub(/ +$/, "", line)
    if (line == "") { judge(); return }
    if (text == "") at = FNR
    text = text (text == "" ? "" : " ") line
}
/stops reading here/ { judge(); done = 1 }
done { next }
name ~ /\.md$/ {
    if (/^```/) { code = !code; judge() }
    else if (code || /^( *\||#|!\[|    )/) judge()
    else if (/^ *- /) { judge(); sub(/^ *- /, ""); add($0) }
    else add($0)
    next
}
{
    line = $0; field = 0
    if (!comment) {
        if (!match(line, /\/\*/)) { judge(); next }
        field = RSTART > 1
        line = substr(line, RSTART + 2); comment = 1
    } else if (line ~ /^ +\* /) {
        field = line !~ /^ \* /
        sub(/^ +\*/, "", line)
    } else sub(/^ +\*$/, "", line)
    ended = sub(/ *\*\/.*$/, "", line)
    if (line ~ /^ [=-][=-][=-]/) { judge(); line = "" }
    if (!field && line ~ /^   /) judge()
    else add(line)
    if (ended) { judge(); comment = 0 }
}
END { judge() }
'

# Lines of any text file. Words of unfinished work are spelt so that this file may be checked too.
lines='
function finding(rule, what) { printf "%s:%d: %s: %s\n", name, FNR, rule, what }
length($0) > 100 && !/https?:/ { finding("columns", length($0) " of 100") }
/\t/ && name !~ /Makefile$/ { finding("tabs", "a tab") }
/[ \t\r]$/ { finding("blanks", "blanks at the end of the line") }
/TO[D]O|FIX[M]E|(^|[^X])XX[X]([^X]|$)|[^a-z]stu[b]($|[^a-z])|not implemente[d]|HAC[K]/ {
    finding("unfinished", "a word of unfinished work")
}
'

lint() {
    cd "$1" || exit 1
    for f in ringattn.h Makefile tests/*.sh tests/*.[ch] tests/*/*.[ch] examples/*.[ch] \
        examples/*/*.[ch] bench/*.[ch] bench/*.py .ci/run; do
        [ -f "$f" ] && awk -v name="$f" "$lines" "$f"
    done
    for f in tests/*.[ch] tests/*/*.[ch] bench/*.[ch] examples/*.[ch] examples/*/*.[ch]; do
        mode="test"
        [ "${f%%/*}" = examples ] && mode="example"
        [ -f "$f" ] && awk -v name="$f" -v mode="$mode" "$walk" "$f" | grep -v '^figure'
    done
    awk -v name=ringattn.h "$header" ringattn.h
    [ ! -f tests/rooms.sh ] || sh tests/rooms.sh "$scratch/rooms"
    awk -v name=ringattn.h -v mode=header "$walk" ringattn.h > "$scratch/walk"
    grep -v '^figure length' "$scratch/walk"
    sed -n 's/^figure length //p' "$scratch/walk" | sort -n | awk '
        { n[NR] = $1; last = $2; at = $3 }
        END {
            if (NR == 0) { print "ringattn.h:1: length: no function found"; exit }
            median = n[int((NR + 1) / 2)]; p90 = n[int(NR * 9 / 10 + 0.999)]
            if (median > 15) print "ringattn.h:1: length: median " median " lines, at most 15"
            if (p90 > 50) print "ringattn.h:1: length: p90 " p90 " lines, at most 50"
            printf "figure functions %d, lines: median %d, p90 %d, max %d (%s)\n", \
                NR, median, p90, n[NR], last
        }'
    sed -n 's/^ *X(\(RA_[A-Z_]*\),.*/\1/p' ringattn.h | while read -r status; do
        grep -qw "$status" tests/*.c || echo "ringattn.h:1: statuses: no test mentions $status"
    done
    shown="$(cat examples/*.[ch] examples/*/*.[ch] 2> /dev/null | sed 's,/\*.*,,' |
        grep -o 'ra_[a-z0-9_]* *(' | tr -d ' (' | sort -u)"
    sed '/stops reading here/q' ringattn.h | sed -n '/^RINGATTN_API/,/;/p' |
        grep -o '\**ra_[a-z0-9_]*(' | tr -d '*(' | sort -u |
        while read -r call; do
            echo "$shown" | grep -qx "$call" || echo "ringattn.h:1: shown: no example calls $call"
        done
    for f in README.md ringattn.h; do
        [ -f "$f" ] && awk -v name="$f" "$prose" "$f"
    done
    for f in *; do
        case $f in
            ringattn.h | tests | examples | bench | Makefile | README.md | LICENSE | build) ;;
            *) echo "$f:1: top: not one of the entries that belong at the top" ;;
        esac
    done
}

# judged ROOT: findings and figures; 1 if there were findings.
judged() {
    (lint "$1") > "$scratch/found" 2>&1
    grep -v '^figure ' "$scratch/found"
    sed -n 's/^figure /  /p' "$scratch/found"
    ! grep -qv '^figure ' "$scratch/found"
}

# A tree in which every rule must find something.
bad_sample() {
    mkdir -p "$1/tests" "$1/notes"
    {
        echo "static int x; /* no head comment */"
        echo " *   GHOST  a room without a banner */"
        echo "/* ==== API"
        printf '\tint a_tab; \n'
        echo "#include <stdio.h>"
        echo "#define RA__LEFT 1"
        for i in 1 2 3 4 5 6 7 8 9 A B; do echo "#ifdef RINGATTN_$i"; echo "#endif"; done
        echo "    X(RA_NOBODY, 1, \"untested\")"
        echo "int $(printf 'x%.0s' $(seq 100));"
        echo "/* TO""DO */"
        echo "static int ra__later(int a);"
        echo "RINGATTN_API int ra_hidden(void);"
        echo "static int ra__many(int a, int (*b)(int, int), int c, int d, int e, int f,"
        echo "                    int g, int h, int i)"
        echo "{"
        seq 75 | sed 's/.*/    x++;/'
        echo '    if (a) abort(); /* } */ x = b("}", 0);'
        echo "}"
        seq 1170 | sed 's/.*//'
        echo "/* stops reading here */"
        echo "int y = { {"
    } > "$1/ringattn.h"
    : > "$1/tests/test_none.c"
    echo "A sentence $(seq 30 | tr '\n' ' ') that (as here) never (or late) ends." > "$1/README.md"
}

scratch=$root/build/lint
rm -rf "$scratch" && mkdir -p "$scratch" || exit 1
if [ "$1" = --only ]; then
    judged "$2"
    exit
fi

bad_sample "$scratch/bad"
judged "$scratch/bad" > "$scratch/bad.log"
deaf=0
for rule in columns tabs blanks unfinished head contents banner includes macros undef \
            conditionals opening length parameters forward calls braces statuses shown sentence \
            top; do
    grep -q "^[^ ]*:[0-9]*: $rule: " "$scratch/bad.log" && continue
    echo "tests/lint.sh:1: self-test: rule '$rule' finds nothing in the bad sample"
    deaf=1
done
[ "$deaf" = 0 ] || exit 1

if judged "$root"; then
    echo "lint: nothing found"
else
    echo "lint: $(grep -cv '^figure ' "$scratch/found") findings"
    exit 1
fi
