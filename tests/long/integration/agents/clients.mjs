// Agents of JavaScript libraries: `node clients.mjs CLIENT`. Each line of the input is a question with the model's
// address and the tools, and a line of the output answers it. Tools run where the questions come from: a call is a POST to
// `tools`.

import { createInterface } from "node:readline";

const MAX_TURNS = 4;

async function callTool({ tools }, name, args) {
  const response = await fetch(tools, { method: "POST", body: JSON.stringify({ name, arguments: args }) });
  return response.text();
}

async function openai(ask) {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: ask.base_url, apiKey: ask.api_key });
  const messages = [{ role: "user", content: ask.question }];
  const tools = ask.schemas.map((schema) => ({ type: "function", function: schema }));
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const completion = await client.chat.completions.create({ model: ask.model, messages, tools, max_tokens: ask.max_tokens });
    const { message } = completion.choices[0];
    if (!message.tool_calls?.length) return message.content ?? "";
    messages.push(message);
    for (const call of message.tool_calls) {
      const content = await callTool(ask, call.function.name, JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
  return "";
}

async function vercelTools(ask) {
  const { jsonSchema, tool } = await import("ai");
  return Object.fromEntries(ask.schemas.map(({ name, description, parameters }) =>
    [name, tool({ description, inputSchema: jsonSchema(parameters), execute: (args) => callTool(ask, name, args) })]));
}

async function generate(ask, model) {
  const { generateText, stepCountIs } = await import("ai");
  const { text } = await generateText({
    model, prompt: ask.question, tools: await vercelTools(ask), stopWhen: stepCountIs(MAX_TURNS), maxOutputTokens: ask.max_tokens,
  });
  return text;
}

async function vercel(ask) {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return generate(ask, createOpenAICompatible({ name: "art", baseURL: ask.base_url, apiKey: ask.api_key })(ask.model));
}

async function vercelResponses(ask) {
  const { createOpenAI } = await import("@ai-sdk/openai");
  return generate(ask, createOpenAI({ baseURL: ask.base_url, apiKey: ask.api_key })(ask.model));
}

async function mastra(ask) {
  const { Agent } = await import("@mastra/core/agent");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const model = createOpenAI({ baseURL: ask.base_url, apiKey: ask.api_key }).chat(ask.model);
  const agent = new Agent({ id: "agent", name: "agent", instructions: "", model, tools: await vercelTools(ask) });
  const options = { maxSteps: MAX_TURNS, modelSettings: { maxOutputTokens: ask.max_tokens } };
  return (await agent.generate(ask.question, options)).text;
}

async function langchain(ask) {
  const { createAgent, tool } = await import("langchain");
  const { ChatOpenAI } = await import("@langchain/openai");
  const model = new ChatOpenAI({
    model: ask.model, apiKey: ask.api_key, maxTokens: ask.max_tokens, configuration: { baseURL: ask.base_url },
  });
  const tools = ask.schemas.map(({ name, description, parameters }) =>
    tool((args) => callTool(ask, name, args), { name, description, schema: parameters }));
  const agent = createAgent({ model, tools });
  const state = await agent.invoke({ messages: [{ role: "user", content: ask.question }] }, { recursionLimit: 2 * MAX_TURNS });
  return state.messages.at(-1).text;
}

async function agents(ask) {
  const { Agent, OpenAIProvider, Runner, tool } = await import("@openai/agents");
  const modelProvider = new OpenAIProvider({ baseURL: ask.base_url, apiKey: ask.api_key });
  const tools = ask.schemas.map(({ name, description, parameters }) =>
    tool({ name, description, parameters, strict: false, execute: (args) => callTool(ask, name, args) }));
  const agent = new Agent({ name: "agent", model: ask.model, modelSettings: { maxTokens: ask.max_tokens }, tools });
  const runner = new Runner({ modelProvider, tracingDisabled: true });
  return (await runner.run(agent, ask.question, { maxTurns: MAX_TURNS })).finalOutput;
}

const clients = { openai, vercel, "vercel-responses": vercelResponses, mastra, langchain, agents };
const run = clients[process.argv[2]];
for await (const line of createInterface({ input: process.stdin })) {
  const ask = JSON.parse(line);
  run(ask).then((text) => ({ text }), (error) => ({ error: String(error) }))
    .then((answer) => console.log(JSON.stringify({ id: ask.id, ...answer })));
}
