.DEFAULT_GOAL := help
.PHONY: help demo up aborts fuzz soak test test-chaos test-fast test-cpp check format stubs bench-batching bench-compare bench-compare-quick bench-copies bench-decide bench-endurance bench-fidelity bench-frontend bench-handoff bench-idle bench-overload bench-pairs bench-predictor bench-scheduler clean runtime dev
PYTHON ?= python3.11
BIN := .venv/bin
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h')

help:       ## show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'

demo: runtime ## start a local fleet, stream one request uncut and cut at three places, stop the fleet
	$(BIN)/python -m dynaserve.local.demo

up: runtime ## start a local fleet and keep it until Ctrl-C (front-end on PORT=8000)
	$(BIN)/python -m dynaserve.local.demo --stay $(if $(PORT),--port $(PORT))

test: test-fast ## run all tests, also those that start real engines
	$(BIN)/pytest -m engine

test-fast: dev test-cpp ## run the tests that start no engine
	$(BIN)/pytest -m "not engine" --numprocesses $$(($$(nproc) + 1)) --maxprocesses 8 --dist loadfile  # they often wait for a clock

test-cpp: dev ## run the tests of the C++ core under the address and undefined-behaviour sanitizers
	$(BIN)/cmake -S cpp_scheduler -B build/cpp -Wno-dev >build/cpp.log || { cat build/cpp.log; exit 1; }
	$(BIN)/cmake --build build/cpp --parallel
	$(BIN)/ctest --test-dir build/cpp --output-on-failure

soak: dev  ## thousands of random requests over a fleet with little memory (REQUESTS=3000, SEED=n): no token may differ
	$(BIN)/python -m tests.e2e.soak $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

aborts: dev ## a thousand clients leave at random moments (REQUESTS=1000, SEED=n): all blocks are free a second later
	$(BIN)/python -m tests.e2e.aborts $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

fuzz: dev  ## ten thousand malformed requests and messages (CASES=10000, SEED=n): no server error, and nothing is held afterwards
	$(BIN)/python -m tests.e2e.fuzz $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED))

test-chaos: dev ## instances are killed, stopped, cut off and started anew under load (ROUNDS=10, REQUESTS=200, SEED=n): no token may differ
	$(BIN)/python -m tests.e2e.whole_chaos $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

check: dev ## formatting, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/pytest -q tests/test_layering.py tests/test_core_stub.py

format: dev ## format all sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

stubs: dev ## regenerate dynaserve/_core.pyi
	$(BIN)/python -m nanobind.stubgen -q -m dynaserve._core -o dynaserve/_core.pyi

bench-batching: runtime ## stock vLLM against SLO-aware batches on this machine; ARGS="--traces DIR", QUICK=1 takes twelve minutes
	$(BIN)/python -m benchmarks.batching $(if $(QUICK),--quick) $(ARGS)

bench-compare: dev ## capacity of stock vLLM and of our policies in turns: all of it takes days, ARGS choose; goes on where it stopped; ARGS="--traces DIR ..." options
	$(BIN)/python -m benchmarks.compare $(ARGS)

bench-compare-quick: dev ## the same as a smoke test of some ten minutes; ARGS="--traces DIR ..." options
	$(BIN)/python -m benchmarks.compare --quick $(ARGS)

bench-handoff: runtime ## what the hand-over costs: KV that leaves late, and the gap in the answer; ARGS=... options
	$(BIN)/python -m benchmarks.handoff $(ARGS)

bench-copies: runtime ## how fast KV blocks are gathered, moved and scattered; ARGS="--device cuda --models 8b 14b 32b"
	$(BIN)/python -m benchmarks.kv_copies $(ARGS)

bench-idle: runtime ## CPU of instances whose requests all wait for another instance; ARGS=... options
	$(BIN)/python -m benchmarks.idle $(ARGS)

bench-frontend: runtime ## what the front-end adds to an answer's time and CPU, beside vllm-router where it is installed; ARGS=... options
	$(BIN)/python -m benchmarks.frontend $(ARGS)

bench-overload: runtime ## three times as many requests as the fleet can serve; ARGS=... options
	$(BIN)/python -m benchmarks.overload $(ARGS)

bench-endurance: runtime ## memory, files and sockets of a fleet that serves for half an hour; ARGS="--rate R ..." options
	$(BIN)/python -m benchmarks.endurance $(ARGS)

bench-fidelity: runtime ## two real instances against the simulator with their latencies, an hour or more; QUICK=1 takes a quarter of it, ARGS=... options
	$(BIN)/python -m benchmarks.fidelity $(if $(QUICK),--quick) $(ARGS)

bench-decide: dev ## what the local scheduler adds to a step, in microseconds
	$(BIN)/python -m benchmarks.decide $(ARGS)

bench-pairs: dev ## systems up at once, which get the same requests in turns; ARGS="--traces DIR --cases WORKLOAD:RATE ..." options
	$(BIN)/python -m benchmarks.pairs $(ARGS)

bench-predictor: runtime ## when requests were expected to end, and when they did, on real instances; ARGS=... options
	$(BIN)/python -m benchmarks.predictor $(ARGS)

bench-scheduler: dev ## what a decision of the dynamic policy costs, and its gap to exhaustive search; ARGS=... options
	$(BIN)/python -m benchmarks.placement $(ARGS)

clean:      ## delete what was built and installed here; the converted model stays in ~/.cache/dynaserve
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A second run of these takes a tenth of a second: the bootstrap keeps a stamp in .venv.
runtime:
	@$(PYTHON) dynaserve/local/bootstrap.py

dev:
	@$(PYTHON) dynaserve/local/bootstrap.py --dev
