"""Arguments of the events of a trace: kept as text, and parsed when somebody asks for them.

Parsed, the arguments of a million events would fill the memory, and hardly any of them is asked
for.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import polars as pl

from perfkit.readers.trace_names import rename_fields

#: How many arguments are parsed at once [-].
_BATCH = 50_000
#: Values of an argument that say nothing.
_EMPTY = r'(?:""|null|false|0|\[\s*\]|\{\s*\})\s*[,}]'


class _Link(msgspec.Struct):
    """What ties an operator and its node of the backward graph together, see `list_links`."""

    number: int = msgspec.field(name="Sequence number", default=-1)
    thread: Any = msgspec.field(name="Fwd thread id", default=None)


class _Event(msgspec.Struct):
    """An event of which only its link is read."""

    args: _Link


class Arguments(Mapping[int, Mapping[str, Any]]):
    """Arguments of events by the index of the event.

    Parameters
    ----------
    texts : polars.Series
        One JSON object for each event, whose member ``args`` holds its arguments; null for none.
    renamed : mapping of str to str
        Own names of fields that the trace names otherwise, see `trace_names.RENAMED_FIELDS`.
    replaced : mapping of int to mapping, optional
        Arguments that take the place of those in the text.
    """

    def __init__(
        self,
        texts: pl.Series,
        renamed: Mapping[str, str],
        replaced: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._texts = texts
        self._renamed = renamed
        self._replaced = dict(replaced or {})
        # numbers keep all of their digits
        self._decoder = json.JSONDecoder(
            parse_float=str, object_hook=self._rename if renamed else None, strict=False
        )

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index in self._replaced:
            return self._replaced[index]
        text = self._texts[index] if 0 <= index < len(self._texts) else None
        if text is None:
            raise KeyError(index)
        found: dict[str, Any] = self._decoder.decode(text)["args"]
        return found

    def __iter__(self) -> Iterator[int]:
        written = self._texts.is_not_null().arg_true().to_list()
        yield from written
        yield from sorted({*self._replaced} - {*written})

    def __len__(self) -> int:
        added = [index for index in self._replaced if self._texts[index] is None]
        return len(self._texts) - self._texts.null_count() + len(added)

    def _rename(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Give the fields of an object perfkit's names."""
        rename_fields(fields, self._renamed)
        return fields

    def with_replaced(self, replaced: Mapping[int, Mapping[str, Any]]) -> "Arguments":
        """The same arguments, but for those of some events."""
        return Arguments(self._texts, self._renamed, {**self._replaced, **replaced})

    def find(self, name: str) -> list[int]:
        """Indices of the events that have an argument, whatever it says, without parsing them
        [-]."""
        written = self._texts.str.contains(self._match_name(name)).fill_null(False)
        indices = {*written.arg_true().to_list()} - {*self._replaced}
        indices |= {index for index, args in self._replaced.items() if name in args}
        return sorted(indices)

    def tells(self, name: str) -> bool:
        """Whether any event has an argument that is not empty."""
        if any(args.get(name) for args in self._replaced.values()):
            return True
        pattern = self._match_name(name)
        written = self._texts.str.contains(pattern)
        empty = self._texts.str.contains(pattern + r"\s*" + _EMPTY)
        return bool((written & ~empty).any())

    def list_links(self) -> pl.DataFrame:
        """Operators and nodes that have a number of the backward graph.

        Returns
        -------
        frame : polars.DataFrame
            index of the event; number, which an operator and its node share, not negative [-];
            is_node, whether the event names the thread of an operator before it.

        Raises
        ------
        TypeError
            If a number is no whole number.
        """
        pattern = self._match_name("Sequence number")
        indices = self._texts.str.contains(pattern).fill_null(False).arg_true()
        decoder = msgspec.json.Decoder(list[_Event])
        numbers: list[int] = []
        are_nodes: list[bool] = []
        for first in range(0, len(indices), _BATCH):
            texts = self._texts.gather(indices.slice(first, _BATCH))
            try:
                events = decoder.decode("[" + ",".join(texts.to_list()) + "]")
            except msgspec.ValidationError as fault:
                raise TypeError(str(fault)) from None
            numbers += [event.args.number for event in events]
            are_nodes += [bool(event.args.thread) for event in events]
        columns = {
            "index": indices.cast(pl.Int64),
            "number": pl.Series(numbers, dtype=pl.Int64),
            "is_node": pl.Series(are_nodes, dtype=pl.Boolean),
        }
        return pl.DataFrame(columns).filter(pl.col("number") >= 0)

    def _match_name(self, name: str) -> str:
        """A pattern of the name of an argument in its text; inside of a text value, quotation marks
        have a backslash before them."""
        names = [name, *(other for other, own in self._renamed.items() if own == name)]
        return '"(?:' + "|".join(map(re.escape, names)) + r')"\s*:'
