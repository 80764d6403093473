"""What fits on Ray's machines. Needs the package `ray`, but starts none."""

import pytest

pytest.importorskip("ray", reason="needs the extra `cluster`")

from art_cluster.ray_process import bundles, has_room, text_of
from art_server.machines.placing import Placing

CPUS, GPUS = {"CPU": 4.0}, {"CPU": 16.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("nodes", "engines", "ranks", "fits"),
    [
        ([CPUS], 2, 2, True),
        ([CPUS], 3, 2, False),
        ([CPUS, CPUS], 5, 3, True),
        ([CPUS, CPUS], 1, 5, False),
        ([GPUS], 7, 1, True),
        ([GPUS], 8, 1, False),
        ([GPUS, CPUS], 8, 0, True),
        ([GPUS, GPUS], 8, 8, True),
        ([GPUS, GPUS], 0, 9, False),
    ],
)
def test_ranks_need_one_machine_and_engines_any(
    nodes: list[dict[str, float]], engines: int, ranks: int, fits: bool
) -> None:
    resources = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    placing = Placing(address=None, temp_dir="", engines=engines, ranks=ranks, url="", key="", number="")
    engine, gang = bundles(placing, resources)
    assert has_room(nodes, engine, engines, gang) is fits


def test_machines_are_told_by_what_they_have() -> None:
    assert text_of([GPUS, CPUS]) == "16 CPU, 8 GPU and 4 CPU"
