"""Which benchmark printed a text: those that are read as collectives, beside nccl-tests, and those that
are refused by their name.

A new benchmark is one `BenchmarkDialect`: how it is recognised, and the function that reads it. Its
file says what its sizes and times mean, with the source of that.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from perfkit.readers import (
    all_reduce_bench,
    deepspeed_comm,
    hccl,
    oneccl,
    osu,
    param_comms,
    rccl_files,
)
from perfkit.readers.collective_rows import Measurements

#: Characters of a text in which a benchmark that is refused is looked for [-].
_SEARCHED = 2**20


@dataclass(frozen=True)
class BenchmarkDialect:
    """Output of a benchmark of collectives that is read.

    Parameters
    ----------
    name : str
        The benchmark, in words.
    mark : str
        Letters that each such text holds: looking for them is fast.
    head : re.Pattern
        A line that only this benchmark prints.
    read : callable
        Takes text and name of a log, and returns `perfkit.readers.collective_rows.Measurements`.
    """

    name: str
    mark: str
    head: re.Pattern[str]
    read: Callable[[str, str], Measurements]


@dataclass(frozen=True)
class Foreign:
    """Output of a program that is known, and not read as collectives.

    Parameters
    ----------
    name : str
        The program, in words.
    head : re.Pattern
        A line that only this program prints.
    holds : str
        What it holds, and what to pass instead.
    """

    name: str
    head: re.Pattern[str]
    holds: str


#: Benchmarks of collectives that are read, beside nccl-tests and rccl-tests.
DIALECTS = (
    BenchmarkDialect("oneCCL's benchmark", "t_avg[usec]", oneccl.HEAD, oneccl.read_oneccl),
    BenchmarkDialect(
        "oneCCL's benchmark (CSV)", "#ranks,", oneccl.CSV_HEAD, oneccl.read_oneccl_csv
    ),
    BenchmarkDialect("HCCL Test", "alg_bandwidth(GB/s)", hccl.HEAD, hccl.read_hccl),
    BenchmarkDialect(
        "DeepSpeed's communication logger",
        "Comm. Op",
        deepspeed_comm.SUMMARY_HEAD,
        deepspeed_comm.read_summary,
    ),
    BenchmarkDialect(
        "DeepSpeed's communication benchmark",
        "---- Performance of",
        deepspeed_comm.BENCHMARK_HEAD,
        deepspeed_comm.read_benchmark,
    ),
    BenchmarkDialect("PARAM's comms.py", "COMMS-RES", param_comms.HEAD, param_comms.read_param),
    BenchmarkDialect("OSU micro-benchmarks", "# OSU ", osu.HEAD, osu.read_osu),
    BenchmarkDialect(
        "all_reduce_bench.py of ml-engineering",
        "GBps",
        all_reduce_bench.HEAD,
        all_reduce_bench.read_all_reduce_bench,
    ),
    BenchmarkDialect(
        "rccl-tests (CSV)", "numCycle,", rccl_files.CSV_HEAD, rccl_files.read_rccl_csv
    ),
    BenchmarkDialect(
        "rccl-tests (JSON)", '"numCycle"', rccl_files.JSON_HEAD, rccl_files.read_rccl_json
    ),
    BenchmarkDialect(
        "mscclpp-test (JSON)", '"busBw"', rccl_files.MSCCLPP_HEAD, rccl_files.read_rccl_json
    ),
)
_RUN_COLLECTIVES = "run all_reduce_perf of nccl-tests or rccl-tests on the same nodes"
_NAME_LINKS = f"the rate of one link; {_RUN_COLLECTIVES}"
#: Programs that are refused by their name.
FOREIGN = (
    Foreign(
        "nvbandwidth",
        re.compile(r"nvbandwidth Version|\"nvbandwidth\"\s*:|memcpy (?:CE|SM) [CG]PU\(row\)"),
        "rates of links between GPUs and hosts; perfkit.readers.nvbandwidth.read_nvbandwidth reads "
        f"it; for collectives {_RUN_COLLECTIVES}",
    ),
    Foreign(
        "perftest (ib_write_bw and its like)",
        re.compile(
            r"BW average\[|t_typical\[usec\]|(?:RDMA_Write|RDMA_Read|Send) (?:BW|Latency) Test"
        ),
        _NAME_LINKS,
    ),
    Foreign(
        "p2pBandwidthLatencyTest",
        re.compile(r"P2P \(Peer-to-Peer\) GPU Bandwidth Latency Test|P2P Connectivity Matrix"),
        f"rates between pairs of GPUs; run nvbandwidth for them, or {_RUN_COLLECTIVES}",
    ),
    Foreign(
        "bandwidthTest of CUDA",
        re.compile(r"\[CUDA Bandwidth Test\]"),
        f"rates between host and GPU; {_RUN_COLLECTIVES}",
    ),
    Foreign(
        "iperf",
        re.compile(r"iperf Done\.|\[ ID\]\s+Interval\s+Transfer\s+B(?:itrate|andwidth)"),
        _NAME_LINKS,
    ),
    Foreign(
        "ucx_perftest",
        re.compile(
            r"overhead \(usec\)|# iterations\s*\|.*overhead|\| Stage\s*\||ucx_perftest\b.*API"
        ),
        _NAME_LINKS,
    ),
    Foreign(
        "ucc_perftest",
        re.compile(r"Count\s+Size\s+Time, us\s+Bandwidth, GB/s"),
        f"collectives of UCC, which are not read; {_RUN_COLLECTIVES}",
    ),
    Foreign(
        "mlxlink",
        re.compile(r"Operational Info\n-+|Physical Counters and BER Info"),
        "the state of a port, no times; " + _RUN_COLLECTIVES,
    ),
    Foreign(
        "Intel MPI Benchmarks",
        re.compile(r"Intel\(R\) MPI Benchmarks|#repetitions\s+t_min\[usec\]"),
        f"exchanges of host memory by MPI; {_RUN_COLLECTIVES}, or oneCCL's benchmark",
    ),
    Foreign(
        "dcgmi diag",
        re.compile(r"Successfully ran diagnostic for group|\| Diagnostic\s+\| Result"),
        "whether tests passed, no times of collectives; " + _RUN_COLLECTIVES,
    ),
    Foreign(
        "rocm-bandwidth-test or TransferBench",
        re.compile(r"RocmBandwidthTest Version|TransferBench v\d"),
        f"rates between pairs of GPUs; {_RUN_COLLECTIVES}",
    ),
    Foreign(
        "hccl_demo of Habana",
        re.compile(r"\[BENCHMARK\]\s+(?:NW )?Bandwidth"),
        "one size of one operation, which is not read; there is no reader of Gaudi's logs",
    ),
    Foreign(
        "MSCCL++'s allreduce_bench.py",
        re.compile(r"NCCL AlgBW \(GB/s\)"),
        "times of two libraries in one table; run nccl-tests with libmscclpp_nccl.so preloaded",
    ),
    Foreign(
        "nccom-test of AWS Neuron",
        re.compile(r"size\(B\)\s+count\(elems\)\s.*time(?::avg)?\(us\)"),
        "collectives of Trainium, which are not read: there is no platform of it",
    ),
    Foreign(
        "mscclpp-test",
        re.compile(r"#\s+size\s+count\s+time\s+algbw\s+busbw"),
        "a table without ranks and operation; run it with -o FILE, and name the file that it writes",
    ),
    Foreign(
        "DeepSpeed's communication logger",
        deepspeed_comm.VERBOSE,
        "single operations; call deepspeed.comm.log_summary() at the end of the run",
    ),
    # a job often prints its topology above the table that is missing
    Foreign(
        "nvidia-smi topo -m",
        re.compile(r"\bGPU0[ \t]{1,20}(?:\x1b\[\d*m)?GPU1\b"),
        "which links join the GPUs, no times; " + _RUN_COLLECTIVES,
    ),
)


def find_dialect(text: str) -> BenchmarkDialect | None:
    """Find the benchmark that printed a text; None for nccl-tests, and for anything else.

    Parameters
    ----------
    text : str
        A log.

    Returns
    -------
    dialect : BenchmarkDialect or None
        Its entry.

    Examples
    --------
    >>> find_dialect("# OSU MPI-CUDA Allreduce Latency Test v7.0").name
    'OSU micro-benchmarks'
    """
    for dialect in DIALECTS:
        if dialect.mark in text and dialect.head.search(text):
            return dialect
    return None


def holds_dialect(head: bytes) -> bool:
    """Whether the beginning of a file holds a table of a benchmark that is read.

    Parameters
    ----------
    head : bytes
        The first bytes of the file.

    Returns
    -------
    holds : bool
        Whether it does; False for nccl-tests.
    """
    if not any(dialect.mark.encode() in head for dialect in DIALECTS):
        return False
    return find_dialect(head.decode("utf-8", "replace")) is not None


def name_foreign(text: str) -> str | None:
    """Say which program printed a text that holds no collectives; None for one that is not known.

    Parameters
    ----------
    text : str
        A log.

    Returns
    -------
    words : str or None
        The program, what its output holds, and the next step.

    Examples
    --------
    >>> name_foreign("iperf Done.").split(";")[0]
    'it is the output of iperf, which holds the rate of one link'
    """
    beginning = text[:_SEARCHED]
    for foreign in FOREIGN:
        if foreign.head.search(beginning):
            return f"it is the output of {foreign.name}, which holds {foreign.holds}"
    return None
