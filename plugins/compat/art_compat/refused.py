"""Names of ART for vendors' services, and for ART's own trainer on several GPUs. The names can be imported; a call raises
NotImplementedError, whose message names our way."""

from typing import Any

_TINKER = "trains at a vendor's service: use art.LocalBackend() or art.Backend(url)"
_MEGATRON = (
    "configures ART's own trainer: start art-server with --serve-devices and --train-devices, and use "
    "art.Backend(url) (docs/gpu.md)"
)
DEPLOY = (
    "uploads to vendors' services; here `art export MODEL DIR` writes an adapter, with --merge a whole "
    "model, that any host of PEFT or safetensors takes (docs/howto/serve-elsewhere.md)"
)


def refused(name: str, reason: str) -> Any:
    """A class of this name. A call raises NotImplementedError with the reason."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not here: {name} {reason}."})


TinkerBackend = refused("TinkerBackend", _TINKER)
TinkerNativeBackend = refused("TinkerNativeBackend", _TINKER)
MegatronBackend = refused("MegatronBackend", _MEGATRON)
MegatronRuntimeConfig = refused("MegatronRuntimeConfig", _MEGATRON)
MegatronTopologyConfig = refused("MegatronTopologyConfig", _MEGATRON)
PipelineAutotuneConfig = refused("PipelineAutotuneConfig", _MEGATRON)
PipelineRuntimeConfig = refused("PipelineRuntimeConfig", _MEGATRON)
get_megatron_runtime_config = refused("get_megatron_runtime_config", _MEGATRON)
init_megatron_runtime_config = refused("init_megatron_runtime_config", _MEGATRON)
