"""The order of jobs of several projects: fair by tokens, first come first served inside a project."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from art_server.jobs.fair_order import FairOrder
from art_server.jobs.job_row import WaitingJob

PROJECTS = "abcd"
JOBS = st.lists(st.tuples(st.sampled_from(PROJECTS), st.integers(1, 1000)), min_size=1, max_size=60)
WEIGHTS = st.dictionaries(st.sampled_from(PROJECTS), st.sampled_from([0.25, 1.0, 2.0, 5.0]))


def make(jobs: list[tuple[str, int]]) -> list[WaitingJob]:
    return [
        WaitingJob(str(number), 1, project, "m", 0.0, tokens, None) for number, (project, tokens) in enumerate(jobs)
    ]


@given(JOBS, WEIGHTS)
def test_every_job_comes_once_and_a_project_keeps_its_order(jobs: list[tuple[str, int]], weights: dict) -> None:
    given_jobs = make(jobs)
    order = FairOrder(weights).sort(given_jobs)
    assert sorted(order, key=lambda job: int(job.job_id)) == given_jobs
    for project in PROJECTS:
        of_project = [job for job in order if job.project == project]
        assert of_project == [job for job in given_jobs if job.project == project]
    if len({project for project, _ in jobs}) == 1:
        assert order == given_jobs


@given(JOBS, WEIGHTS)
def test_while_two_projects_wait_their_shares_differ_by_a_job_of_each(
    jobs: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    """Theorem 1 of the paper: |W_f / r_f - W_g / r_g| <= l_f / r_f + l_g / r_g, over every interval in which both wait."""
    order = FairOrder(weights).sort(make(jobs))
    last = {
        project: max((i for i, job in enumerate(order) if job.project == project), default=-1) for project in PROJECTS
    }
    for one, other in itertools.combinations(PROJECTS, 2):
        both_wait = order[: min(last[one], last[other]) + 1]
        for start, stop in itertools.combinations(range(len(both_wait) + 1), 2):
            used = {one: 0.0, other: 0.0}
            for job in both_wait[start:stop]:
                if job.project in used:
                    used[job.project] += job.num_tokens / weights.get(job.project, 1.0)
            longest = [
                max((job.num_tokens for job in order if job.project == project), default=0) / weights.get(project, 1.0)
                for project in used
            ]
            assert abs(used[one] - used[other]) <= sum(longest) + 1e-6


@given(JOBS, JOBS, WEIGHTS)
def test_a_forecast_holds_while_no_job_comes(jobs: list[tuple[str, int]], before: list, weights: dict) -> None:
    """Jobs that begin one after another do so in the order that was foretold, and virtual time never goes back."""
    order = FairOrder(weights)
    for job in make(before):
        order.begin(job)
    waiting = make(jobs)
    foretold = order.sort(waiting)
    for expected in foretold:
        began = order.began
        assert order.sort(waiting)[0] == expected
        order.begin(expected)
        waiting.remove(expected)
        assert order.began >= began


def test_a_project_that_comes_late_is_next_and_saves_nothing_up() -> None:
    order = FairOrder({})
    heavy = make([("a", 100)] * 40)
    for job in heavy[:20]:
        order.begin(job)
    light = [WaitingJob("light", 1, "b", "m", 0.0, 100, None), WaitingJob("light too", 1, "b", "m", 0.0, 100, None)]
    names = [job.job_id for job in order.sort([*heavy[20:], *light])]
    assert names[:4] == ["light", "20", "light too", "21"] or names[:4] == ["light", "light too", "20", "21"]
    assert names.index("light too") <= 2
