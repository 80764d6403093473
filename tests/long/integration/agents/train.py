"""Trains one of this folder's agents, as the examples of examples/frameworks do: `train.py AGENT` with their flags.

`with_AGENT.py` has the agent: a function `run_agent`. examples/frameworks, with the task and the loop, is on PYTHONPATH.
"""

import asyncio
import importlib
import sys

import task

if __name__ == "__main__":
    agent = sys.argv.pop(1)
    asyncio.run(task.train(agent, importlib.import_module(f"with_{agent.replace('-', '_')}").run_agent))
