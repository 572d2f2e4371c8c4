"""The rules of the house, read off the syntax trees of `infinity/` (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "core",
    "planning",
    "hardware",
    "storage",
    "params",
    "grads",
    "optim",
    "autograd",
    "api",
    "integrations",
    "cli",
)
# What an assert may call: it has no effect, so `python -O` changes nothing.
_PURE = """
    all any abs bool callable dict float frozenset getattr hasattr hash id int isinstance issubclass len
    list max min range repr round set sorted str sum tuple type zip
    data_ptr dim element_size endswith get is_contiguous is_floating_point items keys
    named_parameters numel parameters size startswith stride storage_offset values
"""
PURE = frozenset(_PURE.split())
FILES = sorted(p.relative_to(ROOT) for p in (ROOT / "infinity").rglob("*.py"))
TREES = {p: ast.parse((ROOT / p).read_text(encoding="utf-8")) for p in FILES}


def reading_order() -> list[Path]:
    """The files of the folders in the order in which docs/architecture.md lists them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## Reading order")[1].split("\n## ")[0]
    return [Path(name) for name in re.findall(r"^[|-] +`(infinity(?:/\w+){2,}\.py)`", section, flags=re.M)]


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Yield (dotted name, whether it is for type checking only, line) of each import."""
    package = path.with_suffix("").parts[:-1]
    for_types = {
        id(inner)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", id(node) in for_types, node.lineno


def target_of(name: str) -> Path | None:
    """Return the file of the package that an imported name is in, or None for another package."""
    known = {module_of(p): p for p in FILES}
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return None


def folder_of(path: Path) -> str | None:
    return path.parts[1] if len(path.parts) > 2 else None


def test_the_reading_order_lists_every_file_once() -> None:
    order = reading_order()
    assert len(order) == len(set(order))
    assert set(order) == {p for p in FILES if folder_of(p) and p.name != "__init__.py"}
    folders = [FOLDERS.index(p.parts[1]) for p in order]
    assert folders == sorted(folders)


@pytest.mark.parametrize("path", reading_order(), ids=str)
def test_the_reading_order_says_what_the_file_says(path: Path) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{re.escape(str(path))}` \| (.*) \|$", text, flags=re.M)
    assert row is not None
    said = " ".join((ast.get_docstring(TREES[path]) or "").replace("``", "`").split())
    assert re.match(re.escape(row[1]) + r"([.:,]|$)", said)


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p)], ids=str)
def test_a_file_imports_only_from_above(path: Path) -> None:
    order = {p: i for i, p in enumerate(reading_order())}
    wrong = []
    for name, types_only, line in imports(path):
        target = target_of(name)
        if target is None or folder_of(target) is None or target == path:
            continue
        mine, its = FOLDERS.index(path.parts[1]), FOLDERS.index(target.parts[1])
        if path.name == "__init__.py" or target.name == "__init__.py":
            fits = its <= mine
        elif mine == its:
            fits = types_only or order[target] < order[path]
        else:
            fits = its < mine
        if not fits:
            wrong.append(f"line {line} imports {name}")
    assert not wrong


@pytest.mark.parametrize("native", ["_aio", "_cpu_adam"])
def test_a_native_module_has_one_importer(native: str) -> None:
    importers = {
        str(path)
        for path in FILES
        for name, _, _ in imports(path)
        if re.match(rf"infinity\.{native}(\.|$)", name)
    }
    assert importers == {
        {"_aio": "infinity/hardware/aio_native.py"}.get(native, f"infinity/hardware/{native[1:]}.py")
    }


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p) == "core"], ids=str)
def test_core_needs_little(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "yaml", "infinity"}
    assert {name.split(".")[0] for name, _, _ in imports(path)} <= allowed


#: An `Unpickler` with an allowlist of names.
UNPICKLES = {("infinity/integrations/dcp.py", "pickle")}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_does_nothing_dangerous(path: Path) -> None:
    tree = TREES[path]
    wrong = []
    for name, _, line in imports(path):
        is_pickle = name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
        if is_pickle and (str(path), name) not in UNPICKLES:
            wrong.append(f"line {line}: {name}: nothing is unpickled, but for checkpoints of other programs")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "eval", "exec", "breakpoint", "pickle.load", "pickle.loads"):
                wrong.append(f"line {node.lineno}: {called}()")
            elif called == "torch.load" and "weights_only=True" not in ast.unparse(node):
                wrong.append(f"line {node.lineno}: torch.load() of what may be code")
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(n, (ast.Pass, ast.Expr)) and not _calls(n) for n in node.body):
                wrong.append(f"line {node.lineno}: an error is swallowed")
        elif isinstance(node, ast.Assert):
            wrong += [f"line {node.lineno}: assert with {effect}" for effect in _effects(node)]
    assert not wrong


@pytest.mark.parametrize("room", ["params", "grads", "optim", "autograd"])
def test_no_constructor_takes_a_call_of_its_owner(room: str) -> None:
    """What a part tells others goes through objects with named methods: [Note: the seams]."""
    found = []
    for path in sorted((ROOT / "infinity" / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [ast.unparse(a.annotation) for a in arguments if a.annotation is not None]
                found += [f"{path.name}: {name}" for name in names if "Callable" in name]
    assert not found


def test_every_note_that_is_cited_exists() -> None:
    """A note begins a line of a docstring or a comment; wherever else its name stands, it is cited."""
    found: set[str] = set()
    cited: dict[str, str] = {}
    kinds = (".py", ".c", ".h", ".cpp", ".inl", ".md")
    for folder in ("infinity", "csrc", "docs", "tests", "benchmarks"):
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in kinds):
            if path == Path(__file__):
                continue
            text = re.sub(r"\n[ *#/]*", "\n", path.read_text(encoding="utf-8").replace('"""', ""))
            for note in re.finditer(r"\[Note: ([^\]]+)\]", text):
                name = note[1].replace("\n", " ")
                if text[note.start() - 1] == "\n" and re.match(r"\s\w", text[note.end() :]):
                    found.add(name)
                else:
                    cited[name] = str(path.relative_to(ROOT))
    assert {name: path for name, path in cited.items() if name not in {*found, "name"}} == {}


def test_the_map_names_what_exists() -> None:
    """The files that docs/architecture.md names are there, with what it says to be in them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+/(?:\w+/)*\w+\.py)`", text):
        assert (ROOT / "infinity" / name).exists() or (ROOT / name).exists(), name
    placed = re.findall(r"`([A-Za-z_.]+)`,?\s+\(?`(\w+/\w+\.py)`", text)
    assert len(placed) >= 10
    for dotted, file in placed:
        names = {getattr(node, "name", "") for node in ast.walk(TREES[Path("infinity") / file])}
        assert set(dotted.split(".")) <= names, (dotted, file)


def test_no_file_imports_itself_in_a_circle() -> None:
    """Over all imports, those inside of functions and for type checking only too."""
    above: dict[Path, set[Path]] = {
        p: {t for name, _, _ in imports(p) if (t := target_of(name)) not in (None, p)}  # type: ignore[misc]
        for p in FILES
        if p.name != "__init__.py"
    }
    while free := [p for p, targets in above.items() if not targets & above.keys()]:
        for path in free:
            del above[path]
    assert not above


def _calls(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) for n in ast.walk(node))


def _effects(node: ast.Assert) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            yield type(inner).__name__
        elif isinstance(inner, ast.Call):
            name = ast.unparse(inner.func).rpartition(".")[2]
            if name not in PURE:
                yield f"{name}()"


def test_the_rules_see_what_they_should() -> None:
    tree = ast.parse("assert ring.submit(x) == 0\nassert len(a) == 1\nassert (n := 3)")
    asserts = [n for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert [list(_effects(n)) for n in asserts] == [["submit()"], [], ["NamedExpr"]]
    assert target_of("infinity.core.errors.ConfigError") == Path("infinity/core/errors.py")
    assert target_of("torch.nn") is None
