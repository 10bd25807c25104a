#!/bin/sh
# The conformance suite over one MPI, at level 1 and at level 0: mpi.sh openmpi|mpich RANKS. Ends
# with "N passed, N failed", or says that this MPI is not here. A job that hangs is killed.

cd "$(dirname "$0")/../.." || exit 1
mpi=$1 ranks=$2 b=build/$1
if ! command -v "mpicc.$mpi" > /dev/null || ! command -v "mpirun.$mpi" > /dev/null; then
    echo "skipped: $mpi (no mpicc.$mpi or mpirun.$mpi)"
    exit 0
fi
${MAKE:-make} --no-print-directory werror=1 CC=gcc B="$b" "MPICC=mpicc.$mpi" \
    "$b/tests/conformance/mpi_conform" || exit 1
how=
[ "$mpi" = mpich ] || how="--allow-run-as-root --oversubscribe"
rm -f "$b/gate"
for level in 1 0; do
    timeout -k 10 300 "mpirun.$mpi" $how -n "$ranks" "$b/tests/conformance/mpi_conform" \
        "$PWD/$b/gate" $level > "$b/conform.log" 2>&1
    status=$?
    cat "$b/conform.log"
    rm -f "$b/gate"
    [ $status = 0 ] || exit 1
    passed=$((${passed:-0} + $(sed -n 's/^\([0-9]*\) passed, 0 failed$/\1/p' "$b/conform.log")))
done
echo "$passed passed, 0 failed"
