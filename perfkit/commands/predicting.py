"""``perfkit predict``: the time of one training iteration and what limits it."""

from typing import Any

import click

from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.cost_options import find_cost, takes_cost
from perfkit.commands.gains import describe_gains, find_gains
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.prediction_options import predict_described, takes_prediction
from perfkit.ground.units import escape, show


@click.command(
    "predict",
    cls=Command,
    examples=[
        "perfkit predict --model bert-large --platform h100-sxm-8x8 --ranks 64 --batch 2048 --dtype bf16",
        "perfkit predict --model llama-3-8b --platform h100-sxm-8x8 --batch 512 --dtype bf16 --mixed --parallel fsdp --checkpoint --accumulate 8 --measured 10.5s",
        "perfkit predict --model gpt3-6.7b --platform h100-sxm-8x2 --batch 64 --dtype bf16 --mixed --tp 2 --pp 2 --dp 4 --stack megatron",
        "perfkit predict --model llama-3-8b --platform h100-sxm-8 --ranks 1 --batch 1 --sequence 4096 --dtype bf16 --lora-rank 16 --checkpoint",
        "perfkit predict --model dlrm-mlperf --platform a100-sxm-8 --report prediction.html",
        "perfkit predict --model bert-large --platform h100-sxm-8x8 --ranks 64 --batch 2048 --dtype bf16 --price 2.5 --tokens 3e12 --mtbf llama-3 --checkpoint-time 30 --start 2026-12-01 --deadline 2026-12-12",
    ],
)
@takes_prediction
@takes_cost
@click.option(
    "--corrected",
    metavar="FILE",
    help="with --measured: platform to write on which this iteration takes the measured time",
)
@options.report
@options.json_file
def predict_command(
    corrected: str | None,
    report: str | None,
    json_file: str | None,
    **of_prediction_and_cost: Any,
) -> int:
    """Predict one training iteration.

    Without --ranks all ranks of the platform take part (pk.predict of Python takes one); the second line says
    how many. The last line says what would help most.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report, out=corrected)
    files.check()
    if corrected is not None:
        _check_corrected(corrected, of_prediction_and_cost["measured"])
    with keep_quiet():  # the explanation has the warnings
        predicted = predict_described(of_prediction_and_cost)
        prediction = predicted.prediction
        cost = find_cost(prediction, of_prediction_and_cost)
    figures = {
        "workload": predicted.described.workload.description,
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
    texts = [prediction.explain()]
    gains = find_gains(prediction)
    texts[0] += f"\n  {describe_gains(gains)}"
    if gains is not None:
        figures["twice_s"] = {gain.resource: gain.time for gain in gains}
    results: list[Any] = [prediction]
    if predicted.assumed is not None:
        answer, _, rest = texts[0].partition("\n")
        texts[0] = f"{answer}\n  {predicted.assumed}\n{rest}"
    if predicted.deviation is not None:
        deviation = predicted.deviation
        if corrected is not None:
            deviation.correct().save(corrected)
        texts.insert(0, deviation.explain().replace("correct()", "--corrected FILE"))
        figures["measured"] = {
            "seconds": deviation.measured.seconds,
            "ratio": deviation.ratio,
            "is_inside": deviation.is_inside,
            "not_the_same": list(deviation.mismatches),
            "would_explain": deviation.table().to_dicts(),
        }
        results = [deviation]  # which shows the prediction, too
    notes = None
    if cost is not None:
        texts.append(cost.text)
        figures["cost"] = cost.figures
        if cost.result is None:
            notes = cost.text
        else:
            results = [cost.result]  # which shows the prediction, too
            if predicted.deviation is not None:
                results.insert(0, predicted.deviation)
    files.write(Answer("\n\n".join(texts), figures, results=results, notes=notes))
    if corrected is not None and json_file != "-":
        print(f"written to {escape(corrected, 1000)}")
    return 0


def _check_corrected(corrected: str, measured: str | None) -> None:
    """Refuse a corrected platform without a measurement, or with a name that none has."""
    if measured is None:
        raise ValueError(
            "corrected is given; it needs what an iteration really took; give --measured, too"
        )
    if not corrected.endswith(".toml"):
        raise ValueError(
            f"corrected is {show(corrected)}; a platform file ends with .toml; name such a file"
        )
