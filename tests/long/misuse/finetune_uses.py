"""Wrong files, data and flags of `art finetune` and `art eval`."""

from collections.abc import Mapping

from tests.long.misuse.use import Use

AGENT = """
import os
import random

from openai import AsyncOpenAI


async def answer(question):
    async with AsyncOpenAI() as client:
        completion = await client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": question}], max_tokens=8
        )
    return completion.choices[0].message.content


async def elsewhere(question):
    return "yes"


def shout(question, times):
    return question * times


def score(row, output):
    return float(row["answer"] in output.lower())


def forgetful(row, output):
    row["answer"] in output.lower()


def drawn(row, output):
    return random.random()


def broken(row, output):
    return row["anwser"] in output


text = "no function"
"""
ROWS = """{"id": "a", "question": "respond with yes, no, maybe", "answer": "maybe"}
{"id": "b", "question": "respond with yes or no", "answer": "yes"}
"""
FILE = """workflow:
  _type: agent.py:answer
eval:
  general:
    dataset:
      _type: jsonl
      file_path: rows.jsonl
  evaluators:
    reward:
      _type: agent.py:score
trajectory_builders:
  builder:
    _type: openpipe_art_traj_builder
    num_generations: 2
trainer_adapters:
  adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      name: finetuned
      project: uses
      base_model: art/tiny
trainers:
  trainer:
    _type: openpipe_art_trainer
finetuning:
  enabled: true
  trainer: trainer
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function:
    name: reward
  output_dir: out
"""
FILES = {"agent.py": AGENT, "rows.jsonl": ROWS, "run.yml": FILE}
FUNCTION = "art finetune agent.py:answer"
DATA = "--dataset rows.jsonl --reward agent.py:score --base_model art/tiny"
DRAWN = "-o eval.evaluators.reward._type agent.py:drawn"
"""A reward with which each group has a signal."""
AT_RATE = f"art finetune run.yml {DRAWN} -o trainer_adapters.adapter.training.learning_rate"
CHECK = "art finetune run.yml --check"


def use(name: str, wrong: str, cause: str, remedy: str, mended: str, files: Mapping[str, str] | None = None) -> Use:
    return Use(name, wrong, cause, remedy, mended, files={**FILES, **(files or {})})


def in_file(
    name: str, line: str, wrong: str, cause: str, remedy: str, mended: str = "", *, is_warning: bool = False
) -> Use:
    """A use with another line in the file; without `mended` the line itself is the mended form."""
    files = {**FILES, "wrong.yml": FILE.replace(line, wrong), "mended.yml": FILE.replace(line, mended or line)}
    assert files["wrong.yml"] != FILE, line
    commands = ("art finetune wrong.yml --check", "art finetune mended.yml --check")
    return Use(name, commands[0], cause, remedy, commands[1], files=files, is_warning=is_warning)


FUNCTIONS = [
    use(
        "a file that is not there",
        "art finetune runn.yml --check",
        "no such file: .*runn.yml",
        "did you mean 'run.yml'",
        CHECK,
    ),
    use("no file at all", "art finetune", "give one file", r"art finetune agent.py:function --dataset FILE", CHECK),
    use(
        "a function that is not there",
        f"art finetune agent.py:anwser {DATA} --check",
        "agent.py has no 'anwser'",
        "did you mean 'answer'",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a text in place of a function",
        f"art finetune agent.py:text {DATA} --check",
        "is of type str",
        "name a function or a class",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a function with parameters that nothing gives",
        f"art finetune agent.py:shout {DATA} --check",
        "shout cannot be called, because of its parameter 'times'",
        "the parameters of this workflow can be",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a module that is not installed",
        f"art finetune needs.py:answer {DATA} --check",
        "needs.py cannot be imported: ModuleNotFoundError: No module named 'agent_tools'",
        "install it, or run the command in the folder it is in",
        f"touch agent_tools.py; art finetune needs.py:answer {DATA} --check",
        {"needs.py": "import agent_tools\n" + AGENT},
    ),
    use(
        "a function without its reward",
        f"{FUNCTION} --dataset rows.jsonl --base_model art/tiny",
        "agent.py:answer without a file needs --reward",
        "--reward",
        f"{FUNCTION} --dataset rows.jsonl --base_model art/tiny --reward agent.py:score --check",
    ),
    use(
        "a flag of functions beside a file",
        "art finetune run.yml --learning_rate 1e-4 --check",
        "--learning_rate belong to a function without a file",
        "set them with -o KEY VALUE",
        "art finetune run.yml -o trainer_adapters.adapter.training.learning_rate 1e-4 --check",
    ),
    use(
        "a flag of finetune is misspelt",
        f"{FUNCTION} {DATA} --lerning_rate 1e-4 --check",
        "there is no flag --lerning_rate",
        "did you mean --learning_rate",
        f"{FUNCTION} {DATA} --learning_rate 1e-4 --check",
    ),
    use(
        "a negative learning rate on the command line",
        f"{FUNCTION} {DATA} --learning_rate -1 --check",
        "--learning_rate: .*-1",
        "a number above 0|greater than 0",
        f"{FUNCTION} {DATA} --learning_rate 1 --check",
    ),
    use(
        "no rollouts of a row",
        f"{FUNCTION} {DATA} --num_generations 0 --check",
        "--num_generations: ",
        "at least 1|greater than or equal to 1",
        f"{FUNCTION} {DATA} --num_generations 1 --check",
    ),
    use(
        "a flag of NVIDIA's toolkit for another process",
        "art finetune run.yml --endpoint http://127.0.0.1:8000",
        "--endpoint is refused",
        "one behind HTTP is a function that passes the rollout's address on",
        CHECK,
    ),
    use(
        "a reward that is not there",
        f"{FUNCTION} --dataset rows.jsonl --base_model art/tiny --reward agent.py:scor --check",
        "--reward: agent.py has no 'scor'",
        "did you mean 'score'",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a reward without return",
        f"{FUNCTION} --dataset rows.jsonl --base_model art/tiny --reward agent.py:forgetful --check",
        "forgetful.*None|None.*forgetful|reward.*None",
        "number",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a reward that fails",
        f"{FUNCTION} --dataset rows.jsonl --base_model art/tiny --reward agent.py:broken --check",
        "KeyError: 'anwser'",
        r"\(agent.py:\d+\)",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "a workflow that does not ask the policy",
        f"art finetune agent.py:elsewhere {DATA} --check",
        "can be trained: the workflow's requests went elsewhere",
        "It has to ask OPENAI_BASE_URL=",
        f"{FUNCTION} {DATA} --check",
    ),
]

DATA_SETS = [
    use(
        "data that are not there",
        f"{FUNCTION} --dataset row.jsonl --reward agent.py:score --base_model art/tiny --check",
        "no such file: .*row.jsonl",
        "did you mean 'rows.jsonl'",
        f"{FUNCTION} {DATA} --check",
    ),
    use(
        "data of an unknown kind",
        f"{FUNCTION} --dataset rows.xlsx --reward agent.py:score --base_model art/tiny --check",
        "--dataset rows.xlsx",
        "name a file that ends with .json, .jsonl, .csv, .tsv or .parquet",
        f"{FUNCTION} {DATA} --check",
        {"rows.xlsx": "a sheet"},
    ),
    use(
        "commas inside a CSV's values",
        f"{FUNCTION} --dataset rows.csv --reward agent.py:score --base_model art/tiny --check",
        "line 2 has 4 values for 2 columns",
        "put values with commas in double quotes",
        f"{FUNCTION} --dataset mended.csv --reward agent.py:score --base_model art/tiny --check",
        {
            "rows.csv": "question,answer\nrespond with yes, no, maybe,maybe\n",
            "mended.csv": 'question,answer\n"respond with yes, no, maybe",maybe\n',
        },
    ),
    use(
        "a question in another column",
        f"{FUNCTION} --dataset prompts.jsonl --reward agent.py:score --base_model art/tiny --check",
        "no row has the column 'question'; the columns are prompt, answer",
        "`-o eval.general.dataset.structure.question_key COLUMN`",
        f"{FUNCTION} --dataset prompts.jsonl --reward agent.py:score --base_model art/tiny --check "
        "-o eval.general.dataset.structure.question_key prompt",
        {"prompts.jsonl": '{"prompt": "respond with yes", "answer": "yes"}\n'},
    ),
    use(
        "JSON with an object a line",
        f"{FUNCTION} --dataset rows.json --reward agent.py:score --base_model art/tiny --check",
        "is not JSON",
        "_type: json is a list of objects, _type: jsonl has one object a line",
        f"{FUNCTION} {DATA} --check",
        {"rows.json": ROWS},
    ),
    use(
        "two rows with one id",
        f"{FUNCTION} --dataset twice.jsonl --reward agent.py:score --base_model art/tiny --check",
        "line 2 has the id 'a' of line 1",
        "make the values of 'id' different",
        f"{FUNCTION} {DATA} --check",
        {"twice.jsonl": ROWS.replace('"b"', '"a"')},
    ),
    use(
        "no rows",
        f"{FUNCTION} --dataset empty.jsonl --reward agent.py:score --base_model art/tiny --check",
        "empty.jsonl: has no rows",
        "a row is an object with columns, such as",
        f"{FUNCTION} {DATA} --check",
        {"empty.jsonl": ""},
    ),
    use(
        "empty questions",
        f"{FUNCTION} --dataset blank.jsonl --reward agent.py:score --base_model art/tiny --check",
        "all 1 rows have an empty question",
        "fill the column 'question'",
        f"{FUNCTION} {DATA} --check",
        {"blank.jsonl": '{"question": "", "answer": "yes"}\n'},
    ),
    use(
        "a list that is no conversation",
        f"{FUNCTION} --dataset lists.jsonl --reward agent.py:score --base_model art/tiny --check",
        "column 'question' is a list, and no text",
        "a chat row is a list of messages",
        f"{FUNCTION} --dataset lists.jsonl --reward agent.py:score --base_model art/tiny --check "
        "-o eval.general.dataset.structure.disable true",
        {"lists.jsonl": '{"question": ["respond with yes"], "answer": "yes"}\n'},
    ),
    use(
        "chat rows for a function that gets the last question",
        f"{FUNCTION} --dataset chats.jsonl --reward agent.py:score --base_model art/tiny --check",
        "has 3 messages, and .* gets only the last question",
        "`?messages`?",
        "art finetune chats.py:answer --dataset chats.jsonl --reward agent.py:score --base_model art/tiny --check",
        {
            "chats.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, '
            '{"role": "user", "content": "respond with yes"}], "answer": "yes"}\n',
            "chats.py": AGENT.replace("answer(question)", "answer(messages)").replace(
                'messages=[{"role": "user", "content": question}]', "messages=messages"
            ),
        },
    ),
    use(
        "no rows by a limit",
        f"{CHECK} --limit 0",
        "--limit: must be .*, not the number 0",
        "greater than or equal to 1",
        f"{CHECK} --limit 1",
    ),
    use(
        "an id that no row has",
        f"{CHECK} --id c",
        "no row has the id 'c'",
        "the first ids are a, b|did you mean",
        f"{CHECK} --id b",
    ),
]

FILES_OF_RUNS = [
    in_file(
        "a key of the file is misspelt",
        "  output_dir: out\n",
        "  num_epoch: 3\n",
        "num_epoch",
        "num_epochs",
        "  num_epochs: 3\n",
    ),
    in_file(
        "a section without its indentation",
        "    _type: openpipe_art_trainer\n",
        "  _type: openpipe_art_trainer\n",
        "trainers",
        "_type",
    ),
    in_file(
        "YAML with a tab", "  enabled: true\n", "\tenabled: true\n", r"wrong.yml:\d+:\d+", "look at indentation|tab"
    ),
    in_file("finetuning that is not enabled", "  enabled: true\n", "", "finetuning.enabled: is missing", "add it"),
    in_file(
        "a part that the file does not have", "  trainer: trainer\n", "  trainer: grpo\n", "has no 'grpo'", "trainer"
    ),
    in_file(
        "an unknown type",
        "_type: openpipe_art_trainer\n",
        "_type: openpipe_art_trainr\n",
        "unknown type 'openpipe_art_trainr'",
        "did you mean 'openpipe_art_trainer'",
    ),
    in_file(
        "a variable that is not set",
        "name: finetuned",
        "name: ${RUN_NAME}",
        "RUN_NAME is not set",
        "export it, or write a default",
        "name: ${RUN_NAME:-finetuned}",
    ),
    in_file(
        "another base model than the server's in the file",
        "base_model: art/tiny",
        "base_model: art/tinny",
        "art/tinny",
        "'art/tiny'",
    ),
    in_file(
        "a LoRA rank above the server's in the file",
        "name: finetuned\n",
        "name: finetuned-64\n      lora: {rank: 64}\n",
        "rank 64",
        "--max-lora-rank",
        "name: finetuned-4\n      lora: {rank: 4}\n",
    ),
    in_file(
        "a field of training is misspelt",
        "    backend:\n",
        "    training: {learning_rte: 1}\n    backend:\n",
        "learning_rte",
        "learning_rate",
        "    training: {learning_rate: 1}\n    backend:\n",
    ),
    in_file(
        "axolotl's name of the rank",
        "    backend:\n",
        "    training: {lora_r: 16}\n    backend:\n",
        "trainer_adapters.adapter.training.lora_r: unknown key",
        "here it is trainer_adapters.NAME.backend.lora.rank",
        "    backend:\n      lora: {rank: 8}\n",
    ),
    in_file(
        "a patience without validations",
        "  output_dir: out\n",
        "  validation: {patience: 3}\n",
        "finetuning.validation.patience",
        "finetuning.validation.dataset",
        "  validation: {patience: 3, dataset: rows.jsonl}\n",
    ),
    in_file(
        "a server that is not there in the file",
        "name: finetuned\n",
        "name: finetuned\n      url: http://127.0.0.1:9\n",
        "http://127.0.0.1:9",
        "[Ss]tart `art-server`",
    ),
    in_file(
        "an address without http in the file",
        "name: finetuned\n",
        "name: finetuned\n      url: 127.0.0.1:7623\n",
        "not the text '127.0.0.1:7623'",
        "must begin with http://",
    ),
    use(
        "an axolotl file",
        "art finetune axolotl.yml --check",
        "axolotl.yml",
        "docs/finetune.md",
        CHECK,
        {"axolotl.yml": "base_model: art/tiny\nadapter: lora\nlora_r: 16\ndatasets:\n  - path: rows.jsonl\n"},
    ),
    use(
        "an override of a section that is not there",
        f"{CHECK} -o structure.question_key prompt",
        "structure",
        "known: .*eval|did you mean|eval.general.dataset.structure",
        f"{CHECK} -o eval.general.dataset.structure.question_key question",
    ),
    use(
        "a file as output folder",
        "art finetune run.yml -o finetuning.output_dir rows.jsonl",
        "finetuning.output_dir: .*rows.jsonl cannot be used",
        "name a folder that can be written",
        f"{CHECK} -o finetuning.output_dir new",
    ),
    use(
        "a command that is not there",
        f"{CHECK} -o workflow.command agnet -o workflow._type command",
        "agnet",
        "install it, or write its path",
        f"{CHECK} -o workflow._type command -o workflow.command 'python agent_main.py'",
        {
            "agent_main.py": "import asyncio, json, sys\nimport agent\nprint(asyncio.run(agent.answer(json.load(sys.stdin)['question'])))\n"
        },
    ),
]

RUNS = [
    use(
        "a sweep of one value",
        "art finetune run.yml --sweep learning_rate=1e-3",
        "--sweep learning_rate=1e-3",
        "give at least two values, such as learning_rate=1e-5,1e-4",
        "art finetune run.yml --sweep learning_rate=1e-3,2e-3 -o eval.evaluators.reward._type agent.py:drawn -o finetuning.num_epochs 1 -o trainer_adapters.adapter.backend.name swept",
    ),
    use(
        "a sweep of a field that is not there",
        "art finetune run.yml --sweep lr=1e-3,1e-4",
        "--sweep lr: no such field",
        "write a name of docs/train-config.md",
        "art finetune run.yml --sweep passes=1,2 -o eval.evaluators.reward._type agent.py:drawn -o finetuning.num_epochs 1 -o trainer_adapters.adapter.backend.name swept-2",
    ),
    use(
        "a sweep with --check",
        "art finetune run.yml --sweep learning_rate=1e-3,1e-4 --check",
        "--check checks one run",
        "leave --sweep out",
        CHECK,
    ),
    use(
        "another learning rate in a folder that is used",
        f"{AT_RATE} 1e-3 2> first; {AT_RATE} 1e-4",
        "has a run with another configuration",
        "set another finetuning.output_dir, or add --fresh, which .* needs a new name for a trained model",
        f"{AT_RATE} 1e-4 --fresh -o trainer_adapters.adapter.backend.name finetuned-2",
    ),
    use(
        "an evaluation of a step that is not there by art eval",
        "art eval run.yml --step 99",
        "no step 99",
        "there are 0.*base",
        "art eval run.yml --step 0",
    ),
    use(
        "no repetitions",
        "art eval run.yml --reps 0",
        "--reps must be at least 1, not 0",
        "at least 1",
        "art eval run.yml --reps 1",
    ),
    use(
        "a gate that the reward does not pass",
        "art eval run.yml --reps 4 --at_least 2",
        "the lower end of its interval, .* is below --at_least 2",
        r"the lower end of its interval, -?[\d.]+",
        "art eval run.yml --reps 4 --at_least -9",
    ),
    use(
        "labels and a step",
        "art eval run.yml --labels labels.jsonl --step 0",
        "--labels asks no policy",
        "leave out --step",
        "art eval run.yml --labels labels.jsonl",
        {"labels.jsonl": '{"question": "respond with yes", "answer": "yes", "output": "yes", "label": 1}\n' * 1},
    ),
    use(
        "a label that is a word",
        "art eval run.yml --labels labels.jsonl",
        "has the label 'fine'",
        "a label is a number from 0 to 1, or yes or no",
        "art eval run.yml --labels mended.jsonl",
        {
            "labels.jsonl": '{"question": "respond with yes", "answer": "yes", "output": "yes", "label": "fine"}\n',
            "mended.jsonl": '{"question": "respond with yes", "answer": "yes", "output": "yes", "label": "yes"}\n',
        },
    ),
    use(
        "a comparison with something else than results",
        "art eval run.yml --compare rows.jsonl",
        "line 1 is no result of `art eval`",
        "name an eval_results.jsonl",
        "art eval run.yml && art eval run.yml --compare out/eval_results.jsonl",
    ),
]

USES = [*FUNCTIONS, *DATA_SETS, *FILES_OF_RUNS, *RUNS]
