#!/bin/sh
# Plants one mistake at a time (tests/mutants.txt) in a copy of ringattn.h and says which test finds
# it. Ends with "N passed, N failed": a mistake that no test finds fails, and so does a line whose
# text does not stand exactly once in the header. All tests first pass on the header as it is.
#
#   mutants.sh WORK [EVERY [JOBS]]     every EVERY-th mistake, JOBS at a time
#
# The scalar build is used: it is compiled fastest, and no mistake is in a kernel.

cd "$(dirname "$0")/.." || exit 1
work=${1:-build/mutants} every=${2:-1} jobs=${3:-$(nproc 2> /dev/null || echo 2)}
cc="${CC:-gcc} -std=c99 -O1 -w -DRINGATTN_SCALAR -pthread"

# build WHAT FOLDER: the header of FOLDER goes before that of the repository.
build() {
    case $1 in
        sim | silence | differences)
            [ -x "$2/sim" ] || $cc "-I$2" -I. -o "$2/sim" tests/test_sim.c -lm ;;
        schedule) $cc "-I$2" -I. -o "$2/schedule" tests/test_schedule.c -lm ;;
        resume)
            [ -x "$2/resume" ] ||
                $cc "-I$2" -I. -o "$2/resume" tests/test_resume.c tests/hooks.c -lm ;;
        world)
            $cc "-I$2" -I. -c -o "$2/ringattn.o" tests/lang_impl.c &&
                $cc -o "$2/world" "$work/world.o" "$2/ringattn.o" -lm ;;
    esac
}

# try WHAT FOLDER: 0 if all is well.
try() {
    case $1 in
        sim) timeout 120 "$2/sim" seeds --count 1500 ;;
        silence | differences) timeout 60 "$2/sim" "$1" ;;
        schedule) timeout 60 "$2/schedule" ;;
        resume) timeout 120 "$2/resume" ;;
        world) timeout 120 "$2/world" bundled ;;
    esac > "$2/$1.log" 2>&1
}

plant() {
    awk -v from="$2" -v to="$3" '
        { text = text $0 "\n" }
        END {
            gsub(/~/, "\n", from); gsub(/~/, "\n", to)
            if (!(at = index(text, from))) { print "stands nowhere: " from > "/dev/stderr"; exit 1 }
            rest = substr(text, at + length(from))
            if (index(rest, from)) { print "stands twice: " from > "/dev/stderr"; exit 1 }
            printf "%s%s%s", substr(text, 1, at - 1), to, rest
        }' ringattn.h > "$1"
}

# one NAME TESTS FROM TO: a line of the report.
one() {
    dir=$work/$1
    rm -rf "$dir" && mkdir -p "$dir"
    if ! plant "$dir/ringattn.h" "$3" "$4" 2> "$dir/why"; then
        echo "FAIL $1: its text $(cat "$dir/why")"
        return
    fi
    for test in $2; do
        if ! build "$test" "$dir" > "$dir/build.log" 2>&1; then
            echo "FAIL $1: does not compile"
            return
        fi
        try "$test" "$dir" && continue
        echo "found $1 by $test"
        [ -n "$KEEP" ] || rm -rf "$dir"
        return
    done
    echo "FAIL $1: not found by $2"
}

if [ "$1" = one ]; then                # one of the jobs below
    work=$2
    one "$3" "$4" "$5" "$6"
    exit
fi

rm -rf "$work"
mkdir -p "$work/right"
cp ringattn.h "$work/right"
$cc -DRA__IMPLEMENTED -I. -c -o "$work/world.o" tests/conformance/test_conformance.c || exit 1
# right TESTS...: writes what fails although nothing is planted.
right() {
    for test in "$@"; do
        build "$test" "$work/right" && try "$test" "$work/right" && continue
        echo "FAIL $test: on the header as it is"
    done
}

right schedule world resume > "$work/wrong.1" &
right sim silence differences > "$work/wrong.2"
wait
if [ -s "$work/wrong.1" ] || [ -s "$work/wrong.2" ]; then
    cat "$work/wrong.1" "$work/wrong.2"
    echo "0 passed, 1 failed"
    exit 1
fi

# Arguments for xargs, one a line.
awk -F ' [|] ' -v every="$every" '!/^#/ && NF == 4 && n++ % every == 0 {
    for (i = 1; i <= 4; i++) print $i }' "${LIST:-tests/mutants.txt}" > "$work/list"
tr '\n' '\0' < "$work/list" | xargs -0 -n 4 -P "$jobs" sh tests/mutants.sh one "$work" |
    tee "$work/report"
passed=$(grep -c '^found' "$work/report")
failed=$(grep -c '^FAIL' "$work/report")
[ $((passed + failed)) = $(($(wc -l < "$work/list") / 4)) ] || failed=$((failed + 1))
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
