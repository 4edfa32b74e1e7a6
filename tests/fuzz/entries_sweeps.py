"""Fuzzers of sweeps: grids of which a part is refused."""

from itertools import product
from pathlib import Path
from typing import Any

import perfkit as pk
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

#: Sizes of a Transformer, allowed and not.
SIZES: dict[str, list[Any]] = {
    "batch": [1, 2, 3, 8, 64, 0, -4, 2.5, 2**70],
    "sequence": [1, 64, 512, 1024, 1025, 4096, 0, 64.5],
    "heads": [1, 3, 4, 5, 12, 0],
    "hidden": [768, 770, 96, 1],
    "vocabulary": [1000, 50304, 1, 0],
}
#: Most constructions of a grid, whatever its size [-].
MOST_BUILT = 60


def price_grid(rng: Rng, folder: Path) -> Any:
    """Sweep a grid, count what is built, and compare one row with its own prediction."""
    names = rng.permutation(list(SIZES))[: int(rng.integers(1, 4))]
    grid = {}
    for name in map(str, names):
        grid[name] = [choose(rng, SIZES[name]) for _ in range(5)]
    ranks = int(choose(rng, (1, 2, 4)))
    built = []

    def build(**sizes: Any) -> pk.Transformer:
        built.append(sizes)
        return pk.Transformer.gpt2(layers=2, **sizes)

    found = pk.sweep(build, grid, "h100-sxm-8", ranks=ranks, progress=False)
    if len(built) > MOST_BUILT:
        raise Nonsense(f"{len(built)} constructions for {len(found.table())} configurations")
    place = int(rng.integers(len(found.table())))
    row = found.table().row(place, named=True)
    sizes = dict(zip(grid, [*product(*grid.values())][place], strict=True))
    try:
        time = pk.predict(pk.Transformer.gpt2(layers=2, **sizes), "h100-sxm-8", ranks=ranks).time
    except ValueError as error:
        if row["time_s"] is not None or row["error"] is None:
            raise Nonsense(f"{sizes} has the time {row['time_s']}; alone: {error}") from None
    else:
        if row["time_s"] is None or abs(row["time_s"] / time - 1) > 1e-9:
            raise Nonsense(f"{sizes} takes {row['time_s']}, {row['error']}; alone {time}")
    return found


ENTRIES = {"grids": Entry(price_grid, share=0.3, new=True)}
