"""Calculon (Isaev et al., SC 2023, doi:10.1145/3581784.3607102), asked in a checkout of it that
somebody has.

It is on no package index: `python -m benchmarks.peers --calculon DIR` names the folder that holds
its folders calculon and systems. Nothing of it is a part of perfkit.
"""

import json
import math
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks import scale
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

Ask: TypeAlias = Callable[[Transformer, Strategy], float]
#: What it calls the ways of `Strategy.checkpoint`.
_AGAIN = {"none": "none", "selective": "attn_only", "full": "full"}
#: Settings that no question here varies.
_FIXED: dict[str, Any] = {
    "datatype": "float16",
    "fused_activation": False,
    "attention_type": "multihead",
    "tensor_par_overlap": "none",
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}


def load_calculon(folder: Path, system: str = "a100_80g") -> Ask:
    """A function that asks it for the time of a strategy on one of its systems [s], nan where that
    does not fit.

    As in its own validation, tensor parallelism is in a node and stages are between nodes unless
    all ranks share one; gathered inputs of sequence parallelism are gathered again in the backward
    pass.
    """
    facts = folder / "systems" / f"{system}.json"
    if not facts.is_file():
        raise ValueError(
            f"calculon is {str(folder)!r}; it holds no systems/{facts.name}; name a checkout of Calculon"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    tool: Any = import_module("calculon")
    where = tool.System(json.loads(facts.read_text(encoding="utf-8")))

    def price(model: Transformer, strategy: Strategy) -> float:
        s, sharded = strategy, strategy.sequence_parallel
        far = int(s.ranks > where.get_network(0).size)
        wide, inner = model.hidden // model.heads, model.inner or 4 * model.hidden
        app = {
            "hidden": model.hidden,
            "feedforward": inner,
            "seq_size": model.sequence,
            "attn_heads": model.heads,
            "attn_size": wide,
            "num_blocks": model.layers,
        }
        ways = {
            "num_procs": s.ranks,
            "tensor_par": s.tp,
            "pipeline_par": s.pp,
            "data_par": s.dp,
            "tensor_par_net": 0,
            "pipeline_par_net": far,
            "data_par_net": far,
            "batch_size": model.batch,
            "microbatch_size": s.micro_batch,
            "activation_recompute": _AGAIN[s.checkpoint],
            "pipeline_interleaving": s.chunks,
            "optimizer_sharding": s.zero > 0 and s.dp > 1,
            "tensor_par_comm_type": "rs_ag" if sharded else "ar",
            "data_par_overlap": s.overlap and s.dp > 1,
            "seq_par_ag_redo": sharded and s.checkpoint != "full",
            **_FIXED,
        }
        asked = tool.Llm(tool.Llm.Application(app), _Silent)
        try:
            asked.compile(where, tool.Llm.Execution.from_json(ways))
            asked.run(where)
        except tool.Llm.Error:
            return math.nan
        return float(asked.get_total_time())

    return price


class _Silent:
    """A logger that drops what it is told."""

    @staticmethod
    def debug(*words: Any) -> None:
        """Drop the words."""


def compare_answers(ask: Ask) -> str:
    """Errors of Calculon and of perfkit on the published steps on A100 that both can express [%].

    Constants of perfkit are fitted without the source. Those of Calculon are its own; its authors
    validated them on arXiv:2205.05198, table 5.
    """
    rows = []
    for source, each in (
        ("arXiv:2205.05198, table 5", scale.list_recomputed),
        ("vTrain", scale.list_vtrain),
    ):
        listed = list(each())
        told = [(row.seconds, ask(row.model, row.strategy), row) for row in listed]
        both = [
            (other / real - 1, scale.price_row(row)["error"])
            for real, other, row in told
            if other == other
        ]
        for tool, errors in zip(("Calculon", "perfkit"), np.transpose(both), strict=True):
            rows.append(
                {"steps": source, "tool": tool, "of": len(listed), **summarize_errors(errors)}
            )
    figures = {name: f"{{{name}:.1f}}" for name in ("geomean", "mean", "p95", "bias")}
    columns = {"steps": "{steps}", "tool": "{tool}", "n": "{n:.0f}", "of": "{of}", **figures}
    return lay_out(rows, columns)
