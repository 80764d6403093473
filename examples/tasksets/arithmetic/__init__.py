"""A taskset of verifiers: questions of arithmetic, with a tool that adds."""

from arithmetic.taskset import ArithmeticTaskset

__all__ = ["ArithmeticTaskset"]
