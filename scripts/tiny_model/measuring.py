"""Success rates of the model on held-out chats of every skill, sampled at temperature 1."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from tiny_model import games, talk, tools
from tiny_model.chats import Chat
from tiny_model.words import Message, Rng, make_rng, system_turn

BATCH_ROWS = 64
YES_NO_MAYBE_REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
"""The rewards of the yes-no-maybe example."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The model and its tokenizer, ready to answer batches of chats."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerBase

    def answer(self, chats: list[Chat], max_new_tokens: int, thinking: bool = False) -> list[str]:
        """One sampled answer to each chat at temperature 1, without special tokens."""
        answers: list[str] = []
        for start in range(0, len(chats), BATCH_ROWS):
            answers += self._answer(chats[start : start + BATCH_ROWS], max_new_tokens, thinking)
        return answers

    def _answer(self, chats: list[Chat], max_new_tokens: int, thinking: bool) -> list[str]:
        prompts = [
            str(
                self.tokenizer.apply_chat_template(
                    chat.messages,
                    tools=chat.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=thinking,
                )
            )
            for chat in chats
        ]
        inputs = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        sampled = self.model.generate(  # type: ignore[attr-defined]  # its self is of a class for type checkers only
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
        )
        new_ids = sampled[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new_ids, skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class Rate:
    """One line of the table."""

    skill: str
    what: str
    value: float
    num_samples: int


def measure(sampler: Sampler, seed: int, scale: float = 1.0) -> list[Rate]:
    """The rates of all skills. `scale` multiplies the sample sizes."""
    torch.manual_seed(seed)
    random.seed(seed)
    rates: list[Rate] = []
    measures: tuple[tuple[Callable[[Sampler, Rng, int], list[Rate]], int], ...] = (
        (measure_yes_no_maybe, 1200),
        (measure_tictactoe, 200),
        (measure_2048, 200),
        (measure_single_calls, 400),
        (measure_parallel_calls, 100),
        (measure_direct_answers, 100),
        (measure_copies, 300),
        (measure_system_rules, 200),
        (measure_thinking, 100),
    )
    for measure_skill, num_samples in tqdm(measures):
        rng = make_rng(f"{seed}/{measure_skill.__name__}", held_out=True)
        rates += measure_skill(sampler, rng, max(8, int(num_samples * scale)))
    return rates


def yes_no_maybe_prompts() -> list[tuple[str, tuple[str, ...]]]:
    """The example's family of prompts, with the words that each offers."""
    offers = [words for size in (2, 3) for words in permutations(("yes", "no", "maybe"), size)]
    prefixes = ("respond with", "just respond with", "answer with", "respond with one of")
    return [
        (talk.yes_no_maybe_prompt(prefix, list(words), quote, joiner), words)
        for prefix, words, quote, joiner in product(prefixes, offers, ("", "'", '"'), (None, " or "))
    ]


def measure_yes_no_maybe(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Form, shares and mean reward over the prompts, and the mean of each set of words."""
    asked = rng.choices(yes_no_maybe_prompts(), k=num_samples)
    answers = sampler.answer([_asked(prompt) for prompt, _ in asked], 8)
    rates = [
        _rate(
            "yes/no/maybe",
            "one of the three words",
            [one in YES_NO_MAYBE_REWARDS for one in answers],
        ),
        _mean("yes/no/maybe", "mean reward (.5 / .75 / 1)", [_reward(one) for one in answers]),
    ]
    by_words: dict[frozenset[str], list[str]] = {}
    for (_, words), answer in zip(asked, answers, strict=True):
        by_words.setdefault(frozenset(words), []).append(answer)
    for words, word_answers in sorted(by_words.items(), key=lambda item: -len(item[0])):
        name = ", ".join(word for word in YES_NO_MAYBE_REWARDS if word in words)
        rates.append(_mean("yes/no/maybe", f"mean reward, offered {name}", [_reward(one) for one in word_answers]))
        if len(words) == 3:
            rates += [
                _rate("yes/no/maybe", f"share of {word}, offered {name}", [a == word for a in word_answers])
                for word in YES_NO_MAYBE_REWARDS
            ]
    return rates


def _reward(answer: str) -> float:
    return YES_NO_MAYBE_REWARDS.get(answer, 0.0)


def _asked(prompt: str) -> Chat:
    return Chat([{"role": "user", "content": prompt}])


@dataclass(slots=True)
class Game:
    """A game of tic-tac-toe between the model and a random player."""

    symbol: str
    rows_and_columns: bool
    board: games.Board
    messages: list[Message]
    moves_are_legal: list[bool]
    first_move: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether the model is to move."""
        return all(self.moves_are_legal) and not games.is_over(self.board)


def play_games(sampler: Sampler, rng: Rng, num_games: int, rows_and_columns: bool) -> list[Game]:
    """Plays whole games, half of them as x and half as o. An illegal move ends the game."""
    played = []
    for number in range(num_games):
        symbol = "xo"[number % 2]
        system = games.tictactoe_system(rows_and_columns=rows_and_columns)
        board = games.start_board(rng, symbol)
        opening: list[Message] = [{"role": "system", "content": system}]
        played.append(Game(symbol, rows_and_columns, board, opening, []))
    while running := [game for game in played if game.is_running]:
        for game in running:
            content = games.tictactoe_turn(game.board, game.symbol)
            game.messages.append({"role": "user", "content": content})
        answers = sampler.answer([Chat(game.messages) for game in running], 24)
        for game, answer in zip(running, answers, strict=True):
            _take_turn(rng, game, answer)
    return played


def _take_turn(rng: Rng, game: Game, answer: str) -> None:
    """Puts the model's move on the board and lets the other player reply."""
    cell = games.parse_move(answer)
    in_form = cell is not None and answer == games.move_text(cell, game.rows_and_columns)
    game.first_move = game.first_move or cell
    game.messages.append({"role": "assistant", "content": answer})
    if cell is None or not in_form or cell in game.board:
        game.moves_are_legal.append(False)
        return
    game.moves_are_legal.append(True)
    game.board[cell] = game.symbol
    if not games.is_over(game.board):
        games.play_randomly(rng, game.board, "o" if game.symbol == "x" else "x")


def measure_tictactoe(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Legal moves of whole games in both answer forms, and the results against a random player."""
    played = play_games(sampler, rng, num_samples, rows_and_columns=False)
    other_form = play_games(sampler, rng, num_samples // 4, rows_and_columns=True)
    legal = [is_legal for game in played for is_legal in game.moves_are_legal]
    late = [is_legal for game in played for is_legal in game.moves_are_legal[3:]]
    rates = [
        _rate("tic-tac-toe", "legal moves", legal),
        _rate("tic-tac-toe", "legal moves from the fourth turn on", late),
        _rate("tic-tac-toe", "games without an illegal move", [_legal(game) for game in played]),
    ]
    for symbol, chance in (("x", ".585"), ("o", ".29")):
        won = [games.winner(g.board) == symbol for g in played if g.symbol == symbol]
        rates.append(_rate("tic-tac-toe", f"games won as {symbol} (chance {chance})", won))
    openings = Counter(game.first_move for game in played if game.symbol == "x")
    rates.append(
        Rate(
            "tic-tac-toe",
            "largest share of an opening cell (chance .11)",
            max(openings.values()) / openings.total(),
            openings.total(),
        )
    )
    legal = [is_legal for game in other_form for is_legal in game.moves_are_legal]
    return [*rates, _rate("tic-tac-toe", "legal moves as <row>, <col>", legal)]


def _legal(game: Game) -> bool:
    return all(game.moves_are_legal)


def measure_2048(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Well-formed moves on random boards."""
    system: Message = {"role": "system", "content": games.game_2048_system()}
    boards = [games.random_2048_board(rng) for _ in range(num_samples)]
    chats = [Chat([system, {"role": "user", "content": games.game_2048_turn(board)}]) for board in boards]
    moves = [f"<move>{direction}</move>" for direction in games.DIRECTIONS]
    answers = sampler.answer(chats, 12)
    shares = Counter(answers)
    return [
        _rate("2048", "well-formed moves", [answer in moves for answer in answers]),
        Rate(
            "2048",
            "largest share of a direction (chance .25)",
            max(shares[move] for move in moves) / len(answers),
            len(answers),
        ),
    ]


def parse_calls(answer: str) -> list[dict[str, object]] | None:
    """The calls of an answer, or None if it has anything but well-formed calls."""
    if not re.fullmatch(r"<tool_call>\n.*\n</tool_call>", answer, re.DOTALL):
        return None
    calls = []
    for body in answer[len("<tool_call>\n") : -len("\n</tool_call>")].split("\n</tool_call>\n<tool_call>\n"):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
            return None
        calls.append(call)
    return calls


def _tool_chat(rng: Rng, question: str, needed: tools.Tool) -> Chat:
    offered = tools.offered_tools(rng, [needed])
    user: Message = {"role": "user", "content": question}
    return Chat([*system_turn(rng), user], [tools.tool_schema(rng, tool) for tool in offered])


def _wanted(requests: list[tools.Request]) -> list[dict[str, object]]:
    return [{"name": one.tool.name, "arguments": one.arguments} for one in requests]


def measure_single_calls(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """One call among one to four tools, and the answer after its result."""
    requests = [tools.request_for(rng, tools.random_tool(rng)) for _ in range(num_samples)]
    chats = [_tool_chat(rng, request.question, request.tool) for request in requests]
    calls = [parse_calls(answer) for answer in sampler.answer(chats, 120)]
    named = [
        bool(called) and called[0].get("name") == request.tool.name
        for called, request in zip(calls, requests, strict=True)
    ]
    exact = [called == _wanted([request]) for called, request in zip(calls, requests, strict=True)]
    everyday = [is_exact for is_exact, request in zip(exact, requests, strict=True) if request.tool.questions]
    return [
        _rate("tool calls", "well-formed", [called is not None for called in calls]),
        _rate("tool calls", "right tool", named),
        _rate("tool calls", "right tool and exact arguments", exact),
        _rate("tool calls", "the same, everyday tools only", everyday),
        *_measure_answers(sampler, rng, chats, requests),
    ]


def _measure_answers(sampler: Sampler, rng: Rng, chats: list[Chat], requests: list[tools.Request]) -> list[Rate]:
    """Whether the answers after right calls carry the results."""
    served, results = [], []
    for chat, request in zip(chats, requests, strict=True):
        result, said = tools.result_for(rng, request)
        call: Message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [tools.tool_call(request, "call_0")],
        }
        reply: Message = {"role": "tool", "tool_call_id": "call_0", "content": result}
        served.append(Chat([*chat.messages, call, reply], chat.tools))
        results.append(said)
    answers = sampler.answer(served, 80)
    carried = [said in answer for said, answer in zip(results, answers, strict=True)]
    return [_rate("tool results", "carried into the answer", carried)]


def measure_parallel_calls(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Two calls in one turn."""
    chats, wanted = [], []
    for _ in range(num_samples):
        offered = tools.offered_tools(rng, [tools.random_tool(rng)])
        question, call_turn, *_ = tools.parallel_calls(rng, False, offered)
        schemas = [tools.tool_schema(rng, tool) for tool in offered]
        chats.append(Chat([*system_turn(rng), question], schemas))
        turn_calls = call_turn["tool_calls"]
        assert isinstance(turn_calls, list)
        wanted.append([call["function"] for call in turn_calls])
    calls = [parse_calls(answer) for answer in sampler.answer(chats, 240)]
    return [
        _rate("two calls at once", "well-formed", [called is not None for called in calls]),
        _rate("two calls at once", "both exact", [a == b for a, b in zip(calls, wanted, strict=True)]),
    ]


def measure_direct_answers(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Small talk while tools are offered. The right answer has no call."""
    chats = [
        _tool_chat(rng, str(talk.small_talk(rng)[0]["content"]), tools.random_tool(rng)) for _ in range(num_samples)
    ]
    answers = sampler.answer(chats, 60)
    return [_rate("tools not needed", "answered directly", ["<tool" not in one for one in answers])]


def measure_copies(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """Exact copies, of texts and of fields as JSON."""
    rates = []
    for name, draw in (("copy a text", talk.copy), ("fields as JSON", talk.copy_fields)):
        chats = [draw(rng) for _ in range(num_samples)]
        answers = sampler.answer([Chat(messages[:1]) for messages in chats], 80)
        exact = [answer == messages[1]["content"] for answer, messages in zip(answers, chats, strict=True)]
        rates.append(_rate(name, "exact", exact))
    return rates


def measure_system_rules(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """System prompts with a simple rule."""
    chats = [talk.obeyed_system(rng) for _ in range(num_samples)]
    answers = sampler.answer([Chat(messages[:2]) for messages in chats], 60)
    exact = [answer == messages[2]["content"] for answer, messages in zip(answers, chats, strict=True)]
    return [_rate("system prompt's rule", "followed, answer right", exact)]


def measure_thinking(sampler: Sampler, rng: Rng, num_samples: int) -> list[Rate]:
    """A thought that ends, and then the answer, with the thinking switch on."""
    requests = [tools.request_for(rng, tools.random_tool(rng)) for _ in range(num_samples)]
    chats = [_tool_chat(rng, request.question, request.tool) for request in requests]
    answers = sampler.answer(chats, 160, thinking=True)
    exact = [
        parse_calls(answer.partition("\n</think>\n\n")[2]) == _wanted([request])
        for answer, request in zip(answers, requests, strict=True)
    ]
    asked = rng.choices(yes_no_maybe_prompts(), k=num_samples)
    answers = sampler.answer([_asked(prompt) for prompt, _ in asked], 60, thinking=True)
    words = [one.partition("\n</think>\n\n")[2] in YES_NO_MAYBE_REWARDS for one in answers]
    return [
        _rate("thinking", "a thought, then an exact tool call", exact),
        _rate("thinking", "a thought, then yes, no or maybe", words),
    ]


def _rate(skill: str, what: str, hits: list[bool]) -> Rate:
    return Rate(skill, what, sum(hits) / max(1, len(hits)), len(hits))


def _mean(skill: str, what: str, values: list[float]) -> Rate:
    return Rate(skill, what, sum(values) / max(1, len(values)), len(values))


def rates_table(rates: list[Rate]) -> str:
    """The rates as a Markdown table."""
    lines = ["| skill | measured | rate | n |", "|---|---|---|---|"]
    lines += [f"| {one.skill} | {one.what} | {one.value:.3f} | {one.num_samples} |" for one in rates]
    return "\n".join(lines)
