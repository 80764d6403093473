"""Which engine gets a request: by its key, within the margin, whatever comes and goes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from art_server.engine.routing import Router

KEYS = [bytes([number]) for number in range(200)]
LOADS = st.dictionaries(st.integers(0, 4), st.integers(0, 20), min_size=1)


@given(margin=st.integers(0, 8), asked=st.lists(st.tuples(st.sampled_from(KEYS[:5]), LOADS), max_size=40))
def test_a_key_keeps_its_engine_within_the_margin_and_else_goes_to_the_least_busy(
    margin: int, asked: list[tuple[bytes, dict[int, int]]]
) -> None:
    router, homes = Router(margin), dict[bytes, int]()
    for key, loads in asked:
        home, least = homes.get(key), min(loads.values())
        chosen = router.choose(key, loads)
        if home in loads and loads[home] <= least + margin:
            assert chosen == home
        else:
            assert loads[chosen] == least
        assert loads[chosen] <= least + margin, "whatever was before"
        homes[key] = chosen


@given(key=st.binary(min_size=1), engines=st.sets(st.integers(0, 9), min_size=2))
def test_a_tie_is_decided_by_the_key_alone(key: bytes, engines: set[int]) -> None:
    chosen = Router().choose(key, dict.fromkeys(sorted(engines), 3))
    assert Router().choose(key, dict.fromkeys(sorted(engines, reverse=True), 0)) == chosen
    fewer = engines - {max(engines - {chosen})}
    assert Router().choose(key, dict.fromkeys(fewer, 0)) == chosen, "others that leave move nothing"


def test_new_keys_spread_over_idle_engines() -> None:
    router = Router()
    chosen = Counter(router.choose(key, {0: 0, 1: 0, 2: 0}) for key in KEYS)
    assert min(chosen.values()) > len(KEYS) / 6


def test_an_engine_with_forty_long_sessions_is_relieved_within_the_margin_and_a_new_one_gets_sessions() -> None:
    router, loads = Router(), {0: 0}
    homes = {key: router.choose(key, loads) for key in KEYS[:40]}
    loads = {0: 40, 1: 0}  # each waits for its answer; the engine 1 is new
    for key in KEYS[:40]:  # the next turn of each
        loads[homes[key]] -= 1
        homes[key] = router.choose(key, loads)
        loads[homes[key]] += 1
    assert sum(loads.values()) == 40 and abs(loads[0] - loads[1]) <= 4
    before = dict(homes)
    for key in KEYS[:40]:
        loads[homes[key]] -= 1
        homes[key] = router.choose(key, loads)
        loads[homes[key]] += 1
    assert homes == before, "then all stay"
    for key in KEYS[40:60]:
        loads[router.choose(key, loads)] += 1
    assert abs(loads[0] - loads[1]) <= 1


def test_an_engine_that_is_lost_gives_its_keys_to_the_others_and_takes_new_ones_when_it_is_back() -> None:
    router = Router()
    before = {key: router.choose(key, {0: 0, 1: 0}) for key in KEYS}
    assert {router.choose(key, {1: 0}) for key in KEYS} == {1}
    assert {router.choose(key, {0: 0, 1: 0}) for key in KEYS} == {1}, "their prompts are there"
    assert 0 in before.values() and router.choose(b"new", {0: 0, 1: 1}) == 0


def test_only_the_latest_keys_are_remembered() -> None:
    router = Router(max_keys=3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        router.choose(key, {0: 0})
    assert router.num_keys == 3
    loads = {0: 2, 1: 0}
    assert [router.choose(key, loads) for key in (b"a", b"c", b"d")] == [0, 0, 0]
    assert router.choose(b"b", loads) == 1, "forgotten"
