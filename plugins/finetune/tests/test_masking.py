"""Secrets are in no file and no message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art.finetune
from art.finetune import FinetuneError, NoServer, WrongInput
from art.finetune.masking import is_secret, masked, without_secrets
from plugins.finetune.tests.commands import end, start
from plugins.finetune.tests.policy_server import PolicyServer

SECRETS = (
    *("api_key", "apikey", "API-Key", "X-API-Key", "openai_key", "OPENAI_API_KEY", "access_key", "private_key"),
    *(
        "password",
        "db_password",
        "client_secret",
        "secret_key",
        "Authorization",
        "Proxy-Authorization",
        "auth",
        "token",
    ),
    *("hf_token", "github_token", "Set-Cookie", "credentials", "aws_secret_access_key", "ssh_private_key", "bearer"),
)
PLAIN = (
    *("max_tokens", "pad_token", "eos_token", "tokenizer", "question_key", "answer_key", "id_key", "memory_key", "key"),
    *("authentication", "author", "keys", "num_tokens", "stop_token_ids", "key_metric", "trajectory_key"),
)


def test_names_of_secrets() -> None:
    assert [name for name in SECRETS if not is_secret(name)] == []
    assert [name for name in PLAIN if is_secret(name)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no art-server answers at http://user:sk@host:1/v1", "no art-server answers at http://***@host:1/v1"),
        ("http://sk-only@host", "http://***@host"),
        ("not the text 'user:pw@host'", "not the text '***@host'"),
        ("https://host/v1?api_key=abc&model=m", "https://host/v1?api_key=***&model=m"),
        (
            "OPENAI_API_KEY=abc python agent.py --api-key abc -n 3",
            "OPENAI_API_KEY=*** python agent.py --api-key *** -n 3",
        ),
        ("answered: wrong key sk-abcdef", "answered: wrong key ***"),
        ("{'Authorization': 'Bearer abcdefgh', 'X-API-Key': 'abc', 'n': 1}", None),
        ("X-API-Key: abc", "X-API-Key: ***"),
        (
            "the token limit: raise max_tokens=5 or password rules",
            "the token limit: raise max_tokens=5 or password rules",
        ),
        (
            "out/config.yml:3:5: llms.policy.api_key: must be a text",
            "out/config.yml:3:5: llms.policy.api_key: must be a text",
        ),
        ("a@b.example", "a@b.example"),
        ("(clients: art.Backend(api_key=abc) or ART_API_KEY)", "(clients: art.Backend(api_key=***) or ART_API_KEY)"),
        ("[token=abc]", "[token=***]"),
    ],
)
def test_texts_are_shown_without_secrets(text: str, shown: str | None) -> None:
    if shown is None:
        assert "abc" not in masked(text) and "'n': 1" in masked(text)
    else:
        assert masked(text) == shown
    assert masked(masked(text)) == masked(text)


def test_prompts_stay_as_they_are() -> None:
    prompt = "Log in at http://user:pw@host\nwith --password x"
    assert without_secrets({"prompt": prompt, "urls": ["http://a:b@host/v1"]}) == {
        "prompt": prompt,
        "urls": ["http://host/v1"],
    }


SECRET = "hunter2"


@pytest.mark.anyio
async def test_a_run_writes_and_prints_no_secret(
    policy: PolicyServer, folder: Path, make_file: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"""
        def score(row, output):
            if row["id"] == "row 3":
                raise ValueError("no database at postgres://user:{SECRET}@db/x")
            return float(output == row["answer"])
    """
    url = policy.url.replace("://", f"://user:{SECRET}@")
    headers = {"X-API-Key": SECRET, "Authorization": f"Bearer {SECRET}", "trace": "on"}
    llms = {
        "policy": {"_type": "openai", "model_name": "agent", "api_key": SECRET, "extra_headers": headers},
        "judge": {"_type": "openai", "model_name": "j", "base_url": f"http://user:{SECRET}@judge/v1", "auth": SECRET},
    }
    file = make_file(
        code,
        llms=llms,
        workflow__db=f"postgres://user:{SECRET}@db/x",
        workflow__openai_key=SECRET,
        trainer_adapters__a__backend__url=url,
        finetuning__max_exceptions=100,
    )
    await art.finetune.run(file)
    for written in (folder / "out").iterdir():
        assert SECRET.encode() not in written.read_bytes(), written
    kept = json.loads((folder / "out" / "state.json").read_text())["config"]
    assert kept["llms"]["policy"]["extra_headers"] == {"trace": "on"}
    assert kept["llms"]["judge"]["base_url"] == "http://judge/v1"
    policy.steps.clear()
    code_of_exit, text = await end(await start(folder, file, "--fresh"))
    assert code_of_exit == 0 and SECRET not in text and "postgres://***@db/x" in text
    assert (folder / "out" / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    await policy.stop()
    with pytest.raises(NoServer) as lost:
        await art.finetune.run(file, {"finetuning.num_epochs": 3})
    assert SECRET not in str(lost.value)
    with pytest.raises(WrongInput) as wrong:
        await art.finetune.run(file, {"trainer_adapters.a.backend.url": f"user:{SECRET}@host"})
    assert SECRET not in str(wrong.value)
    assert SECRET not in "".join(capfd.readouterr())


def test_errors_have_no_secrets() -> None:
    assert str(FinetuneError("at http://a:b@host")) == "at http://***@host"
