"""Tasks such as "12 30". The reward is 1 for an answer with the sum, which the agent learns to get from the tool."""

import random
import re

import verifiers.v1 as vf

from arithmetic.tools import Calculator


class ArithmeticData(vf.TaskData):
    answer: int


class ArithmeticTask(vf.Task[ArithmeticData]):
    @vf.reward
    async def has_sum(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in re.findall(r"\d+", trace.last_reply))

    @vf.metric
    async def num_tool_results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class ArithmeticConfig(vf.TasksetConfig):
    num_tasks: int = 64
    seed: int = 0
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    @classmethod
    def toolsets(cls, config: ArithmeticConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    def load(self) -> list[ArithmeticTask]:
        rng = random.Random(self.config.seed)
        pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(self.config.num_tasks)]
        return [
            ArithmeticTask(
                ArithmeticData(name=f"{a}+{b}", prompt=f"{a} {b}", answer=a + b),
                self.config.task,
            )
            for a, b in pairs
        ]
