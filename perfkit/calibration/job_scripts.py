"""The script of a Slurm job that calibrates a cluster."""

import shlex

from perfkit.ground.units import check_positive

#: Time that a job asks for; the plan of a node takes ten minutes by its estimates.
_LIMIT = "01:00:00"
#: Cores of a task: its own threads, those of backward passes, of NCCL and of compilers; as
#: `perfkit.diagnosis` advises [-].
_CORES = 8
#: Port where the agents of torchrun meet; its usual one [-].
_PORT = 29500


def write_job(*, nodes: int, gpus_per_node: int, out: str, base: str | None, rehearse: bool) -> str:
    """Write the script of a Slurm job that calibrates a cluster, ready for ``sbatch``.

    Parameters
    ----------
    nodes : int
        Nodes [-].
    gpus_per_node : int
        GPUs of a node; each gets a task [-].
    out : str
        Platform file to write.
    base : str or None
        The most similar platform.
    rehearse : bool
        Whether the job goes the whole way without GPUs.

    Returns
    -------
    script : str
        The script, with lines for containers and for torchrun as comments.
    """
    nodes = check_positive("nodes", nodes, integer=True)
    gpus = check_positive("gpus_per_node", gpus_per_node, integer=True)
    words = ["perfkit", "calibrate", "--device", "cuda"]
    if base is not None:
        words += ["--base", base]
    if rehearse:
        words.append("--rehearse")
    line = shlex.join([*words, "--out", out])
    host = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    wanted = ""
    if not rehearse:
        wanted = (
            f"\n#SBATCH --gpus-per-node={gpus}"
            f"\n#SBATCH --cpus-per-task={_CORES}       # fewer where a node has less than {gpus * _CORES} cores"
            "\n#SBATCH --exclusive"
        )
    return f"""\
#!/bin/bash
#SBATCH --job-name=perfkit
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}   # one task for each GPU{wanted}
#SBATCH --time={_LIMIT}
##SBATCH --partition=NAME --account=NAME

set -euo pipefail
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"   # since Slurm 22.05 srun does not take over its own
# source .venv/bin/activate   # where perfkit and PyTorch are installed

srun --kill-on-bad-exit=1 {line}

# In a container (pyxis), in place of the line above:
# srun --kill-on-bad-exit=1 --container-image=IMAGE --container-mounts="$PWD" --container-workdir="$PWD" {line}
# With torchrun, in place of it:
# srun --ntasks-per-node=1 --cpus-per-task={gpus * _CORES} torchrun --nnodes={nodes} --nproc-per-node={gpus} --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint={host}:{_PORT}" -m {line}
# If the job is killed or out of time, send it again: finished measurements are kept beside {shlex.quote(out)}.
"""
