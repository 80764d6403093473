"""Wrong command lines of `art-server`, `art-server host` and `art`."""

from collections.abc import Mapping

from tests.long.misuse.use import Use

LISTENS = r"listening on http://"
SERVER = "art-server --path new --port 0 --inference-port 0"
HOST_KEY = {"keys": "hosts host\n", "key": "hosts\n", "text.bin": "no template"}
HOST = 'art-server host --join "$ART_SERVER_URL" --token-file key --path host'


def server(name: str, wrong: str, cause: str, remedy: str, mended: str, files: Mapping[str, str] | None = None) -> Use:
    """A use whose forms are flags of a server that would start."""
    forms = [f"{SERVER} {flags}".strip() for flags in (wrong, mended)]
    return Use(name, forms[0], cause, remedy, forms[1], files=files or {}, first_sign=LISTENS)


STARTS = [
    server(
        "a flag is misspelt",
        "--max-lora-ranks 8",
        "there is no flag --max-lora-ranks",
        "did you mean --max-lora-rank",
        "--max-lora-rank 8",
    ),
    server(
        "vLLM's flag for the longest sequence",
        "--max-model-len 512",
        "there is no flag --max-model-len",
        "--max-seq-length",
        "--max-seq-length 512",
    ),
    server(
        "vLLM's command `serve`",
        "serve art/tiny",
        "'serve' is no flag",
        "`art-server --base-model NAME` serves a base model",
        "--base-model art/tiny",
    ),
    Use(
        "a port that is taken",
        'art-server --path new --port "${ART_SERVER_URL##*:}"',
        r"--port \d+ on 127.0.0.1: Address already in use",
        "choose another port, or 0 for a free one",
        "art-server --path new --port 0 --inference-port 0",
        first_sign=LISTENS,
    ),
    Use(
        "a port that does not exist",
        "art-server --path new --port 99999",
        "--port: .*65535",
        "less than or equal to 65535",
        "art-server --path new --port 0 --inference-port 0",
        first_sign=LISTENS,
    ),
    server(
        "all addresses without a key",
        "--host 0.0.0.0",
        "can be reached from other machines, so an API key is needed",
        "pass --api-key",
        "--host 0.0.0.0 --api-key secret",
    ),
    server(
        "an address of another machine",
        "--host 192.0.2.1 --api-key secret",
        "--host 192.0.2.1: this machine has no such address",
        "use 127.0.0.1, 0.0.0.0",
        "--host 127.0.0.1 --api-key secret",
    ),
    Use(
        "a file as the server's folder",
        "art-server --path text.bin --port 0",
        "--path: text.bin cannot be made or used",
        "name a folder in which this user may write",
        "art-server --path folder --port 0 --inference-port 0",
        files=HOST_KEY,
        first_sign=LISTENS,
    ),
    Use(
        "the folder of a server that runs",
        'art-server --path "$SERVER_FOLDER" --port 0',
        "another art-server works in",
        "stop it, or give this one another --path",
        "art-server --path folder --port 0 --inference-port 0",
        first_sign=LISTENS,
    ),
    server(
        "a chat template that does not exist",
        "--chat-template chat.jinja",
        r"--chat-template: chat.jinja cannot be read \(No such file or directory\)",
        "name a file with a Jinja template",
        "--chat-template template.jinja",
        {"template.jinja": "{{ messages }}"},
    ),
    server(
        "a file of keys that does not exist",
        "--api-key-file missing",
        r"--api-key-file missing cannot be read \(No such file or directory\)",
        "name a file with lines of the form KEY",
        "--api-key-file keys",
        HOST_KEY,
    ),
    server(
        "a scope that does not exist",
        "--api-key-file keys",
        "--api-key-file keys, line 1: scopes",
        "'infer', 'train', 'host' or 'feedback'",
        "--api-key-file mended",
        {"keys": "secret admin\n", "mended": "secret train\n"},
    ),
    server(
        "a key with the mark of sessions",
        "--api-key my::key",
        "an API key must not contain '::'",
        "which begins a session's name",
        "--api-key my-key",
    ),
    server(
        "a number type that does not exist",
        "--dtype bf16",
        "invalid choice: 'bf16'",
        "bfloat16",
        "--dtype bfloat16",
    ),
    server(
        "an argument of vLLM that the server sets",
        "--engine-arg port=8000",
        "--engine-arg port=8000",
        "write NAME=VALUE with NAME one of .*max_num_seqs",
        "--engine-arg max_num_seqs=8",
    ),
    server(
        "a share without a weight",
        "--share team-a",
        "--share team-a: write",
        "PROJECT=WEIGHT with a number above 0, such as team-a=2",
        "--share team-a=2 --api-key-file keys",
        {"keys": "secret infer,train team-a\n"},
    ),
    server(
        "a share of a project that is not there",
        "--share team-b=2",
        "--share team-b: there is no such project here",
        "register a model in it first, or name it in the line of a key",
        "--share team-b=2 --api-key-file keys",
        {"keys": "secret infer,train team-b\n"},
    ),
    server(
        "no engine at all",
        "--engines 0",
        "--engines 0: something has to sample",
        "use 1 or more, or a key with the scope 'host'",
        "--engines 0 --api-key-file keys",
        HOST_KEY,
    ),
    server(
        "a negative number of engines",
        "--engines -1",
        "--engines: .*greater than or equal to 0",
        "greater than or equal to 0",
        "--engines 1",
    ),
    server(
        "devices for the trainer alone",
        "--train-devices 1",
        "--serve-devices and --train-devices go together",
        "give both or none",
        "--train-devices 1 --serve-devices 0",
    ),
    server(
        "one device for engine and trainer",
        "--train-devices 0 --serve-devices 0",
        "device 0 is in both --serve-devices and --train-devices",
        "name it in one of them",
        "--train-devices 1 --serve-devices 0",
    ),
    server(
        "devices by name",
        "--serve-devices cuda:0 --train-devices cuda:1",
        "'cuda:0' is not a list of numbers",
        "such as 0,2-4",
        "--serve-devices 0 --train-devices 1",
    ),
    server(
        "several jobs at a time on shared devices",
        "--gangs 2",
        "--gangs 2: several jobs train at a time on devices of the trainer's own",
        "add --serve-devices and --train-devices",
        "--gangs 2 --serve-devices 0 --train-devices 1",
    ),
    server(
        "float32 and bfloat16 at once",
        "--exact --dtype bfloat16",
        "--exact computes in float32",
        "leave out --dtype and --trainer-dtype",
        "--exact",
    ),
    server(
        "one adapter in a batch", "--max-loras 1", "--max-loras: .*2", "greater than or equal to 2", "--max-loras 2"
    ),
    server(
        "a tracker of a server that does not exist", "--tracker wandbb", "--tracker.*wandbb", "wandb", "--tracker otlp"
    ),
    server(
        "a base model of a server that does not exist",
        "--base-model ./qwen",
        r"base_model './qwen' cannot be loaded; tried: the folder ./qwen \(it does not exist\)",
        "Name a Hugging Face id that this server can reach, a folder on the server, 'art/tiny'",
        "--base-model art/tiny",
    ),
    server(
        "an adapter as base model",
        "--base-model ./lora",
        "lora.*(is an adapter|adapter_config.json)",
        "name the base model .*`art import DIR",
        "--base-model art/tiny",
        {"lora/adapter_config.json": '{"base_model_name_or_path": "art/tiny"}', "lora/adapter_model.safetensors": ""},
    ),
    server(
        "Unsloth without a GPU",
        "--trainer unsloth --base-model art/tiny",
        "Unsloth trains on a GPU, and this machine has none",
        "use --trainer peft",
        "--trainer peft",
    ),
]

HOSTS = [
    Use(
        "a host with an address without http",
        "art-server host --join 127.0.0.1:7623 --token-file key --path host",
        "--join 127.0.0.1:7623",
        "write an address such as http://gpu-box:7623",
        HOST.replace("ART_SERVER_URL", "KEYED_URL"),
        files=HOST_KEY,
        first_sign="joined http",
    ),
    Use(
        "a host without a key",
        'art-server host --join "$ART_SERVER_URL"',
        "the following arguments are required",
        "required: --token-file",
        HOST.replace("ART_SERVER_URL", "KEYED_URL"),
        files=HOST_KEY,
        first_sign="joined http",
    ),
    Use(
        "a host with an empty file of keys",
        'art-server host --join "$ART_SERVER_URL" --token-file empty --path host',
        "--token-file empty is empty",
        "write a key with the scope 'host' into it",
        'echo hosts > empty; art-server host --join "$KEYED_URL" --token-file empty --path host',
        files={"empty": ""},
        first_sign="joined http",
    ),
    Use(
        "a host that offers nothing",
        f"{HOST} --engines 0 --ranks 0",
        "--engines 0 --ranks 0",
        "offer at least one of them",
        f"{HOST} --engines 1".replace("ART_SERVER_URL", "KEYED_URL"),
        files=HOST_KEY,
        first_sign="joined http",
    ),
    Use(
        "more ranks than cores",
        f"{HOST} --ranks 9999",
        "--ranks 9999: each needs a core, and this machine has",
        r"use --ranks \d+ or fewer",
        f"{HOST} --ranks 1".replace("ART_SERVER_URL", "KEYED_URL"),
        files=HOST_KEY,
        first_sign="joined http",
    ),
    Use(
        "a server that takes no hosts",
        HOST,
        "this server takes no hosts",
        "start it with a key of the scope 'host' in its --api-key-file",
        HOST.replace("ART_SERVER_URL", "KEYED_URL"),
        files=HOST_KEY,
        first_sign="joined http",
    ),
    Use(
        "a host with a key of another scope",
        'art-server host --join "$KEYED_URL" --token-file key --path host',
        "lacks the scope 'host'",
        "add it in the server's key file",
        'art-server host --join "$KEYED_URL" --token-file mended --path host',
        files={"key": "infer-only\n", "mended": "hosts\n"},
        first_sign="joined http",
    ),
]

KEPT = "tests/kept"
PEFT = '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}'

LOOKS = [
    Use("a command is misspelt", "art statuss", "invalid choice: 'statuss'", "did you mean status", "art status"),
    Use(
        "a command of others",
        "art train config.yml",
        "invalid choice: 'train'",
        "here it is finetune",
        "art finetune --schema > schema.json",
    ),
    Use(
        "a server's address without http",
        "art status --url 127.0.0.1:7623",
        "--url '127.0.0.1:7623' must begin with http://",
        "http://",
        'art status --url "$ART_SERVER_URL"',
    ),
    Use(
        "a server that is not there",
        "art status --url http://127.0.0.1:9",
        "no answer from http://127.0.0.1:9",
        "start art-server there, or name another server with --url or a folder with --path",
        'art status --url "$ART_SERVER_URL"',
    ),
    Use(
        "a folder that is not there",
        "art runs --path missing",
        "there is no folder missing",
        "name the folder of a server with --path, or a server with --url",
        'art runs --path "$SERVER_FOLDER"',
    ),
    Use(
        "a model that is not there",
        "art show tests/kpet",
        "'tests/kpet' is no model",
        "did you mean 'tests/kept'",
        f"art show {KEPT}",
    ),
    Use(
        "a step without rollouts",
        f"art show {KEPT}@9",
        "has no rollouts of split 'train' at step 9",
        "newest steps with rollouts: 1",
        f"art show {KEPT}@1",
    ),
    Use(
        "a step that is no number",
        f"art show {KEPT}@first",
        "'first' is no step",
        f"write {KEPT}@NUMBER",
        f"art show {KEPT}@latest",
    ),
    Use(
        "a split that is not there",
        f"art show {KEPT} --split validation",
        "no rollouts of split 'validation'",
        "splits: .*train",
        f"art show {KEPT} --split train",
    ),
    Use(
        "a rollout without its group",
        f"art show {KEPT} --rollout 0",
        "--rollout shows one rollout of a group in full",
        "add --group G",
        f"art show {KEPT} --rollout 0 --group 0",
    ),
    Use(
        "a group that is not there",
        f"art show {KEPT} --group 9",
        "has no group 9",
        f"`art show {KEPT}@1 --split train` lists what there is",
        f"art show {KEPT}@1 --split train",
    ),
    Use(
        "no rollouts of a group",
        f"art show {KEPT} --limit 0",
        "0 must be at least 1",
        "at least 1",
        f"art show {KEPT} --limit 1",
    ),
    Use(
        "a metric that is not there",
        f"art plot {KEPT} --metric reward",
        "no metric 'reward'",
        "metrics: .*train/reward",
        f"art plot {KEPT} --metric train/reward",
    ),
    Use(
        "a chart of one step",
        f"art plot {KEPT}@1",
        "a chart shows all steps",
        f"write {KEPT} without '@1'",
        f"art plot {KEPT}",
    ),
    Use(
        "the queue of a folder",
        "mkdir -p empty/demo/models && art jobs --path empty",
        "only a running server has jobs",
        "start art-server in .*, or name a server with --url",
        'art jobs --url "$ART_SERVER_URL"',
    ),
    Use(
        "a job that is not there",
        "art jobs --cancel 0000",
        "'0000' begins the id of no job in the queue",
        "`art jobs` lists them",
        "art jobs",
    ),
    Use(
        "the page of a folder without models",
        "art view . --no-browser",
        "has no models",
        "name the folder that art-server writes",
        'art view "$SERVER_FOLDER" --no-browser --port 17624',
        first_sign="at http://",
    ),
    Use(
        "the server's own port for the page",
        'art view "$SERVER_FOLDER" --no-browser --port "${ART_SERVER_URL##*:}"',
        "--port .*Address already in use",
        "choose another port, from 1 to 65535",
        'art view "$SERVER_FOLDER" --no-browser --port 17625',
        first_sign="at http://",
    ),
    Use(
        "a key with a character that no key has",
        'ART_API_KEY="$(printf "a\\nb")" art status --url "$ART_SERVER_URL"',
        "ART_API_KEY.*has characters that no key has",
        "set it again",
        'ART_API_KEY=ab art status --url "$ART_SERVER_URL"',
    ),
    Use(
        "no key for a server with keys",
        'art status --url "$KEYED_URL"',
        "no API key",
        "ART_API_KEY",
        'ART_API_KEY=all art status --url "$KEYED_URL"',
    ),
]

TRANSFERS = [
    Use(
        "an export of a model that is not there",
        'art export tests/kpet out --url "$ART_SERVER_URL"',
        "'kpet' is no model",
        "Write PROJECT/NAME",
        f'art export {KEPT} out --url "$ART_SERVER_URL"',
    ),
    Use(
        "an export into a folder that exists",
        f'art export {KEPT} full --url "$ART_SERVER_URL"',
        "full exists already",
        "name a new folder",
        f'art export {KEPT} new --url "$ART_SERVER_URL"',
        files={"full/file": "x"},
    ),
    Use(
        "an export of a step that is not there",
        f'art export {KEPT}@9 out --url "$ART_SERVER_URL"',
        "no step 9",
        "kept steps: ",
        f'art export {KEPT}@1 out --url "$ART_SERVER_URL"',
    ),
    Use(
        "the words of export for an import",
        f"art import {KEPT} lora",
        "required: --model|unrecognized",
        "--model",
        f'art export {KEPT} lora --url "$ART_SERVER_URL" && art import lora --model uses/imported-1 --base-model art/tiny '
        '--url "$ART_SERVER_URL"',
    ),
    Use(
        "an import of a folder that is not there",
        'art import missing --model uses/imported-2 --url "$ART_SERVER_URL"',
        "there is no folder missing",
        "name a folder with adapter_config.json",
        f'art export {KEPT} lora --url "$ART_SERVER_URL" && art import lora --model uses/imported-2 --base-model art/tiny '
        '--url "$ART_SERVER_URL"',
    ),
    Use(
        "an import without a project",
        'art import lora --model imported --base-model art/tiny --url "$ART_SERVER_URL"',
        "'imported' names no project",
        "write PROJECT/NAME",
        f'art export {KEPT} mended --url "$ART_SERVER_URL" && art import mended --model uses/imported-3 --base-model art/tiny '
        '--url "$ART_SERVER_URL"',
        files={"lora/adapter_config.json": PEFT, "lora/adapter_model.safetensors": ""},
    ),
    Use(
        "an import of an adapter that names no base model",
        'art import lora --model uses/imported-4 --url "$ART_SERVER_URL"',
        "the adapter names no base model",
        "pass --base-model",
        f'art export {KEPT} mended --url "$ART_SERVER_URL" && art import mended --model uses/imported-4 --base-model art/tiny '
        '--url "$ART_SERVER_URL"',
        files={"lora/adapter_config.json": PEFT, "lora/adapter_model.safetensors": ""},
    ),
    Use(
        "an import of pickled weights",
        'art import lora --model uses/imported-5 --base-model art/tiny --url "$ART_SERVER_URL"',
        "lora has no adapter_model.safetensors",
        "save the adapter with safe_serialization=True",
        f'art export {KEPT} mended --url "$ART_SERVER_URL" && art import mended --model uses/imported-5 --base-model art/tiny '
        '--url "$ART_SERVER_URL"',
        files={"lora/adapter_config.json": PEFT, "lora/adapter_model.bin": ""},
    ),
    Use(
        "a copy to an address of an unknown kind",
        f'art copy {KEPT} bucket://a/b --url "$ART_SERVER_URL"',
        "bucket://a/b cannot be used",
        "write an address such as s3://bucket/folder or file:///folder",
        f'art copy {KEPT} "file://$PWD/copy" --url "$ART_SERVER_URL"',
    ),
    Use(
        "a copy of a folder without a checkpoint",
        'mkdir -p empty && art copy "file://$PWD/empty" uses/copied --url "$ART_SERVER_URL"',
        "empty holds no complete checkpoint",
        "name an address that `art copy` has written",
        f'art copy {KEPT} "file://$PWD/copy" --url "$ART_SERVER_URL" && art copy "file://$PWD/copy" uses/copied '
        '--url "$ART_SERVER_URL"',
    ),
]

USES = [*STARTS, *HOSTS, *LOOKS, *TRANSFERS]
