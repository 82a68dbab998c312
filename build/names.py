"""The names that s4kv_ext imports from vLLM, and what became of them in another source tree.

Read from the sources alone, before anything is built. It is a hint where to look; the tests tell.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

Name = tuple[str, str]  # module, name


def imports(package: Path) -> list[Name]:
    """Each `from vllm… import name` anywhere in a package."""
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module or "", alias.name) for alias in node.names}
    return sorted(found)


def file_of(source: Path, module: str) -> Path | None:
    path = source.joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.exists()), None)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those in its if and try branches too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [x for h in getattr(node, "handlers", []) for x in h.body]
            yield from statements([*node.body, *handlers, *node.orelse])


def definition(source: Path, module: str, name: str) -> str | None:
    """What the name is bound to, as code without its formatting; None where there is none.

    A re-export is followed; a submodule, and a name that only a table of lazy imports has, is "".
    """
    file = file_of(source, module)
    if file is None:
        return None
    if file_of(source, f"{module}.{name}"):
        return ""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text())
    for node in statements(tree.body):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                return ast.unparse(node)
            case ast.ImportFrom():
                parts = package.split(".")
                up = parts[: len(parts) - node.level + 1] if node.level else []
                origin = ".".join([*up, *([node.module] if node.module else [])])
                for alias in node.names:
                    if alias.name == "*" or name == (alias.asname or alias.name):
                        wanted = name if alias.name == "*" else alias.name
                        found = definition(source, origin, wanted)
                        if found is not None:
                            return found
            case (
                ast.Assign(targets=[ast.Name(id=bound)]) | ast.AnnAssign(target=ast.Name(id=bound))
            ) if bound == name:
                return ast.unparse(node)
    listed = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return "" if name in listed else None


def compared(package: Path, old: Path, new: Path) -> tuple[list[str], list[str]]:
    """The imported names that are gone, and those whose code changed."""
    gone, changed = [], []
    for module, name in imports(package):
        before, after = definition(old, module, name), definition(new, module, name)
        if after is None and before is not None:
            gone.append(f"{module}.{name}")
        elif before != after:
            changed.append(f"{module}.{name}")
    return gone, changed
