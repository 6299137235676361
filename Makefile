# Every target creates the environment it needs: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYMONGO_MATRIX := 4.9.2 4.13.2 4.16.0 4.17.0 4.19.0
ARGS ?=
# Of `make chaos`: seconds of faults for each seed, and the seed or seeds (3, 1-20).
DURATION ?= 300
SEED ?= random
# The tests wait more than they work, and each worker has servers of its own.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help install demo test unit lint format matrix conformance chaos dashboards e2e pictures mutants bench bench-check bench-baseline bench-docs bench-publish clean

help:  ## what can be done
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "otel_retry needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -e '.[test,lint]'
	@touch $@

install: $(STAMP)  ## create the environment in .venv

test: $(STAMP)  ## run the whole suite against a real mongod
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

unit: $(STAMP)  ## only what needs no server
	$(PY) -m pytest tests/unit $(ARGS)

lint: $(STAMP)  ## ruff, format, mypy strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict tests/typing
	$(PY) scripts/settings_table.py --check
	$(PY) -m otel_retry.dashboards.build --check

format: $(STAMP)  ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.venvs/demo/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "otel_retry needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet -e '.[demo]'
	@touch $@

demo: .venvs/demo/.installed  ## a real MongoDB, a shop, three scenes, a report (ARGS="--policy driver")
	@mkdir -p .cache
	.venvs/demo/bin/otel-retry demo --html .cache/demo.html $(ARGS)

matrix: $(addprefix matrix-,$(PYMONGO_MATRIX))  ## the suite on each supported PyMongo

.venvs/pymongo-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet -e '.[test]' 'pymongo==$*'
	@touch $@

.PRECIOUS: .venvs/pymongo-%/.installed
matrix-%: .venvs/pymongo-%/.installed
	$(<D)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

conformance: $(STAMP)  ## MongoDB's OpenTelemetry tests; PyMongo's own suite, with and without the plugin (PYMONGO=4.17.0: that version)
	$(PY) -m tests.conformance.otel_spec
	$(PY) -m tests.conformance.driver_suite $(if $(PYMONGO),--pymongo $(PYMONGO)) $(ARGS)

chaos: $(STAMP)  ## three nodes, faults by a seed, a verdict: about five minutes (DURATION=60 SEED=1-20)
	$(PY) -m tests.chaos --seed $(SEED) --duration $(DURATION) $(ARGS)

dashboards: $(STAMP)  ## build the Grafana dashboards anew
	$(PY) -m otel_retry.dashboards.build $(ARGS)

e2e: $(STAMP)  ## on real Jaeger, Collector and Prometheus; builds them first, which takes Go and a while
	$(PY) scripts/backends.py
	OTEL_RETRY_REQUIRE_BACKENDS=1 $(PY) -m pytest tests/e2e -n 2 --dist loadfile --timeout 900 $(ARGS)

pictures: $(STAMP) demo  ## draw docs/images anew: an end-to-end run, and the demo's report in Chromium
	$(PY) scripts/backends.py
	OTEL_RETRY_REQUIRE_BACKENDS=1 OTEL_RETRY_PICTURES=docs/images $(PY) -m pytest -n 2 --dist loadfile --timeout 900 \
		tests/e2e/test_dashboards.py tests/e2e/test_traces.py $(ARGS)
	chromium-headless-shell --no-sandbox --disable-gpu --hide-scrollbars --window-size=960,2150 \
		--screenshot=docs/images/demo-report.png file://$(CURDIR)/.cache/demo.html
	$(PY) -m otel_retry.dashboards.build

mutants: $(STAMP)  ## break each rule once and see a test go red
	$(PY) scripts/mutants.py $(ARGS)

bench: $(STAMP)  ## what it costs, beside its peers: time, and instructions where valgrind is installed (ARGS="--rounds 3")
	$(PY) -m benchmarks timing $(ARGS)
	$(PY) -m benchmarks count --quick

bench-check: $(STAMP)  ## instructions per operation against benchmarks/baseline.json: fails at +5 %
	$(PY) -m benchmarks check

bench-baseline: $(STAMP)  ## write benchmarks/baseline.json anew
	$(PY) -m benchmarks baseline

bench-docs: $(STAMP)  ## docs/performance.md and the README's figures, from benchmarks/results.json
	$(PY) -m benchmarks page

bench-publish: $(STAMP)  ## measure all that docs/performance.md says anew (most of an hour), and write it
	$(PY) -m benchmarks profile --publish
	$(PY) -m benchmarks count --publish
	$(PY) -m benchmarks growth --publish
	$(PY) -m benchmarks timing --publish --rounds 15
	$(PY) -m benchmarks page

clean:
	rm -rf $(VENV) .venvs .cache
