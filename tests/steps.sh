# For check_full.sh and check_long.sh, which read it: steps are counted in $work/sums. LIMIT is the
# number of seconds that one may take.

# step [-x] NAME COMMAND...: counted by its closing line, or with -x by its exit status. Steps may
# run at the same time.
step() {
    how=
    if [ "$1" = -x ]; then
        how=-x
        shift
    fi
    name=$1
    shift
    LIMIT=$LIMIT sh tests/run.sh $how "$work/$name" "$name" "$@"
    echo "$name=$work/$name.sum" >> "$work/sums"
}

skip() {
    echo "skip  $1 ($2)"
    echo "0 0 1" > "$work/$1.sum"
    echo "$1=$work/$1.sum" >> "$work/sums"
}
