"""All kinds of sampling train without bias (tests/sampling.py)."""

from tests.live import Server
from tests.sampling import check_all_kinds, check_gspo_with_strict_tools

BASE = "art/tiny"


def test_trainer_scores_each_token_as_it_was_sampled(server: Server) -> None:
    check_all_kinds(server, BASE)


def test_gspo_with_strict_tools_trains_every_trajectory(server: Server) -> None:
    check_gspo_with_strict_tools(server, BASE)
