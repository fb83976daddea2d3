"""The SLURM script, with scripts in place of a cluster's commands."""

import os
import subprocess
import sys
from pathlib import Path

from ringspan import ROOT


def test_the_config_is_checked_and_all_ranks_start(tmp_path: Path) -> None:
    for name, text in (("scontrol", "echo node1"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(JOB_ID="7", NNODES="2", GPUS_ON_NODE="8", JOB_NODELIST="node[1-2]", SUBMIT_DIR=str(ROOT))
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= dict(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable)
    command = ["bash", "launch/slurm.sh", "experiment=llama_8b_1m", "parallel.ring=16"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "--nnodes=2 --nproc-per-node=8" in done.stdout and "name=slurm-7" in done.stdout
