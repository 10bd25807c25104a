#!/bin/sh
# The language matrix: tests/lang_main.c compiled by every compiler in every dialect at every level
# of optimisation, with all warnings as errors, and run; the ways a single header gets included; the
# symbols that its object has and wants.
#
#   matrix.sh quick|full DIR     DIR takes what is built. CC is the compiler of `quick`, which adds
#                                a cell each of g++, clang and clang++ where they are; `full` has
#                                all of all four, each level of optimisation in one dialect and two
#                                in the others, and fails where a compiler is missing.
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

# cell NAME SHELL...: one test, a script of its own in a directory of its own.
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

# runs COMPILER LEVEL DIALECT [MORE]: the program builds without a word and is right.
runs() {
    cell "$1 $2 $3 $4" "$1 $(flags "$1" "$3") $2 $4 -I'$root' '$main' -o main $link
./main"
}

# ways COMPILER DIALECT: how a header may come into a program.
ways() {
    f="$1 $(flags "$1" "$2") -O0"
    cell "$1 $2 header before everything else" "$f -DLANG_FIRST -I'$root' '$main' -o main $link
./main"
    cell "$1 $2 two translation units" "$f -c -I'$root' '$impl' -o impl.o
$f -c -DLANG_ELSEWHERE -I'$root' '$main' -o main.o
$1 main.o impl.o -o main $link
./main"
    cell "$1 $2 RINGATTN_NO_THREADS" "$f -DRINGATTN_NO_THREADS -I'$root' '$main' -o main -lm
./main"
    cell "$1 $2 RINGATTN_SCALAR" "$f -DRINGATTN_SCALAR -I'$root' '$main' -o main $link
./main"
}

# odd_ways COMPILER DIALECT: the rarer ones.
odd_ways() {
    f="$1 $(flags "$1" "$2") -O0"
    cell "$1 $2 RINGATTN_STATIC in two translation units" \
        "$f -DRINGATTN_STATIC -c -I'$root' '$impl' -o impl.o
$f -DRINGATTN_STATIC -DLANG_STATIC_TWO -c -I'$root' '$main' -o main.o
$1 main.o impl.o -o main $link
./main"
    cell "$1 $2 included twice" "$f -DLANG_TWICE -I'$root' '$main' -o main $link
./main"
    cell "$1 $2 header renamed" "cp '$root/ringattn.h' other_name.h
$f -DLANG_HEADER='\"other_name.h\"' -I. '$main' -o main $link
./main"
    cell "$1 $2 built from elsewhere, included by path" "mkdir -p tree/vendor tree/src elsewhere
cp '$root/ringattn.h' tree/vendor
cp '$main' tree/src
cd elsewhere
$f -DLANG_HEADER='\"../vendor/ringattn.h\"' ../tree/src/lang_main.c -o main $link
./main"
    cell "$1 $2 asserts on" "$f -DRINGATTN_ASSERT=assert -include assert.h -I'$root' '$main' \
-o main $link
./main"
}

# Feature-test macros of the client: what PLATFORM declares for itself must agree with the system.
macros() {
    for m in _GNU_SOURCE _POSIX_C_SOURCE=200809L _XOPEN_SOURCE=700 _DEFAULT_SOURCE; do
        runs "$1" -O0 "$2" "-D$m"
    done
}

# symbols COMPILER DIALECT LEVELS: the object defines ra_ names alone, and wants from the system
# nothing but memory, threads and clocks: no printing, no way out, no environment, no mathematics.
# (Without optimisation g++ 12 adds what unwinding through blocks with arrays would need.)
symbols() {
    f="$1 $(flags "$1" "$2") -I'$root' -DRINGATTN_IMPLEMENTATION -c '$root/tests/lang_empty.c'"
    allowed='mem(cpy|set|move|cmp)|bcmp|strlen|strcmp'
    allowed="$allowed|malloc|calloc|free|posix_memalign|aligned_alloc"
    allowed="$allowed|pthread_[a-z_]+|getpid|getauxval|clock_gettime|nanosleep|sched_yield"
    allowed="$allowed|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|__tls_get_addr"
    case $2 in *++*) allowed="$allowed|__gxx_personality_v0|_Unwind_Resume" ;; esac
    for level in $3; do
        cell "$1 $2 $level defines only ra_*, wants only memory, threads and clocks" \
            "$f $level -o impl.o
nm -g --defined-only impl.o | awk 'NF == 3 { print \$3 }' > defined
nm -u impl.o | awk '{ print \$NF }' > wanted
grep -q '^ra_plan_create\$' defined
test -s wanted
sed -i '/^DW\.ref\.__gxx_personality_v0\$/d' defined
if grep -v '^ra_[a-z]' defined; then echo 'error: defined above'; exit 1; fi
if grep -Ev '^($allowed)(@.*)?\$' wanted; then echo 'error: wanted above'; exit 1; fi"
    done
    cell "$1 $2 RINGATTN_STATIC defines nothing" "$f -O0 -DRINGATTN_STATIC -o impl.o
! nm -g --defined-only impl.o | grep ' ra_'"
    cell "$1 $2 RINGATTN_NO_THREADS wants no threads" "$f -O0 -DRINGATTN_NO_THREADS -o impl.o
! nm -u impl.o | grep pthread"
}

# printed COMPILER DIALECT LEVEL: each program in the head comment does what it says, as it is
# printed; so does every program in the README.
printed() {
    cell "$1 $2 the programs in the head comment" "awk '/^ \* Program [0-9]/ { n++; on = 0 }
/^ \*   #define RINGATTN_IMPLEMENTATION/ { on = 1 }
/^ \* [^ ]/ { on = 0 }
on { sub(/^ \*( {3})?/, \"\"); print > (n \".c\") }' '$root/ringattn.h'
test \"\$(ls [0-9].c | wc -l)\" = 4
if [ -f '$dir/../tests/ringattn.o' ]; then cp '$dir/../tests/ringattn.o' impl.o
else $1 -std=$2 -O1 -I'$root' -c '$root/tests/lang_impl.c' -o impl.o; fi
for p in 1 2 3; do
    $1 -std=$2 -Wall -Wextra -Werror $3 -DRA__IMPLEMENTED -I'$root' \$p.c impl.o -o main -pthread
    ./main
done
$1 -std=$2 -Wall -Wextra -Werror $3 -DRA__IMPLEMENTED -I'$root' 4.c '$root/tests/lang_network.c' \
impl.o -o main -pthread
./main"
    [ -f "$root/README.md" ] || return 0
    cell "$1 $2 the programs in README.md" "awk '/^\`\`\`/ { if (on) close(f); on = 0 }
on { print > f }
/^\`\`\`c\$/ { on = 1; f = sprintf(\"%02d.c\", ++n) }' '$root/README.md'
grep -l '^int main' [0-9]*.c > programs
for p in \$(cat programs); do
    $1 -std=$2 -Wall -Wextra -Werror $3 -I'$root' \$p -o main -pthread -lm
    ./main
done"
}

have() {
    command -v "$1" > /dev/null 2>&1
}

quick() {
    cc=${CC:-cc}
    runs "$cc" -O0 c99
    ways "$cc" c99
    symbols "$cc" c99 -O0
    printed "$cc" c99 -O0
    for other in g++ clang clang++; do
        case $other in
            *++) std=c++11 ;;
            *) std=c99 ;;
        esac
        if [ "$other" = "$cc" ]; then :
        elif have "$other"; then
            runs "$other" -O0 "$std"
        else
            skip "$other -O0 $std" "no $other here"
        fi
    done
}

full() {
    for cc in gcc clang g++ clang++; do
        case $cc in
            *++) dialects=c++17 std=c++11 ;;
            *) dialects="gnu99 c11 c17" std=c99 ;;
        esac
        if ! have "$cc"; then
            skip "$cc" "no $cc here"
            continue
        fi
        for level in -O0 -Og -O2 -O3 -Ofast "-O2 -ffast-math" "-O2 -march=native"; do
            runs "$cc" "$level" "$std"
        done
        for d in $dialects; do
            runs "$cc" -O0 "$d"
            runs "$cc" -O3 "$d"
        done
        ways "$cc" "$std"
        odd_ways "$cc" "$std"
        macros "$cc" "$std"
        symbols "$cc" "$std" "-O0 -O2"
    done
    printed gcc c99 -O2
    printed gcc c11 -O2
    printed clang c99 -O2
}

if [ "$mode" = full ]; then full; else quick; fi

# The cells, one a core at a time.
ls "$dir" | xargs -P "$cores" -I ID sh -c \
    'timeout 300 sh "$0/$1/run.sh" > "$0/$1/log" 2>&1; echo $? > "$0/$1/status"' "$dir" ID

passed=0
failed=0
for c in "$dir"/*; do
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
