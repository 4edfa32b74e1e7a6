"""A table of calls that are refused has one of these records on each line."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """A function with arguments that it refuses, and the pattern of what its ValueError says."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    message: str

    def call(self) -> Any:
        """Make the call, which should raise."""
        return self.function(**self.arguments)
