"""Names of ART for vendors' services, and for its own trainer on several GPUs. They can be imported; a call raises
NotImplementedError with our way."""

import sys
from types import ModuleType
from typing import Any

_TINKER = "trains at a vendor's service: use art.LocalBackend() or art.Backend(url)"
_MEGATRON = (
    "configures ART's own trainer: start art-server with --serve-devices and --train-devices, and use "
    "art.Backend(url) (docs/gpu.md)"
)
_PIPELINE = (
    "is ART's loop of sampling and training: use art.trajectory_group_batches with "
    "TrainConfig(max_staleness=...)"
)
DEPLOY = (
    "uploads to vendors' services; here `art export MODEL DIR` writes an adapter, with --merge a whole "
    "model, that any host of PEFT or safetensors takes (docs/howto/serve-elsewhere.md)"
)
NAMES: dict[str, dict[str, str]] = {
    "art.tinker": {"TinkerBackend": _TINKER},
    "art.tinker_native": {"TinkerNativeBackend": _TINKER},
    "art.megatron": {"MegatronBackend": _MEGATRON},
    "art.pipeline_trainer": dict.fromkeys(("PipelineTrainer", "make_group_rollout_fn"), _PIPELINE),
    "art": dict.fromkeys(
        (
            *("MegatronRuntimeConfig", "MegatronTopologyConfig", "get_megatron_runtime_config"),
            *("init_megatron_runtime_config", "PipelineAutotuneConfig", "PipelineRuntimeConfig"),
        ),
        _MEGATRON,
    ),
}


def refused(name: str, reason: str) -> Any:
    """A class of this name that cannot be made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not here: {name} {reason}."})


def install() -> None:
    """Makes the modules of these names importable."""
    for path in NAMES.keys() - {"art"}:
        sys.modules[path] = module = ModuleType(path)
        vars(module).update({name: refused(name, reason) for name, reason in NAMES[path].items()})
