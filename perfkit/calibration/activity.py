"""What every rank of a trace did: its kernels, their place in the training step, and why its device was idle."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import polars as pl

from perfkit.calibration.meetings import COLLECTIVE, spell_operation
from perfkit.ground.results import Table
from perfkit.readers.trace import DEVICE, TraceFile
from perfkit.workloads.vocabulary import VIEWS, find_entry

#: Phases by the names of annotations, operators and nodes of the backward graph; the innermost counts.
_PHASES = (
    (re.compile(r"DataLoader|^## (load|copy)_batch"), "data"),
    (re.compile(r"^Optimizer\.|^## (optimizer|zero_grad)"), "update"),
    (re.compile(r"^autograd::engine|^torch::autograd|Backward\d*$|^## backward ##"), "backward"),
)
#: Annotations that name no module.
_NO_MODULE = re.compile(r"^(ProfilerStep|nccl:|c10d|Optimizer\.|enumerate\(|(## )?(forward|backward|optimizer)( ##)?$)")
#: Operators that collectives are launched by.
_EXCHANGE = re.compile(r"^(nccl:|record_param_comms$)")
#: Classes of operators and kernels that the vocabulary of PyTorch does not have; the first match counts.
_CLASSES = (
    (re.compile(r"conv(olution|\dd|_)|winograd|[dw]grad|fprop|cudnn.*(infer|train)", re.I), "convolution"),
    (re.compile(r"(batch|layer|rms)_?norm|softmax|bn_(fw|bw)|nll_loss_nd|cross_entropy_loss", re.I), "rowwise"),
    (re.compile(r"flash|fmha|attention", re.I), "attention"),
    (re.compile(r"(embedding|tbe).*(backward|grad)", re.I), "embedding_backward"),
    (re.compile(r"embedding|(^|::)tbe", re.I), "embedding_forward"),
    (re.compile(r"gemm|cutlass|cublas|xmma|^Cijk_|nvjet", re.I), "gemm"),
    (re.compile(r"^Mem(cpy|set).*(HtoD|DtoH|PtoP|Host)", re.I), "transfer"),
    (re.compile(r"^Mem(cpy|set)|cat(arr|_)|copy|index|gather|scatter|permute|transpose|fill", re.I), "copy"),
    (re.compile(r"pool", re.I), "pooling"),
    (re.compile(r"reduce|triton_(red|per)|norm|sort|scan|cumsum", re.I), "rowwise"),
    (re.compile(r"elementwise|triton_poi|multi_tensor_apply", re.I), "elementwise"),
)  # fmt: skip
#: Calls in which the host waits for the device.
BLOCKING = "Synchronize|^(cuda|hip)(Memcpy|Malloc|Free|HostAlloc)$"

_WORK = {
    "index": pl.Int64, "role": pl.String, "stream": pl.Int64, "launched": pl.Int64, "kernel": pl.String,
    "operation": pl.Int64, "exchange": pl.Int64, "name": pl.String, "kind": pl.String, "phase": pl.String,
    "module": pl.String,
}  # fmt: skip


class _Place(NamedTuple):
    """Where an event of the host stands: what the events around it say, unless its own name says more.

    `owner` is the outermost operator that the vocabulary knows, else the innermost; `call` the outermost one that no
    other operator called; `exchange` what recorded a collective; each an index, -1 for none.
    """

    phase: str = ""
    module: str = ""
    owner: int = -1
    known: bool = False
    call: int = -1
    exchange: int = -1


class _Name(NamedTuple):
    """What the name of an event says by itself."""

    phase: str
    module: str
    operator: bool
    known: bool
    exchange: bool


@lru_cache(maxsize=65_536)
def _read_name(cat: str, name: str) -> _Name:
    phase = next((phase for pattern, phase in _PHASES if pattern.search(name)), "")
    module = ""
    if cat == "python_function":
        module = name.removeprefix("nn.Module: ") if name.startswith("nn.Module: ") else ""
    elif cat == "user_annotation" and not phase and not _NO_MODULE.search(name):
        module = name.strip("# ").removesuffix(".forward").replace(".", "_")
    exchange = bool(_EXCHANGE.search(name))
    operator = cat == "cpu_op" and not (phase == "backward" or exchange)
    return _Name(phase, module, operator, operator and bool(_classify(name)), exchange)


@lru_cache(maxsize=65_536)
def _classify(name: str, last: bool = False) -> str:
    """Class of an operator or kernel, empty where nothing tells; the `last` resort takes operators for pointwise."""
    short, known = name.removeprefix("aten::"), ""
    if short != name and not _CLASSES[0][0].search(short) and not _CLASSES[1][0].search(short):
        known = "" if short in VIEWS else find_entry(short, pointwise=last).kind
    elif not last:
        begin = name[:160]  # templates go on for pages
        known = next((kind for pattern, kind in _CLASSES if pattern.search(begin)), "")
    return "" if known == "other" else known


def _place_events(file: TraceFile) -> dict[int, _Place]:
    """Places of the events of the host; backward nodes have the module of the forward operator they belong to."""
    host = file.events.filter((pl.col("stream") < 0) & ~pl.col("cat").is_in(DEVICE))
    threads = host.unique(["pid", "tid"], keep="first").select("pid", "tid", "name").rows()
    engines = {(pid, tid) for pid, tid, name in threads if _PHASES[2][0].search(name)}
    places, owners, start = dict[int, _Place](), dict[int, str](), (_Place("forward"), _Place("backward"))
    for index, cat, name, pid, tid, parent in host.select("index", "cat", "name", "pid", "tid", "parent").iter_rows():
        place = places.get(parent) or start[(pid, tid) in engines]
        said, args = _read_name(cat, name), file.args.get(index, {})
        module = f"{place.module}.{said.module}".strip(".") if said.module else place.module
        number = args.get("Sequence number", -1)
        if number in owners and (args.get("Fwd thread id") or said.phase == "backward"):
            module = owners[number]
        elif cat == "cpu_op" and number >= 0 and module:
            owners[number] = module
        owner, known, call, exchange = place[2:]
        if said.operator:
            owner, known = (owner, True) if known else (index, said.known)
            call = index if call < 0 else call
        exchange = index if said.exchange else exchange
        found = (said.phase or place.phase, module, owner, known, call, exchange)
        places[index] = place if found == place else _Place(*found)
    return places


def list_work(file: TraceFile) -> Table:
    """What the device of a rank did, or where there is none its host: each kernel, copy or operator with its place.

    Parameters
    ----------
    file : TraceFile
        One rank.

    Returns
    -------
    frame : polars.DataFrame
        In order of time index [-]; role (compute, communication, copies); stream [-]; start, end, and launched, when
        the host had launched it [ns]; kernel, its own name; operation, index of the operator that it belongs to, and
        exchange, of what recorded a collective, -1 for none [-]; name, that of the operator; kind, as of `Graph`;
        phase, module; iteration [-].
    """
    events, places = file.events, _place_events(file)
    device = events.filter(pl.col("cat").is_in(DEVICE))
    if device.is_empty():
        operators = events.filter(pl.col("cat") == "cpu_op")
        device = operators.filter(pl.Series(_find_workers(operators, places), dtype=pl.Boolean))
        device = device.with_columns(index_correlation=pl.col("index"))
    names, ends = events["name"], (events["ts"] + events["dur"]).to_numpy()
    rows, columns = [], ("index", "cat", "name", "stream", "index_correlation")
    for index, cat, kernel, stream, launch in device.select(columns).iter_rows():
        place = places.get(launch, _Place("forward"))
        owner = names[place.owner] if place.owner >= 0 else ""
        collective = bool(COLLECTIVE.search(kernel)) if cat == "kernel" else cat == "cpu_op" and place.exchange >= 0
        if collective or "Collective name" in file.args.get(index, {}):
            exchanged = names[place.exchange] if place.exchange >= 0 else ""
            role, kind, name = "communication", "collective", spell_operation(exchanged, kernel)
        else:
            role, name = "compute" if cat in ("kernel", "cpu_op") else "copies", owner.removeprefix("aten::") or kernel
            kind = _classify(owner if place.known and role == "compute" else kernel) or _classify(owner, last=True)
        started = int(ends[launch]) if launch not in (-1, index) else -1
        own = (place.owner, place.exchange, name, kind or "other", place.phase, place.module)
        rows.append((index, role, stream, started, kernel, *own))
    work = pl.DataFrame(rows, _WORK, orient="row")
    times = device.select("index", "iteration", start="ts", end=pl.col("ts") + pl.col("dur"))
    return work.join(times, on="index", how="left").sort("start", "index")


def _find_workers(operators: Table, places: Mapping[int, _Place]) -> Iterator[bool]:
    """Which operators of a host without a device are work: those of the vocabulary, and others that call no more."""
    callers = set(operators["parent"])
    for index, name in operators.select("index", "name").iter_rows():
        place, short = places[index], name.removeprefix("aten::")
        alone = index not in callers and short not in VIEWS and short != name
        yield place.owner == index and (place.known or alone)


def time_host(file: TraceFile, work: Table) -> Table:
    """The five overheads of the host, and calls that launch nothing.

    Parameters
    ----------
    file : TraceFile
        One rank.
    work : polars.DataFrame
        Of `list_work`.

    Returns
    -------
    frame : polars.DataFrame
        overhead, named as in `Platform.host`: gap (T1, before the next call), before_launch (T2), after_launch (T3),
        launch (T4), between_launches (T5), bare (a call without a launch); kind and phase of what a call launches
        first; n [-]; median_s, mean_s, q1_s, q3_s [s]. Gaps in which the host waited for its device are left out.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model training on GPUs", 2022,
       arXiv:2201.07821, section 3.4 (the five overheads)
    """
    places, end = _place_events(file), pl.col("ts") + pl.col("dur")
    host = file.events.filter(pl.col("index").is_in(list(places))).with_columns(end=end)
    host = host.with_columns(
        call=pl.Series([places[index].call for index in host["index"]], dtype=pl.Int64),
        phase=pl.Series([places[index].phase for index in host["index"]], dtype=pl.String),
    )
    kinds = work.select(index_correlation="index", kind="kind")
    launches = host.filter((pl.col("index_correlation") >= 0) & (pl.col("call") >= 0))
    launches = launches.join(kinds, on="index_correlation", how="left", maintain_order="left")
    ends = {"kind": pl.first("kind"), "first": pl.first("ts"), "last": pl.last("end")}
    calls = host.filter(pl.col("index") == pl.col("call")).sort("pid", "tid", "ts")
    calls = calls.join(launches.group_by("call").agg(**ends), on="call", how="left", maintain_order="left")
    calls = calls.with_columns(before=pl.col("end").shift(1).over("pid", "tid"))
    waits = host.filter(pl.col("name").str.contains(BLOCKING))["ts"]
    free = waits.search_sorted(calls["before"].fill_null(0)) == waits.search_sorted(calls["ts"])
    times: dict[str, tuple[Table, pl.Expr]] = {
        "gap": (calls.filter(free), pl.col("ts") - pl.col("before")),
        "before_launch": (calls, pl.col("first") - pl.col("ts")),
        "after_launch": (calls, pl.col("end") - pl.col("last")),
        "launch": (launches.filter(pl.col("name").str.contains("Launch")), pl.col("dur")),
        "between_launches": (launches, pl.col("ts") - pl.col("end").shift(1).over("call")),
        "bare": (calls.filter(pl.col("first").is_null()), pl.col("dur")),
    }
    about = ("kind", "phase")
    rows = [each.select(pl.lit(name).alias("overhead"), *about, ns=time) for name, (each, time) in times.items()]
    value, keys = 1e-9 * pl.col("ns"), ("overhead", pl.col("kind").fill_null(""), "phase")
    sums = {"n": pl.len().cast(pl.Int64), "median_s": value.median(), "mean_s": value.mean()}
    sums |= {"q1_s": value.quantile(0.25), "q3_s": value.quantile(0.75)}
    return pl.concat(rows).drop_nulls("ns").group_by(*keys, maintain_order=True).agg(**sums)
