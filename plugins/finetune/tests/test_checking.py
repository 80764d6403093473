"""Checking a file: forty and more broken ones, all problems at once, the policy's LLM, fields without effect."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art.finetune import other_harnesses
from art.finetune.checking import check, policy_llm, without_effect
from art.finetune.components import Kind
from art.finetune.errors import WrongInput
from art.finetune.reading import of_dict, read
from art.finetune.sections import Config

GOOD = """\
llms:
  policy:
    _type: openai
    model_name: agent
workflow:
  _type: agent.py:answer
eval:
  general:
    max_concurrency: 16
    dataset:
      _type: jsonl
      file_path: train.jsonl
  evaluators:
    right:
      _type: exact_match
    judged:
      _type: ruler
trajectory_builders:
  builder:
    _type: openpipe_art_traj_builder
    num_generations: 4
trainer_adapters:
  adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      name: agent
      base_model: art/tiny
    training:
      learning_rate: 1e-5
trainers:
  trainer:
    _type: openpipe_art_trainer
finetuning:
  enabled: true
  trainer: trainer
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function:
    name: right
  num_epochs: 3
"""
AGENT = 'raise RuntimeError("the check imports nothing of the user")'
VALIDATION = "  num_epochs: 3\n  validation:\n    dataset: "


def fake_toolkit(kind: Kind) -> list[str]:
    return {"workflow": ["react_agent"], "evaluator": ["trajectory"]}.get(kind, [])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    return tmp_path


def problems(text: str, *overrides: tuple[str, Any], toolkit: Any = None) -> list[str]:
    """What is wrong with a file; nothing is written."""
    Path("f.yml").write_text(text)
    before = sorted(os.listdir())
    try:
        check(read(Path("f.yml"), overrides), toolkit)
    except WrongInput as error:
        return error.problems
    finally:
        assert sorted(os.listdir()) == before
    return []


def config_of(text: str, *overrides: tuple[str, Any], toolkit: Any = None) -> Config:
    Path("f.yml").write_text(text)
    return check(read(Path("f.yml"), overrides), toolkit)


def changed(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_a_good_file() -> None:
    config = config_of(GOOD)
    assert config.builder.num_generations == 4 and config.adapter.training.learning_rate == 1e-5
    assert policy_llm(read(Path("f.yml")).tree) == "policy" and without_effect(config) == []


BROKEN = r"""
finetuning:\n | finetunning:\n | 33:1: finetunning | unknown key: did you mean 'finetuning'?
num_epochs: 3 | num_epoch: 3 | 40:3: finetuning.num_epoch | did you mean 'num_epochs'?
num_epochs: 3 | zzz: 3 | 40:3: finetuning.zzz | unknown key: known: enabled, trainer,
max_concurrency: 16 | max_concurency: 16 | 9:5: eval.general.max_concurency | 'max_concurrency'
      name: agent\n |       nmae: agent\n | 26:7: trainer_adapters.adapter.backend.nmae | did you mean 'name'?
training: | trainning: | 28:5: trainer_adapters.adapter.trainning | did you mean 'training'?
_type: exact_match | _type: exact_match\n      case: 1 | 16:7: eval.evaluators.right.case | known: ignore_case
_type: openpipe_art_trainer\n | _type: openpipe_art_trainer\n    x: 1\n | 33:5: trainers.trainer.x | known: reward
num_epochs: 3 | num_epochs: 3\n  num_epochs: 4 | 41:3: finetuning.num_epochs | is repeated, first in line 40
enabled: true | enabled: maybe | 34:3: finetuning.enabled | 'maybe'
num_epochs: 3 | num_epochs: many | 40:3: finetuning.num_epochs | 'many'
num_epochs: 3 | num_epochs: 0 | 40:3: finetuning.num_epochs | equal to 1
num_epochs: 3 | num_epochs: | 40:3: finetuning.num_epochs | not empty
num_epochs: 3 | target_functions: f | 40:3: finetuning.target_functions | valid list
num_epochs: 3 | target_functions: [f, 3] | 40:25: finetuning.target_functions[1] | valid string
num_epochs: 3 | target_functions: [] | 40:3: finetuning.target_functions | at least 1 item
num_epochs: 3 | output_dir: [x] | 40:3: finetuning.output_dir | not a valid path
num_epochs: 3 | curriculum_learning:\n    initial_percentile: 1.5 | 41:5: finetuning.curriculum_learning.initial_percentile | equal to 1
num_epochs: 3 | curriculum_learning: {rank: never} | 40:25: finetuning.curriculum_learning.rank | 'every_epoch' or 'on_expansion'
max_concurrency: 16 | rollout_timeout_seconds: .inf | 9:5: eval.general.rollout_timeout_seconds | must be a finite number
      name: agent\n |       name: a b\n | 26:7: trainer_adapters.adapter.backend.name | 'a b' becomes a folder
workflow:\n  _type: agent.py:answer\n |  | 1:1: workflow | is missing
workflow:\n  _type: agent.py:answer\n | workflow:\n | 5:1: workflow | not empty
workflow:\n  _type: agent.py:answer\n | workflow: x\n | 5:1: workflow | must be a section
_type: agent.py:answer | llm: policy | 5:1: workflow._type | is missing
      _type: jsonl\n |  | 10:5: eval.general.dataset._type | is missing
_type: jsonl | _type: jsnl | 11:7: eval.general.dataset._type | 'json', 'jsonl', 'csv'
enabled: true | enabled: false | 34:3: finetuning.enabled | must be true to train
trainer: trainer\n | trainer: trainr\n | 35:3: finetuning.trainer | trainers has no 'trainr': did you mean
  trainer: trainer\n |  | 33:1: finetuning.trainer | is missing
trajectory_builder: builder | trajectory_builder: b | 36:3: finetuning.trajectory_builder | known: builder
trainer_adapter: adapter | trainer_adapter: x | 37:3: finetuning.trainer_adapter | known: adapter
trainers:\n  trainer:\n    _type: openpipe_art_trainer\n |  | 32:3: finetuning.trainer | there are none
name: right | name: rigth | 39:5: finetuning.reward_function.name | eval.evaluators has no 'rigth': did you
name: right | {} | 38:3: finetuning.reward_function | a name or weights
name: right | name: right\n    weights: {right: 1} | 38:3: finetuning.reward_function | a name or weights
name: right | weights: {wrong: 1} | 39:15: finetuning.reward_function.weights.wrong | has no 'wrong'
name: right | weights: {right: 0} | 38:3: finetuning.reward_function | weight is not 0
name: right | weights: {right: .nan} | 39:15: finetuning.reward_function.weights.right | a finite number
num_epochs: 3 | num_epochs: 3\n  validation:\n    dataset: val.jsonl\n    reward: {name: judged} | 43:5: finetuning.validation.reward | 'judged' is a ruler, which compares the rollouts of a group
name: right\n  num_epochs: 3 | name: judged\n  num_epochs: 3\n  validation:\n    dataset: val.jsonl | 41:3: finetuning.validation.reward | 'judged' is a ruler
num_epochs: 3 | num_epochs: 3\n  validation:\n    dataset: val.txt | 42:5: finetuning.validation.dataset | val.txt; a share of the training rows is
num_epochs: 3 | num_epochs: 3\n  validation:\n    dataset: [a] | 42:5: finetuning.validation.dataset | must be a section
num_epochs: 3 | num_epochs: 3\n  validation:\n    dataset: {_type: csv, file_pth: a} | 42:27: finetuning.validation.dataset.file_pth | did you mean 'file_path'?
num_epochs: 3 | target_model: gpt | 40:3: finetuning.target_model | no entry of llms has the name
    model_name: agent\nworkflow: |   other: {_type: openai, model_name: gpt}\nworkflow: | 33:1: finetuning.target_model | none of policy, other is the model that is trained
workflow:\n |   other: {_type: openai, model_name: art/tiny}\nworkflow:\n | 34:1: finetuning.target_model | policy and other could both be the model that is trained
agent.py:answer | agnt.py:answer | 6:3: workflow._type | no such file:
agent.py:answer | agent.py:an swer | 6:3: workflow._type | names nothing: write package.module:NAME or path/file.py:NAME
agent.py:answer | comand | 6:3: workflow._type | unknown type 'comand'; did you mean 'command'?; known: command
_type: exact_match | _type: command | 14:5: eval.evaluators.right.command | must be a command line, or a list of texts
_type: exact_match | _type: command\n      command: no-such-program | 16:7: eval.evaluators.right.command | there is no program
_type: exact_match | _type: my_eval | 15:7: eval.evaluators.right._type | known: command, contains, exact_match, json_match, judge, number
_type: openpipe_art_trainer\n | _type: a.py:T\n | 32:5: trainers.trainer._type | no such file:
agent.py:answer | command | 5:1: workflow.command | must be a command line, or a list of texts, not empty
agent.py:answer | command\n  command: no-such-program x | 7:3: workflow.command | no program 'no-such-program'
agent.py:answer | command\n  command: "ls 'a" | 7:3: workflow.command | cannot be split into words: No closing
agent.py:answer | command\n  command: ls\n  cwd: . | 8:3: workflow.cwd | known: command
learning_rate: 1e-5 | learning_rat: 1e-5 | 29:7: trainer_adapters.adapter.training.learning_rat | 'learning_rate'?
learning_rate: 1e-5 | learning_rate: -1 | 29:7: trainer_adapters.adapter.training.learning_rate | greater than 0
learning_rate: 1e-5 | learning_rate: fast | 29:7: trainer_adapters.adapter.training.learning_rate | must be 'auto'
learning_rate: 1e-5 | learning_rate: [1e-5, 3] | 29:29: trainer_adapters.adapter.training.learning_rate[1] | equal to 1
learning_rate: 1e-5 | batch_size: 4\n      mini_batches: 2 | 28:5: trainer_adapters.adapter.training | batch_size and mini_batches both divide the groups
      name: agent\n |       name: agent\n      engine_args: {gpu_memory_utilization: 90}\n | 27:21: trainer_adapters.adapter.backend.engine_args.gpu_memory_utilization | equal to 1
      name: agent\n |       name: agent\n      init_args: {max_seq_len: 10}\n | 27:19: trainer_adapters.adapter.backend.init_args.max_seq_len | did you mean 'max_seq_length'?
learning_rate: 1e-5 | lr: 1e-5 | 29:7: trainer_adapters.adapter.training.lr | here it is trainer_adapters.NAME.training.learning_rate
learning_rate: 1e-5 | optimizer: adamw | 29:7: trainer_adapters.adapter.training.optimizer | here it is fixed: AdamW
learning_rate: 1e-5 | kl_coef: 0.1 | 29:7: trainer_adapters.adapter.training.kl_coef | here it is trainer_adapters.NAME.training.beta
      name: agent\n |       name: agent\n      lora: {lora_r: 8}\n | 27:14: trainer_adapters.adapter.backend.lora.lora_r | here it is trainer_adapters.NAME.backend.lora.rank
num_epochs: 3 | early_stopping_patience: 3 | 40:3: finetuning.early_stopping_patience | here it is finetuning.validation.patience
num_epochs: 3 | report_to: wandb | 40:3: finetuning.report_to | here it is finetuning.trackers
learning_rate: 1e-5 | micro_batch_size: 2 | 29:7: trainer_adapters.adapter.training.micro_batch_size | here it is finetuning.rows_per_step
learning_rate: 1e-5 | lr_scheduler: cosine | 29:7: trainer_adapters.adapter.training.lr_scheduler | here it is trainer_adapters.NAME.training.schedule
learning_rate: 1e-5 | lora_dropout: 0.1 | 29:7: trainer_adapters.adapter.training.lora_dropout | adapters are trained without dropout
num_epochs: 3 | micro_batch_size: 2 | 40:3: finetuning.micro_batch_size | here it is finetuning.rows_per_step
llms:\n | adapter: lora\nllms:\n | 1:1: adapter | here it is trainer_adapters.NAME.backend.lora
      name: agent\n |       port: 70000\n | 26:7: trainer_adapters.adapter.backend.port | equal to 65535
      name: agent\n |       port: 70\n | 25:5: trainer_adapters.adapter.backend | ip is missing
      name: agent\n |       name: agent\n      url: http://a:1\n      ip: b\n | 25:5: trainer_adapters.adapter.backend | in place of ip and port
      name: agent\n |       name: agent\n      url: a:7623\n | 27:7: trainer_adapters.adapter.backend.url | must begin with http
    dataset:\n      _type: jsonl\n      file_path: train.jsonl\n |  | 8:3: eval.general.dataset | is missing
      file_path: train.jsonl\n |  | 10:5: eval.general.dataset | file_path is missing
_type: jsonl | _type: custom | 10:5: eval.general.dataset | function is missing
_type: jsonl | _type: xls | 11:7: eval.general.dataset._type | xls files are not read: save the sheet as CSV
_type: jsonl | _type: jsonl\n      s3: {bucket: b} | 12:7: eval.general.dataset.s3 | use files on this machine
max_concurrency: 16 | output: {s3: {a: b}} | 9:14: eval.general.output.s3 | use files on this machine
max_concurrency: 16 | profiler: {base_metrics: true} | 9:5: eval.general.profiler | `nat eval` profiles
_type: openpipe_art_traj_builder | _type: dpo_traj_builder | 20:5: trajectory_builders.builder._type | use openpipe_art_traj_builder
_type: openpipe_art_trainer_adapter | _type: nemo_customizer_trainer_adapter | 24:5: trainer_adapters.adapter._type | use openpipe_art_trainer_adapter
_type: openpipe_art_trainer\n | _type: nemo_customizer_trainer\n    num_runs: 2\n | 32:5: trainers.trainer._type | use openpipe_art_trainer,
model_name: agent | model_name: ${NO_SUCH_VARIABLE} | 4:5: llms.policy.model_name | is not set: export it
llms:\n | base: none.yml\nllms:\n | 1:1: base | no such file:
num_epochs: 3 | num_epochs: !!python/name:os.x | 40:15 | could not determine
num_epochs: 3 | num_epochs: { | 41:1 | not valid YAML:
"""
"""Each line: a piece of the good file | what replaces it | the place and the path of the problem | words of its sentence."""


@pytest.mark.parametrize("line", BROKEN.strip().splitlines())
def test_a_broken_file_is_one_sentence_with_its_place(line: str) -> None:
    old, new, location, words = line.replace(r"\n", "\n").split(" | ")
    messages = problems(changed((old, new)))
    assert len(messages) == 1, "\n".join(messages)
    message = messages[0]
    assert message.startswith(f"f.yml:{location}: ") and words in message and "\n" not in message, message


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = changed(
        ("    model_name: agent", "    model_name: ${NO_SUCH_VARIABLE}"),
        ("agent.py:answer", "agnt.py:answer"),
        ("    max_concurrency: 16", "    max_concurrency: lots"),
        ("_type: jsonl", "_type: json\n      filter: 3"),
        ("    num_generations: 4", "    num_generations: 0"),
        ("      learning_rate: 1e-5", "      learning_rate: 5"),
        ("  trainer: trainer\n", "  trainer: none\n  trainer: trainer\n"),
        ("    name: right", "    name: left"),
    )
    messages = problems(text, ("finetuning.seed", "-1"), ("eval.generall", "1"))
    assert [next(name for name in re.split(": |-o ", message) if ":" not in name and name) for message in messages] == [
        "llms.policy.model_name",
        "workflow._type",
        "eval.general.max_concurrency",
        "eval.general.dataset.filter",
        "trajectory_builders.builder.num_generations",
        "trainer_adapters.adapter.training.learning_rate",
        "finetuning.trainer",
        "finetuning.reward_function.name",
        "eval.generall",
        "finetuning.seed",
    ]
    assert messages[-1].startswith("-o finetuning.seed: must be ") and "the number -1" in messages[-1]


AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
val_set_size: 0.1
adapter: lora
lora_r: 16
optimizer: adamw_8bit
micro_batch_size: 2
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            AXOLOTL,
            ["file of axolotl", "--base_model NousResearch/Llama-3.2-1B", "docs/finetune.md", "docs/howto/sft.md"],
        ),
        ("model_name_or_path: x/y\nstage: sft\n", ["file of TRL or LLaMA-Factory", "--base_model x/y"]),
        ("actor_rollout_ref: {model: {path: x}}\ndata: {}\n", ["file of verl", "--base_model NAME"]),
    ],
)
def test_a_file_of_another_harness_is_one_sentence(text: str, words: list[str]) -> None:
    (message,) = problems(text)
    assert message.startswith("f.yml:1:1: this is a file of ") and all(word in message for word in words), message


def test_all_problems_of_a_lora_come_at_once() -> None:
    lora = "{rank: 0, lora_r: 3, alpha: -1, dropout: 0.1, target_modules: q_proj}"
    messages = problems(changed(("      name: agent\n", f"      name: agent\n      lora: {lora}\n")))
    names = [message.split(": ")[1].rpartition(".")[2] for message in messages]
    assert names == ["rank", "lora_r", "alpha", "target_modules"]


def test_each_name_of_another_harness_leads_to_a_field() -> None:
    schema, fields = Config.model_json_schema(), [*Config.model_fields]
    for section in schema["$defs"].values():
        fields += section.get("properties", {})
    for ours in other_harnesses.FILE_NAMES.values():
        for path in re.findall(r"\b(?:finetuning|trainer_adapters|eval|trajectory_builders)\.[\w.]+", ours):
            assert {*path.split(".")} - {"NAME"} <= {*fields}, path


@pytest.mark.parametrize(
    "text", ["llms: {}\n", "a: 1\nb: [2]\n", "llms: 1\nworkflow: 2\neval: 3\nfinetuning: 4\ntrainers: 5\n"]
)
def test_nothing_raises_another_error(text: str) -> None:
    assert problems(text) and all(message.startswith("f.yml:") for message in problems(text))


@pytest.mark.parametrize(
    "name",
    [
        *("workflow", "eval", "finetuning", "trainers", "trajectory_builders", "trainer_adapters", "llms"),
        *("llms.policy.model_name", "finetuning.trainer_adapter", "finetuning.reward_function.name"),
        *("trainer_adapters.adapter.backend", "finetuning.target_functions", "finetuning.target_model"),
    ],
)
def test_any_value_anywhere_is_checked(name: str) -> None:
    Path("f.yml").write_text(GOOD)
    for value in (None, 3, "text", [], [["x"]], {}, {"x": None}, {"_type": 3}, {"general": None}):
        try:
            check(read(Path("f.yml"), [("finetuning.target_model", "none"), (name, value)]))
        except WrongInput as error:
            assert all(problem.startswith(("f.yml:", "-o ")) for problem in error.problems), error.problems


def test_a_secret_is_in_no_sentence() -> None:
    messages = problems(changed(("    model_name: agent", "    api_key: 123456")))
    assert messages == ["f.yml:4:5: llms.policy.api_key: must be a valid string"]


def test_a_programs_dictionary_is_checked_too() -> None:
    with pytest.raises(WrongInput, match="configuration: workflow: is missing"):
        check(of_dict({"eval": {}, "finetuning": {"enabled": True}}))


def test_the_toolkits_components_are_known_with_it() -> None:
    text = changed(("agent.py:answer", "react_agent"), ("_type: exact_match", "_type: trajectory"))
    assert len(problems(text)) == 2 and "need nvidia-nat-core and nvidia-nat-eval" in problems(text)[0]
    assert problems(text, toolkit=fake_toolkit) == []
    messages = problems(text.replace("react_agent", "react_agnt"), toolkit=fake_toolkit)
    assert len(messages) == 1 and "did you mean 'react_agent'?; known: command, react_agent, " in messages[0]


def test_the_files_of_the_example() -> None:
    names = ["art_tic_tac_toe", "art_position_value", "art_tools", "art_right_answer"]
    for file in (Path(__file__).parents[3] / "examples/nemo_agent_toolkit/configs").glob("*.yml"):
        document = read(file)
        assert without_effect(check(document, lambda kind: names)) == ["eval.general.output_dir"]
        assert policy_llm(document.tree) == "training_llm"


POLICIES: list[tuple[dict[str, str | None], str | None, str | None]] = [
    ({}, None, None),
    ({"a": "gpt"}, None, "a"),
    ({"a": None}, None, "a"),
    ({"a": "gpt", "b": "agent"}, None, "b"),
    ({"a": "gpt", "b": "trainer_project/agent"}, None, "b"),
    ({"a": "art/tiny", "b": "gpt"}, None, "a"),
    ({"a": "agent", "b": "art/tiny"}, None, "a and b could both be"),
    ({"a": "gpt", "b": "gemini"}, None, "none of a, b is"),
    ({"a": "agent", "b": "art/tiny"}, "b", "b"),
    ({"a": "agent", "b": "art/tiny"}, "agent", "a"),
    ({"a": "gpt", "b": "gpt"}, "gpt", "a and b have the model_name"),
    ({"a": "gpt"}, "gtp", "did you mean 'gpt'?"),
    ({}, "gpt", "there are none"),
]


@pytest.mark.parametrize(("llms", "target", "expected"), POLICIES)
def test_the_policys_llm(llms: dict[str, str | None], target: str | None, expected: str | None) -> None:
    sections = {key: {"_type": "openai", "model_name": name} for key, name in llms.items()}
    document = read_good(llms=sections, target_model=target)
    if expected is None or expected in llms:
        check(document)
        assert policy_llm(document.tree) == expected
    else:
        with pytest.raises(WrongInput, match="finetuning.target_model: .*" + expected.replace("?", r"\?")):
            check(document)


def read_good(*, llms: object, target_model: str | None) -> Any:
    Path("f.yml").write_text(GOOD)
    return read(Path("f.yml"), [("llms", llms), ("finetuning.target_model", target_model)])


def test_fields_without_effect_are_listed() -> None:
    text = changed(
        ("agent.py:answer", "agent.py:answer\n  llm: policy"),
        ("    max_concurrency: 16", "    workflow_alias: x\n    profiler: {}"),
        (
            "      name: agent\n",
            "      name: agent\n      init_args: {dtype: x, max_seq_length: 9}\n      server_config: {}\n"
            "      lora: {rank: 4, lora_dropout: 0.05}\n",
        ),
        ("      learning_rate: 1e-5", "      learning_rate: 1e-5\n      weight_decay: 0.1"),
        ("_type: exact_match", "_type: agent.py:score\n      strict: true"),
        ("llms:\n", "general: {telemetry: {}}\nllms:\n"),
    )
    names = without_effect(config_of(text))
    assert names == [
        "general",
        "eval.general.workflow_alias",
        "trainer_adapters.adapter.backend.lora.lora_dropout",
        "trainer_adapters.adapter.backend.init_args.dtype",
        "trainer_adapters.adapter.backend.server_config",
        "trainer_adapters.adapter.training.weight_decay",
        "workflow.llm",
        "eval.evaluators.right.strict",
    ]
    assert other_harnesses.with_remedy(names[2]).endswith("lora_dropout (adapters are trained without dropout)")
    assert "general" not in without_effect(
        config_of(text.replace("agent.py:answer", "react_agent"), toolkit=fake_toolkit)
    )


def test_nvidias_fields_that_are_like_ours_are_no_misspelt_ones() -> None:
    fields = ("adam_epsilon", "max_steps", "lr_scheduler_type", "warmup_ratio", "save_steps", "auto_find_batch_size")
    added = "".join(f"\n      {name}: 1" for name in fields)
    names = without_effect(config_of(changed(("learning_rate: 1e-5", f"learning_rate: 1e-5{added}"))))
    assert names == [f"trainer_adapters.adapter.training.{name}" for name in fields]
    remedies = [other_harnesses.with_remedy(name).partition(" (here it is ")[2] for name in names]
    known = [
        "finetuning.num_epochs)",
        "trainer_adapters.NAME.training.schedule)",
        "trainer_adapters.NAME.training.warmup_steps)",
    ]
    assert [remedies[0], remedies[4].startswith("nothing"), remedies[5]] == ["", True, ""] and remedies[1:4] == known


def test_a_check_imports_little() -> None:
    Path("f.yml").write_text(changed(("  num_epochs: 3", "  num_epoch: 3")))
    program = (
        "import sys\nfrom pathlib import Path\nfrom art.finetune import checking, reading\n"
        "try: checking.check(reading.read(Path('f.yml')))\n"
        "except checking.WrongInput as error: print(error)\n"
        "print(sorted({'openai', 'torch', 'agent', 'matplotlib', 'polars'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == [
        "f.yml:40:3: finetuning.num_epoch: unknown key: did you mean 'num_epochs'?",
        "[]",
    ]
