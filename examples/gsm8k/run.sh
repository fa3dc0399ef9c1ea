#!/usr/bin/env bash
# SmolLM2-135M on GSM8K: SFT, then GRPO. Each run evaluates the test accuracy before its first and after its last step.
#   examples/gsm8k/run.sh MODEL DATA RUNS [SEED]
# MODEL is a Hugging Face folder or Hub id, DATA a folder with train.jsonl and test.jsonl (question, answer), and RUNS
# the output folder. Set PADFREE="python -m padfree" or PYTHON=python3.12 to use other commands.
set -euo pipefail
model=${1:?usage: run.sh MODEL DATA RUNS [SEED]} data=${2:?} runs=${3:?} seed=${4:-0}
here=$(dirname "$0")
padfree=${PADFREE:-padfree}

mkdir -p "$runs"
$padfree eval "$here/grpo.toml" "model.path=$model" "eval.path=$data/test.jsonl" --json "$runs/base.json"
$padfree sft "$here/sft.toml" "model.path=$model" "data.path=$data/train.jsonl" "run.folder=$runs/sft" "run.seed=$seed"
${PYTHON:-python3} "$here/vary_numbers.py" "$data/train.jsonl" "$runs/variants.jsonl"
$padfree rl "$here/grpo.toml" "model.path=$runs/sft/model" "data.path=[\"$data/train.jsonl\",\"$runs/variants.jsonl\"]" \
  "eval.path=$data/test.jsonl" "run.folder=$runs/grpo" "run.seed=$seed"
$padfree report "$runs/sft" "$runs/grpo" --output "$runs/report.html"
