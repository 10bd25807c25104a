#!/bin/sh
# Plants mistakes (tests/mutants.txt) in ringattn.h, one at a time, and says which test finds each.
# Ends with "N passed, N failed": a mistake that no test finds fails, and so does a line whose text
# is not exactly once in the header. All tests first pass on the header as it is.
#
#   mutants.sh WORK [JOBS]             JOBS at a time
#
# The programs are compiled once, with all mistakes in them (tests/plant.py): MUTANT=n chooses one.
# The scalar build is used, because it is compiled fastest. Only "numbers" has all kernels, so that
# "scores" can need those of bf16; "batches" needs kernels that fold several blocks at once, "near"
# those with decode_near. Without them their mistakes are left out.

cd "$(dirname "$0")/.." || exit 1
list=${LIST:-tests/mutants.txt}
batches= near= scores=
if grep -qs avx512_bf16 /proc/cpuinfo; then
    batches=batches scores=scores
    grep -qs '^cpu family.*: 25$' /proc/cpuinfo || near=near     # Zen 4 does not use decode_near
fi

# build PROGRAM: the header in $work goes before that of the repository.
build() {
    native="${CC:-gcc} -std=c99 -O1 -w -pthread -I$work -I."
    cc="$native -DRINGATTN_SCALAR"
    case $1 in
        hooks) $cc -c -o "$work/hooks.o" tests/hooks.c ;;
        sim | resume | failure | schedule)
            $cc -o "$work/$1" "tests/test_$1.c" "$work/hooks.o" -lm ;;
        cache | forward | fp) $cc -o "$work/$1" "tests/test_$1.c" -lm ;;
        near) $native -o "$work/near" tests/test_forward.c -lm ;;
        rows) $cc -o "$work/rows" tests/test_bits.c -lm ;;
        numbers) $native -o "$work/numbers" tests/test_numbers.c tests/hooks.c -lm ;;
        batches) $native -o "$work/batches" tests/test_resume.c tests/hooks.c -lm ;;
        world)
            $cc -o "$work/world" tests/conformance/test_conformance.c tests/lang_impl.c -lm ;;
    esac > "$work/$1.build" 2>&1 || echo "$1" >> "$work/broken"
}

# try WHAT: 0 if all is well.
try() {
    case $1 in
        sim) timeout 120 "$work/sim" seeds --count 8000 --first ;;
        silence | differences | caches) timeout 60 "$work/sim" "$1" --first ;;
        schedule) timeout 120 "$work/schedule" --first ;;
        rows) timeout 60 "$work/rows" rows_of_any_call --first ;;
        cache) timeout 60 "$work/cache" chosen --first &&
            timeout 60 "$work/cache" all_queries --first &&
            timeout 60 "$work/cache" unlike_dtypes --first ;;
        apart) timeout 60 "$work/cache" disagreements --first ;;
        lanes) timeout 60 "$work/cache" lanes_and_weights --first &&
            timeout 60 "$work/cache" ring_buffers --first ;;
        pages) timeout 60 "$work/cache" refused_pages --first &&
            timeout 60 "$work/cache" new_tokens_in_pages --first ;;
        faults) timeout 60 "$work/cache" refused_ranges --first &&
            timeout 60 "$work/cache" checksums --first &&
            timeout 60 "$work/cache" watchdogs --first ;;
        steady) timeout 60 "$work/cache" steps_poll --first &&
            timeout 60 "$work/cache" events --first ;;
        forward) timeout 90 "$work/forward" modified_decode --first ;;
        fp) timeout 90 "$work/fp" --first && timeout 90 "$work/fp" --other --first ;;
        cells) timeout 90 "$work/forward" attention_at --first ;;
        near) timeout 90 "$work/near" modified_decode --first ;;
        resume) timeout 120 "$work/resume" --first ;;
        numbers) timeout 90 "$work/numbers" --first ;;
        scores) timeout 90 "$work/numbers" scores_of_any_size --first ;;
        failure) timeout 60 "$work/failure" default_watchdog --first ;;
        ends) timeout 60 "$work/failure" world --first ;;
        agree) timeout 60 "$work/failure" rings_that_differ --first &&
            timeout 60 "$work/failure" absent_callers --first &&
            timeout 60 "$work/failure" containers --first &&
            timeout 60 "$work/failure" deadlines_on_another_clock --first &&
            timeout 60 "$work/failure" shared_between_processes --first ;;
        batches) timeout 120 "$work/batches" lent_batches --first ;;
        fields) return 1 ;;            # a line of the list that has not four
        world) timeout 90 "$work/world" bundled --first ;;
    esac
}

# one NUMBER NAME TESTS: a line of the report.
one() {
    for test in $3; do
        MUTANT=$1 try "$test" > "$work/$2.log" 2>&1 && continue
        how=$?
        if [ "$1" = 0 ]; then echo "FAIL $test: on the header as it is"
        elif [ $how != 124 ]; then echo "found $2 by $test"
        elif MUTANT=0 try "$test" > /dev/null 2>&1; then echo "found $2 by $test (timed out)"
        else echo "FAIL $2: the machine is too slow for $test"
        fi
        return
    done
    [ "$1" = 0 ] || echo "FAIL $2: not found by $3"
}

case $1 in                             # one of the jobs below
    --build) work=$2 && build "$3"; exit ;;
    --one) work=$2 && one "$3" "$4" "$5"; exit ;;
esac

work=${1:-build/mutants} jobs=${2:-$(nproc 2> /dev/null || echo 2)}
if ! command -v python3 > /dev/null; then
    echo "skipped: no python3"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
rm -rf "$work"
mkdir -p "$work"
python3 tests/plant.py "$list" ringattn.h > "$work/ringattn.h" 2> "$work/unplanted" || {
    cat "$work/unplanted"
    exit 1
}
native="numbers $batches $near"
for programs in 'hooks world rows cache forward fp' "sim resume failure schedule $native"; do
    echo $programs | xargs -n 1 -P "$jobs" sh tests/mutants.sh --build "$work"
done
if [ -s "$work/broken" ]; then
    cat "$work"/*.build | head -n 20
    echo "FAIL does not compile:" $(cat "$work/broken")
    echo "0 passed, 1 failed"
    exit 1
fi

# Arguments for xargs: number, name and tests of each mistake; 0 is the header as it is.
right="sim resume failure agree ends rows schedule world cache forward cells silence differences"
right="$right caches apart lanes pages faults steady fp numbers $scores $batches $near"
left=                                  # names of those left out, each with a space
[ "$batches" ] || left='batches '
[ "$near" ] || left="${left}near "
[ "$scores" ] || left="${left}scores "
awk -F ' [|] ' -v list="$right" -v left="$left" 'BEGIN { split(list, right, " ")
        for (i = 1; i in right; i++) print "0\nright_" right[i] "\n" right[i] }
    /^#/ || !NF { next }
    NF != 4 { print "0\nnot_four_fields\nfields"; next }
    { n++; if (!index(left, $2 " ")) print n "\n" $1 "\n" $2 }' \
    "$list" > "$work/list"
tr '\n' '\0' < "$work/list" |
    xargs -0 -n 3 -P "$jobs" sh tests/mutants.sh --one "$work" > "$work/report"
sed 's/^/FAIL /' "$work/unplanted" >> "$work/report"
sort "$work/report"
passed=$(grep -c '^found' "$work/report")
failed=$(grep -c '^FAIL' "$work/report")
tried=$(($(wc -l < "$work/list") / 3 - $(echo $right | wc -w)))
[ "$passed" = $tried ] || [ "$failed" != 0 ] || failed=1
left=$(($(grep -v '^#' "$list" | grep -c ' | ') - tried))
[ $left = 0 ] && left= || left=", $left skipped"
echo "$passed passed, $failed failed$left"
[ "$failed" = 0 ]
