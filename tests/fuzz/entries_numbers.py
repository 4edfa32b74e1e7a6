"""Fuzzers of numbers that are not Python's, of objects of other types, of long texts and of small
files with much in them."""

from tests.fuzz.harness import Entry

ENTRIES: dict[str, Entry] = {}
