"""MLPs that ranks share: as PyTorch runs them, the same work, the memory of a share, faults
by name."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

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

pytestmark = pytest.mark.usefixtures("few_calls")

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
        ctx.group = group
        ctx.gather = gather
        return swap(x, group, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return swap(gradients[0], ctx.group, not ctx.gather), None, None


def swap(x: Any, group: Any, gather: bool) -> Any:
    """Gather samples of all ranks of a group, or sum up their parts and keep own samples."""
    size = dist.get_world_size(group)
    if gather:
        out = x.new_empty(x.shape[0] * size, x.shape[1])
        dist.all_gather_into_tensor(out, x, group=group)
    else:
        out = x.new_empty(x.shape[0] // size, x.shape[1])
        dist.reduce_scatter_tensor(out, x, group=group)
    return out


class Pairs(nn.Module):
    """Layers of which pairs are split by columns and then by rows; a last one without a partner is
    copied."""

    def __init__(self, layers: nn.Sequential, group: Any) -> None:
        super().__init__()
        self.group = group
        self.layers = nn.ModuleList()
        self.ends_with_relu = isinstance(layers[-1], nn.ReLU)
        size = dist.get_world_size(group)
        linear = list_linear(layers)
        for number, layer in enumerate(linear):
            rows, columns = layer.weight.shape
            by_rows = number % 2 == 1
            by_columns = number % 2 == 0 and number + 1 < len(linear)
            if by_rows:
                columns //= size
            if by_columns:
                rows //= size
            part = nn.Linear(columns, rows)
            part.split = by_rows or by_columns
            self.layers.append(part)

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            is_second = number % 2 == 1
            is_last = number + 1 == len(self.layers)
            if not is_second and not is_last:
                x = Swap.apply(x, self.group, True)
            x = layer(x)
            if is_second:
                x = Swap.apply(x, self.group, False)
            if not is_last or self.ends_with_relu:
                x = torch.relu(x)
        return x


def list_linear(*modules: nn.Module) -> list[Any]:
    layers: list[Any] = []
    for module in modules:
        layers += [part for part in module.modules() if isinstance(part, nn.Linear)]
    return layers


def list_weights(layers: Iterable[nn.Module], *, split: bool) -> list[Any]:
    """Weights and biases of the layers of which each rank has a part, or of all others."""
    weights: list[Any] = []
    for layer in layers:
        if getattr(layer, "split", False) == split:
            weights += layer.parameters()
    return weights


def average(weights: list[Any], group: Any) -> None:
    """Average gradients over the ranks of a group, in one message."""
    flat = torch.cat([weight.grad.flatten() for weight in weights])
    dist.all_reduce(flat, group=group)
    flat.div_(dist.get_world_size(group))
    parts = flat.split([weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view_as(weight)


def make_twin(model: DLRM, plan: Plan) -> Callable[[], Any]:
    """The step of a DLRM whose ranks share its MLPs, on a GPU."""
    way = plan.mlps or Strategy(dp=plan.ranks)
    module = _Recommendation(model, replace(plan, mlps=None), dist.get_rank())
    owners = way.shards or way.dp
    mesh = init_device_mesh(
        "cuda", (way.dp // owners, owners, way.tp), mesh_dim_names=("replicas", "shards", "tensor")
    )
    if way.tp > 1:
        module.bottom = Pairs(module.bottom, mesh["tensor"].get_group())
        module.top = Pairs(module.top, mesh["tensor"].get_group())
    module.to("cuda")
    dense = list_linear(module.bottom, module.top)
    if way.zero:
        sharing = mesh["replicas", "shards"] if way.shards else mesh["shards"]
        for layer in dense:
            fully_shard(layer, reshard_after_forward=way.zero == 3, mesh=sharing)
        fully_shard(module, ignored_params={*module.tables.parameters()}, mesh=sharing)
    split = list_weights(dense, split=True)
    copied = list_weights(dense, split=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tables = len(module.tables)
    batch = model.batch // plan.ranks

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(batch, model.features, device="cuda")
        y = torch.rand(batch, 1, device="cuda")
        rows = [torch.randint(0, 50, (2 * model.batch,), device="cuda") for _ in range(tables)]
        offsets = [torch.arange(0, 2 * model.batch, 2, device="cuda") for _ in range(tables)]
        nn.functional.binary_cross_entropy_with_logits(module(x, rows, offsets), y).backward()
        if not way.zero:
            average(copied, None)
            if way.dp > 1:
                average(split, mesh["shards"].get_group())
        optimizer.step()

    return step


class Message(NamedTuple):
    """A collective of a graph."""

    operation: str
    nbytes: float
    ranks: int


def list_messages(graph: Graph) -> list[Message]:
    """All collectives of a rank, in their order."""
    sizes = [len(group) for group in graph.groups] or [graph.ranks]
    messages = []
    for place in graph.collectives:
        operation = graph.labels[place].name
        nbytes = float(graph.column("nbytes")[place])
        messages.append(Message(operation, nbytes, sizes[int(graph.column("group")[place])]))
    return messages


def sum_bytes(graph: Graph, operation: str) -> float:
    messages = list_messages(graph)
    return sum(message.nbytes for message in messages if message.operation == operation)


def list_names(graph: Graph) -> list[str]:
    """Names of operations up to the update, without those that make inputs; `div_` of gradients is
    in the backward."""
    inputs = ("randn", "rand", "randint", "arange")
    before_update = [label.name for label in graph.labels if label.phase != "update"]
    return [name for name in before_update if name not in inputs]


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
    ours = model.graphs(way.ranks, plan, accelerator=True)[0]
    theirs = capture(lambda: make_twin(model, plan), ranks=way.ranks, device="cuda")
    assert list_messages(ours) == list_messages(theirs)
    # the first layer has no gradient to pass on, so that `fully_shard` reduces it last
    moved = "_embedding_bag_backward"
    names = [name for name in list_names(ours) if name != moved]
    assert names == [name for name in list_names(theirs) if name != moved]
    assert ours.column("flops").sum() == theirs.column("flops").sum()
    if way.zero:
        assert ours.labels[0].name == "all_gather_copy_in"
        assert list_waits(ours)[:-9] == list_waits(theirs)[:-9]


def list_waits(graph: Graph) -> list[int]:
    """The collectives that operations wait for, in the order of the operations."""
    assert graph.waits is not None
    return [wait.collective for wait in sorted(graph.waits)]


def price(
    way: Strategy | None, model: DLRM, platform: str = "a100-sxm-8", ranks: int = 8
) -> Prediction:
    """Predict a DLRM, warnings aside."""
    with keep_quiet():
        plan = replace(Plan.round_robin(len(model.tables), ranks=ranks), mlps=way)
        return predict(model, platform, ranks=ranks, plan=plan)


LARGE = DLRM(
    rows=[1000 for _ in range(8)],
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
    model = DLRM(
        **SMALL, interaction=interaction, bottom=(64, 32, 64), top=(128, 64, 32), overlap=True
    )
    plan = Plan.round_robin(4, ranks=8)
    plain = model.graphs(8, plan)
    shared = model.graphs(8, replace(plan, mlps=way))
    assert sum_flops(plain) == sum_flops(shared)
    for one, other in zip(plain, shared, strict=True):
        assert len(one.tables) == len(other.tables)
        for graph in (one, other):
            operations = [message.operation for message in list_messages(graph)]
            assert operations.count("all_to_all") == 2
    if way.tp == 1:  # weights are padded to a multiple of the ranks
        weights = plain[0].parameters - sum(table.rows * table.dim for table in plain[0].tables)
        gathers = 2 if way.zero == 3 else 1
        reduced = sum_bytes(shared[0], "reduce_scatter")
        gathered = sum_bytes(shared[0], "all_gather")
        assert reduced == pytest.approx(4 * weights, rel=0.02)
        assert gathered == pytest.approx(4 * weights * gathers, rel=0.02)


def sum_flops(graphs: Iterable[Graph]) -> float:
    return sum(float(graph.column("flops").sum()) for graph in graphs)


def test_memory_falls_by_the_share() -> None:
    copied = price(None, LARGE).memory().parts
    for way in WAYS:
        parts = price(way, LARGE).memory().parts
        owners = way.tp
        if way.zero:
            owners *= int(way.owners)
        assert parts["tables"] == copied["tables"]
        assert parts["parameters"] == pytest.approx(copied["parameters"] / owners, rel=0.02), way


def test_copies_and_one_rank_are_as_before() -> None:
    whole = Plan.round_robin(8, ranks=8)
    copied = LARGE.graphs(8, replace(whole, mlps=Strategy(dp=8)))
    for copy, graph in zip(copied, LARGE.graphs(8, whole), strict=True):
        assert copy.content == graph.content
    for way in (Strategy(zero=3), Strategy()):
        one = replace(Plan.round_robin(8, ranks=1), mlps=way)
        assert LARGE.graphs(1, one)[0].content == LARGE.graphs(1)[0].content


def test_configurations_of_arrays_equal_single_ones() -> None:
    copied = Placement("data_parallel", tuple(range(8)))
    plan = Plan(8, (copied, copied, copied, copied), mlps=Strategy(tp=2, dp=4, zero=3))
    settings = {**SMALL, "bottom": (32, 48), "top": (64, 24)}
    many = DLRM(**{**settings, "batch": np.array([64, 128])})
    structure = many.structure(8, plan)
    for batch in (64, 128):
        alone = DLRM(**{**settings, "batch": batch}).graphs(8, plan)[0]
        filled = structure.fill({"batch": batch})[0]
        assert filled.table().equals(alone.table())


def test_tensor_parallel_pays_where_weights_are_large_and_links_between_nodes_slow() -> None:
    """Gradients of large weights cross the nodes: shared products send them in parts of a node, at
    the same time."""
    tensor_parallel = Strategy(tp=8, dp=2)
    fastest = price(tensor_parallel, LARGE, "a100-sxm-8x2", 16).time
    for other in (None, Strategy(dp=16, zero=3), Strategy(dp=16, zero=3, shards=8)):
        assert fastest < price(other, LARGE, "a100-sxm-8x2", 16).time
    many_samples = replace_batch(LARGE, 65536)
    copied = price(None, many_samples, "a100-sxm-8x2", 16)
    shared = price(tensor_parallel, many_samples, "a100-sxm-8x2", 16)
    assert copied.time < shared.time


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
    assert count_pairs(rows) == (
        7,
        10,
    )  # copies and `tp` inside a node are within 1 % of each other
    first, slow, last = rows[:3]
    assert first["other"] == pytest.approx(54.0, rel=1e-3)
    assert last["time"] > slow["time"] > 2 * first["time"]
    assert last["time"] == pytest.approx(last["other"], rel=0.1)


def test_plans_keep_how_mlps_are_shared() -> None:
    plan = Plan(
        8,
        (0, Placement("row_wise", tuple(range(8)))),
        mlps=Strategy(tp=2, dp=4, zero=3, shards=2),
    )
    assert Plan.from_json(plan.to_json()) == plan != replace(plan, mlps=None)
    assert "mlps" not in replace(plan, mlps=None).to_json()
    assert plan.shared["shards"] == 2
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
    model = DLRM(**SMALL, bottom=(30, 48), top=(64,))
    plan = Plan.round_robin(4, ranks=8)
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
    names = tuple("t" for _ in range(8))
    assert replace(plan, names=names) == plan
