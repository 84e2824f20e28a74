#!/usr/bin/env bash
# Fills tests/gpu/wheels with what check.py needs beside torch and transformers, for a GPU machine without a network.
# usage: tests/gpu/fetch_wheels.sh [PYTHON_VERSION of that machine, default 3.12]     (PYTHON=... names the interpreter whose pip is used)
set -euo pipefail
python_version=${1:-3.12}
python=${PYTHON:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wheels=$here/wheels
constraints=$here/../../constraints.txt
rm -rf "$wheels"
mkdir -p "$wheels"

pin() { grep -E "^$1==" "$constraints"; }

# megatron-core has compiled parts: its wheel is one of a Python version and a platform.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$python_version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$wheels" "$(pin megatron-core)"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$wheels" "$(pin hydra-core)" "$(pin omegaconf)"
# There is no wheel of it in the index, only sources of pure Python.
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir "$wheels" "$(pin antlr4-python3-runtime)"
ls -l "$wheels"
