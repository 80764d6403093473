"""A program of test_families.py: plants adapters on layers that vLLM folds into others, and compares each kind of layer of
the model with the engine, as the check of layers does before a base's first job. It prints a JSON object: the kinds, and
what is wrong with each."""

import json
import sys
import tempfile
from pathlib import Path

from art_server.engine.probe import find_fault
from art_server.jobs.gap_bars import gap_bars
from art_server.trainer import layers
from art_server.trainer.policy import Policy
from art_server.trainer.probe import write_layer_probes
from tests.integration.family_engine import LORA, score, start_engine, stop_engine
from tests.toy_models import make_model


def main() -> None:
    family = sys.argv[1]
    find_layers = layers.find_layers

    def with_folded(model: layers.PreTrainedModel) -> layers.Layers:
        found = find_layers(model)
        return layers.Layers(found.takes | found.folded, frozenset(), found.is_mixture)

    layers.find_layers = with_folded
    with tempfile.TemporaryDirectory() as folder:
        base, adapters = make_model(family, Path(folder) / "base"), Path(folder) / "adapters"
        adapters.mkdir()
        bars = gap_bars(("float32", "float32"))
        assert bars is not None
        probes = write_layer_probes(Policy(str(base)), LORA, adapters, bars)
        engine = start_engine(family, base, "float32")
        faults: dict[str, str | None] = {}
        for number, (kind, probe) in enumerate(probes.items(), 1):
            assert probe.factor == 1
            _, found = score(engine, probe.token_ids, adapters / kind, number)
            logprobs = found[: len(probe.logprobs)].tolist()
            faults[kind] = find_fault(probe, logprobs, [], bars)
        print(json.dumps(faults))
        del engine
        stop_engine()


if __name__ == "__main__":
    main()
