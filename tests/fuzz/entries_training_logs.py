"""Fuzzers of training logs: the time of an iteration in each form, damaged logs, and arguments that
become models and strategies."""

import gzip
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from tests.fuzz.damage import Rng, choose, damage_bytes, damage_text, junk
from tests.fuzz.entries_logs import listen
from tests.fuzz.harness import Entry, Nonsense


class Form(NamedTuple):
    """A line of a step, and its smallest printed time [s]."""

    line: str
    digit: float


FORMS = (
    Form(
        " iteration {n:8d}/ 9000 | consumed samples: {n} | elapsed time per iteration (ms): {ms:.1f} |"
        " global batch size: {batch:5d} | lm loss: 2.0E+00 |",
        1e-4,
    ),
    Form(
        "[default7]: iteration {n:8d}/ 9000 | elapsed time per iteration (s): {s:.2f} |"
        " global batch size: {batch:5d} | TFLOPs: 99.00 |",
        1e-2,
    ),
    Form(
        "[20260203 01:02:03][rank-15/16][INFO ] [a.py:99] :  iteration {n:8d}/ 9000 |"
        " elapsed time per iteration (ms): {ms:.1f}/1.1 | compute per GPU (TFLOP/s/GPU): 9.5 (avg 1.1) |"
        " global batch size: {batch:5d} |",
        1e-4,
    ),
    Form(
        "Training epoch 0, iteration {n}/9000 | global_batch_size: {batch} | global_step: {n} |"
        " train_step_timing in s: {s:.4f}",
        1e-4,
    ),
    Form("completed step: {n}, seconds: {s:.3f}, TFLOP/s/device: 9.500, loss: 1.000", 1e-3),
    Form("Step Time : {s:.2f}s GPU utilization: 99.5MODEL_TFLOP/s/GPU", 1e-2),
    Form("iter {n}: loss 4.0863, time {ms:.2f}ms, mfu 12.34%", 1e-5),
)
PREFIXES = ("", " 3: ", "[rank0]:", "worker-0 | ", "2024-05-08T01:02:03.456Z ", "\x1b[32m")
BETWEEN = (
    "saving checkpoint at iteration 7 to /a",
    " validation loss at iteration 7 on test set | lm loss value: 1.0 |",
    "a warning: step: 3 of nothing",
    "(min, max) time across ranks (ms):",
    "see https://example.org/a?seconds: 1",
)


def read_steps(rng: Rng, folder: Path) -> pk.TrainingLog:
    """The median of equal times is that time, whatever stands before, between and beside them."""
    form = choose(rng, FORMS)
    seconds = round(10 ** rng.uniform(-1, 1.5), 2)
    count = int(rng.integers(1, 60))
    batch = int(choose(rng, (1, 64, 4096)))
    prefix = choose(rng, PREFIXES)
    lines = []
    for number in range(1, count + 1):
        time = 7 * seconds if number <= min(3, count // 2) else seconds
        lines.append(prefix + form.line.format(n=number, s=time, ms=1e3 * time, batch=batch))
        if rng.random() < 0.1:
            lines.append(choose(rng, BETWEEN))
    ending = choose(rng, ("\n", "\r\n"))
    text = "".join(line + ending for line in lines)
    path = folder / choose(rng, ("run.log", "run.out", "run.log.gz"))
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    log, said = listen(lambda: pk.read_training_log(path))
    if len(log.steps) != count or log.summary.iterations + log.summary.skipped != count:
        raise Nonsense(f"{len(log.steps)} of {count} steps: {log.summary}")
    counted = log.steps["left_out"].null_count()
    if not said and count > 8 and counted > 3 and abs(log.seconds - seconds) > form.digit:
        raise Nonsense(f"{log.seconds} for {seconds} in {form.line}")
    return log


def draw_strategy(rng: Rng) -> dict[str, Any]:
    """Arguments of Megatron-LM that say how ranks share the model."""
    tp = int(choose(rng, (1, 2, 4)))
    pp = int(choose(rng, (1, 2, 4)))
    cp = int(choose(rng, (1, 2, 4)))
    dp = int(choose(rng, (1, 2, 4)))
    return {
        "world_size": tp * pp * cp * dp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers": 4 * pp,
        "context_parallel_size": cp,
        "cp_comm_type": choose(rng, (["p2p"], ["a2a"], "all_gather")),
        "global_batch_size": 64 * dp,
        "micro_batch_size": int(choose(rng, (1, 2))),
        "sequence_parallel": tp > 1,
        "recompute_granularity": choose(rng, (None, "full", "selective")),
        "use_distributed_optimizer": choose(rng, (True, False)),
    }


def draw_model(rng: Rng) -> dict[str, Any]:
    """Arguments of Megatron-LM that say what a layer is."""
    heads = int(choose(rng, (16, 32)))
    hidden = 64 * heads
    return {
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "ffn_hidden_size": choose(rng, (4 * hidden, 3 * hidden)),
        "group_query_attention": choose(rng, (True, False)),
        "num_query_groups": 8,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "position_embedding_type": choose(rng, ("rope", "learned_absolute")),
        "vocab_size": 32000,
        "add_bias_linear": choose(rng, (True, False)),
        "normalization": choose(rng, ("RMSNorm", "LayerNorm")),
        "swiglu": choose(rng, (True, False)),
    }


def draw_arguments(rng: Rng) -> dict[str, Any]:
    """Arguments of Megatron-LM that belong together, sorted by name as it prints them."""
    arguments = {
        **draw_strategy(rng),
        **draw_model(rng),
        "bf16": True,
        "fp8": choose(rng, (None, None, "hybrid")),
        "transformer_impl": choose(rng, ("transformer_engine", "local")),
    }
    return dict(sorted(arguments.items()))


def write_arguments(rng: Rng, arguments: dict[str, Any]) -> str:
    """As Megatron-LM, YAML or a logger writes them."""
    form = choose(
        rng, ("  {} ................ {}", "  {}: {}", "[rank-0/8][INFO ] [a.py:1] :   {} ... {}")
    )
    lines = [form.format(name, value) for name, value in arguments.items()]
    return "\n".join(["------------------------ arguments ------------------------", *lines, ""])


def read_arguments(rng: Rng, folder: Path) -> list[Any]:
    """Arguments that belong together give a model, and a strategy of all ranks."""
    arguments = draw_arguments(rng)
    head = write_arguments(rng, arguments)
    steps = "\n".join(FORMS[0].line.format(n=n, ms=500.0, s=0.5, batch=64) for n in range(1, 20))
    path = folder / "run.log"
    path.write_text(head + steps)
    log, _ = listen(lambda: pk.read_training_log(path))
    model, strategy = log.workload(), log.strategy()
    has_all_ranks = strategy.ranks == arguments["world_size"]
    if not has_all_ranks or model.hidden != arguments["hidden_size"]:
        raise Nonsense(f"{strategy} and {model} of {arguments}")
    return [model, strategy, log.explain(), log.summary]


def read_damaged(rng: Rng, folder: Path) -> Any:
    """Damaged logs are read or refused, and what is left of their arguments is taken or refused."""
    arguments = draw_arguments(rng)
    form = choose(rng, FORMS)
    steps = "\n".join(form.line.format(n=n, ms=500.0, s=0.5, batch=64) for n in range(1, 20))
    text = write_arguments(rng, arguments) + steps
    if rng.random() < 0.7:
        data = damage_text(rng, text).encode("utf-8", "surrogatepass")
    else:
        data = damage_bytes(rng, text.encode())
    path = folder / "run.log"
    path.write_bytes(data)
    log, _ = listen(lambda: pk.read_training_log(path))
    if not np.isfinite(log.seconds) or log.seconds <= 0:
        raise Nonsense(f"{log.summary}")
    what = choose(rng, (log.workload, log.strategy, log.explain))
    return what()


@cache
def predict_bert() -> pk.Prediction:
    """A prediction that measurements are set beside."""
    model = pk.Transformer.bert("bert-base", batch=16, sequence=128, dtype="bf16")
    return listen(lambda: pk.predict(model, "a100-sxm-8", ranks=8))[0]


def set_beside(rng: Rng, folder: Path) -> pk.Deviation:
    """A measurement is inside the interval where it is between its ends; anything else is refused."""
    prediction = predict_bert()
    seconds = prediction.time * 10 ** rng.uniform(-3, 3)
    step = pk.MeasuredStep(seconds=seconds, ranks=int(choose(rng, (8, 16))), iterations=2)
    measured = choose(rng, (seconds, step, junk(rng)))
    deviation = prediction.against(measured)
    low, high = prediction.interval(0.8)
    if deviation.is_inside != (low <= deviation.measured.seconds <= high):
        raise Nonsense(f"{deviation}")
    if (deviation.distance <= 1) != deviation.is_inside:
        raise Nonsense(f"{deviation}: {deviation.distance} half-widths off")
    return deviation


ENTRIES: dict[str, Entry] = {
    "training-steps": Entry(read_steps, 0.5, new=True),
    "training-arguments": Entry(read_arguments, 0.3, new=True),
    "training-damaged": Entry(read_damaged, 0.5, new=True),
    "training-beside": Entry(set_beside, 0.02, new=True),
}
