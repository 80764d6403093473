"""Rewards that programs use often: text, numbers, JSON, code, and sums whose parts are logged."""

from art.rewards.checks import exact_match, json_match, number_match, regex_match
from art.rewards.code import passed_tests
from art.rewards.sums import set_reward

__all__ = [
    "exact_match",
    "json_match",
    "number_match",
    "passed_tests",
    "regex_match",
    "set_reward",
]
