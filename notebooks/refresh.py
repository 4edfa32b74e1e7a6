"""Execute the notebooks beside this file and store them so that a diff shows real changes only.

python notebooks/refresh.py [notebook ...]
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["execute", "tidy"]

HERE = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def tidy(notebook: Any) -> Any:
    """Remove what differs between machines, in place; a second pass changes nothing."""
    notebook["metadata"] = {"kernelspec": dict(KERNEL), "language_info": {"name": "python"}}
    used: dict[str, int] = {}
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags")
        cell["metadata"] = {"tags": tags} if tags else {}
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        name = hashlib.sha256(f"{cell['cell_type']}:{source}".encode()).hexdigest()[:10]
        used[name] = used.get(name, 0) + 1
        cell["id"] = name if used[name] == 1 else f"{name}-{used[name]}"
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output["metadata"] = {}
    return notebook


def execute(path: Path) -> None:
    """Run one notebook from top to bottom in a fresh kernel, then its answers, and write it back."""
    import nbformat
    from answers import fill_answers
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name=KERNEL["name"],
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    fill_answers(notebook)
    nbformat.write(nbformat.from_dict(tidy(notebook)), path)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        print(f"{path.name} ...", flush=True)
        execute(path)
