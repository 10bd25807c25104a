#!/bin/sh
# Runs one test program. Its output goes to a log, its figures, "passed failed skipped", to a file.
# Prints one line about it, with its seconds and those of all its processors, and if something
# failed what and the end of the log.
#
#   run.sh [-x] LOG NAME COMMAND...    LOG.log and LOG.sum are written; always exits 0
#   run.sh -s NAME=SUM...              adds up figures: "N passed, N failed", exits 1 if any failed
#
# The figures are those of the program's last line "N passed, N failed" (", N skipped" may follow).
# A program that prints no such line, crashes, or exits non-zero although nothing failed counts as
# one more failure. With -x the exit status alone counts: one passed or one failed.

limit=${LIMIT:-600}

if [ "$1" = -s ]; then
    shift
    for pair in "$@"; do
        if [ -f "${pair#*=}" ]; then
            cat "${pair#*=}"
        else
            echo "FAIL ${pair%%=*}: does not build" >&2
            echo 0 1 0
        fi
    done | awk '{ p += $1; f += $2; s += $3 }
        END {
            printf "%d passed, %d failed%s\n", p, f, s ? ", " s " skipped" : ""
            exit f > 0 || p == 0
        }'
    exit
fi

by_status=0
if [ "$1" = -x ]; then
    by_status=1
    shift
fi
log=$1
name=$2
shift 2
start=$(date +%s)
timeout "$limit" "$@" > "$log.log" 2>&1 < /dev/null
status=$?
seconds=$(($(date +%s) - start))
times > "$log.sum"                     # the second line is of children
busy=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4 + 0.5) }' "$log.sum")

set -- $(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2 0/p
    s/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log.log" | tail -n 1)
passed=${1:-0} failed=${2:-0} skipped=${3:-0} why=
if [ "$by_status" = 1 ]; then
    passed=$((status == 0)) failed=$((status != 0)) skipped=0
elif [ $# = 0 ]; then
    failed=1 why="no closing line"
elif [ "$passed" = 0 ] && [ "$failed" = 0 ] && [ "$skipped" = 0 ]; then
    failed=1 why="nothing was run"
elif [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    failed=1 why="all passed, but"
fi
case $status in
    0) ;;
    124) why="${why:+$why }timed out after $limit s" ;;
    *) why="${why:+$why }exit status $status" ;;
esac
echo "$passed $failed $skipped" > "$log.sum"

note="$passed passed, $failed failed"
[ "$skipped" = 0 ] || note="$note, $skipped skipped"
if [ "$failed" = 0 ]; then
    printf 'ok    %-18s %-34s %4s s, processors %4s s\n' "$name" "$note" "$seconds" "$busy"
    grep -E '^([a-z_0-9]+: )?skipped: ' "$log.log" | sed 's/^/      /'
else
    printf 'FAIL  %-18s %-34s %4s s %s(%s.log)\n' "$name" "$note" "$seconds" "${why:+$why }" "$log"
    { grep FAIL "$log.log" | head -n 20; echo ...; tail -n 40 "$log.log"; } | sed 's/^/    | /'
fi
exit 0
