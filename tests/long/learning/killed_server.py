"""Runs art-server, which learns from scores, and kills it when it reaches a named point of `crowd_server`.

ART_CHAOS_POINT="promoted:1" python -m tests.long.learning.killed_server --path ...
"""

from tests.long.chaos import server as chaos
from tests.long.learning.crowd_server import POINTS

if __name__ == "__main__":
    chaos.POINTS.update(POINTS)
    chaos.main()
