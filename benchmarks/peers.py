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
#: Repetitions, and questions to a peer [-].
_ROUNDS, _EACH = 5, 200
#: Most questions to perfkit [-].
_MANY = 100_000
_Ask: TypeAlias = Callable[[Sequence[Any]], Sequence[float]]


def _ask_perfkit(questions: Sequence[tuple[int, int]]) -> Sequence[float]:
    """Times of an iteration [s]; a sweep also finds interval, bottleneck and memory."""
    grid = pl.DataFrame(questions, schema=["batch", "sequence"], orient="row")
    grid = grid.with_columns(dtype=pl.lit("bf16"))
    sweep = pk.sweep(pk.Transformer.gpt2, grid, "a100-sxm-8", progress=False)
    return sweep.frame["time_s"].to_list()


def _each(ask: Callable[..., float]) -> _Ask:
    """Ask one question at a time."""
    return lambda questions: list(starmap(ask, questions))


def _load_llm_analysis() -> Mapping[str, _Ask]:
    """Functions that ask llm-analysis."""
    analysis: Any = import_module("llm_analysis.analysis")
    config: Any = import_module("llm_analysis.config")
    gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
    small = config.ModelConfig("gpt2", 12, 12, 768, 50257, max_seq_len=1024)
    large = config.ModelConfig("gpt3", 96, 96, 12288, 51200, max_seq_len=2048)
    one_gpu = analysis.LLMAnalysis(small, gpu)

    def share(tp: int, pp: int, micro: int) -> float:
        replicas = RANKS // (tp * pp)
        ways = config.ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=replicas, sp_size=tp)
        many_gpus = analysis.LLMAnalysis(large, gpu, parallelism_config=ways)
        with suppress(AssertionError):  # it does not fit
            answer = many_gpus.training(
                batch_size_per_gpu=micro,
                gradient_accumulation_steps=BATCH // (replicas * micro),
                seq_len=2048,
                total_num_tokens=1,
            )
            return float(answer["latency_per_iter"])
        return math.nan

    def train(batch: int, length: int) -> float:
        answer = one_gpu.training(
            batch_size_per_gpu=batch,
            seq_len=length,
            gradient_accumulation_steps=1,
            total_num_tokens=1,
        )
        return float(answer["latency_per_iter"])

    return {"configurations": _each(train), "strategies": _each(share)}


def _load_mlsysim() -> Mapping[str, _Ask]:
    """Functions that ask mlsysim."""
    peer: Any = import_module("mlsysim")
    models = peer.Models.Language
    device = peer.Hardware.Cloud.A100
    fleet = peer.Systems.Clusters.Training_1K_A100
    solver = peer.solvers.DistributedModel()

    def solve(tp: int, pp: int, micro: int) -> float:
        answer = solver.solve(
            models.GPT3,
            fleet,
            batch_size=BATCH,
            tp_size=tp,
            pp_size=pp,
            microbatch_count=BATCH * tp * pp // (RANKS * micro),
            zero_stage=1,
            seq_len=2048,
        )
        return float(answer.step_latency_total.to("s").magnitude)

    def step(batch: int, length: int) -> float:
        answer = peer.Engine.solve(
            models.GPT2_Small, device, batch_size=batch, seq_len=length, is_training=True
        )
        return float(answer.latency.to("s").magnitude)

    return {"configurations": _each(step), "strategies": _each(solve)}


def _list_peers() -> Iterator[tuple[str, Mapping[str, _Ask]]]:
    """Functions that ask each peer, by the kind of question."""
    yield "llm-analysis 0.2.2", _load_llm_analysis()
    yield "mlsysim 0.3.0", _load_mlsysim()


def _list_calculon(ask: Callable[..., float]) -> Iterator[tuple[str, Mapping[str, _Ask]]]:
    """The same for Calculon; what is made of a question for it is not timed."""
    stated: dict[Any, Any] = {way: state_strategy(*way) for way in WAYS}
    for batch, length in _SIZES:
        model = pk.Transformer.gpt2(batch=batch, sequence=length)
        stated[batch, length] = (model, pk.Strategy(micro_batch=batch))

    def price(questions: Sequence[Any]) -> Sequence[float]:
        return [ask(*stated[question]) for question in questions]

    yield "Calculon", {"configurations": price, "strategies": price}


def _list_questions(kind: str, name: str) -> list[Any]:
    """What a tool is asked; perfkit is asked more, as it takes all questions at once."""
    questions, _ = _ASKED[kind]
    count = _EACH
    if name == "perfkit":
        count = len(questions) if kind == "configurations" else _MANY
    step = max(len(questions) // count, 1)
    return list(islice(cycle(questions[::step]), count))


def time_peers(
    peers: Mapping[str, Mapping[str, _Ask]], rounds: int = _ROUNDS
) -> list[dict[str, Any]]:
    """Questions in a second of processor time (the best of all rounds), and the answer to one of
    each kind [s]."""
    best: dict[tuple[str, str], float] = {}
    # a busy moment hits all of them
    for _, kind, name in product(range(rounds), _ASKED, peers):
        questions = _list_questions(kind, name)
        start = time.process_time()
        peers[name][kind](questions)
        rate = len(questions) / (time.process_time() - start)
        best[name, kind] = max(best.get((name, kind), 0.0), rate)
    rows = []
    for (name, kind), rate in best.items():
        _, shown = _ASKED[kind]
        (answer,) = peers[name][kind]([shown])
        rows.append({"name": name, "question": kind, "per_second": rate, "answer_s": answer})
    return rows


_COLUMNS = {
    "tool": "{name}",
    "questions": "{question}",
    "a second": "{per_second:,.0f}",
    "batch 8, sequence 512; or 8 ways, 8 stages, micro-batches of 1": "{answer_s:time}",
}


def _install(folder: str) -> bool:
    """Install the other tools into a folder; whether that worked."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in _PACKAGES:
        if subprocess.run([*pip, "--target", folder, *packages]).returncode:
            return False
    return True


def _time_all(calculon: Callable[..., float] | None) -> list[dict[str, Any]]:
    """Time perfkit and the tools that are installed."""
    ours: dict[str, _Ask] = {"configurations": _ask_perfkit, "strategies": ask_strategies}
    peers = {"perfkit": ours, **dict(_list_peers())}
    if calculon:
        peers |= _list_calculon(calculon)
    return time_peers(peers)


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
        if not _install(folder):
            print("pip cannot install the peers; nothing is compared")
            return
        sys.path.append(folder)
        logging.disable(logging.WARNING)  # a peer logs a page for each question
        try:
            rows = _time_all(calculon)
        finally:
            sys.path.remove(folder)
            logging.disable(logging.NOTSET)
    print(lay_out(rows, _COLUMNS, numbers=True))
    unlike = time_strategies()[-1]
    print(
        f"{len(WAYS)} strategies are asked for again and again; of unlike ones {unlike['per_second']:,.0f} a second"
    )
    if calculon:
        try:
            print(f"\nPublished steps on A100, errors in %\n{compare_answers(calculon)}")
        except AbsentError as error:
            print(f"published steps are left out: {error}")
