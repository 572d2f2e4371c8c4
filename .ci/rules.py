#!/usr/bin/env python3
"""Rules of the code and of the documents that no linter knows, read off syntax trees: part of `make lint`.

    .ci/rules.py [ROOT]

It prints each breach as `file:line: what` and ends with 1 if there is one. docs/architecture.md gives the
reasons.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: The folders of infinity/. A file imports from its own folder and from those before it.
FOLDERS = [
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
]
#: What an assert may call: it has no effect, so `python -O` changes nothing.
PURE = frozenset(
    [
        "all",
        "any",
        "abs",
        "bool",
        "callable",
        "dict",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "hash",
        "id",
        "int",
        "isinstance",
        "issubclass",
        "len",
        "list",
        "max",
        "min",
        "range",
        "repr",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "zip",
        "data_ptr",
        "dim",
        "element_size",
        "endswith",
        "get",
        "is_contiguous",
        "is_floating_point",
        "items",
        "keys",
        "named_parameters",
        "numel",
        "parameters",
        "size",
        "startswith",
        "stride",
        "storage_offset",
        "values",
    ]
)
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
#: Who imports what of these: an `Unpickler` with an allowlist of names.
UNPICKLES = {("infinity/integrations/dcp.py", "pickle")}
#: The one file that imports a native module.
IMPORTERS = {"_aio": "infinity/hardware/aio_native.py", "_cpu_adam": "infinity/hardware/cpu_adam.py"}
#: Rooms whose parts talk through objects with named methods: [Note: the seams].
SEAMS = ("params", "grads", "optim", "autograd")
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
README_LINES = 170


class House:
    """The files of the package, with their trees, and what they import of each other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = sorted(p.relative_to(root) for p in (root / "infinity").rglob("*.py"))
        self.trees = {p: ast.parse((root / p).read_text(encoding="utf-8")) for p in files}
        self.modules = {module_of(p): p for p in files}
        self.above: dict[Path, set[Path]] = {p: set() for p in files if p.name != "__init__.py"}

    def target_of(self, name: str) -> Path | None:
        """Return the file that an imported name is in; None: another package has it."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return self.modules.get(name)

    def imports(self, path: Path) -> Iterator[tuple[str, int]]:
        """Yield (dotted name, line) of each import."""
        package = path.with_suffix("").parts[:-1]
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(path: Path) -> str | None:
    return path.parts[1] if len(path.parts) > 2 else None


# -- the code -------------------------------------------------------------------------------------


def imports(house: House) -> Iterator[str]:
    """Which file imports what."""
    for path in house.trees:
        mine = folder_of(path)
        for name, line in house.imports(path):
            where, top = f"{path}:{line}: imports {name}", name.split(".")[0]
            target = house.target_of(name)
            if target is not None and target != path and path in house.above:
                house.above[path].add(target)
            its = folder_of(target) if target is not None else None
            if mine is not None and its is not None and FOLDERS.index(its) > FOLDERS.index(mine):
                yield f"{where}, from a folder that comes later"
            if mine == "core" and top not in {*sys.stdlib_module_names, "torch", "yaml", "infinity"}:
                yield f"{where}: `core` needs little"
            if top in PICKLES and (str(path), name) not in UNPICKLES:
                yield f"{where}: nothing is unpickled, but for checkpoints of other programs"
            for native, importer in IMPORTERS.items():
                if re.match(rf"infinity\.{native}(\.|$)", name) and str(path) != importer:
                    yield f"{where}, which {importer} alone may"
    above = {p: targets & house.above.keys() for p, targets in house.above.items()}
    # What imports nothing that is left, or is imported by nothing that is left, is in no circle.
    while free := [p for p in above if not above[p] & above.keys() or p not in set().union(*above.values())]:
        for path in free:
            del above[path]
    if above:
        yield f"{min(above)}:1: imports itself in a circle, over {', '.join(map(str, sorted(above)))}"


def dangers(house: House) -> Iterator[str]:
    """Calls, handlers and asserts that library code does not have."""
    for path, tree in house.trees.items():
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("print", "eval", "exec", "breakpoint", "pickle.load", "pickle.loads"):
                    yield f"{where}: {called}()"
                elif called == "torch.load" and "weights_only=True" not in ast.unparse(node):
                    yield f"{where}: torch.load() of what may be code"
            elif isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                if broad and all(isinstance(n, (ast.Pass, ast.Expr)) and not calls(n) for n in node.body):
                    yield f"{where}: an error is swallowed"
            elif isinstance(node, ast.Assert):
                for effect in effects(node):
                    yield f"{where}: assert with {effect}"
            elif isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in given if folder_of(path) in SEAMS else ():
                    if argument.annotation is not None and "Callable" in ast.unparse(argument.annotation):
                        yield f"{where}: a constructor takes a call of its owner: {argument.arg}"


def calls(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) for n in ast.walk(node))


def effects(node: ast.Assert) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            yield type(inner).__name__
        elif isinstance(inner, ast.Call):
            name = ast.unparse(inner.func).rpartition(".")[2]
            if name not in PURE:
                yield f"{name}()"


def notes(house: House) -> Iterator[str]:
    """Every `[Note: name]` that is cited exists. A note begins a line of a docstring or a comment; wherever
    else its name stands, the line cites it."""
    found, cited = {"name"}, {}
    kinds = (".py", ".c", ".h", ".cpp", ".inl", ".md")
    for folder in ("infinity", "csrc", "docs", "tests", "benchmarks"):
        for path in sorted(p for p in (house.root / folder).rglob("*") if p.suffix in kinds):
            text = re.sub(r"\n[ *#/]*", "\n", path.read_text(encoding="utf-8").replace('"""', ""))
            for note in re.finditer(r"\[Note: ([^\]]+)\]", text):
                name = note[1].replace("\n", " ")
                if text[note.start() - 1] == "\n" and re.match(r"\s\w", text[note.end() :]):
                    found.add(name)
                else:
                    cited[name] = path.relative_to(house.root)
    for name in sorted(cited.keys() - found):
        yield f"{cited[name]}:1: there is no [Note: {name}]"


# -- the documents --------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if n == 0 else f"{slug}-{n}" for slug, count in found.items() for n in range(count + 1)}


def documents(house: House) -> Iterator[str]:
    """Links lead somewhere; the front page is short and names every page; the map names what exists."""
    root = house.root
    pages = [root / n for n in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    pages += sorted((root / "docs").glob("*.md"))
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in pages}
    for page in pages:
        text = re.sub(r"`[^`]*`", "", FENCE.sub("", texts[page.resolve()]))
        for link in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name if name else page).resolve()
            known = target.exists() and (not anchor or anchor in anchors(texts.get(target, "")))
            if "://" not in link and not known:
                yield f"{page.relative_to(root)}:1: the link {link} leads nowhere"
    front = (root / "README.md").read_text(encoding="utf-8")
    if front.count("\n") > README_LINES:
        yield f"README.md:{README_LINES}: has more lines than that"
    for page in sorted((root / "docs").glob("*.md")):
        if f"](docs/{page.name})" not in front:
            yield f"README.md:1: does not name docs/{page.name}"
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+/(?:\w+/)*\w+\.py)`", text):
        if not ((root / "infinity" / name).exists() or (root / name).exists()):
            yield f"docs/architecture.md:1: there is no {name}"
    for dotted, name in re.findall(r"`([A-Za-z_.]+)`,?\s+\(?`(\w+/\w+\.py)`", text):
        tree = house.trees.get(Path("infinity") / name)
        names = {getattr(node, "name", "") for node in ast.walk(tree)} if tree else set()
        if not set(dotted.split(".")) <= names:
            yield f"docs/architecture.md:1: {name} has no {dotted}"


def main() -> int:
    house = House(Path(sys.argv[1] if len(sys.argv) > 1 else __file__ + "/../..").resolve())
    found = [breach for rule in (imports, dangers, notes, documents) for breach in rule(house)]
    sys.stdout.writelines(f"{breach}\n" for breach in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
