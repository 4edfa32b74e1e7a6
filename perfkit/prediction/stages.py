"""Stages of a strategy for the event loop: the operations of one rank of each stage, micro-batch
after micro-batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.units import Array, check_type, show
from perfkit.models.partitions import Step, list_steps
from perfkit.platform.platform import Platform
from perfkit.prediction.micro_batches import (
    CORES,
    PAIRS,
    record_micro_batch,
    size_micro_batch,
)
from perfkit.prediction.ranks import resolve_workload
from perfkit.prediction.strategies import check_device, price_strategies
from perfkit.prediction.strategy_records import REGIONS
from perfkit.workloads.blocks import PARALLEL
from perfkit.workloads.columns import (
    ONE_CALL,
    Accesses,
    Features,
    HeldMemory,
    HostCalls,
    OperationSizes,
    Wait,
    Waits,
)
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import (
    STAGE_HOST,
    Graph,
    KernelKey,
    Label,
    OperationClass,
    OperationClasses,
)
from perfkit.workloads.placement import Plan
from perfkit.workloads.strategy import Strategy, list_fits
from perfkit.workloads.transformer import MOST_PASSES, Transformer

#: Communicators: ranks that share layers, sequences and experts; replicas, groups of replicas
#: (hybrid sharding), and replicas of experts. Those of neighbouring stages follow, two for each
#: pair.
_TENSOR, _CONTEXT, _EXPERTS, _REPLICAS, _ACROSS, _ROUTED = range(PAIRS)
#: Most operations of all stages [-].
_MOST = 3_000_000
#: Passes: forward, backward, and the gradients of weights that a schedule puts off.
_PHASES = ("forward", "backward", "weights")

#: A region and its layer.
_Unit: TypeAlias = tuple[str, int]


class _Block(NamedTuple):
    """Operations that follow one another.

    Parameters
    ----------
    rows : array of int
        Their rows in a table [-].
    waiting : array of int
        Positions in the block, or its length for what follows, that wait for collectives of the
        block [-].
    awaited : array of int
        Numbers of these collectives in the block [-].
    sent : int
        Collectives of the block [-].
    """

    rows: np.ndarray
    waiting: np.ndarray
    awaited: np.ndarray
    sent: int


_NOTHING = np.zeros(0, dtype=int)


def _list_rows(graph: Graph, names: Sequence[str]) -> Iterator[tuple[float, ...]]:
    """Features of these names of each operation, those of the last configuration."""
    columns = [graph.column(name)[:, -1].tolist() for name in names]
    return zip(*columns, strict=True)


class _Table:
    """Operations that stages repeat: their labels, number formats, sizes, and the bytes that each
    reads and writes."""

    def __init__(self, graph: Graph) -> None:
        self.labels, self.traffic = [*graph.labels], [*graph.traffic[:, -1]]
        self.dtypes = [*(graph.dtypes or (graph.dtype,) * len(graph))]
        self.sizes = [OperationSizes(*row) for row in _list_rows(graph, OperationSizes._fields)]
        self.host_calls = [HostCalls(*row) for row in _list_rows(graph, HostCalls._fields)]
        self.known, self.recorded = dict[Any, int](), len(graph)
        label = Label(
            name="host",
            kind=STAGE_HOST.kind,
            variant=STAGE_HOST.variant,
            phase="forward",
            module="stages",
        )
        late = self._add(label, OperationSizes(), HostCalls(), 0.0, 0)
        #: The time by which the host makes a pass longer, as an operation.
        self.late = {phase: self.make_block([self.copy(late, phase)]) for phase in _PHASES[:2]}

    def find(self, region: str, phase: str) -> Array:
        """Rows of a region in a phase, as they were recorded."""
        own = self.labels[: self.recorded]
        return np.array(
            [
                n
                for n, label in enumerate(own)
                if label.phase == phase and label.module.startswith(region)
            ]
        )

    def find_cores(self, rows: Array) -> list[int]:
        """Places of attention among rows."""
        labels = [self.labels[row] for row in rows]
        return [
            place
            for place, label in enumerate(labels)
            if label.kind in CORES and label.module.endswith("attention")
        ]

    def copy(self, row: int, phase: str, factor: float = 1.0) -> int:
        """Row of an operation in another phase, or with `factor` times as many numbers."""
        if (key := (row, phase, factor)) not in self.known:
            sizes = self.sizes[row]
            elements, flops = factor * sizes.elements, factor * sizes.flops
            sizes = sizes._replace(elements=elements, flops=flops)
            label, traffic = self.labels[row]._replace(phase=phase), factor * self.traffic[row]
            self.known[key] = self._add(label, sizes, self.host_calls[row], traffic, row)
        return self.known[key]

    def call_before(self, row: int, bare: float) -> int:
        """Row of an operation with more calls without a kernel before it."""
        if (key := (row, "bare", bare)) not in self.known:
            host_calls = self.host_calls[row]
            host_calls = host_calls._replace(bare=host_calls.bare + bare)
            label, traffic = self.labels[row], self.traffic[row]
            self.known[key] = self._add(label, self.sizes[row], host_calls, traffic, row)
        return self.known[key]

    def send(self, operation: str, phase: str, module: str, nbytes: Any, group: int) -> int:
        """Row of a collective."""
        if (key := (operation, phase, module, float(nbytes), group)) not in self.known:
            label = Label(operation, "collective", operation, phase, module)
            sizes = OperationSizes(nbytes=float(nbytes), group=group)
            self.known[key] = self._add(label, sizes, ONE_CALL, 2.0 * nbytes, 0)
        return self.known[key]

    def _add(
        self,
        label: Label,
        sizes: OperationSizes,
        host_calls: HostCalls,
        traffic: float,
        like: int,
    ) -> int:
        self.labels.append(label)
        self.sizes.append(sizes)
        self.host_calls.append(host_calls)
        self.traffic.append(traffic)
        self.dtypes.append(self.dtypes[like])
        return len(self.labels) - 1

    def make_block(self, rows: Any, late: Mapping[int, int] | None = None) -> _Block:
        """A block whose collectives are waited for at once, or at another place where `late` has
        theirs."""
        collectives = [
            position for position, row in enumerate(rows) if self.labels[row].kind == "collective"
        ]
        waiting = [(late or {}).get(position, position + 1) for position in collectives]
        return _Block(
            np.array(rows, dtype=int),
            np.array(waiting, dtype=int),
            np.arange(len(collectives)),
            len(collectives),
        )

    def find_label(self, row: int, layer: int) -> Label:
        """Label of an operation in a layer."""
        label = self.labels[row]
        if layer == 0:
            return label
        module = label.module.replace("layers.0", f"layers.{layer}")
        return Label(label.name, label.kind, label.variant, label.phase, module)

    def find_classes(self, rows: np.ndarray) -> OperationClasses:
        """Classes of operations, which do not depend on their layers, in the order in which they
        come."""
        numbers: dict[OperationClass, int] = {}
        of_table = np.array(
            [numbers.setdefault(label.operation_class, len(numbers)) for label in self.labels]
        )
        found, first, of_operation = np.unique(
            of_table[rows], return_index=True, return_inverse=True
        )
        in_order = np.argsort(first)
        known = [*numbers]
        return OperationClasses(
            [known[number] for number in found[in_order].tolist()],
            np.argsort(in_order)[of_operation],
        )


class _Program:
    """The operations of one rank, block after block."""

    def __init__(self) -> None:
        self.blocks: list[tuple[_Block, int]] = []  # with their layers
        #: Waits that are not those of a block.
        self.waits: list[Wait] = []
        self.length = self.sent = 0
        #: Collectives that a pass or a unit waits for, and that the update waits for, by their
        #: numbers.
        self.given: dict[Step | _Unit, list[int]] = {}
        self.due: list[int] = []
        #: Units whose gradients are complete on this rank and not yet reduced.
        self.ready: list[_Unit] = []

    def run(self, block: _Block, layer: int = 0) -> None:
        """Append a block."""
        self.blocks.append((block, layer))
        self.length, self.sent = self.length + len(block.rows), self.sent + block.sent

    def send(self, row: int, layer: int = 0) -> int:
        """Launch a collective and return its number."""
        self.run(_Block(np.array([row]), _NOTHING, _NOTHING, 1), layer)
        return self.sent - 1

    def wait(self, *numbers: int) -> None:
        """Go on only when these collectives have ended."""
        self.waits += [Wait(self.length, number) for number in numbers]

    def list_waits(self) -> Waits:
        """All waits, those of blocks first."""
        blocks = [block for block, _ in self.blocks]
        begins = np.cumsum([0, *(len(block.rows) for block in blocks)])[:-1]
        sent_before = np.cumsum([0, *(block.sent for block in blocks)])[:-1]
        counts = [len(block.waiting) for block in blocks]
        waiting = np.concatenate([block.waiting for block in blocks]) + np.repeat(begins, counts)
        awaited = np.concatenate([block.awaited for block in blocks])
        awaited = awaited + np.repeat(sent_before, counts)
        others = Waits.from_rows(self.waits)
        operation = np.concatenate([waiting, others.operation])
        collective = np.concatenate([awaited, others.collective])
        return Waits(operation, collective, np.zeros(len(operation), dtype=bool))


class _Maker:
    """Makes the programs of all stages from one recorded micro-batch of one layer."""

    def __init__(self, model: Transformer, s: Strategy, execution: str | None) -> None:
        # no other stage waits for what could be put off
        if s.pp == 1 and s.schedule == "zero_bubble":
            s = replace(s, schedule="1f1b")
        graph, _, weights = record_micro_batch(model, s, execution)
        self.model, self.s, self.sizes, self.graph, self.table = (
            model,
            s,
            size_micro_batch(model, s),
            graph,
            _Table(graph),
        )
        self.scattered = bool(s.scattered)
        self.weights = {
            region: float(numbers[-1]) for region, numbers in zip(REGIONS, weights, strict=True)
        }
        self.micro, self.owners, self.sharers = (
            int(self.sizes.micro),
            int(s.owners),
            int(self.sizes.sharers),
        )
        #: Blocks by region, phase, and whether they are those of the first micro-batch.
        self.passes = {
            (region, phase, first): self.record(region, phase, first=first)
            for region in REGIONS
            for phase in _PHASES
            for first in (False, True)
        }
        self.updates = [row for row in self.table.find("", "update") if not self.is_exchange(row)]

    def is_exchange(self, row: int) -> bool:
        """Whether an operation belongs to messages of replicas."""
        return self.table.labels[row].module.startswith("exchange")

    def record(self, region: str, phase: str, *, first: bool) -> _Block:
        """The block of a region in a pass, of the first micro-batch or of a later one."""
        table, s, inside = self.table, self.s, region == "layers"
        rows = table.find(region, phase if phase == "forward" else "backward")
        if phase != "forward":
            split = inside and s.schedule == "zero_bubble"
            late = np.array(
                [split and table.labels[row].kernel == KernelKey("gemm", "tn") for row in rows],
                dtype=bool,
            )
            added = np.array([table.labels[row].name == "add_" for row in rows], dtype=bool)
            if self.scattered:
                held = [table.copy(row, "backward", 1.0 / self.owners) for row in rows[added]]
                rows[added] = held
            # gradients of a single micro-batch are added to nothing; those of the first of several
            # too, but to the zeros of buffers where ranks share layers or sequences
            plain = first and (self.micro == 1 or bool(s.alone))
            rows = self.leave_out_sums(rows, added & plain, late == (phase == "weights"))
            if plain and phase == "backward" and s.zero == 1 and self.micro > 1:
                # PyTorch casts the first gradients of those that it adds up
                narrow = self.table.find("exchange.narrow", "update")
                share = self.weights[region] / sum(self.weights.values())
                casts = [self.table.copy(row, "backward", share) for row in narrow]
                rows = np.append(rows, casts)
            rows = rows.astype(int)
        return (
            self.exchange(rows, phase) if inside and phase != "weights" else table.make_block(rows)
        )

    def leave_out_sums(self, rows: np.ndarray, sums: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """The chosen rows without some sums of gradients; the calls without a kernel before these
        are made before the next operation."""
        kept = []
        bare = 0.0
        for row, is_sum, is_chosen in zip(rows.tolist(), sums, chosen, strict=True):
            if not is_chosen:
                continue
            if is_sum:
                bare += self.table.host_calls[row].bare
                continue
            kept.append(self.table.call_before(row, bare) if bare else row)
            bare = 0.0
        return np.array(kept, dtype=int)

    def exchange(self, rows: Array, phase: str) -> _Block:
        """A layer with the messages of ranks that share experts, before it, and sequences, around
        attention."""
        s, m, table, back, waits = (
            self.s,
            self.model,
            self.table,
            phase == "backward",
            dict[int, int](),
        )
        forward = table.find("layers", "forward")
        once = table.find_cores(forward)
        if back and s.checkpoint == "selective":
            rows = np.array(
                [*(table.copy(row, phase) for row in forward[once[0] : once[-1] + 1]), *rows]
            )
        cores, again = table.find_cores(rows), len(once) if back and s.checkpoint != "none" else 0
        found, done = list[int](), 0
        if m.experts and s.ep > 1:
            moved = table.send("all_to_all", phase, "layers.0.mlp", self.sizes.routed, _EXPERTS)
            found = [moved] * (4 if s.checkpoint == "full" and back else 2)
        for own, gradients in ((cores[:again], False), (cores[again:], back)):
            if not own:
                continue
            kernels, before = [*rows[own[0] : own[-1] + 1]], self.share_sequence(phase, gradients)
            found, done = [*found, *rows[done : own[0]]], own[-1] + 1
            gap = len(kernels)
            if s.cp > 1 and not s.ulysses and gap == 1:  # a kernel for each part of the keys
                kernels = [table.copy(kernels[0], phase, 1.0 / s.cp)] * s.cp
            start = len(found) + len(before)
            if not s.ulysses:  # each message on the ring runs beside a kernel
                waits |= {
                    len(found) + n: start + min(gap * (n + 1), len(kernels))
                    for n in range(len(before))
                }
            found += [*before, *kernels, *before[: len(before) * s.ulysses // 3]]
        return table.make_block([*found, *rows[done:]], waits)

    def share_sequence(self, phase: str, gradients: bool) -> list[int]:
        """Messages before attention: queries, keys and values; or keys and values on a ring, with
        their gradients."""
        if self.s.cp == 1:
            return []
        operation, size, count = (
            "send_recv",
            (4.0 if gradients else 2.0) * self.sizes.keys,
            self.s.cp - 1,
        )
        if self.s.ulysses:
            operation, size, count = "all_to_all", self.sizes.swapped, 3
        return [self.table.send(operation, phase, "layers.0.attention", size, _CONTEXT)] * count

    def share(self, program: _Program, unit: _Unit, phase: str) -> list[int]:
        """Gather the weights of a unit before a pass, or reduce its gradients; return the numbers
        of the messages."""
        (region, layer), s, sizes, table, reduces = (
            unit,
            self.s,
            self.sizes,
            self.table,
            phase == "reduce",
        )
        whole = self.weights[region]
        # experts that all replicas hold go with the rest of their layer
        apart = region == "layers" and s.ep > 1
        experts = float(sizes.experts) if apart else 0.0
        name, when = "layers.0" if region == "layers" else region, "backward" if reduces else phase
        operation = "all_gather" if not reduces else "reduce_scatter" if s.zero else "all_reduce"
        itemsize = sizes.summed if reduces else sizes.itemsize
        groups = s.dp * s.cp // self.owners
        sends = [
            (operation, whole - experts, self.owners, _REPLICAS),
            (operation, experts, self.sharers, _ROUTED),
        ]
        if reduces:
            sends.append(
                ("all_reduce", (whole - experts) / (self.owners if s.zero else 1), groups, _ACROSS)
            )
        if self.owners * groups > 1:
            copied = whole * float(sizes.reduced if reduces else sizes.gathered)
            if region == "layers":
                copied += float(sizes.gathered * sizes.reordered)
            [packing] = self.table.find("exchange.whole", "update")
            copy = table.copy(packing, when, copied / sum(self.weights.values()))
            program.run(table.make_block([copy] * (2 if reduces and not s.zero else 1)))
        sent = [
            program.send(table.send(name_, when, name, itemsize * numbers, group), layer)
            for name_, numbers, ranks, group in sends
            if ranks > 1 and numbers
        ]
        program.wait(*sent if not s.overlap else ())
        return sent

    def reduce(self, program: _Program) -> None:
        """Reduce the gradients of all units that are ready."""
        program.due += [
            number for unit in program.ready for number in self.share(program, unit, "reduce")
        ]
        program.ready.clear()

    def list_units(self, place: int) -> list[_Unit]:
        """Units of a chunk, by its position among the chunks of all stages; layers are spread
        evenly."""
        s, count = self.s, self.s.pp * self.s.chunks
        stated = {0: s.first_layers, count - 1: s.last_layers}
        free = [own for own in range(count) if not stated.get(own)]
        each, more = divmod(self.model.layers - sum(stated.values()), max(len(free), 1))
        sizes = [stated.get(own) or each + (free.index(own) < more) for own in range(place + 1)]
        units = [("layers", sum(sizes[:-1]) + layer) for layer in range(sizes[-1])]
        return [("embeddings", 0)] * (place == 0) + units + [("head", 0)] * (place == count - 1)

    def make(self, stage: int) -> _Program:
        """The program of a rank of one stage."""
        s, program = self.s, _Program()
        units = [self.list_units(chunk * s.pp + stage) for chunk in range(s.chunks)]
        steps = list_steps(
            s.schedule, stage, stages=s.pp, micro_batches=self.micro, chunks=s.chunks
        )
        passes = [step for step in steps if step.phase != "weights"]
        following = dict(pairwise(passes))
        # hidden by the first pass
        for unit in [unit for own in units for unit in own] if s.zero == 1 else ():
            program.given[unit] = self.share(program, unit, "forward")
        ahead = s.pp > 1 and (s.chunks > 1 or s.schedule == "gpipe")
        program.given[passes[0]] = self.move(program, passes[0], stage, gives=False)
        for step in steps:
            if ahead and step in following:
                program.given[following[step]] = self.move(
                    program, following[step], stage, gives=False
                )
            if step.phase != "weights":
                program.wait(*program.given.pop(step, ()))
            self.run(program, step, units[step.chunk])
            sent = self.move(program, step, stage, gives=True)
            if self.scattered and step.micro < self.micro - 1:
                self.reduce(program)
                program.wait(*program.due)
                program.due.clear()
            if not ahead and step in following:
                program.given[following[step]] = [
                    *sent,
                    *self.move(program, following[step], stage, gives=False),
                ]
        self.reduce(program)
        program.wait(*program.due)
        self.update(program, [region for own in units for region, _ in own])
        return program

    def update(self, program: _Program, regions: list[str]) -> None:
        """Update the weights of a stage, or the share of them that is this rank's."""
        whole = sum(self.weights[region] for region in regions)
        share = whole / sum(self.weights.values())
        if self.s.zero:  # experts are shared with fewer others
            routed = float(self.sizes.experts) * regions.count("layers") / whole
            share *= (1.0 - routed) / self.owners + routed / self.sharers
        rows = [*self.updates, *self.table.find("exchange.narrow", "update")]
        updates = [self.table.copy(row, "update", share) for row in rows]
        program.run(self.table.make_block(updates))

    def run(self, program: _Program, step: Step, units: list[_Unit]) -> None:
        """Run a pass through the units of a chunk."""
        s, forward, last = self.s, step.phase == "forward", step.micro == self.micro - 1
        gathers = (
            s.zero > (1 if forward else 2)
            and step.phase != "weights"
            and (self.scattered or step.micro == 0)
        )
        order = units if forward else units[::-1]
        if step.phase == "weights":
            order = [unit for unit in order if unit[0] == "layers"]
        for place, unit in enumerate(order):
            for later in order[place : place + 1 + s.overlap] if gathers else ():
                # the ends stay whole
                if later not in program.given and (forward or later[0] == "layers"):
                    program.given[later] = self.share(
                        program, later, "forward" if forward else "backward"
                    )
            program.wait(*program.given.pop(unit, ()))
            program.run(self.passes[unit[0], step.phase, step.micro == 0], unit[1])
            # the host joins before it waits
            if step.phase != "weights" and (s.pp == 1 or unit == order[-1]):
                program.run(self.table.late[step.phase])
            whole = step.phase == (
                "weights" if s.schedule == "zero_bubble" and unit[0] == "layers" else "backward"
            )
            if whole and (last or self.scattered):
                program.ready.append(unit)
                if s.overlap:
                    self.reduce(program)

    def move(self, program: _Program, step: Step, stage: int, *, gives: bool) -> list[int]:
        """Launch the message that a pass sends to another stage (`gives`) or receives; return its
        number, if any."""
        s, place, forward = self.s, step.chunk * self.s.pp + stage, step.phase == "forward"
        way = 1 if forward == gives else -1
        if s.pp == 1 or step.phase == "weights" or not 0 <= place + way < s.pp * s.chunks:
            return []
        border = min(place, place + way) % s.pp
        group = PAIRS + 2 * border + forward
        return [
            program.send(
                self.table.send("send_recv", step.phase, "stages", float(self.sizes.between), group)
            )
        ]

    def finish(self, programs: Sequence[_Program], ranks: int, held: HeldMemory) -> list[Graph]:
        """The graphs of programs, each with the memory of the fullest rank."""
        table, layers = self.table, self.model.layers
        features = Features.from_rows(table.sizes, table.host_calls)
        traffic = np.array(table.traffic)
        graphs = []
        for program in programs:
            rows = np.concatenate([block.rows for block, _ in program.blocks])
            layer_of_block = [layer for _, layer in program.blocks]
            layer = np.repeat(layer_of_block, [len(block.rows) for block, _ in program.blocks])
            # operations of one row have the same label in all micro-batches of a layer
            codes, number = np.unique(rows * layers + layer, return_inverse=True)
            labels = [table.find_label(*divmod(code, layers)) for code in codes.tolist()]
            positions = np.arange(len(rows))
            dtypes: tuple[str, ...] = ()
            if self.graph.dtypes:
                dtypes = tuple(table.dtypes[row] for row in rows.tolist())
            graph = Graph(
                tuple([labels[place] for place in number.tolist()]),
                features.select(rows),
                Accesses(positions, positions, traffic[rows], np.ones(len(rows), dtype=bool)),
                name=self.model.name,
                family=self.model.family,
                dtype=self.model.dtype,
                dtypes=dtypes,
                ranks=ranks,
                waits=program.list_waits(),
                execution=self.graph.execution,
                held=held,
            )
            # the same as those of its labels, of which there are many more
            vars(graph)["classes"] = table.find_classes(rows)
            graphs.append(graph)
        return graphs


def check_strategy(model: Any, s: Strategy) -> Strategy:
    """Check that a strategy is a single one, divides a Transformer, and runs on the event loop;
    else a ValueError."""
    check_type("workload", model, Transformer)
    check_type("strategy", s, Strategy)
    if any(np.ndim(value) for value in vars(s).values()):
        raise ValueError(
            f"strategy is {show(s)}; it must be a single one; predict each alone, or use pk.explore"
        )
    for name, value in (("tiled", s.tiled), ("two_level", s.two_level)):
        if value:
            raise ValueError(
                f"strategy has {name}, which only closed forms know; use pk.explore(strategies=[...])"
            )
    for name, fits in list_fits(model, s).items():
        if not fits:
            raise ValueError(
                f"{s} cannot share {name} of the model, {getattr(model, name)}; take other sizes"
            )
    return s


def state_replicas(model: Transformer, s: Strategy) -> Transformer | None:
    """State a strategy as settings of the model, if it shares nothing but what these say; else
    None."""
    shared = (s.tp, s.pp, s.cp, s.ep, s.chunks)
    shards_of_all = s.shards in (0, s.dp)
    ordinary = s.checkpoint != "selective" and s.schedule != "breadth_first"
    micro_batches = model.batch // (s.dp * s.micro_batch)
    if max(shared) > 1 or not (shards_of_all and ordinary and s.overlap):
        return None
    if micro_batches * model.layers > MOST_PASSES or (model.reduce_dtype and not s.zero):
        return None
    return replace(
        model,
        parallel=PARALLEL[s.zero],
        checkpoint=s.checkpoint == "full",
        accumulate=micro_batches,
        overlap=True,
    )


def make_stages(
    model: Any, platform: Platform, strategy: Strategy, execution: str | None = None
) -> list[Graph]:
    """Make the graphs of all ranks for an iteration of a strategy.

    Parameters
    ----------
    model : Transformer
        The model; its batch is over all ranks.
    platform : Platform
        Where it runs; only the memory of ranks depends on it.
    strategy : Strategy
        A single one.
    execution : str, optional
        ``eager`` or ``compiled``.

    Returns
    -------
    graphs : list of Graph
        One for each rank. Neighbours share layers; then come ranks that share sequences, experts
        and replicas; stages are furthest apart.

    Raises
    ------
    ValueError
        For sizes that the strategy does not divide, for what only closed forms know (`tiled`,
        `two_level`), and for more operations than the event loop takes.
    """
    s, ranks = check_strategy(model, strategy).without_idle_zero(), int(strategy.ranks)
    check_device(platform)
    stated = state_replicas(model, s)
    if stated is not None:
        return execute(stated.graphs(ranks, accelerator=True), execution)
    priced = price_strategies(model, platform, Strategy.stack([s]), execution)
    held = HeldMemory(**{use: float(priced[use][0]) for use in HeldMemory._fields})
    maker, apart = _Maker(model, s, execution), int(s.tp * s.cp * s.dp)
    often = sum(len(maker.passes["layers", phase, False].rows) for phase in _PHASES[:2])
    if (count := often * maker.micro * model.layers) > _MOST:
        fault = f"strategy has {count:,} operations of {maker.micro} micro-batches"
        raise ValueError(
            f"{fault}; the event loop takes {_MOST:,} at most; use pk.explore, whose forms are closed"
        )
    owners = maker.owners
    near = [
        (s.tp, 1),
        (s.cp, s.tp),
        (s.ep, s.tp * s.cp),
        (owners, s.tp),
        (s.dp * s.cp // owners, s.tp * owners),
        (maker.sharers, s.tp * s.ep),
    ]
    groups = tuple(tuple(range(0, count * step, step)) for count, step in near)
    programs = [maker.make(stage) for stage in range(s.pp)]
    graphs = []
    for stage, graph in enumerate(maker.finish(programs, ranks, held)):
        for rank in range(stage * apart, (stage + 1) * apart):
            lines = [range(rank % apart, ranks, apart)[k] for k in range(s.pp)]
            pairs = [
                tuple(sorted(pair)) for pair in zip(lines, [*lines[1:], lines[0]], strict=True)
            ]
            own = graph.with_groups(groups + tuple(pair for pair in pairs for _ in range(2)))
            graphs.append(own)
    return graphs


def find_stages(
    strategy: Strategy,
    workload: Any,
    platform: Platform,
    ranks: int | None,
    plan: Plan | None,
    execution: str | None,
) -> tuple[Transformer, Sequence[Graph], int]:
    """A Transformer with its strategy in its name, the graphs of its ranks, and their number; see
    `resolve_workload`."""
    _, graphs, count = resolve_workload(
        make_stages(workload, platform, strategy, execution), platform, ranks, plan
    )
    named = replace(workload.without_sharing(), name=f"{workload.name}, {strategy}")
    return named, graphs, count
