"""Altair under ``python -OO``: it reads its own docstrings while it is imported, so its files keep
them."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class _DocstringLoader(SourceFileLoader):
    """Compiles a file with its docstrings, whatever the options of Python."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class _AltairFinder(MetaPathFinder):
    """Finds the modules of Altair."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "altair" and not fullname.startswith("altair."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _DocstringLoader(spec.loader.name, spec.loader.path)
        return spec


def keep_docstrings() -> None:
    """Import Altair, with its docstrings where Python drops them."""
    finder = _AltairFinder()
    without = sys.flags.optimize >= 2
    if without:
        sys.meta_path.insert(0, finder)
    try:
        import altair  # noqa: F401
    finally:
        if without:
            sys.meta_path.remove(finder)
