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


def _state_model(model: Transformer) -> dict[str, Any]:
    """Sizes of a model under the names of Calculon."""
    return {
        "hidden": model.hidden,
        "feedforward": model.inner or 4 * model.hidden,
        "seq_size": model.sequence,
        "attn_heads": model.heads,
        "attn_size": model.hidden // model.heads,
        "num_blocks": model.layers,
    }


def _state_strategy(batch: int, strategy: Strategy, *, crosses_nodes: bool) -> dict[str, Any]:
    """A strategy under the names of Calculon; stages and replicas are between nodes if it crosses
    them."""
    network = 1 if crosses_nodes else 0
    has_replicas = strategy.dp > 1
    is_sharded = strategy.sequence_parallel
    return {
        "num_procs": strategy.ranks,
        "tensor_par": strategy.tp,
        "pipeline_par": strategy.pp,
        "data_par": strategy.dp,
        "tensor_par_net": 0,
        "pipeline_par_net": network,
        "data_par_net": network,
        "batch_size": batch,
        "microbatch_size": strategy.micro_batch,
        "activation_recompute": _AGAIN[strategy.checkpoint],
        "pipeline_interleaving": strategy.chunks,
        "optimizer_sharding": strategy.zero > 0 and has_replicas,
        "tensor_par_comm_type": "rs_ag" if is_sharded else "ar",
        "data_par_overlap": strategy.overlap and has_replicas,
        "seq_par_ag_redo": is_sharded and strategy.checkpoint != "full",
        **_FIXED,
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
        crosses_nodes = strategy.ranks > where.get_network(0).size
        fields = _state_strategy(model.batch, strategy, crosses_nodes=crosses_nodes)
        application = tool.Llm.Application(_state_model(model))
        asked = tool.Llm(application, _Silent)
        try:
            asked.compile(where, tool.Llm.Execution.from_json(fields))
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


_ERRORS = {
    "steps": "{steps}",
    "tool": "{tool}",
    "n": "{n:.0f}",
    "of": "{of}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:.1f}",
}


def compare_answers(ask: Ask) -> str:
    """Errors of Calculon and of perfkit on the published steps on A100 that both can express [%].

    Constants of perfkit are fitted without the source. Those of Calculon are its own; its authors
    validated them on arXiv:2205.05198, table 5.
    """
    sources = {
        "arXiv:2205.05198, table 5": list(scale.list_recomputed()),
        "vTrain": list(scale.list_vtrain()),
    }
    rows = []
    for source, steps in sources.items():
        errors: dict[str, list[float]] = {"Calculon": [], "perfkit": []}
        for step in steps:
            answer = ask(step.model, step.strategy)
            if not math.isnan(answer):
                errors["Calculon"].append(answer / step.seconds - 1)
                errors["perfkit"].append(scale.price_row(step)["error"])
        for tool, values in errors.items():
            figures = summarize_errors(values)
            rows.append({"steps": source, "tool": tool, "of": len(steps), **figures})
    return lay_out(rows, _ERRORS)
