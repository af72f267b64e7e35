# make demo    set up .venv and ask the first question      make bench   run the benchmarks
# make test    the same environment, and the tests          make clean   remove what make made
# make test-gpu    the checks that need a GPU      make bench-gpu   the benchmarks that do: with the python of $(GPU_PYTHON)
# make test-gpu-ranks   the checks that need two, over processes and over Ray (two nodes of this host), and 16 GB in /dev/shm
# make readme  write the outputs of README.md's examples anew, and what is generated in it
# make install-completions   for bash, zsh and fish, where each looks for a user's own
# make test-peers   the tests against TransformerLens, which it installs into the same environment
# make test-ranks   every family on two ranks of each kind, and four, and ranks that are not as they should be
# make test-dtypes  every family in bfloat16 and float16, against float32
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer), EXTRA=cpu or cuda the engine.

PYTHON ?= python3
EXTRA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
# A folder on the path: the hook that setuptools installs otherwise costs each start of Python a few imports.
EDITABLE := --config-settings editable_mode=compat -e
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

BIN := .venv/bin
BEGUN := .venv/.begun
PROMPT := The Eiffel Tower is located in the city of

.PHONY: demo test test-peers test-ranks test-dtypes test-gpu test-gpu-ranks bench bench-gpu clean install-completions readme

demo: .venv/.installed
	$(BIN)/vlens capture --table --hook blocks.3.hook_resid_post "$(PROMPT)"

test: .venv/.installed-test
	$(BIN)/python -m pytest -m "not slow"

test-peers: .venv/.installed-peers
	$(BIN)/python -m pytest tests/driver/test_bridge.py tests/driver/test_peers.py

test-ranks: .venv/.installed-test
	$(BIN)/python -m pytest tests/driver/test_ranks.py

test-dtypes: .venv/.installed-test
	$(BIN)/python -m pytest -m slow tests/driver/test_dtypes.py

readme: .venv/.installed-test
	$(BIN)/python -m vlens_cli.cli.generate --write
	$(BIN)/python tests/driver/readme.py --write

DATA := $(or $(XDG_DATA_HOME),$(HOME)/.local/share)
CONFIG := $(or $(XDG_CONFIG_HOME),$(HOME)/.config)

install-completions:
	install -D -m 644 completions/vlens.bash $(DATA)/bash-completion/completions/vlens
	install -D -m 644 completions/_vlens $(DATA)/zsh/site-functions/_vlens
	install -D -m 644 completions/vlens.fish $(CONFIG)/fish/completions/vlens.fish
	@echo "zsh: fpath+=($(DATA)/zsh/site-functions) stands in ~/.zshrc before compinit"

bench: .venv/.installed-test
	@set -e; for script in $(filter-out tests/bench/gpu.py,$(wildcard tests/bench/*.py)); do echo "$$script"; $(BIN)/python "$$script"; done

# Where vLLM is installed already, as on a machine without a network, that Python serves; else this folder's own.
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import sys, importlib.util as i; sys.exit(i.find_spec("vllm") is None)' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)

test-gpu-ranks: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.installed-test)
	$(GPU_PYTHON) tests/gpu/check.py --modes tp2-mp,pp2-mp
	$(GPU_PYTHON) tests/gpu/ranks.py --modes tp2-mp,pp2-mp
	PYTHON=$(GPU_PYTHON) tests/gpu/two_nodes.sh $(GPU_PYTHON) tests/gpu/check.py --modes tp2-ray,pp2-ray --jobs 1
	PYTHON=$(GPU_PYTHON) tests/gpu/two_nodes.sh $(GPU_PYTHON) tests/gpu/ranks.py --modes tp2-ray

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.installed-test)
	$(GPU_PYTHON) tests/gpu/check.py

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.installed-test)
	$(GPU_PYTHON) tests/bench/gpu.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis
	find vlens_cli tests -name __pycache__ -prune -exec rm -rf {} +

# Install this folder with the extras $(1). pip finds all versions before it installs any, so a first try that fails
# has changed nothing. It fails on machines whose pip knows no CPU build of torch: only there PyTorch's own index is
# added, and only where it answers, since an index that does not costs pip seconds of retries for every package.
# $(BEGUN) outlives this only if it is killed: the next run then starts from nothing.
define install
	@touch $(BEGUN)
	@trap "exit 130" INT TERM; ok=1; $(BIN)/python -m pip install $(EDITABLE) '.[$(1)]' || { \
	  ok=0; \
	  if [ $(EXTRA) = cpu ] && $(call answers,$(TORCH_CPU_INDEX)); then \
	    echo "once more, with PyTorch's index of CPU builds"; \
	    $(BIN)/python -m pip install --extra-index-url $(TORCH_CPU_INDEX) $(EDITABLE) '.[$(1)]' && ok=1; \
	  fi; }; \
	rm -f $(BEGUN); [ $$ok = 1 ]
	@# A warm command is mostly imports, and -e compiles nothing.
	@$(BIN)/python -m compileall -q vlens_cli
	@touch $@
endef

answers = $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=4)' $(1) 2>/dev/null

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vlens needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e $(BEGUN) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  rm -rf .venv && mkdir .venv && touch $(BEGUN) && $(PYTHON) -m venv .venv; fi
	$(call install,$(EXTRA))

.venv/.installed-test: .venv/.installed
	$(call install,$(EXTRA)$(comma)test)

.venv/.installed-peers: .venv/.installed-test
	$(call install,$(EXTRA)$(comma)test$(comma)transformerlens)

comma := ,
