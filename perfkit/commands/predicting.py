"""``perfkit predict``: the time of one training iteration and what limits it."""

from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.cost_options import find_cost, takes_cost
from perfkit.commands.model_options import describe, takes_model, takes_sharing
from perfkit.commands.options import OF_SECONDS, WHOLE
from perfkit.commands.outputs import Answer, OutputFiles


@click.command(
    "predict",
    cls=Command,
    examples=[
        "perfkit predict --model bert-large --platform h100-sxm-8x8 --ranks 64 --batch 2048 --dtype bf16",
        "perfkit predict --model gpt3-6.7b --platform h100-sxm-8x2 --batch 64 --dtype bf16 --mixed --tp 2 --pp 2 --dp 4 --stack megatron",
        "perfkit predict --model llama-3-8b --platform h100-sxm-8 --batch 1 --sequence 4096 --dtype bf16 --lora-rank 16 --checkpoint",
        "perfkit predict --model dlrm-mlperf --platform a100-sxm-8 --ranks 8 --report prediction.html",
        "perfkit predict --model bert-large --platform h100-sxm-8x8 --ranks 64 --batch 2048 --dtype bf16 --price 2.5 --tokens 3e12 --mtbf llama-3 --checkpoint-time 30 --start 2026-12-01 --deadline 2026-12-12",
    ],
)
@takes_model
@options.platform
@takes_sharing
@click.option("--ranks", type=WHOLE, help="ranks that take part; default 1")
@options.execution
@options.stack
@click.option(
    "--loading",
    type=OF_SECONDS,
    default=0.0,
    metavar="SECONDS",
    help="time of the data loader per batch of a rank",
)
@takes_cost
@options.report
@options.json_file
def predict_command(
    platform: str,
    ranks: int | None,
    execution: str | None,
    stack: str | None,
    loading: float,
    report: str | None,
    json_file: str | None,
    **of_workload_and_cost: Any,
) -> int:
    """Predict one training iteration."""
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    described = describe(of_workload_and_cost)
    with keep_quiet():  # the explanation has the warnings
        prediction = pk.predict(
            described.workload,
            platform,
            ranks=ranks,
            execution=execution,
            loading=loading,
            strategy=described.strategy,
            stack=stack,
        )
        cost = find_cost(prediction, of_workload_and_cost)
    figures = {
        "workload": described.workload.description,
        "platform": prediction.platform.name,
        "ranks": prediction.ranks,
        "time_s": prediction.time,
        "execution": prediction.execution,
        "stack": prediction.stack.name,
        "device_s": prediction.device_time,
        "interval_s": prediction.interval(),
        "lower_bound_s": prediction.lower_bound,
        "serial_s": prediction.serial,
        "bottleneck": prediction.bottleneck,
        "breakdown": prediction.breakdown().to_dicts(),
        "unmodelled_s": dict(prediction.unmodelled),
        "warnings": prediction.warnings,
    }
    text = prediction.explain()
    results: list[Any] = [prediction]
    if cost is not None:
        text += f"\n\n{cost.text}"
        figures["cost"] = cost.figures
        if cost.result is not None:
            results = [cost.result]  # which shows the prediction, too
    files.write(Answer(text, figures, results=results))
    return 0
