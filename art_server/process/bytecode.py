"""Keeps Python's bytecode between starts, for the server, a host and all processes that they start.

A start imports torch, transformers and vLLM, in several processes. Compiling these packages takes half of a start on a CPU. Python
keeps what it compiled beside the source files, except where PYTHONDONTWRITEBYTECODE is set, as in many container images, or where
the folders are read-only. There this module has Python keep the bytecode in the user's cache folder.

    python -m art_server.process.bytecode    compiles beside the source files; `scripts/setup` and the images do this

This module imports nothing that takes time to compile, because `art_server/__main__.py` calls it before all other imports.
"""

import compileall
import importlib.machinery
import importlib.util
import os
import re
import sys
from pathlib import Path

CACHE_DIR = Path.home() / ".cache" / "art" / "bytecode"
LARGE_PACKAGES = ("torch", "transformers", "vllm")
IMPORTED = """
    PIL accelerate aiohttp anyio click compressed_tensors fastapi filelock fsspec google grpc h11 httpcore2 httpx httpx2
    huggingface_hub jinja2 jsonschema loguru mistral_common mpmath msgspec networkx numpy openai packaging peft
    prometheus_client psutil pydantic pydantic_core regex requests setuptools starlette sympy tokenizers torchvision tqdm
    tvm_ffi urllib3 uvicorn websockets xgrammar yaml zmq art art_protocol art_server art_watch
"""
"""These packages and the large ones have nine tenths of the code that a start imports (`scripts/bench/start`)."""
NOT_IMPORTED = re.compile(
    r"/tests?/|/torch/testing/|/sympy/physics/|/openai/resources/"
    r"|/transformers/models/(?!auto/)|/vllm/models/|/vllm/model_executor/models/"
)
"""Folders of these packages of which a start imports little: each base model needs another file of them."""
NO_BYTECODE, FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
"""Variables of the environment, which the children of a process inherit."""


def keep_bytecode() -> None:
    """Has this process and its children read and write bytecode in CACHE_DIR, if Python neither may write bytecode beside the
    source files nor has it there. A folder that PYTHONPYCACHEPREFIX names is used in place of CACHE_DIR."""
    sources = [source for name in LARGE_PACKAGES if (source := _source(name)) is not None]
    if _may_write(sources) or (sys.pycache_prefix is None and all(map(_is_compiled, sources))):
        return
    folder = sys.pycache_prefix or str(CACHE_DIR)
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    os.environ.pop(NO_BYTECODE, None)
    os.environ[FOLDER] = folder


def _source(package: str) -> Path | None:
    """The first file that an import of a package reads. Imports nothing."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _may_write(sources: list[Path]) -> bool:
    """Whether Python writes the bytecode of these files by itself."""
    if sys.dont_write_bytecode:
        return False
    return sys.pycache_prefix is not None or all(os.access(source.parent, os.W_OK) for source in sources)


def _is_compiled(source: Path) -> bool:
    """Whether the bytecode of a file lies beside the file."""
    return Path(importlib.util.cache_from_source(str(source))).exists()


def compile_imported() -> None:
    """Compiles what a start imports, on all cores."""
    for name in (*LARGE_PACKAGES, *IMPORTED.split()):
        if (source := _source(name)) is not None:
            compileall.compile_dir(source.parent, quiet=2, workers=0, rx=NOT_IMPORTED)


if __name__ == "__main__":
    compile_imported()
