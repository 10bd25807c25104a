#!/bin/sh
# Runs the model of the bundled world's protocol (tests/shm.pml) for 2 to 4 ranks, without and with
# one that dies, and that of how the threads of a failed pass stop (tests/team.pml), also with
# mistakes that they must find. Ends with "N passed, N failed".
#
#   spin.sh WORK [quick]               quick: the long models are left out if they are known to be
#                                      right: they depend on shm.pml alone
# All of them take 3 minutes of a processor and 2 GB.

cd "$(dirname "$0")/.." || exit 1
work=${1:-build/spin} quick=$2 passed=0 failed=0
case $work in /*) ;; *) work=$PWD/$work ;; esac
proved="1208243323 13950"           # the cksum of the shm.pml whose long models last were right
if ! command -v spin > /dev/null; then
    echo "skipped: no spin"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
rm -rf "$work"
mkdir -p "$work"

# model NAME WANT FLAGS...: WANT is right, or wrong for a mistake that must be found. Of $pml.
pml=shm
model() {
    name=$1 want=$2
    shift 2
    mkdir -p "$work/$name"
    cp tests/$pml.pml "$work/$name"
    (
        cd "$work/$name" && timeout 60 spin "$@" -a $pml.pml &&
            ${CC:-gcc} -O2 -w -DSAFETY -DHC4 -DMEMLIM=4000 -o pan pan.c &&
            timeout 1200 ./pan -m200000
    ) > "$work/$name.log" 2>&1
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' "$work/$name.log" | tail -n 1)
    states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' "$work/$name.log" | tail -n 1)
    if grep -q 'Search not completed' "$work/$name.log" && [ "$want" = right ]; then errors=; fi
    if { [ "$want" = right ] && [ "$errors" = 0 ]; } || { [ "$want" = wrong ] &&
        [ "${errors:-0}" -gt 0 ]; }; then
        passed=$((passed + 1))
        echo "ok    $name: ${errors} errors, $states states"
    else
        failed=$((failed + 1))
        echo "FAIL  $name: ${errors:-no} errors, wanted $want"
        tail -n 20 "$work/$name.log"
    fi
}

pml=team
model threads-stop right
model threads-stop-order wrong -DBREAK_ORDER
pml=shm
model two-ranks right -DP=2 -DM=1
model two-ranks-death right -DP=2 -DM=1 -DDEATHS
model two-passes-rests right -DP=2 -DM=1 -DPASSES=2 -DRESTS
model two-passes-leaves right -DP=2 -DM=1 -DPASSES=2 -DLEAVES -DCOARSE
model two-rings right -DP=2 -DM=1 -DPASSES=2 -DRINGS
model turn-ends-before-rest wrong -DP=2 -DM=1 -DPASSES=2 -DRINGS -DBREAK_TURN
model no-turn-after-a-failure wrong -DP=2 -DM=1 -DPASSES=2 -DRINGS -DBREAK_FAILED
model rank-never-rests wrong -DP=2 -DM=1 -DRESTS -DBREAK_REST
for steps in fine COARSE; do           # large steps hide neither mistake
    model no-wait-for-copies-$steps wrong -DP=2 -DM=1 -DBREAK_COPIES -D$steps
    model copies-wake-nobody-$steps wrong -DP=2 -DM=2 -DBREAK_WAKE -D$steps
done
now=$(cksum < tests/shm.pml)
if [ "$quick" = quick ] && [ "$now" = "$proved" ]; then
    echo "skipped: models of minutes, which were right for this tests/shm.pml: make spin"
else
    [ "$now" = "$proved" ] || echo "another tests/shm.pml: if all is right, proved=\"$now\""
    model two-messages right -DP=2 -DM=2
    model three-ranks right -DP=3 -DM=1            # 36 million states, 2 GB
    model three-ranks-death right -DP=3 -DM=1 -DDEATHS -DCOARSE
    model three-ranks-two-messages right -DP=3 -DM=2 -DCOARSE
    model three-ranks-rests right -DP=3 -DM=1 -DRESTS -DCOARSE
    model three-ranks-two-rings right -DP=3 -DM=1 -DPASSES=2 -DRINGS -DCOARSE
    # 6 million states until the mistake is found
    model marked-before-counted wrong -DP=3 -DM=1 -DPASSES=2 -DLEAVES -DBREAK_COUNT -DCOARSE
    # A rank that may die may also live: this holds all runs without a death. 40 million states,
    # 2.1 GB, 52 s
    model four-ranks-death right -DP=4 -DM=1 -DDEATHS -DCOARSE
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
