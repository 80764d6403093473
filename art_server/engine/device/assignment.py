"""Separate devices for engine and trainer, as `--serve-devices` and `--train-devices` name them."""

from collections.abc import Sequence

from art_server.engine.device.detection import Gpu, Machine
from art_server.errors import InvalidInput, UsageError
from art_server.process.children import CORES_VARIABLE
from art_server.settings import ServerConfig

FIRST_BFLOAT16 = (8, 0)
"""The compute capability of Ampere, the first cards with bfloat16."""


def check_flags(config: ServerConfig) -> None:
    """Checks the flags of devices as far as no machine has to be known: `check_devices` checks the rest.

    Raises:
        UsageError: flags contradict each other, or nothing would sample or train.
    """
    if not config.engines and not config.takes_hosts:
        raise UsageError(
            "--engines 0: something has to sample; use 1 or more, or a key with the scope 'host' for other machines"
        )
    if config.ranks == 0 and not config.takes_hosts:
        raise UsageError(
            "--ranks 0: something has to train; use 1 or more, or a key with the scope 'host' for other machines"
        )
    if bool(config.serve_devices) != bool(config.train_devices):
        raise UsageError("--serve-devices and --train-devices go together: give both or none")
    if both := set(config.serve_devices) & set(config.train_devices):
        raise UsageError(f"device {min(both)} is in both --serve-devices and --train-devices: name it in one of them")
    if config.gangs > 1 and not config.train_devices:
        raise UsageError(
            f"--gangs {config.gangs}: several jobs train at a time on devices of the trainer's own; add --serve-devices and "
            "--train-devices"
        )
    if (config.ranks or 1) > 1 and config.trainer == "unsloth":
        raise UsageError("--trainer unsloth trains on one GPU: leave out --ranks, or use --trainer peft")
    if config.cluster is not None and (config.serve_devices or config.trainer == "unsloth"):
        raise UsageError(
            "--cluster: Ray chooses the devices: leave out --serve-devices, --train-devices and --trainer unsloth"
        )
    if config.train_devices and config.handover != "auto":
        raise UsageError("--handover is for a GPU that engine and trainer share: leave it out with --train-devices")


def check_devices(config: ServerConfig, machine: Machine) -> None:
    """Checks that the devices of `--serve-devices` and `--train-devices` exist and support the requested number types.

    Raises:
        InvalidInput: Unsloth has no GPU, a device does not exist, there are fewer than ranks, the serving GPUs cannot be divided among the
            engines, or a card lacks the requested bfloat16.
    """
    there = [gpu.index for gpu in machine.gpus] if machine.gpus else list(machine.cores)
    kind = "GPU" if machine.gpus else "core"
    for param, devices in (("serve_devices", config.serve_devices), ("train_devices", config.train_devices)):
        for device in devices:
            if device not in there:
                raise InvalidInput(
                    f"--{param.replace('_', '-')}: there is no {kind} {device} here, only {', '.join(map(str, there))}",
                    code="no_such_device",
                    param=param,
                )
    if config.trainer == "unsloth" and config.ranks != 0 and machine.kind != "cuda":
        raise InvalidInput(
            "--trainer unsloth: Unsloth trains on a GPU, and this machine has none: use --trainer peft",
            code="no_such_device",
            param="trainer",
        )
    _check_ranks(config, machine, kind)
    if machine.gpus and config.engines > 1:
        _check_engines(config.engines, len(config.serve_devices or machine.gpus))
    indices = (*config.serve_devices, *config.train_devices)
    if not indices and (config.engines or config.num_ranks(machine.kind)):
        indices = (0,)
    for index in indices:
        if machine.gpus:
            check_bfloat16(config, gpu_without_bfloat16(machine.gpus[index : index + 1]))


def _check_ranks(config: ServerConfig, machine: Machine, kind: str) -> None:
    """Checks that each rank gets a device, and on a machine with GPUs that each of the trainer's own GPUs gets a rank."""
    own = len(config.train_devices)
    per_gang = config.num_ranks(machine.kind)
    of_gangs = f" in {config.gangs} gangs" if config.gangs > 1 else ""
    num = per_gang * config.gangs if machine.gpus else per_gang  # gangs share the cores of a CPU
    if per_gang == 1 and config.shard == "on" and not config.takes_hosts:
        raise InvalidInput(
            "--shard on divides the base model among ranks: use --ranks 2 or more, or leave it out",
            code="no_such_device",
            param="shard",
        )
    there = own or len(machine.gpus or machine.cores)
    if num > there:
        whose = "--train-devices has" if own else "this machine has"
        raise InvalidInput(
            f"--ranks {per_gang}{of_gangs}: each needs a {kind}, and {whose} {there}; use --ranks {there // config.gangs} or fewer",
            code="no_such_device",
            param="ranks",
        )
    if machine.gpus and own > num:
        noun = "ranks" if num > 1 else "rank"
        raise InvalidInput(
            f"--train-devices: {own} GPUs for {num} {noun}, each of which uses one; use another --ranks, or give "
            "the others to --serve-devices",
            code="no_such_device",
            param="train_devices",
        )


def rank_devices(config: ServerConfig, machine: Machine) -> list[tuple[int, ...]]:
    """The devices of each rank of each gang, as for `--train-devices`: a GPU each, or a part of the cores, which gangs share."""
    num, own = config.num_ranks(machine.kind), config.train_devices
    if machine.gpus:
        return [(index,) for index in (own or range(num))][: num * config.gangs]
    return [own[rank * len(own) // num : (rank + 1) * len(own) // num] for rank in range(num)] * config.gangs


def _check_engines(engines: int, gpus: int) -> None:
    """Checks that each engine gets as many GPUs as every other, and at least one."""
    if gpus % engines == 0:
        return
    numbers = [str(number) for number in range(1, gpus + 1) if gpus % number == 0]
    reason = f"each needs a GPU, and {gpus} serve" if engines > gpus else f"{gpus} GPUs cannot be divided evenly"
    raise InvalidInput(
        f"--engines {engines}: {reason}; use {' or '.join(numbers)}, or give --serve-devices a multiple of {engines} GPUs",
        code="no_such_device",
        param="engines",
    )


def engine_devices(config: ServerConfig, machine: Machine) -> list[tuple[int, ...]]:
    """The devices of each engine, as for `--serve-devices`. Several engines divide the GPUs among them; on a CPU they share
    the cores."""
    if config.engines == 1 or not machine.gpus:
        return [config.serve_devices] * config.engines
    devices = config.serve_devices or tuple(gpu.index for gpu in machine.gpus)
    size = len(devices) // config.engines
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def gpu_without_bfloat16(gpus: Sequence[Gpu]) -> str:
    """The name of a GPU without bfloat16; empty if all have bfloat16."""
    return next((gpu.name for gpu in gpus if gpu.capability < FIRST_BFLOAT16), "")


def check_bfloat16(config: ServerConfig, without_bfloat16: str) -> None:
    """Checks that nothing computes in bfloat16 if a GPU lacks bfloat16; `without_bfloat16` is the GPU's name.

    Raises:
        InvalidInput: the settings ask for bfloat16.
    """
    if without_bfloat16 and "bfloat16" in config.number_types("cuda"):
        raise InvalidInput(
            f"{without_bfloat16} has no bfloat16: start the server with --dtype float16 --trainer-dtype float32",
            code="no_such_number_type",
            param="dtype",
        )


def device_environment(devices: Sequence[int], machine: Machine) -> dict[str, str]:
    """Environment variables that restrict a process to these devices; none if the process may use all cores. GPUs are always
    named in full and in our order: CUDA numbers the fastest first, and vLLM understands no shortened UUID."""
    if machine.gpus:
        named = [machine.gpus[index] for index in devices] or machine.gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in named)}
    if not devices:
        return {}
    return {
        CORES_VARIABLE: ",".join(map(str, devices)),
        "OMP_NUM_THREADS": str(len(devices)),
    }
