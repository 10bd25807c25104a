#!/bin/sh
# The language matrix: tests/lang_main.c compiled by every compiler, in every dialect and at every
# level of optimisation, with all warnings as errors, and run; the ways in which a program can
# include a single header; the symbols that its object defines and needs.
#
#   matrix.sh quick|full DIR     Builds in DIR. `quick` has the fewest cells that cover C99 and
#                                C++11, gcc and clang, one and two translation units, and the
#                                configuration macros; CC is its C compiler. `full` has all four
#                                compilers and fails if one is missing.
# Ends with "N passed, N failed, N skipped".

mode=$1
dir=$2
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$dir" && rm -rf "${dir:?}"/* && dir=$(cd "$dir" && pwd) || exit 1
cores=$(nproc 2>/dev/null || echo 2)

warn="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wdouble-promotion -Wundef -Werror"
warn_c="$warn -Wstrict-prototypes -Wmissing-prototypes"
main=$root/tests/lang_main.c
impl=$root/tests/lang_impl.c
link="-pthread -lm"
count=0
skipped=0

# cell NAME SHELL...: one test: a script in its own directory.
cell() {
    count=$((count + 1))
    id=$(printf '%03d' "$count")
    mkdir "$dir/$id"
    echo "$1" > "$dir/$id/name"
    shift
    printf 'set -e\ncd "%s/%s"\n%s\n' "$dir" "$id" "$*" > "$dir/$id/run.sh"
}

skip() {
    echo "skipped: $1 ($2)"
    skipped=$((skipped + 1))
}

# flags COMPILER DIALECT: the language and its warnings.
flags() {
    case $2 in
        *++*) echo "-x c++ -std=$2 $warn" ;;
        *) echo "-std=$2 $warn_c" ;;
    esac
}

# runs COMPILER LEVEL DIALECT [MORE]: the program builds without a warning and is right.
runs() {
    cell "$1 $2 $3 $4" "$1 $(flags "$1" "$3") $2 $4 -I'$root' '$main' -o main $link
./main"
}

# parses COMPILER DIALECT WHAT FLAGS...: the compiler accepts the program without a warning. For
# what can only go wrong before code is generated.
parses() {
    name="$1 $2 $3"
    f="$1 $(flags "$1" "$2") -O0 -fsyntax-only"
    shift 3
    cell "$name" "$f $*"
}

# two_units COMPILER DIALECT LEVEL: the program in one translation unit, the implementation in
# another, which is left for the cells and steps that come after run_cells. It is not compiled again
# if it is there.
two_units() {
    f="$1 $(flags "$1" "$2") $3"
    o=$(object "$1" "$3")
    cell "$1 $2 $3 two translation units" "[ -f '$o' ] || $f -c -I'$root' '$impl' -o '$o'
$f -c -DLANG_ELSEWHERE -I'$root' '$main' -o main.o
$1 $3 main.o '$o' -o main $link
./main"
}

# object COMPILER LEVEL: where two_units leaves the implementation.
object() {
    echo "$dir/$(echo "$1$2" | tr -d ' ').o"
}

# made COMPILER BUILD: the implementation at -O2 as make builds it for the programs of a step.
made() {
    make -s -C "$root" CC="$1" werror=1 B="$2" "$2/tests/ringattn.o" &&
        cp "$root/$2/tests/ringattn.o" "$(object "$1" -O2)"
}

# no_threads COMPILER DIALECT [MORE]: without threads, the program needs no pthread function.
no_threads() {
    cell "$1 $2 RINGATTN_NO_THREADS $3" \
        "$1 $(flags "$1" "$2") -O0 -DRINGATTN_NO_THREADS $3 -c -I'$root' '$main' -o main.o
if nm -u main.o | grep pthread; then echo 'error: needed above'; exit 1; fi
$1 main.o -o main -lm
./main"
}

# less COMPILER DIALECT MACROS: without rings or gradients nothing of them is defined; others run.
less() {
    none=none
    case $3 in *RINGS*) none="$none|ra_(plan|ring|infer|cache|world)" ;; esac
    case $3 in *GRADIENTS*) none="$none|ra_(attention_backward|delta|fold_backward)" ;; esac
    cell "$1 $2 $3" \
        "$1 $(flags "$1" "$2") -O0 $3 -c -I'$root' '$main' -o main.o
if nm --defined-only main.o | grep -E ' T ($none)'; then echo 'error: defined above'; exit 1; fi
$1 main.o -o main $link
./main"
}

# ways COMPILER DIALECT: how a header may come into a program.
ways() {
    runs "$1" -O0 "$2" -DLANG_FIRST
    no_threads "$1" "$2" -DRINGATTN_SCALAR
    less "$1" "$2" "-DRINGATTN_NO_RINGS -DRINGATTN_NO_GRADIENTS"
    less "$1" "$2" -DRINGATTN_NO_RINGS
    less "$1" "$2" -DRINGATTN_NO_GRADIENTS
    runs "$1" -O0 "$2" '-DRINGATTN_ASSERT=assert -include assert.h'
    f="$1 $(flags "$1" "$2") -O0"
    cell "$1 $2 RINGATTN_STATIC in two translation units" \
        "$f -DRINGATTN_STATIC -c -I'$root' '$impl' -o impl.o
if nm -g --defined-only impl.o | grep ' ra_'; then echo 'error: defined above'; exit 1; fi
$f -DRINGATTN_STATIC -DLANG_STATIC_TWO -c -I'$root' '$main' -o main.o
$1 main.o impl.o -o main $link
./main"
    parses "$1" "$2" "included twice" -DLANG_TWICE "-I'$root' '$main'"
    f="$f -fsyntax-only"
    cell "$1 $2 header renamed" "cp '$root/ringattn.h' other_name.h
$f -DLANG_HEADER='\"other_name.h\"' -I. '$main'"
    cell "$1 $2 built from elsewhere, included by path" "mkdir -p tree/vendor tree/src elsewhere
cp '$root/ringattn.h' tree/vendor
cp '$main' tree/src
cd elsewhere
$f -DLANG_HEADER='\"../vendor/ringattn.h\"' ../tree/src/lang_main.c"
}

# Feature-test macros of the client: what PLATFORM declares for itself must agree with the system.
macros() {
    for m in _GNU_SOURCE _POSIX_C_SOURCE=200809L _XOPEN_SOURCE=700 _DEFAULT_SOURCE; do
        parses "$1" "$2" "$m" "-D$m -I'$root' '$main'"
    done
}

# foreign COMPILER DIALECT [MORE]: after headers that define common words as macros.
foreign() {
    parses "$1" "$2" "after macros of other headers $3" \
        "$3 -include '$root/tests/lang_macros.h' -I'$root' '$impl'"
}

# pasted COMPILER: the header's text in a program. It works if the header is found too, or under
# RINGATTN_SELF; otherwise the first error says so, also where the text has a guard of another file.
pasted() {
    f="$1 -std=c99 -Wall -Wextra -Wno-unused -DRINGATTN_SCALAR"
    cell "$1 c99 header pasted into a program" "{ echo '#define RINGATTN_IMPLEMENTATION'
    cat '$root/ringattn.h'; echo 'int main(void) { return ra_version() == 0; }'; } > program.c
{ echo '#ifndef ALL'; echo '#define ALL'; cat program.c; echo '#endif'; } > all.h
echo '#include \"all.h\"' > guarded.c
for p in program guarded; do
    if $f -fsyntax-only \$p.c 2> \$p.log; then echo 'error: accepted'; exit 1; fi
    grep -m 1 'error: ' \$p.log | grep RINGATTN_SELF
    $f -fsyntax-only -DRINGATTN_SELF='\"$root/ringattn.h\"' \$p.c
done
$f -fsyntax-only -I'$root' program.c
$f -fsyntax-only -DRINGATTN_IMPLEMENTATION -x c '$root/ringattn.h'"
}

# symbols COMPILER DIALECT LEVEL OBJECT: the implementation defines only ra_* names and needs only
# memory, threads and clocks from the system: no printing, no exit, no environment, no mathematics.
# (Without optimisation g++ 12 adds what unwinding through blocks with arrays needs.)
symbols() {
    allowed='mem(cpy|set|move|cmp)|bcmp|strlen|strcmp'
    allowed="$allowed|malloc|calloc|free|posix_memalign|aligned_alloc"
    allowed="$allowed|pthread_[a-z_]+|getpid|getauxval|clock_gettime|nanosleep|sched_yield"
    allowed="$allowed|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|__tls_get_addr"
    case $2 in *++*) allowed="$allowed|__gxx_personality_v0|_Unwind_Resume" ;; esac
    cell "$1 $2 $3 defines only ra_*, needs only memory, threads and clocks" "
nm -g --defined-only '$4' | awk 'NF == 3 { print \$3 }' > defined
nm -u '$4' | awk '{ print \$NF }' > needed
grep -q '^ra_plan_create\$' defined
test -s needed
sed -i '/^DW\.ref\.__gxx_personality_v0\$/d; /lang_other_version/d' defined
if grep -v '^ra_[a-z]' defined; then echo 'error: defined above'; exit 1; fi
if grep -Ev '^($allowed)(@.*)?\$' needed; then echo 'error: needed above'; exit 1; fi"
}

# linked COMPILER DIALECT LEVEL: how the programs of the documentation are compiled if they are
# linked with impl.o.
linked() {
    echo "$1 -std=$2 -Wall -Wextra -Werror $3 -DRA__IMPLEMENTED -I'$root'"
}

# printed COMPILER DIALECT LEVEL OBJECT: each program in the head comment compiles and runs as it is
# printed. OBJECT is the implementation.
printed() {
    f=$(linked "$1" "$2" "$3")
    cell "$1 $2 the programs in the head comment" "awk '/^ \* Program [0-9]/ { n++; on = 0 }
/^ \*   #define RINGATTN_IMPLEMENTATION/ { on = 1 }
/^ \* [^ ]/ { on = 0 }
on { sub(/^ \*( {3})?/, \"\"); print > (n \".c\") }' '$root/ringattn.h'
test \"\$(ls [0-9].c | wc -l)\" = 5
for p in [0-9].c; do test \$(grep -c . \$p) -le 24; done
for p in 1 2 3 5; do
    $f \$p.c '$4' -o main -pthread
    ./main
done
$f 4.c '$root/tests/lang_network.c' '$4' -o main -pthread
./main"
}

# readme COMPILER DIALECT FLAGS...: the same of each program in README.md, which FLAGS compile.
readme() {
    [ -f "$root/README.md" ] || return 0
    name="$1 $2 the programs in README.md"
    shift 2
    cell "$name" "awk '/^\`\`\`/ { if (on) close(f); on = 0 }
on { print > f }
/^\`\`\`c\$/ { on = 1; f = sprintf(\"%02d.c\", ++n) }' '$root/README.md'
grep -l '^int main' [0-9]*.c > programs
for p in \$(cat programs); do
    $* -o main \$p -pthread -lm
    ./main
done"
}

have() {
    command -v "$1" > /dev/null 2>&1
}

# run_cells: those that have not run yet, one per core at a time.
run_cells() {
    for c in "$dir"/[0-9]*; do [ -f "$c/status" ] || basename "$c"; done |
        xargs -P "$cores" -I ID sh -c \
            'timeout 300 sh "$0/$1/run.sh" > "$0/$1/log" 2>&1; echo $? > "$0/$1/status"' "$dir" ID
}

quick() {
    cc=${CC:-cc}
    made=$dir/../tests/ringattn.o      # by make, of lang_impl.c
    if [ -f "$made" ]; then made=$(cd "$dir/../tests" && pwd)/ringattn.o
    else made=$(object "$cc" -O1); "$cc" -std=c99 -O1 -I"$root" -c "$impl" -o "$made"
    fi
    # Kernels are compiled at -O0 by clang, otherwise by g++.
    kernels=
    if [ "$cc" = clang ] || have clang; then kernels=-DRINGATTN_SCALAR; fi
    parses "$cc" c99 "with kernels" "-DLANG_FIRST -DRINGATTN_STATIC -I'$root' '$main'"
    no_threads "$cc" c99 "-DRINGATTN_SCALAR -DLANG_FIRST -DRINGATTN_STATIC"
    less "$cc" c99 "-DRINGATTN_SCALAR -DRINGATTN_NO_RINGS -DRINGATTN_NO_GRADIENTS"
    symbols "$cc" c99 "" "$made"
    foreign "$cc" c99 -DRINGATTN_SCALAR
    pasted "$cc"
    printed "$cc" c99 -O0 "$made"
    readme "$cc" c99 "$(linked "$cc" c99 -O0) '$made'"
    if have g++; then
        two_units g++ c++11 "-O0 $kernels"
        [ ! "$kernels" ] || parses g++ c++11 "with kernels" "-I'$root' '$impl'"
        foreign g++ c++20
        infer=$root/examples/ring_infer.c
        [ ! -f "$infer" ] || parses g++ c++11 "the engine of examples/infer" \
            "-DRA__IMPLEMENTED -I'$root' '$infer'"
    else skip "g++ c++11" "no g++ here"
    fi
    if [ "$cc" = clang ]; then :
    elif have clang; then runs clang -O0 c99
    else skip "clang c99" "no clang here"
    fi
}

# c_levels COMPILER: -O0 is in two_units and ways. clang's -Og is -O1, which tests/hooks.c has in
# the step clang of check_full.sh. The step ofast takes the object of -Ofast.
c_levels() {
    case $1 in
        gcc) made gcc build/release; runs gcc -Og c99 ;;
        clang) made clang build/clang ;;
    esac
    two_units "$1" c99 -O2
    two_units "$1" c99 "-Ofast -march=native"
    runs "$1" -O3 gnu99                # where the compiler contracts a*b + c by default
    for dialect in gnu99 c11 c17; do
        parses "$1" $dialect dialect "-I'$root' '$main'"
    done
}

cpp_levels() {                         # the optimiser is the one of the C compiler
    runs "$1" -Ofast c++11
    parses "$1" c++17 dialect "-I'$root' '$main'"
}

full() {
    known=
    for cc in gcc clang g++ clang++; do
        if ! have "$cc"; then
            skip "$cc" "no $cc here"
            continue
        fi
        known="$known $cc"
        case $cc in
            *++) std=c++11; cpp_levels "$cc" ;;
            *) std=c99; c_levels "$cc" ;;
        esac
        two_units "$cc" "$std" -O0
        ways "$cc" "$std"
        macros "$cc" "$std"
        case $cc in
            *++) for std in c++11 c++14 c++17 c++20 c++2b; do foreign "$cc" $std; done ;;
            *) foreign "$cc" c99; pasted "$cc" ;;
        esac
    done
    run_cells
    for cc in $known; do
        case $cc in *++) std=c++11 levels=-O0 ;; *) std=c99 levels="-O0 -O2" ;; esac
        for level in $levels; do
            symbols "$cc" "$std" "$level" "$(object "$cc" "$level")"
        done
    done
    for cc in gcc clang; do
        printed "$cc" c99 -O2 "$(object "$cc" -O2)"
        readme "$cc" c99 "$(linked "$cc" c99 -O2) '$(object "$cc" -O2)'"
    done
    printed gcc c11 -O2 "$(object gcc -O2)"
    readme gcc c11 "gcc -std=c11 -Wall -Wextra -Werror -O0 -I'$root'"
}

if [ "$mode" = full ]; then full; else quick; fi
run_cells

passed=0
failed=0
for c in "$dir"/[0-9]*; do
    if [ "$(cat "$c/status")" = 0 ]; then
        passed=$((passed + 1))
        rm -rf "$c"
    else
        failed=$((failed + 1))
        echo "FAIL $(cat "$c/name")  ($c)"
        { grep -m 4 -E 'error|wrong' "$c/log" || tail -n 4 "$c/log"; } | sed 's/^/    | /'
    fi
done
if [ "$mode" = full ] && [ "$skipped" != 0 ]; then
    failed=$((failed + skipped))
    skipped=0
fi
tail=
[ "$skipped" = 0 ] || tail=", $skipped skipped"
echo "$passed passed, $failed failed$tail"
[ "$failed" = 0 ]
