"""Calls of perfkit that `benchmarks.beside` times, in a process of their own.

    python -P benchmarks/helpers/beside_calls.py

The process reads a line with the name of a call and a number, runs the call, and prints the
processor time that it took [s]. It imports nothing but perfkit and the standard library, so it runs
on any commit that has the public calls below. Different numbers give different arguments, so that
nothing is found that an earlier call has left.
"""

import sys
import time
import warnings
from collections.abc import Callable

_begin = time.process_time()
import perfkit as pk  # noqa: E402

_IMPORT = time.process_time() - _begin


def _load_bert(batch: int, **sizes: int) -> pk.Transformer:
    return pk.Transformer.bert("bert-large", batch=batch, sequence=128, dtype="bf16", **sizes)


_SAME = _load_bert(8)
_GPT3 = {"tp": 8, "pp": 8, "dp": 1, "micro_batch": 1}


def import_perfkit(number: int) -> None:
    """Nothing: the process has imported it, and says how long that took."""


def predict_first(number: int) -> None:
    """The first prediction of a process, which imports the modules that it needs."""
    pk.predict(_SAME, "h100-sxm-8")


def predict_new_structure(number: int) -> None:
    """BERT-large with a vocabulary that no prediction had before."""
    pk.predict(_load_bert(8, vocabulary=30_000 + number), "h100-sxm-8")


def predict_same_workload(number: int) -> None:
    """BERT-large, the same each time."""
    pk.predict(_SAME, "h100-sxm-8")


def predict_new_batch(number: int) -> None:
    """BERT-large with a batch that no prediction had before."""
    pk.predict(_load_bert(8 + number), "h100-sxm-8")


def predict_new_batch_on_ranks(number: int) -> None:
    """BERT-large on 8 ranks with a batch that no prediction had before."""
    pk.predict(_load_bert(64 + 8 * number), "h100-sxm-8", ranks=8)


def predict_dlrm_on_ranks(number: int) -> None:
    """DLRM of 26 unlike tables on 8 ranks, with a batch that no prediction had before."""
    rows = [1_000 + 40_000 * table for table in range(26)]
    pooling = [1 + table for table in range(26)]
    model = pk.DLRM(batch=8 * (256 + number), rows=rows, dim=64, pooling=pooling)
    pk.predict(model, "h100-sxm-8", ranks=8)


def sweep_batches(number: int) -> None:
    """BERT-large with 32 batches and 4 lengths of sequences."""
    grid = {"batch": [number + 2 * step for step in range(1, 33)], "sequence": [128, 256, 384, 512]}
    pk.sweep(_SAME, grid, "h100-sxm-8", progress=False)


def explore_strategies(number: int) -> None:
    """Strategies of GPT-3 with 175 billion parameters on 64 ranks."""
    model = pk.Transformer.preset("gpt3-175b", batch=64 * (1 + number))
    pk.explore(model, "h100-sxm-8x8", 64)


def predict_strategy(number: int) -> None:
    """One strategy of GPT-3 with 175 billion parameters: 8 ranks share a layer, 8 stages, 64
    micro-batches of sequences that no prediction had before."""
    model = pk.Transformer.preset("gpt3-175b", batch=64, sequence=2048 - 8 * number)
    pk.predict(model, "h100-sxm-8x8", strategy=pk.Strategy(**_GPT3))


#: Calls that need a process in which nothing has run.
FRESH = ("import_perfkit", "predict_first")
CALLS: dict[str, Callable[[int], None]] = {
    call.__name__: call
    for call in (
        import_perfkit,
        predict_first,
        predict_new_structure,
        predict_same_workload,
        predict_new_batch,
        predict_new_batch_on_ranks,
        predict_dlrm_on_ranks,
        sweep_batches,
        explore_strategies,
        predict_strategy,
    )
}


def serve() -> None:
    """Run the calls that are asked for, until the input ends."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        name, number = line.split()
        begin = time.process_time()
        CALLS[name](int(number))
        seconds = time.process_time() - begin
        if name == import_perfkit.__name__:
            seconds = _IMPORT
        print(seconds, flush=True)


if __name__ == "__main__":
    serve()
