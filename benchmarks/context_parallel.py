"""Sequences that ranks share (context parallelism): published steps beside predictions.

    python -m benchmarks.context_parallel

Steps of NeMo (keys on a ring, 32,768 to 1,048,576 tokens on H100 and B200) and of Llama 3 405B (keys
that are gathered, 131,072 tokens on 16,384 H100), with steps of the same sources whose sequences are
whole (reference_data/published/context_parallel_steps.csv, each with its source). Nothing was fitted
to them. Sources state FLOP/s of a GPU: NeMo counts attention as if no token were masked (its tables
of tokens/s and TFLOP/s for 4,096 and 8,192 tokens agree on that alone); of Llama 3 the half that is
computed is taken. How much more a step takes than one of whole sequences is judged beside it.
"""

from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import lay_out_errors, widen
from benchmarks.helpers.files import read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.ground.units import check_choice
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class Case(NamedTuple):
    """What a published row ran.

    Parameters
    ----------
    platform : Platform
        Where.
    model : Transformer
        The model.
    strategy : Strategy
        How.
    seconds : float
        Published time of an iteration [s].
    """

    platform: Platform
    model: Transformer
    strategy: Strategy
    seconds: float


def count_flops(model: Transformer, *, counted: str) -> float:
    """FLOP of an iteration: three passes of products of weights, and of attention, of which all keys
    of each token are ``counted`` (``full``), or the ``half`` that is not masked [FLOP]."""
    check_choice("counted", counted, ("full", "half"))
    head_width = model.hidden / model.heads
    keys = 2 * model.hidden * model.kv_heads * head_width
    weights = 2 * model.hidden**2 + keys + 3 * model.hidden * model.inner
    products = 2 * (model.layers * weights + model.vocabulary * model.hidden)
    attention = 4.0 * model.layers * model.sequence * model.hidden
    if counted == "half":
        attention /= 2
    return float(3 * model.batch * model.sequence * (products + attention))


def make_case(row: dict[str, str]) -> Case:
    """What a row ran. Sequences go through a pass one at a time."""
    sequence = int(row["sequence"])
    model = Transformer.preset(
        row["model"],
        batch=int(row["batch"]),
        sequence=sequence,
        positions=sequence,
        dtype=row["dtype"],
        mixed=True,
        fused=True,
    )
    tp, pp = int(row["tp"]), int(row["pp"])
    settings: dict[str, Any] = {}
    if row["model"] == "llama-3.1-405b":
        # stages of 8 chunks, the first and the last one with a layer less (section 3.3.2)
        settings = {
            "schedule": "interleaved",
            "chunks": 8,
            "first_layers": 7,
            "last_layers": 7,
        }
    strategy = Strategy(
        tp=tp,
        pp=pp,
        dp=int(row["dp"]),
        cp=int(row["cp"]),
        cp_kind=row["cp_kind"],
        zero=1,
        sequence_parallel=tp > 1,
        **settings,
    )
    node = load_platform(row["device"])
    nodes = -(-int(strategy.ranks) // node.network.ranks_per_node)
    platform = node
    if nodes > 1:
        platform = node.with_nodes(nodes)
    flops = count_flops(model, counted=row["counted"])
    seconds = flops / (float(row["tflops"]) * 1e12 * int(strategy.ranks))
    return Case(platform, model, strategy, seconds)


def compare_row(row: dict[str, str]) -> dict[str, Any]:
    """A row beside its prediction."""
    case = make_case(row)
    with keep_quiet():
        columns = price_strategies(
            case.model,
            case.platform,
            Strategy.stack([case.strategy]),
            execution="compiled",
            stack="megatron-te",
        )
    time = float(columns["time"][0])
    return {
        "row": row["row"],
        "cp": int(row["cp"]),
        "kind": row["cp_kind"],
        "share": float(columns["context"][0]) / time,
        **widen(time, float(columns["spread"][0]), case.seconds),
    }


def compare_rows() -> list[dict[str, Any]]:
    """All rows beside predictions."""
    rows = read_csv(find_reference("published/context_parallel_steps.csv"))
    return [compare_row(row) for row in rows]


_ROWS = {
    "row": "{row}",
    "cp": "{cp}",
    "kind": "{kind}",
    "published [s]": "{measured:.3g}",
    "predicted [s]": "{predicted:.3g}",
    "error": "{error:+.0%}",
    "exposed": "{share:.1%}",
}


@command({})
def main(given: Any) -> None:
    """Sequences that ranks share, published and predicted."""
    rows = compare_rows()
    print(lay_out(rows, _ROWS))
    shared = [row for row in rows if row["cp"] > 1]
    whole = [row for row in rows if row["cp"] == 1]
    print(f"\n{lay_out_errors({'shared sequences': shared, 'whole sequences': whole})}")
