"""Blocks of docs/accuracy.md beside what their benchmarks print."""

from benchmarks.__main__ import PAGE, fill_page, run_benchmark

#: Benchmarks whose blocks are printed by the test of their data, which are read once for both.
ELSEWHERE = ("traced",)


def check_block(name: str) -> None:
    """Ask that the blocks of one benchmark are what it prints."""
    page = PAGE.read_text(encoding="utf-8")
    asked = []

    def run(words: str) -> str | None:
        if words.split()[0] != name:
            return None
        asked.append(words)
        return run_benchmark(words)

    assert fill_page(page, run) == page
    assert asked, name
