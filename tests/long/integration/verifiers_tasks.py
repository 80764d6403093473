"""A taskset and an environment of verifiers with two agents, for `verifiers_program.py`."""

import verifiers.v1 as vf

__all__ = ["PairEnv", "WordTaskset"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.5)
    async def says_it(self, trace: vf.Trace) -> float:
        if self.data.word == "broken":
            raise RuntimeError("no score today")
        return float(self.data.word in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):  # type: ignore[no-untyped-def]
        number = 0
        while True:
            word = ("no", "maybe", "broken")[number % 3]
            prompt = "respond with yes, no, maybe"
            yield WordTask(WordData(prompt=prompt, word=word, name=word), self.config.task)
            number += 1


class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    """Each agent answers, and the second is asked once more."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.first.run(task)
        async with agents.second.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("answer with no, maybe, yes")
