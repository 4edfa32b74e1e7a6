"""How many configurations a second perfkit and two published closed-form tools answer: the same questions, in one run.

    python -m benchmarks.peers [--json peers.json]

pip installs llm-analysis and mlsysim into a temporary folder, which is removed; neither is a part of perfkit.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import polars as pl

from benchmarks import OUT, make_command, save_rows
from perfkit.exploration.sweeps import sweep
from perfkit.ground.units import format_table, format_time
from perfkit.workloads.transformer import Transformer

#: What is installed, with and without what it depends on: without transformers llm-analysis does all but downloads.
_PACKAGES = (["mlsysim==0.3.0", "fire==0.5.0"], ["--no-deps", "llm-analysis==0.2.2"])
#: The questions: an iteration of GPT-2 (12 layers of 768, 12 heads) in half precision on one A100 with 80 GB.
_BATCHES, _SEQUENCES = range(1, 101), range(128, 1024, 16)
_ROUNDS, _EACH = 5, 200  # repetitions, and questions that a peer is asked in each
_Ask: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[float]]


def _ask_perfkit(questions: Sequence[tuple[int, int]]) -> Sequence[float]:
    """Time of an iteration, with interval, bottleneck and memory."""
    grid = dict(zip(("batch", "sequence"), map(list, zip(*questions, strict=True)), strict=True))
    grid["dtype"] = ["bf16"] * len(questions)
    return sweep(Transformer.gpt2, pl.DataFrame(grid), "a100-sxm-8", progress=False).frame["time"].to_list()


def _list_peers() -> Iterator[tuple[str, _Ask]]:
    """Ways to ask each, from the folder that they were installed into."""
    analysis, config = (import_module(f"llm_analysis.{name}") for name in ("analysis", "config"))
    model = config.ModelConfig("gpt2", 12, 12, 768, 50257, max_seq_len=1024)
    found = analysis.LLMAnalysis(model, config.get_gpu_config_by_name("a100-sxm-80gb"))
    settings = {"gradient_accumulation_steps": 1, "total_num_tokens": 1}
    yield (
        "llm-analysis 0.2.2",
        lambda questions: [
            found.training(batch_size_per_gpu=batch, seq_len=length, **settings)["latency_per_iter"]
            for batch, length in questions
        ],
    )
    peer = import_module("mlsysim")
    gpt, gpu = peer.Models.Language.GPT2_Small, peer.Hardware.Cloud.A100
    yield (
        "mlsysim 0.3.0",
        lambda questions: [
            peer.Engine.solve(gpt, gpu, batch_size=batch, seq_len=length, is_training=True).latency.to("s").magnitude
            for batch, length in questions
        ],
    )


def time_peers(peers: Mapping[str, _Ask], rounds: int = _ROUNDS) -> list[dict[str, Any]]:
    """Configurations a second of processor time, the best of all rounds, and the answer to one question [s]."""
    questions, best = list(product(_BATCHES, _SEQUENCES)), dict.fromkeys(peers, 0.0)
    for _, (name, ask) in product(range(rounds), peers.items()):  # in turn, as busy moments hit all alike
        asked = questions if name == "perfkit" else questions[:: len(questions) // _EACH]
        start = time.process_time()
        ask(asked)
        best[name] = max(best[name], len(asked) / (time.process_time() - start))
    return [{"name": name, "per_second": rate, "answer_s": peers[name]([(8, 512)])[0]} for name, rate in best.items()]


def format_peers(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text."""
    cells = [("tool", "configurations a second", "batch 8, sequence 512 takes")]
    cells += [(row["name"], f"{row['per_second']:,.0f}", format_time(row["answer_s"])) for row in rows]
    return format_table(cells, numbers=True)


def _run(given: Any) -> None:
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        for packages in _PACKAGES:
            if subprocess.run([*pip, *packages]).returncode:
                print("the package index has no peers in reach; nothing is compared")
                return
        sys.path.append(folder)  # behind what is installed here
        logging.disable(logging.WARNING)  # a peer writes a page for each question
        try:
            rows = time_peers({"perfkit": _ask_perfkit, **dict(_list_peers())})
        finally:
            sys.path.remove(folder)
            logging.disable(logging.NOTSET)
    print(format_peers(rows))
    save_rows(given.json, rows)


main = make_command("peers", "Configurations a second of perfkit and of two published tools.", _run, OUT)


if __name__ == "__main__":
    sys.exit(main())
