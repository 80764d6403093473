"""What can go wrong with a rollout in a sandbox, one class for each kind. Each is a failed rollout, and never a reward of 0.

HarborError
    TaskRefused      the task's files are wrong, or the sandbox cannot give what the task needs
    SandboxFailed    the sandbox did not start, or ended before its command
    TestsTimedOut    the tests took longer than `verifier.timeout_sec`
    RewardInvalid    the tests ended without a reward, or with one that is no finite number
"""


class HarborError(RuntimeError):
    """A rollout in a sandbox failed."""


class TaskRefused(HarborError, ValueError):
    """The task's files are wrong, or the sandbox cannot give what the task needs. The message names file, field and reason."""


class SandboxFailed(HarborError):
    """The sandbox did not start, or ended before its command."""


class TestsTimedOut(HarborError):
    """The tests took longer than `verifier.timeout_sec`. All their processes were killed."""

    __test__ = False  # pytest would collect a class with this name


class RewardInvalid(HarborError):
    """The tests ended without a reward, or with one that is no finite number."""
