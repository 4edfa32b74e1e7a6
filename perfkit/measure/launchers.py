"""Which launcher has started this process, as which of how many ranks, and where these ranks meet.

Launchers say so in the environment: torchrun [1]_, srun of Slurm [2]_, mpirun of Open MPI [3]_, and
mpiexec of MPICH, Intel MPI and others with the process manager Hydra [4]_. Nothing here changes the
environment.

References
----------
.. [1] PyTorch, "torchrun (Elastic Launch)", "Environment Variables".
.. [2] Slurm 24.05, srun(1), "Output environment variables".
.. [3] Open MPI 5.0, "Environment variables provided by mpirun" (OMPI_COMM_WORLD_RANK and others).
.. [4] MPICH, "Using the Hydra Process Manager" (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID,
   MPI_LOCALNRANKS).
"""

import itertools
import math
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from perfkit.ground.units import show

#: Port where ranks meet if no launcher says one; that of torchrun [-].
_USUAL_PORT = 29500
#: Highest number of a port of TCP [-].
_LAST_PORT = 65_535
#: First of the ports from which a job of Slurm takes one by its number, and how many there are [-].
_FIRST_PORT = 20_000
_PORTS = 10_000
#: Most nodes of a list; Slurm itself takes 65,536 [-].
_MOST_NODES = 2**16
#: How many tasks are started on each node, in the words of each launcher.
_LINES = {
    "srun": "srun --ntasks-per-node={count} perfkit calibrate ...",
    "torchrun": "torchrun --nproc-per-node {count} -m perfkit calibrate ...",
    "mpirun": "mpirun --map-by ppr:{count}:node perfkit calibrate ...",
    "mpiexec": "mpiexec -ppn {count} perfkit calibrate ...",
    "RANK and WORLD_SIZE": "{count} ranks on each node",
}


@dataclass(frozen=True, kw_only=True)
class LaunchedRanks:
    """Where a launcher has started this process, and where its ranks meet.

    Parameters
    ----------
    launcher : str
        Which one.
    rank, ranks : int
        This rank, and how many there are [-].
    local_rank, ranks_per_node : int
        This rank among those of its node, and how many a node has [-].
    node : str
        What the launcher calls the node; ranks of one node have the same name.
    host : str
        Name of the node for people.
    run : str
        Tells this run from others that meet at the same port.
    address : str
        Name or address of the node of rank 0.
    port : int
        Port where the ranks meet [-].
    """

    launcher: str
    rank: int
    ranks: int
    local_rank: int
    ranks_per_node: int
    node: str
    host: str
    run: str
    address: str
    port: int

    @property
    def nodes(self) -> int:
        """Nodes [-]."""
        return self.ranks // self.ranks_per_node

    @property
    def name(self) -> str:
        """This rank in words, as in errors."""
        return f"rank {self.rank} on {self.host}"


def write_start(launcher: str, count: int) -> str:
    """The line that starts some ranks on each node.

    Parameters
    ----------
    launcher : str
        Name of the launcher.
    count : int
        Ranks on each node [-].

    Examples
    --------
    >>> write_start("srun", 8)
    'srun --ntasks-per-node=8 perfkit calibrate ...'
    """
    return _LINES[launcher].format(count=count)


def launched_ranks() -> LaunchedRanks | None:
    """Where a launcher has started this process.

    Returns
    -------
    launched : LaunchedRanks or None
        None without a launcher, and for a single task of srun or mpirun, such as an interactive
        shell.

    Raises
    ------
    ValueError
        For variables that are missing, no numbers, or disagree, and for nodes with unequal ranks.

    Notes
    -----
    torchrun comes first: srun may have started it, once on each node. Open MPI and Hydra come before
    srun, as they start their daemons through it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _read_torchrun()
    if _count("OMPI_COMM_WORLD_SIZE") > 1:
        return _read_mpi(
            "mpirun",
            rank="OMPI_COMM_WORLD_RANK",
            ranks="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            ranks_per_node="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    by_srun = _count("SLURM_STEP_NUM_TASKS") > 1 and "SLURM_PROCID" in os.environ
    if _count("PMI_SIZE") > 1:
        local_rank, ranks_per_node = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
        if "PMI_LOCAL_SIZE" in os.environ:
            local_rank, ranks_per_node = "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"
        if ranks_per_node in os.environ or not by_srun:  # srun sets PMI_SIZE alone, with --mpi=pmi2
            return _read_mpi(
                "mpiexec",
                rank="PMI_RANK",
                ranks="PMI_SIZE",
                local_rank=local_rank,
                ranks_per_node=ranks_per_node,
            )
    if by_srun:
        return _read_srun()
    named = all(name in os.environ for name in ("RANK", "LOCAL_RANK"))
    if named and _count("WORLD_SIZE") > 1:
        return _read_plain()
    return None


# -- each launcher
# ----------------------------------------------------------------------------------------------------


def _read_torchrun() -> LaunchedRanks:
    """What torchrun says; refused where several tasks of a node have started it."""
    per_node = _read("LOCAL_WORLD_SIZE", "torchrun")
    tasks = _read_tasks_per_node() if _count("SLURM_STEP_NUM_TASKS") > 1 else [1]
    if max(tasks) > 1 and per_node > 1:
        raise ValueError(
            f"two launchers start ranks: srun has started torchrun {max(tasks)} times on a node "
            f"(SLURM_STEP_TASKS_PER_NODE), and each starts {per_node} ranks; start it once: "
            f"srun --ntasks-per-node=1 torchrun ..., or leave torchrun out: "
            f"{write_start('srun', max(tasks))}"
        )
    return _check(
        LaunchedRanks(
            launcher="torchrun",
            rank=_read("RANK", "torchrun"),
            ranks=_read("WORLD_SIZE", "torchrun"),
            local_rank=_read("LOCAL_RANK", "torchrun"),
            ranks_per_node=per_node,
            node=os.environ.get("GROUP_RANK", socket.gethostname()),
            host=_name_host(),
            run=f"{os.environ['TORCHELASTIC_RUN_ID']}, start {_count('TORCHELASTIC_RESTART_COUNT')}",
            address=_read_text("MASTER_ADDR", "torchrun"),
            port=_read("MASTER_PORT", "torchrun"),
        )
    )


def _read_srun() -> LaunchedRanks:
    """What srun says. Ranks meet on the first node, at a port that depends on job and step."""
    ranks = _read("SLURM_STEP_NUM_TASKS", "srun")
    tasks = _read_tasks_per_node()
    if len(set(tasks)) > 1:
        fewest = min(tasks)
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE is {show(os.environ['SLURM_STEP_TASKS_PER_NODE'])}; every "
            f"node needs as many tasks as the others, one for each GPU; start "
            f"{write_start('srun', fewest)}"
        )
    hosts = list_hosts(os.environ[_find_set("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")])
    node = os.environ.get("SLURM_NODEID", socket.gethostname())
    job, step = _read("SLURM_JOB_ID", "srun"), _count("SLURM_STEP_ID")
    port = _FIRST_PORT + (job + 97 * step) % _PORTS
    return _check(
        LaunchedRanks(
            launcher="srun",
            rank=_read("SLURM_PROCID", "srun"),
            ranks=ranks,
            local_rank=_read("SLURM_LOCALID", "srun"),
            ranks_per_node=tasks[0],
            node=node,
            host=_name_host(),
            run=f"job {job}, step {step}",
            address=os.environ.get("MASTER_ADDR") or hosts[0],
            port=_read("MASTER_PORT", "srun") if "MASTER_PORT" in os.environ else port,
        )
    )


def _read_mpi(
    launcher: str, *, rank: str, ranks: str, local_rank: str, ranks_per_node: str
) -> LaunchedRanks:
    """What a launcher of MPI says in these variables. It does not say where rank 0 is."""
    everyone, local = _read(ranks, launcher), _read(ranks_per_node, launcher)
    address = os.environ.get("MASTER_ADDR")
    if not address and everyone == local:
        address = "localhost"
    if not address:
        line = "mpirun -x MASTER_ADDR=HOST ..."
        if launcher == "mpiexec":
            line = "mpiexec -genv MASTER_ADDR HOST ..."
        raise ValueError(
            f"MASTER_ADDR is missing, and {launcher} does not say which host is the first; name it: "
            f"{line}"
        )
    port = _read("MASTER_PORT", launcher) if "MASTER_PORT" in os.environ else _USUAL_PORT
    return _check(
        LaunchedRanks(
            launcher=launcher,
            rank=_read(rank, launcher),
            ranks=everyone,
            local_rank=_read(local_rank, launcher),
            ranks_per_node=local,
            node=socket.gethostname(),
            host=_name_host(),
            run=os.environ.get("PMIX_NAMESPACE", launcher),
            address=address,
            port=port,
        )
    )


def _read_plain() -> LaunchedRanks:
    """What the variables say that PyTorch itself reads, with which other launchers start ranks."""
    launcher = "RANK and WORLD_SIZE"
    sizes = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # LOCAL_SIZE is that of DeepSpeed's launcher
    return _check(
        LaunchedRanks(
            launcher=launcher,
            rank=_read("RANK", launcher),
            ranks=_read("WORLD_SIZE", launcher),
            local_rank=_read("LOCAL_RANK", launcher),
            ranks_per_node=_read(_find_set(*sizes), launcher),
            node=socket.gethostname(),
            host=_name_host(),
            run=launcher,
            address=_read_text("MASTER_ADDR", launcher),
            port=_read("MASTER_PORT", launcher) if "MASTER_PORT" in os.environ else _USUAL_PORT,
        )
    )


def _check(launched: LaunchedRanks) -> LaunchedRanks:
    """Refuse what cannot be: ranks beyond the last, nodes that are not equal, and such ports."""
    if not 1 <= launched.port <= _LAST_PORT:
        raise ValueError(
            f"MASTER_PORT is {launched.port}; ports are numbers from 1 to {_LAST_PORT}; set "
            "MASTER_PORT to a free one, the same for all ranks"
        )
    if not 0 <= launched.rank < launched.ranks:
        raise ValueError(
            f"{launched.launcher} says that this is rank {launched.rank} of {launched.ranks} ranks; "
            "ranks are counted from 0; unset variables of another launcher"
        )
    if launched.ranks_per_node < 1 or launched.ranks % launched.ranks_per_node:
        raise ValueError(
            f"{launched.launcher} says that {launched.ranks_per_node} of {launched.ranks} ranks are "
            f"on {launched.host}; every node needs equally many, one for each GPU; start "
            f"{write_start(launched.launcher, launched.ranks_per_node or 1)}"
        )
    return launched


# -- variables
# ----------------------------------------------------------------------------------------------------


def _name_host() -> str:
    """This node in the words of Slurm, or else its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _read_text(name: str, launcher: str) -> str:
    """A variable that a launcher sets."""
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"{name} is missing, which {launcher} sets for every rank; start perfkit by {launcher} "
            f"itself, or set {name}"
        )
    return value


def _read(name: str, launcher: str) -> int:
    """A variable of a launcher that is a whole number [-]."""
    value = _read_text(name, launcher)
    if not re.fullmatch(r"[0-9]{1,18}", value.strip()):
        raise ValueError(f"{name} is {show(value)}; it has to be a whole number; set {name}=NUMBER")
    return int(value)


def _find_set(*names: str) -> str:
    """The first of several variables that is set."""
    for name in names:
        if os.environ.get(name):
            return name
    raise ValueError(f"{names[0]} is missing; set {names[0]} for every rank")


def _count(name: str) -> int:
    """A number that need not be set: 0 without one, and for text [-]."""
    value = os.environ.get(name, "")
    return int(value) if re.fullmatch(r"[0-9]{1,18}", value) else 0


def _read_tasks_per_node() -> list[int]:
    """Tasks of a step of srun on each of its nodes; equal ones where it does not say [-]."""
    tasks = _read("SLURM_STEP_NUM_TASKS", "srun")
    written = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if written:
        return list_tasks(written)
    nodes = _read(_find_set("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), "srun")
    if nodes < 1 or tasks % nodes:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS is {tasks} on {nodes} nodes; every node needs as many tasks as the "
            f"others, one for each GPU; start {write_start('srun', 8)}"
        )
    return [tasks // nodes] * nodes


def list_tasks(written: str) -> list[int]:
    """Tasks on each node, as Slurm writes them.

    Parameters
    ----------
    written : str
        Value of ``SLURM_STEP_TASKS_PER_NODE``.

    Returns
    -------
    tasks : list of int
        For each node [-].

    Raises
    ------
    ValueError
        For text of another form.

    Examples
    --------
    >>> list_tasks("8(x2),4")
    [8, 8, 4]
    """
    tasks: list[int] = []
    for part in written.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or len(tasks) + int(match[2] or 1) > _MOST_NODES:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE is {show(written)}; Slurm writes numbers such as 8(x2),4; "
                "unset it if srun has not set it"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def list_hosts(written: str) -> list[str]:
    """Names of nodes, as Slurm writes them.

    Parameters
    ----------
    written : str
        Value of ``SLURM_STEP_NODELIST``: names with ranges in brackets.

    Returns
    -------
    hosts : list of str
        In their order; that of rank 0 is the first.

    Raises
    ------
    ValueError
        For brackets that are not closed, and for ranges that are none.

    Examples
    --------
    >>> list_hosts("node[01-03,07],login-1")
    ['node01', 'node02', 'node03', 'node07', 'login-1']
    >>> list_hosts("rack[1-2]n[8-9]-ib")
    ['rack1n8-ib', 'rack1n9-ib', 'rack2n8-ib', 'rack2n9-ib']
    """
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", written):
        choices = [
            [*_list_range(part[1:-1], written)] if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[]+", entry)
        ]
        if len(hosts) + math.prod(len(choice) for choice in choices) > _MOST_NODES:
            raise _refuse_hosts(written)
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    brackets = re.sub(r"\[[^\[\]]*\]", "", written)
    if not hosts or "[" in brackets or "]" in brackets:
        raise _refuse_hosts(written)
    return hosts


def _list_range(text: str, written: str) -> Iterator[str]:
    """The numbers of a bracket, with the zeros before them."""
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise _refuse_hosts(written)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise _refuse_hosts(written)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _refuse_hosts(written: str) -> ValueError:
    return ValueError(
        f"SLURM_STEP_NODELIST is {show(written)}; Slurm writes names such as node[01-04,07]; set "
        "MASTER_ADDR to the host of rank 0 and SLURM_STEP_NODELIST to names with commas"
    )
