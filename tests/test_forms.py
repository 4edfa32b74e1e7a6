"""Forms of a step that spread it over ranks: shards of weights and of products, sends, streams;
against real runs."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import tensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import parallel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import swa_utils  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.measure.iterations import OperationTimer  # noqa: E402
from perfkit.measure.processes import run_processes  # noqa: E402
from perfkit.recording.exchanges import name_collective  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.execution import compile_graph  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")

Step = Callable[[], Any]


class _Block(nn.Module):
    """A residual block of two products, computed again in the backward pass if asked to."""

    def __init__(self, width: int = 16, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.reentrant = reentrant

    def run(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())

    def forward(self, x: Any) -> Any:
        return (
            self.run(x)
            if self.reentrant is None
            else checkpoint(self.run, x, use_reentrant=self.reentrant)
        )


def _shard(net: nn.Sequential, mesh: Any, **settings: Any) -> nn.Sequential:
    for block in net:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(net, mesh=mesh, **settings)
    return net


def _train(net: Any, width: int = 16, parts: int = 1, clip: bool = False, mean: Any = None) -> Step:
    """A step with as many micro-batches, whose gradients are reduced with the last one, and clipped
    if asked for; `mean` has a running mean of the weights.
    """
    optimizer, x = (
        torch.optim.AdamW(net.parameters(), foreach=True),
        torch.randn(2, 8, width, requires_grad=True),
    )

    def step() -> None:
        optimizer.zero_grad()
        for part in range(parts):
            own = isinstance(net, DistributedDataParallel)
            if parts > 1 and not own:
                net.set_requires_gradient_sync(part == parts - 1)
            with net.no_sync() if own and part < parts - 1 else nullcontext():
                net(x).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if mean:
            mean.update_parameters(net)

    return step


def _copied(parts: int = 1, clip: bool = False, averaged: bool = False) -> Step:
    """Gradients averaged over eight ranks in buckets."""
    net = DistributedDataParallel(nn.Sequential(*(_Block() for _ in range(3))))
    follow = swa_utils.get_ema_multi_avg_fn(0.99)
    mean = swa_utils.AveragedModel(net, multi_avg_fn=follow) if averaged else None
    return _train(net, parts=parts, clip=clip, mean=mean)


def _sharded(
    copies: bool = False,
    reentrant: bool | None = None,
    parts: int = 1,
    clip: bool = False,
    **settings: Any,
) -> Step:
    mesh = init_device_mesh(
        "cpu", (2, 4) if copies else (8,), mesh_dim_names=("copies", "shards")[1 - copies :]
    )
    net = nn.Sequential(*(_Block(reentrant=reentrant) for _ in range(3)))
    return _train(_shard(net, mesh, **settings), parts=parts, clip=clip)


def _split(sequence: bool) -> Step:
    """Products split over four ranks and weights sharded over two, or products and the sequence
    over four."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "split"))
    rows, columns = parallel.RowwiseParallel(), parallel.ColwiseParallel()
    plan: dict[str, Any] = {"up": columns, "down": rows}
    if sequence:
        long = tensor.Shard(1)
        plan = {
            "norm": parallel.SequenceParallel(),
            "up": parallel.ColwiseParallel(input_layouts=long),
            "down": parallel.RowwiseParallel(output_layouts=long),
        }
    net = nn.Sequential(_Block(), _Block())
    for block in net:
        parallel.parallelize_module(block, mesh["split"], plan)
    return _train(net if sequence else _shard(net, mesh["data"]))


_NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
FORMS: dict[str, Callable[[], Step]] = {
    "sharded, bf16, clipped": partial(_sharded, mp_policy=_NARROW, clip=True),
    "sharded and copied": partial(_sharded, True, reshard_after_forward=False),
    "accumulated": partial(_sharded, parts=2),
    "computed again": partial(_sharded, reentrant=False),
    "computed again, reentrant": partial(_sharded, reentrant=True),
    "split products": partial(_split, False),
    "split sequence": partial(_split, True),
}
COPIES = {
    "accumulated, clipped": {"parts": 3, "clip": True},
    "with a running mean": {"averaged": True},
}


class _Names(OperationTimer):
    """What tensors of a rank's own are worked on by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and not name_collective(func):
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.names:
            self.names[-1] = name_collective(func) or self.names[-1]
        return out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_the_operations_over_ranks_are_those_of_a_real_run(name: str) -> None:
    """The same after a capture as before: nothing of its meshes is left where real ones are looked
    up."""
    graph = capture(FORMS[name], ranks=8)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        step = FORMS[name]()
        step()
        with _Names() as real:
            step()
    finally:
        dist.destroy_process_group()
    assert [label.name for label in graph.labels] == real.names
    assert not [label for label in graph.labels if label.kind == "other"]


def name_operations(settings: list[dict[str, Any]]) -> list[list[str]]:
    """What one of several ranks runs in the third iteration of each step."""
    found = []
    for each in settings:
        step = _copied(**each)
        step()
        step()
        with _Names() as real:
            step()
        found.append(real.names)
    return found


def test_gradients_of_accumulated_and_averaged_weights_are_shared_as_on_two_ranks() -> None:
    """Two ranks of gloo: without sync until the last micro-batch, and with a mean of the weights
    that follows them."""
    job = {"task": "tests.test_forms:name_operations", "settings": [*COPIES.values()]}
    first, second = run_processes(job, ranks=2)
    graphs = [capture(partial(_copied, **each), ranks=2) for each in COPIES.values()]
    assert [[label.name for label in graph.labels] for graph in graphs] == first == second
    assert [len(graph.collectives) for graph in graphs] == [1, 1], "one bucket, and only once"


def _find_collectives(graph: Any) -> list[tuple[str, str, float]]:
    return [
        (graph[i].name, graph[i].phase, graph[i].features["nbytes"])
        for i in map(int, graph.collectives)
    ]


@pytest.mark.parametrize("again", [True, False])
def test_blocks_are_gathered_ahead_and_their_gradients_scattered_behind(again: bool) -> None:
    """FSDP2's documentation: gathered before forward and, if freed, before backward; gradients
    scattered in fp32."""
    width, blocks = 512, 12

    def make_step() -> Step:
        net = nn.Sequential(*(_Block(width) for _ in range(blocks))).to("cuda")
        mesh = init_device_mesh("cuda", (8,))
        return _train(_shard(net, mesh, mp_policy=_NARROW, reshard_after_forward=again), width)

    graph = capture(make_step, ranks=8, device="cuda")
    size = sum(p.numel() for p in _Block(width).parameters())
    gathered, scattered = ("all_gather", 2.0 * size), ("reduce_scatter", 4.0 * size)
    found = _find_collectives(graph)
    assert [each for each in found if each[1] == "forward"] == [
        (gathered[0], "forward", gathered[1])
    ] * blocks
    assert {each[::2] for each in found if each[1] == "backward"} == {
        scattered,
        *([gathered] if again else []),
    }
    names = [name for name, *_ in found]
    assert [names.count(name) for name in ("reduce_scatter", "all_gather")] == [
        blocks,
        blocks * (1 + again),
    ]
    update = [
        graph[i].features["elements"]
        for i, label in enumerate(graph.labels)
        if label.name == "_foreach_lerp_"
    ]
    assert update == [blocks * size / 8], "each rank updates its shard"
    split = next(
        op for op in map(graph.__getitem__, range(len(graph))) if op.name == "split_with_sizes_copy"
    )
    pieces = split.features["elements"], split.features["rows"]
    assert (split.variant, *pieces) == ("cat", size, 8 * 6), (
        "a piece of each of six weights from each rank"
    )
    assert graph.waits is not None
    waits = {wait.collective: wait.operation for wait in graph.waits}
    products = [i for i, label in enumerate(graph.labels) if label.kind == "gemm"]
    # streams let a block be gathered once that before the last is there
    places = graph.collectives.tolist()[:blocks]
    hidden = [
        sum(place < i < waits[number] for i in products) for number, place in enumerate(places)
    ]
    assert hidden == [0, 2, *[4] * (blocks - 2)]
    behind = [
        graph.labels[waits[number]].name
        for number, name in enumerate(names)
        if name == "reduce_scatter"
    ]
    assert behind == ["chunk_cat"] * (blocks - 1) + ["_foreach_add_"], (
        "by the next one, and by the optimizer"
    )
    whole = predict(graph, "h100-sxm-8")
    assert whole.time < whole.serial


class _Compiled(nn.Sequential):
    """Normalised, multiplied, activated and added: the products stay, and two kernels are left of
    the rest."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x).sigmoid()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as the compiler is imported
def test_a_compiled_module_is_recorded_as_kernels_and_says_so() -> None:
    def make_step(compiled: str) -> Step:
        net = _Compiled(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
        updates, x = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False), torch.randn(8, 16)

        def step(run: Any = net) -> None:
            run(x).square().sum().backward()
            updates.step()

        if compiled == "inside":
            net.compile()
        return (
            torch.compile(step)
            if compiled == "step"
            else partial(step, torch.compile(net) if compiled else net)
        )

    with pytest.warns(UserWarning, match=r"taken to be compiled as a whole"):
        whole, inside, step = (
            capture(partial(make_step, how)) for how in ("module", "inside", "step")
        )
    eager = capture(partial(make_step, ""))
    assert (
        (eager.execution, eager.notes) == ("eager", ())
        and whole.execution == "compiled"
        and len(whole.notes) == 1
    )
    assert whole.labels == inside.labels == compile_graph(eager).labels != eager.labels
    updates = [
        sum(label.phase == "update" for label in each.labels) for each in (eager, whole, step)
    ]
    calls = [
        each.column("calls")[[label.phase == "update" for label in each.labels]].sum()
        for each in (eager, whole, step)
    ]
    assert updates == [4, 4, 4] and calls == [4, 4, 1]


@pytest.mark.parametrize("pinned", [True, False])
def test_weights_that_stay_on_the_host_are_named(pinned: bool) -> None:
    def make_step() -> Step:
        policy = CPUOffloadPolicy(pin_memory=pinned)
        return _train(
            fully_shard(_Block(), mesh=init_device_mesh("cuda", (2,)), offload_policy=policy)
        )

    with pytest.raises(
        ValueError,
        match=r'(?s)host.*test_forms.py, line .*"fully_shard.*; leave offload_policy out',
    ):
        capture(make_step, ranks=2, device="cuda")


def test_pinning_is_not_counted_and_says_so() -> None:
    def make_step() -> Step:
        x, rows = torch.randn(8, 8), torch.arange(4)
        return lambda: (
            x.pin_memory().to("cuda", non_blocking=True)[rows.pin_memory().to("cuda")].sum()
        )

    with (
        pytest.warns(UserWarning, match="to pin memory is not counted"),
        pytest.warns(UserWarning, match="non_blocking=True count like blocking ones"),
    ):
        graph = capture(make_step, device="cuda")
    assert [label.name for label in graph.labels] == ["to", "to", "index", "sum"]


def test_graphs_of_a_gpu_are_named() -> None:
    def make_step(replayed: bool) -> Step:
        net, x = nn.Linear(4, 4), torch.randn(2, 4)
        graph = torch.cuda.CUDAGraph() if replayed else None
        run = torch.cuda.make_graphed_callables(net, (x,))
        return lambda: (graph, run(x).sum().backward())

    with pytest.raises(
        ValueError, match="replays kernels that capture does not see; give the step without it"
    ):
        capture(partial(make_step, True), device="cuda")
    with pytest.warns(UserWarning, match="count as launched at once"):
        graph = capture(partial(make_step, False), device="cuda")
    assert graph.execution == "graphs" and len(graph.kernels[("gemm", "nt")]) == 1


def test_a_place_that_a_tensor_names_is_the_gpu() -> None:
    def make_step() -> Step:
        net = nn.Linear(4, 4).to("cuda")
        averaged = torch.optim.swa_utils.AveragedModel(net)
        return lambda: (
            averaged.update_parameters(net),
            net(torch.randn(2, 4).to(net.weight.device)).cpu(),
        )

    with pytest.warns(UserWarning, match="the step works on tensors of the host"):
        moved = capture(make_step, device="cuda")
    assert [moved.labels[i].variant for i in moved.transfers] == ["to_device", "to_host"]


def test_streams_and_events_say_what_waits_for_a_collective() -> None:
    def make_step() -> Step:
        x, side, done = torch.ones(8), torch.cuda.Stream(), torch.cuda.Event()

        def step() -> None:
            side.wait_stream(torch.cuda.current_stream())
            x.mul(2)
            with torch.cuda.stream(side):
                dist.all_reduce(x)
                done.record()
            x.add(2)
            done.wait()
            x.sub(2)
            torch.cuda.synchronize()

        return step

    graph = capture(make_step, ranks=2, device="cuda")
    assert [label.name for label in graph.labels] == ["all_reduce", "mul", "add", "sub"]
    assert graph.waits is not None and list(graph.waits) == [(3, 0, False)]


def test_what_is_sent_along_a_pipeline_meets_its_receiver() -> None:
    def make_step() -> Step:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)

        def step() -> None:
            if rank:
                dist.recv(x, rank - 1)
            y = x @ weight
            if rank < last:
                dist.batch_isend_irecv([dist.P2POp(dist.isend, y.detach(), rank + 1)])[0].wait()
            y.sum().backward()

        return step

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        graphs = [capture(make_step, ranks=4, rank=rank) for rank in range(4)]
    assert [graph.groups for graph in graphs] == [
        ((0, 1),),
        ((0, 1), (1, 2)),
        ((1, 2), (2, 3)),
        ((2, 3),),
    ]
    assert all(
        "priced as a broadcast between the two" in note for graph in graphs for note in graph.notes
    )
    assert len(seen) >= 4 and {
        each[2] for graph in graphs for each in _find_collectives(graph)
    } == {4.0 * 64 * 64}
    with pytest.warns(UserWarning, match="priced as a broadcast"):
        found = predict(graphs, "a100-sxm-8")
    assert graphs[0].notes[0] in found.warnings
    assert found.time > 3 * float(
        load_platform("a100-sxm-8").collective_time("broadcast", 4 * 64 * 64, ranks=2)
    )
