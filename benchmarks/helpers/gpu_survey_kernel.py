"""One kernel for an update of single rows by row-wise Adagrad; see `benchmarks.gpu_survey`.

It is in the language of Triton, whose functions have no types.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def update_rows(table, state, gradients, where, ends, counts, bags, width, BLOCK: tl.constexpr):
    """Sum the gradients of one row, add their mean square to its state, and update the row."""
    number = tl.program_id(0)
    row = tl.load(where + number)
    end = tl.load(ends + number)
    first = end - tl.load(counts + number)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(first, end):
        bag = tl.load(bags + place)
        total += tl.load(gradients + bag * width + columns, mask=inside, other=0.0)
    square = tl.load(state + row) + tl.sum(total * total) / width
    tl.store(state + row, square)
    old = tl.load(table + row * width + columns, mask=inside, other=0.0)
    tl.store(
        table + row * width + columns, old - 0.01 * total / (tl.sqrt(square) + 1e-8), mask=inside
    )
