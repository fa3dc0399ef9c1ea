#!/usr/bin/env bash
# Install dist/*.whl in a new environment, as a user would, and use it in an empty folder:
#     tests/wheel.sh PYTHON
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m venv "$folder/env"
pip() { "$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip "$(grep '^torch==' "$root/constraints.txt")"
pip --constraint "$root/constraints.txt" "$root"/dist/padfree-*.whl

mkdir "$folder/empty"
cd "$folder/empty"
unset PYTHONPATH
export PADFREE_CACHE="$folder/cache"
padfree() { "$folder/env/bin/padfree" "$@"; }
padfree env
padfree recipes
padfree recipes sft > mine.toml
padfree demo
for recipe in sft mine.toml; do
    padfree sft "$recipe" model.path=padfree-demo/model data.path=padfree-demo/data/train.jsonl run.folder=run run.device=cpu --dry-run
done
padfree sft model.path=padfree-demo/model data.path=padfree-demo/data/train.jsonl run.folder=run run.device=cpu run.steps=2
padfree report run
echo "test-wheel: passed"
