"""An idea stands in one place: names of one register are listed again nowhere else."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import perfkit
from perfkit.ground.hardware import DTYPES
from perfkit.models.algorithms import ALGORITHMS
from perfkit.models.collectives import OPERATIONS
from perfkit.models.optimizers import OPTIMIZERS
from perfkit.models.partitions import SCHEDULES
from perfkit.workloads.dlrm import PRESETS as DLRMS
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.transformer import PRESETS as TRANSFORMERS

PACKAGE = Path(perfkit.__file__).parent


class Register(NamedTuple):
    """Names, and the file that has their records."""

    names: Collection[str]
    home: str


REGISTERS = {
    "optimizers": Register(OPTIMIZERS, "models/optimizers.py"),
    "collectives": Register(OPERATIONS, "models/collectives.py"),
    "algorithms": Register(ALGORITHMS, "models/algorithms.py"),
    "number formats": Register(DTYPES, "ground/hardware.py"),
    "schedules": Register(SCHEDULES, "models/partitions.py"),
    "kernels of attention": Register(ATTENTION, "workloads/operations.py"),
    "presets": Register([*DLRMS, *TRANSFORMERS], "reference_data"),
}
#: Choices of some names for a purpose, by file and register.
CHOICES = {
    ("models/algorithms.py", "collectives"): "those that go around a ring by the textbook",
    ("platform/collectives.py", "algorithms"): "those that are composed over nodes",
    ("platform/sources.py", "collectives"): "those whose time shows the link between nodes",
    ("prediction/contrast.py", "collectives"): "those that a comparison of platforms shows",
    ("prediction/tiles.py", "collectives"): "those among ranks that share layers",
    ("recording/exchanges.py", "collectives"): "what prices each of PyTorch's names",
    ("measure/timing.py", "collectives"): "PyTorch's function for each",
    ("diagnosis/candidates.py", "collectives"): "those among pairs of ranks",
    (
        "diagnosis/evidence.py",
        "collectives",
    ): "those whose busbw is what a node sends around a ring",
    ("diagnosis/limits.py", "collectives"): "those whose nodes gather or scatter",
    ("readers/deepspeed_comm.py", "collectives"): "those whose busbw tells the ranks",
    ("readers/hccl.py", "collectives"): "the programs of HCCL Test",
    ("readers/osu.py", "collectives"): "those whose size is that of one part",
    ("readers/training_facts.py", "number formats"): "arguments of Megatron-LM",
    ("readers/training_models.py", "number formats"): "arguments of training software",
    ("workloads/tables.py", "number formats"): "those that tables are stored in",
    ("platform/kernels.py", "number formats"): "those of tensor cores",
    ("platform/sources.py", "number formats"): "order of preference",
    ("plots/nodes.py", "number formats"): "whose peak a drawing of a node shows",
    ("measure/probes.py", "number formats"): "those that a cluster is measured in",
    ("workloads/execution.py", "number formats"): "those whose products a compiler pads",
    ("workloads/tape.py", "number formats"): "those of a whole workload",
    ("readers/kernel_database.py", "number formats"): "those of messages",
    ("recording/modules.py", "number formats"): "PyTorch's type for each",
    ("workloads/vocabulary.py", "kernels of attention"): "which kernels can run which sizes",
    ("platform/kernels.py", "kernels of attention"): "to which widths each pads heads",
}


@cache
def read_literals() -> dict[str, list[tuple[int, set[str]]]]:
    """Literals of each file of the package, see `list_literals`."""
    literals = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        literals[path.relative_to(PACKAGE).as_posix()] = [*list_literals(tree)]
    return literals


def list_literals(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Line and texts of each sequence, set and mapping that is written out."""
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        texts = {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
        if texts:
            yield node.lineno, texts


@pytest.mark.parametrize("name", REGISTERS)
def test_names_are_listed_once(name: str) -> None:
    register = REGISTERS[name]
    listed = {}
    for file, literals in read_literals().items():
        if file == register.home:
            continue
        for line, texts in literals:
            if len(texts & set(register.names)) >= 3:
                listed[file] = f"{file}, line {line}"
    chosen = {file for file, of in CHOICES if of == name}
    again = [place for file, place in listed.items() if file not in chosen]
    assert not again, f"{name} are listed again in {again}: read their records in {register.home}"
    assert chosen <= listed.keys(), f"{chosen - listed.keys()} list no {name} any more"
