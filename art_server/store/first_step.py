"""Step 0 of a model: an adapter that changes nothing, as PEFT writes it, from the record of the base model.

The numbers are those that torch's generator on a CPU makes from the same seed, but no torch is needed. Each number is one draw
of MT19937, in B too:

- draws: PyTorch 2.13, ATen/core/MT19937RNGEngine.h; numpy's RandomState has the same generator and the same seeding.
- A: ATen/core/TransformationHelper.h, `uniform_real`. The low 24 bits of a draw are a share of the range; product and sum are
  rounded once, because torch is compiled for processors that multiply and add in one instruction.
- B: ATen/native/cpu/DistributionTemplates.h, `uniform_kernel`. A number that equals the range's end becomes the range's begin,
  which is -0.0 in the empty range from -0.0 to 0.0.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from art_protocol.wire import LoRAConfig
from art_server.store import files
from art_server.store.adapter_layers import find_targets
from art_server.store.adapter_tensors import tensor_shapes
from art_server.store.base_models import BaseModel
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE

FRACTION_BITS = 24
"""Bits of a float32's fraction, with the bit that is not stored."""


def write_first_step(base: BaseModel, lora: LoRAConfig, folder: Path, seed: int = 0) -> None:
    """Writes step 0 into a folder and syncs it to disk (blocking).

    Raises:
        UnknownLayers: `lora` names something else than layers that take an adapter. Nothing is written.
        StorageFull: the disk has no room.
    """
    layers = base.facts.layers
    shapes = tensor_shapes(layers, lora)
    config = base.facts.adapter_config | {
        "base_model_name_or_path": str(base.path),
        "lora_alpha": lora.alpha,
        "r": lora.rank,
        "target_modules": find_targets(lora.target_modules, layers),
    }
    with files.disk_errors("step 0"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))
        _write_tensors(folder / ADAPTER_FILE, shapes, fresh_tensors(shapes, seed))
        for path in [*folder.iterdir(), folder]:
            files.sync(path)


def fresh_tensors(shapes: Mapping[str, tuple[int, int]], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a fresh adapter, float32: A is uniform within 1 / sqrt(inputs), as in PEFT, and B is zero.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    chance = np.random.RandomState(seed)
    for name, shape in shapes.items():
        draws = chance.randint(2**32, size=shape, dtype=np.uint32)
        if name.endswith(".lora_B.weight"):
            yield name, np.full(shape, -0.0, np.float32)
        else:
            bound = float(np.float32(shape[1] ** -0.5))
            shares = (draws & (2**FRACTION_BITS - 1)) * 0.5**FRACTION_BITS
            # Exact in float64, so that the conversion is the only rounding.
            yield name, (shares * (2 * bound) - bound).astype(np.float32)


def _write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, int]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes float32 tensors as a safetensors file, in the order in which they come: memory holds one of them, and other
    threads run meanwhile."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Any: the metadata has no shape
    end = 0
    # The order in which safetensors writes tensors of one number type.
    for name in sorted(shapes):
        begin, end = end, end + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with open(file, "wb") as written:
        written.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors:
            written.seek(8 + len(text) + header[name]["data_offsets"][0])
            written.write(tensor.data)
