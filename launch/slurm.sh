#!/usr/bin/env bash
# Run on several nodes: sbatch launch/slurm.sh experiment=llama_8b_1m parallel.ring=16
# SLURM sends SIGUSR1 300 seconds before the time limit. The ranks save and exit, the job is requeued, and it resumes
# (checkpoint.resume=auto).
#SBATCH --job-name=ringspan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
PYTHON=${PYTHON:-.venv/bin/python}
GPUS=${SLURM_GPUS_ON_NODE:-8}

# The run folder is named by the job id, which all ranks share and a requeued job keeps.
for argument in "$@"; do [[ $argument == name=* ]] && NAMED=yes; done
[[ ${NAMED:-} ]] || set -- "$@" "name=slurm-$SLURM_JOB_ID"

WORLD_SIZE=$((SLURM_NNODES * GPUS)) "$PYTHON" -m ringspan.trainer.train --cfg job "$@" > /dev/null  # reports a wrong config once, before any node starts

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# By default SIGUSR1 kills torchrun and orphans its ranks, and torchrun turns SIGTERM into SIGKILL after 30 seconds. With these
# options it forwards both and waits.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
PATIENCE=$("$PYTHON" -m torch.distributed.run --help 2> /dev/null | grep -q -- --shutdown-timeout && echo --shutdown-timeout=280 || true)

srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$GPUS" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
  --rdzv-endpoint="$HEAD:$((20000 + SLURM_JOB_ID % 10000))" $PATIENCE \
  -m ringspan.trainer.train "$@" &
STEP=$!

stopped=
trap 'stopped=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0" || kill -USR1 $STEP' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0" || kill -TERM $STEP' TERM
code=0
wait $STEP || code=$?
while kill -0 $STEP 2> /dev/null; do wait $STEP && code=0 || code=$?; done  # a signal interrupts wait, but not the step
if [[ $stopped ]]; then
  scontrol requeue "$SLURM_JOB_ID"  # the checkpoint is saved, and the next allocation resumes from it
fi
exit $code
