from pathlib import Path

import pytest

# Imports of torch stand in the fixtures: pytest reads this file before it starts the processes of a run, which wait for it.


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of TINY_LORA on art/tiny that changes its answers, with optimizer state; not to be written into."""
    import torch
    from safetensors.torch import load_file, save_file

    from art_server.store.adapter_tensors import STATE_KEYS
    from art_server.store.base_models import TINY_DIR
    from tests.makers.first_steps import write_first_checkpoint
    from tests.quick.models.house import TINY_LORA

    folder = tmp_path_factory.mktemp("adapter")
    write_first_checkpoint(str(TINY_DIR), TINY_LORA, 0, folder)
    file = folder / "adapter_model.safetensors"
    chance = torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = torch.randn(tensor.shape, generator=chance) * 0.05
    save_file(tensors, file, metadata={"format": "pt"})
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parameter = name.removesuffix(".weight") + ".default.weight"
        values = torch.tensor(3.0), torch.ones(tensor.shape), torch.ones(tensor.shape)
        state |= {f"{parameter}.{key}": value for key, value in zip(STATE_KEYS, values, strict=True)}
    save_file(state, folder / "optimizer.safetensors")
    return folder


@pytest.fixture
def path(tmp_path: Path, tiny_adapter: Path) -> Path:
    """A server's folder with p/a at step 2."""
    from tests.quick.models.house import add_model

    add_model(tmp_path / "path", tiny_adapter, steps=3)
    return tmp_path / "path"
