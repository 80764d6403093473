"""What the server says that it does."""

from pathlib import Path

from tests.quick.api.test_art_wire import make


def test_a_download_of_the_base_model_counts_as_the_engine_s_start(tmp_path: Path) -> None:
    _, service = make(tmp_path)
    engine, base = service._processes.engine, service._base
    assert service._state._doing() == frozenset()
    base._downloading = "owner/other"
    assert service._state._doing() == frozenset(), "the loaded base model serves"
    engine.base, engine.state = None, "none"
    assert service._state._doing() == {"starting"}
    base._downloading = None
    assert service._state._doing() == frozenset()
    service._queue.close()
