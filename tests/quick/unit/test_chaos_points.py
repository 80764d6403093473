"""The points at which `scripts/chaos` kills a server are named by strings, which no type checker reads."""

from tests.long.chaos.server import POINTS


def test_each_point_is_a_function_of_the_server() -> None:
    assert [point for point, (owner, name, _) in POINTS.items() if not callable(getattr(owner, name, None))] == []
