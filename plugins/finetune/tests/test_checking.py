"""Checking a file: forty and more broken ones, all problems at once, the policy's LLM, fields without effect."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
AGENT = """\
raise RuntimeError("the check imports nothing of the user")

def answer(question): ...
def two(question, task): ...
def score(row, output): ...
def rows(): ...
"""
VALIDATION = "  num_epochs: 3\n  validation:\n    dataset: "
PARAMETERS = "the parameters of this workflow can be question, row, rollout, llms, seed in any selection"


class FakeToolkit:
    def names(self, kind: Kind) -> list[str]:
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
    assert config.builder.num_generations == 4 and config.adapter.training == {"learning_rate": 1e-5}
    assert policy_llm(config) == "policy" and without_effect(config) == []


BROKEN: list[tuple[str, str, str, str]] = [
    # Each replaces a piece of the good file. Then: place, path, words.
    # fields
    ("finetuning:\n", "finetunning:\n", "33:1: finetunning", "unknown key: did you mean 'finetuning'?"),
    ("  num_epochs: 3", "  num_epoch: 3", "40:3: finetuning.num_epoch", "did you mean 'num_epochs'?"),
    ("  num_epochs: 3", "  zzz: 3", "40:3: finetuning.zzz", "unknown key: known: enabled, trainer, "),
    ("    max_concurrency: 16", "    max_concurency: 16", "9:5: eval.general.max_concurency", "'max_concurrency'"),
    (
        "      file_path: train",
        "      file_pth: train",
        "12:7: eval.general.dataset.file_pth",
        "did you mean 'file_path'?",
    ),
    (
        "      name: agent\n",
        "      nmae: agent\n",
        "26:7: trainer_adapters.adapter.backend.nmae",
        "did you mean 'name'?",
    ),
    (
        "    num_generations: 4",
        "    num_generation: 4",
        "21:5: trajectory_builders.builder.num_generation",
        "did you mean",
    ),
    ("    training:", "    trainning:", "28:5: trainer_adapters.adapter.trainning", "did you mean 'training'?"),
    (
        "_type: exact_match",
        "_type: exact_match\n      case: 1",
        "16:7: eval.evaluators.right.case",
        "known: ignore_case",
    ),
    (
        "_type: openpipe_art_trainer\n",
        "_type: openpipe_art_trainer\n    x: 1\n",
        "33:5: trainers.trainer.x",
        "known: reward",
    ),
    (
        "  num_epochs: 3",
        "  num_epochs: 3\n  num_epochs: 4",
        "41:3: finetuning.num_epochs",
        "is repeated, first in line 40",
    ),
    ("  enabled: true", "  enabled: maybe", "34:3: finetuning.enabled", "must be true or false, not the text 'maybe'"),
    (
        "  num_epochs: 3",
        "  num_epochs: many",
        "40:3: finetuning.num_epochs",
        "must be a whole number, not the text 'many'",
    ),
    (
        "  num_epochs: 3",
        "  num_epochs: 2.5",
        "40:3: finetuning.num_epochs",
        "must be a whole number, not the number 2.5",
    ),
    ("  num_epochs: 3", "  num_epochs: 0", "40:3: finetuning.num_epochs", "must be at least 1, not the number 0"),
    ("  num_epochs: 3", "  num_epochs:", "40:3: finetuning.num_epochs", "must be a whole number, not empty"),
    ("  num_epochs: 3", "  seed: [1]", "40:3: finetuning.seed", "must be a whole number, not a list"),
    (
        "  num_epochs: 3",
        "  target_functions: f",
        "40:3: finetuning.target_functions",
        "must be a list, not the text 'f'",
    ),
    ("  num_epochs: 3", "  target_functions: [f, 3]", "40:25: finetuning.target_functions[1]", "must be text"),
    ("  num_epochs: 3", "  target_functions: []", "40:3: finetuning.target_functions", "nothing would be trained"),
    ("  num_epochs: 3", "  output_dir: [x]", "40:3: finetuning.output_dir", "must be the path of a file, not a list"),
    (
        "  num_epochs: 3",
        "  curriculum_learning:\n    initial_percentile: 1.5",
        "41:5: finetuning.curriculum_learning.initial_percentile",
        "must be at most 1, not the number 1.5",
    ),
    (
        "  num_epochs: 3",
        "  curriculum_learning: {rank: never}",
        "40:25: finetuning.curriculum_learning.rank",
        "must be every_epoch or on_expansion, not the text 'never'",
    ),
    (
        "    max_concurrency: 16",
        "    rollout_timeout_seconds: .inf",
        "9:5: eval.general.rollout_timeout_seconds",
        "must be a finite number",
    ),
    ("      name: agent\n", "      name: 7\n", "26:7: trainer_adapters.adapter.backend.name", "put it in quotes"),
    (
        "      name: agent\n",
        "      name: a b\n",
        "26:7: trainer_adapters.adapter.backend.name",
        "'a b' becomes a folder",
    ),
    ("workflow:\n  _type: agent.py:answer\n", "", "1:1: workflow", "is missing: add this section"),
    ("workflow:\n  _type: agent.py:answer\n", "workflow:\n", "5:1: workflow", "must be a section with keys, not empty"),
    (
        "workflow:\n  _type: agent.py:answer\n",
        "workflow: x\n",
        "5:1: workflow",
        "must be a section with keys, not the text",
    ),
    ("  _type: agent.py:answer", "  llm: policy", "5:1: workflow._type", "is missing: add the type"),
    (
        "      _type: exact_match",
        "      _type: 5",
        "15:7: eval.evaluators.right._type",
        "must be text, not the number 5",
    ),
    ("      _type: jsonl\n", "", "10:5: eval.general.dataset._type", "is missing: add the type (json, jsonl, csv"),
    ("_type: jsonl", "_type: jsnl", "11:7: eval.general.dataset._type", "unknown type 'jsnl': did you mean 'jsonl'?"),
    # names of parts
    ("  enabled: true", "  enabled: false", "34:3: finetuning.enabled", "must be true to train"),
    (
        "  trainer: trainer\n",
        "  trainer: trainr\n",
        "35:3: finetuning.trainer",
        "trainers has no 'trainr': did you mean",
    ),
    ("  trainer: trainer\n", "", "33:1: finetuning.trainer", "is missing: name an entry of trainers (trainer)"),
    (
        "  trajectory_builder: builder",
        "  trajectory_builder: b",
        "36:3: finetuning.trajectory_builder",
        "known: builder",
    ),
    ("  trainer_adapter: adapter", "  trainer_adapter: x", "37:3: finetuning.trainer_adapter", "known: adapter"),
    (
        "trainers:\n  trainer:\n    _type: openpipe_art_trainer\n",
        "",
        "32:3: finetuning.trainer",
        "trainers has no entry",
    ),
    (
        "    name: right",
        "    name: rigth",
        "39:5: finetuning.reward_function.name",
        "eval.evaluators has no 'rigth': did you",
    ),
    (
        "    name: right",
        "    {}",
        "38:3: finetuning.reward_function.name",
        "name an entry of eval.evaluators (right, judged)",
    ),
    (
        "    name: right",
        "    name: right\n    weights: {right: 1}",
        "40:5: finetuning.reward_function.weights",
        "name and weights exclude each other",
    ),
    ("    name: right", "    weights: {wrong: 1}", "39:15: finetuning.reward_function.weights.wrong", "has no 'wrong'"),
    ("    name: right", "    weights: {right: 0}", "39:5: finetuning.reward_function.weights", "whose weight is not 0"),
    (
        "    name: right",
        "    weights: {right: .nan}",
        "39:15: finetuning.reward_function.weights.right",
        "a finite number",
    ),
    (
        "  num_epochs: 3",
        f"{VALIDATION}val.jsonl\n    reward: {{name: judged}}",
        "43:5: finetuning.validation.reward",
        "'judged' is a ruler, which compares the rollouts of a group",
    ),
    (
        "    name: right\n  num_epochs: 3",
        f"    name: judged\n{VALIDATION}val.jsonl",
        "41:3: finetuning.validation.reward",
        "is missing: 'judged', the reward of training, compares",
    ),
    (
        "  num_epochs: 3",
        f"{VALIDATION}val.txt",
        "42:5: finetuning.validation.dataset",
        "must end in .json, .jsonl, .csv",
    ),
    (
        "  num_epochs: 3",
        f"{VALIDATION}[a]",
        "42:5: finetuning.validation.dataset",
        "the path of a file or a section with keys",
    ),
    (
        "  num_epochs: 3",
        f"{VALIDATION}{{_type: csv, file_pth: a}}",
        "42:27: finetuning.validation.dataset.file_pth",
        "did you mean 'file_path'?",
    ),
    ("  num_epochs: 3", "  target_model: gpt", "40:3: finetuning.target_model", "no entry of llms has the name"),
    (
        "    model_name: agent\nworkflow:",
        "  other: {_type: openai, model_name: gpt}\nworkflow:",
        "33:1: finetuning.target_model",
        "none of policy, other is the model that is trained",
    ),
    (
        "workflow:\n",
        "  other: {_type: openai, model_name: art/tiny}\nworkflow:\n",
        "34:1: finetuning.target_model",
        "policy and other could both be the model that is trained",
    ),
    # components
    ("agent.py:answer", "agent.py:anser", "6:3: workflow._type", "agent.py has no 'anser': did you mean 'answer'?"),
    ("agent.py:answer", "agnt.py:answer", "6:3: workflow._type", "no such file: "),
    ("agent.py:answer", "none.module:answer", "6:3: workflow._type", "no module 'none'"),
    ("agent.py:answer", "agent.py:two", "6:3: workflow._type", PARAMETERS),
    (
        "agent.py:answer",
        "comand",
        "6:3: workflow._type",
        "unknown type 'comand'; did you mean 'command'?; known: command",
    ),
    ("_type: exact_match", "_type: agent.py:answer", "15:7: eval.evaluators.right._type", "row, output, trajectory"),
    (
        "_type: exact_match",
        "_type: my_eval",
        "15:7: eval.evaluators.right._type",
        "known: exact_match, json_match, number",
    ),
    ("_type: openpipe_art_trainer\n", "_type: a.py:T\n", "32:5: trainers.trainer._type", "no such file: "),
    ("agent.py:answer", "command", "5:1: workflow.command", "must be a command line, or a list of texts, not empty"),
    (
        "agent.py:answer",
        "command\n  command: no-such-program x",
        "7:3: workflow.command",
        "no program 'no-such-program'",
    ),
    (
        "agent.py:answer",
        'command\n  command: "ls \'a"',
        "7:3: workflow.command",
        "cannot be split into words: No closing",
    ),
    ("agent.py:answer", "command\n  command: ls\n  cwd: .", "8:3: workflow.cwd", "command has no such field"),
    # fields of the server
    (
        "      learning_rate: 1e-5",
        "      learning_rat: 1e-5",
        "29:7: trainer_adapters.adapter.training.learning_rat",
        "unknown field: did you mean 'learning_rate'?",
    ),
    (
        "      learning_rate: 1e-5",
        "      learning_rate: -1",
        "29:7: trainer_adapters.adapter.training.learning_rate",
        "must be greater than 0, not the number -1",
    ),
    (
        "      learning_rate: 1e-5",
        "      learning_rate: fast",
        "29:7: trainer_adapters.adapter.training.learning_rate",
        "must be a number or a list or auto, not the text 'fast'",
    ),
    (
        "      learning_rate: 1e-5",
        "      learning_rate: [1e-5, 3]",
        "29:29: trainer_adapters.adapter.training.learning_rate[1]",
        "must be at most 1",
    ),
    (
        "      learning_rate: 1e-5",
        "      batch_size: 4\n      mini_batches: 2",
        "28:5: trainer_adapters.adapter.training",
        "batch_size and mini_batches both divide the groups",
    ),
    (
        "      name: agent\n",
        "      name: agent\n      engine_args: {gpu_memory_utilization: 90}\n",
        "27:21: trainer_adapters.adapter.backend.engine_args.gpu_memory_utilization",
        "must be at most 1",
    ),
    (
        "      name: agent\n",
        "      name: agent\n      engine_args: {tensor_paralel_size: 2}\n",
        "27:21: trainer_adapters.adapter.backend.engine_args.tensor_paralel_size",
        "did you mean 'tensor_parallel_size'?",
    ),
    (
        "      name: agent\n",
        "      name: agent\n      init_args: {max_seq_len: 10}\n",
        "27:19: trainer_adapters.adapter.backend.init_args.max_seq_len",
        "did you mean 'max_seq_length'?",
    ),
    (
        "      name: agent\n",
        "      port: 70000\n",
        "26:7: trainer_adapters.adapter.backend.port",
        "must be at most 65535",
    ),
    (
        "      name: agent\n",
        "      port: 70\n",
        "25:5: trainer_adapters.adapter.backend.ip",
        "is missing: add the address",
    ),
    (
        "      name: agent\n",
        "      name: agent\n      url: http://a:1\n      ip: b\n",
        "27:7: trainer_adapters.adapter.backend.url",
        "url stands in place of ip and port",
    ),
    (
        "      name: agent\n",
        "      name: agent\n      url: a:7623\n",
        "27:7: trainer_adapters.adapter.backend.url",
        "must begin with http:// or https://",
    ),
    # data sets
    (
        "    dataset:\n      _type: jsonl\n      file_path: train.jsonl\n",
        "",
        "8:3: eval.general.dataset",
        "is missing: add the rows",
    ),
    (
        "      file_path: train.jsonl\n",
        "",
        "10:5: eval.general.dataset.file_path",
        "is missing: add the path of a jsonl file",
    ),
    ("_type: jsonl", "_type: custom", "10:5: eval.general.dataset.function", "is missing: name the function"),
    (
        "_type: jsonl",
        "_type: custom\n      function: agent.py:none",
        "12:7: eval.general.dataset.function",
        "agent.py has no",
    ),
    (
        "_type: jsonl",
        "_type: jsonl\n      function: a.py:f",
        "12:7: eval.general.dataset.function",
        "only for _type: custom",
    ),
    # refused
    ("_type: jsonl", "_type: xls", "11:7: eval.general.dataset._type", "xls files are not read: save the sheet as CSV"),
    (
        "_type: jsonl",
        "_type: jsonl\n      s3: {bucket: b}",
        "12:7: eval.general.dataset.s3",
        "use files on this machine",
    ),
    (
        "    max_concurrency: 16",
        "    output: {s3: {a: b}}",
        "9:14: eval.general.output.s3",
        "use files on this machine",
    ),
    (
        "    max_concurrency: 16",
        "    profiler: {base_metrics: true}",
        "9:5: eval.general.profiler",
        "`nat eval` profiles",
    ),
    (
        "_type: openpipe_art_traj_builder",
        "_type: dpo_traj_builder",
        "20:5: trajectory_builders.builder._type",
        "use openpipe_art_traj_builder",
    ),
    (
        "_type: openpipe_art_trainer_adapter",
        "_type: nemo_customizer_trainer_adapter",
        "24:5: trainer_adapters.adapter._type",
        "use openpipe_art_trainer_adapter",
    ),
    (
        "_type: openpipe_art_trainer\n",
        "_type: nemo_customizer_trainer\n    num_runs: 2\n",
        "32:5: trainers.trainer._type",
        "use openpipe_art_trainer,",
    ),
    # reading
    (
        "    model_name: agent",
        "    model_name: ${NO_SUCH_VARIABLE}",
        "4:5: llms.policy.model_name",
        "is not set: export it",
    ),
    ("llms:\n", "base: none.yml\nllms:\n", "1:1: base", "no such file: "),
    (
        "  num_epochs: 3",
        "  num_epochs: !!python/name:os.x",
        "40:15: finetuning.num_epochs",
        "the tag !!python/name:os.x",
    ),
    ("  num_epochs: 3", "  num_epochs: {", "41:1", "not valid YAML: "),
]


@pytest.mark.parametrize(("old", "new", "place", "words"), BROKEN)
def test_a_broken_file_is_one_sentence_with_its_place(old: str, new: str, place: str, words: str) -> None:
    found = problems(changed((old, new)))
    assert len(found) == 1, "\n".join(found)
    assert found[0].startswith(f"f.yml:{place}: ") and words in found[0] and "\n" not in found[0], found[0]


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = changed(
        ("    model_name: agent", "    model_name: ${NO_SUCH_VARIABLE}"),
        ("agent.py:answer", "agent.py:answr"),
        ("    max_concurrency: 16", "    max_concurrency: lots"),
        ("_type: jsonl", "_type: json\n      filter: 3"),
        ("    num_generations: 4", "    num_generations: 0"),
        ("      learning_rate: 1e-5", "      learning_rate: 5"),
        ("  trainer: trainer\n", "  trainer: none\n  trainer: trainer\n"),
        ("    name: right", "    name: left"),
    )
    found = problems(text, ("finetuning.seed", "-1"), ("eval.generall", "1"))
    assert [each.split(": ")[1] for each in found] == [
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
    assert found[-1] == "-o finetuning.seed: finetuning.seed: must be at least 0, not the number -1"


@pytest.mark.parametrize(
    "text", ["llms: {}\n", "a: 1\nb: [2]\n", "llms: 1\nworkflow: 2\neval: 3\nfinetuning: 4\ntrainers: 5\n"]
)
def test_nothing_raises_another_error(text: str) -> None:
    assert problems(text) and all(each.startswith("f.yml:") for each in problems(text))


@pytest.mark.parametrize(
    "name", ["workflow", "eval", "finetuning", "trainers", "trajectory_builders", "trainer_adapters", "llms"]
)
@pytest.mark.parametrize("value", [None, 3, "text", [], ["x"], {}, {"x": None}, {"_type": 3}, {"general": None}])
def test_any_value_in_any_section_is_checked(name: str, value: object) -> None:
    Path("f.yml").write_text(GOOD)
    document = read(Path("f.yml"), [(name, value)])
    try:
        check(document)
    except WrongInput as error:
        assert all(each.startswith(("f.yml:", "-o ")) for each in error.problems), error.problems


def test_a_secret_is_in_no_sentence() -> None:
    found = problems(changed(("    model_name: agent", "    api_key: [sk-secret]")))
    assert found == ["f.yml:4:5: llms.policy.api_key: must be text"]


def test_a_programs_dictionary_is_checked_too() -> None:
    with pytest.raises(WrongInput, match="configuration: workflow: is missing"):
        check(of_dict({"eval": {}, "finetuning": {"enabled": True}}))


def test_the_toolkits_components_are_known_with_it() -> None:
    text = changed(("agent.py:answer", "react_agent"), ("_type: exact_match", "_type: trajectory"))
    assert len(problems(text)) == 2 and "need nvidia-nat-core and nvidia-nat-eval" in problems(text)[0]
    assert problems(text, toolkit=FakeToolkit()) == []
    found = problems(text.replace("react_agent", "react_agnt"), toolkit=FakeToolkit())
    assert len(found) == 1 and "did you mean 'react_agent'?; known: command, react_agent, " in found[0]


def test_the_files_of_the_example() -> None:
    class Example:
        def names(self, kind: Kind) -> list[str]:
            return ["art_tic_tac_toe", "art_position_value", "art_tools", "art_right_answer"]

    for file in (Path(__file__).parents[3] / "examples/nemo_agent_toolkit/configs").glob("*.yml"):
        config = check(read(file), Example())
        assert policy_llm(config) == "training_llm" and without_effect(config) == []


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
    ({"a": "gpt", "b": "gpt"}, "gpt", "the entries a, b of llms have"),
    ({"a": "gpt"}, "gtp", "did you mean 'gpt'?"),
    ({}, "gpt", "there are none"),
]


@pytest.mark.parametrize(("llms", "target", "expected"), POLICIES)
def test_the_policys_llm(llms: dict[str, str | None], target: str | None, expected: str | None) -> None:
    sections = {key: {"_type": "openai", "model_name": name} for key, name in llms.items()}
    document = read_good(llms=sections, target_model=target)
    if expected is None or expected in llms:
        assert policy_llm(check(document)) == expected
    else:
        with pytest.raises(WrongInput, match="finetuning.target_model: .*" + expected.replace("?", r"\?")):
            check(document)


def read_good(*, llms: object, target_model: str | None) -> Any:
    Path("f.yml").write_text(GOOD)
    return read(Path("f.yml"), [("llms", llms), ("finetuning.target_model", target_model)])


def test_fields_without_effect_are_listed() -> None:
    text = changed(
        ("agent.py:answer", "agent.py:answer\n  llm: policy"),
        ("    max_concurrency: 16", "    workflow_alias: x\n    profiler: {base_metrics: false}"),
        (
            "      name: agent\n",
            "      name: agent\n      init_args: {dtype: x, max_seq_length: 9}\n      server_config: {}\n",
        ),
        ("      learning_rate: 1e-5", "      learning_rate: 1e-5\n      weight_decay: 0.1"),
        ("_type: exact_match", "_type: agent.py:score\n      strict: true"),
        ("llms:\n", "general: {telemetry: {}}\nllms:\n"),
    )
    assert without_effect(config_of(text)) == [
        "eval.general.workflow_alias",
        "eval.general.profiler",
        "trainer_adapters.adapter.backend.server_config",
        "trainer_adapters.adapter.backend.init_args.dtype",
        "trainer_adapters.adapter.training.weight_decay",
        "general",
        "workflow.llm",
        "eval.evaluators.right.strict",
    ]
    assert "general" not in without_effect(
        config_of(text.replace("agent.py:answer", "react_agent"), toolkit=FakeToolkit())
    )


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
