"""What perfkit answers today, kept in JSON, so that a rewrite can be held to it.

    python -m tests.golden --make [PART ...]     write the answers of some parts; of all, unless named
    python -m tests.golden --check [PART ...]    compare with them; the fast parts, unless named; --all: all parts
    python -m tests.golden --check --numbers     leave texts aside, such as warnings that were reworded

Numbers are equal to 1e-9 of their size (or 1e-15), all else exactly. `answers` asks, `compare`
writes and compares. Parts that need torch or other people's data are left out where these are
missing.
"""
