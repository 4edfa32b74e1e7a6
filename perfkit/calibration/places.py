"""Places of the events of a trace: phase, module and operator, from the names of the events around
them.

A trace is a forest: each event lies inside of another one on its thread. What an event tells its
inner ones is passed on level by level, from the outermost events inwards, for all events of a level
at once.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.collectives import list_names
from perfkit.calibration.doubts import EXCHANGES
from perfkit.ground.units import Array
from perfkit.readers.kineto import TraceFile
from perfkit.workloads.vocabulary import VIEWS, find_entry

#: Phases by the names of annotations, operators and nodes of the backward graph; the innermost
#: counts.
_PHASES = list_names("phase")
#: The phase of an event around which nothing names one, and of nodes of the backward graph.
_FORWARD, _BACKWARD = "forward", "backward"
#: Annotations that name no module.
_NO_MODULE = re.compile(
    r"^(ProfilerStep|nccl:|c10d|Optimizer\.|enumerate\(|(## )?(forward|backward|optimizer)( ##)?$)"
)
#: Classes of operators and kernels that `perfkit.workloads.vocabulary` does not have; the first
#: match counts.
_CLASSES = list_names("class")
#: Those of operators, too, that the vocabulary is not asked for: convolutions and norms, which stand
#: first.
_NOT_ASKED = _CLASSES[:2]


class _Said(NamedTuple):
    """What the name of a host event tells alone: phase and module, empty if none; and whether it is
    an operator, one that the vocabulary knows, and a collective."""

    phase: str = ""
    module: str = ""
    is_operator: bool = False
    is_known: bool = False
    is_exchange: bool = False


@lru_cache(maxsize=65_536)
def _read_name(cat: str, name: str) -> _Said:
    """What a name alone tells."""
    phase = next((phase for pattern, phase in _PHASES if pattern.search(name)), "")
    module = ""
    if cat == "python_function":
        module = name.removeprefix("nn.Module: ") if name.startswith("nn.Module: ") else ""
    elif cat == "user_annotation" and not phase and not _NO_MODULE.search(name):
        module = name.strip("# ").removesuffix(".forward").replace(".", "_")
    is_exchange = bool(EXCHANGES.search(name))
    is_operator = cat == "cpu_op" and not (phase == _BACKWARD or is_exchange)
    is_known = is_operator and bool(classify(name))
    return _Said(phase, module, is_operator, is_known, is_exchange)


@lru_cache(maxsize=65_536)
def classify(name: str, last: bool = False) -> str:
    """Class of an operator or kernel, empty if unknown; with `last`, unknown operators count as
    elementwise."""
    kind = ""
    operator = name.removeprefix("aten::")
    is_operator = operator != name
    if is_operator and not any(pattern.search(operator) for pattern, _ in _NOT_ASKED):
        if operator not in VIEWS:
            kind = find_entry(operator, pointwise=last).kind
    elif not last:
        begin = name[:160]  # names of C++ templates are very long
        kind = next((named for pattern, named in _CLASSES if pattern.search(begin)), "")
    return "" if kind == "other" else kind


def list_levels(above: Array) -> list[np.ndarray]:
    """Sort the members of a forest by the number of members above each.

    Parameters
    ----------
    above : array of int
        The member above each, -1 for none [-].

    Returns
    -------
    levels : list of array
        Members with none, one, two and so on above them, in order [-].

    Raises
    ------
    ValueError
        If a member lies above itself.

    Examples
    --------
    >>> [level.tolist() for level in list_levels(np.array([-1, 0, 0, 2, -1]))]
    [[0, 4], [1, 2], [3]]
    """
    depth = (above >= 0).astype(np.int64)
    far = above.copy()  # the member so many levels above as depth names
    left = np.flatnonzero(far >= 0)
    for _ in range(len(above).bit_length() + 1):
        if not len(left):
            break
        there = far[left]
        # all at once: depths of before this round
        depth[left] += depth[there]
        far[left] = far[there]
        left = left[far[left] >= 0]
    if len(left):
        raise ValueError(
            "arguments of the trace cannot be used: events lie around themselves; pass the file that "
            "torch.profiler wrote"
        )
    order = np.argsort(depth, kind="stable")
    deepest = int(depth.max(initial=-1))
    ends = np.searchsorted(depth[order], np.arange(deepest + 1), side="right")
    return np.split(order, ends)[:-1]


@dataclass(frozen=True, eq=False)
class Places:
    """Places of all events of a trace, by the index of the event.

    Every array has one entry more, the last one, which index -1 finds: that of no event.

    Parameters
    ----------
    phase : array of str
        From its own name or from the events around it [-].
    module : array of str
        Names of the modules around it, joined by points; empty for none [-].
    owner : array of int
        Index of the outermost operator that the vocabulary knows, otherwise of the innermost
        operator, -1 for none [-].
    is_known : array of bool
        Whether the vocabulary knows the owner [-].
    exchange : array of int
        Index of the operator that launched a collective, -1 for none [-].
    """

    phase: Array
    module: Array
    owner: Array
    is_known: Array
    exchange: Array


def find_places(file: TraceFile) -> Places:
    """Find the place of every event; nodes of the backward graph take the module of their forward
    operator.

    Parameters
    ----------
    file : TraceFile
        One rank.

    Returns
    -------
    places : Places
        Of its events.

    Raises
    ------
    ValueError
        Where the operator of a node lies inside of that node.
    TypeError
        Where a number of the backward graph is no whole number.
    """
    events = file.events
    parents = events["parent"].to_numpy()
    names = _Names.read(events)
    is_engine = _find_engines(events)
    is_wrapper = _find_wrappers(parents, names.code)
    count = len(events)
    phase = np.full(count + 1, _FORWARD, dtype=object)
    owner = np.full(count + 1, -1)
    is_known = np.zeros(count + 1, dtype=bool)
    exchange = np.full(count + 1, -1)
    for number, level in enumerate(list_levels(parents)):
        around = parents[level]
        phase_around = phase[around]
        if number == 0:
            phase_around = np.where(is_engine[level], _BACKWARD, phase_around)
        phase[level] = np.where(names.phase[level] != "", names.phase[level], phase_around)
        is_owner = names.is_operator[level] & ~is_known[around] & ~is_wrapper[level]
        owner[level] = np.where(is_owner, level, owner[around])
        is_known[level] = np.where(is_owner, names.is_known[level], is_known[around])
        exchange[level] = np.where(names.is_exchange[level], level, exchange[around])
    return Places(phase, _find_modules(file, parents, names), owner, is_known, exchange)


@dataclass(frozen=True, eq=False)
class _Names:
    """What the names of all events tell, see `_Said`; those of a device tell nothing.

    `code` is equal for events of equal name.
    """

    code: Array
    phase: Array
    module: Array
    is_operator: Array
    is_known: Array
    is_exchange: Array

    @classmethod
    def read(cls, events: pl.DataFrame) -> "_Names":
        """What they tell; each name is read once."""
        names = events.select("cat", "name", is_host=pl.col("stream") < 0)
        kinds = names.unique(maintain_order=True)
        said = []
        for cat, name, is_host in kinds.iter_rows():
            said.append(_read_name(cat, name) if is_host else _Said())
        kind = names.join(
            kinds.with_row_index("kind"), on=names.columns, how="left", maintain_order="left"
        )["kind"].to_numpy()
        codes = kinds["name"].rank("dense").to_numpy()
        return cls(
            code=codes[kind],
            phase=np.array([each.phase for each in said], dtype=object)[kind],
            module=np.array([each.module for each in said], dtype=object)[kind],
            is_operator=np.array([each.is_operator for each in said], dtype=bool)[kind],
            is_known=np.array([each.is_known for each in said], dtype=bool)[kind],
            is_exchange=np.array([each.is_exchange for each in said], dtype=bool)[kind],
        )


def _find_wrappers(parents: Array, names: Array) -> Array:
    """Whether each event calls one of its own name: autocast casts the arguments of an operator and
    calls it again, and the inner one is the operator."""
    is_wrapper = np.zeros(len(parents), dtype=bool)
    inner = np.flatnonzero(parents >= 0)
    outer = parents[inner]
    is_wrapper[outer[names[outer] == names[inner]]] = True
    return is_wrapper


def _find_engines(events: pl.DataFrame) -> Array:
    """Whether the thread of each event runs the backward graph: its first event is a node of it."""
    on_host = events.filter(pl.col("stream") < 0)
    pattern = next(pattern for pattern, phase in _PHASES if phase == _BACKWARD)
    first_of_thread = on_host.unique("tid", keep="first").select("tid", "name").rows()
    engines = [thread for thread, name in first_of_thread if pattern.search(name)]
    return events["tid"].is_in(engines).to_numpy()


def _find_modules(file: TraceFile, parents: Array, names: _Names) -> Array:
    """Modules around every event, see `Places`."""
    above = parents.copy()
    is_named = names.module != ""
    links = file.args.list_links()
    index = links["index"].to_numpy()
    # the last operator before a node, by the number that both have
    is_operator = ~links["is_node"].to_numpy() & names.is_operator[index]
    operators = links.filter(pl.Series(is_operator)).unique("number", keep="last")
    nodes = links.filter(pl.Series(names.phase[index] == _BACKWARD))
    pairs = nodes.join(operators.select("number", operator="index"), on="number")
    node = pairs["index"].to_numpy()
    above[node] = pairs["operator"].to_numpy()
    is_named[node] = False
    module = np.full(len(parents) + 1, "", dtype=object)
    joined: dict[tuple[str, str], str] = {}
    for level in list_levels(above):
        module[level] = module[above[level]]
        for member in level[is_named[level]].tolist():
            path = module[member], names.module[member]
            if path not in joined:
                joined[path] = ".".join(path).strip(".")
            module[member] = joined[path]
    return module
