#!/bin/bash
# Run the same command on every host:
#     HOSTS=4 FIRST=first-machine examples/cluster/torchrun.sh sft run.folder=/shared/runs/first [...]
# Set COMMAND=rl for reinforcement learning. Model, data and run folder must be on a file system shared by all hosts.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # lets a lost host rejoin
exec torchrun --nnodes "$HOSTS" --nproc-per-node "${PROCESSES:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-id "${ID:-padfree}" --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29500}" \
    -m padfree "${COMMAND:-sft}" "$@"
