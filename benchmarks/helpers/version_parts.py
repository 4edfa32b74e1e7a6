"""What perfkit does with the PyTorch of this interpreter, each part in a process of its own.

python -m benchmarks.helpers.version_parts ANSWERS.json
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Longest time of one part [s].
LONGEST = 1800
#: Tests of captures that are run with each version.
TESTS = ("tests/test_patches.py", "tests/test_recorded_programs.py")
_SCRIPT = """
import torch
model = torch.nn.Linear(64, 64).cuda()
updates = torch.optim.AdamW(model.parameters())
for _ in range(100):
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    updates.zero_grad()
    loss.backward()
    updates.step()
    print(loss.item())
"""


def _import() -> None:
    """Import perfkit and PyTorch."""
    import torch

    import perfkit

    assert perfkit.__version__ and torch.ones(2).sum().item() == 2


def _predict() -> None:
    """Predict a built model."""
    import perfkit as pk

    assert pk.predict(pk.Transformer.bert("bert-large"), "h100-sxm-8").time > 0


def _capture(make: Callable[[], Any], *operations: str, **settings: Any) -> None:
    """Capture a step; the operations must be in its graph, or collectives of these kinds."""
    import perfkit as pk

    graph = pk.capture(make, **settings)
    names = {label.name for label in graph.labels}
    for operation in operations:
        assert operation in names, f"no {operation} in {sorted(names)}"
    assert pk.predict(graph, "h100-sxm-8").time > 0


def _make_block() -> Any:
    """A small block of products."""
    from torch import nn

    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def _make_training(net: Any) -> Callable[[], None]:
    """A training step of a block."""
    import torch

    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(8, 16)).sum().backward()
        optimizer.step()

    return step


def _capture_plain() -> None:
    """A plain step, with the operations of a real one in order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import perfkit as pk
    from perfkit.workloads.vocabulary import VIEWS

    names = list[str]()

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name.split("::")[-1]
            if name not in VIEWS and func.namespace not in ("prim", "profiler"):
                names.append(name)
            return func(*args, **(kwargs or {}))

    graph = pk.capture(lambda: _make_training(_make_block()))
    step = _make_training(_make_block())
    step()
    with Listing():
        step()
    assert [label.name for label in graph.labels] == names


def _capture_compiled() -> None:
    """A compiled step."""
    import torch

    _capture(lambda: _make_training(torch.compile(_make_block())), "addmm", device="cuda")


def _capture_ddp() -> None:
    """DistributedDataParallel on eight ranks."""
    from torch.nn.parallel import DistributedDataParallel

    make = lambda: _make_training(DistributedDataParallel(_make_block()))  # noqa: E731
    _capture(make, "all_reduce", ranks=8)


def _capture_fsdp() -> None:
    """Weights that FSDP2 divides."""
    from torch.distributed.fsdp import fully_shard

    def make() -> Any:
        net = _make_block()
        fully_shard(net)
        return _make_training(net)

    _capture(make, "all_gather", "reduce_scatter", ranks=8)


def _capture_dtensor() -> None:
    """Products that DTensor splits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    def make() -> Any:
        net = _make_block()
        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        parallel.parallelize_module(net, init_device_mesh("cpu", (8,)), plan)
        return _make_training(net)

    _capture(make, "all_reduce", ranks=8)


def _capture_flex() -> None:
    """Attention by a compiled kernel."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    def make() -> Any:
        query = torch.nn.Parameter(torch.randn(1, 2, 128, 16, device="cuda"))
        return lambda: flex_attention(query, query, query).sum().backward()

    _capture(make, device="cuda")


def _capture_recurrent() -> None:
    """An LSTM on a CPU and on a GPU."""
    import torch

    def make() -> Any:
        net = torch.nn.LSTM(16, 16)
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            optimizer.zero_grad()
            net(torch.ones(5, 2, 16))[0].sum().backward()
            optimizer.step()

        return step

    _capture(make, "mkldnn_rnn_layer")
    _capture(make, device="cuda")


def _capture_scripted() -> None:
    """A function of TorchScript that makes a number."""
    import torch

    def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
        return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)

    scripted = torch.jit.script(scale)

    def make() -> Any:
        net = _make_block()
        return lambda: (net(torch.ones(8, 16)) / scripted(torch.ones(8, 16), 3)).sum().backward()

    _capture(make, "div")


def _capture_amp() -> None:
    """Autocast with gradient scaling on a GPU."""
    import torch

    import perfkit as pk

    graph = pk.capture(_make_block(), torch.ones(8, 16), amp="fp16", device="cuda")
    assert {"float16", "fp16"} & {str(dtype) for dtype in graph.dtypes} or "fp16" in str(
        graph.dtypes
    )


def _record() -> None:
    """Record a loop."""
    import torch

    import perfkit as pk

    with pk.record(device="cuda", ranks=2) as recording:
        net = torch.nn.parallel.DistributedDataParallel(_make_block().cuda())
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(100):
            optimizer.zero_grad()
            net(torch.ones(8, 16, device="cuda")).sum().backward()
            optimizer.step()
    assert len(recording.graph.collectives)


def _run_command(*words: str) -> None:
    """Run perfkit's command line."""
    sys.argv = ["perfkit", *words]
    try:
        runpy.run_module("perfkit", run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"exit code {end.code}"


def _capture_script() -> None:
    """Capture a script from the command line."""
    Path("train.py").write_text(_SCRIPT)
    _run_command("capture", "train.py", "--device", "cuda", "--platform", "h100-sxm-8")


def _measure() -> None:
    """Measure a product of a calibration, and iterations with the operations of their graphs."""
    import perfkit as pk
    from perfkit.measure.iterations import time_iteration
    from perfkit.measure.kernels import size_product
    from perfkit.measure.operations import time_kernels
    from perfkit.measure.samples import dump

    timings = time_kernels(cases=[["gemm", "nt", size_product(64, 64, 64)]], seconds=0.05)
    assert timings[0].median > 0
    bert = pk.Transformer.bert(layers=1, hidden=64, heads=2, sequence=32, batch=2, vocabulary=1000)
    dlrm = pk.DLRM(rows=[1000, 2000], dim=16, batch=64, bottom=(64,), top=(64,), features=13)
    for workload in (bert, dlrm):
        rank = time_iteration(workload=dump(workload), seconds=0.1, operations=2)
        measured, known = len(rank.operation_seconds or ()), len(workload.graphs(1, None)[0])
        assert measured == known, f"{measured} operations, and {known} in the graph"


def _read_trace() -> None:
    """Read a trace of PyTorch's profiler; without a GPU it is named as one of the host alone."""
    import torch

    import perfkit as pk

    step = _make_training(_make_block())
    step()
    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace("trace.json")
    try:
        pk.read_trace("trace.json")
    except ValueError as error:
        assert "no work of a device" in str(error), str(error)


def _run_pytest(*words: str) -> None:
    """Run pytest; the names of what failed are the error."""
    import pytest

    failed = list[str]()

    class Failures:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid.rpartition("::")[2])

    root = Path(__file__).parents[2]
    os.chdir(root)
    usual = ["-q", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(root)]
    code = pytest.main([*usual, *words], plugins=[Failures()])
    assert not code, f"{len(failed)} failed: {', '.join(failed[:6])}" if failed else f"exit {code}"


def _run_doctests() -> None:
    """Examples in the docstrings of the captures."""
    _run_pytest("perfkit/recording")


def _run_tests() -> None:
    """Named tests of captures."""
    _run_pytest(*TESTS)


#: The parts, in the order of the table.
PARTS: dict[str, Callable[[], None]] = {
    "import": _import,
    "predict": _predict,
    "capture, operations as in a real step": _capture_plain,
    "capture under autocast": _capture_amp,
    "capture, compiled": _capture_compiled,
    "capture, DDP": _capture_ddp,
    "capture, FSDP2": _capture_fsdp,
    "capture, DTensor": _capture_dtensor,
    "capture, flex attention": _capture_flex,
    "capture, LSTM": _capture_recurrent,
    "capture, TorchScript function": _capture_scripted,
    "pk.record": _record,
    "perfkit capture": _capture_script,
    "measure": _measure,
    "read_trace, host alone": _read_trace,
    "examples of recording": _run_doctests,
    "named tests": _run_tests,
}


def _do(part: str, folder: str, pipe: Any) -> None:
    """Do one part in this process."""
    log = os.open(Path(folder, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    signal.alarm(LONGEST)
    try:
        PARTS[part]()
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        pipe.send(f"{type(error).__name__}: {lines[0]}")
        return
    pipe.send("")


def main() -> None:
    """Do all parts, and write what came of each: nothing, or its error."""
    answers: dict[str, str] = {}
    context = multiprocessing.get_context("fork")
    wanted = sys.argv[2:] or list(PARTS)
    try:
        import torch

        import perfkit  # noqa: F401  # processes that are forked find both

        answers["torch"] = torch.__version__
    except Exception as error:
        answers["torch"] = ""
        answers["import"] = f"{type(error).__name__}: {error}"
        wanted = []
    for part in wanted:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_do, args=(part, folder, theirs))
            process.start()
            theirs.close()
            try:
                answers[part] = ours.recv()
            except EOFError:
                process.join()
                answers[part] = f"the process ended with {process.exitcode}"
            process.join()
        print(part, answers[part] or "works", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
