#!/bin/bash
# sbatch examples/cluster/slurm.sh sft run.folder=/shared/runs/first [section.setting=value ...]
# Set COMMAND=rl for reinforcement learning. Model, data and run folder must be on a file system shared by all hosts.
#SBATCH --job-name=padfree
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110   # seconds that torchrun waits for a checkpoint after a signal
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # lets a lost host rejoin
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    -m padfree "${COMMAND:-sft}" "$@"
