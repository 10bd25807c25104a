# ringattn.h is one header: there is nothing to build before you use it. This file builds the demo,
# the tests, the examples and the benchmark. It needs a C compiler and standard Unix tools.
#
#   config=release|debug|asan|ubsan|tsan|scalar|coverage   into build/$(config); asan has ubsan too
#   werror=1                                               warnings are errors
#   CC=clang CFLAGS=-march=native                          another compiler, more flags

config ?= release
werror ?= 0

FLAGS_release  := -O2
FLAGS_debug    := -O0 -g
# Address finds what null and object-size would; without those two asan compiles in 4/5 of the time.
FLAGS_asan     := -O1 -g1 -fsanitize=address,undefined -fno-sanitize=null,object-size \
                  -fno-sanitize-recover=all -fno-omit-frame-pointer
FLAGS_ubsan    := -O1 -g -fsanitize=undefined -fno-sanitize-recover=all
FLAGS_tsan     := -O1 -g1 -fsanitize=thread
FLAGS_scalar   := -O2 -DRINGATTN_SCALAR
FLAGS_coverage := -O0 -g --coverage
ifeq ($(FLAGS_$(config)),)
$(error config=$(config) is none of release debug asan ubsan tsan scalar coverage)
endif

WARN := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wdouble-promotion -Wundef \
        -Wstrict-prototypes -Wmissing-prototypes
ifeq ($(werror),1)
WARN += -Werror
endif

# Words of this file, for make check: TESTS, SUITES (of conformance) and EXAMPLES are programs that
# it builds and runs, BUILDS those that it only builds, OTHERS and MILLION what it runs besides.
# Each leaves its closing line in a file, SUMS, which are added up at the end. HOOKED are linked
# with the private hooks of the library. LIGHT and HEAVY compile at -O0 and -O1. TOLD are flags of
# one target.
B        := build/$(config)
LOG      := $(B)/log
BUILD     = $(CC) -std=c99 $(WARN) $(FLAGS_$(config)) $(CFLAGS) $(TOLD) -pthread -I. $(LDFLAGS)
# The longest begin first.
LONGEST  := test_sim test_forward test_schedule test_cache test_back_ring test_bf16
TESTS    := $(LONGEST) $(filter-out $(LONGEST),$(patsubst tests/%.c,%,$(wildcard tests/test_*.c)))
EXAMPLES := $(filter-out demo million ring_mpi ring_ofi ring_nccl,\
            $(patsubst examples/%.c,%,$(wildcard examples/*.c)))
HEADERS  := ringattn.h $(wildcard tests/*.h tests/conformance/*.h examples/*.h examples/infer/*.h \
            examples/train/*.h examples/transports/*.h bench/*.h)
SUITES   := test_conformance test_conform_shm
OTHERS   := $(if $(filter release,$(config)),matrix)
# Under tsan it takes long and adds no call that the tests do not have.
MILLION  := $(if $(filter tsan,$(config)),,$(LOG)/million.sum)
# make check only builds these two, which no sanitizer needs.
BUILDS   := $(if $(filter asan ubsan tsan scalar,$(config)),,demo bench)
SUMS      = $(patsubst %,$(LOG)/%.sum,$(TESTS) $(SUITES) $(EXAMPLES) $(OTHERS))

# One job per core, and one more because some tests mostly wait, unless the caller gave -j or
# another make provides the jobs.
CORES    := $(shell nproc 2>/dev/null || echo 2)
JOBS      = $(if $(or $(findstring jobserver,$(MAKEFLAGS)),$(filter -j%,$(MAKEFLAGS))),,\
              -j$(shell expr $(CORES) + 1))

# config=coverage: a line of the header counts if any of the programs has run it.
define COVERED
/0:Source:/ { on = /:(\.\/)?ringattn\.h$$/ }
on && $$2 > 0 && $$1 !~ /-/ { line = $$2 + 0; seen[line] = 1; if ($$1 !~ /[#=]/) run[line] = 1 }
END {
    for (i in seen) { n++; if (i in run) r++; else print i | ("sort -n >" missed) }
    printf "coverage: %d of %d lines (%.1f %%), the others in %s\n", r, n, 100 * r / n, missed
}
endef
export COVERED
ifeq ($(config),coverage)
REPORT    = for f in $(B)/*/*.gcda; do gcov -t $$f 2>/dev/null; done | \
            awk -F: -v missed=$(B)/missed.txt "$$COVERED"
else
REPORT   := :
endif

.DEFAULT_GOAL := help
.PHONY: help demo check check-full check-long ggml conformance sim mutants spin netns rooms lint \
        bench bench-peers train clean all-programs

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^#   /      /p' Makefile

# A program includes the header with its implementation, as its users do. Here it is compiled twice,
# as it is and as tests/hooks.h describes, and the programs are linked with one of these objects:
# RA__IMPLEMENTED skips the implementation in their own sources.
HOOKED   := tests/test_clients tests/test_refuse tests/test_plan tests/test_bf16 \
            tests/test_failure tests/test_steps tests/test_resume tests/test_sim \
            tests/test_schedule tests/test_numbers
# Tests compute little: compiling them at a higher level costs twice what it saves in running them.
# test_forward, whose oracle computes a lot, has the level of the library.
LIGHT    := $(patsubst %,tests/test_%,plan clients failure calls infer cache_file tcp) \
            $(SUITES:%=tests/conformance/%)
HEAVY    := $(filter-out $(LIGHT) tests/test_forward,$(TESTS:%=tests/%))
ifneq ($(filter release asan,$(config)),)
$(B)/tests/hooks.o: TOLD = -O1
$(LIGHT:%=$(B)/%): private TOLD = -O0
$(HEAVY:%=$(B)/%): private TOLD = -O1
endif

$(B)/tests/hooks.o: tests/hooks.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	@$(BUILD) -c -o $@ $<

$(HOOKED:%=$(B)/%): $(B)/%: %.c $(B)/tests/hooks.o $(HEADERS) Makefile
	@mkdir -p $(@D)
	@$(BUILD) -o $@ $< $(B)/tests/hooks.o -lm

$(B)/tests/ringattn.o: tests/lang_impl.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	@$(BUILD) -c -o $@ $<

$(B)/%: %.c $(B)/tests/ringattn.o $(HEADERS) Makefile
	@mkdir -p $(@D)
	@$(BUILD) -DRA__IMPLEMENTED -o $@ $< $(B)/tests/ringattn.o $(LIBS) -lm

# By an MPI's compiler, and only if requested: make build/release/examples/ring_mpi MPICC=...
MPICC ?= mpicc
$(B)/examples/ring_mpi $(B)/tests/mpi_ring $(B)/tests/conformance/mpi_conform: \
    private override CC = $(MPICC)

# With libfabric, and with NCCL and the CUDA runtime under $(CUDA), if requested.
CUDA ?= /usr/local/cuda
$(B)/examples/ring_ofi $(B)/tests/conformance/test_conform_ofi: private LIBS = -lfabric
$(B)/examples/ring_nccl: private LIBS = -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lnccl -lcudart
$(B)/examples/ring_nccl: private TOLD = -isystem $(CUDA)/include

BENCHED  := $(B)/bench/table.o $(B)/bench/loop.o
$(BENCHED): $(B)/%.o: %.c ringattn.h Makefile
	@mkdir -p $(@D)
	@$(BUILD) -c -o $@ $<

$(B)/bench/loop.o: TOLD = -Ofast -march=native
$(B)/bench/bench: $(BENCHED)
$(B)/bench/bench: private LIBS = $(BENCHED)
$(B)/bench/bench: TOLD = -DBENCH_FLAGS='"-std=c99 $(FLAGS_$(config)) $(CFLAGS)"'

demo: $(B)/examples/demo ## exact attention over real text on 4 ranks; TEXT=FILE TOKENS=N
	@$(B)/examples/demo $(if $(TEXT),--text '$(TEXT)') $(if $(TOKENS),--tokens $(TOKENS)) \
	    --out build/timeline.html

check: ## builds and runs every test, about two minutes on two cores; ARGS= for the programs
	@rm -rf $(LOG) && mkdir -p $(LOG)
	@$(MAKE) --no-print-directory -k $(JOBS) all-programs || true
	@$(REPORT)
	@sh tests/run.sh -s $(foreach s,$(SUMS),$(basename $(notdir $(s)))=$(s)) \
	    $(MILLION:%=million=%) $(foreach b,$(BUILDS),$(b)=$(LOG)/$(b).sum)

all-programs: $(SUMS) $(MILLION) $(BUILDS:%=$(LOG)/%.sum)

$(TESTS:%=$(LOG)/%.sum): $(LOG)/%.sum: $(B)/tests/%
	@sh tests/run.sh $(LOG)/$* $* $< $(ARGS)

$(SUITES:%=$(LOG)/%.sum): $(LOG)/%.sum: $(B)/tests/conformance/%
	@sh tests/run.sh $(LOG)/$* $* $< $(ARGS)

$(EXAMPLES:%=$(LOG)/%.sum): $(LOG)/%.sum: $(B)/examples/%
	@sh tests/run.sh -x $(LOG)/$* $* $<

$(LOG)/million.sum: $(B)/examples/million
	@sh tests/run.sh -x $(LOG)/million million $< --tokens 5000

# These two take too long to run here: building them is one test each.
$(LOG)/demo.sum: $(B)/examples/demo
	@sh tests/run.sh -x $(LOG)/demo 'demo (builds)' true
$(LOG)/bench.sum: $(B)/bench/bench
	@sh tests/run.sh -x $(LOG)/bench 'bench (builds)' true

$(LOG)/matrix.sum: $(B)/tests/ringattn.o ringattn.h $(wildcard tests/lang_*) tests/matrix.sh
	@CC='$(CC)' sh tests/run.sh $(LOG)/matrix matrix sh tests/matrix.sh quick $(B)/matrix

check-full: ## all compilers, sanitizers, other machines; 20-60 minutes; STEPS="asan mpi" alone
	@sh tests/check_full.sh $(STEPS)

check-long: ## what takes hours: llama.cpp built and tested with the plugin; STEPS="ops" alone
	@sh tests/check_long.sh $(STEPS)

# The plugin for ggml. GGML: a folder with its headers, or a llama.cpp; otherwise they come from a
# source package.
FETCHED  := build/ggml/headers
GGML     ?= $(FETCHED)
PLUGIN   := $(if $(filter release,$(config)),build,$(B))/libggml-ringattn.so
GGML_INC  = $(foreach d,. include src ggml ggml/include ggml/src,-isystem $(GGML)/$d)
SHARED    = $(CC) -std=c11 $(WARN) $(FLAGS_$(config)) $(CFLAGS) -fPIC -shared -fvisibility=hidden \
            -pthread -I. $(GGML_INC) $(LDFLAGS)

$(FETCHED)/ggml/ggml.h:
	@echo 'fetching the headers of ggml'
	@python3 examples/ggml/headers.py $(FETCHED)

ggml: $(PLUGIN) ## build/libggml-ringattn.so, with which llama.cpp attends; GGML=its folder

$(PLUGIN): examples/ggml/ggml_ringattn.c ringattn.h Makefile \
           $(if $(filter $(FETCHED),$(GGML)),$(FETCHED)/ggml/ggml.h)
	@mkdir -p $(@D)
	@$(SHARED) $(if $(filter release,$(config)),-s) -o $@ $< -lm -ldl

$(B)/tests/ggml/%.so: tests/ggml/%.c Makefile \
           $(if $(filter $(FETCHED),$(GGML)),$(FETCHED)/ggml/ggml.h)
	@mkdir -p $(@D)
	@$(SHARED) -fvisibility=default -o $@ $< -lm

# Ten minutes on two cores. A run that was stopped goes on.
TRAIN    := build/train
PYTHONS   = $(shell python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))' 2>/dev/null)
PERLS     = $(shell perl -MConfig -e 'print $$Config{privlibexp}' 2>/dev/null)
LEARNT    = $(if $(PYTHONS),$(PYTHONS) --held $(PYTHONS)/email,$(PERLS) --held $(PERLS)/CPAN)
train: $(B)/examples/ring_train ## trains a model on Python's or Perl's library; ARGS=
	@mkdir -p $(TRAIN)
	@$(B)/examples/ring_train $(LEARNT) --out $(TRAIN)/bytes --export $(TRAIN)/bytes.gguf \
	    --steps 840 --tokens 4096 --context 1024,8192@800 --save 50 \
	    --without site-packages,dist-packages,test,unicore \
	    $(if $(wildcard $(TRAIN)/bytes.manifest),--resume) $(ARGS)

# Needs libsodium: built only where its header is installed.
SODIUM   := $(if $(wildcard /usr/include/sodium.h /usr/local/include/sodium.h),test_tcp_sealed)

$(B)/tests/test_tcp_sealed: tests/test_tcp.c $(B)/tests/ringattn.o $(HEADERS) Makefile
	@mkdir -p $(@D)
	@$(BUILD) -DRA__IMPLEMENTED -DRA_TCP_SODIUM -o $@ $< $(B)/tests/ringattn.o -lm -lsodium

# The same for libfabric.
OFI      := $(if $(wildcard /usr/include/rdma/fabric.h /usr/local/include/rdma/fabric.h),\
            test_conform_ofi)

CONFORM  := $(SUITES:%=$(B)/tests/conformance/%) $(B)/tests/test_tcp $(SODIUM:%=$(B)/tests/%) \
            $(OFI:%=$(B)/tests/conformance/%)
conformance: $(CONFORM) ## the contract of transports, on all that are installed here
	@for t in $^; do $$t --long || exit 1; done
	@$(if $(SODIUM),:,echo 'skipped: TCP with a key (no libsodium-dev)')
	@$(if $(OFI),:,echo 'skipped: libfabric (no libfabric-dev)')
	@sh tests/conformance/mpi.sh openmpi 3 && sh tests/conformance/mpi.sh mpich 3

sim: $(B)/tests/test_sim ## whole worlds in virtual time, with faults; SEEDS=n FROM=seed or random
	@$(B)/tests/test_sim seeds --long $(if $(SEEDS),--count $(SEEDS)) $(if $(FROM),--from $(FROM))

mutants: ## mistakes planted in the engine, and which test finds each
	@sh tests/mutants.sh $(B)/mutants

spin: ## a model of the bundled world's protocol, all interleavings; needs Spin
	@sh tests/spin.sh $(B)/spin

netns: ## rings between network namespaces: hidden transfer, cut links, loss and delay; needs root
	@sh bench/netns.sh $(B)/netns

rooms: ## build/rooms: ringattn.h, a file per room, for tools that refuse long files
	@sh tests/rooms.sh build/rooms

lint: ## what a script can check of the house style
	@sh tests/lint.sh

bench: $(B)/bench/bench ## speed of the kernels and of the ring; ONLY="decode f32"
	@$(B)/bench/bench $(if $(ONLY),--only '$(ONLY)',--tables build/bench.md) \
	    --json build/bench.json

$(B)/bench/peers.so: bench/peers.c ringattn.h Makefile
	@mkdir -p $(@D)
	@$(BUILD) -shared -fPIC -o $@ $<

bench-peers: $(B)/bench/peers.so ## against PyTorch, ONNX Runtime, OpenVINO, ggml; ONLY=decode
	@python3 bench/peers.py --lib $(B)/bench/peers.so $(if $(ONLY),--only '$(ONLY)') $(ARGS)

clean: ## removes build/
	rm -rf build
