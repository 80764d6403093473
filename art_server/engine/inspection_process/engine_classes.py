"""Which classes vLLM has, and for which classes vLLM serves adapters: read from vLLM's sources, because its import takes half a
minute."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import transformers


def engine_problem(architecture: str) -> str | None:
    """Why vLLM serves no adapters of a class; None if vLLM does."""
    if importlib.util.find_spec("vllm") is None:
        return None
    known, gone = _registry(_file_of("vllm.model_executor.models.registry"))
    if architecture in gone:
        return f"vLLM no longer serves its class {architecture}"
    if architecture not in known:
        # vLLM runs transformers' own class. Source: vLLM's registry, `_try_resolve_transformers`.
        kind = getattr(transformers, architecture, None)
        if kind is None or kind.is_backend_compatible() or kind._can_set_attn_implementation():
            return None
        return f"vLLM has no class for it and cannot run transformers' {architecture}"
    module, name = known[architecture]
    file = _file_of(module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}")
    if "SupportsLoRA" in _ancestors(file, name):
        return None
    return f"vLLM serves no adapters of its class {architecture}"


@functools.cache
def _registry(file: Path) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """vLLM's classes by architecture, as module and name, and the architectures that it no longer serves."""
    known: dict[str, tuple[str, str]] = {}
    gone: set[str] = set()
    for table, key, value in _table_entries(ast.parse(file.read_text())):
        if table in ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS"):
            gone.add(key)
        elif isinstance(value, ast.Tuple):
            module, name = (ast.literal_eval(element) for element in value.elts[:2])
            known.setdefault(key, (module, name))
    return known, gone


def _table_entries(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    """The name of a dictionary at the top of a module, a key and its value, for each key that is a constant."""
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        else:
            continue
        if not isinstance(statement.value, ast.Dict) or not isinstance(target, ast.Name):
            continue
        for key, value in zip(statement.value.keys, statement.value.values, strict=True):
            if isinstance(key, ast.Constant):
                yield target.id, str(key.value), value


def _file_of(module: str) -> Path:
    """The source of a module of vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "checked by the caller"
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _ancestors(file: Path, name: str) -> frozenset[str]:
    """The names of a class and of all that it inherits from, as far as vLLM's sources tell."""
    names = {name}
    if not file.is_file():
        return frozenset(names)
    tree = ast.parse(file.read_text())
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    for definition in definitions:
        for base in definition.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            names |= _ancestors(file, ast.unparse(base).rpartition(".")[2])
    if not definitions:
        for module, original in _imports_of(tree, file, name):
            names |= _ancestors(_file_of(module), original)
    return frozenset(names)


def _imports_of(tree: ast.Module, file: Path, name: str) -> Iterator[tuple[str, str]]:
    """The modules of vLLM from which a file imports a name, and the name in the module."""
    package = ["vllm", *file.relative_to(_file_of("vllm").parent).parent.parts]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        before = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*before, *(node.module or "").split(".")]).rstrip(".")
        if not module.startswith("vllm."):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                yield module, alias.name
