import asyncio
import re

import openai
import pytest

import art

pytestmark = pytest.mark.anyio

MESSAGES: art.types.Messages = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def choice(content: str, **more) -> dict:
    message = {"role": "assistant", "content": content}
    return {"index": 0, "finish_reason": "stop", "message": message, **more}


def history(content: str, **more) -> dict:
    entries = [*MESSAGES, choice(content, token_ids=[4, 5], art={"id": content, "step": 3})]
    return {"messages_and_choices": entries, **more}


@pytest.fixture
def chat(server, answer):
    """What every chat request is answered with, under any session."""
    body = {"id": "c", "model": "m", "object": "chat.completion", "choices": [choice("yes")]}
    for path in ("/v1", "/s/one/v1"):
        server.on("POST", f"{path}/chat/completions", answer(body=body))


def keep_session(server, answer, session: str, histories: list[dict], name="agent", **more) -> None:
    reply = {"histories": histories, "num_choices": len(histories), **more}
    server.on("GET", f"/api/models/demo/{name}/sessions/{session}", answer(body=reply))


async def ask(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="agent", messages=MESSAGES)


def sessions_of(server) -> list[str | None]:
    return [r.headers.get("x-art-session") for r in server.requests if r.method == "POST"][1:]


async def test_rollout_names_its_session_in_url_and_key(server, model: art.TrainableModel):
    async with art.rollout(model, "one") as r:
        assert r.base_url == f"{server.url}/s/one/v1"
        assert r.root_url == f"{server.url}/s/one"
        assert r.api_key == "default::one"


async def test_sampling_parameters_go_where_the_sessions_name_goes(server, chat, model: art.TrainableModel):
    named = "one;temperature=0.5;max_tokens=7"
    async with art.rollout(model, "one", sampling={"temperature": 0.5, "max_tokens": 7}) as r:
        assert (r.session, r.base_url, r.api_key) == ("one", f"{server.url}/s/{named}/v1", f"default::{named}")
        await ask(model.openai_client())
    await ask(r.openai_client())
    assert sessions_of(server) == [named, named]
    with pytest.raises(ValueError, match="sampling has no 'top_k'"):
        art.rollout(model, sampling={"top_k": 3})


async def test_the_key_of_a_session_extends_the_one_that_the_server_wants(server):
    async with art.Backend(server.url, "secret") as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        assert art.rollout(model, "one").api_key == "secret::one"


async def test_sessions_are_fresh_and_their_names_checked(model: art.TrainableModel):
    first, second = art.rollout(model), art.rollout(model)
    assert first.session != second.session and re.fullmatch("rollout-[0-9a-f]{32}", first.session)
    with pytest.raises(ValueError, match="session"):
        art.rollout(model, "../x")
    stranger = art.TrainableModel(name="other", project="demo", base_model="art/tiny")
    with pytest.raises(ValueError, match="register"):
        art.rollout(stranger)


async def test_trajectory_holds_the_conversations_of_the_session(server, answer, model: art.TrainableModel):
    keep_session(server, answer, "one", [history("first", tools=TOOLS), history("sub-agent")])
    async with art.rollout(model, "one") as r:
        trajectory = await r.trajectory(0.5, metrics={"turns": 2}, metadata={"city": "Paris"})
    assert trajectory.reward == 0.5
    assert (trajectory.metrics, trajectory.metadata) == ({"turns": 2}, {"city": "Paris"})
    assert trajectory.tools == TOOLS
    sampled = trajectory.messages_and_choices[1]
    assert isinstance(sampled, art.types.Choice) and sampled.message.content == "first"
    dumped = trajectory.model_dump(mode="json")
    assert dumped["messages_and_choices"] == history("first")["messages_and_choices"]
    (other,) = dumped["additional_histories"]
    assert other == {**history("sub-agent"), "tools": None}


async def test_choices_left_out_are_counted(server, answer, model: art.TrainableModel):
    unused = {"not delivered in full": 2, "not continued": 1}
    keep_session(server, answer, "one", [history("first")], unused=unused)
    trajectory = await art.rollout(model, "one").trajectory()
    assert trajectory.metrics == {"unused_choices": 3}
    assert trajectory.logs == [
        "2 captured choices left out: not delivered in full",
        "1 captured choices left out: not continued",
    ]


KINDS = ["main", "side_call", "sub_agent", "side_call"]


@pytest.mark.parametrize(
    ("leave_out", "left", "unused"),
    [
        ((), ["main", "title", "helper", "probe"], {}),
        ({"side_call"}, ["main", "helper"], {"unused_choices": 2}),
        ({"side_call", "sub_agent", "branch"}, ["main"], {"unused_choices": 3}),
    ],
)
async def test_what_the_agent_asks_beside_its_conversation_is_counted_and_may_be_left_out(
    server, answer, model: art.TrainableModel, leave_out, left, unused
):
    histories = [history("main"), history("title"), history("helper"), history("probe")]
    keep_session(server, answer, "one", histories, kinds=KINDS)
    trajectory = await art.rollout(model, "one").trajectory(leave_out=leave_out)
    parts = [trajectory, *trajectory.additional_histories]
    assert [part.messages_and_choices[1].message.content for part in parts] == left
    assert trajectory.metrics == {"side_calls": 2, "sub_agents": 1, **unused}
    if unused:
        assert "2 captured choices left out: the rollout leaves side calls out" in trajectory.logs


async def test_a_branch_that_is_left_out_keeps_the_answers_that_it_shares(server, answer, model: art.TrainableModel):
    keep_session(server, answer, "one", [history("main"), history("main")], kinds=["main", "branch"])
    trajectory = await art.rollout(model, "one").trajectory(leave_out=["branch"])
    assert trajectory.metrics == {"branches": 1}


async def test_a_kind_that_does_not_exist_is_refused(model: art.TrainableModel):
    with pytest.raises(ValueError, match="leave_out has 'titles', which is none of branch, context_reset"):
        await art.rollout(model, "one").trajectory(leave_out=["titles"])  # pyright: ignore[reportArgumentType]


async def test_two_models_in_one_scope_are_captured_apart(
    server, answer, backend: art.Backend, model: art.TrainableModel
):
    opponent = art.TrainableModel(name="opponent", project="demo", base_model="art/tiny")
    await opponent.register(backend)
    keep_session(server, answer, "one", [history("mine")])
    keep_session(server, answer, "one", [history("theirs")], name="opponent")
    async with art.rollout(model, "one") as r:
        mine, theirs = await r.trajectory(1.0), await r.trajectory(0.0, model=opponent)
    assert [t.messages()[-1].get("content") for t in (mine, theirs)] == ["mine", "theirs"]


async def test_clients_of_models_carry_the_session_inside_the_scope_only(server, chat, model: art.TrainableModel):
    client = model.openai_client()
    async with art.rollout(model, "outer"):
        await ask(client)
        async with art.rollout(model, "inner"):
            await ask(client)
            with art.no_capture():
                await ask(client)
        await ask(client)
    await ask(client)
    assert sessions_of(server) == ["outer", "inner", None, "outer", None]


async def test_client_of_a_rollout_is_bound_to_it(server, chat, model: art.TrainableModel):
    r = art.rollout(model, "one")
    async with art.rollout(model, "two"):
        await ask(r.openai_client())
    await ask(r.openai_client())
    async with openai.AsyncOpenAI(base_url=r.base_url, api_key=r.api_key) as client:
        await ask(client)
    assert sessions_of(server) == ["one", "one", None]
    last = server.requests[-1]
    assert last.path == "/s/one/v1/chat/completions"
    assert last.headers["authorization"] == "Bearer default::one"


async def test_scopes_of_concurrent_rollouts_are_apart(server, chat, model: art.TrainableModel):
    async def run(session: str) -> None:
        async with art.rollout(model, session):
            await asyncio.sleep(0.01)
            await ask(model.openai_client())

    await asyncio.gather(*(run(session) for session in "abc"))
    assert sorted(filter(None, sessions_of(server))) == ["a", "b", "c"]


async def test_a_rollout_whose_agent_went_elsewhere_says_so(
    server, answer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
):
    keep_session(server, answer, "one", [])
    r = art.rollout(model, "one")
    trajectory = await r.trajectory()
    assert trajectory.messages_and_choices == []
    assert f"the agent sent no request that names the session. Give it base_url={r.base_url}" in caplog.text
