"""All kinds of sampling train without bias (tests/sampling.py)."""

from tests.live import Server
from tests.sampling import check_after_five_steps, check_gspo_with_strict_tools, check_step_0

BASE = "art/tiny"


def test_trainer_scores_each_token_as_it_was_sampled_at_step_0(server: Server) -> None:
    check_step_0(server, BASE)


def test_trainer_scores_each_token_as_it_was_sampled_after_five_steps(server: Server) -> None:
    check_after_five_steps(server, BASE)


def test_gspo_with_strict_tools_trains_every_trajectory(server: Server) -> None:
    check_gspo_with_strict_tools(server, BASE)
