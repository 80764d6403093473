"""The devices of a server and of machines that have joined: what follows from all of them together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from art_server.engine.device.computing import ComputingDevices
from art_server.settings import ApiKey, Device, ServerConfig
from art_server.shared.same_policy import mismatch_limits
from art_server.store.base_models import TINY_DIR, BaseModel

TINY = BaseModel("art/tiny", TINY_DIR)
KEYS = (ApiKey(key="joins", scopes=frozenset({"host"})),)


@dataclass(frozen=True)
class Machine:
    device: Device
    engines: int = 1
    ranks: int = 1


GPU, CPU = Machine("cuda"), Machine("cpu")


def config(engines: int, ranks: int | None, **settings: Any) -> ServerConfig:
    return ServerConfig(path=Path("x"), engines=engines, ranks=ranks, api_keys=KEYS, **settings)


@pytest.mark.parametrize(
    ("own", "engines", "ranks", "joined", "types"),
    [
        ("cpu", 1, None, [], ("float32", "float32")),
        ("cuda", 1, None, [], ("bfloat16", "bfloat16")),
        ("cpu", 0, 0, [GPU], ("bfloat16", "bfloat16")),
        ("cpu", 0, 0, [CPU], ("float32", "float32")),
        ("cpu", 0, 0, [CPU, GPU], ("bfloat16", "bfloat16")),
        ("cpu", 0, 0, [Machine("cuda", ranks=0)], ("bfloat16", "bfloat16")),
        ("cpu", 0, 0, [Machine("cuda", ranks=0), Machine("cpu", engines=0)], ("bfloat16", "float32")),
        ("cpu", 1, None, [GPU], ("bfloat16", "bfloat16")),
        ("cpu", 1, 0, [Machine("cuda", engines=0)], ("float32", "bfloat16")),
        ("cpu", 1, None, [Machine("cuda", ranks=0)], ("bfloat16", "float32")),
        ("cuda", 1, 0, [Machine("cpu", engines=0)], ("bfloat16", "float32")),
        ("cuda", 0, None, [CPU], ("float32", "bfloat16")),
    ],
)
def test_the_limits_are_those_of_the_coarsest_devices(
    own: Device, engines: int, ranks: int | None, joined: list[Machine], types: tuple[str, str]
) -> None:
    settings = config(engines, ranks)
    devices = ComputingDevices(settings, own)
    for machine in joined:
        devices.join(machine)
    assert devices.mismatch_limits(TINY) == mismatch_limits(types)


def test_while_no_machine_has_joined_there_are_no_limits() -> None:
    assert ComputingDevices(config(0, 0), "cpu").mismatch_limits(TINY) is None


def test_an_engine_that_has_left_may_have_sampled_tokens_that_are_not_trained_yet() -> None:
    settings = config(1, None)
    devices = ComputingDevices(settings, "cpu")
    devices.join(GPU)
    devices.leave(GPU)
    assert devices.engines == devices.ranks == {"cpu"}
    assert devices.mismatch_limits(TINY) == mismatch_limits(("bfloat16", "float32"))


def test_what_the_command_line_sets_counts_on_every_device() -> None:
    settings = config(0, 0, dtype="float16", trainer_dtype="float32")
    devices = ComputingDevices(settings, "cpu")
    devices.join(GPU)
    devices.join(CPU)
    assert devices.mismatch_limits(TINY) == mismatch_limits(("float16", "float32"))
