#!/usr/bin/env bash
# SmolLM2-135M on GSM8K: SFT, then GRPO, with the test accuracy before and after each.
#   examples/gsm8k/run.sh MODEL DATA RUNS [SEED]
# MODEL is a Hugging Face folder or Hub id, DATA a folder with train.jsonl and test.jsonl (question, answer), and RUNS
# the output folder. Set PADFREE="python -m padfree" to use another command.
set -euo pipefail
model=${1:?usage: run.sh MODEL DATA RUNS [SEED]} data=${2:?} runs=${3:?} seed=${4:-0}
here=$(dirname "$0")
padfree=${PADFREE:-padfree}

accuracy() { # NAME MODEL
  $padfree eval "$here/grpo.toml" "model.path=$2" "eval.path=$data/test.jsonl" --json "$runs/$1.json"
}

mkdir -p "$runs"
accuracy base "$model"
$padfree sft "$here/sft.toml" "model.path=$model" "data.path=$data/train.jsonl" "run.folder=$runs/sft" "run.seed=$seed"
accuracy sft "$runs/sft/model"
$padfree rl "$here/grpo.toml" "model.path=$runs/sft/model" "data.path=$data/train.jsonl" "eval.path=$data/test.jsonl" \
  "run.folder=$runs/grpo" "run.seed=$seed"
accuracy grpo "$runs/grpo/model"
$padfree report "$runs/sft" "$runs/grpo" --output "$runs/report.html"
