"""A measured step: what a log says of the time of an iteration, in few numbers, with what was printed
beside it."""

from dataclasses import dataclass

from perfkit.ground.units import Typed, format_bytes, format_count, format_rate, format_time


@dataclass(frozen=True)
class MeasuredStep(Typed):
    """The time of an iteration that was measured, with what is known of it.

    Parameters
    ----------
    seconds : float
        Time of an iteration, the median of those that count [s].
    spread : float
        Half of the distance between the 16th and 84th percentile, over the median; 0 for a single
        time [-].
    iterations : int
        Iterations behind it [-].
    skipped : int
        Iterations that were printed and do not count: warm-up, and those beside checkpoints and
        evaluations [-].
    source : str
        File that says it.
    batch : int, optional
        Sequences of an iteration over all ranks [-].
    micro_batch : int, optional
        Sequences of a pass [-].
    sequence : int, optional
        Tokens of a sequence [-].
    ranks : int, optional
        GPUs [-].
    tp, pp, cp, dp, ep : int, optional
        How they share the model [-].
    dtype : str, optional
        Number format of products.
    device : str, optional
        GPU, as its driver names it.
    tokens_per_s_per_gpu : float, optional
        Tokens that a GPU reads, as printed, else from batch, sequence and ranks [1/s].
    flop_per_s_per_gpu : float, optional
        Rate of a GPU as the software counts it [FLOP/s].
    mfu : float, optional
        Share of the peak as the software counts it [-].
    memory : float, optional
        Memory of a GPU as the software reports it [B].
    """

    seconds: float
    spread: float = 0.0
    iterations: int = 1
    skipped: int = 0
    source: str = ""
    batch: int | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    ranks: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    device: str | None = None
    tokens_per_s_per_gpu: float | None = None
    flop_per_s_per_gpu: float | None = None
    mfu: float | None = None
    memory: float | None = None

    def describe(self) -> str:
        """Say it in one line.

        Returns
        -------
        text : str
            The time, its spread, and what was printed beside it.
        """
        parts = [f"{format_time(self.seconds)} an iteration"]
        if self.spread:
            parts[0] += f" ± {self.spread:.1%}"
        parts.append(f"{format_count(self.iterations, 'iteration')}, {self.skipped} skipped")
        if self.tokens_per_s_per_gpu:
            parts.append(f"{self.tokens_per_s_per_gpu:,.0f} tokens/s a GPU")
        if self.flop_per_s_per_gpu:
            parts.append(format_rate(self.flop_per_s_per_gpu, "FLOP/s") + " a GPU")
        if self.mfu:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.memory:
            parts.append(format_bytes(self.memory))
        return "; ".join(parts)
