"""The sentences of errors, which no other test holds: the place, what is wrong, and the remedy."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
from art_protocol.wire import LoRAConfig, TrainConfig, TrajectoryGroupBody
from art_server.api.bodies import decode
from art_server.api.openai.grammar_limits import check_grammars
from art_server.api.openai.routes import check_choices, check_conversation
from art_server.engine.device.assignment import check_devices, check_flags
from art_server.engine.device.detection import Gpu, Machine
from art_server.engine.device.plan import make_memory_plan
from art_server.engine.pause_gate import PauseGate
from art_server.errors import ServerError, UsageError
from art_server.flags import parse
from art_server.jobs.queue import JobQueue
from art_server.settings import ServerConfig
from art_server.store import files
from art_server.store.base_facts import read_facts
from art_server.store.base_models import find_base_model
from art_server.store.registry import Registry, check_lora, check_name, check_rank
from tests.makers.new_models import add_model
from tests.makers.resolving import LIMITS, bare, choice, resolve, sources
from tests.quick.engine.device.cards import card, demand
from tests.quick.jobs.queued_jobs import add, number_of, open_queue, request_digest

GPUS = tuple(Gpu(index, f"GPU-{index}", "NVIDIA L4", 24 << 30, (7, 5)) for index in (0, 1))
THIRD = Gpu(2, "GPU-2", "NVIDIA L4", 24 << 30, (7, 5))
UNREGISTERED = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")


def two_projects(root: Path) -> Registry:
    registry = Registry(root)
    for project in ("Demo", "q"):
        add_model(registry, project=project)
    return registry


def queue(root: Path, **limits: Any) -> JobQueue:
    jobs = open_queue(root, **limits)
    add(jobs, "k")
    return jobs


SFT = art.TrainSFTConfig().to_train_config()


def train(
    *entries: dict[str, Any], rewards: tuple[float, ...] = (0.0,), config: TrainConfig | None = None, **fields: Any
) -> None:
    trajectory = {"messages_and_choices": entries, **fields}
    group = TrajectoryGroupBody.model_validate(
        {"trajectories": [{**trajectory, "reward": reward} for reward in rewards]}
    )
    resolve([group], config or TrainConfig(), "p/a", sources(), LIMITS)


def wait_at_a_closed_gate() -> None:
    gate = PauseGate()
    gate.close("p/a")
    asyncio.run(gate.wait_open(0))


def find_an_adapter(root: Path) -> None:
    (root / "lora").mkdir()
    (root / "lora" / "adapter_config.json").write_text("{}")
    find_base_model(str(root / "lora"), root)


def write_on_a_full_disk(_: Path) -> None:
    with files.disk_errors("step 3"):
        raise OSError(28, os.strerror(28))


def lock_twice(root: Path) -> None:
    for _ in range(2):
        files.lock_folder(root / ".server", root)


async def not_run() -> art.Trajectory:
    return art.Trajectory()


def look_into_what_has_not_run() -> None:
    group = art.TrajectoryGroup([not_run()])
    try:
        len(group)
    finally:
        group.close()


SENTENCES: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "ambiguous_model",
        lambda root: two_projects(root).resolve("a", None, None),
        "model 'a' exists in several projects (Demo, q): write PROJECT/a",
    ),
    (
        "unknown_model",
        lambda root: two_projects(root).resolve("q/b", None, None),
        "no model 'q/b' here; did you mean 'q/a'? known models: q/a, Demo/a; base model: none",
    ),
    (
        "unknown_step",
        lambda root: two_projects(root).resolve("q/a@first", None, None),
        "'first' is not a step: write q/a@0 or q/a@best",
    ),
    (
        "unknown_step",
        lambda root: two_projects(root).resolve("q/a@7", None, None),
        "model 'q/a' has no step 7; kept steps: 0",
    ),
    (
        "bad_name",
        lambda _: check_name("a/b", "project"),
        "project 'a/b' (3 characters) is not a name: use 1 to 128 letters, digits, '.', '_' or '-', and begin "
        "with a letter or digit",
    ),
    (
        "name_differs_by_case",
        lambda root: two_projects(root).folder("demo", "b"),
        "project 'demo' differs from the existing project 'Demo' by case only, and on some systems both are one "
        "folder: use 'Demo', or another name",
    ),
    (
        "lora_differs",
        lambda _: check_lora(LoRAConfig(rank=4), LoRAConfig(rank=8), "p/a"),
        "model 'p/a' has a LoRA of {'rank': 4, 'alpha': 16.0, 'target_modules': None}; it cannot be changed to "
        "{'rank': 8, 'alpha': 16.0, 'target_modules': None}: register another name",
    ),
    (
        "rank_too_high",
        lambda _: check_rank(LoRAConfig(rank=64), 32),
        "lora.rank 64 is above the engine's maximum of 32: use a lower rank, or start the server with a larger "
        "--max-lora-rank",
    ),
    (
        "unknown_base_model",
        lambda root: find_base_model("./nothing", root),
        "base_model './nothing' cannot be loaded; tried: the folder ./nothing (it does not exist). Name a "
        "Hugging Face id that this server can reach, a folder on the server, 'art/tiny' or 'smollm2'.",
    ),
    (
        "unknown_base_model",
        find_an_adapter,
        "base_model 'FOLDER/lora' is an adapter: name the base model that the adapter was trained on, and import the adapter "
        "with `art import DIR --model PROJECT/NAME`",
    ),
    (
        "unknown_model",
        lambda root: two_projects(root).resolve("openai/a", None, None),
        "no model 'openai/a' here; did you mean 'q/a'? known models: q/a, Demo/a; base model: none",
    ),
    (
        "unknown_base_model",
        lambda root: read_facts(root / "nothing"),
        "FOLDER/nothing has no config.json, which tells what model it is",
    ),
    (
        "invalid_body",
        lambda _: decode(b"{"),
        "the body is not JSON: Input data was truncated",
    ),
    (
        "invalid_body",
        lambda _: check_grammars("chat", {"tools": {}}),
        "tools: it must be a list",
    ),
    (
        "invalid_body",
        lambda _: check_conversation("chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        "messages[0].tool_calls: it must be a list, not a number",
    ),
    (
        "invalid_body",
        lambda _: check_choices("chat", {"n": "8"}),
        "n: it must be a number, not a text",
    ),
    (
        "too_deep",
        lambda _: decode(b"[" * 100_000),
        "the body, or a JSON text inside it, is nested too deeply: flatten it",
    ),
    (
        "unknown_option",
        lambda _: check_grammars("chat", {"guided_regex": "a"}),
        "guided_regex: the engine does not know this option in a request and would ignore it; use "
        "`structured_outputs` or `response_format` instead",
    ),
    (
        "key_reused",
        lambda root: (jobs := queue(root)).find_key(number_of(jobs), "k", request_digest(b"y")),
        "this idempotency key was used for another train request: use a new key for new trajectories",
    ),
    (
        "queue_full",
        lambda root: add(queue(root, max_queued=1)),
        "the queue of project 'p' is full with 1 job: wait until some have ended, cancel some (DELETE /api/jobs/JOB), or start "
        "the server with a larger --max-queued-jobs",
    ),
    (
        "no_trainable_turn",
        lambda _: train(bare("c-0")),
        "no group holds a trainable turn: the choice's record is not in the ledger, and the choice carries no "
        "tokens: request `logprobs` so that choices carry them, train on the server that sampled, or start it "
        "with a larger --ledger-max-gb or --ledger-max-age-days (1 time, e.g. "
        "groups[0].trajectories[0].messages_and_choices[0]); the trajectory holds no trainable turn (1 time, "
        "e.g. groups[0].trajectories[0])",
    ),
    (
        "no_trainable_turn",
        lambda _: train({"role": "user", "content": "x"}),
        "no group holds a trainable turn: the trajectory holds no trainable turn (1 time, e.g. "
        "groups[0].trajectories[0]). No trajectory contains a choice: put `completion.choices[0]` into it, not "
        "only its message; an agent under art.rollout needs the rollout's base_url or api_key, and the model's name: the logs of its trajectory say where its requests went",
    ),
    (
        "no_trainable_turn",
        lambda _: train({"from": "human", "value": "x"}),
        "no group holds a trainable turn: the trajectory holds no trainable turn (1 time, e.g. "
        "groups[0].trajectories[0]). The messages are of the form ShareGPT: write each message as {'role': ..., 'content': "
        "...}, for example [{'role': {'human': 'user', 'gpt': 'assistant'}.get(m['from'], m['from']), 'content': "
        "m['value']} for m in row['conversations']]",
    ),
    (
        "no_trainable_turn",
        lambda _: train({"role": "user", "content": "x"}, config=SFT),
        "1 of 1 demonstrations have no trained token: demonstration 0 (groups[0].trajectories[0], 'x'): it has no message of "
        "the role 'assistant', and only these are trained. Nothing was trained: mend them or leave them out",
    ),
    (
        "bad_turns",
        lambda _: train({"role": "assistant", "content": "x", "weight": 0.5}, config=SFT),
        "groups[0].trajectories[0].messages_and_choices[0].weight is '0.5': a message's weight is 0 (context) or 1 (trained). "
        "Other weights are given as `turn_advantages` of the trajectory",
    ),
    (
        "bad_turns",
        lambda _: train(choice([1], [2]), choice([1], [3]), turn_rewards=[1.0]),
        "turn_rewards has 1 entries for 2 choices: give one entry per choice, null for none",
    ),
    (
        "bad_reward",
        lambda _: train(choice([1], [2]), rewards=(1e200, -1e200)),
        "the rewards of a group range from -1e+200 to 1e+200: their standard deviation is not a finite number; "
        "scale the rewards down",
    ),
    (
        "training_in_progress",
        lambda _: wait_at_a_closed_gate(),
        "inference waited for 0 s for a step, which trains; repeat the request, or start the server with a "
        "larger --wait-limit",
    ),
    (
        "no_such_device",
        lambda _: check_devices(ServerConfig(trainer="unsloth"), Machine("cpu", (), 64 << 30, (0, 1))),
        "--trainer unsloth: Unsloth trains on a GPU, and this machine has none: use --trainer peft",
    ),
    (
        "no_such_device",
        lambda _: check_devices(ServerConfig(serve_devices=(2,), train_devices=(0,)), Machine("cuda", GPUS, 64 << 30)),
        "--serve-devices: there is no GPU 2 here, only 0, 1",
    ),
    (
        "no_such_device",
        lambda _: check_devices(ServerConfig(engines=3), Machine("cuda", GPUS, 64 << 30)),
        "--engines 3: each needs a GPU, and 2 serve; use 1 or 2, or give --serve-devices a multiple of 3 GPUs",
    ),
    (
        "no_such_device",
        lambda _: check_devices(ServerConfig(engines=2), Machine("cuda", (*GPUS, THIRD), 64 << 30)),
        "--engines 2: 3 GPUs cannot be divided evenly; use 1 or 3, or give --serve-devices a multiple of 2 GPUs",
    ),
    (
        "no_such_number_type",
        lambda _: check_devices(ServerConfig(), Machine("cuda", GPUS, 64 << 30)),
        "NVIDIA L4 has no bfloat16: start the server with --dtype float16 --trainer-dtype float32",
    ),
    (
        "does_not_fit",
        lambda _: make_memory_plan(card("24 GB"), demand("32B")),
        "base model '32B' (61.0 GiB of weights) does not fit 24 GB with 23.6 GiB: handover sleep: the engine's "
        "share of 21.7 GiB leaves 0 tokens of KV cache, and 8,192 are needed; handover sleep: training has room "
        "for 0 tokens at a time, and a sequence has 4,096. Use a smaller base model or a 4-bit one, a lower "
        "--max-lora-rank, a shorter --max-seq-length, or a larger card",
    ),
    (
        "no_disk_space",
        write_on_a_full_disk,
        "cannot write step 3 to the disk (No space left on device): free some space under the server's --path, "
        "check that it is writable, and repeat the request",
    ),
    (
        "path_in_use",
        lock_twice,
        "another art-server works in FOLDER: stop it, or give this one another --path",
    ),
]
"""Of the server's errors, by code."""

OTHERS: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (
        UsageError,
        lambda: parse(["--host", "0.0.0.0"]),
        "--host 0.0.0.0 can be reached from other machines, so an API key is needed: pass --api-key, "
        "--api-key-file or ART_API_KEY, or use --host 127.0.0.1",
    ),
    (
        UsageError,
        lambda: parse(["--engine-arg", "host=0.0.0.0"]),
        "--engine-arg host=0.0.0.0: write NAME=VALUE with NAME one of block_size, enable_prefix_caching, "
        "enforce_eager, gpu_memory_utilization, kv_cache_dtype, max_logprobs, max_num_batched_tokens, "
        "max_num_seqs, pipeline_parallel_size, quantization, reasoning_parser, seed, tensor_parallel_size, "
        "tool_call_parser",
    ),
    (
        UsageError,
        lambda: parse(["--share", "team-a=0"]),
        "--share team-a=0: write PROJECT=WEIGHT with a number above 0, such as team-a=2",
    ),
    (
        UsageError,
        lambda: check_flags(parse(["--engines", "0"])),
        "--engines 0: something has to sample; use 1 or more, or a key with the scope 'host' for other machines",
    ),
    (
        UsageError,
        lambda: check_flags(parse(["--train-devices", "1"])),
        "--serve-devices and --train-devices go together: give both or none",
    ),
    (
        UsageError,
        lambda: check_flags(parse(["--serve-devices", "0", "--train-devices", "1", "--handover", "sleep"])),
        "--handover is for a GPU that engine and trainer share: leave it out with --train-devices",
    ),
    (
        ValueError,
        lambda: art.Backend("localhost:7623"),
        "base_url must begin with http:// or https://, not 'localhost:7623'",
    ),
    (
        ValueError,
        lambda: art.Backend(api_key="sec\nret"),
        "character 3 of the API key is no printable ASCII character: check the file or variable that the key "
        "comes from",
    ),
    (
        art.ArtConnectionError,
        lambda: asyncio.run(UNREGISTERED.register(art.Backend("http://127.0.0.1:9"))),
        "no art-server answers at http://127.0.0.1:9 (All connection attempts failed): is it running? Start it "
        "with `art-server --port 9`, or pass its address to art.Backend",
    ),
    (
        ValueError,
        lambda: UNREGISTERED.openai_client(),
        "model 'agent' is not registered: call `await model.register(backend)` first",
    ),
    (
        ValueError,
        lambda: art.Model(name="judge", project="demo").openai_client(),
        "model 'judge' has no address: pass inference_base_url (and inference_api_key)",
    ),
    (
        ValueError,
        lambda: art.iterate_dataset([]),
        "the dataset is empty: there is nothing to iterate over",
    ),
    (
        TypeError,
        lambda: art.iterate_dataset(number for number in range(3)),  # type: ignore[arg-type]
        "a generator has no length: pass list(dataset)",
    ),
    (
        ValueError,
        lambda: art.retry(max_attempts=0),
        "max_attempts must be at least 1, not 0",
    ),
    (
        RuntimeError,
        look_into_what_has_not_run,
        "this TrajectoryGroup was built from coroutines that have not run: await it, or pass it to "
        "art.gather_trajectory_groups",
    ),
    (
        ValueError,
        lambda: asyncio.run(art.evaluate(UNREGISTERED, lambda *_: not_run(), [])),
        "there is nothing to evaluate: `scenarios` is empty",
    ),
    (
        ValueError,
        lambda: asyncio.run(art.evaluate(UNREGISTERED, lambda *_: not_run(), [1], baseline="bse")),  # type: ignore[arg-type]
        "baseline 'bse' is not a step: pass its number, or 'base'",
    ),
]
"""Of errors without a code: of flags, and of arguments in a program."""


@pytest.mark.parametrize(("code", "call", "sentence"), SENTENCES)
def test_an_error_says_the_place_the_reason_and_the_remedy(
    code: str, call: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ServerError) as refused:
        call(tmp_path)
    assert refused.value.code == code
    assert refused.value.message.replace(str(tmp_path), "FOLDER") == sentence


@pytest.mark.parametrize(("kind", "call", "sentence"), OTHERS)
def test_a_flag_or_an_argument_is_named_with_the_remedy(
    kind: type[Exception], call: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert str(refused.value) == sentence
