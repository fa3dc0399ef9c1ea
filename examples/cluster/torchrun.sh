#!/bin/bash
# The same on every host:
#     HOSTS=4 FIRST=first-machine examples/cluster/torchrun.sh sft run.folder=/shared/runs/first [...]
# COMMAND=rl for reinforcement learning. Model, data and run folder must be where all hosts see them.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a host that was lost can come back
exec torchrun --nnodes "$HOSTS" --nproc-per-node "${PROCESSES:-8}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-id "${ID:-padfree}" --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29500}" \
    -m padfree "${COMMAND:-sft}" "$@"
