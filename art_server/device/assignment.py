"""Which devices engine and trainer each have to themselves, where the command line divides them."""

from collections.abc import Sequence

from art_server.children import CORES_VARIABLE
from art_server.device.probe import Machine
from art_server.errors import InvalidInput
from art_server.settings import ServerConfig


def check_devices(config: ServerConfig, machine: Machine) -> None:
    """See that the devices of `--serve-devices` and `--train-devices` are there.

    Raises:
        InvalidInput: `no_such_device`, or several GPUs for the trainer.
    """
    there = [gpu.index for gpu in machine.gpus] if machine.gpus else list(machine.cores)
    kind = "GPU" if machine.gpus else "core"
    for flag, devices in (
        ("--serve-devices", config.serve_devices),
        ("--train-devices", config.train_devices),
    ):
        for device in devices:
            if device not in there:
                raise InvalidInput(
                    f"{flag}: there is no {kind} {device} here, only {', '.join(map(str, there))}",
                    code="no_such_device",
                )
    if machine.gpus and len(config.train_devices) > 1:
        raise InvalidInput(
            "--train-devices: the trainer uses one GPU; give the others to --serve-devices",
            code="no_such_device",
        )


def device_environment(devices: Sequence[int], machine: Machine) -> dict[str, str]:
    """What keeps a process to these devices; nothing where it may use all."""
    if not devices:
        return {}
    if machine.gpus:
        return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[each].uuid for each in devices)}
    return {
        CORES_VARIABLE: ",".join(map(str, devices)),
        "OMP_NUM_THREADS": str(len(devices)),
    }
