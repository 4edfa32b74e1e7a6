"""Forms of a step that spread it over ranks: shards of weights and of products, sends, streams;
against real runs."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

import perfkit as pk

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
from perfkit.workloads.execution import compile_graph  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("few_calls"),
    pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning"),
]

Step = Callable[[], Any]


class _Block(nn.Module):
    """A residual block of two products, computed again in the backward pass if asked to."""

    def __init__(self, width: int = 16, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.reentrant = reentrant

    def run(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())

    def forward(self, x: Any) -> Any:
        if self.reentrant is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


def _shard(net: nn.Sequential, mesh: Any, **settings: Any) -> nn.Sequential:
    for block in net:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(net, mesh=mesh, **settings)
    return net


def _train(net: Any, width: int = 16, parts: int = 1, clip: bool = False, mean: Any = None) -> Step:
    """A step with as many micro-batches, whose gradients are reduced with the last one, and clipped
    if asked for; `mean` has a running mean of the weights.
    """
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    x = torch.randn(2, 8, width, requires_grad=True)
    is_copied = isinstance(net, DistributedDataParallel)

    def step() -> None:
        optimizer.zero_grad()
        for part in range(parts):
            is_last = part == parts - 1
            if parts > 1 and not is_copied:
                net.set_requires_gradient_sync(is_last)
            with net.no_sync() if is_copied and not is_last else nullcontext():
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
    if copies:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shards",))
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
    graph = pk.capture(FORMS[name], ranks=8)
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
    assert first == second
    for settings, real_names in zip(COPIES.values(), first, strict=True):
        graph = pk.capture(partial(_copied, **settings), ranks=2)
        assert [label.name for label in graph.labels] == real_names
        assert len(graph.collectives) == 1, "one bucket, and only once"


class Message(NamedTuple):
    """A collective of a graph."""

    name: str
    phase: str
    nbytes: float


def _list_messages(graph: Any) -> list[Message]:
    operations = [graph[index] for index in graph.collectives.tolist()]
    return [Message(each.name, each.phase, each.features["nbytes"]) for each in operations]


WIDTH, BLOCKS = 512, 12


@pytest.fixture(scope="module")
def capture_blocks() -> Callable[..., Any]:
    """Capture a sharded program whose blocks are gathered again in the backward pass, or kept."""

    @cache
    def capture_them(freed: bool) -> Any:
        def make_step() -> Step:
            net = nn.Sequential(*(_Block(WIDTH) for _ in range(BLOCKS))).to("cuda")
            mesh = init_device_mesh("cuda", (8,))
            sharded = _shard(net, mesh, mp_policy=_NARROW, reshard_after_forward=freed)
            return _train(sharded, WIDTH)

        return pk.capture(make_step, ranks=8, device="cuda")

    return capture_them


BLOCK_SIZE = sum(weight.numel() for weight in _Block(WIDTH).parameters())
GATHERED = 2.0 * BLOCK_SIZE  # bytes, in bf16
SCATTERED = 4.0 * BLOCK_SIZE  # in fp32
FREED = pytest.mark.parametrize("freed", [True, False])


@FREED
def test_blocks_are_gathered_before_forward_and_if_freed_before_backward(
    freed: bool, capture_blocks: Callable[..., Any]
) -> None:
    """FSDP2's documentation; gradients are scattered in fp32."""
    messages = _list_messages(capture_blocks(freed))
    forward = [message for message in messages if message.phase == "forward"]
    assert forward == [Message("all_gather", "forward", GATHERED)] * BLOCKS
    expected = {Message("reduce_scatter", "backward", SCATTERED)}
    if freed:
        expected.add(Message("all_gather", "backward", GATHERED))
    assert {message for message in messages if message.phase == "backward"} == expected
    names = [message.name for message in messages]
    assert names.count("reduce_scatter") == BLOCKS
    assert names.count("all_gather") == (2 * BLOCKS if freed else BLOCKS)


@FREED
def test_each_rank_updates_its_shard(freed: bool, capture_blocks: Callable[..., Any]) -> None:
    graph = capture_blocks(freed)
    updated = [
        graph[index].features["elements"]
        for index, label in enumerate(graph.labels)
        if label.name == "_foreach_lerp_"
    ]
    assert updated == [BLOCKS * BLOCK_SIZE / 8]


@FREED
def test_a_piece_of_each_of_six_weights_comes_from_each_rank(
    freed: bool, capture_blocks: Callable[..., Any]
) -> None:
    graph = capture_blocks(freed)
    names = [label.name for label in graph.labels]
    split = graph[names.index("split_with_sizes_copy")]
    assert split.variant == "cat"
    assert split.features["elements"] == BLOCK_SIZE
    assert split.features["rows"] == 8 * 6


@FREED
def test_a_block_is_gathered_once_that_before_the_last_is_there(
    freed: bool, capture_blocks: Callable[..., Any]
) -> None:
    """By streams; so products of two blocks run meanwhile."""
    graph = capture_blocks(freed)
    assert graph.waits is not None
    waiting = {wait.collective: wait.operation for wait in graph.waits}
    products = [index for index, label in enumerate(graph.labels) if label.kind == "gemm"]
    products_meanwhile = []
    for number, start in enumerate(graph.collectives.tolist()[:BLOCKS]):
        end = waiting[number]
        products_meanwhile.append(sum(start < product < end for product in products))
    assert products_meanwhile[:2] == [0, 2]
    assert set(products_meanwhile[2:]) == {4}


@FREED
def test_gradients_are_waited_for_by_the_next_ones_and_by_the_optimizer(
    freed: bool, capture_blocks: Callable[..., Any]
) -> None:
    graph = capture_blocks(freed)
    assert graph.waits is not None
    waiting = {wait.collective: wait.operation for wait in graph.waits}
    waiting_for_gradients = []
    for number, message in enumerate(_list_messages(graph)):
        if message.name == "reduce_scatter":
            waiting_for_gradients.append(graph.labels[waiting[number]].name)
    assert len(waiting_for_gradients) == BLOCKS
    assert set(waiting_for_gradients[:-1]) == {"chunk_cat"}
    assert waiting_for_gradients[-1] == "_foreach_add_"


@FREED
def test_collectives_of_shards_are_hidden(freed: bool, capture_blocks: Callable[..., Any]) -> None:
    whole = pk.predict(capture_blocks(freed), "h100-sxm-8")
    assert whole.time < whole.serial


class _Compiled(nn.Sequential):
    """Normalised, multiplied, activated and added: the products stay, and two kernels are left of
    the rest."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x).sigmoid()


class Updates(NamedTuple):
    """Operations of the update, and calls that they take."""

    operations: int
    calls: float


def count_updates(graph: Any) -> Updates:
    is_update = [label.phase == "update" for label in graph.labels]
    return Updates(sum(is_update), graph.column("calls")[is_update].sum())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as the compiler is imported
def test_a_compiled_module_is_recorded_as_kernels_and_says_so() -> None:
    def make_step(compiled: str) -> Step:
        net = _Compiled(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
        x = torch.randn(8, 16)

        def train(run: Any) -> None:
            run(x).square().sum().backward()
            optimizer.step()

        if compiled == "in place":
            net.compile()
        if compiled == "step":
            return torch.compile(partial(train, net))
        if compiled == "module":
            return partial(train, torch.compile(net))
        return partial(train, net)

    with pytest.warns(UserWarning, match=r"taken to be compiled as a whole"):
        module = pk.capture(partial(make_step, "module"))
        in_place = pk.capture(partial(make_step, "in place"))
        step = pk.capture(partial(make_step, "step"))
    eager = pk.capture(partial(make_step, "nothing"))
    assert eager.execution == "eager"
    assert eager.notes == ()
    assert module.execution == "compiled"
    assert len(module.notes) == 1
    assert module.labels == compile_graph(eager).labels
    assert in_place.labels == module.labels
    assert eager.labels != module.labels
    assert count_updates(eager) == Updates(operations=4, calls=4)
    assert count_updates(module) == Updates(operations=4, calls=4)
    assert count_updates(step) == Updates(operations=4, calls=1)


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
        pk.capture(make_step, ranks=2, device="cuda")


def test_pinning_is_not_counted_and_says_so() -> None:
    def make_step() -> Step:
        x, rows = torch.randn(8, 8), torch.arange(4)

        def step() -> None:
            moved = x.pin_memory().to("cuda", non_blocking=True)
            moved[rows.pin_memory().to("cuda")].sum()

        return step

    with pytest.warns(UserWarning, match="to pin memory is not counted"):
        graph = pk.capture(make_step, device="cuda")
    # two copies; the host waits for the second one, "to"
    names = [label.name for label in graph.labels]
    assert names == ["copy_inputs", "copy_inputs", "to", "index", "sum"]


def test_graphs_of_a_gpu_are_named() -> None:
    def make_step(replayed: bool) -> Step:
        net, x = nn.Linear(4, 4), torch.randn(2, 4)
        graph = torch.cuda.CUDAGraph() if replayed else None
        run = torch.cuda.make_graphed_callables(net, (x,))

        def step() -> Any:
            run(x).sum().backward()
            return graph  # which a replayed step holds

        return step

    with pytest.raises(
        ValueError, match="replays kernels that capture does not see; give the step without it"
    ):
        pk.capture(partial(make_step, True), device="cuda")
    with pytest.warns(UserWarning, match="count as launched at once"):
        graph = pk.capture(partial(make_step, False), device="cuda")
    assert graph.execution == "graphs"
    assert len(graph.kernels[("gemm", "nt")]) == 1


def test_a_place_that_a_tensor_names_is_the_gpu() -> None:
    def make_step() -> Step:
        net = nn.Linear(4, 4).to("cuda")
        averaged = torch.optim.swa_utils.AveragedModel(net)

        def step() -> None:
            averaged.update_parameters(net)
            net(torch.randn(2, 4).to(net.weight.device)).cpu()

        return step

    with pytest.warns(UserWarning, match="the step works on tensors of the host"):
        moved = pk.capture(make_step, device="cuda")
    assert [moved.labels[i].variant for i in moved.transfers] == ["to_device", "to_host"]


def test_streams_and_events_say_what_waits_for_a_collective() -> None:
    def make_step() -> Step:
        x = torch.ones(8)
        side = torch.cuda.Stream()
        done = torch.cuda.Event()

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

    graph = pk.capture(make_step, ranks=2, device="cuda")
    assert [label.name for label in graph.labels] == ["all_reduce", "mul", "add", "sub"]
    assert graph.waits is not None
    assert list(graph.waits) == [(3, 0, False)]


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
        graphs = [pk.capture(make_step, ranks=4, rank=rank) for rank in range(4)]
    assert [graph.groups for graph in graphs] == [
        ((0, 1),),
        ((0, 1), (1, 2)),
        ((1, 2), (2, 3)),
        ((2, 3),),
    ]
    nbytes = 4.0 * 64 * 64
    for graph in graphs:
        assert all("priced as a broadcast between the two" in note for note in graph.notes)
        assert {message.nbytes for message in _list_messages(graph)} == {nbytes}
    assert len(seen) >= 4
    with pytest.warns(UserWarning, match="priced as a broadcast"):
        prediction = pk.predict(graphs, "a100-sxm-8")
    assert graphs[0].notes[0] in prediction.warnings
    sent = pk.load_platform("a100-sxm-8").collective_time("broadcast", nbytes, ranks=2)
    assert prediction.time > 3 * float(sent)
