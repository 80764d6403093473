"""The Python of docs/evaluation.md runs in its order, against a server whose base model is always wrong, whose newest
step is right every second time, and whose numbered steps are always right."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import art

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MODEL = "/api/models/demo/agent"


@pytest.fixture
def names(server, answer, model: art.TrainableModel) -> dict[str, Any]:
    """What the snippets take for granted. The server trains one step for each call, and step 20 is its best."""
    info: dict[str, Any] = {"name": "agent", "project": "demo", "base_model": "art/tiny"}
    info |= {"step": 19, "inference_name": "demo/agent", "lora": {}}
    asked: list[str] = []

    def complete(request):
        asked.append(request.json()["model"])
        right = "@" in asked[-1] or (asked[-1] == "demo/agent" and len(asked) % 2)
        message = {"role": "assistant", "content": "yes" if right else "no"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return answer(body={"id": "c", "object": "chat.completion", "choices": [choice]})

    def train(request):
        info["step"] += 1
        return answer(lines=[{"event": "done", "job_id": "j", "step": info["step"]}])

    def checkpoints(request):
        rows = [
            {"step": step, "created_at": 0.0, "size_bytes": 1, "is_best": step == 20}
            for step in range(info["step"] + 1)
        ]
        return answer(body={"checkpoints": rows, "best_metric": "val/reward"})

    server.on("GET", MODEL, lambda request: answer(body=info))
    server.on("POST", "/v1/chat/completions", complete)
    server.on("POST", f"{MODEL}/train", train)
    server.on("POST", f"{MODEL}/log", answer(body={"step": 1, "metrics": {}}))
    server.on("GET", f"{MODEL}/checkpoints", checkpoints)
    questions = [f"question {number}" for number in range(64)]
    return {
        "art": art,
        "model": model,
        "score": lambda choice: float(choice.message.content == "yes"),
        "questions": questions[:4],
        "train_questions": questions,
        "val_questions": questions[:6],
        "test_questions": questions[6:12],
    }


async def test_the_page_runs_from_top_to_bottom(names: dict[str, Any], server, capsys: pytest.CaptureFixture[str]):
    for snippet in SNIPPETS:
        code = compile(snippet, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result: Any = eval(code, names)
        if result is not None:
            await result
    printed = capsys.readouterr().out
    assert "Evaluation(demo/agent@30: reward 1 (95% 0.5101 to 1, n=4); demo/agent@0: " in printed
    assert "Evaluation(demo/agent@20: reward 1 (95% 0.6097 to 1, n=6))" in printed
    assert names["final"].name == "demo/agent@20" and names["final"].difference.mean == 1
    logged = [request.json() for request in server.sent("POST", f"{MODEL}/log")]
    assert [(body["step"], body["split"]) for body in logged] == [
        (19, "val"),
        (30, "val"),
        (0, "val"),
        (20, "val"),
        (20, "test"),
    ]
    assert len(names["groups"]) == 8
    assert len(server.sent("POST", f"{MODEL}/train")) == 6, "five batches of 24, and the refilled one"
