.DEFAULT_GOAL := help
.PHONY: help demo up test test-fast test-cpp check format stubs clean runtime dev
PYTHON ?= python3.11
BIN := .venv/bin
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h')

help:       ## show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: runtime ## start a local fleet, cut one request at four places, stop the fleet
	$(BIN)/python -m dynaserve.local.demo

up: runtime ## start a local fleet and keep it until Ctrl-C (front-end on PORT=8000)
	$(BIN)/python -m dynaserve.local.demo --stay $(if $(PORT),--port $(PORT))

test: dev test-cpp ## run all tests, also those that start real engines
	$(BIN)/pytest

test-fast: dev test-cpp ## run the tests that start no engine
	$(BIN)/pytest -m "not engine"

test-cpp: dev ## run the tests of the C++ core under the address and undefined-behaviour sanitizers
	$(BIN)/cmake -S cpp_scheduler -B build/cpp -Wno-dev >build/cpp.log || { cat build/cpp.log; exit 1; }
	$(BIN)/cmake --build build/cpp --parallel
	$(BIN)/ctest --test-dir build/cpp --output-on-failure

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

clean:      ## delete what was built and installed here; the converted model stays in ~/.cache/dynaserve
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A second run of these takes a tenth of a second: the bootstrap keeps a stamp in .venv.
runtime:
	@$(PYTHON) dynaserve/local/bootstrap.py

dev:
	@$(PYTHON) dynaserve/local/bootstrap.py --dev
