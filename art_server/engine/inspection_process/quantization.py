"""How a model's weights are quantised."""

from pathlib import Path
from typing import Any

QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files beside config.json in which vLLM's classes read how the weights are quantised, with the method that writes the file."""


def find_quantization(folder: Path, raw: dict[str, Any]) -> tuple[str | None, bool]:
    """The method that quantised the weights, and whether the method is bitsandbytes with 8 bits. A model states both in one of
    several fields or files."""
    for part in (raw, raw.get("text_config") or {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if part.get(key):
                return _method(part[key]), bool(part[key].get("load_in_8bit"))
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).exists():
            return method, False
    return None, False


def _method(entry: dict[str, Any]) -> str:
    """The method that an entry names, or else the method that writes such entries."""
    if entry.get("quant_method"):
        return str(entry["quant_method"])
    if entry.get("load_in_8bit") or entry.get("load_in_4bit"):
        return "bitsandbytes"
    return "mlx" if "group_size" in entry else "unknown"
