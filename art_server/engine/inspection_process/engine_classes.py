"""Which classes vLLM has, and of which it serves adapters: read from its sources, because its import takes half a minute."""

import ast
import functools
import importlib.util
from pathlib import Path

import transformers


def engine_problem(architecture: str) -> str | None:
    """Why vLLM serves no adapters of a class, if it does not."""
    if importlib.util.find_spec("vllm") is None:
        return None
    known, gone = _registry(_file_of("vllm.model_executor.models.registry"))
    if architecture in gone:
        return f"vLLM no longer serves its class {architecture}"
    if architecture not in known:
        # vLLM runs transformers' own class. Source: its registry, `_try_resolve_transformers`.
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
    for statement in ast.parse(file.read_text()).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if not isinstance(statement.value, ast.Dict) or not isinstance(target, ast.Name):
            continue
        for key, value in zip(statement.value.keys, statement.value.values, strict=True):
            if not isinstance(key, ast.Constant):
                continue
            if target.id in ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS"):
                gone.add(str(key.value))
            elif isinstance(value, ast.Tuple):
                module, name = (ast.literal_eval(each) for each in value.elts[:2])
                known.setdefault(str(key.value), (module, name))
    return known, gone


def _file_of(module: str) -> Path:
    """The source of a module of vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "checked by the caller"
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _ancestors(file: Path, name: str) -> frozenset[str]:
    """The names of a class and of all that it inherits from, as far as vLLM's sources tell."""
    found = {name}
    if not file.is_file():
        return frozenset(found)
    tree = ast.parse(file.read_text())
    made = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name]
    for base in [base for each in made for base in each.bases]:
        base = base.value if isinstance(base, ast.Subscript) else base
        found |= _ancestors(file, ast.unparse(base).rpartition(".")[2])
    if not made:
        package = ["vllm", *file.relative_to(_file_of("vllm").parent).parent.parts]
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom):
                before = package[: len(package) - each.level + 1] if each.level else []
                module = ".".join([*before, *(each.module or "").split(".")]).rstrip(".")
                for alias in each.names:
                    if (alias.asname or alias.name) == name and module.startswith("vllm."):
                        found |= _ancestors(_file_of(module), alias.name)
    return frozenset(found)
