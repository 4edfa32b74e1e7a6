"""Stages of a strategy for the event loop: the operations of one rank of each stage, micro-batch
after micro-batch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import check_type, show
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.models.offload import FROM_HOST, HOST_UPDATE, TO_HOST
from perfkit.models.optimizers import find_optimizer
from perfkit.models.partitions import find_schedules, list_steps
from perfkit.models.v_schedules import Step, find_place, find_position
from perfkit.platform.platform import Platform
from perfkit.prediction.micro_batches import (
    PAIRS,
    count_shards,
    record_micro_batch,
    shortens_first_layer,
)
from perfkit.prediction.offload import note_offload, size_offload
from perfkit.prediction.ranks import resolve_workload
from perfkit.prediction.stage_blocks import GROUP_NAMES, Communicator, KindOfPass
from perfkit.prediction.stage_operations import OperationTable
from perfkit.prediction.stage_programs import BOTH_ENDS, Program, Unit
from perfkit.prediction.stage_shards import IN_HOOK, UnitRows
from perfkit.prediction.strategies import check_device
from perfkit.prediction.strategy_case import check_checkpoints_of, make_case
from perfkit.prediction.strategy_memory import keep_by_layer, measure_strategies
from perfkit.prediction.strategy_offload import measure_host
from perfkit.prediction.strategy_records import map_arrays
from perfkit.workloads.blocks import PARALLEL
from perfkit.workloads.columns import ONE_CALL, Accesses, Features, HeldMemory, HostCalls
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import Graph
from perfkit.workloads.layer_kinds import list_kinds
from perfkit.workloads.placement import Plan
from perfkit.workloads.stack import STACKS, Stack, apply_stack, name_usual_stacks
from perfkit.workloads.strategy import (
    Strategy,
    check_strategy_type,
    spread_chunks,
)
from perfkit.workloads.strategy_fits import check_fits
from perfkit.workloads.transformer import MOST_PASSES, MOST_RECORDED, Transformer

#: Communicators of a rank and its host, behind those of stages: updates, copies of weights that come
#: back, and copies of activations [-].
_HOST_GROUPS = 3
#: Most operations of all stages [-].
_MOST = 3_000_000


def _name_module(unit: Unit) -> str:
    """The module of the operations of a unit."""
    if unit.region == "layers":
        return "layers.0"
    if unit == BOTH_ENDS:
        return "embeddings"
    return unit.region


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


class LayerForm(NamedTuple):
    """Layers that are of one kind and compute the same again.

    Parameters
    ----------
    model : Transformer
        The model as if all of its layers were such.
    s : Strategy
        The strategy, with what these layers compute again.
    layers : tuple of int
        Which layers of the model are, from 0 [-].
    is_first_layer : bool
        Whether they are the first one, which has no gradient of its input behind frozen embeddings.
    """

    model: Transformer
    s: Strategy
    layers: tuple[int, ...]
    is_first_layer: bool = False


def list_forms(model: Transformer, s: Strategy, again: Collection[int]) -> list[LayerForm]:
    """List the forms of the layers of a model.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        A single one.
    again : collection of int
        Numbers of the layers that compute again what `s.checkpoint` says [-].

    Returns
    -------
    forms : list of LayerForm
        Of the kind of most layers first; together they hold each layer once.
    """
    plain = replace(s, checkpoint="none", checkpoint_layers=EVERY_LAYER, checkpoint_group=1)
    forms = []
    for kind in list_kinds(model):
        for strategy, is_again in ((s, True), (plain, False)):
            layers = tuple(layer for layer in kind.layers if (layer in again) == is_again)
            if shortens_first_layer(model) and 0 in layers:
                forms.append(LayerForm(kind.model, strategy, (0,), is_first_layer=True))
                layers = layers[1:]
            if layers:
                forms.append(LayerForm(kind.model, strategy, layers))
    return sorted(forms, key=lambda form: form.is_first_layer)


def count_ways(s: Strategy) -> int:
    """Count the communicators of a border between two stages.

    Parameters
    ----------
    s : Strategy
        A single one.

    Returns
    -------
    ways : int
        Backward and forward, in a V of each of both chunks: their messages come in another order on
        either side [-].
    """
    return 4 if find_schedules(s.schedule).is_v_shaped else 2


def _group_pairs(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps in their order, those of a pair together."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and groups[-1][-1].in_pair:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


class _StageMaker:
    """Makes the programs of all stages from one recorded micro-batch of each form of layers."""

    def __init__(
        self,
        model: Transformer,
        platform: Platform,
        s: Strategy,
        execution: str | None,
        *,
        pads_products: bool,
        kept: float = 0.0,
    ) -> None:
        self.schedule = find_schedules(s.schedule)
        self.puts_off_weights = bool(s.puts_off_weights)
        self.model = model
        self.s = s
        #: Layers of each chunk, in the order of a forward pass.
        self.layers_of_chunks = self.spread_layers()
        kinds = list_forms(model, s, self.list_layers_again())
        recorded = [
            record_micro_batch(
                kind.model,
                kind.s,
                execution,
                pads_products=pads_products,
                is_first_layer=kind.is_first_layer,
            )
            for kind in kinds
        ]
        self.graph = recorded[0].graph
        self.table = OperationTable([micro_batch.graph for micro_batch in recorded])
        #: What passes run, by the kind of their layers.
        self.kinds = [
            KindOfPass(kind.model, platform, kind.s, self.table, number, recorded[number])
            for number, kind in enumerate(kinds)
        ]
        self.most_common = self.kinds[0]
        self.kind_of_layer = {
            layer: self.kinds[number] for number, kind in enumerate(kinds) for layer in kind.layers
        }
        self.sizes = self.most_common.sizes
        self.offload = size_offload(model, s, self.sizes, platform)
        #: What a layer keeps that goes to the host, for all ranks of its link [B].
        self.offloaded_activations = float(self.offload.activation) * kept
        #: Layers that another one of their group follows.
        self.followed_in_group = self.list_followed()
        self.scattered = bool(s.scattered)
        self.micro_batches = int(self.sizes.micro)
        #: Ranks that share what ZeRO says, groups of such ranks, and ranks that share experts.
        self.owners = int(s.owners)
        self.groups_of_owners = s.dp * s.cp // self.owners
        self.sharers = int(self.sizes.sharers)
        self.updates = []
        for row in self.table.find("", "update"):
            if not self.table.labels[row].module.startswith("exchange"):
                self.updates.append(row)

    def list_layers_again(self) -> set[int]:
        """Numbers of the layers that compute again what `Strategy.checkpoint` says: the first ones of
        each chunk."""
        numbers: set[int] = set()
        first_layer = 0
        for layers in self.layers_of_chunks:
            again = min(layers, self.s.checkpoint_layers)
            numbers.update(range(first_layer, first_layer + again))
            first_layer += layers
        return numbers

    def list_followed(self) -> set[int]:
        """Numbers of the layers that hand their result on to another layer of their group, see
        `Strategy.checkpoint_group`."""
        followed: set[int] = set()
        first_layer = 0
        for layers in self.layers_of_chunks:
            for number in range(layers):
                is_last = (number + 1) % self.s.checkpoint_group == 0 or number + 1 == layers
                if not is_last:
                    followed.add(first_layer + number)
            first_layer += layers
        return followed

    def find_kind(self, unit: Unit) -> KindOfPass:
        """What passes through a unit run."""
        if unit.region != "layers":
            return self.most_common
        return self.kind_of_layer[unit.layer]

    def count_weights(self, unit: Unit) -> float:
        """Numbers of the weights of a unit [-]."""
        return self.find_kind(unit).weights[unit.region]

    def count_sent(self, unit: Unit) -> float:
        """Numbers that a gather of the weights of a unit sends, in the format of layers [-]."""
        return self.find_kind(unit).sent[unit.region]

    def count_trained(self, unit: Unit) -> float:
        """Trained numbers of a unit [-]."""
        return self.find_kind(unit).trained[unit.region]

    @property
    def runs_pairs(self) -> bool:
        """Whether the forward pass of a micro-batch runs beside the backward pass of the one before,
        while tokens of both go to experts."""
        shares = bool(self.model.experts) and self.s.ep > 1
        return shares and bool(self.s.overlap_experts) and self.micro_batches > 1

    # What replicas exchange

    def count_experts(self, unit: Unit) -> float:
        """Numbers of a unit that fewer ranks share than the rest [-]. Experts that all replicas
        hold go with the rest of their layer."""
        if unit.region == "layers" and self.s.shares_experts:
            return float(self.find_kind(unit).sizes.experts)
        return 0.0

    def gather_weights(self, program: Program, unit: Unit, phase: str) -> list[int]:
        """Gather the weights of a unit before a pass; return the numbers of the messages."""
        experts = self.count_experts(unit)
        others = self.count_sent(unit) - experts
        messages = [
            _UnitMessage("all_gather", others, self.owners, Communicator.REPLICAS),
            _UnitMessage("all_gather", experts, self.sharers, Communicator.ROUTED),
        ]
        copied = self.count_sent(unit) * float(self.sizes.gathered)
        self.copy_unit(program, unit, phase, copied, copies=1)
        nbytes = float(self.offload.shard) * self.count_shard(unit)
        copies = self.copy_shard(program, unit, phase, FROM_HOST, nbytes)
        return copies + self.send_unit(program, unit, phase, messages, self.sizes.itemsize)

    def reduce_gradients(self, program: Program, unit: Unit) -> list[int]:
        """Reduce the gradients of a unit; return the numbers of the messages."""
        experts = self.count_experts(unit)
        others = self.count_trained(unit) - experts
        if self.s.zero:
            operation, across, copies = "reduce_scatter", others / self.owners, 1
        else:
            operation, across, copies = "all_reduce", others, 2
        messages = [
            _UnitMessage(operation, others, self.owners, Communicator.REPLICAS),
            _UnitMessage(operation, experts, self.sharers, Communicator.ROUTED),
            _UnitMessage("all_reduce", across, self.groups_of_owners, Communicator.ACROSS),
        ]
        copied = self.count_trained(unit) * float(self.sizes.reduced)
        self.copy_unit(program, unit, "backward", copied, copies=copies)
        sent = self.send_unit(program, unit, "backward", messages, self.sizes.summed)
        return sent + self.offload_gradients(program, unit)

    def count_shard(self, unit: Unit) -> float:
        """Numbers of a unit that this rank updates [-]."""
        experts = self.count_experts(unit)
        weights = self.count_weights(unit)
        return float(count_shards(weights, experts, owners=self.owners, sharers=self.sharers))

    def offload_gradients(self, program: Program, unit: Unit) -> list[int]:
        """Copy reduced gradients of a unit to the host, behind their reduction; return the number of
        the copy, if there is one."""
        nbytes = float(self.offload.gradient) * self.count_shard(unit)
        return self.copy_shard(program, unit, "backward", TO_HOST, nbytes)

    def copy_shard(
        self, program: Program, unit: Unit, phase: str, operation: str, nbytes: float
    ) -> list[int]:
        """Copy a shard of a unit to the host or from it, in the queue of its replicas; return the
        number of the copy, if there is one."""
        if not nbytes:
            return []
        module = _name_module(unit)
        row = self.table.send(operation, phase, module, nbytes, Communicator.REPLICAS)
        copy = program.send(row, unit.layer)
        if not self.s.overlap:
            program.wait([copy])
        return [copy]

    def copy_unit(
        self, program: Program, unit: Unit, phase: str, numbers: float, *, copies: int
    ) -> None:
        """Copy the numbers of a unit into its messages, or out of them."""
        if self.owners * self.groups_of_owners == 1 or self.s.buffers:
            return
        if unit.region == "layers":
            sizes = self.find_kind(unit).sizes
            numbers += float(sizes.gathered * sizes.reordered)
        [packing] = self.table.find("exchange.whole", "update")
        if not numbers:  # all are frozen
            return
        copy = self.table.copy(packing, phase, numbers / self.most_common.all_trained)
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
        module = _name_module(unit)
        sent = []
        for message in messages:
            if message.ranks == 1 or not message.numbers:
                continue
            nbytes = itemsize * message.numbers
            calls = self.call_messages(phase)
            row = self.table.send(message.operation, phase, module, nbytes, message.group, calls)
            sent.append(program.send(row, unit.layer))
            if not self.s.overlap:
                program.wait(sent[-1:])
        return sent

    def call_messages(self, phase: str) -> HostCalls:
        """What the host does for a message of replicas."""
        return ONE_CALL

    def reduce_complete(self, program: Program) -> None:
        """Reduce the gradients of all units that are complete."""
        for unit in program.complete:
            program.before_update += self.reduce_gradients(program, unit)
        program.complete.clear()

    # The program of a stage

    def spread_layers(self) -> list[int]:
        """Layers of each chunk, in the order of a forward pass, see `spread_chunks`."""
        spread = spread_chunks(self.model.all_layers, self.s)
        layers = []
        for position in range(self.s.pp * self.s.chunks):
            place = find_place(position, self.s.pp, is_v_shaped=bool(self.schedule.is_v_shaped))
            layers.append(int(spread.count_layers(self.s, place.stage, place.chunk)))
        return layers

    def find_position(self, stage: int, chunk: int) -> int:
        """Where a chunk of a stage is on the way of a forward pass, from 0."""
        is_v_shaped = bool(self.schedule.is_v_shaped)
        return int(find_position(stage, chunk, self.s.pp, is_v_shaped=is_v_shaped))

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
        units_of_chunks = [
            self.list_units(self.find_position(stage, chunk)) for chunk in range(s.chunks)
        ]
        all_units = [unit for units in units_of_chunks for unit in units]
        steps = list_steps(
            s.schedule, stage, stages=s.pp, micro_batches=self.micro_batches, chunks=s.chunks
        )
        passes = [step for step in steps if step.phase != "weights"]
        if not self.puts_off_weights:
            steps = passes
        groups = _group_pairs(steps)
        with_messages = [group for group in groups if group[0].phase != "weights"]
        following = {group[0]: after for group, after in pairwise(with_messages)}
        self.gather_ahead(program, all_units)
        receives_ahead = s.pp > 1 and self.schedule.takes_messages_ahead(s.chunks)
        program.before_pass[passes[0]] = self.receive(program, passes[0], stage)
        if self.runs_pairs:  # on a single stage
            self.run_pairs(program, passes, all_units)
            groups = []
        for group in groups:
            after = following.get(group[0], [])
            if receives_ahead:
                for step in after:
                    program.before_pass[step] = self.receive(program, step, stage)
            for step in group:
                program.wait(program.before_pass.pop(step, []))
            for step in group:
                self.run_pass(program, step, units_of_chunks[step.chunk])
            sent: list[int] = []
            for step in group:
                sent += self.send(program, step, stage)
            if group[-1].micro < self.micro_batches - 1:
                self.end_micro_batch(program)
            if after and not receives_ahead:
                received = self.receive(program, after[0], stage)
                program.before_pass[after[0]] = sent + received
        self.end_reductions(program)
        self.update(program, all_units)
        return program

    def gather_ahead(self, program: Program, units: list[Unit]) -> None:
        """Gather all weights that the first pass needs, which hides it (ZeRO stage 1)."""
        if self.s.zero == 1:
            for unit in units:
                program.before_unit[unit] = self.gather_weights(program, unit, "forward")

    def end_micro_batch(self, program: Program) -> None:
        """Wait for the reductions of a micro-batch behind which others come."""
        if self.scattered:
            self.end_reductions(program)

    def end_reductions(self, program: Program) -> None:
        """Reduce what is complete, and wait for all reductions."""
        self.reduce_complete(program)
        program.wait(program.before_update)
        program.before_update.clear()

    def update(self, program: Program, units: list[Unit]) -> None:
        """Update the weights of a stage, or the share of them that is this rank's."""
        weights = sum(self.count_trained(unit) for unit in units)
        share = weights / self.most_common.all_trained
        if self.s.zero:  # experts are shared with fewer others
            of_layers = [self.find_kind(unit) for unit in units if unit.region == "layers"]
            experts = sum(float(kind.sizes.experts) for kind in of_layers) / weights
            share *= count_shards(1.0, experts, owners=self.owners, sharers=self.sharers)
        on_host = self.update_on_host(program, units)
        on_device = share * (1.0 - float(self.offload.fraction))
        if find_optimizer(self.model.optimizer).by_shape:
            self.update_by_shape(program, units)
        elif on_device:
            rows = [*self.updates, *self.list_narrowing()]
            updates = [self.table.copy(row, "update", on_device) for row in rows]
            program.run(self.table.make_block(updates))
        program.wait(on_host)

    def list_narrowing(self) -> list[int]:
        """Rows that copy updated weights to the format of layers."""
        return self.table.find("exchange.narrow", "update")

    def update_by_shape(self, program: Program, units: list[Unit]) -> None:
        """Update the weights of a whole model one after another, those of each layer by operations of
        their own.

        Raises
        ------
        ValueError
            For an optimizer whose host waits for numbers, which stages do not know.
        """
        if find_optimizer(self.model.optimizer).host_waits:
            raise ValueError(
                f"optimizer is {self.model.optimizer!r} in {self.micro_batches} micro-batches, which are "
                "too many for the graph of the model; take a larger micro_batch, or pk.explore"
            )
        of_layer: list[int] = []
        of_ends: list[int] = []
        for row in self.updates:
            if self.table.labels[row].module == "update.layers":
                of_layer.append(row)
            else:
                of_ends.append(row)
        for unit in units:
            if unit.region == "layers":
                program.run(self.table.make_block(of_layer), unit.layer)
        program.run(self.table.make_block(of_ends))

    def update_on_host(self, program: Program, units: list[Unit]) -> list[int]:
        """Let the host update its share of the weights of a stage, with the copies that are sent
        meanwhile, or one after the other; return the numbers of all."""
        if not self.offload.fraction:
            return []
        updated = sum(self.count_shard(unit) for unit in units)
        work = (
            (TO_HOST, self.offload.late_gradient),
            (HOST_UPDATE, self.offload.update),
            (FROM_HOST, self.offload.weight),
        )
        sent = []
        for operation, each in work:
            if not each:
                continue
            nbytes = float(each) * updated
            # what is sent in one group takes turns
            group = PAIRS + count_ways(self.s) * self.s.pp
            if operation != HOST_UPDATE and not self.offload.in_turn:
                group += 1
            row = self.table.send(operation, "update", "host", nbytes, group)
            sent.append(program.send(row))
        return sent

    def run_pass(self, program: Program, step: Step, units: list[Unit]) -> None:
        """Run a pass through the units of a chunk."""
        order = self.order_units(step, units)
        has_weights = step.whole and self.puts_off_weights
        for position, unit in enumerate(order):
            self.begin_unit(program, step, order, position)
            kind = self.find_kind(unit)
            is_layer = unit.region == "layers"
            if step.phase == "backward" and is_layer and unit.layer in self.followed_in_group:
                program.run(kind.end_again, unit.layer)
            program.run(kind.passes[unit.region, step.phase, step.micro == 0], unit.layer)
            if has_weights and is_layer:
                program.run(kind.passes[unit.region, "weights", step.micro == 0], unit.layer)
            self.end_unit(program, step, order, position)

    def begin_unit(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Make the weights of a unit of a pass ready, and its activations."""
        self.wait_for_weights(program, step, order, position)
        if self.offloaded_activations and order[position].region == "layers":
            self.wait_for_copies(program, step, order[position])

    def wait_for_weights(
        self, program: Program, step: Step, order: list[Unit], position: int
    ) -> None:
        """Gather the weights of a unit of a pass and of the next one, and wait for its own."""
        gathered_ahead = 1 if self.s.overlap else 0
        if self.gathers_weights(step):
            for later in order[position : position + 1 + gathered_ahead]:
                self.gather_before(program, step, later)
        program.wait(program.before_unit.pop(order[position], []))

    def wait_for_copies(self, program: Program, step: Step, unit: Unit) -> None:
        """Wait before a layer for its own activations from the host, and fetch those of the layer that
        follows in the backward pass; or until those of the layer before the last have left."""
        if step.phase == "forward":
            program.wait(program.leaving.pop(unit.layer - 2, []))
            return
        program.wait(program.returning.pop(unit.layer, []))
        if unit.layer > 0:
            copy = self.copy_activations(program, "backward", FROM_HOST, unit.layer - 1)
            program.returning[unit.layer - 1] = [copy]

    def copy_activations(self, program: Program, phase: str, operation: str, layer: int) -> int:
        """Copy what a layer keeps to the host or back; return the number of the copy."""
        group = PAIRS + count_ways(self.s) * self.s.pp + _HOST_GROUPS - 1
        row = self.table.send(operation, phase, "layers.0", self.offloaded_activations, group)
        return program.send(row, layer)

    def end_unit(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Add the host of a unit, and reduce its gradients if they are complete."""
        unit = order[position]
        # the host joins before it waits
        if self.joins_host(step, unit, order):
            program.run(self.table.host_delays[step.phase])
        is_layer = unit.region == "layers" and unit.layer < self.model.layers - 1
        if self.offloaded_activations and step.phase == "forward" and is_layer:
            copy = self.copy_activations(program, "forward", TO_HOST, unit.layer)
            program.leaving[unit.layer] = [copy]
        self.reduce_behind(program, step, order, position)

    def joins_host(self, step: Step, unit: Unit, order: list[Unit]) -> bool:
        """Whether what the host adds to a pass comes behind a unit."""
        return step.phase != "weights" and (self.s.pp == 1 or unit == order[-1])

    def reduce_behind(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Reduce the gradients of a unit behind its part of a pass, if they are complete."""
        unit = order[position]
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
            self.end_micro_batch(program)
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
                of_other = self.find_kind(other).beside["backward", backward.micro == 0]
                program.run(of_other, other.layer)
                back = self.send_beside(program, "backward", other)
                program.wait(ahead)
                of_unit = self.find_kind(unit).beside["forward", forward.micro == 0]
                program.run(of_unit, unit.layer)
                program.wait(back)
            else:
                passes = self.most_common.passes
                program.run(passes[other.region, "backward", backward.micro == 0])
                program.run(passes[unit.region, "forward", forward.micro == 0])
            self.end_unit(program, backward, reverse, position)
            self.end_unit(program, forward, order, position)

    def send_beside(self, program: Program, phase: str, unit: Unit) -> list[int]:
        """Launch the messages of tokens of a layer to their experts and back."""
        kind = self.find_kind(unit)
        if not kind.model.experts:
            return []
        row = kind.send_tokens(phase, Communicator.BESIDE)
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
        if self.puts_off_weights and unit.region == "layers" and not step.whole:
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
        position = self.find_position(stage, step.chunk)
        neighbour = position + way
        if s.pp == 1 or step.phase == "weights" or not 0 <= neighbour < s.pp * s.chunks:
            return []
        border = min(position, neighbour) % s.pp
        is_v_shaped = bool(self.schedule.is_v_shaped)
        if is_v_shaped:
            other = find_place(neighbour, s.pp, is_v_shaped=True).stage
            # the last stage of a V hands micro-batches to itself
            if other == stage:
                return []
            border = min(stage, other)
        group = PAIRS + count_ways(s) * border
        if step.phase == "forward":
            group += 1
        if is_v_shaped:
            group += 2 * step.chunk
        between = float(self.sizes.between)
        return [program.send(self.table.send("send_recv", step.phase, "stages", between, group))]

    # Graphs

    def make_graphs(
        self, programs: Sequence[Program], ranks: int, held: HeldMemory
    ) -> Iterator[Graph]:
        """The graphs of programs, each with the memory of the fullest rank."""
        table, layers = self.table, self.model.all_layers
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
            if self.table.has_dtypes:
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
                group_names=self.name_communicators(),
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
        return {Communicator.EXPERTS: "two_level", Communicator.BESIDE: "two_level"}

    def name_communicators(self) -> dict[int, str]:
        """What the ranks of each communicator share, as charts name it."""
        names: dict[int, str] = dict(GROUP_NAMES)
        ways = count_ways(self.s)
        for border in range(self.s.pp):
            for way in range(ways):
                names[PAIRS + ways * border + way] = self._name_border(border, way)
        return names

    def _name_border(self, border: int, way: int) -> str:
        """What a communicator between two stages sends, by its number among those of the border, see
        `_pass_on`."""
        before = border
        behind = (border + 1) % self.s.pp
        is_forward = way % 2 == 1
        if count_ways(self.s) > 2:  # a V, whose chunks go both ways
            phase = "forward" if is_forward else "backward"
            return f"pipeline, stages {before} and {behind}, chunk {way // 2} {phase}"
        if is_forward:
            return f"pipeline, stage {before} to {behind}"
        return f"pipeline, stage {behind} to {before}"

    def list_communicators(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator of the first rank, in the order of their numbers."""
        s = self.s
        shapes: dict[int, tuple[int, int]] = {
            Communicator.TENSOR: (s.tp, 1),
            Communicator.CONTEXT: (s.cp, s.tp),
            Communicator.EXPERTS: (s.ep, int(s.apart_for_experts)),
            Communicator.BESIDE: (s.ep, int(s.apart_for_experts)),
            Communicator.EXPERT: (int(s.ranks_of_expert), 1),
            Communicator.REPLICAS: (self.owners, s.tp),
            Communicator.ACROSS: (self.groups_of_owners, s.tp * self.owners),
            Communicator.ROUTED: (self.sharers, int(s.ranks_of_expert) * s.ep),
        }
        communicators = []
        for number in range(PAIRS):
            ranks, apart = shapes[number]
            communicators.append(tuple(range(0, ranks * apart, apart)))
        return tuple(communicators)

    def list_groups(
        self, rank: int, communicators: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], ...]:
        """Ranks of all communicators of a rank: those of the first rank, see `list_communicators`, then
        those of borders between stages, and those of the rank and its host."""
        groups = list(communicators)
        for pair in _list_neighbours(rank, self.s):
            groups += [pair for _ in range(count_ways(self.s))]
        groups += [(rank,) for _ in range(_HOST_GROUPS)]
        return tuple(groups)

    def count_operations(self) -> int:
        """Operations of both passes of all layers, in all micro-batches [-]."""
        operations = 0
        for kind in self.kind_of_layer.values():
            for phase in ("forward", "backward"):
                operations += len(kind.passes["layers", phase, False].rows)
        return operations * self.micro_batches


class _ShardedStageMaker(_StageMaker):
    """Makes programs of ranks that each run the whole model and share units of it, see
    `Strategy.shards_units`, in the order of `perfkit.workloads.blocks.FSDPUnits`.

    A unit is gathered as soon as the last unit but one has been unpacked, in the backward pass as
    soon as the unit before it has been. Gradients are reduced when their unit is finished, and the
    next unit waits for that before it packs its own.
    """

    def gather_ahead(self, program: Program, units: list[Unit]) -> None:
        """Nothing: each unit is gathered beside the unit before it."""

    def end_micro_batch(self, program: Program) -> None:
        """Nothing: the next micro-batch waits before it unpacks weights."""

    def list_narrowing(self) -> list[int]:
        """None: shards are copied to the format of layers when they are gathered."""
        return []

    def joins_host(self, step: Step, unit: Unit, order: list[Unit]) -> bool:
        """False: the host of a whole model waits for no other stage in an iteration."""
        return False

    def wait_for_weights(
        self, program: Program, step: Step, order: list[Unit], position: int
    ) -> None:
        """Unpack the weights of a unit of a pass, and gather those of later units."""
        if not self.gathers_weights(step):
            return
        if step.phase == "forward":
            self.unpack_forward(program, step, order, position)
        else:
            self.unpack_backward(program, step, order, position)

    def unpack_forward(
        self, program: Program, step: Step, order: list[Unit], position: int
    ) -> None:
        """Unpack the weights of a unit of a forward pass, and gather those of the last unit but one
        behind it."""
        unit = order[position]
        layers = [one for one in order if one.region == "layers"]
        if position == 0:
            ends = self.find_ends(order)
            if ends is None:
                self.launch(program, step, layers[:2])
            else:
                self.launch(program, step, [ends, *layers[:1]])
                self.unpack(program, step, ends, layers[1:2])
        if unit.region == "layers":
            place = layers.index(unit)
            self.unpack(program, step, unit, layers[place + 2 : place + 3])
            if self.s.zero == 3 and unit == layers[-1]:
                # it is the first unit of the backward pass, which follows
                self.launch(program, step, [unit])

    def unpack_backward(
        self, program: Program, step: Step, order: list[Unit], position: int
    ) -> None:
        """Unpack the weights of a layer of a backward pass, and gather those of the next one."""
        unit = order[position]
        layers = [one for one in order if one.region == "layers"]
        if position == 0:
            self.launch(program, step, layers[:1])
        if unit.region == "layers":
            place = layers.index(unit)
            self.unpack(program, step, unit, layers[place + 1 : place + 2])

    def gathers_weights(self, step: Step) -> bool:
        """Whether a pass needs weights that no pass before it has gathered."""
        if step.phase == "backward" and self.s.zero < 3:
            return False
        return self.scattered or step.micro == 0

    def find_ends(self, order: list[Unit]) -> Unit | None:
        """The unit of all weights of a chunk outside of layers, if it has any."""
        ends = [unit for unit in order if unit.region != "layers"]
        if len(ends) > 1:
            return BOTH_ENDS
        return ends[0] if ends else None

    def find_rows(self, unit: Unit) -> UnitRows:
        """Operations around the messages of a unit."""
        return UnitRows(self.find_kind(unit), _list_regions(unit))

    def call_messages(self, phase: str) -> HostCalls:
        """What the host does for a message: in the backward pass it is part of the call of a hook."""
        if phase == "forward":
            return ONE_CALL
        return IN_HOOK

    def launch(self, program: Program, step: Step, units: Sequence[Unit]) -> None:
        """Gather the weights of units that are not on their way."""
        for unit in units:
            if unit in program.before_unit:
                continue
            program.run(
                self.table.make_block(self.find_rows(unit).list_ahead(step.phase)), unit.layer
            )
            program.before_unit[unit] = self.gather_weights(program, unit, step.phase)

    def unpack(self, program: Program, step: Step, unit: Unit, later: Sequence[Unit]) -> None:
        """Copy gathered weights to storages of their own, and gather those of a later unit."""
        program.wait(program.before_unit.pop(unit, []))
        if step.phase == "forward":
            self.end_reductions(program)
            program.before_packing.clear()
        rows = self.find_rows(unit).list_unpacking(step.phase)
        program.run(self.table.make_block(rows), unit.layer)
        self.launch(program, step, later)

    def copy_unit(
        self, program: Program, unit: Unit, phase: str, numbers: float, *, copies: int
    ) -> None:
        """Nothing: `launch`, `unpack` and `reduce_unit` copy what was recorded."""

    def reduce_behind(self, program: Program, step: Step, order: list[Unit], position: int) -> None:
        """Reduce the gradients of a layer behind its part of a backward pass, and those of all other
        weights at its end; or cast those that are added up before."""
        if step.phase != "backward":
            return
        unit = order[position]
        if unit.region == "layers":
            self.reduce_unit(program, step, unit)
        ends = self.find_ends(order)
        if position == len(order) - 1 and ends is not None:
            self.reduce_unit(program, step, ends)

    def reduce_unit(self, program: Program, step: Step, unit: Unit) -> None:
        """Reduce the gradients of a unit that are complete, or cast those of the first micro-batch that
        are added up before."""
        rows = self.find_rows(unit)
        is_complete = self.scattered or step.micro == self.micro_batches - 1
        if not is_complete:
            casts = rows.list_casts() if step.micro == 0 else []
            program.run(self.table.make_block(casts), unit.layer)
            return
        packing = rows.list_packing(is_first=step.micro == 0)
        if not packing:  # all are frozen
            return
        program.wait(program.before_packing)
        program.run(self.table.make_block(packing), unit.layer)
        sent = self.reduce_gradients(program, unit)
        program.before_packing = sent[:1]
        program.before_update += sent
        behind = rows.list_behind_reduction(adds=self.scattered and step.micro > 0)
        program.run(self.table.make_block(behind), unit.layer)

    def count_weights(self, unit: Unit) -> float:
        """Numbers of the weights of a unit [-]."""
        return _add_regions(self.find_kind(unit).weights, unit)

    def count_sent(self, unit: Unit) -> float:
        """Numbers that a gather of the weights of a unit sends, in the format of layers [-]."""
        return _add_regions(self.find_kind(unit).sent, unit)

    def count_trained(self, unit: Unit) -> float:
        """Trained numbers of a unit [-]."""
        return _add_regions(self.find_kind(unit).trained, unit)


def _list_regions(unit: Unit) -> list[str]:
    """Regions of the model whose weights a unit holds."""
    if unit == BOTH_ENDS:
        return ["embeddings", "head"]
    return [unit.region]


def _add_regions(numbers: Mapping[str, float], unit: Unit) -> float:
    """Numbers of all regions of a unit [-]."""
    return sum(numbers[region] for region in _list_regions(unit))


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
    check_strategy_type(s)
    if any(np.ndim(value) for value in vars(s).values()):
        raise ValueError(
            f"strategy is {show(s)}; it must be a single one; predict each alone, or use pk.explore"
        )
    if s.overlap_experts and s.pp > 1:
        raise ValueError(
            "strategy has overlap_experts with several stages, which only closed forms know; "
            "use pk.explore(strategies=[...])"
        )
    check_checkpoints_of(model, s)
    check_fits(model, s)
    return s


def state_replicas(model: Transformer, s: Strategy) -> Transformer | None:
    """State a strategy as settings of the model, if it shares nothing but what these say; else
    None."""
    if s.buffers or s.offload != "none":
        return None
    shared = (s.tp, s.pp, s.cp, s.ep, s.etp, s.chunks)
    shards_of_all = s.shards in (0, s.dp)
    ordinary = s.checkpoint != "selective" and not find_schedules(s.schedule).runs_breadth_first
    micro_batches = model.batch // (s.dp * s.micro_batch)
    if s.groups_layers and s.zero:
        return None
    if max(shared) > 1 or not (shards_of_all and ordinary and s.overlap):
        return None
    most_passes = MOST_PASSES
    if s.runs_plain_layers:  # each layer is recorded
        most_passes = MOST_RECORDED
    if micro_batches * model.layers > most_passes or (model.reduce_dtype and not s.zero):
        return None
    return replace(
        model,
        parallel=PARALLEL[s.zero],
        checkpoint=s.checkpoint,
        checkpoint_layers=s.checkpoint_layers,
        checkpoint_group=s.checkpoint_group,
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
    s = check_strategy(model, strategy).without_idle_zero().settle_checkpoints(model.all_layers)
    ranks = int(strategy.ranks)
    check_device(platform)
    stated = state_replicas(model, s)
    pads_products = _find_software(model, strategy, execution, stack).pads_products
    of_megatron = stack is not None and stack.memory == "megatron" and not s.replicated
    graphs: list[Graph] = []
    if stated is not None:
        recorded = stated.graphs(ranks, accelerator=True)
        graphs = execute(recorded, execution, pads_products=pads_products)
    if stated is not None and not of_megatron:
        return graphs
    case = make_case(platform, apply_stack(model, Strategy.stack([s]), execution, stack))
    kept_by_layer = keep_by_layer(case)
    held = map_arrays(lambda nbytes: float(nbytes[0]), measure_strategies(case))
    on_host = float(measure_host(case, kept_by_layer)[0])
    if stated is not None:
        return [replace(graph, held=held) for graph in graphs]
    kept = float(kept_by_layer[0])
    make = _ShardedStageMaker if s.shards_units else _StageMaker
    maker = make(model, platform, s, execution, pads_products=pads_products, kept=kept)
    operations = maker.count_operations()
    if operations > _MOST:
        fault = f"strategy has {operations:,} operations of {maker.micro_batches} micro-batches"
        raise ValueError(
            f"{fault}; the event loop takes {_MOST:,} at most; use pk.explore, whose forms are closed"
        )
    programs = [maker.make(stage) for stage in range(s.pp)]
    communicators = maker.list_communicators()
    ranks_of_stage = ranks // s.pp
    notes = note_offload(platform, s)
    for stage, made in enumerate(maker.make_graphs(programs, ranks, held)):
        graph = made
        if on_host:
            graph = replace(made, on_host=on_host, notes=(*made.notes, *notes))
        for rank in range(stage * ranks_of_stage, (stage + 1) * ranks_of_stage):
            graphs.append(graph.with_groups(maker.list_groups(rank, communicators)))
    return graphs


def _find_software(
    model: Transformer, strategy: Strategy, execution: str | None, stack: Stack | None
) -> Stack:
    """The software of a strategy, the usual one if none is stated."""
    if stack is not None:
        return stack
    [usual] = name_usual_stacks(model, strategy, execution)
    return STACKS[usual]


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
