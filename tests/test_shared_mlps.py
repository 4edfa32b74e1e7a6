"""Perceptrons that ranks share: as PyTorch runs them, the same work, the memory of a share, faults
by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.dlrm_strategies import compare, count_pairs
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.strategy import Strategy

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from perfkit.recording.modules import _Recommendation, build_step  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

SMALL: dict[str, Any] = {
    "rows": [500, 300, 70, 90],
    "dim": 16,
    "pooling": 2,
    "features": 12,
    "batch": 64,
}
WIDTHS: dict[str, Any] = {"bottom": (32, 48), "top": (64, 24), "overlap": True}
#: Ways in which eight ranks share MLPs.
WAYS = [
    Strategy(dp=8, zero=1),
    Strategy(dp=8, zero=3),
    Strategy(dp=8, zero=3, shards=4),
    Strategy(tp=8, dp=1),
    Strategy(tp=4, dp=2),
    Strategy(tp=2, dp=4, zero=3),
    Strategy(tp=2, dp=4, zero=2, shards=2),
]


class Swap(torch.autograd.Function):
    """Gather samples, or sum up parts and keep own samples; the other way round in the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, gather: bool) -> Any:
        ctx.group, ctx.gather = group, gather
        size = dist.get_world_size(group)
        out = x.new_empty(x.shape[0] * size if gather else x.shape[0] // size, x.shape[1])
        (dist.all_gather_into_tensor if gather else dist.reduce_scatter_tensor)(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Swap.forward(type("", (), {})(), gradients[0], ctx.group, not ctx.gather), None, None


class Pairs(nn.Module):
    """Layers of which pairs are split by columns and then by rows; a last one without a partner is
    copied."""

    def __init__(self, layers: nn.Sequential, group: Any) -> None:
        super().__init__()
        self.group, size, kept = group, dist.get_world_size(group), list[nn.Module]()
        linear = [each for each in layers if isinstance(each, nn.Linear)]
        for number, each in enumerate(linear):
            rows, columns = each.weight.shape
            if number % 2:
                columns //= size
            elif number + 1 < len(linear):
                rows //= size
            kept.append(layer := nn.Linear(columns, rows))
            if number % 2 or number + 1 < len(linear):
                layer.split = True
        self.layers, self.last = nn.ModuleList(kept), isinstance(layers[-1], nn.ReLU)

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            last = number + 1 == len(self.layers)
            x = Swap.apply(x, self.group, True) if number % 2 == 0 and not last else x
            x = layer(x)
            x = Swap.apply(x, self.group, False) if number % 2 else x
            x = x if last and not self.last else torch.relu(x)
        return x


def make_twin(model: DLRM, plan: Plan) -> Callable[[], Any]:
    """The step of a DLRM whose ranks share its MLPs, on a GPU."""
    way, names = plan.mlps or Strategy(dp=plan.ranks), ("replicas", "shards", "tensor")
    module = _Recommendation(model, replace(plan, mlps=None), dist.get_rank())
    owners = way.shards or way.dp
    mesh = init_device_mesh("cuda", (way.dp // owners, owners, way.tp), mesh_dim_names=names)
    if way.tp > 1:
        module.bottom, module.top = (
            Pairs(each, mesh["tensor"].get_group()) for each in (module.bottom, module.top)
        )
    module.to("cuda")
    dense: list[Any] = [
        each
        for part in (module.bottom, module.top)
        for each in part.modules()
        if isinstance(each, nn.Linear)
    ]
    for layer in dense if way.zero else ():
        fully_shard(
            layer, reshard_after_forward=way.zero == 3, mesh=mesh[names[way.shards == 0 : 2]]
        )
    if way.zero:
        fully_shard(
            module,
            ignored_params={*module.tables.parameters()},
            mesh=mesh[names[way.shards == 0 : 2]],
        )
    split = {weight for layer in dense if hasattr(layer, "split") for weight in layer.parameters()}
    copied = [weight for layer in dense for weight in layer.parameters() if weight not in split]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tables, batch = len(module.tables), model.batch // plan.ranks

    def average(weights: Any, group: Any) -> None:
        flat = torch.cat([weight.grad.flatten() for weight in weights])
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        for weight, part in zip(
            weights, flat.split([weight.numel() for weight in weights]), strict=True
        ):
            weight.grad = part.view_as(weight)

    def step() -> None:
        optimizer.zero_grad()
        x, y = (
            torch.randn(batch, model.features, device="cuda"),
            torch.rand(batch, 1, device="cuda"),
        )
        rows = [torch.randint(0, 50, (2 * model.batch,), device="cuda") for _ in range(tables)]
        offsets = [torch.arange(0, 2 * model.batch, 2, device="cuda") for _ in range(tables)]
        nn.functional.binary_cross_entropy_with_logits(module(x, rows, offsets), y).backward()
        if not way.zero:
            average(copied, None)
            if way.dp > 1:
                average(
                    [weight for layer in dense for weight in layer.parameters() if weight in split],
                    mesh["shards"].get_group(),
                )
        optimizer.step()

    return step


def send(graph: Graph) -> list[tuple[str, float, int]]:
    """Name, bytes and number of ranks of every collective."""
    groups = [len(group) for group in graph.groups] or [graph.ranks]
    rows = (
        (graph.labels[i].name, graph.column("nbytes")[i], graph.column("group")[i])
        for i in graph.collectives
    )
    return [(name, float(nbytes), groups[int(group)]) for name, nbytes, group in rows]


def list_names(graph: Graph) -> list[str]:
    """Names of operations up to the update, without those that make inputs; `div_` of gradients is
    in the backward."""
    made = ("randn", "rand", "randint", "arange")
    return [
        label.name for label in graph.labels if label.phase != "update" and label.name not in made
    ]


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module:UserWarning", "ignore:`torch.distributed:FutureWarning"
)
@pytest.mark.parametrize(
    "way",
    [
        Strategy(dp=2, zero=3),
        Strategy(dp=2, zero=2),
        Strategy(dp=4, zero=3, shards=2),
        Strategy(tp=4, dp=1),
        Strategy(tp=2, dp=2),
        Strategy(tp=2, dp=2, zero=3),
    ],
)
def test_shared_mlps_are_recorded_as_they_run(way: Strategy) -> None:
    """Against `fully_shard` and tensor parallel layers by hand: the same operations and
    collectives, in their order."""
    model = DLRM(**SMALL, **{**WIDTHS, "overlap": way.zero > 0})
    plan = replace(Plan.round_robin(4, ranks=way.ranks), mlps=way)
    [ours, *_], theirs = (
        model.graphs(way.ranks, plan, accelerator=True),
        capture(lambda: make_twin(model, plan), ranks=way.ranks, device="cuda"),
    )
    assert send(ours) == send(theirs)
    last = (
        # the first layer has no gradient to pass on, so that `fully_shard` reduces it last
        "_embedding_bag_backward"
    )
    assert [n for n in list_names(ours) if n != last] == [
        n for n in list_names(theirs) if n != last
    ]
    assert ours.column("flops").sum() == theirs.column("flops").sum()
    if way.zero:
        first, waits = [g.labels[0].name for g in (ours, theirs)], [g.waits for g in (ours, theirs)]
        assert first[0] == "all_gather_copy_in" and all(each is not None for each in waits)
        assert [wait.collective for wait in sorted(waits[0])][:-9] == [
            wait.collective for wait in sorted(waits[1])
        ][:-9]


def price(
    way: Strategy | None, model: DLRM, platform: str = "a100-sxm-8", ranks: int = 8
) -> Prediction:
    """Predict a DLRM, warnings aside."""
    with keep_quiet():
        plan = replace(Plan.round_robin(len(model.tables), ranks=ranks), mlps=way)
        return predict(model, platform, ranks=ranks, plan=plan)


LARGE = DLRM(
    rows=[1000] * 8,
    dim=64,
    pooling=2,
    features=64,
    bottom=(4096, 4096, 4096),
    top=(4096, 4096),
    batch=4096,
)


@pytest.mark.parametrize("interaction", ["dot", "cross"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_share_the_same_work(way: Strategy, interaction: str) -> None:
    about: dict[str, Any] = {
        "interaction": interaction,
        "bottom": (64, 32, 64),
        "top": (128, 64, 32),
    }
    model = DLRM(**SMALL, **{**about, "overlap": True})
    plain, shared = (
        model.graphs(8, replace(Plan.round_robin(4, ranks=8), mlps=s)) for s in (None, way)
    )
    work = [
        sum(float(graph.column("flops").sum()) for graph in graphs) for graphs in (plain, shared)
    ]
    assert work[0] == work[1]
    for one, other in zip(plain, shared, strict=True):
        assert (
            sum(n == "all_to_all" for n, *_ in send(one))
            == sum(n == "all_to_all" for n, *_ in send(other))
            == 2
        )
        assert len(one.tables) == len(other.tables)
    weights = plain[0].parameters - sum(table.rows * table.dim for table in plain[0].tables)
    sent = {
        name: sum(n for own, n, _ in send(shared[0]) if own == name)
        for name in ("all_gather", "reduce_scatter")
    }
    if way.tp == 1:  # weights are padded to a multiple of the ranks
        assert sent["reduce_scatter"] == pytest.approx(4 * weights, rel=0.02)
        assert sent["all_gather"] == pytest.approx(
            4 * weights * (2 if way.zero == 3 else 1), rel=0.02
        )


def test_memory_falls_by_the_share() -> None:
    copied = price(None, LARGE).memory().parts
    for way in WAYS:
        parts, owners = (
            price(way, LARGE).memory().parts,
            way.tp * (int(way.owners) if way.zero else 1),
        )
        assert parts["tables"] == copied["tables"]
        assert parts["parameters"] == pytest.approx(copied["parameters"] / owners, rel=0.02), way


def test_copies_and_one_rank_are_as_before() -> None:
    whole = Plan.round_robin(8, ranks=8)
    copied = LARGE.graphs(8, replace(whole, mlps=Strategy(dp=8)))
    assert [graph.content for graph in copied] == [
        graph.content for graph in LARGE.graphs(8, whole)
    ]
    for way in (Strategy(zero=3), Strategy()):
        one = replace(Plan.round_robin(8, ranks=1), mlps=way)
        assert LARGE.graphs(1, one)[0].content == LARGE.graphs(1)[0].content


def test_configurations_of_arrays_equal_single_ones() -> None:
    plan = Plan(
        8,
        (Placement("data_parallel", tuple(range(8))),) * 4,
        mlps=Strategy(tp=2, dp=4, zero=3),
    )
    many = DLRM(**{**SMALL, "batch": np.array([64, 128])}, bottom=(32, 48), top=(64, 24))
    structure = many.structure(8, plan)
    for batch in (64, 128):
        alone = DLRM(**{**SMALL, "batch": batch}, bottom=(32, 48), top=(64, 24)).graphs(8, plan)[0]
        assert structure.fill({"batch": batch})[0].table().equals(alone.table())


def test_tensor_parallel_pays_where_weights_are_large_and_links_between_nodes_slow() -> None:
    """Gradients of large weights cross the nodes: shared products send them in parts of a node, at
    the same time."""
    times = {
        str(way): price(way, LARGE, "a100-sxm-8x2", 16).time
        for way in (
            None,
            Strategy(dp=16, zero=3),
            Strategy(tp=8, dp=2),
            Strategy(dp=16, zero=3, shards=8),
        )
    }
    assert min(times, key=lambda way: times[way]) == str(Strategy(tp=8, dp=2))
    narrow = replace_batch(LARGE, 65536)
    assert (
        price(None, narrow, "a100-sxm-8x2", 16).time
        < price(Strategy(tp=8, dp=2), narrow, "a100-sxm-8x2", 16).time
    )


def replace_batch(model: DLRM, batch: int) -> DLRM:
    """The same model with another batch."""
    widths: dict[str, Any] = {"bottom": model.bottom, "top": model.top, "features": model.features}
    return DLRM(
        rows=[table.rows for table in model.tables], dim=64, pooling=2, batch=batch, **widths
    )


def test_two_models_of_large_dlrms_mostly_agree() -> None:
    """docs/accuracy.md: MAD-Max's answers for DLRM-A, and how many pairs both put in the same
    order."""
    rows = compare(["DLRM-A"])
    assert count_pairs(rows) == (8, 10)
    first, slow, last, *_ = rows
    assert (
        first["other"] == pytest.approx(54.0, rel=1e-3)
        and last["time"] > slow["time"] > 2 * first["time"]
    )
    assert last["time"] == pytest.approx(last["other"], rel=0.1)


def test_plans_keep_how_mlps_are_shared() -> None:
    plan = Plan(
        8,
        (0, Placement("row_wise", tuple(range(8)))),
        mlps=Strategy(tp=2, dp=4, zero=3, shards=2),
    )
    assert Plan.from_json(plan.to_json()) == plan != replace(plan, mlps=None)
    assert "mlps" not in replace(plan, mlps=None).to_json() and plan.shared["shards"] == 2
    with pytest.raises(ValueError, match="zero is 9; it must be"):
        Plan.from_json(plan.to_json().replace('"zero": 3', '"zero": 9'))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            Strategy(dp=4),
            r"mlps is Strategy\(tp=1, pp=1, dp=4\); give tp, dp, zero and shards alone, with "
            r"tp times dp = 8",
        ),
        (Strategy(dp=4, pp=2), "mlps is .*pp=2.* alone"),
        (Strategy(dp=8, sequence_parallel=True), "alone"),
        (Strategy(dp=np.array([8, 8])), "alone"),
        ("fsdp", "mlps is 'fsdp'"),
    ],
)
def test_other_ways_are_refused(way: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Plan.round_robin(4, ranks=8), mlps=way)


def test_faults_name_the_layer_and_what_is_not_measured() -> None:
    model, plan = DLRM(**SMALL, bottom=(30, 48), top=(64,)), Plan.round_robin(4, ranks=8)
    with pytest.raises(
        ValueError, match="mlps has tp 8; take one that divides 30, a width that ranks split"
    ):
        model.graphs(8, replace(plan, mlps=Strategy(tp=8)))
    model.graphs(8, replace(plan, mlps=Strategy(tp=2, dp=4)))
    with pytest.raises(ValueError, match=r"mlps is Strategy.*only None is measured"):
        build_step(model, plan=replace(plan, mlps=Strategy(dp=8, zero=3)))


def test_the_old_name_of_shared_mlps_works_and_warns() -> None:
    way = Strategy(tp=2, dp=4)
    plan = Plan(8, tuple(range(8)), mlps=way)
    with pytest.warns(
        DeprecationWarning, match=r"^Plan: perceptrons is now called mlps; the old name"
    ):
        assert Plan(8, tuple(range(8)), perceptrons=way) == plan
    with pytest.warns(DeprecationWarning, match="perceptrons is now called mlps"):
        assert plan.perceptrons == way
    with pytest.raises(TypeError, match=r"^Plan takes mlps or perceptrons, its old name, not both"):
        Plan(8, tuple(range(8)), mlps=way, perceptrons=way)
    old = plan.to_json().replace('"mlps"', '"perceptrons"')
    assert Plan.from_json(old) == plan
    assert replace(plan, names=("t",) * 8) == plan
