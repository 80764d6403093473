"""How a model's weights are quantised."""

from pathlib import Path
from typing import Any

QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files beside config.json that say how the weights are quantised, from which vLLM's classes read it."""


def find_quantization(folder: Path, raw: dict[str, Any]) -> tuple[str | None, bool]:
    """How the weights are quantised, and whether bitsandbytes did it to 8 bits, from any of the places where it stands."""
    for part in (raw, raw.get("text_config") or {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if part.get(key):
                return _method(part[key]), bool(part[key].get("load_in_8bit"))
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).exists():
            return method, False
    return None, False


def _method(found: dict[str, Any]) -> str:
    """The method that an entry names, or else the one that writes such entries."""
    if found.get("quant_method"):
        return str(found["quant_method"])
    if found.get("load_in_8bit") or found.get("load_in_4bit"):
        return "bitsandbytes"
    return "mlx" if "group_size" in found else "unknown"
