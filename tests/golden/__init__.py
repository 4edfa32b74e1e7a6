"""What perfkit answers today, kept in JSON, so that a rewrite can be held to it.

    python -m tests.golden --check [PART ...]     compare with them; --words: show texts that differ, too
    python -m tests.golden --make [PART ...]      write them again; of all parts, unless named

Numbers (predictions, plans, primitives, fits, captures, readers and checks) are equal to 1e-9 of their
size (or 1e-15); fits, which a solver finds in steps that depend on the processor, to 1e-6 (or 1e-9).
`make test` compares the numbers of `TESTED` parts. Words are texts, such as warnings and descriptions:
they are shown by `--words` and fail nothing. `answers` asks, `compare` writes and compares.

Answers whose sources are not here (torch, or other people's data) are left out by `--check`, and kept as
they are by `--make`.
"""
