#!/bin/sh
# A cache that outlives its machines. 64K tokens are prefilled by 4 processes over TCP and saved;
# loaded by 3, of which one is killed while they decode; loaded by 2. The tokens are throughout
# those of one rank without files. Then runs that are ended by signals.
#
#   lasting.sh FOLDER RING_INFER RANDOM_MODEL [TOKENS]     ends with "N passed, N failed"

dir=$1 infer=$2 random_model=$3 tokens=${4:-65536}
passed=0 failed=0
some=100                               # tokens that are compared
port=$((20000 + $$ % 20000))
rm -rf "$dir" && mkdir -p "$dir" || exit 1

# check WHAT COMMAND...
check() {
    what=$1
    shift
    if "$@" > "$dir/check.log" 2>&1; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "failed: $what"; head -n 3 "$dir/check.log"
    fi
}

# Runs the prompt with these options. how=exec: instead of this shell, which then gets its signals.
how=
text() { $how "$infer" "$dir/model.gguf" --file "$dir/text" --ids --temp 1 --seed 5 "$@"; }

# over RANKS NAME OPTIONS...: processes over TCP, which write NAME.R and say NAME.R.err. Their
# numbers are in $pids.
over() {
    ranks=$1 name=$dir/$2 at= pids= rank=0
    shift 2
    port=$((port + 10))
    for i in $(seq "$ranks"); do at=$at,127.0.0.1:$((port + i)); done
    while [ "$rank" -lt "$ranks" ]; do
        (how=exec; text --at "${at#,}" --rank "$rank" "$@") > "$name.$rank" \
            2> "$name.$rank.err" &
        pids="$pids $!" rank=$((rank + 1))
    done
}

# Waits for all of $pids. Returns the worst exit status.
all() {
    worst=0
    for pid in $pids; do
        wait "$pid"
        status=$?
        [ $status -le $worst ] || worst=$status
    done
    return $worst
}

# until_lines N FILE PID: waits for N lines, as long as the process is there.
until_lines() {
    while [ "$(wc -l < "$2")" -lt "$1" ] && kill -0 "$3" 2> /dev/null; do sleep 0.05; done
}

# beginning FILE: its lines, of which there are some, begin like the text of one rank.
beginning() {
    head -n $some "$1" > "$dir/some"
    [ -s "$dir/some" ] && head -n "$(wc -l < "$dir/some")" "$dir/one" | cmp - "$dir/some"
}

loaded() { grep -q "$2 of them loaded" "$1"; }

"$random_model" "$dir/model.gguf" small $((tokens + 4000)) || exit 1
awk -v n="$tokens" 'BEGIN {
    for (x = 7; n > 0; n--) {
        x = (x * 1103515245 + 12345) % 2147483648
        printf "%c", 97 + int(x / 65536) % 26
    }
}' > "$dir/text"
check 'the prompt has as many tokens' [ "$(text --count-tokens | wc -l)" = "$tokens" ]
most=$((tokens - 17))                  # positions that a run takes from files at most

text --predict $some > "$dir/one" 2> "$dir/one.err"
check 'one rank' [ "$(wc -l < "$dir/one")" = $some ]

over 4 four --predict 0 --save "$dir/kv"
check 'four ranks save' all
check 'four ranks have saved' grep -q "^saved .* $tokens positions" "$dir/four.0.err"

over 3 three --predict 3000 --load "$dir/kv"
victim=${pids##* } first=${pids# }
until_lines 20 "$dir/three.0" "${first%% *}"
kill -9 "$victim"
all 2> /dev/null
check 'the killed rank is missed' grep -q 'is gone\|has closed its connection' "$dir/three.0.err"
check 'three ranks write the text of one' beginning "$dir/three.0"

over 2 two --predict $some --load "$dir/kv"
check 'two ranks load' all
check 'two ranks have computed 17 tokens' loaded "$dir/two.0.err" "$most"
check 'two ranks write the text of one' cmp "$dir/two.0" "$dir/one"

# A signal to one process ends all, after the same call; what they had is saved.
over 3 stopped --predict 3000 --load "$dir/kv" --save "$dir/kv"
first=${pids# } first=${first%% *}
until_lines 20 "$dir/stopped.0" "$first"
kill -TERM "$first"
all
check 'a signal to one rank ends three' [ $? = 143 ]
check 'they print figures' grep -q '^text ' "$dir/stopped.0.err"
check 'they save the text' grep -q '^saved ' "$dir/stopped.0.err"
check 'they wrote the text of one' beginning "$dir/stopped.0"

(how=exec; text --predict 8 --save "$dir/part") > "$dir/part.out" 2> "$dir/part.err" & pids=$!
while [ ! -f "$dir/part" ] && kill -0 $pids; do sleep 0.05; done
kill -TERM $pids
all
check 'a signal ends a prompt' [ $? = 143 ]
check 'what there is of it is saved' grep -q '^saved ' "$dir/part.err"
check 'that is not all of it' [ ! -s "$dir/part.out" ]
over 2 rest --predict 20 --load "$dir/part"
check 'two ranks go on with it' all
check 'they have computed the rest' grep -q 'of them loaded' "$dir/rest.0.err"
check 'they write the text of one' beginning "$dir/rest.0"

text --predict $some --shm --ranks 5 --load "$dir/kv" > "$dir/five" 2> "$dir/five.err"
check 'five ranks in shared memory write the text of one' cmp "$dir/five" "$dir/one"

rm -rf "$dir"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
