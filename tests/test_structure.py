"""What the code promises: floors, names, docstring units, bounds, no trace of
one machine."""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from packaging.requirements import Requirement

import perfkit

pytestmark = pytest.mark.repository
Node = TypeVar("Node", bound=ast.AST)
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "perfkit"


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
MODULES = [name for name in TREES if name != "perfkit"]  # the facade resolves names of every floor


def list_nodes(tree: ast.AST, kind: type[Node]) -> list[Node]:
    """Nodes of a kind in a syntax tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def test_rooms_keep_to_the_contracts_of_pyproject() -> None:
    """Floors of rooms and imports in a circle, see [tool.importlinter]."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


#: Numpydoc asks for the lines of each method, and Python splits the whole file for each: it is told to
#: keep those of the last file, which takes a third of the time.
NUMPYDOC = """
import ast, functools, sys
from numpydoc.cli import main
if hasattr(ast, "_splitlines_no_ff"):
    ast._splitlines_no_ff = functools.lru_cache(maxsize=2)(ast._splitlines_no_ff)
sys.exit(main())
"""


def test_docstrings_keep_to_the_checks_of_pyproject() -> None:
    """Sections and their order, parameters and results, see [tool.numpydoc_validation]."""
    command = [sys.executable, "-c", NUMPYDOC, "lint", *map(str, SOURCES.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_those_that_tools_read() -> None:
    """The table of the facade, and its imports for type checkers."""
    imported = {}
    for statement in TREES["perfkit"].body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for node in list_nodes(statement, ast.ImportFrom):
                for name in node.names:
                    imported[name.name] = node.module
    assert imported == perfkit._HOME
    assert perfkit.__all__ == [*imported]


def public_definitions(module: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return (node for node in TREES[module].body if isinstance(node, kinds) and node.name[0] != "_")


def test_public_names_are_documented() -> None:
    for module in TREES:
        for node in public_definitions(module):
            assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_no_function_bears_the_name_of_a_module() -> None:
    modules: set[str] = set()
    for name in MODULES:
        modules.update(name.split(".")[1:])
    for module in TREES:
        for node in public_definitions(module):
            if isinstance(node, ast.FunctionDef):
                assert node.name not in modules, f"{module}.{node.name}"


def test_every_public_name_of_the_facade_resolves() -> None:
    for name in perfkit.__all__:
        assert getattr(perfkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = perfkit.nonsense  # type: ignore[attr-defined]


def test_each_name_of_a_class_has_a_line() -> None:
    """`a, b = property(f), property(g)` in a class is found by no search for `def a`."""
    for module, tree in TREES.items():
        for node in list_nodes(tree, ast.ClassDef):
            for item in node.body:
                several = isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Tuple)
                assert not several, (
                    f"{module}.{node.name}: write each of {ast.unparse(item)} as a method or a "
                    "field of its own"
                )


# Docstring units. A parameter whose type starts with one of these words is a number, so its text
# needs a unit: `[s]`, `[B/s]`, `[-]` for pure numbers. Anything else (str, Path, bool, mapping, a
# class) says in words what it holds.
NUMBERS = ("int", "float", "number", "array", "expression", "same")
UNIT = re.compile(r"\[(-|%|[A-Za-zµ°][A-Za-zµ²³^·*/0-9 -]*|1/[A-Za-z]+)\]")


def documented_parameters(docstring: str) -> dict[str, tuple[str, str]]:
    """Name -> (type, text) of the numpydoc section Parameters."""
    section = re.search(
        r"^Parameters\n-{5,}\n(.*?)(?=^\S[^\n]*\n-{3,}\n|\Z)", docstring, re.M | re.S
    )
    entries = re.findall(
        r"^(\*{0,2}\w[\w, *]*?)(?: : (.*))?\n((?:\s.*\n?|\n)*)",
        section.group(1) if section else "",
        re.M,
    )
    parameters = {}
    for names, kind, words in entries:
        for name in names.split(","):
            parameters[name.strip().lstrip("*")] = (kind, " ".join(words.split()))
    return parameters


def is_decorated(node: ast.FunctionDef | ast.ClassDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)


def inits(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [
        item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ]


def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Dataclasses of the package that a class inherits its fields from."""
    names = {ast.unparse(base) for base in node.bases}
    found = []
    for module in MODULES:
        for definition in public_definitions(module):
            is_dataclass = isinstance(definition, ast.ClassDef) and is_decorated(
                definition, "dataclass"
            )
            if is_dataclass and definition.name in names:
                found.append(definition)
    return found


def parameters(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Names of the signature; of a class, what creating it takes."""
    if isinstance(node, ast.FunctionDef):
        return function_parameters(node)
    for init in inits(node):
        return function_parameters(init)
    own = fields(node)
    if own:
        return own
    # a class that adds no field documents those of the others; one that does documents its own
    inherited = []
    for base in bases(node):
        inherited += parameters(base)
    return inherited


def fields(node: ast.ClassDef) -> list[str]:
    """Public fields of a dataclass that creating it takes."""
    names = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_taken = not re.search("ClassVar|init=False", ast.unparse(item))
            if is_taken and not item.target.id.startswith("_"):
                names.append(item.target.id)
    return names


def function_parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    in_order = [*arguments.posonlyargs, *arguments.args, arguments.vararg]
    in_order += [*arguments.kwonlyargs, arguments.kwarg]
    names = [argument.arg for argument in in_order if argument is not None]
    return [name for name in names if name not in ("self", "cls")]


def documented_things() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """What `perfkit` exports with its public methods, the closed forms, and whatever else documents
    its parameters."""
    for module in MODULES:
        for node in public_definitions(module):
            is_exported = node.name in perfkit.__all__
            is_closed_form = module.startswith("perfkit.models.")
            documents = "\nParameters\n---" in (ast.get_docstring(node) or "")
            is_class = isinstance(node, ast.ClassDef)
            takes = not is_class or is_decorated(node, "dataclass") or inits(node)
            if takes and (is_exported or is_closed_form or documents):
                yield f"{module}.{node.name}", node
            if is_class and is_exported:
                for method in node.body:
                    is_public = isinstance(method, ast.FunctionDef) and method.name[0] != "_"
                    # an overload says types alone; the function after it documents them
                    if is_public and not is_decorated(method, "overload"):
                        yield f"{module}.{node.name}.{method.name}", method


def test_docstring_units() -> None:
    for name, node in documented_things():
        docstring = ast.get_docstring(node)
        assert docstring, f"{name} has no docstring"
        found = documented_parameters(docstring)
        expected = parameters(node)
        assert list(found) == expected, (
            f"{name} documents {list(found)}, its signature has {expected}"
        )
        for parameter, (kind, text) in found.items():
            assert kind and text, f"{name}: `{parameter}` needs a type and an indented text"
            if kind.lstrip("{(").startswith(NUMBERS):
                assert UNIT.search(text), (
                    f"{name}: `{parameter} : {kind}` is a number without [unit] in {text}"
                )


def test_docstring_units_notices_what_is_wrong() -> None:
    text = "Do.\n\nParameters\n----------\na, b : float\n    T [s].\nc : int\n    N.\n\nReturns\n-------\nd : int\n    E."
    found = documented_parameters(text)
    assert list(found) == ["a", "b", "c"]
    assert UNIT.search(found["a"][1])
    assert UNIT.search(found["b"][1])
    assert not UNIT.search(found["c"][1])


def test_code_and_formulas_name_each_other_rightly() -> None:
    page = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
    cited: set[str] = set()
    for path in SOURCES.values():
        text = path.read_text(encoding="utf-8")
        cited.update(re.findall(r"formulas\.md,[\s#:]+table (\d+\.\d+)", text))
    assert cited
    assert cited <= set(re.findall(r"^Table (\d+\.\d+):", page, re.M))
    for name in set(re.findall(r"`(perfkit(?:\.\w+)+)`", page)):
        pkgutil.resolve_name(name)  # raises where there is no such module or function


# Packaging.
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
ENVIRONMENT = (ROOT / "environment.yml").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
CONDA_NAMES = {"torch": "pytorch"}


def list_requirements(pyproject: str) -> list[Requirement]:
    """What the package needs: Python, its dependencies, and those of its extras."""
    project = tomllib.loads(pyproject)["project"]
    texts = ["python" + project["requires-python"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [Requirement(text) for text in texts]


def find_unlike_bounds(pyproject: str, environment: str) -> list[str]:
    """Where the conda environment and the requirements of the package differ."""
    entries = re.findall(r"^ +- ([a-z][\w.<>=,-]*)$", environment, re.MULTILINE)
    conda = {entry.name: entry.specifier for entry in map(Requirement, entries)}
    assert conda.pop("conda-forge") == conda.pop("pip") == ""
    unlike = []
    for requirement in list_requirements(pyproject):
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        if name not in conda:
            unlike.append(f"{requirement} is not in environment.yml")
        elif conda[name] != requirement.specifier:
            unlike.append(f"{requirement} is {name}{conda[name]} in environment.yml")
    needed = {CONDA_NAMES.get(each.name, each.name) for each in list_requirements(pyproject)}
    return unlike + [f"{name} is not in pyproject.toml" for name in conda if name not in needed]


def find_unlike_pins(pyproject: str, constraints: str) -> list[str]:
    """Requirements that are not pinned, or to a version outside of their bounds."""
    lines = constraints.splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    unlike = []
    for requirement in list_requirements(pyproject)[1:]:
        if requirement.name not in pins:
            unlike.append(f"{requirement} is not in constraints.txt")
        elif not requirement.specifier.contains(pins[requirement.name]):
            unlike.append(f"{requirement} is pinned to {pins[requirement.name]}")
    return unlike


def test_conda_environment_has_all_requirements_with_their_bounds() -> None:
    assert find_unlike_bounds(PYPROJECT, ENVIRONMENT) == []
    assert ENVIRONMENT.endswith("      - -e .\n"), "pip installs perfkit itself"


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    assert find_unlike_pins(PYPROJECT, CONSTRAINTS) == []


def test_a_bound_that_differs_in_one_file_is_found() -> None:
    higher = PYPROJECT.replace('"scipy>=1.14"', '"scipy>=9.1"')
    assert find_unlike_bounds(higher, ENVIRONMENT) == [
        "scipy>=9.1 is scipy>=1.14 in environment.yml"
    ]
    assert find_unlike_pins(higher, CONSTRAINTS)[0].startswith("scipy>=9.1 is pinned to 1.")
    capped = ENVIRONMENT.replace("pytorch>=2.9,<3", "pytorch>=2.9")
    assert find_unlike_bounds(PYPROJECT, capped) == [
        "torch<3,>=2.9 is pytorch>=2.9 in environment.yml"
    ]
    added = PYPROJECT.replace("release = [", 'release = ["twine>=6.1", ')
    assert find_unlike_bounds(added, ENVIRONMENT) == ["twine>=6.1 is not in environment.yml"]
    assert find_unlike_pins(added, CONSTRAINTS) == ["twine>=6.1 is not in constraints.txt"]
    forgotten = ENVIRONMENT.replace("  - pip\n", "  - pip\n  - seaborn>=0.13\n")
    assert find_unlike_bounds(PYPROJECT, forgotten) == ["seaborn is not in pyproject.toml"]
    older = PYPROJECT.replace('requires-python = ">=3.11"', 'requires-python = ">=3.10"')
    assert find_unlike_bounds(older, ENVIRONMENT) == [
        "python>=3.10 is python>=3.11 in environment.yml"
    ]


def test_versions_agree() -> None:
    assert f"version: {perfkit.__version__}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )


# What the code may not contain.
ENDINGS = (
    ".py",
    ".ipynb",
    ".toml",
    ".csv",
    ".json",
    ".md",
    ".yml",
    ".txt",
    ".cff",
    "Makefile",
    ".ci/run",
)
LEFT_OUT = re.compile(r"\.(?!ci$).*|build|dist|site")


def list_text_files() -> list[Path]:
    """Files of the repository that people wrote."""
    files = []
    for top in ROOT.iterdir():
        if not LEFT_OUT.fullmatch(top.name):
            paths = [top, *top.rglob("*")]
            files += [path for path in paths if str(path).endswith(ENDINGS) and path.is_file()]
    return files


MACHINE_PATH = re.compile(r"(?<![\w./-])(/(?:home|root|Users|work|tmp)/\w|[A-Z]:\\\\?Users)")
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "timeit", "time_ns"}


def test_no_paths_of_one_machine() -> None:
    for path in list_text_files():
        match = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
        assert not match, (
            f"{path.name} names a path of one machine at character {match.start()}: {match.group()}"
        )


def test_input_is_checked_by_errors_not_by_assert() -> None:
    for module, tree in TREES.items():
        lines = [node.lineno for node in list_nodes(tree, ast.Assert)]
        assert not lines, f"{module}, lines {lines}: raise ValueError, python -O removes asserts"


def test_no_test_reads_the_clock() -> None:
    for path in (ROOT / "tests").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        attributes = {node.attr for node in list_nodes(tree, ast.Attribute)}
        names = {node.id for node in list_nodes(tree, ast.Name)}
        assert not (attributes | names) & CLOCKS, (
            f"{path.name}: speed is measured in benchmarks/, a busy machine would fail by chance"
        )


HEAVY = ("torch", "polars", "pandas", "altair", "statsmodels", "scipy", "vl_convert", "msgspec")


@pytest.mark.parametrize(
    "statement", ["import perfkit", "import perfkit.ground.units, perfkit.models"]
)
def test_import_is_light(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


# Reference data.
# whole numbers that count things and speak for themselves
COUNTS = {"format", "nodes", "ranks_per_node", "rails", "n"}


def holds_numbers(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(type(item) in (int, float) for item in items)


def unsourced_numbers(
    table: dict[str, object], known: frozenset[str] = frozenset(), path: str = ""
) -> Iterator[str]:
    """Numbers of a TOML document whose own table, or one around it, lacks unit, kind or source."""
    known |= {"unit" if key == "units" else key for key in table if path}
    for key, value in table.items():
        where = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from unsourced_numbers(value, known, where)
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from unsourced_numbers(item, known, f"{where}[{number}]")
        elif key not in COUNTS and holds_numbers(value):
            missing = {"unit", "kind", "source"} - known
            if missing:
                yield f"{where} lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "reference_data").rglob("*.toml")), ids=lambda path: path.stem
)
def test_reference_numbers_have_unit_kind_and_source(path: Path) -> None:
    assert not list(unsourced_numbers(tomllib.loads(path.read_text(encoding="utf-8"))))


def test_unsourced_numbers_are_noticed() -> None:
    text = "format = 1\nx = 2\n[a]\nkind = 'datasheet'\nsource = 's'\n[a.b]\nvalue = 3\nunit = 'B'\n[a.c]\nvalue = 4"
    assert list(unsourced_numbers(tomllib.loads(text))) == [
        "x lacks kind, source, unit",
        "a.c.value lacks unit",
    ]


#: "To add …" in CONTRIBUTING, by its headings.
TO_ADD = dict(
    re.findall(
        r"^### … ([^\n]+)\n(.*?)(?=^##)",
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
NAME_OF_FILE = re.compile(r"[\w./*-]*/|[\w./*-]+\.(py|md|csv|toml|txt|yml)")


def find_files(name: str) -> list[Path]:
    """Files of a name with wildcards, in the package or in the repository."""
    return [*PACKAGE.glob(name), *ROOT.glob(name)]


@pytest.mark.parametrize("thing", TO_ADD)
def test_places_where_something_is_added_exist(thing: str) -> None:
    """A line is one place, such as "- `models/optimizers.py`, `OPTIMIZERS`: one entry": the files
    exist, and what stands before the colon is in one of them."""
    places = re.findall(r"^- (.+(?:\n  .+)*)", TO_ADD[thing], re.MULTILINE)
    assert len(places) > 1, "name a place and a test"
    assert sum(place.startswith("Test: `tests/") for place in places) == 1, "say which test tells"
    for place in places:
        assert len(place.split()) < 50, f"one place a line, in few words: {place}"
        for name in re.findall(r"`([\w./*-]+)`", place):
            assert not NAME_OF_FILE.fullmatch(name) or find_files(name), f"there is no {name}"
        names = re.findall(r"`([\w./*-]+)`", place.partition(": ")[0])
        files: list[Path] = []
        for name in names:
            if NAME_OF_FILE.fullmatch(name):
                files += find_files(name)
        texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
        for name in names:
            if texts and not NAME_OF_FILE.fullmatch(name):
                said = any(re.search(rf"\b{name}\b", text) for text in texts)
                assert said, f"{name} is in none of {', '.join(map(str, files))}"
