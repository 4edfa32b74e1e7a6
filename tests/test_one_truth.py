"""An idea stands in one place: names of one register are listed again nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

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
#: Names of each register, and the file that has their records.
REGISTERS = {
    "optimizers": (OPTIMIZERS, "models/optimizers.py"),
    "collectives": (OPERATIONS, "models/collectives.py"),
    "algorithms": (ALGORITHMS, "models/algorithms.py"),
    "number formats": (DTYPES, "ground/hardware.py"),
    "schedules": (SCHEDULES, "models/partitions.py"),
    "kernels of attention": (ATTENTION, "workloads/operations.py"),
    "presets": ([*DLRMS, *TRANSFORMERS], "reference_data"),
}
#: Choices of some names for a purpose, by file and register.
CHOICES = {
    ("models/algorithms.py", "collectives"): "those that go around a ring by the textbook",
    ("platform/collectives.py", "algorithms"): "those that are composed over nodes",
    ("platform/sources.py", "collectives"): "those whose time shows the link between nodes",
    ("prediction/contrast.py", "collectives"): "those that a comparison of platforms shows",
    ("recording/exchanges.py", "collectives"): "what prices each of PyTorch's names",
    ("measure/timing.py", "collectives"): "PyTorch's function for each",
    ("platform/kernels.py", "number formats"): "those of tensor cores",
    ("platform/sources.py", "number formats"): "order of preference",
    ("measure/probes.py", "number formats"): "those that a cluster is measured in",
    ("workloads/execution.py", "number formats"): "those whose products a compiler pads",
    ("workloads/tape.py", "number formats"): "those of a whole workload",
    ("readers/kernel_database.py", "number formats"): "those of messages",
    ("recording/modules.py", "number formats"): "PyTorch's type for each",
    ("workloads/vocabulary.py", "kernels of attention"): "which kernels can run which sizes",
}


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


@pytest.mark.parametrize("register", REGISTERS)
def test_names_are_listed_once(register: str) -> None:
    names, home = REGISTERS[register]
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, texts in list_literals(ast.parse(path.read_text(encoding="utf-8"))):
            if place != home and len(texts & {*names}) >= 3:
                found[place] = f"{place}, line {line}"
    chosen = {place for place, known in CHOICES if known == register}
    new = [text for place, text in found.items() if place not in chosen]
    assert not new, f"{register} are listed again in {new}: read their records in {home}"
    assert chosen <= {*found}, f"{chosen - {*found}} list no {register} any more"
