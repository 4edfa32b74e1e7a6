"""One run of a training script in a process of its own: recorded, or run for real with its
operations counted.

python -m benchmarks.helpers.script_runs JOB.json
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: Operations that read a number or change no memory, which a graph does not have.
_NO_WORK = ("_local_scalar_dense", "is_same_size", "lift_fresh", "is_pinned", "_has_compatible")


@dataclass(frozen=True)
class Job:
    """What a process does.

    Parameters
    ----------
    script : str
        A script, in the working folder.
    words : list of str
        Its arguments.
    device : str
        ``cpu`` or ``cuda``.
    ranks : int
        Number of ranks [-].
    is_real : bool
        Whether it runs for real, on the CPU, instead of being recorded.
    answer : str
        File for the answer.
    """

    script: str
    words: list[str]
    device: str
    ranks: int
    is_real: bool
    answer: str


@dataclass(frozen=True)
class Run:
    """What came of it.

    Parameters
    ----------
    error : str
        Why there is no iteration; empty if there is one.
    is_refused : bool
        Whether perfkit refused it, and no error of another kind ended it.
    seconds : float
        Processor time [s].
    operations : list of str
        Names of the operations of one iteration, in order.
    kinds : int
        Kinds of iterations [-].
    flops : float
        Work of the operations that PyTorch's counter knows [FLOP].
    counted : float
        The same by PyTorch's counter [FLOP].
    """

    error: str
    is_refused: bool
    seconds: float
    operations: list[str]
    kinds: int
    flops: float = 0.0
    counted: float = 0.0


class _Count:
    """Counts the work of recorded operations by the formulas of PyTorch's counter."""

    def __init__(self) -> None:
        from torch._ops import OpOverloadPacket
        from torch.utils.flop_counter import flop_registry

        #: Formulas by name, and how many arguments of an operation are not given by keyword.
        self._formulas: dict[str, tuple[Any, int]] = {}
        for packet, rule in flop_registry.items():
            if not isinstance(packet, OpOverloadPacket):  # flex_attention is none
                continue
            arguments = getattr(packet, packet.overloads()[0])._schema.arguments
            given = sum(not argument.kwarg_only for argument in arguments)
            self._formulas[packet.__name__] = rule, given
        self._count = 0.0  # of the present iteration [FLOP]
        self._of_graphs: list[tuple[Any, float]] = []

    def watch(self) -> None:
        """Count from now on."""
        from perfkit.recording import scripts
        from perfkit.recording.recorder import Recorder

        append, begin, end = Recorder._append, Recorder.begin, scripts.end_iteration

        def append_and_count(
            recorder: Any, schema: Any, args: Any, given: Any, out: Any, module: str
        ) -> None:
            append(recorder, schema, args, given, out, module)
            if schema.name in self._formulas:
                rule, count = self._formulas[schema.name]
                work = float(rule(*args[:count], out_val=out))
                # PyTorch counts scores behind the diagonal, which no kernel works out
                self._count += work / 2 if _is_causal(schema, args) else work

        def begin_anew(recorder: Any) -> None:
            self._count = 0.0
            begin(recorder)

        def end_and_keep(recorder: Any, *others: Any) -> Any:
            graph = end(recorder, *others)
            self._of_graphs.append((graph.features, self._count))
            return graph

        patch.object(Recorder, "_append", append_and_count).start()
        patch.object(Recorder, "begin", begin_anew).start()
        patch.object(scripts, "end_iteration", end_and_keep).start()

    def compare(self, graph: Any) -> tuple[float, float]:
        """Work of the operations that both know, by the graph and by PyTorch's counter [FLOP]."""
        known = [label.name in self._formulas for label in graph.labels]
        for features, count in self._of_graphs:
            if features is graph.features:
                return float(graph.features.flops[known].sum()), count
        return 0.0, 0.0


def _is_causal(schema: Any, args: Any) -> bool:
    """Whether an operation is attention to what stands before alone."""
    names = [name for name, _ in schema.defaults]
    return "is_causal" in names and bool(args[names.index("is_causal")])


def _record(job: Job) -> Run:
    """Record the script."""
    from perfkit.recording.scripts import Recording
    from perfkit.recording.scripts_runs import Program, ScriptError, record_program

    count = _Count()
    count.watch()
    recording = Recording(device=job.device, ranks=job.ranks, name=job.script, to_packages=True)
    try:
        record_program(Program(job.script, None, job.words), recording)
    except ValueError as error:
        return Run(str(error), True, time.process_time(), [], 0)
    except ScriptError as error:
        return Run(str(error), False, time.process_time(), [], 0)
    graph = recording.graph
    names = [label.name for label in graph.labels if label.name not in _NO_WORK]
    kinds = len(recording.iterations)
    flops, counted = count.compare(graph)
    return Run("", False, time.process_time(), names, kinds, flops, counted)


def _run(job: Job) -> Run:
    """Run the script on the CPU up to its fourth update, and count the operations of the third
    iteration."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data import DataLoader

    from perfkit.recording.patches import load_batches
    from perfkit.recording.scripts import LoopEnds
    from perfkit.recording.scripts_runs import Program, set_up
    from perfkit.workloads.vocabulary import VIEWS

    names: list[str] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name.split("::")[-1]
            if not (name in VIEWS or name in _NO_WORK or func.namespace in ("prim", "profiler")):
                names.append(name)
            return func(*args, **(kwargs or {}))

    iterations: list[list[str]] = []
    first: list[Any] = []

    def end(optimizer: Any, *_: Any) -> None:
        first.append(optimizer)
        if optimizer is first[0]:
            iterations.append([*names])
            names.clear()
            if len(iterations) == 4:
                raise LoopEnds

    DataLoader.__iter__ = lambda loader: load_batches(loader, print)  # type: ignore[method-assign,assignment,return-value]
    torch.set_num_threads(1)
    register_optimizer_step_post_hook(end)
    program = Program(job.script, None, job.words)
    try:
        with set_up(program), Counter():
            program.run()
    except (Exception, SystemExit) as error:
        if len(iterations) < 2:
            return Run(f"{type(error).__name__}: {error}", False, time.process_time(), [], 0)
    except LoopEnds:
        pass
    if len(iterations) < 2:
        return Run("it has no two updates", False, time.process_time(), [], 0)
    return Run("", False, time.process_time(), iterations[-1], 1)


def main() -> None:
    """Do a job, which a file describes."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    run = _run(job) if job.is_real else _record(job)
    Path(job.answer).write_text(json.dumps(asdict(run)))


if __name__ == "__main__":
    main()
