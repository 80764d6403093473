"""Chats with tools: schemas in the form of several agent frameworks, questions, calls, results and answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiny_model.words import (
    CITIES,
    FIRST_NAMES,
    SENTENCES,
    Message,
    Rng,
    code,
    known_or_rare,
    listed,
    phrase,
    plain_word,
    rare_word,
    whole_number,
)

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool."""

    name: str
    kind: str
    """The kind of the parameter's values: a key of `_VALUES`, or "enum"."""
    options: tuple[str, ...] = ()
    """The values of an enum."""
    required: bool = True

    @property
    def json_type(self) -> str:
        """The parameter's type in JSON schema."""
        return self.kind if self.kind in ("integer", "number", "boolean") else "string"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a chat may offer."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    """Templates of questions with {argument} fields. Empty: the question is composed from the parameters' names."""
    compute: Callable[[Rng, dict[str, Value]], str] | None = None
    """The result text of a call, where it follows from the arguments."""
    topic: str = ""
    """A noun for the result, for answers such as "The {topic} is 5."."""


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request for one tool, and the call that answers it."""

    question: str
    tool: Tool
    arguments: dict[str, Value]


_VALUES: dict[str, Callable[[Rng], Value]] = {
    "city": lambda rng: known_or_rare(rng, CITIES),
    "person": lambda rng: known_or_rare(rng, FIRST_NAMES),
    "code": code,
    "symbol": lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 5))),
    "text": phrase,
    "word": plain_word,
    "date": lambda rng: f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    "email": lambda rng: f"{rare_word(rng)}@{rare_word(rng)}.com",
    "integer": whole_number,
    "number": lambda rng: round(rng.uniform(0, 10 ** rng.randint(1, 3)), rng.randint(1, 2)),
    "boolean": lambda rng: rng.random() < 0.5,
}


def _number(rng: Rng, arguments: dict[str, Value]) -> str:
    return str(abs(whole_number(rng)))


def _weather(rng: Rng, arguments: dict[str, Value]) -> str:
    sky = rng.choice(("sunny", "cloudy", "rain", "snow", "wind", "fog", "clear"))
    degrees = rng.randint(-9, 39)
    return rng.choice(
        (
            f"{sky}, {degrees} degrees",
            f"{sky}",
            f"{degrees}C and {sky}",
            json.dumps({"weather": sky, "temperature": degrees}),
        )
    )


def _sum(rng: Rng, arguments: dict[str, Value]) -> str:
    first, second = (int(value) for value in arguments.values())
    return str(first + second)


def _product(rng: Rng, arguments: dict[str, Value]) -> str:
    first, second = (int(value) for value in arguments.values())
    return str(first * second)


def _difference(rng: Rng, arguments: dict[str, Value]) -> str:
    first, second = (int(value) for value in arguments.values())
    return str(first - second)


def _roll(rng: Rng, arguments: dict[str, Value]) -> str:
    return str(rng.randint(1, 20))


def _finding(rng: Rng, arguments: dict[str, Value]) -> str:
    return phrase(rng, 6)


_A = Parameter("a", "integer")
_B = Parameter("b", "integer")
_CITY = Parameter("city", "city")
_QUERY = Parameter("query", "text")
_CELSIUS = Parameter("unit", "enum", ("celsius", "fahrenheit"), required=False)

EVERYDAY = (
    Tool(
        "add",
        "Add two numbers.",
        (_A, _B),
        (
            "What is {a} plus {b}?",
            "Add {a} and {b}.",
            "{a} + {b} = ?",
            "Please add {a} and {b}",
            "What is the sum of {a} and {b}?",
            "Use add to compute {a} + {b}.",
            "What is {a} + {b}?",
            "What's {a} + {b}?",
            "Calculate {a} plus {b}.",
            "How much is {a} plus {b}?",
            "Sum {a} and {b}",
        ),
        _sum,
        "sum",
    ),
    Tool(
        "multiply",
        "Multiply two numbers.",
        (_A, _B),
        (
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}",
            "{a} * {b} = ?",
            "What is {a} * {b}?",
            "What's {a} times {b}?",
            "Calculate {a} times {b}.",
            "What is the product of {a} and {b}?",
        ),
        _product,
        "product",
    ),
    Tool(
        "subtract",
        "Subtract b from a.",
        (_A, _B),
        ("What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?"),
        _difference,
        "difference",
    ),
    Tool(
        "get_weather",
        "Get the weather in a city.",
        (_CITY,),
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Weather in {city} please",
            "What's the weather like in {city} today?",
            "Do I need a coat in {city}?",
            "Is it cold in {city}?",
            "Tell me the weather in {city}.",
            "I am in {city}. What is the weather?",
        ),
        _weather,
        "weather",
    ),
    Tool(
        "get_weather",
        "Returns the current weather for a place.",
        (_CITY, _CELSIUS),
        (
            "What is the weather in {city}?",
            "What is the weather in {city} in {unit}?",
            "Tell me the weather in {city}, in {unit}.",
        ),
        _weather,
        "weather",
    ),
    Tool(
        "search",
        "Search the web.",
        (_QUERY,),
        (
            "Search for {query}",
            "Search the web for {query}.",
            "Find {query}",
            "Please search: {query}",
            "Look for {query} on the web.",
        ),
        _finding,
    ),
    Tool(
        "lookup",
        "Look up a word or a person.",
        (Parameter("query", "person"),),
        ("Who is {query}?", "Look up {query}.", "What do you know about {query}?"),
        _finding,
    ),
    Tool(
        "get_stock",
        "Get the price of a stock.",
        (Parameter("symbol", "symbol"),),
        (
            "What is the price of {symbol}?",
            "How is the {symbol} stock?",
            "Get the stock price of {symbol}.",
            "What does {symbol} cost?",
            "What is the stock price of {symbol}?",
        ),
        lambda rng, arguments: str(_VALUES["number"](rng)),
        "price",
    ),
    Tool(
        "get_population",
        "Get the population of a city.",
        (_CITY,),
        (
            "How many people live in {city}?",
            "What is the population of {city}?",
            "Population of {city}?",
        ),
        _number,
        "population",
    ),
    Tool(
        "roll_dice",
        "Roll a die.",
        (Parameter("sides", "integer"),),
        (
            "Roll a die with {sides} sides.",
            "Roll a {sides} sided die",
            "Please roll a dice with {sides} sides",
        ),
        _roll,
        "roll",
    ),
    Tool(
        "get_time",
        "Get the time in a city.",
        (_CITY,),
        ("What time is it in {city}?", "Tell me the time in {city}."),
        lambda rng, arguments: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        "time",
    ),
    Tool(
        "get_date",
        "Get the date of today.",
        (),
        ("What date is it?", "What day is it today?", "Tell me the date."),
        lambda rng, arguments: str(_VALUES["date"](rng)),
        "date",
    ),
    Tool(
        "send_message",
        "Send a message to a person.",
        (Parameter("to", "person"), Parameter("text", "text")),
        (
            'Send {to} the message "{text}".',
            "Tell {to}: {text}",
            "Write to {to}: {text}",
        ),
        lambda rng, arguments: rng.choice(("sent", "ok", f"message {code(rng)} sent", "done")),
    ),
)

SUM_TOOLS = EVERYDAY[:2]

_VERBS = listed("get find create update delete check count list open close book cancel read fetch")
_PARAMETER_NAMES = {
    "city": ("city", "location", "place", "destination", "from_city"),
    "person": ("name", "person", "customer", "author", "user"),
    "code": ("id", "code", "order_id", "key", "reference", "ticket"),
    "symbol": ("symbol", "ticker"),
    "text": ("query", "text", "title", "subject", "input", "message", "question"),
    "word": ("word", "item", "topic", "product", "category", "tag"),
    "date": ("date", "day", "start", "end"),
    "email": ("email", "address", "to"),
    "integer": ("count", "limit", "number", "n", "amount", "days", "x", "y", "size", "page"),
    "number": ("price", "weight", "value", "ratio", "height", "temperature"),
    "boolean": ("verbose", "express", "force", "active", "exact", "urgent"),
    "enum": ("mode", "color", "level", "unit", "kind", "status"),
}


_OTHER_PARAMETER_NAMES = (
    {"a": "x", "b": "y", "city": "location", "query": "q", "symbol": "ticker", "sides": "n"},
    {"a": "first", "b": "second", "city": "place", "query": "text", "symbol": "name"},
    {"a": "num1", "b": "num2", "city": "city_name", "query": "term", "sides": "num_sides"},
)


def invented_tool(rng: Rng) -> Tool:
    """A tool with a random name and one to three random parameters."""
    verb = rng.choice(_VERBS) if rng.random() < 0.8 else rare_word(rng)
    noun = plain_word(rng)
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", noun))
    parameters: dict[str, Parameter] = {}
    for kind in rng.choices(list(_PARAMETER_NAMES), k=rng.choice((1, 1, 2, 2, 3))):
        parameter_name = rng.choice(_PARAMETER_NAMES[kind])
        options = tuple({plain_word(rng): None for _ in range(rng.randint(2, 4))})
        parameters[parameter_name] = Parameter(
            parameter_name,
            kind,
            options if kind == "enum" else (),
            required=not parameters or rng.random() < 0.7,
        )
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun}.",
            f"{verb.capitalize()} {noun}",
            f"Tool to {verb} {noun}.",
        )
    )
    return Tool(name, description, tuple(parameters.values()), (), topic=noun)


def _property_schema(rng: Rng, parameter: Parameter, style: str) -> dict[str, object]:
    schema: dict[str, object] = {"type": parameter.json_type}
    words = parameter.name.replace("_", " ")
    if parameter.options:
        schema["enum"] = list(parameter.options)
    if style in ("plain", "adk") and rng.random() < 0.7:
        schema["description"] = rng.choice((f"The {words}", words.capitalize(), f"{words} to use"))
    if style == "pydantic":
        schema["title"] = words.title()
        if not parameter.required:
            schema["default"] = None
    if style == "adk" and parameter.json_type in ("integer", "number") and rng.random() < 0.3:
        schema |= rng.choice(({"format": "int32"}, {"minimum": 0}, {"minimum": 1, "maximum": 99}))
    return dict(sorted(schema.items())) if rng.random() < 0.3 else schema


def tool_schema(rng: Rng, tool: Tool) -> dict[str, object]:
    """The tool as an entry of `tools`, with the keys and key order of some agent framework."""
    style = rng.choice(("plain", "plain", "bare", "pydantic", "adk"))
    properties = {parameter.name: _property_schema(rng, parameter, style) for parameter in tool.parameters}
    required = [parameter.name for parameter in tool.parameters if parameter.required]
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if style != "adk" or rng.random() < 0.5:
        parameters["required"] = required
    if style == "pydantic":
        parameters |= rng.choice(
            (
                {"title": f"{tool.name}_args"},
                {"title": f"{tool.name}_args", "additionalProperties": False},
                {"additionalProperties": False, "$schema": "draft-07"},
            )
        )
    if rng.random() < 0.5:
        parameters = {key: parameters[key] for key in sorted(parameters)}
    function: dict[str, object] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if style == "pydantic" and rng.random() < 0.5:
        function["strict"] = rng.choice((True, False))
    roll = rng.random()
    if roll < 0.1:
        function.pop("description")
    elif roll < 0.3:
        function["description"] = _longer_description(rng, tool)
    return {"type": "function", "function": function}


def _longer_description(rng: Rng, tool: Tool) -> str:
    """A description in the form of a docstring: longer, and sometimes with a list of the arguments."""
    names = "\n".join(f"    {one.name}: {phrase(rng)}" for one in tool.parameters)
    return rng.choice(
        (
            f"{tool.description} {rng.choice(SENTENCES)}",
            f"{tool.description}\n\nArgs:\n{names}\n\nReturns:\n    {phrase(rng)}",
            f"{tool.description} Use it for {phrase(rng)}.",
        )
    )


def _say(rng: Rng, value: Value) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) and rng.random() < 0.1 else str(value)


def request_for(rng: Rng, tool: Tool) -> Request:
    """A question that needs the tool, with the arguments that it states."""
    if tool.questions:
        template = rng.choice(tool.questions)
        chosen = [one for one in tool.parameters if "{" + one.name + "}" in template]
    else:
        template = ""
        chosen = [one for one in tool.parameters if one.required or rng.random() < 0.5]
    arguments = {one.name: rng.choice(one.options) if one.options else _VALUES[one.kind](rng) for one in chosen}
    if template:
        return Request(_worded(rng, template.format(**arguments)), tool, arguments)
    said = [(name, _say(rng, value)) for name, value in arguments.items()]
    if rng.random() < 0.3:
        rng.shuffle(said)
    plain = " and ".join(f"{name} {value}" for name, value in said)
    equal = ", ".join(f"{name}={value}" for name, value in said)
    stated = " and ".join(f"the {name.replace('_', ' ')} is {value}" for name, value in said)
    task = tool.description.rstrip(".")
    question = rng.choice(
        (
            f"{task} with {plain}.",
            f"{task}: {equal}",
            f"Use {tool.name} with {plain}.",
            f"Call {tool.name} with {equal}",
            f"Please use {tool.name}, {stated}.",
            f"{task}, {stated}.",
            f"I need the {tool.topic}: {plain}",
        )
    )
    return Request(_worded(rng, question), tool, arguments)


def _worded(rng: Rng, question: str) -> str:
    """The question, sometimes with polite words or other talk around it."""
    if rng.random() < 0.75:
        return question
    name = known_or_rare(rng, FIRST_NAMES)
    return rng.choice(
        (
            f"Please: {question}",
            f"Hi! {question}",
            f"Hello, I am {name}. {question}",
            f"{question} Thanks!",
            f"{question} Use the tool.",
            f"{rng.choice(SENTENCES)} {question}",
            f"Can you help me? {question}",
        )
    )


def result_for(rng: Rng, request: Request) -> tuple[str, str]:
    """The tool's result, and the words for this result in an answer."""
    if request.tool.compute is not None:
        result = request.tool.compute(rng, request.arguments)
        if result.startswith("{"):
            return result, _spoken(json.loads(result))
    else:
        kind = rng.choice(("city", "person", "code", "text", "integer", "number", "text", "object"))
        if kind == "object":
            fields = {plain_word(rng): _VALUES[rng.choice(("integer", "word", "person"))](rng)}
            fields[rng.choice(("status", "id", "value"))] = rng.choice((code(rng), plain_word(rng)))
            return json.dumps(fields), _spoken(fields)
        result = str(_VALUES[kind](rng))
    return _wrapped(rng, result), result


def _wrapped(rng: Rng, result: str) -> str:
    """The result as plain text, or sometimes as JSON, as tool servers return it."""
    bare = int(result) if result.lstrip("-").isdigit() else result
    return rng.choice(
        (
            *[result] * 12,
            json.dumps({"result": bare}),
            json.dumps({"output": bare}),
            json.dumps({"status": "ok", "result": bare}),
            json.dumps(result),
            json.dumps([{"type": "text", "text": result}]),
        )
    )


def _spoken(fields: dict[str, Value]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def answer_for(rng: Rng, request: Request, said: str) -> str:
    """An answer that carries the tool's result."""
    answers = [
        f"The result is {said}.",
        f"The result is {said}.",
        f"It is {said}.",
        f"The answer is {said}.",
        f"Here is the result: {said}.",
        f"I got {said}.",
        f"The tool says {said}.",
        said,
    ]
    if request.tool.topic:
        answers += [f"The {request.tool.topic} is {said}."] * 4
    city = request.arguments.get("city")
    if isinstance(city, str) and request.tool.topic:
        answers += [f"The {request.tool.topic} in {city} is {said}.", f"{city}: {said}."] * 2
    return rng.choice(answers)


def tool_call(request: Request, call_id: str) -> dict[str, object]:
    """The call that serves the request, as an entry of `tool_calls`."""
    function = {"name": request.tool.name, "arguments": request.arguments}
    return {"id": call_id, "type": "function", "function": function}


def offered_tools(rng: Rng, needed: Sequence[Tool]) -> list[Tool]:
    """The needed tools among others, one to four in random order, no name twice."""
    tools = {tool.name: tool for tool in needed}
    for _ in range(rng.choices((0, 1, 2, 3), (5, 3, 2, 1))[0]):
        other = random_tool(rng)
        tools.setdefault(other.name, other)
    chosen = list(tools.values())[:4]
    rng.shuffle(chosen)
    return chosen


def random_tool(rng: Rng) -> Tool:
    """An everyday tool, at times under other names, or an invented one."""
    if rng.random() < 0.5:
        return invented_tool(rng)
    tool = rng.choice(EVERYDAY)
    return _renamed(rng, tool) if rng.random() < 0.3 else tool


def _renamed(rng: Rng, tool: Tool) -> Tool:
    """The tool with another name for itself and for its parameters."""
    head, *tail = tool.name.split("_")
    name = rng.choice(
        (
            tool.name,
            f"{tool.name}_tool",
            f"my_{tool.name}",
            head + "".join(word.capitalize() for word in tail),
            f"{tail[-1] if tail else head}_{plain_word(rng)}",
        )
    )
    names = rng.choice(_OTHER_PARAMETER_NAMES)
    parameters = tuple(replace(one, name=names.get(one.name, one.name)) for one in tool.parameters)
    fields = {one.name: "{" + names.get(one.name, one.name) + "}" for one in tool.parameters}
    questions = tuple(question.format(**fields) for question in tool.questions)
    return replace(tool, name=name, parameters=parameters, questions=questions)


def _call_turn(requests: list[Request], thinking: bool) -> Message:
    names = " and ".join(request.tool.name for request in requests)
    turn: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [tool_call(request, f"call_{n}") for n, request in enumerate(requests)],
    }
    if thinking:
        turn["reasoning_content"] = f"I call {names}."
    return turn


def _served(rng: Rng, requests: list[Request], thinking: bool) -> list[Message]:
    """The calls of the requests in one turn, the results, and the answer."""
    messages: list[Message] = [_call_turn(requests, thinking)]
    answers = []
    for number, request in enumerate(requests):
        result, said = result_for(rng, request)
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        answers.append(answer_for(rng, request, said))
    answer: Message = {"role": "assistant", "content": " ".join(answers)}
    if thinking:
        answer["reasoning_content"] = "I have the result."
    return [*messages, answer]


def single_call(rng: Rng, thinking: bool, offered: list[Tool]) -> list[Message]:
    """One question, one call, its result and the answer."""
    request = request_for(rng, rng.choice(offered))
    return [{"role": "user", "content": request.question}, *_served(rng, [request], thinking)]


def parallel_calls(rng: Rng, thinking: bool, offered: list[Tool]) -> list[Message]:
    """One question that needs two calls at once, of one tool or of two."""
    first, second = (request_for(rng, rng.choice(offered)) for _ in range(2))
    question = f"{first.question} {rng.choice(('', 'And ', 'Also: ', 'Then '))}{second.question}"
    return [{"role": "user", "content": question}, *_served(rng, [first, second], thinking)]


def failed_call(rng: Rng, thinking: bool, offered: list[Tool]) -> list[Message]:
    """A call whose tool reports an error, which the answer passes on."""
    request = request_for(rng, rng.choice(offered))
    reason = rng.choice(("not found", "no access", "timeout", f"no {plain_word(rng)}", "bad input"))
    answers = (f"Sorry, it failed: {reason}.", f"The tool reports an error: {reason}.")
    answer: Message = {"role": "assistant", "content": rng.choice(answers)}
    if thinking:
        answer["reasoning_content"] = "That is an error."
    return [
        {"role": "user", "content": request.question},
        _call_turn([request], thinking),
        {"role": "tool", "tool_call_id": "call_0", "content": f"Error: {reason}"},
        answer,
    ]


def chained_calls(rng: Rng, thinking: bool) -> list[Message]:
    """A sum or product whose result goes into a second call; needs `SUM_TOOLS` on offer."""
    first_tool, second_tool = rng.choices(SUM_TOOLS, k=2)
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    first = Request("", first_tool, {"a": a, "b": b})
    result, said = result_for(rng, first)
    second = Request("", second_tool, {"a": int(said), "b": c})
    begin = f"{first_tool.name} {a} and {b}".capitalize()
    question = rng.choice(
        (
            f"{begin}, then {second_tool.name} the result and {c}.",
            f"{begin}. Then {second_tool.name} the result with {c}.",
        )
    )
    return [
        {"role": "user", "content": question},
        _call_turn([first], thinking),
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        *_served(rng, [second], thinking),
    ]
