"""What DESIGN and STYLE promise about the code: floors, names, docstring units, bounds, no trace of one machine."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "perfkit"
FLOORS = [
    {"units", "resources", "models"},
    {"workloads", "readers"},
    {
        "measure",
        "fitting",
        "datasheets",
        "hardware",
        "estimates",
        "computation",
        "inventory",
        "overheads",
        "pace",
        "communication",
        "platform_file",
        "platform",
        "gallery",
        "variants",
        "plots",
    },
    {"prediction"},
    {"contexts", "calibration", "campaign", "assembly", "sharding", "trials"},
    {"report", "doctor", "demonstration", "runlog", "__main__"},
]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
MODULES = [name for name in TREES if name != "perfkit"]  # the facade resolves names of every floor


def floor(module: str) -> int:
    part = module.split(".")[1]
    known = [number for number, names in enumerate(FLOORS, 1) if part in names]
    if not known:
        raise AssertionError(f"{module}: perfkit.{part} has no floor; add it to FLOORS and to DESIGN")
    return known[0]


def imported(module: str) -> Iterator[str]:
    """Modules of perfkit that `module` imports anywhere: at the top, inside functions, for type checkers only."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "perfkit")
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
            stem = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*stem, *([node.module] if node.module else [])])
            if origin.split(".")[0] == "perfkit":
                for alias in node.names:
                    if (origin, alias.name) != ("perfkit", "__version__"):
                        yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in SOURCES else origin


@pytest.mark.parametrize("module", MODULES)
def test_a_lower_floor_never_imports_a_higher_one(module: str) -> None:
    for other in imported(module):
        assert other != "perfkit" or floor(module) == len(FLOORS), (
            f"{module} imports the facade; import the module that holds the name"
        )
        lower = other == "perfkit" or floor(other) <= floor(module)
        assert lower, f"{module} (floor {floor(module)}) imports {other} (floor {floor(other)})"


def test_imports_make_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "circle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in set(imported(module)) - {module}:
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def names_in_all(module: str) -> list[str] | None:
    for node in TREES[module].body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return list(ast.literal_eval(node.value))
    return None


def public_definitions(module: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    names = names_in_all(module) or []
    return (n for n in TREES[module].body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names)


@pytest.mark.parametrize("module", TREES)
def test_public_names_are_declared_and_documented(module: str) -> None:
    names = names_in_all(module)
    assert names is not None, f"{module} has no __all__"
    assert len(names) == len(set(names))
    for node in public_definitions(module):
        assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_no_function_bears_the_name_of_a_module() -> None:
    modules = {part for name in MODULES for part in name.split(".")[1:]}
    functions = {n.name: m for m in TREES for n in public_definitions(m) if isinstance(n, ast.FunctionDef)}
    assert not {name: functions[name] for name in modules & set(functions)}


def test_every_public_name_of_the_facade_resolves() -> None:
    import perfkit

    for name in perfkit.__all__:
        assert getattr(perfkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = perfkit.nonsense  # type: ignore[attr-defined]


# Docstring units. A parameter whose type starts with one of these words is a number, so its text needs a unit: `[s]`,
# `[B/s]`, `[-]` for pure numbers. Anything else (str, Path, bool, mapping, a class) says in words what it holds.
NUMBERS = ("int", "float", "number", "array", "expression", "same")
UNIT = re.compile(r"\[(-|%|[A-Za-zµ°][A-Za-zµ²³^·*/0-9 -]*|1/[A-Za-z]+)\]")


def documented_parameters(docstring: str) -> dict[str, tuple[str, str]]:
    """Name -> (type, text) of the numpydoc section Parameters."""
    section = re.search(r"^Parameters\n-{5,}\n(.*?)(?=^\S[^\n]*\n-{3,}\n|\Z)", docstring, re.M | re.S)
    found: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in section.group(1).splitlines() if section else []:
        head = re.match(r"^(\*{0,2}\w[\w, *]*?)(?: : (.*))?$", line)
        if head:
            names = [name.strip().lstrip("*") for name in head.group(1).split(",")]
            found.update({name: (head.group(2) or "", "") for name in names})
        else:
            found.update({name: (found[name][0], found[name][1] + " " + line.strip()) for name in names})
    return found


def is_decorated(node: ast.FunctionDef | ast.ClassDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)


def inits(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]


def parameters(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Names of the signature; of a class, what creating it takes."""
    if isinstance(node, ast.ClassDef) and inits(node):
        return parameters(inits(node)[0])
    if isinstance(node, ast.ClassDef):
        fields = {
            item.target.id: ast.unparse(item)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        return [n for n, text in fields.items() if "ClassVar" not in text and "init=False" not in text and n[0] != "_"]
    args = node.args
    every = [*args.posonlyargs, *args.args, *([args.vararg] if args.vararg else []), *args.kwonlyargs]
    every += [args.kwarg] if args.kwarg else []
    return [arg.arg for arg in every if arg.arg not in ("self", "cls")]


def documented_things() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes of every module, and the public methods of the classes that `perfkit` exports."""
    facade = names_in_all("perfkit") or []
    for module in MODULES:
        for node in public_definitions(module):
            if not isinstance(node, ast.ClassDef) or is_decorated(node, "dataclass") or inits(node):
                yield f"{module}.{node.name}", node
            for method in node.body if isinstance(node, ast.ClassDef) and node.name in facade else []:
                if isinstance(method, ast.FunctionDef) and method.name[0] != "_":
                    yield f"{module}.{node.name}.{method.name}", method


THINGS = dict(documented_things())


@pytest.mark.parametrize("name", THINGS)
def test_docstring_units(name: str) -> None:
    docstring = ast.get_docstring(THINGS[name])
    assert docstring, f"{name} has no docstring"
    found, expected = documented_parameters(docstring), parameters(THINGS[name])
    assert list(found) == expected, f"{name} documents {list(found)}, its signature has {expected}"
    for parameter, (kind, text) in found.items():
        assert kind and text, f"{name}: `{parameter}` needs a type and an indented text"
        if kind.lstrip("{(").startswith(NUMBERS):
            assert UNIT.search(text), f"{name}: `{parameter} : {kind}` is a number without [unit] in{text}"


def test_docstring_units_notices_what_is_wrong() -> None:
    text = (
        "Do.\n\nParameters\n----------\na, b : float\n    T [s].\nc : int\n    N.\n\nReturns\n-------\nd : int\n    E."
    )
    found = documented_parameters(text)
    assert list(found) == ["a", "b", "c"]
    assert [bool(UNIT.search(words)) for _, words in found.values()] == [True, True, False]


# Packaging.
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LISTS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
REQUIREMENTS = {requirement.name: requirement for texts in LISTS for requirement in map(Requirement, texts)}
CONDA_NAMES = {"torch": "pytorch"}


def test_conda_environment_has_the_bounds_of_pyproject() -> None:
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    conda = [Requirement(match.group(1)) for line in lines if (match := re.match(r"^  - ([a-z][^:]*)$", line))]
    found = {requirement.name: requirement.specifier for requirement in conda if requirement.name != "conda-forge"}
    pins = {CONDA_NAMES.get(name, name): requirement.specifier for name, requirement in REQUIREMENTS.items()}
    pins["python"] = Requirement("python" + PROJECT["requires-python"]).specifier
    names = "python jupyterlab numpy scipy pandas polars statsmodels altair vl-convert-python pytorch nbval pytest tqdm"
    assert list(found) == [*names.split(), "pip"]
    assert {name: found[name] for name in names.split()} == {name: pins[name] for name in names.split()}
    runtime = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert runtime - set(found) == {"tomli-w"}, "`pip install -e .` adds what conda users have no other use for"
    assert lines[-2:] == ["  - pip:", "      - -e ."]


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(REQUIREMENTS) <= set(pinned)
    assert not [name for name, r in REQUIREMENTS.items() if not r.specifier.contains(pinned[name])]


def test_versions_agree() -> None:
    import perfkit

    assert f"version: {perfkit.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# What the code may not contain.
PATTERNS = ["*.py", "*.ipynb", "*.toml", "*.csv", "*.json", "*.md", "*.yml", "*.txt", "*.cff", "Makefile", ".ci/run"]
TEXT_FILES = [
    path
    for pattern in PATTERNS
    for path in sorted(ROOT.rglob(pattern))
    if not any(re.fullmatch(r"\.(?!ci$).*|build|dist", part) for part in path.relative_to(ROOT).parts)
]
MACHINE_PATH = re.compile(r"(?<![\w./-])(/(?:home|root|Users|work|tmp)/\w|[A-Z]:\\\\?Users)")


@pytest.mark.parametrize("path", TEXT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_paths_of_one_machine(path: Path) -> None:
    match = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
    assert not match, f"{path.name} names a path of one machine at character {match.start()}: {match.group()}"


@pytest.mark.parametrize("module", TREES)
def test_input_is_checked_by_errors_not_by_assert(module: str) -> None:
    lines = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Assert)]
    assert not lines, f"{module}: assert at lines {lines}; raise ValueError, python -O removes asserts"


CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "timeit", "time_ns"}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("*.py")), ids=lambda path: path.stem)
def test_no_test_reads_the_clock(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    read = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}
    assert not read & CLOCKS, "speed is measured in benchmarks/, a test on a busy machine would fail by chance"


HEAVY = ("torch", "polars", "pandas", "altair", "statsmodels", "scipy", "vl_convert")


@pytest.mark.parametrize("statement", ["import perfkit", "import perfkit.units, perfkit.models"])
def test_import_is_light(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# Reference data.
COUNTS = {"format", "nodes", "ranks_per_node", "rails", "n"}  # whole numbers that count things and speak for themselves


def unsourced_numbers(table: dict[str, object], known: frozenset[str] = frozenset(), path: str = "") -> Iterator[str]:
    """Numbers of a TOML document whose own table, or one around it, lacks unit, kind or source."""
    known |= {"unit" if key == "units" else key for key in table if path}
    for key, value in table.items():
        where = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from unsourced_numbers(value, known, where)
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from unsourced_numbers(item, known, f"{where}[{number}]")
        elif key not in COUNTS and any(
            type(item) in (int, float) for item in (value if type(value) is list else [value])
        ):
            missing = {"unit", "kind", "source"} - known
            if missing:
                yield f"{where} lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("path", sorted((ROOT / "reference_data").rglob("*.toml")), ids=lambda path: path.stem)
def test_reference_numbers_have_unit_kind_and_source(path: Path) -> None:
    assert not list(unsourced_numbers(tomllib.loads(path.read_text(encoding="utf-8"))))


def test_unsourced_numbers_are_noticed() -> None:
    text = "format = 1\nx = 2\n[a]\nkind = 'datasheet'\nsource = 's'\n[a.b]\nvalue = 3\nunit = 'B'\n[a.c]\nvalue = 4"
    assert list(unsourced_numbers(tomllib.loads(text))) == ["x lacks kind, source, unit", "a.c.value lacks unit"]
