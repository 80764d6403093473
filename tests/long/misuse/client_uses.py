"""Wrong programs of `import art`."""

from functools import partial

from tests.long.misuse.use import Use

PROGRAM = """
import asyncio

import art

QUESTION = {"role": "user", "content": "respond with yes, no, maybe"}


async def rollout(model, scenario=None):
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[QUESTION], max_tokens=8
    )
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[QUESTION, choice], reward=len(choice.message.content or ""))


async def main():
    model = art.TrainableModel(name="agent", project="uses", base_model="art/tiny")
    async with art.Backend() as backend:
        await model.register(backend)
        LINES


asyncio.run(main())
"""
UNREGISTERED = """
import asyncio

import art

QUESTION = {"role": "user", "content": "respond with yes, no, maybe"}


async def main():
    model = art.TrainableModel(name="agent", project="uses", base_model="art/tiny")
    backend = art.Backend()
    LINES
    await backend.close()


asyncio.run(main())
"""
PLAIN = """
import art

LINES
"""

with_model = partial(Use, template=PROGRAM)
"""Lines in a program whose model is registered."""
without_register = partial(Use, template=UNREGISTERED)
"""Lines in a program that registers nothing yet."""
plain = partial(Use, template=PLAIN)
"""Lines behind `import art`."""

GROUPS = """groups = await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(model) for _ in range(4))])
"""
SFT = """await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION, {"role": "assistant", "content": "yes"}])])
"""
FIRST = "first = (await model.checkpoints())[0].step\n"
SUMS = """groups = [art.TrajectoryGroup([await rollout(model) for _ in range(4)])]
"""

TRAJECTORIES = [
    plain(
        "a reward is None",
        "art.Trajectory(messages_and_choices=[], reward=None)",
        "reward is None",
        "it must be a number",
        "art.Trajectory(messages_and_choices=[], reward=0.0)",
    ),
    with_model(
        "a reward is set to a text later",
        GROUPS + "groups[0].trajectories[0].reward = 'high'\nawait model.train(groups)",
        r"groups\[0\]\.trajectories\[0\]\.reward.*'high'",
        "valid number",
        GROUPS + "groups[0].trajectories[0].reward = 0.5\nawait model.train(groups)",
    ),
    with_model(
        "a reward is NaN",
        GROUPS + "groups[0].trajectories[0].reward = float('nan')\nawait model.train(groups)",
        r"groups\[0\]\.trajectories\[0\]\.reward.*nan",
        "finite number",
        GROUPS + "groups[0].trajectories[0].reward = 0.0\nawait model.train(groups)",
    ),
    plain(
        "a trajectory's field is misspelt",
        "art.Trajectory(messages_and_choices=[], rewrd=1.0)",
        "no field 'rewrd'",
        "did you mean 'reward'",
        "art.Trajectory(messages_and_choices=[], reward=1.0)",
    ),
    plain(
        "a trajectory with `messages`",
        "art.Trajectory(messages=[{'role': 'user', 'content': 'hi'}])",
        "no field 'messages'",
        "here it is `messages_and_choices`",
        "art.Trajectory(messages_and_choices=[{'role': 'user', 'content': 'hi'}])",
    ),
    plain(
        "a message is a text",
        "art.Trajectory(messages_and_choices=['respond with yes'])",
        "entry 0 is a string",
        r"a dictionary such as \{'role': 'user', 'content': 'respond with yes'\}",
        "art.Trajectory(messages_and_choices=[{'role': 'user', 'content': 'respond with yes'}])",
    ),
    plain(
        "messages of ShareGPT",
        "art.Trajectory(messages_and_choices=[{'from': 'human', 'value': 'hi'}])",
        "form ShareGPT",
        r"write each message as \{'role': ..., 'content': ...\}",
        "art.Trajectory(messages_and_choices=[{'role': 'user', 'content': 'hi'}])",
    ),
    plain(
        "tools as a text that is no JSON",
        "art.Trajectory(tools='search')",
        "tools is a text, but not of JSON",
        "a list of",
        "art.Trajectory(tools=[{'type': 'function', 'function': {'name': 'search'}}])",
    ),
    plain(
        "a metric is a text",
        "art.Trajectory(metrics={'right': 'high'})",
        r"metrics\['right'\] is 'high'",
        "it must be a number",
        "art.Trajectory(metrics={'right': 1.0})",
    ),
    with_model(
        "metadata that JSON cannot hold",
        GROUPS + "groups[0].trajectories[0].metadata['tool'] = object()\nawait model.train(groups)",
        r"groups\[0\]\.trajectories\[0\]\.metadata cannot be JSON",
        "use texts, numbers, lists and dictionaries",
        GROUPS + "groups[0].trajectories[0].metadata['tool'] = 'search'\nawait model.train(groups)",
    ),
    with_model(
        "turn rewards of another number than the choices",
        GROUPS + "groups[0].trajectories[0].turn_rewards = [1.0, 0.0]\nawait model.train(groups)",
        "turn_rewards has 2 entries for 1 choices",
        "give one entry per choice",
        GROUPS + "groups[0].trajectories[0].turn_rewards = [1.0]\nawait model.train(groups)",
    ),
]

ROLLOUTS = [
    with_model(
        "the message in place of the choice",
        GROUPS + "for trajectory in groups[0]:\n"
        "    trajectory.messages_and_choices[1] = {'role': 'assistant', 'content': 'yes'}\n"
        "await model.train(groups)",
        "no trainable turn",
        r"put `completion.choices\[0\]` into it, not only its message",
        GROUPS + "await model.train(groups)",
    ),
    with_model(
        "a rollout without an answer",
        "async def answer():\n    print('yes')\nawait art.gather_trajectories([answer()])",
        "a rollout returned NoneType, not art.Trajectory",
        "`return art.Trajectory",
        "async def answer():\n    return art.Trajectory(reward=1.0)\nawait art.gather_trajectories([answer()])",
    ),
    with_model(
        "a rollout that forgets to await another one",
        "async def twice():\n    return rollout(model)\nawait art.gather_trajectories([twice()])",
        "a rollout returned the coroutine of rollout",
        r"write `return await rollout\(...\)`",
        "async def twice():\n    return await rollout(model)\nawait art.gather_trajectories([twice()])",
    ),
    with_model(
        "a rollout whose code fails",
        "async def broken():\n    trajectory = await rollout(model)\n    trajectory.reward = trajectory.metrics['right']\n"
        "    return trajectory\n"
        "await art.gather_trajectory_groups([art.TrajectoryGroup(broken() for _ in range(8))])",
        r"KeyError: 'right'",
        "max_exceptions",
        "async def mended():\n    trajectory = await rollout(model)\n    trajectory.reward = trajectory.metrics.get('right', 0.0)\n"
        "    return trajectory\n"
        "await art.gather_trajectory_groups([art.TrajectoryGroup(mended() for _ in range(8))])",
    ),
    with_model(
        "time.sleep in an asynchronous rollout",
        "import time\nasync def slow():\n    time.sleep(4)\n    return await rollout(model)\n"
        "await art.gather_trajectories([slow()])",
        r"program.py, line \d+ blocked the event loop",
        "`asyncio.sleep`",
        "async def slow():\n    await asyncio.sleep(4)\n    return await rollout(model)\nawait art.gather_trajectories([slow()])",
        is_warning=True,
    ),
    with_model(
        "`with` for a rollout's scope",
        "with art.rollout(model) as r:\n    pass",
        "a rollout is asynchronous",
        "write `async with`",
        "async with art.rollout(model) as r:\n    pass",
    ),
    with_model(
        "a sampling parameter that sessions do not have",
        "art.rollout(model, sampling={'temp': 0.7})",
        "sampling has no 'temp'",
        "known are temperature, top_p, max_tokens",
        "art.rollout(model, sampling={'temperature': 0.7})",
    ),
    with_model(
        "a sampling temperature out of range",
        "art.rollout(model, sampling={'temperature': 5})",
        "sampling: temperature=5",
        "less than or equal to 2",
        "art.rollout(model, sampling={'temperature': 2})",
    ),
    with_model(
        "a session's name with a space",
        "art.rollout(model, session='my session')",
        "session 'my session' becomes a part of URLs",
        "letters, digits",
        "art.rollout(model, session='my-session')",
    ),
    with_model(
        "an agent that asks the base model",
        "async with art.rollout(model) as r:\n"
        "    await model.openai_client().chat.completions.create(model='art/tiny', messages=[QUESTION], max_tokens=4)\n"
        "    await r.trajectory(reward=1.0)",
        "1 of its answers came from the base model art/tiny, which is not trained",
        "has to send model='uses/agent'",
        "async with art.rollout(model) as r:\n"
        "    await model.openai_client().chat.completions.create(model='uses/agent', messages=[QUESTION], max_tokens=4)\n"
        "    await r.trajectory(reward=1.0)",
        is_warning=True,
    ),
    with_model(
        "an agent whose requests name no session",
        "import openai\n"
        "async with art.rollout(model) as r, openai.AsyncOpenAI(base_url=backend.base_url + '/v1', api_key='x') as client:\n"
        "    await client.chat.completions.create(model='uses/agent', messages=[QUESTION], max_tokens=4)\n"
        "    await r.trajectory(reward=1.0)",
        r"requests to uses/agent in the last \d+ minutes name no session",
        "need the rollout's base_url or api_key",
        "import openai\n"
        "async with art.rollout(model) as r, openai.AsyncOpenAI(base_url=r.base_url, api_key='x') as client:\n"
        "    await client.chat.completions.create(model='uses/agent', messages=[QUESTION], max_tokens=4)\n"
        "    await r.trajectory(reward=1.0)",
        is_warning=True,
    ),
    with_model(
        "a scope outside of which the trajectory is captured",
        "async def agent():\n    art.current_trajectory(required=True).reward = 1.0\nawait agent()",
        "no trajectory is being captured here",
        r"run this coroutine with `await art.trajectory\(...\)`",
        "async def agent():\n    art.current_trajectory(required=True).reward = 1.0\nawait art.trajectory(agent())",
    ),
    with_model(
        "a captured coroutine as a task",
        "await art.trajectory(asyncio.create_task(rollout(model)))",
        "a task has its own context",
        "takes a coroutine, not a task",
        "await art.trajectory(rollout(model))",
    ),
]

GATHERING = [
    with_model(
        "groups that were not awaited",
        "groups = art.gather_trajectory_groups([art.TrajectoryGroup(rollout(model) for _ in range(4))])\nawait model.train(groups)",
        "train got the groups before they were awaited",
        "write `await art.gather_trajectory_groups",
        GROUPS + "await model.train(groups)",
    ),
    with_model(
        "one group to train",
        GROUPS + "await model.train(groups[0])",
        "train takes a list of groups, not one TrajectoryGroup",
        r"pass \[group\]",
        GROUPS + "await model.train([groups[0]])",
    ),
    with_model(
        "trajectories to train",
        "trajectories = await art.gather_trajectories(rollout(model) for _ in range(4))\nawait model.train(trajectories)",
        r"groups\[0\] is Trajectory, not art.TrajectoryGroup",
        r"pass \[art.TrajectoryGroup\(trajectories\)\]",
        "trajectories = await art.gather_trajectories(rollout(model) for _ in range(4))\n"
        "await model.train([art.TrajectoryGroup(trajectories)])",
    ),
    with_model(
        "rollouts in place of groups",
        "await art.gather_trajectory_groups(rollout(model) for _ in range(4))",
        "returned Trajectory, not art.TrajectoryGroup",
        r"art.TrajectoryGroup\(rollout\(...\) for _ in range\(8\)\)",
        "await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(model) for _ in range(4))])",
    ),
    with_model(
        "one group to gather",
        "await art.gather_trajectory_groups(art.TrajectoryGroup(rollout(model) for _ in range(4)))",
        "gather_trajectory_groups takes a list of groups",
        r"pass \[group\]",
        "await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(model) for _ in range(4))])",
    ),
    with_model(
        "a group of one coroutine",
        "await art.TrajectoryGroup(rollout(model))",
        "a group got one rollout, not several",
        r"art.TrajectoryGroup\(rollout\(...\) for _ in range\(8\)\)",
        "await art.TrajectoryGroup(rollout(model) for _ in range(8))",
    ),
    with_model(
        "the same rollout eight times",
        "art.TrajectoryGroup([rollout(model)] * 8)",
        "got the same object 8 times",
        "run the rollout once for each",
        "await art.TrajectoryGroup(rollout(model) for _ in range(8))",
    ),
    with_model(
        "a group that is read before it is awaited",
        "group = art.TrajectoryGroup(rollout(model) for _ in range(2))\nlen(group)",
        "built from coroutines that have not run",
        "await it",
        "group = await art.TrajectoryGroup(rollout(model) for _ in range(2))\nlen(group)",
    ),
    with_model(
        "no groups",
        "await model.train([])",
        "there is nothing to train on: no groups were given",
        "pass .*groups",
        GROUPS + "await model.train(groups)",
    ),
    with_model(
        "a group of one rollout",
        "groups = [art.TrajectoryGroup([await rollout(model)])]\nawait model.train(groups)",
        "there is one trajectory",
        "Run several rollouts",
        SUMS + "await model.train(groups)",
        is_warning=True,
    ),
    with_model(
        "equal rewards in all groups",
        GROUPS + "for trajectory in groups[0]:\n    trajectory.reward = 1.0\nawait model.train(groups)",
        "equal",
        "rewards",
        GROUPS
        + "for number, trajectory in enumerate(groups[0]):\n    trajectory.reward = number\nawait model.train(groups)",
        is_warning=True,
    ),
    with_model(
        "a negative number of tolerated failures",
        "await art.gather_trajectories([rollout(model)], max_exceptions=-1)",
        "max_exceptions must be 0 or more, not -1",
        "0 or more",
        "await art.gather_trajectories([rollout(model)], max_exceptions=0)",
    ),
    with_model(
        "no rollouts at a time",
        "await art.gather_trajectories([rollout(model)], max_concurrent_rollouts=0)",
        "max_concurrent_rollouts must be at least 1, not 0",
        "at least 1",
        "await art.gather_trajectories([rollout(model)], max_concurrent_rollouts=1)",
    ),
    with_model(
        "too few groups for min_informative",
        "async def same(model):\n    return art.Trajectory(reward=1.0)\n"
        "await art.gather_trajectory_groups([art.TrajectoryGroup(same(model) for _ in range(2))], min_informative=1)",
        "only 0 of 1 sampled groups are informative",
        "Pass more groups, or scenarios that the model neither always solves nor always fails",
        "async def unlike(model, number):\n    return art.Trajectory(reward=number)\n"
        "await art.gather_trajectory_groups([art.TrajectoryGroup(unlike(model, n) for n in range(2))], min_informative=1)",
        is_warning=True,
    ),
    plain(
        "a retry without an attempt",
        "art.retry(max_attempts=0)",
        "max_attempts must be at least 1, not 0",
        "at least 1",
        "art.retry(max_attempts=1)",
    ),
]

REGISTERING = [
    without_register(
        "an address in place of a backend",
        "await model.register(backend.base_url)",
        "register got the text .*, not a backend",
        r"art.Backend\(",
        "await model.register(art.Backend(backend.base_url))",
    ),
    without_register(
        "the class in place of a backend",
        "await model.register(art.Backend)",
        "register got the class Backend, not a backend",
        r"write Backend\(\)",
        "await model.register(art.Backend())",
    ),
    without_register(
        "train before register",
        "await model.train([art.TrajectoryGroup([art.Trajectory()])])",
        "model 'agent' is not registered",
        r"call `await model.register\(backend\)` first",
        "await model.register(backend)",
    ),
    without_register(
        "a model of an API without its address",
        "art.Model(name='judge', project='uses').openai_client()",
        "model 'judge' has no address",
        "pass inference_base_url",
        "art.Model(name='judge', project='uses', inference_base_url='http://127.0.0.1:9/v1').openai_client()",
    ),
    plain(
        "an address without http",
        "art.Backend('127.0.0.1:7623')",
        "not '127.0.0.1:7623'",
        "must begin with http://",
        "art.Backend('http://127.0.0.1:7623')",
    ),
    without_register(
        "https to a server without TLS",
        "await model.register(art.Backend(backend.base_url.replace('http:', 'https:')))",
        "it does not speak TLS",
        "write http://127.0.0.1",
        "await model.register(art.Backend(backend.base_url))",
    ),
    without_register(
        "an address where nothing listens",
        "await model.register(art.Backend('http://127.0.0.1:9'))",
        "no art-server answers at http://127.0.0.1:9",
        "Start it with `art-server --port 9`, or pass its address",
        "await model.register(art.Backend(backend.base_url))",
    ),
    without_register(
        "a host that does not exist",
        "await model.register(art.Backend('http://gpu-box.invalid:7623'))",
        "no machine has this name",
        "pass its address|check",
        "await model.register(art.Backend(backend.base_url))",
    ),
    plain(
        "a key of two lines",
        "art.Backend(api_key='one\\ntwo')",
        "character 3 of the API key is no printable ASCII character",
        "check the file or variable",
        "art.Backend(api_key='onetwo')",
    ),
    plain(
        "a tracker that does not exist",
        "art.Backend(trackers=['tensorbord'])",
        "tensorbord",
        "tensorboard",
        "art.Backend(trackers=['tensorboard'])",
    ),
    plain(
        "a model's name with a space",
        "art.TrainableModel(name='my agent', project='uses', base_model='art/tiny')",
        "name 'my agent' becomes a folder",
        "letters, digits",
        "art.TrainableModel(name='my-agent', project='uses', base_model='art/tiny')",
    ),
    plain(
        "a model without a project",
        "art.TrainableModel(name='agent', base_model='art/tiny')",
        "TrainableModel: project is missing",
        "pass project=",
        "art.TrainableModel(name='agent', project='uses', base_model='art/tiny')",
    ),
    plain(
        "a model's field is misspelt",
        "art.TrainableModel(name='agent', project='uses', base_modell='art/tiny')",
        "no field 'base_modell'",
        "did you mean 'base_model'",
        "art.TrainableModel(name='agent', project='uses', base_model='art/tiny')",
    ),
    without_register(
        "a base model that does not exist",
        "model.base_model = 'art/tinny'\nawait model.register(backend)",
        "base_model 'art/tinny' cannot be loaded",
        "This server has 'art/tiny' loaded",
        "model.base_model = 'art/tiny'\nawait model.register(backend)",
    ),
    without_register(
        "another base model than the server's",
        "from pathlib import Path\nmodel.name = 'other'\nmodel.base_model = str(Path('small').absolute())\n"
        "await model.register(backend)",
        "is not the one that this server has loaded",
        "register with base_model='art/tiny', or start another art-server",
        "model.name = 'other'\nmodel.base_model = 'art/tiny'\nawait model.register(backend)",
        files={
            "small/config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, '
            '"intermediate_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 16}',
            "small/model.safetensors": "other",
        },
    ),
    without_register(
        "a name that differs from another by case",
        "await model.register(backend)\nmodel.name = 'Agent'\nawait model.register(backend)",
        "differs from the existing model 'agent' by case only",
        "use 'agent', or another name",
        "await model.register(backend)\nmodel.name = 'agent'\nawait model.register(backend)",
    ),
    without_register(
        "another LoRA shape for a model that exists",
        "await model.register(backend)\nmodel.lora = art.LoRAConfig(rank=4)\nawait model.register(backend)",
        "model 'uses/agent' has a LoRA of",
        "register another name",
        "await model.register(backend)\nmodel.lora = art.LoRAConfig(rank=4)\nmodel.name = 'rank-4'\nawait model.register(backend)",
    ),
    without_register(
        "a LoRA rank above the server's",
        "model.name, model.lora = 'rank-64', art.LoRAConfig(rank=64)\nawait model.register(backend)",
        "lora.rank 64 is above the engine's maximum of 16",
        "use a lower rank, or start the server with a larger --max-lora-rank",
        "model.name, model.lora = 'rank-16', art.LoRAConfig(rank=16)\nawait model.register(backend)",
    ),
    without_register(
        "LoRA layers that the model does not have",
        "model.name, model.lora = 'layers', art.LoRAConfig(target_modules=['query_key_value'])\nawait model.register(backend)",
        "lora.target_modules names query_key_value",
        "choose from .*q_proj",
        "model.name, model.lora = 'layers', art.LoRAConfig(target_modules=['q_proj'])\nawait model.register(backend)",
    ),
    plain(
        "a LoRA rank of 0",
        "art.LoRAConfig(rank=0)",
        "LoRAConfig: rank is 0",
        "it must be an integer of at least 1",
        "art.LoRAConfig(rank=1)",
    ),
    without_register(
        "a model that is deleted meanwhile",
        "model.name = 'gone'\nawait model.register(backend)\nawait model.delete()\nawait model.get_step()",
        "no model 'uses/gone' is registered here",
        "register it first",
        "model.name = 'gone'\nawait model.register(backend)\nawait model.delete()\nawait model.register(backend)\nawait model.get_step()",
    ),
    plain(
        "a name that `art` does not have",
        "art.TrajectoryGroups",
        "has no attribute 'TrajectoryGroups'",
        "Did you mean: 'TrajectoryGroup'",
        "art.TrajectoryGroup",
    ),
    plain(
        "ART's own trainer on several GPUs",
        "art.MegatronRuntimeConfig()",
        "configures ART's own trainer",
        "start art-server with --serve-devices and --train-devices",
        "art.LocalBackend(server_args=['--serve-devices', '0', '--train-devices', '1'])",
    ),
]

TRAINING = [
    plain(
        "a negative learning rate",
        "art.TrainConfig(learning_rate=-1e-5)",
        "learning_rate is -1e-05",
        "it must be a number above 0",
        "art.TrainConfig(learning_rate=1e-5)",
    ),
    plain(
        "a field of the train configuration is misspelt",
        "art.TrainConfig(learning_rte=1e-5)",
        "TrainConfig has no field 'learning_rte'",
        "did you mean 'learning_rate'",
        "art.TrainConfig(learning_rate=1e-5)",
    ),
    plain(
        "verl's name of the weight of KL",
        "art.TrainConfig(kl_loss_coef=0.01)",
        "no field 'kl_loss_coef'",
        "here it is `beta`",
        "art.TrainConfig(beta=0.01)",
    ),
    plain(
        "TRL's number of generations",
        "art.TrainConfig(num_generations=8)",
        "no field 'num_generations'",
        "the number of rollouts in a TrajectoryGroup",
        "art.TrajectoryGroup([art.Trajectory(reward=n) for n in range(8)])",
    ),
    plain(
        "TRL's batch size of a device",
        "art.TrainConfig(per_device_train_batch_size=4)",
        "no field 'per_device_train_batch_size'",
        "nothing that is set: .*`batch_size` is in groups",
        "art.TrainConfig(batch_size=4)",
    ),
    plain(
        "TRL's number of epochs",
        "art.TrainConfig(num_train_epochs=3)",
        "no field 'num_train_epochs'",
        "the loop of the program",
        "for epoch in range(3):\n    art.TrainConfig()",
    ),
    plain(
        "TRL's length of an answer",
        "art.TrainConfig(max_completion_length=64)",
        "no field 'max_completion_length'",
        "an argument of the request that samples, such as `max_tokens`",
        "art.TrainConfig()\nrequest = {'max_tokens': 64}",
    ),
    plain(
        "a weight decay",
        "art.TrainConfig(weight_decay=0.1)",
        "no field 'weight_decay'",
        "fixed: AdamW without weight decay",
        "art.TrainConfig()",
    ),
    plain(
        "PEFT's rank in the train configuration",
        "art.TrainConfig(lora_r=16)",
        "no field 'lora_r'",
        r"`art.TrainableModel\(lora=art.LoRAConfig\(...\)\)`",
        "art.TrainableModel(name='a', project='uses', base_model='art/tiny', lora=art.LoRAConfig(r=16))",
    ),
    plain(
        "Unsloth's 4 bits in the train configuration",
        "art.TrainConfig(load_in_4bit=True)",
        "no field 'load_in_4bit'",
        "a flag of art-server",
        "art.LocalBackend(server_args=['--engine-arg', 'quantization=bitsandbytes'])",
    ),
    plain(
        "a preset that does not exist",
        "art.TrainConfig(preset='reinforce')",
        "preset is 'reinforce'",
        "it must be 'grpo', .*'rloo'",
        "art.TrainConfig(preset='rloo')",
    ),
    plain(
        "batch_size and mini_batches",
        "art.TrainConfig(batch_size=2, mini_batches=2)",
        "both divide the groups",
        "give one of them",
        "art.TrainConfig(batch_size=2)",
    ),
    plain(
        "a soft penalty without its length",
        "art.TrainConfig(overlong='soft_penalty')",
        "soft_penalty",
        "overlong_length",
        "art.TrainConfig(overlong='soft_penalty', overlong_length=64, overlong_buffer=16)",
    ),
    with_model(
        "the learning rate as an argument of train",
        GROUPS + "await model.train(groups, learning_rate=1e-5)",
        "train takes learning_rate in `config`",
        r"train\(groups, config=art.TrainConfig\(learning_rate=...\)\)",
        GROUPS + "await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))",
    ),
    with_model(
        "a number as configuration",
        GROUPS + "await model.train(groups, 1e-5)",
        "config is a float",
        r"art.TrainConfig\(learning_rate=...\)",
        GROUPS + "await model.train(groups, art.TrainConfig(learning_rate=1e-5))",
    ),
    with_model(
        "the configuration of SFT for train",
        GROUPS + "await model.train(groups, art.TrainSFTConfig())",
        "config is a TrainSFTConfig",
        "`model.train_sft` takes it",
        GROUPS + "await model.train_sft(groups, art.TrainSFTConfig())",
    ),
    with_model(
        "another step than the one that sampled",
        GROUPS + "await model.train(groups, expected_step=await model.get_step() + 1)",
        "is at step",
        "sample",
        GROUPS + "await model.train(groups, expected_step=await model.get_step())",
    ),
    with_model(
        "one idempotency key for two steps",
        "import uuid\nkey = uuid.uuid4().hex\nfor _ in range(2):\n"
        "    groups = [art.TrajectoryGroup([await rollout(model) for _ in range(4)])]\n"
        "    await model.train(groups, idempotency_key=key)",
        "this idempotency key was used for another train request",
        "use a new key for new trajectories",
        "import uuid\nfor _ in range(2):\n"
        "    groups = [art.TrajectoryGroup([await rollout(model) for _ in range(4)])]\n"
        "    await model.train(groups, idempotency_key=uuid.uuid4().hex)",
    ),
    with_model(
        "rows in place of trajectories for SFT",
        "await model.train_sft([{'messages': [QUESTION, {'role': 'assistant', 'content': 'yes'}]}])",
        "is a dict, not art.Trajectory",
        r"art.Trajectory\(messages_and_choices=",
        "await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION, {'role': 'assistant', 'content': 'yes'}])])",
    ),
    with_model(
        "an example of SFT without an answer",
        "await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION])])",
        "it has no message of the role 'assistant'",
        "mend them or leave them out",
        "await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION, {'role': 'assistant', 'content': 'yes'}])])",
    ),
    with_model(
        "a weight of half for a message",
        "answer = {'role': 'assistant', 'content': 'yes', 'weight': 0.5}\n"
        "await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION, answer])])",
        "weight is '0.5'",
        r"0 \(context\) or 1 \(trained\)",
        "answer = {'role': 'assistant', 'content': 'yes', 'weight': 1}\n"
        "await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION, answer])])",
    ),
    plain(
        "the epochs of SFT under another name",
        "art.TrainSFTConfig(num_epochs=3)",
        "TrainSFTConfig has no field 'num_epochs'",
        "here it is `epochs`",
        "art.TrainSFTConfig(epochs=3)",
    ),
    plain(
        "a schedule of learning rates that does not exist",
        "from art.utils.sft import create_lr_schedule\ncreate_lr_schedule(10, 1e-5, method='polynomial')",
        "method 'polynomial' is none of",
        "linear",
        "from art.utils.sft import create_lr_schedule\ncreate_lr_schedule(10, 1e-5, method='linear')",
    ),
    with_model(
        "config and options of ART's backend.train",
        GROUPS + "await backend.train(model, groups, art.TrainConfig(), learning_rate=1e-5)",
        "backend.train takes config or options, not both",
        "learning_rate",
        GROUPS + "await backend.train(model, groups, art.TrainConfig(learning_rate=1e-5))",
    ),
]

STEPS = [
    with_model(
        "a rollback to a step that does not exist",
        "await model.rollback(999)",
        "has no step 999",
        "kept steps: .*0",
        "await model.rollback(0)",
    ),
    with_model(
        "a rollback to the word best",
        "await model.rollback('best')",
        "step 'best' is not the number of a step",
        "`model.checkpoints",
        "await model.rollback(0)",
    ),
    with_model(
        "a fork under a name that exists",
        "await model.fork('agent')",
        "'uses/agent' exists already",
        "choose another name",
        "forked = await model.fork('fork')\nawait forked.delete()",
    ),
    with_model(
        "steps to keep that do not exist",
        "await model.delete_checkpoints(keep=[999])",
        "keep names no step of",
        "Nothing was deleted; name one of these",
        "await model.delete_checkpoints(keep=[await model.get_step()])",
    ),
    with_model(
        "a metric that the history does not have",
        3 * SFT + "await model.delete_checkpoints('val/accuracy')",
        "the history has no val/accuracy",
        "log this metric, or name another one",
        "await model.log(metrics={'val/accuracy': 1.0})\nawait model.delete_checkpoints('val/accuracy')",
        is_warning=True,
    ),
    with_model(
        "a log for a step that does not exist yet",
        "await model.log(metrics={'score': 1.0}, step=999)",
        "999",
        "newest",
        "await model.log(metrics={'score': 1.0}, step=await model.get_step())",
    ),
    with_model(
        "an evaluation without scenarios",
        "await art.evaluate(model, rollout, [])",
        "there is nothing to evaluate",
        "`scenarios` is empty",
        "await art.evaluate(model, rollout, [1])",
    ),
    with_model(
        "an evaluation of a word as step",
        "await art.evaluate(model, rollout, [1], step='newest')",
        "step 'newest' is not a step",
        "pass its number, or 'base'",
        "await art.evaluate(model, rollout, [1], step='base')",
    ),
    with_model(
        "an evaluation of a step that does not exist",
        "await art.evaluate(model, rollout, [1, 2], step=999)",
        "has no step 999",
        "kept steps",
        "await art.evaluate(model, rollout, [1, 2], step=await model.get_step())",
    ),
    with_model(
        "an evaluation by another variable than the copy",
        SFT + FIRST + "async def outer(_, scenario):\n    return await rollout(model)\n"
        "await art.evaluate(model, outer, [1], step=first)",
        "a rollout sampled from uses/agent@",
        "use the model that the rollout gets",
        SFT + FIRST + "async def inner(model, scenario):\n    return await rollout(model)\n"
        "await art.evaluate(model, inner, [1], step=first)",
    ),
    with_model(
        "a split with a slash",
        "await art.evaluate(model, rollout, [1], split='val/easy')",
        "split 'val/easy' becomes a folder",
        "letters, digits",
        "await art.evaluate(model, rollout, [1], split='val-easy')",
    ),
    plain(
        "an empty data set",
        "list(art.iterate_dataset([]))",
        "the dataset is empty",
        "pass|nothing to iterate over",
        "list(art.iterate_dataset([1]))",
    ),
    plain(
        "a generator as data set",
        "list(art.iterate_dataset(n for n in range(3)))",
        "a generator has no length",
        r"pass list\(dataset\)",
        "list(art.iterate_dataset(list(n for n in range(3))))",
    ),
    plain(
        "no groups in a step",
        "list(art.iterate_dataset([1], groups_per_step=0))",
        "groups_per_step must be at least 1, not 0",
        "at least 1",
        "list(art.iterate_dataset([1], groups_per_step=1))",
    ),
    plain(
        "a data loop that begins behind its end",
        "list(art.iterate_dataset([1, 2], groups_per_step=1, initial_step=7))",
        r"initial_step 7 is after the last step, 2: no batches are left",
        "num_epochs",
        "list(art.iterate_dataset([1, 2], groups_per_step=1, initial_step=7, num_epochs=4))",
        is_warning=True,
    ),
    with_model(
        "an argument of ART's pipeline",
        "art.PipelineTrainer(model, backend, rollout, [1], None, num_rollout_workers=8)",
        "art.PipelineTrainer does not take num_rollout_workers",
        "max_concurrent",
        "art.PipelineTrainer(model, backend, rollout, [1], None, max_concurrent=8)",
    ),
    with_model(
        "a pipeline with another backend than the model's",
        "art.PipelineTrainer(model, art.Backend(), rollout, [1], None)",
        "is registered with another backend than the pipeline's",
        "pass that one",
        "art.PipelineTrainer(model, backend, rollout, [1], None)",
    ),
    with_model(
        "a number of scenarios for the pipeline",
        "art.PipelineTrainer(model, backend, rollout, 8, None)",
        "scenarios is int, not an iterable",
        "pass a list or a generator",
        "art.PipelineTrainer(model, backend, rollout, range(8), None)",
    ),
    without_register(
        "a flag that the local server does not have",
        "async with art.LocalBackend(server_args=['--prot', '0']):\n    pass",
        "there is no flag --prot",
        "did you mean --port",
        "async with art.LocalBackend(server_args=['--port', '0']):\n    pass",
    ),
    without_register(
        "a file as the local server's folder",
        "async with art.LocalBackend(path='program.py'):\n    pass",
        r"path .*program.py cannot be made or used \(Not a directory\)",
        "pass a folder in which this user may write",
        "async with art.LocalBackend(path='art'):\n    pass",
    ),
]

USES = [*TRAJECTORIES, *ROLLOUTS, *GATHERING, *REGISTERING, *TRAINING, *STEPS]
