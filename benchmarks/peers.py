"""Questions that perfkit and published closed-form tools answer in a second: the same ones, in one
run.

    python -m benchmarks.peers [--calculon DIR]

pip installs llm-analysis and mlsysim into a temporary folder. Calculon is on no package index: name
a checkout of it. Then its answers to published steps are judged too, beside those of perfkit. None
of them is a part of perfkit.
"""

import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import cycle, islice, product, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import polars as pl

import perfkit as pk
from benchmarks.helpers.calculon import compare_answers, load_calculon
from benchmarks.helpers.command import command
from benchmarks.helpers.files import AbsentError
from benchmarks.helpers.tables import lay_out
from benchmarks.scale import BATCH, RANKS, WAYS, ask_strategies, state_strategy, time_strategies

#: Arguments of pip; llm-analysis needs its dependency transformers only for downloads.
_PACKAGES = (["mlsysim==0.3.0", "fire==0.5.0"], ["--no-deps", "llm-analysis==0.2.2"])
#: Batches and sequences [tokens] of GPT-2 (12 layers of 768, 12 heads) in half precision on one
#: A100 with 80 GB.
_SIZES = list(product(range(1, 101), range(128, 1024, 16)))
#: The questions of each kind, and the one whose answer is shown.
_ASKED: Mapping[str, tuple[Sequence[Any], Any]]
_ASKED = {"configurations": (_SIZES, (8, 512)), "strategies": (WAYS, (8, 8, 1))}
# repetitions, questions to a peer, and most questions to perfkit
_ROUNDS, _EACH, _MANY = 5, 200, 100_000
_Ask: TypeAlias = Callable[[Sequence[Any]], Sequence[float]]


def _ask_perfkit(questions: Sequence[tuple[int, int]]) -> Sequence[float]:
    """Times of an iteration [s]; a sweep also finds interval, bottleneck and memory."""
    grid = dict(zip(("batch", "sequence"), map(list, zip(*questions, strict=True)), strict=True))
    grid["dtype"] = ["bf16"] * len(questions)
    return (
        pk.sweep(pk.Transformer.gpt2, pl.DataFrame(grid), "a100-sxm-8", progress=False)
        .frame["time"]
        .to_list()
    )


def _each(ask: Callable[..., float]) -> _Ask:
    """Ask one question at a time."""
    return lambda questions: list(starmap(ask, questions))


def _list_peers() -> Iterator[tuple[str, Mapping[str, _Ask]]]:
    """Functions that ask each peer, by the kind of question."""
    analysis, config = (import_module(f"llm_analysis.{name}") for name in ("analysis", "config"))
    gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
    small = config.ModelConfig("gpt2", 12, 12, 768, 50257, max_seq_len=1024)
    large = config.ModelConfig("gpt3", 96, 96, 12288, 51200, max_seq_len=2048)
    found, one = (
        analysis.LLMAnalysis(small, gpu),
        {"gradient_accumulation_steps": 1, "total_num_tokens": 1},
    )

    def share(tp: int, pp: int, micro: int) -> float:
        replicas = RANKS // (tp * pp)
        ways = config.ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=replicas, sp_size=tp)
        steps = {
            "gradient_accumulation_steps": BATCH // (replicas * micro),
            "seq_len": 2048,
            "total_num_tokens": 1,
        }
        asked = analysis.LLMAnalysis(large, gpu, parallelism_config=ways)
        with suppress(AssertionError):  # it does not fit
            return float(asked.training(batch_size_per_gpu=micro, **steps)["latency_per_iter"])
        return math.nan

    def train(batch: int, length: int) -> float:
        return float(
            found.training(batch_size_per_gpu=batch, seq_len=length, **one)["latency_per_iter"]
        )

    yield "llm-analysis 0.2.2", {"configurations": _each(train), "strategies": _each(share)}
    peer = import_module("mlsysim")
    models, device = peer.Models.Language, peer.Hardware.Cloud.A100
    solver, fleet = peer.solvers.DistributedModel(), peer.Systems.Clusters.Training_1K_A100

    def solve(tp: int, pp: int, micro: int) -> float:
        steps = BATCH * tp * pp // (RANKS * micro)
        ways = {
            "tp_size": tp,
            "pp_size": pp,
            "microbatch_count": steps,
            "zero_stage": 1,
            "seq_len": 2048,
        }
        return float(
            solver.solve(models.GPT3, fleet, batch_size=BATCH, **ways)
            .step_latency_total.to("s")
            .magnitude
        )

    def step(batch: int, length: int) -> float:
        about = {"batch_size": batch, "seq_len": length, "is_training": True}
        return float(
            peer.Engine.solve(models.GPT2_Small, device, **about).latency.to("s").magnitude
        )

    yield "mlsysim 0.3.0", {"configurations": _each(step), "strategies": _each(solve)}


def _list_calculon(ask: Callable[..., float]) -> Iterator[tuple[str, Mapping[str, _Ask]]]:
    """The same for Calculon; what is made of a question for it is not timed."""
    stated: dict[Any, Any] = {own: state_strategy(*own) for own in WAYS}
    for batch, length in _SIZES:
        stated[batch, length] = (
            pk.Transformer.gpt2(batch=batch, sequence=length),
            pk.Strategy(micro_batch=batch),
        )

    def price(questions: Sequence[Any]) -> Sequence[float]:
        return [ask(*stated[own]) for own in questions]

    yield "Calculon", {"configurations": price, "strategies": price}


def time_peers(
    peers: Mapping[str, Mapping[str, _Ask]], rounds: int = _ROUNDS
) -> list[dict[str, Any]]:
    """Questions in a second of processor time (the best of all rounds), and the answer to one of
    each kind [s]."""
    best: dict[tuple[str, str], float] = {}
    # a busy moment hits all of them
    for _, what, (name, asks) in product(range(rounds), _ASKED, peers.items()):
        questions, count = _ASKED[what][0], _EACH
        if name == "perfkit":
            count = len(questions) if what == "configurations" else _MANY
        asked = list(islice(cycle(questions[:: max(len(questions) // count, 1)]), count))
        start = time.process_time()
        asks[what](asked)
        best[name, what] = max(best.get((name, what), 0.0), count / (time.process_time() - start))
    return [
        {
            "name": name,
            "question": what,
            "per_second": rate,
            "answer_s": peers[name][what]([_ASKED[what][1]])[0],
        }
        for (name, what), rate in best.items()
    ]


_COLUMNS = {
    "tool": "{name}",
    "questions": "{question}",
    "a second": "{per_second:,.0f}",
    "batch 8, sequence 512; or 8 ways, 8 stages, micro-batches of 1": "{answer_s:time}",
}


@command(
    {
        "--calculon": {
            "type": Path,
            "metavar": "DIR",
            "help": "checkout of Calculon, to ask it as well",
        }
    }
)
def main(given: Any) -> None:
    """Configurations a second of perfkit and of published tools."""
    calculon = given.calculon and load_calculon(given.calculon)
    with TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            folder,
        ]
        for packages in _PACKAGES:
            if subprocess.run([*pip, *packages]).returncode:
                print("pip cannot install the peers; nothing is compared")
                return
        sys.path.append(folder)
        logging.disable(logging.WARNING)  # a peer logs a page for each question
        try:
            others = dict(_list_peers()) | dict(_list_calculon(calculon) if calculon else ())
            ours: dict[str, _Ask] = {"configurations": _ask_perfkit, "strategies": ask_strategies}
            rows = time_peers({"perfkit": ours, **others})
        finally:
            sys.path.remove(folder)
            logging.disable(logging.NOTSET)
    print(lay_out(rows, _COLUMNS, numbers=True))
    [*_, unlike] = time_strategies()
    print(
        f"{len(WAYS)} strategies are asked for again and again; of unlike ones {unlike['per_second']:,.0f} a second"
    )
    if calculon:
        try:
            print(f"\nPublished steps on A100, errors in %\n{compare_answers(calculon)}")
        except AbsentError as error:
            print(f"published steps are left out: {error}")
