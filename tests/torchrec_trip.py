"""``python -m tests.torchrec_trip``, or ``make torchrec``: the round trip with TorchRec itself.

A model of TorchRec's own classes gives its tables; plans of perfkit go into ``DistributedModelParallel`` on two ranks of gloo; a
step is trained; and the plan comes back from the sharded model. Plans of TorchRec's planner go the other way. What TorchRec
refuses is tried, too. All that does not need torchrec again is kept in ``tests/torchrec_trip.json``, where
``tests/test_torchrec_trip.py`` checks it; ``--keep`` writes that file.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import perfkit as pk
from perfkit.ground.units import format_table
from perfkit.workloads.placement import Plan
from perfkit.workloads.placement_kinds import KINDS
from perfkit.workloads.tables import list_formats
from perfkit.workloads.torchrec_format import make_constraints, make_sharding_plan
from tests import torchrec_stand_ins
from tests.torchrec_cases import (
    BAGS,
    RANKS,
    REFUSALS,
    SEQUENCES,
    TABLES,
    Refusal,
    list_plans,
    refuse_first,
)

KEPT = Path(__file__).with_suffix(".json")
#: Samples of a rank in the step that is trained.
_BATCH = 3
_LEARNING_RATE = 0.5
#: Most seconds that ranks may take for one case [s].
_PATIENCE = 60


@dataclass(frozen=True)
class Check:
    """One thing that was tried, and whether it is as it should be."""

    name: str
    is_right: bool
    detail: str


class Sparse(nn.Module):
    """The embedding collections of the model."""

    def __init__(self, bags: nn.Module, sequences: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.history = sequences


class Model(nn.Module):
    """Two collections of TorchRec, and a layer on top of their rows."""

    def __init__(self, sparse: Sparse) -> None:
        super().__init__()
        self.sparse = sparse
        width = sum(table.dim for table in BAGS) + sum(table.dim for table in SEQUENCES)
        self.over = nn.Linear(width, 1)
        nn.init.constant_(self.over.weight, 0.125)
        nn.init.constant_(self.over.bias, 0.0)

    def forward(self, features: Any) -> torch.Tensor:
        """Sum of all outputs."""
        pooled = self.sparse.bags(features).values()
        rows = self.sparse.history(features)
        sums = [
            torch.stack(
                [part.sum(dim=0) for part in torch.split(rows[f"f_{table.name}"].values(), 1)]
            )
            for table in SEQUENCES
        ]
        return self.over(torch.cat([pooled, *sums], dim=1)).sum()


def make_model(device: str) -> Model:
    """The model, of TorchRec's own classes."""
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )

    bags = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.dim,
            num_embeddings=table.rows,
            feature_names=[f"f_{table.name}"],
        )
        for table in BAGS
    ]
    sequences = [
        EmbeddingConfig(
            name=table.name,
            embedding_dim=table.dim,
            num_embeddings=table.rows,
            feature_names=[f"f_{table.name}"],
        )
        for table in SEQUENCES
    ]
    where = torch.device(device)
    return Model(
        Sparse(
            EmbeddingBagCollection(tables=bags, device=where),
            EmbeddingCollection(tables=sequences, device=where),
        )
    )


def make_weights(name: str, rows: int, dim: int) -> torch.Tensor:
    """Weights of a table, each another number that fp32 holds exactly."""
    start = len(name) + ord(name[0])
    return (torch.arange(rows * dim, dtype=torch.float32).reshape(rows, dim) + start) / 1024


def make_features(rank: int) -> Any:
    """What a rank looks up: each sample two rows of each pooled table, and one of each other one."""
    from torchrec import KeyedJaggedTensor

    names, values, lengths = [], [], []
    for number, table in enumerate([*BAGS, *SEQUENCES]):
        lookups = 2 if number < len(BAGS) else 1
        names.append(f"f_{table.name}")
        for sample in range(_BATCH):
            for lookup in range(lookups):
                values.append((7 * rank + 3 * sample + 5 * lookup + number) % table.rows)
            lengths.append(lookups)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=names, values=torch.tensor(values), lengths=torch.tensor(lengths)
    )


def find_expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the ranks, and the weights of the tables after the step, without any sharding.

    TorchRec divides gradients of model-parallel tables by the number of ranks, and averages those of
    copies.
    """
    model = make_model("cpu")
    weights = dict(model.sparse.named_parameters())
    with torch.no_grad():
        for path, weight in weights.items():
            weight.copy_(make_weights(path.split(".")[-2], *weight.shape))
    losses = []
    for rank in range(RANKS):
        loss = model(make_features(rank))
        (loss / RANKS).backward()
        losses.append(float(loss.detach()))
    after = {}
    for path, weight in weights.items():
        assert weight.grad is not None
        after[path.split(".")[-2]] = (weight - _LEARNING_RATE * weight.grad).detach()
    return losses, after


def run_rank(
    rank: int, port: int, modules: Any, tables: Sequence[pk.EmbeddingTable], answer: Any
) -> None:
    """Shard the model by a plan, train a step, and answer with what the rank then has."""
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(RANKS),
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        answer.put((rank, _train(rank, modules, tables)))
    except Exception as error:  # what TorchRec refuses is an answer, too
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".strip()
        answer.put((rank, f"{text} ({Path(last.filename).name})"))
    os._exit(0)  # the other rank may wait in a collective for ever


def _train(rank: int, modules: Any, tables: Sequence[pk.EmbeddingTable]) -> dict[str, Any]:
    """Shard the model, train a step, and list what the rank has of each table."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = make_model("meta")
    plan = make_sharding_plan(modules)
    apply_optimizer_in_backward(torch.optim.SGD, model.sparse.parameters(), {"lr": _LEARNING_RATE})
    sharded = DistributedModelParallel(
        model,
        plan=plan,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
    )
    state = {
        path.split(".")[-2]: value
        for path, value in sharded.state_dict().items()
        if "sparse" in path
    }
    sizes = {table.name: (table.rows, table.dim) for table in [*BAGS, *SEQUENCES]}
    with torch.no_grad():
        for name, value in state.items():
            full = make_weights(name, *sizes[name])
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    shard.tensor.copy_(_cut(full, shard.metadata))
            else:
                value.copy_(full)
    loss = sharded(make_features(rank))
    loss.backward()
    _step_copies(sharded)
    parts: dict[str, list[Any]] = {}
    layout: dict[str, list[Any]] = {}
    for name, value in state.items():
        if not isinstance(value, ShardedTensor):
            parts[name] = [([0, 0], value.detach().tolist())]
            continue
        parts[name] = [
            (list(shard.metadata.shard_offsets), shard.tensor.detach().tolist())
            for shard in value.local_shards()
        ]
        layout[name] = [
            {
                "shard_offsets": list(shard.shard_offsets),
                "shard_sizes": list(shard.shard_sizes),
                "placement": str(shard.placement),
            }
            for shard in value.metadata().shards_metadata
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another kernel or load factor is told by a warning
        read = Plan.from_torchrec(sharded.plan, tables, ranks=RANKS)
    return {
        "loss": float(loss.detach()),
        "parts": parts,
        "layout": layout,
        "plan": sharded.plan._serialize()["plan"],
        "read": read.to_json(),
    }


def _step_copies(sharded: nn.Module) -> None:
    """The step of copied tables: they are dense weights, which no fused optimizer updates."""
    with torch.no_grad():
        for path, weight in sharded.named_parameters():
            if "sparse" in path and weight.grad is not None:
                weight -= _LEARNING_RATE * weight.grad


def _cut(full: torch.Tensor, metadata: Any) -> torch.Tensor:
    """The part of a table that a shard has."""
    row, column = metadata.shard_offsets
    rows, columns = metadata.shard_sizes
    return full[row : row + rows, column : column + columns]


def run_ranks(modules: Any, port: int, tables: Sequence[pk.EmbeddingTable] = TABLES) -> list[Any]:
    """What each rank answers; a text is an error, and None no answer in time."""
    context = torch.multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    ranks = [
        context.Process(target=run_rank, args=(rank, port, modules, tables, answer))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_PATIENCE)
    answers: list[Any] = [None] * RANKS
    while not answer.empty():
        rank, value = answer.get()
        answers[rank] = value
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return answers


def check_plan(name: str, plan: Plan, port: int, kept: dict[str, Any]) -> Iterator[Check]:
    """A plan by hand in TorchRec's sharded model, and back."""
    modules = plan.to_torchrec(TABLES, ranks_per_node=RANKS, device="cpu")
    yield from check_trained(name, plan, TABLES, modules, port)
    kept["plans"][name] = {"plan": json.loads(plan.to_json()), "torchrec": modules}


def check_trained(
    name: str, plan: Plan, tables: Sequence[pk.EmbeddingTable], modules: Any, port: int
) -> Iterator[Check]:
    """Train a step of the model that is sharded by a plan, and read the plan back."""
    answers = run_ranks(modules, port, tables)
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict):
            yield Check(f"{name}: trained on rank {rank}", False, str(answer))
            return
    losses, after = find_expected()
    difference = max(
        abs(answer["loss"] - loss) for answer, loss in zip(answers, losses, strict=True)
    )
    yield Check(f"{name}: losses of both ranks", difference < 1e-4, f"off by {difference:.1e}")
    off = 0.0
    numbers = 0
    for answer in answers:
        for table, parts in answer["parts"].items():
            for (row, column), values in parts:
                part = torch.tensor(values)
                rows, columns = part.shape
                expected = after[table][row : row + rows, column : column + columns]
                off = max(off, float((part - expected).abs().max()))
                numbers += part.numel()
    yield Check(f"{name}: {numbers} weights after a step", off < 1e-4, f"off by {off:.1e}")
    shards = {
        name: entry["shards"]
        for entries in modules.values()
        for name, entry in entries.items()
        if "shards" in entry
    }
    yield Check(
        f"{name}: {sum(map(len, shards.values()))} shards that ranks hold",
        all(answer["layout"] == shards for answer in answers),
        "offsets, sizes, ranks",
    )
    exact = all(Plan.from_json(answer["read"]) == plan for answer in answers)
    yield Check(f"{name}: plan of the sharded model read back", exact, "equal, kernels too")
    serialized = answers[0]["plan"]
    yield Check(
        f"{name}: JSON of TorchRec and of perfkit",
        serialized == _leave_out_caches(modules),
        "equal",
    )


def _leave_out_caches(modules: dict[str, Any]) -> dict[str, Any]:
    """A plan without load factors, which TorchRec does not write."""
    plain: dict[str, Any] = {}
    for module, entries in modules.items():
        plain[module] = {}
        for table, entry in entries.items():
            values = {name: value for name, value in entry.items() if name != "cache_params"}
            plain[module][table] = values
    return plain


def check_refusal(refusal: Refusal, port: int, kept: dict[str, Any]) -> Iterator[Check]:
    """A placement that TorchRec refuses or takes in another way."""
    modules = Plan.round_robin(len(TABLES), ranks=RANKS).to_torchrec(
        TABLES, ranks_per_node=RANKS, device="cpu"
    )
    for entries in modules.values():
        if refusal.table in entries:
            entries[refusal.table] = dict(refusal.entry)
    answers = run_ranks(modules, port)
    errors = [answer for answer in answers if isinstance(answer, str)]
    first = [error for error in errors if "gloo" not in error] or errors
    said = "takes it"
    if first:
        said = f"stops: {first[0].splitlines()[0][:100]}"
    elif isinstance(answers[0], dict):
        told = refusal.entry["shards"][0]["placement"]
        has = [
            rank
            for rank, answer in enumerate(answers)
            if answer["parts"][refusal.table][0][0] == [0, 0]
        ]
        said = f"takes it, and rank {has} has what the plan puts on {told}"
    yield Check(
        f"refused: {refusal.name}", refusal.message in refuse_first(refusal), f"TorchRec {said}"
    )
    kept["refusals"][refusal.name] = "refused" if first else said


def check_path(port: int) -> Iterator[Check]:
    """A path that the model lacks."""
    plan = Plan.round_robin(len(TABLES), ranks=RANKS)
    modules = plan.to_torchrec(TABLES, module="nowhere", device="cpu")
    answers = run_ranks(modules, port)
    copied = all(isinstance(answer, dict) and not answer["layout"] for answer in answers)
    yield Check("a path that the model lacks", copied, "TorchRec copies all tables, without a word")


def make_large_model() -> Any:
    """A collection of tables as large models have, without memory."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    rows = (40_000_000, 10_000_000, 4_000_000, 1_000_000, 200_000, 50_000, 3_000, 500)
    dims = (128, 64, 256, 128, 64, 512, 32, 16)
    configs = [
        EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=dim, num_embeddings=count, feature_names=[f"f{number}"]
        )
        for number, (count, dim) in enumerate(zip(rows, dims, strict=True))
    ]
    model = nn.Module()
    model.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return model


def plan_by_torchrec(model: Any, ranks: int, constraints: Any = None) -> tuple[Any, str]:
    """The plan of TorchRec's planner for H100 in nodes of eight, and what it prints."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(
        world_size=ranks, compute_device="cuda", local_world_size=8, hbm_cap=80 * 10**9
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=8192)
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logger = logging.getLogger("torchrec.distributed.planner.stats")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.disable(logging.NOTSET)
    with contextlib.redirect_stdout(printed):
        plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
    logging.disable(logging.WARNING)
    logger.removeHandler(handler)
    return plan, printed.getvalue()


def read_quietly(read: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a reader gives, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read(*given, **named)


def check_planner(kept: dict[str, Any]) -> Iterator[Check]:
    """Plans of TorchRec's planner: its own, and one in which each table must have another kind."""
    from torchrec.distributed.planner import ParameterConstraints

    model = make_large_model()
    tables = pk.read_tables(model, batch=65_536)
    kinds = ["row_wise", "table_row_wise", "column_wise", "table_column_wise"]
    kinds += ["data_parallel", "table_wise", "row_wise", "data_parallel"]
    forced = {
        table.name: ParameterConstraints(sharding_types=[kind], min_partition=32)
        for table, kind in zip(tables.tables, kinds, strict=True)
    }
    kept["planner"] = {}
    for name, ranks, constraints in (("its own", 8, None), ("each kind", 16, forced)):
        theirs, printed = plan_by_torchrec(model, ranks, constraints)
        tables = pk.take_kernels(tables, theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "shards of columns of")
            plan = Plan.from_torchrec(theirs, tables.tables, ranks=ranks)
        serialized = theirs._serialize()["plan"]
        written = _leave_out_caches(plan.to_torchrec(tables.tables, ranks_per_node=8))
        words = ", ".join(dict.fromkeys(placement.kind for placement in plan.placements))
        repeated = [
            table
            for table, entry in serialized["ebc"].items()
            if len(set(entry["ranks"])) < len(entry["ranks"])
        ]
        for table in repeated:
            del serialized["ebc"][table], written["ebc"][table]
        yield Check(
            f"TorchRec's planner, {name}: its plan read and written",
            written == serialized,
            f"equal JSON of {len(written['ebc'])} tables: {words}",
        )
        if repeated:
            held = [placement.columns for placement in plan.placements if placement.columns]
            yield Check(
                f"TorchRec's planner, {name}: {len(repeated)} tables with two shards on a rank",
                all(sum(widths) in (256, 128) for widths in held),
                "joined, with a warning",
            )
        kept["planner"][name] = {
            "torchrec": theirs._serialize(),
            "plan": json.loads(plan.to_json()),
            "tables": [[one.name, one.rows, one.dim, one.kernel] for one in tables.tables],
        }
        again = read_quietly(pk.read_plan, printed, tables=tables)
        same = [_sort_ranks(one) for one in again.placements] == [
            _sort_ranks(one) for one in plan.placements
        ]
        yield Check(
            f"TorchRec's planner, {name}: its printed plan",
            same,
            "equal, but for the order of ranks",
        )
        judged = read_quietly(
            pk.judge_plan, tables, f"h100-sxm-8x{ranks // 8}", theirs, ranks=ranks, steps=2000
        )
        bounded = judged.bound <= judged.best.time <= judged.yours.time
        yield Check(f"TorchRec's planner, {name}: judged", bounded, judged.headline())
    yield from check_constraints(model, tables, kept)
    yield from check_grid(model, tables)


def _sort_ranks(placement: pk.Placement) -> pk.Placement:
    """The same placement with its ranks in order, as TorchRec prints them."""
    return replace(placement, ranks=tuple(sorted(placement.ranks)))


def check_constraints(model: Any, tables: pk.TableSet, kept: dict[str, Any]) -> Iterator[Check]:
    """TorchRec's planner under the constraints of a plan of perfkit."""
    kinds: tuple[int | pk.Placement, ...] = (
        pk.Placement("row_wise", tuple(range(8))),
        pk.Placement("column_wise", (3, 4)),
        pk.Placement("table_column_wise", (0, 1, 2, 3)),
        pk.Placement("table_row_wise", tuple(range(8))),
        pk.Placement("data_parallel", tuple(range(8))),
        pk.Placement("column_wise", tuple(range(8))),
        6,
        7,
    )
    plan = Plan(8, kinds)
    host = replace(tables.tables[7], kernel="uvm_caching", load_factor=0.5)
    given = (*tables.tables[:7], host)
    constraints = plan.to_torchrec_constraints(given)
    theirs, _ = plan_by_torchrec(model, 8, make_constraints(constraints))
    again = read_quietly(Plan.from_torchrec, theirs, given, ranks=8)
    same = [
        new.kind == old.kind for new, old in zip(again.placements, plan.placements, strict=True)
    ]
    entries = theirs._serialize()["plan"]["ebc"]
    wanted = plan.to_torchrec(given, module="ebc", ranks_per_node=8)["ebc"]
    for name, entry in wanted.items():
        same.append(entry["compute_kernel"] == entries[name]["compute_kernel"])
        sizes = [shard["shard_sizes"] for shard in entry.get("shards", [])]
        same.append(sizes == [shard["shard_sizes"] for shard in entries[name].get("shards", [])])
    cache = theirs.plan["ebc"][host.name].cache_params
    same.append(cache.load_factor == 0.5)
    yield Check(
        "TorchRec's planner under constraints of a plan",
        all(same),
        "kinds, kernels, sizes of shards and load factor are those of the plan",
    )
    kept["constraints"] = constraints


def check_grid(model: Any, tables: pk.TableSet) -> Iterator[Check]:
    """Shards of rows and of columns are refused by name."""
    from torchrec.distributed.planner import ParameterConstraints

    constraints = {"t2": ParameterConstraints(sharding_types=["grid_shard"])}
    theirs, printed = plan_by_torchrec(model, 16, constraints)
    said = []
    for read in (
        lambda: Plan.from_torchrec(theirs, tables.tables, ranks=16),
        lambda: pk.read_plan(printed, tables=tables),
    ):
        try:
            said.append(str(read()))
        except ValueError as error:
            said.append(str(error))
    yield Check("grid_shard", all("grid_shard" in text for text in said), f"refused: {said[0]}")


def check_recipe() -> Iterator[Check]:
    """The lines of the recipe that load a file where perfkit is not installed."""
    recipes = Path(__file__).parent.parent / "docs" / "recipes.md"
    [lines] = [
        block
        for block in re.findall(r"```py\n(.*?)```", recipes.read_text(encoding="utf-8"), re.DOTALL)
        if "ShardingPlan" in block
    ]
    plan = list_plans()["each kind"]
    modules = plan.to_torchrec(TABLES, ranks_per_node=RANKS, device="cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("plan.json").write_text(json.dumps(modules), encoding="utf-8")
        names: dict[str, Any] = {"json": json}
        exec(lines, names)
    loaded = names["plan"]._serialize()
    made = make_sharding_plan(modules)._serialize()
    yield Check("lines of the recipe", loaded == made, "load the same plan")


def check_model(port: int) -> Iterator[Check]:
    """From the model to its tables, a plan that a search finds, and the sharded model."""
    read = pk.read_tables(make_model("meta"), batch=4096)
    wanted = [(table.name, table.rows, table.dim, table.module) for table in TABLES]
    has = [(table.name, table.rows, table.dim, table.module) for table in read.tables]
    yield Check("tables of the model", has == wanted, f"{len(has)} of {len(wanted)} tables")
    inside_nodes = ("table_row_wise", "table_column_wise")
    found = pk.shard(
        read,
        "h100-sxm-8",
        ranks=RANKS,
        steps=50,
        min_columns=8,
        forbid={table.name: (*inside_nodes, "data_parallel") for table in read.tables},
    )
    modules = found.to_torchrec(device="cpu", ranks_per_node=RANKS, plain=True)
    objects = found.to_torchrec(device="cpu", ranks_per_node=RANKS)
    same = objects._serialize()["plan"] == _leave_out_caches(modules)
    yield Check("objects of the plan found", same, f"a {type(objects).__name__} as the JSON")
    yield from check_trained(
        "tables and plan from the model", found.plan, read.tables, modules, port
    )


def check_stand_ins() -> Iterator[Check]:
    """The stand-ins of tests without TorchRec have the fields of TorchRec's own classes."""
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

    for own, theirs in (
        (torchrec_stand_ins.EmbeddingBagConfig, EmbeddingBagConfig),
        (torchrec_stand_ins.EmbeddingConfig, EmbeddingConfig),
        (torchrec_stand_ins.ParameterConstraints, ParameterConstraints),
    ):
        names = [entry.name for entry in fields(own)]
        wanted = [entry.name for entry in fields(theirs)]
        others = ", ".join(sorted({*names} ^ {*wanted})) or "none"
        yield Check(f"stand-in of {own.__name__}", names == wanted, f"other fields: {others}")


def check_wrapped() -> Iterator[Check]:
    """Tables behind processors of features and managed collisions have the path of what wraps them;
    constraints are TorchRec's own objects."""
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    device = torch.device("cpu")
    bags = [EmbeddingBagConfig(100, 16, "position", feature_names=["p", "q"])]
    managed = [EmbeddingBagConfig(100, 16, "managed", feature_names=["m"])]
    collision = MCHManagedCollisionModule(
        zch_size=100,
        device=device,
        eviction_interval=2,
        eviction_policy=DistanceLFU_EvictionPolicy(),
    )
    model = nn.Module()
    model.processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(bags, is_weighted=True, device=device),
        PositionWeightedModuleCollection({"p": 10, "q": 10}),
    )
    model.managed = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(managed, device=device),
        ManagedCollisionCollection({"managed": collision}, managed),
    )
    constraints = {
        "position": ParameterConstraints(pooling_factors=[20.0, 3.0]),
        "managed": ParameterConstraints(sharding_types=["row_wise"]),
    }
    tables = read_quietly(pk.read_tables, model, constraints=constraints)
    has = [(table.module, table.name, table.pooling, table.weighted) for table in tables]
    wanted = [("processed", "position", 23.0, True), ("managed", "managed", 1.0, False)]
    yield Check("tables behind other modules", has == wanted, f"{has}")
    records = [asdict(config) for config in (*bags, *managed)]
    plain = read_quietly(pk.read_tables, records, constraints=constraints)
    same = [table.pooling for table in plain] == [23.0, 1.0]
    yield Check("records of configurations", same, f"{len(plain)} tables")
    limits = pk.read_parameter_constraints(constraints, tables)
    allowed = {*KINDS} - {*limits["forbid"]["managed"]}
    yield Check("sharding types of constraints", allowed == {"row_wise"}, f"{allowed}")


def check_formats() -> Iterator[Check]:
    """Tables of several data types and features: their kernels, what these write, and what a sample
    gets, in TorchRec and FBGEMM as in perfkit."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.embedding_sharding import group_tables
    from torchrec.distributed.embedding_types import (
        EmbeddingComputeKernel,
        ShardedEmbeddingTable,
    )
    from torchrec.modules.embedding_configs import (
        DataType,
        EmbeddingBagConfig,
        data_type_to_sparse_type,
    )

    configs = [
        EmbeddingBagConfig(100, 16, "wide", DataType.FP32, ["a", "b"]),
        EmbeddingBagConfig(50, 8, "narrow", DataType.FP16, ["c"]),
        EmbeddingBagConfig(20, 8, "other", DataType.BF16, ["d"]),
        EmbeddingBagConfig(30, 8, "again", DataType.FP16, ["e", "f", "g"]),
    ]
    model = EmbeddingBagCollection(configs, device=torch.device("meta"))
    tables = read_quietly(pk.read_tables, model)
    has = [(table.number_format, table.num_features) for table in tables]
    wanted = [("fp32", 2), ("fp16", 1), ("bf16", 1), ("fp16", 3)]
    yield Check("data types and features of tables", has == wanted, f"{has}")

    sharded = [
        ShardedEmbeddingTable(
            **{entry.name: getattr(config, entry.name) for entry in fields(config)},
            local_rows=config.num_embeddings,
            local_cols=config.embedding_dim,
            compute_kernel=EmbeddingComputeKernel.FUSED,
        )
        for config in configs
    ]
    [groups] = group_tables([sharded])
    formats = list_formats(tables.tables)
    yield Check("a kernel for each format", len(groups) == len(formats), f"{len(groups)} kernels")

    for group in groups[:2]:  # BF16 has no kernel on CPUs
        members = group.embedding_tables
        kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (one.num_embeddings, one.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for one in members
            ],
            feature_table_map=[
                number for number, one in enumerate(members) for _ in one.feature_names
            ],
            weights_precision=data_type_to_sparse_type(group.data_type),
        )
        features = group.num_features()
        offsets = torch.arange(features * _BATCH + 1)
        pooled = kernel(torch.zeros(features * _BATCH, dtype=torch.int64), offsets)
        own = [table for table in tables if table.name in {one.name for one in members}]
        stored = sum(weights.nbytes for weights in kernel.split_embedding_weights())
        same = (
            pooled.element_size() == tables.pooled_itemsize
            and pooled.shape == (_BATCH, sum(table.num_features * table.dim for table in own))
            and stored == sum(table.nbytes for table in own)
        )
        shown = f"{tuple(pooled.shape)} of {pooled.dtype}, {stored} B of weights"
        yield Check(f"pooled rows of tables in {own[0].number_format}", same, shown)


def list_checks(kept: dict[str, Any]) -> Iterator[Check]:
    """All checks, in order."""
    port = 29_611 + os.getpid() % 2000
    yield from check_stand_ins()
    yield from check_wrapped()
    yield from check_formats()
    yield from check_model(port)
    for name, plan in list_plans().items():
        port += 1
        yield from check_plan(name, plan, port, kept)
    for refusal in REFUSALS:
        port += 1
        yield from check_refusal(refusal, port, kept)
    yield from check_path(port + 1)
    yield from check_recipe()
    yield from check_planner(kept)


def main() -> int:
    """Run all checks, print them, and compare what is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--keep", action="store_true", help="write the kept answers again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = ("torchrec", "torch", "fbgemm-gpu-cpu")
    answers: dict[str, Any] = {
        "versions": {name: version(name).partition("+")[0] for name in names},
        "plans": {},
        "refusals": {},
    }
    rows = []
    wrong = 0
    for check in list_checks(answers):
        rows.append([check.name, "yes" if check.is_right else "NO", check.detail])
        wrong += not check.is_right
        print(*rows[-1], sep=" | ", flush=True)
    text = json.dumps(answers, indent=1) + "\n"
    if options.keep:
        KEPT.write_text(text)
    kept = KEPT.is_file() and KEPT.read_text() == text
    rows.append([f"answers kept in {KEPT.name}", "yes" if kept else "NO", "equal"])
    wrong += not kept
    print(format_table([["what", "right", "detail"], *rows]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
