"""Stages of a strategy for the event loop: the operations of one rank of each stage, micro-batch
after micro-batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import check_type, show
from perfkit.models.experts import DISPATCH
from perfkit.models.partitions import Step, find_schedules, list_steps
from perfkit.platform.platform import Platform
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import PAIRS, record_micro_batch, size_micro_batch
from perfkit.prediction.ranks import resolve_workload
from perfkit.prediction.stage_operations import Block, OperationTable
from perfkit.prediction.stage_programs import Program, Unit
from perfkit.prediction.strategies import check_device, price_strategies
from perfkit.prediction.strategy_records import REGIONS
from perfkit.prediction.tiles import Piece, send_in_tiles
from perfkit.workloads.blocks import PARALLEL
from perfkit.workloads.columns import Accesses, Features, HeldMemory
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import Graph, KernelKey
from perfkit.workloads.operations import CAST_ONCE
from perfkit.workloads.placement import Plan
from perfkit.workloads.stack import STACKS, Stack, name_usual_stacks
from perfkit.workloads.strategy import Strategy, list_fits, spread_chunks
from perfkit.workloads.transformer import MOST_PASSES, Transformer

#: Communicators: ranks that share layers, sequences, experts, and products of an expert
#: (`perfkit.workloads.blocks.SHARING_EXPERT`); replicas, groups of replicas (hybrid sharding), and
#: replicas of experts; and ranks that share experts once more, for messages beside passes. Those of
#: neighbouring stages follow, two for each pair.
_TENSOR, _CONTEXT, _EXPERTS, _EXPERT, _REPLICAS, _ACROSS, _ROUTED, _BESIDE = range(PAIRS)
#: Most operations of all stages [-].
_MOST = 3_000_000
#: Passes: forward, backward, and the gradients of weights that a schedule puts off.
_PHASES = ("forward", "backward", "weights")


class _AttentionRun(NamedTuple):
    """Kernels of attention that follow one another in a pass.

    Parameters
    ----------
    first, last : int
        Positions of the first and of the last one in the pass [-].
    computes_gradients : bool
        Whether they are those of the backward pass, and not computed again.
    """

    first: int
    last: int
    computes_gradients: bool


class _UnitMessage(NamedTuple):
    """A message of weights or gradients of a unit.

    Parameters
    ----------
    operation : str
        The collective.
    numbers : float
        Numbers that each rank holds after a gather, or before a reduction [-].
    ranks : int
        Ranks that take part [-].
    group : int
        Their communicator [-].
    """

    operation: str
    numbers: float
    ranks: int
    group: int


class _StageMaker:
    """Makes the programs of all stages from one recorded micro-batch of one layer."""

    def __init__(
        self,
        model: Transformer,
        platform: Platform,
        s: Strategy,
        execution: str | None,
        *,
        pads_products: bool,
    ) -> None:
        self.schedule = find_schedules(s.schedule)
        self.puts_off_weights = bool(s.puts_off_weights)
        graph, _, weights = record_micro_batch(model, s, execution, pads_products=pads_products)
        self.model = model
        self.s = s
        self.graph = graph
        self.sizes = size_micro_batch(model, s)
        self.table = OperationTable(graph)
        #: How tokens go to experts, and the size of a message of them [B].
        self.dispatch = "all_to_all"
        self.dispatched = float(self.sizes.routed)
        if s.dispatch == "once" and model.experts:
            self.dispatch = DISPATCH
            sent = MessageTimes(platform).size_dispatched(
                np.array([self.sizes.tokens * self.sizes.load]),
                s.ep,
                s.apart_for_experts,
                experts=model.experts,
                top_k=model.top_k,
            )
            self.dispatched = float(sent[0])
        #: Trained numbers of each region on a rank, and of all.
        self.weights = {
            region: float(numbers[-1]) for region, numbers in zip(REGIONS, weights, strict=True)
        }
        self.all_weights = sum(self.weights.values())
        self.scattered = bool(s.scattered)
        self.micro_batches = int(self.sizes.micro)
        #: Ranks that share what ZeRO says, groups of such ranks, and ranks that share experts.
        self.owners = int(s.owners)
        self.groups_of_owners = s.dp * s.cp // self.owners
        self.sharers = int(self.sizes.sharers)
        #: Layers of each chunk, in the order of a forward pass.
        self.layers_of_chunks = self.spread_layers()
        #: Blocks by region, phase, and whether they are those of the first micro-batch.
        self.passes: dict[tuple[str, str, bool], Block] = {}
        for region in REGIONS:
            for phase in _PHASES:
                for first in (False, True):
                    block = self.make_pass(region, phase, first=first)
                    self.passes[region, phase, first] = block
        #: Layers whose tokens go to experts beside another pass, by phase and whether they are those
        #: of the first micro-batch.
        self.beside: dict[tuple[str, bool], Block] = {}
        if self.runs_pairs:
            for phase in ("forward", "backward"):
                for first in (False, True):
                    self.beside[phase, first] = self.make_beside(phase, first=first)
        self.updates = [row for row in self.table.find("", "update") if not self.is_exchange(row)]

    def is_exchange(self, row: int) -> bool:
        """Whether an operation belongs to messages of replicas."""
        return self.table.labels[row].module.startswith("exchange")

    # What a pass through a region runs

    def make_pass(self, region: str, phase: str, *, first: bool) -> Block:
        """The block of a region in a pass, of the first micro-batch or of a later one."""
        if phase == "forward":
            rows = self.list_forward_rows(region, first=first)
        else:
            rows = self.list_backward_rows(region, phase, first=first)
        if region == "layers" and phase != "weights":
            return self.add_exchanges(rows, phase, self.list_expert_messages(phase))
        return self.table.make_block(rows)

    def list_forward_rows(self, region: str, *, first: bool) -> list[int]:
        """Rows of a forward pass; weights in fp8 that are kept are cast in the first one alone."""
        rows = self.table.find(region, "forward")
        if first:
            return rows
        return [row for row in rows if self.table.labels[row].name != CAST_ONCE]

    def make_beside(self, phase: str, *, first: bool) -> Block:
        """The block of a layer in a pass whose tokens go to experts beside another pass."""
        rows = self.list_forward_rows("layers", first=first)
        if phase == "backward":
            rows = self.list_backward_rows("layers", "backward", first=first)
        return self.add_exchanges(rows, phase, [])

    def list_backward_rows(self, region: str, phase: str, *, first: bool) -> list[int]:
        """Rows of a backward pass, or of the gradients of weights that it puts off."""
        table, s = self.table, self.s
        # gradients of a single micro-batch are added to nothing; those of the first of several
        # too, but to the zeros of buffers where ranks share layers or sequences; those of
        # Megatron-LM hold that of a single micro-batch, too
        without_sums = first and not s.buffers and (self.micro_batches == 1 or bool(s.alone))
        rows = []
        calls_of_sums = 0.0
        for row in table.find(region, "backward"):
            if self.is_put_off(region, row) != (phase == "weights"):
                continue
            if table.labels[row].name != "add_":
                # the host still makes the calls without a kernel of sums that are left out
                rows.append(table.call_before(row, calls_of_sums) if calls_of_sums else row)
                calls_of_sums = 0.0
                continue
            sum_of_gradients = row
            if self.scattered:
                sum_of_gradients = table.copy(row, "backward", 1.0 / self.owners)
            if without_sums:
                calls_of_sums += table.host_calls[sum_of_gradients].bare
            else:
                rows.append(sum_of_gradients)
        if without_sums and phase == "backward" and s.zero == 1 and self.micro_batches > 1:
            # PyTorch casts the first gradients of those that it adds up
            share = self.weights[region] / self.all_weights
            for row in table.find("exchange.narrow", "update"):
                rows.append(table.copy(row, "backward", share))
        return rows

    def is_put_off(self, region: str, row: int) -> bool:
        """Whether an operation of a backward pass is run later, with the gradients of weights."""
        if region != "layers" or not self.puts_off_weights:
            return False
        return self.table.labels[row].kernel == KernelKey("gemm", "tn")

    def add_exchanges(self, rows: list[int], phase: str, before: list[int]) -> Block:
        """A layer with some messages before it, those of ranks that share experts, and those of ranks
        that share sequences around attention."""
        if phase == "backward" and self.s.checkpoint == "selective":
            rows = self.list_attention_again(phase) + rows
        ordered = [*before]
        waits: dict[int, int] = {}
        begin = 0
        for run in self.find_attention_runs(rows, phase):
            ordered += rows[begin : run.first]
            kernels = rows[run.first : run.last + 1]
            if self.s.ulysses:
                messages = self.list_swaps(phase)
                ordered += messages + kernels + messages[:1]
            else:
                messages = self.list_ring_messages(phase, gradients=run.computes_gradients)
                kernels_of_part = len(kernels)
                kernels = self.share_on_ring(kernels, phase)
                # each message on the ring runs beside the kernels of a part of the keys
                first_kernel = len(ordered) + len(messages)
                for number in range(len(messages)):
                    kernels_before = min(kernels_of_part * (number + 1), len(kernels))
                    waits[len(ordered) + number] = first_kernel + kernels_before
                ordered += messages + kernels
            begin = run.last + 1
        ordered += rows[begin:]
        if self.s.tiled and self.s.tp > 1:
            return self.send_in_tiles(ordered, waits)
        return self.table.make_block(ordered, waits)

    def send_in_tiles(self, rows: list[int], waits: dict[int, int]) -> Block:
        """A pass through a layer whose messages among ranks that share it are sent in tiles, as many
        as there are ranks."""
        tile = 1.0 / self.s.tp
        tiled = send_in_tiles([self.table.labels[row] for row in rows], waits)
        placed_rows = []
        for placed in tiled.operations:
            row = rows[placed.position]
            if placed.piece is Piece.TILE:
                row = self.table.take_part(row, tile, is_first=placed.is_first)
            elif placed.piece is Piece.OTHERS:
                row = self.table.take_part(row, 1.0 - tile, is_first=placed.is_first)
            placed_rows.append(row)
        return self.table.make_block(placed_rows, tiled.waits)

    def list_attention_again(self, phase: str) -> list[int]:
        """Attention between its projections, computed again in the backward pass."""
        forward = self.table.find("layers", "forward")
        positions = self.table.find_attention(forward)
        again = forward[positions[0] : positions[-1] + 1]
        return [self.table.copy(row, phase) for row in again]

    def find_attention_runs(self, rows: list[int], phase: str) -> list[_AttentionRun]:
        """Kernels of attention in a pass: those that are computed again, and those of the pass."""
        positions = self.table.find_attention(rows)
        again = 0
        if phase == "backward" and self.s.checkpoint != "none":
            again = len(self.table.find_attention(self.table.find("layers", "forward")))
        runs = []
        if positions[:again]:
            runs.append(_AttentionRun(positions[0], positions[again - 1], False))
        if positions[again:]:
            runs.append(_AttentionRun(positions[again], positions[-1], phase == "backward"))
        return runs

    def share_on_ring(self, kernels: list[int], phase: str) -> list[int]:
        """Kernels of attention of ranks that share sequences: a single one runs once for each part
        of the keys."""
        if self.s.cp == 1 or len(kernels) > 1:
            return kernels
        part = self.table.copy(kernels[0], phase, 1.0 / self.s.cp)
        return [part for _ in range(self.s.cp)]

    def list_expert_messages(self, phase: str) -> list[int]:
        """Messages of tokens to their experts and back, once more where layers are computed
        again."""
        if not self.model.experts or self.s.ep == 1:
            return []
        message = self.send_tokens(phase, _EXPERTS)
        if self.s.checkpoint == "full" and phase == "backward":
            return [message, message, message, message]
        return [message, message]

    def send_tokens(self, phase: str, group: int) -> int:
        """Row of a message of tokens to their experts or back."""
        return self.table.send(self.dispatch, phase, "layers.0.mlp", self.dispatched, group)

    @property
    def runs_pairs(self) -> bool:
        """Whether the forward pass of a micro-batch runs beside the backward pass of the one before,
        while tokens of both go to experts."""
        shares = bool(self.model.experts) and self.s.ep > 1
        return shares and bool(self.s.overlap_experts) and self.micro_batches > 1

    def list_swaps(self, phase: str) -> list[int]:
        """Messages before attention that exchange tokens for heads: queries, keys and values."""
        if self.s.cp == 1:
            return []
        message = self.table.send(
            "all_to_all", phase, "layers.0.attention", self.sizes.swapped, _CONTEXT
        )
        return [message, message, message]

    def list_ring_messages(self, phase: str, *, gradients: bool) -> list[int]:
        """Messages of keys and values on a ring, with their gradients."""
        tensors = 4.0 if gradients else 2.0
        if self.s.cp == 1:
            return []
        message = self.table.send(
            "send_recv", phase, "layers.0.attention", tensors * self.sizes.keys, _CONTEXT
        )
        return [message for _ in range(self.s.cp - 1)]

    # What replicas exchange

    def count_experts(self, unit: Unit) -> float:
        """Numbers of a unit that fewer ranks share than the rest [-]. Experts that all replicas
        hold go with the rest of their layer."""
        if unit.region == "layers" and self.s.shares_experts:
            return float(self.sizes.experts)
        return 0.0

    def gather_weights(self, program: Program, unit: Unit, phase: str) -> list[int]:
        """Gather the weights of a unit before a pass; return the numbers of the messages."""
        experts = self.count_experts(unit)
        others = self.weights[unit.region] - experts
        messages = [
            _UnitMessage("all_gather", others, self.owners, _REPLICAS),
            _UnitMessage("all_gather", experts, self.sharers, _ROUTED),
        ]
        copied = self.weights[unit.region] * float(self.sizes.gathered)
        self.copy_unit(program, unit, phase, copied, copies=1)
        return self.send_unit(program, unit, phase, messages, self.sizes.itemsize)

    def reduce_gradients(self, program: Program, unit: Unit) -> list[int]:
        """Reduce the gradients of a unit; return the numbers of the messages."""
        experts = self.count_experts(unit)
        others = self.weights[unit.region] - experts
        if self.s.zero:
            operation, across, copies = "reduce_scatter", others / self.owners, 1
        else:
            operation, across, copies = "all_reduce", others, 2
        messages = [
            _UnitMessage(operation, others, self.owners, _REPLICAS),
            _UnitMessage(operation, experts, self.sharers, _ROUTED),
            _UnitMessage("all_reduce", across, self.groups_of_owners, _ACROSS),
        ]
        copied = self.weights[unit.region] * float(self.sizes.reduced)
        self.copy_unit(program, unit, "backward", copied, copies=copies)
        return self.send_unit(program, unit, "backward", messages, self.sizes.summed)

    def copy_unit(
        self, program: Program, unit: Unit, phase: str, numbers: float, *, copies: int
    ) -> None:
        """Copy the numbers of a unit into its messages, or out of them."""
        if self.owners * self.groups_of_owners == 1 or self.s.buffers:
            return
        if unit.region == "layers":
            numbers += float(self.sizes.gathered * self.sizes.reordered)
        [packing] = self.table.find("exchange.whole", "update")
        copy = self.table.copy(packing, phase, numbers / self.all_weights)
        program.run(self.table.make_block([copy for _ in range(copies)]))

    def send_unit(
        self,
        program: Program,
        unit: Unit,
        phase: str,
        messages: Sequence[_UnitMessage],
        itemsize: int,
    ) -> list[int]:
        """Launch the messages of a unit, and wait for each if nothing overlaps; return their
        numbers."""
        module = "layers.0" if unit.region == "layers" else unit.region
        sent = []
        for message in messages:
            if message.ranks == 1 or not message.numbers:
                continue
            nbytes = itemsize * message.numbers
            row = self.table.send(message.operation, phase, module, nbytes, message.group)
            sent.append(program.send(row, unit.layer))
            if not self.s.overlap:
                program.wait(sent[-1:])
        return sent

    def reduce_complete(self, program: Program) -> None:
        """Reduce the gradients of all units that are complete."""
        for unit in program.complete:
            program.before_update += self.reduce_gradients(program, unit)
        program.complete.clear()

    # The program of a stage

    def spread_layers(self) -> list[int]:
        """Layers of each chunk, in the order of a forward pass, see `spread_chunks`."""
        spread = spread_chunks(self.model.layers, self.s)
        layers = []
        for chunk in range(self.s.chunks):
            for stage in range(self.s.pp):
                layers.append(int(spread.count_layers(self.s, stage, chunk)))
        return layers

    def list_units(self, chunk: int) -> list[Unit]:
        """Units of a chunk, by its position among the chunks of all stages."""
        first_layer = sum(self.layers_of_chunks[:chunk])
        units = []
        if chunk == 0:
            units.append(Unit("embeddings", 0))
        for layer in range(self.layers_of_chunks[chunk]):
            units.append(Unit("layers", first_layer + layer))
        if chunk == len(self.layers_of_chunks) - 1:
            units.append(Unit("head", 0))
        return units

    def make(self, stage: int) -> Program:
        """The program of a rank of one stage."""
        s = self.s
        program = Program()
        units_of_chunks = [self.list_units(chunk * s.pp + stage) for chunk in range(s.chunks)]
        all_units = [unit for units in units_of_chunks for unit in units]
        steps = list_steps(
            s.schedule, stage, stages=s.pp, micro_batches=self.micro_batches, chunks=s.chunks
        )
        passes = [step for step in steps if step.phase != "weights"]
        if not self.puts_off_weights:
            steps = passes
        following = dict(pairwise(passes))
        if s.zero == 1:  # hidden by the first pass
            for unit in all_units:
                program.before_unit[unit] = self.gather_weights(program, unit, "forward")
        receives_ahead = s.pp > 1 and self.schedule.takes_messages_ahead(s.chunks)
        program.before_pass[passes[0]] = self.receive(program, passes[0], stage)
        if self.runs_pairs:  # on a single stage
            self.run_pairs(program, passes, all_units)
            steps = []
        for step in steps:
            next_pass = following.get(step)
            if receives_ahead and next_pass is not None:
                program.before_pass[next_pass] = self.receive(program, next_pass, stage)
            program.wait(program.before_pass.pop(step, []))
            self.run_pass(program, step, units_of_chunks[step.chunk])
            sent = self.send(program, step, stage)
            if self.scattered and step.micro < self.micro_batches - 1:
                self.end_reductions(program)
            if next_pass is not None and not receives_ahead:
                received = self.receive(program, next_pass, stage)
                program.before_pass[next_pass] = sent + received
        self.end_reductions(program)
        self.update(program, all_units)
        return program

    def end_reductions(self, program: Program) -> None:
        """Reduce what is complete, and wait for all reductions."""
        self.reduce_complete(program)
        program.wait(program.before_update)
        program.before_update.clear()

    def update(self, program: Program, units: list[Unit]) -> None:
        """Update the weights of a stage, or the share of them that is this rank's."""
        regions = [unit.region for unit in units]
        weights = sum(self.weights[region] for region in regions)
        share = weights / self.all_weights
        if self.s.zero:  # experts are shared with fewer others
            experts = float(self.sizes.experts) * regions.count("layers") / weights
            share *= (1.0 - experts) / self.owners + experts / self.sharers
        rows = [*self.updates, *self.table.find("exchange.narrow", "update")]
        updates = [self.table.copy(row, "update", share) for row in rows]
        program.run(self.table.make_block(updates))

    def run_pass(self, program: Program, step: Step, units: list[Unit]) -> None:
        """Run a pass through the units of a chunk."""
        order = self.order_units(step, units)
        for position, unit in enumerate(order):
            self.begin_unit(program, step, order, position)
            block = self.passes[unit.region, step.phase, step.micro == 0]
            program.run(block, unit.layer)
            self.end_unit(program, step, order, position)

    def begin_unit(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Gather the weights of a unit of a pass and of the next one, and wait for its own."""
        gathered_ahead = 1 if self.s.overlap else 0
        if self.gathers_weights(step):
            for later in order[position : position + 1 + gathered_ahead]:
                self.gather_before(program, step, later)
        program.wait(program.before_unit.pop(order[position], []))

    def end_unit(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Add the host of a unit, and reduce its gradients if they are complete."""
        unit = order[position]
        # the host joins before it waits
        if step.phase != "weights" and (self.s.pp == 1 or unit == order[-1]):
            program.run(self.table.host_delays[step.phase])
        if self.completes_gradients(step, unit):
            program.complete.append(unit)
            if self.s.overlap:
                self.reduce_complete(program)

    def run_pairs(self, program: Program, passes: Sequence[Step], units: list[Unit]) -> None:
        """Run all passes of a single stage: the first forward pass, each other one beside the
        backward pass of the micro-batch before, and the last backward pass."""
        forward = [step for step in passes if step.phase == "forward"]
        backward = [step for step in passes if step.phase == "backward"]
        self.run_pass(program, forward[0], units)
        for ahead, back in zip(forward[1:], backward[:-1], strict=True):
            self.run_pair(program, ahead, back, units)
            if self.scattered:
                self.end_reductions(program)
        self.run_pass(program, backward[-1], units)

    def run_pair(self, program: Program, forward: Step, backward: Step, units: list[Unit]) -> None:
        """Run a forward pass beside a backward pass. Tokens of one go to experts and come back while
        the kernels of the other run through a layer."""
        order, reverse = self.order_units(forward, units), self.order_units(backward, units)
        for position, (unit, other) in enumerate(zip(order, reverse, strict=True)):
            self.begin_unit(program, backward, reverse, position)
            self.begin_unit(program, forward, order, position)
            if unit.region == other.region == "layers":
                ahead = self.send_beside(program, "forward", unit)
                program.run(self.beside["backward", backward.micro == 0], other.layer)
                back = self.send_beside(program, "backward", other)
                program.wait(ahead)
                program.run(self.beside["forward", forward.micro == 0], unit.layer)
                program.wait(back)
            else:
                program.run(self.passes[other.region, "backward", backward.micro == 0])
                program.run(self.passes[unit.region, "forward", forward.micro == 0])
            self.end_unit(program, backward, reverse, position)
            self.end_unit(program, forward, order, position)

    def send_beside(self, program: Program, phase: str, unit: Unit) -> list[int]:
        """Launch the messages of tokens of a layer to their experts and back."""
        row = self.send_tokens(phase, _BESIDE)
        return [program.send(row, unit.layer) for _ in range(2)]

    def order_units(self, step: Step, units: list[Unit]) -> list[Unit]:
        """The units that a pass runs through, in its order."""
        if step.phase == "forward":
            return units
        backward = units[::-1]
        if step.phase == "weights":
            return [unit for unit in backward if unit.region == "layers"]
        return backward

    def gathers_weights(self, step: Step) -> bool:
        """Whether a pass needs weights that no pass before it has gathered."""
        if step.phase == "weights":
            return False
        needed_by_zero = 2 if step.phase == "forward" else 3
        return self.s.zero >= needed_by_zero and (self.scattered or step.micro == 0)

    def gather_before(self, program: Program, step: Step, unit: Unit) -> None:
        """Gather the weights of a unit for a pass, if they are not on their way. In the backward
        pass the ends are still whole."""
        if unit in program.before_unit:
            return
        if step.phase == "forward" or unit.region == "layers":
            program.before_unit[unit] = self.gather_weights(program, unit, step.phase)

    def completes_gradients(self, step: Step, unit: Unit) -> bool:
        """Whether the gradients of a unit are complete after a pass and have to be reduced."""
        last_phase = "backward"
        if self.puts_off_weights and unit.region == "layers":
            last_phase = "weights"
        is_reduced = self.scattered or step.micro == self.micro_batches - 1
        return step.phase == last_phase and is_reduced

    def send(self, program: Program, step: Step, stage: int) -> list[int]:
        """Launch the message that a pass sends to another stage; return its number, if any."""
        return self._pass_on(program, step, stage, 1 if step.phase == "forward" else -1)

    def receive(self, program: Program, step: Step, stage: int) -> list[int]:
        """Launch the message that a pass receives from another stage; return its number, if
        any."""
        return self._pass_on(program, step, stage, -1 if step.phase == "forward" else 1)

    def _pass_on(self, program: Program, step: Step, stage: int, way: int) -> list[int]:
        """Launch the message of a pass between its chunk and the next one (`way` 1) or the one
        before (-1); return its number, if there is such a chunk."""
        s = self.s
        chunk = step.chunk * s.pp + stage
        neighbour = chunk + way
        if s.pp == 1 or step.phase == "weights" or not 0 <= neighbour < s.pp * s.chunks:
            return []
        border = min(chunk, neighbour) % s.pp
        group = PAIRS + 2 * border
        if step.phase == "forward":
            group += 1
        between = float(self.sizes.between)
        return [program.send(self.table.send("send_recv", step.phase, "stages", between, group))]

    # Graphs

    def make_graphs(
        self, programs: Sequence[Program], ranks: int, held: HeldMemory
    ) -> Iterator[Graph]:
        """The graphs of programs, each with the memory of the fullest rank."""
        table, layers = self.table, self.model.layers
        features = Features.from_rows(table.sizes, table.host_calls)
        traffic = np.array(table.traffic)
        for program in programs:
            rows = program.list_rows()
            # operations of one row have the same label in all micro-batches of a layer
            codes, number = np.unique(rows * layers + program.list_layers(), return_inverse=True)
            labels = [table.find_label(*divmod(code, layers)) for code in codes.tolist()]
            positions = np.arange(len(rows))
            # each operation writes a tensor of its own
            writes = np.ones(len(rows), dtype=bool)
            dtypes: tuple[str, ...] = ()
            if self.graph.dtypes:
                dtypes = tuple(table.dtypes[row] for row in rows.tolist())
            graph = Graph(
                tuple([labels[label] for label in number.tolist()]),
                features.select(rows),
                Accesses(positions, positions, traffic[rows], writes),
                name=self.model.name,
                family=self.model.family,
                dtype=self.model.dtype,
                dtypes=dtypes,
                ranks=ranks,
                algorithms=self.list_algorithms(),
                waits=program.list_waits(),
                execution=self.graph.execution,
                held=held,
            )
            # the same as those of its labels, of which there are many more
            vars(graph)["classes"] = table.find_classes(rows)
            yield graph

    def list_algorithms(self) -> dict[int, str]:
        """Algorithms of communicators, where the library does not choose."""
        if not self.s.two_level:
            return {}
        return {_EXPERTS: "two_level", _BESIDE: "two_level"}

    def list_communicators(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator of the first rank, in the order of their numbers."""
        s = self.s
        shapes = {
            _TENSOR: (s.tp, 1),
            _CONTEXT: (s.cp, s.tp),
            _EXPERTS: (s.ep, int(s.apart_for_experts)),
            _BESIDE: (s.ep, int(s.apart_for_experts)),
            _EXPERT: (int(s.ranks_of_expert), 1),
            _REPLICAS: (self.owners, s.tp),
            _ACROSS: (self.groups_of_owners, s.tp * self.owners),
            _ROUTED: (self.sharers, int(s.ranks_of_expert) * s.ep),
        }
        communicators = []
        for number in range(PAIRS):
            ranks, apart = shapes[number]
            communicators.append(tuple(range(0, ranks * apart, apart)))
        return tuple(communicators)

    def count_operations(self) -> int:
        """Operations of both passes of all layers, in all micro-batches [-]."""
        operations = 0
        for phase in ("forward", "backward"):
            operations += len(self.passes["layers", phase, False].rows)
        return operations * self.micro_batches * self.model.layers


def _list_neighbours(rank: int, s: Strategy) -> list[tuple[int, int]]:
    """Pairs of neighbouring stages on the way of a rank, the last and the first one behind them."""
    ranks_of_stage = int(s.tp * s.cp * s.dp)
    of_stages = [rank % ranks_of_stage + stage * ranks_of_stage for stage in range(s.pp)]
    pairs = []
    for stage in range(s.pp):
        here, there = of_stages[stage], of_stages[(stage + 1) % s.pp]
        pairs.append((min(here, there), max(here, there)))
    return pairs


def check_strategy(model: Any, s: Strategy) -> Strategy:
    """Check that a strategy is a single one and divides a Transformer; else a ValueError."""
    check_type("workload", model, Transformer)
    check_type("strategy", s, Strategy)
    if any(np.ndim(value) for value in vars(s).values()):
        raise ValueError(
            f"strategy is {show(s)}; it must be a single one; predict each alone, or use pk.explore"
        )
    if s.overlap_experts and s.pp > 1:
        raise ValueError(
            "strategy has overlap_experts with several stages, which only closed forms know; "
            "use pk.explore(strategies=[...])"
        )
    for name, fits in list_fits(model, s).items():
        if not fits:
            shown = replace(s, buffers=False)
            raise ValueError(
                f"{shown} cannot share {name} of the model, {getattr(model, name)}; take other sizes"
            )
    return s


def state_replicas(model: Transformer, s: Strategy) -> Transformer | None:
    """State a strategy as settings of the model, if it shares nothing but what these say; else
    None."""
    if s.buffers:
        return None
    shared = (s.tp, s.pp, s.cp, s.ep, s.etp, s.chunks)
    shards_of_all = s.shards in (0, s.dp)
    ordinary = s.checkpoint != "selective" and not find_schedules(s.schedule).runs_breadth_first
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
        fused_accumulation=False,  # sums of whole replicas are no buffers
        overlap=True,
    )


def make_stages(
    model: Any,
    platform: Platform,
    strategy: Strategy,
    execution: str | None = None,
    stack: Stack | None = None,
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
        ``eager``, ``compiled`` or ``graphs``.
    stack : Stack, optional
        The software, whose rules say what is held in memory and whether compiled products are
        padded; by default the usual one.

    Returns
    -------
    graphs : list of Graph
        One for each rank. Neighbours share layers; then come ranks that share sequences, experts
        and replicas; stages are furthest apart.

    Raises
    ------
    ValueError
        For sizes that the strategy does not divide, for what only closed forms know
        (`overlap_experts` with several stages), and for more operations than the event loop takes.
    """
    s = check_strategy(model, strategy).without_idle_zero()
    ranks = int(strategy.ranks)
    check_device(platform)
    stated = state_replicas(model, s)
    software = stack
    if software is None:
        [usual] = name_usual_stacks(model, strategy, execution)
        software = STACKS[usual]
    pads_products = software.pads_products
    of_megatron = stack is not None and stack.memory == "megatron" and not s.replicated
    graphs: list[Graph] = []
    if stated is not None:
        recorded = stated.graphs(ranks, accelerator=True)
        graphs = execute(recorded, execution, pads_products=pads_products)
    if stated is not None and not of_megatron:
        return graphs
    priced = price_strategies(
        model, platform, Strategy.stack([s]), execution, near=0.0, stack=stack
    )
    held = HeldMemory(**{use: float(priced[use][0]) for use in HeldMemory._fields})
    if stated is not None:
        return [replace(graph, held=held) for graph in graphs]
    maker = _StageMaker(model, platform, s, execution, pads_products=pads_products)
    operations = maker.count_operations()
    if operations > _MOST:
        fault = f"strategy has {operations:,} operations of {maker.micro_batches} micro-batches"
        raise ValueError(
            f"{fault}; the event loop takes {_MOST:,} at most; use pk.explore, whose forms are closed"
        )
    programs = [maker.make(stage) for stage in range(s.pp)]
    communicators = maker.list_communicators()
    ranks_of_stage = ranks // s.pp
    for stage, graph in enumerate(maker.make_graphs(programs, ranks, held)):
        for rank in range(stage * ranks_of_stage, (stage + 1) * ranks_of_stage):
            groups = list(communicators)
            for pair in _list_neighbours(rank, s):
                groups += [pair, pair]  # backward and forward
            graphs.append(graph.with_groups(tuple(groups)))
    return graphs


def find_stages(
    strategy: Strategy,
    workload: Any,
    platform: Platform,
    ranks: int | None,
    plan: Plan | None,
    execution: str | None,
    stack: Stack | None = None,
) -> tuple[Transformer, Sequence[Graph], int]:
    """A Transformer with its strategy in its name, the graphs of its ranks, and their number; see
    `resolve_workload`."""
    _, graphs, count = resolve_workload(
        make_stages(workload, platform, strategy, execution, stack), platform, ranks, plan
    )
    shown = replace(strategy, buffers=False)  # a fact of the stack, which says it
    named = replace(workload.without_sharing(), name=f"{workload.name}, {shown}")
    return named, graphs, count
