"""Rewards that programs use often: text, numbers, JSON, sums whose parts are logged, and LLM judges."""

from art.rewards.checks import contains, exact_match, json_match, number_match, regex_match
from art.rewards.grading import GRADING_RUBRIC, grade_answer, grading_prompt
from art.rewards.judge import Judge, JudgeError, JudgeTimeoutError
from art.rewards.judge_answers import Verdict
from art.rewards.ruler import TrajectoryScore, ruler, ruler_score_group
from art.rewards.sums import set_reward

__all__ = [
    "GRADING_RUBRIC",
    "Judge",
    "JudgeError",
    "JudgeTimeoutError",
    "TrajectoryScore",
    "Verdict",
    "contains",
    "exact_match",
    "grade_answer",
    "grading_prompt",
    "json_match",
    "number_match",
    "regex_match",
    "ruler",
    "ruler_score_group",
    "set_reward",
]
