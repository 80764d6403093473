"""Answers for a judge."""

import art


def group_of(words: list[str]) -> art.TrajectoryGroup:
    return art.TrajectoryGroup(
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": "respond with yes, no, maybe"},
                {"role": "assistant", "content": word},
            ]
        )
        for word in words
    )
