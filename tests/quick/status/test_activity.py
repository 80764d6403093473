"""Where the time of the last minutes went, in one sentence."""

from art_server.status.activity import Activity, Doing


def sentence(*samples: tuple[int, frozenset[Doing]]) -> str:
    """The sentence after these samples, of a quarter of a second each."""
    activity = Activity(frozenset)
    for number, doing in samples:
        activity._samples.extend([doing] * number)
    return activity.report()["sentence"]


IDLE, BUSY = frozenset[Doing](), frozenset[Doing]({"rollouts"})


def test_an_idle_server_waits_for_a_program_that_was_there_a_moment_ago() -> None:
    assert "waits for your program" in sentence((100, IDLE), (40, BUSY), (40, IDLE))


def test_an_idle_server_waits_for_nobody_when_no_program_is_there() -> None:
    for samples in ([(100, IDLE)], [(40, BUSY), (1000, IDLE)]):
        text = sentence(*samples)
        assert "waits for your program" not in text and "no program" in text
    assert "no request for 4 minutes" in text


def test_the_largest_share_has_its_advice() -> None:
    assert sentence((40, IDLE), (60, BUSY)).startswith("60% of the last 25 s: the engine samples")
