"""Variables that take a way of the data from NCCL, or its choice: what each does, and what to do.

Meanings are those of NVIDIA's user guide of NCCL, environment variables
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


class Effect(StrEnum):
    """What a setting takes from NCCL."""

    NO_PEERS = "direct copies between GPUs are off"
    NO_SHARED_MEMORY = "copies through shared memory are off"
    NO_ADAPTERS = "InfiniBand and RoCE are off"
    NO_GPU_DIRECT = "GPU Direct RDMA is off"
    NO_MULTICAST = "NVLink SHARP is off"
    FORCED = "NCCL does not choose the algorithm or protocol"
    FEWER_CHANNELS = "NCCL uses no more channels than that"
    SLOW_HOST = "the host does more for each operation"
    LIMITED = "NCCL is limited"


@dataclass(frozen=True)
class Variable:
    """A variable whose value may make runs slow.

    Parameters
    ----------
    name : str
        Its name.
    values : str
        Regular expression of the values that do so.
    effect : Effect
        What they take from NCCL.
    meaning : str
        What such a value does, in words.
    advice : str
        What to do.
    citations : tuple of str
        Public cases; the user guide has all.
    """

    name: str
    values: str
    effect: Effect
    meaning: str
    advice: str = "unset it and run again"
    citations: tuple[str, ...] = ()

    def is_harmful(self, value: str) -> bool:
        """Whether a value is one that may make runs slow.

        Parameters
        ----------
        value : str
            As the log prints it.

        Returns
        -------
        is_harmful : bool
            Whether it may.
        """
        return re.fullmatch(self.values, value.strip(), re.IGNORECASE) is not None


_ON = "1|true|yes"
_OFF = "0|false|no"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "NCCL_P2P_DISABLE",
        _ON,
        Effect.NO_PEERS,
        "GPUs do not copy to each other, neither over NVLink nor over PCIe; data pass through the "
        "memory of the host",
        citations=("NVIDIA/nccl#1130",),
    ),
    Variable(
        "NCCL_P2P_LEVEL",
        "LOC|0",
        Effect.NO_PEERS,
        "GPUs never copy to each other directly",
        citations=("NVIDIA/nccl-tests#228",),
    ),
    Variable(
        "NCCL_P2P_LEVEL",
        "NVL|PIX|PXB|1|2",
        Effect.LIMITED,
        "GPUs copy to each other only as near as this value says; farther ones pass through the memory "
        "of the host",
        advice="unset it, or allow farther copies (NCCL_P2P_LEVEL=SYS), and compare",
        citations=("NVIDIA/nccl#1285",),
    ),
    Variable(
        "NCCL_SHM_DISABLE",
        _ON,
        Effect.NO_SHARED_MEMORY,
        "GPUs of a node that cannot copy to each other use the network instead of shared memory",
        citations=("NVIDIA/nccl#406",),
    ),
    Variable(
        "NCCL_IB_DISABLE",
        _ON,
        Effect.NO_ADAPTERS,
        "InfiniBand and RoCE are off; NCCL uses TCP sockets",
        citations=("NVIDIA/nccl-tests#188",),
    ),
    Variable(
        "NCCL_NET",
        "socket",
        Effect.NO_ADAPTERS,
        "NCCL uses TCP sockets, whatever adapters there are",
        citations=("NVIDIA/nccl#676",),
    ),
    Variable(
        "NCCL_NET_GDR_LEVEL",
        "LOC|0",
        Effect.NO_GPU_DIRECT,
        "adapters never read and write the memory of GPUs",
        citations=("NVIDIA/nccl-tests#252",),
    ),
    Variable(
        "NCCL_IB_GDR_LEVEL",
        "LOC|0",
        Effect.NO_GPU_DIRECT,
        "adapters never read and write the memory of GPUs (older name)",
    ),
    Variable(
        "NCCL_IB_CUDA_SUPPORT",
        _OFF,
        Effect.NO_GPU_DIRECT,
        "adapters never read and write the memory of GPUs (before 2.4)",
    ),
    Variable(
        "NCCL_NET_GDR_READ",
        _OFF,
        Effect.NO_GPU_DIRECT,
        "data are sent through the memory of the host",
        advice="set it to 1, or unset it with NVLink, and compare",
        citations=("NVIDIA/nccl#307", "NVIDIA/nccl#1181"),
    ),
    Variable(
        "FI_EFA_USE_DEVICE_RDMA",
        _OFF,
        Effect.NO_GPU_DIRECT,
        "EFA does not read and write the memory of GPUs",
    ),
    Variable(
        "NCCL_NVLS_ENABLE",
        _OFF,
        Effect.NO_MULTICAST,
        "NVLink SHARP is off; rings or trees are used",
        citations=("NVIDIA/nccl#1221",),
    ),
    Variable(
        "NCCL_CUMEM_ENABLE",
        _OFF,
        Effect.NO_MULTICAST,
        "NCCL does not use the memory functions of CUDA that NVLink SHARP needs",
    ),
    Variable(
        "NCCL_ALGO",
        r"(?!\^).+",
        Effect.FORCED,
        "all sizes use this algorithm, also where another one is faster",
        citations=("NVIDIA/nccl#1368", "NVIDIA/nccl-tests#232"),
    ),
    Variable(
        "NCCL_ALGO",
        r"\^.+",
        Effect.FORCED,
        "no size uses this algorithm, also where it is the fastest one",
        citations=("NVIDIA/nccl#1112",),
    ),
    Variable(
        "NCCL_PROTO",
        r"(?!\^)(?=.*\bLL\b)(?!.*(?:LL128|Simple)).+",
        Effect.FORCED,
        "large messages, too, carry a flag beside each number: half of the bandwidth at most",
        citations=("NVIDIA/nccl#281",),
    ),
    Variable(
        "NCCL_PROTO",
        r"(?!\^)(?=.*LL128)(?!.*Simple).+",
        Effect.FORCED,
        "all messages use LL128 (95 % of the bandwidth at most), also where NCCL would not, as it may "
        "corrupt data",
        citations=("NVIDIA/nccl#281", "NVIDIA/nccl#1261"),
    ),
    Variable(
        "NCCL_PROTO",
        r"Simple|\^.*LL.*",
        Effect.FORCED,
        "small messages cannot use the protocols of low latency, LL and LL128",
        citations=("NVIDIA/nccl#281",),
    ),
    Variable(
        "NCCL_PROTO",
        r"\^(?!.*LL).*Simple.*",
        Effect.FORCED,
        "large messages, too, use LL or LL128 (95 % of the bandwidth at most)",
        citations=("NVIDIA/nccl#281",),
    ),
    Variable(
        "NCCL_MAX_NCHANNELS",
        r"\d+",
        Effect.FEWER_CHANNELS,
        "each channel is a thread block of the GPU, which moves some tens of GB/s",
        citations=("uccl-project/uccl#205",),
    ),
    Variable(
        "NCCL_MAX_CTAS",
        r"\d+",
        Effect.FEWER_CHANNELS,
        "each channel is a thread block of the GPU, which moves some tens of GB/s",
    ),
    Variable(
        "NCCL_MAX_NRINGS",
        r"\d+",
        Effect.FEWER_CHANNELS,
        "each channel is a thread block of the GPU, which moves some tens of GB/s (older name)",
    ),
    Variable(
        "NCCL_NVLS_NCHANNELS",
        r"\d+",
        Effect.FEWER_CHANNELS,
        "NVLink SHARP uses no more channels than that",
    ),
    Variable(
        "NCCL_NTHREADS",
        "32|64|128",
        Effect.LIMITED,
        "each channel has few threads, which move fewer bytes at a time",
    ),
    Variable(
        "NCCL_BUFFSIZE",
        r"\d{1,6}",
        Effect.LIMITED,
        "buffers between ranks are smaller than 1 MB (usually 4 MiB), so less is under way",
    ),
    Variable(
        "NCCL_PXN_DISABLE",
        _ON,
        Effect.LIMITED,
        "data for another rail do not take NVLink to the GPU beside that adapter",
    ),
    Variable(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "0",
        Effect.LIMITED,
        "adapters wait for the order of writes, which costs bandwidth in virtual machines",
    ),
    Variable(
        "NCCL_LL_THRESHOLD",
        "0",
        Effect.FORCED,
        "small messages cannot use the protocol of low latency (older name)",
    ),
    Variable(
        "NCCL_TREE_THRESHOLD",
        "0",
        Effect.FORCED,
        "trees are off (older name), whose latency grows less with the number of nodes",
        citations=("NVIDIA/nccl#398",),
    ),
    Variable(
        "NCCL_DEBUG",
        "TRACE",
        Effect.SLOW_HOST,
        "NCCL writes lines for every operation",
        advice="run with NCCL_DEBUG=INFO or WARN",
    ),
    Variable(
        "NCCL_DEBUG_SUBSYS",
        r"(?:.*,)?(?:ALL|COLL)(?:,.*)?",
        Effect.SLOW_HOST,
        "with NCCL_DEBUG=INFO, NCCL writes a line for every operation",
        advice="run without NCCL_DEBUG_SUBSYS",
    ),
    Variable(
        "NCCL_CHECK_POINTERS",
        _ON,
        Effect.SLOW_HOST,
        "NCCL asks CUDA about each pointer of each operation",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        Effect.SLOW_HOST,
        "the host waits for every kernel",
    ),
)


def find_variables(name: str, value: str) -> tuple[Variable, ...]:
    """Find what a setting may do to a run.

    Parameters
    ----------
    name : str
        Name of the variable.
    value : str
        Its value, as the log prints it.

    Returns
    -------
    variables : tuple of Variable
        What it does; empty for harmless settings.

    Examples
    --------
    >>> [variable.effect.value for variable in find_variables("NCCL_IB_DISABLE", "1")]
    ['InfiniBand and RoCE are off']
    >>> find_variables("NCCL_IB_DISABLE", "0")
    ()
    """
    return tuple(
        variable for variable in VARIABLES if variable.name == name and variable.is_harmful(value)
    )
