// Loops of tools, as the SDKs of Node run them, against a gateway: one client with several prompts.
//
//     SPARKS_BASE_URL=…/v1 SPARKS_API_KEY=… node loops.mjs CLIENT {"model": …, "prompts": […], "streamed": true|false}
//
// Prints for each prompt what came of it: {text, thoughts, end, ran: [[tool, input]]}, or {error, ran}.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const [, , name, given] = process.argv;
globalThis.AI_SDK_LOG_WARNINGS = false;         // they would go to stdout
const { prompts, streamed, model } = JSON.parse(given);
const baseURL = process.env.SPARKS_BASE_URL, apiKey = process.env.SPARKS_API_KEY;
const patience = { timeout: 60_000, maxRetries: 0 };
const openai = new OpenAI({ baseURL, apiKey, ...patience });
const anthropic = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey, ...patience });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const names = ["get_weather", "get_time"];
const runner = (ran) => (name) => (input) => { ran.push([name, input]); return `${name} is done`; };

// ---- OpenAI's and Anthropic's own

async function chat(prompt, run) {
  const loop = openai.chat.completions.runTools({
    model, stream: streamed, messages: [{ role: "user", content: prompt }],
    tools: names.map((name) => ({ type: "function", function: { name, function: run(name), parse: JSON.parse, parameters } })),
  });
  const { choices: [{ message, finish_reason }] } = await loop.finalChatCompletion();
  return { text: message.content, thoughts: message.reasoning_content, end: finish_reason };
}

// There is no runner for it: this one does what OpenAI's guide does.
async function responses(prompt, run) {
  const input = [{ role: "user", content: prompt }];
  for (;;) {
    const tools = names.map((name) => ({ type: "function", name, strict: false, parameters }));
    const asked = { model, input, tools, reasoning: { effort: "high", summary: "auto" } };
    const answer = streamed ? await openai.responses.stream(asked).finalResponse() : await openai.responses.create(asked);
    if (answer.error) throw new OpenAI.OpenAIError(answer.error.message);
    input.push(...answer.output);
    const calls = answer.output.filter(({ type, status }) => type === "function_call" && status === "completed");
    for (const { call_id, name, arguments: json } of calls) {
      input.push({ type: "function_call_output", call_id, output: run(name)(JSON.parse(json)) });
    }
    const thoughts = answer.output.flatMap(({ summary = [] }) => summary.map(({ text }) => text)).join("");
    const end = answer.incomplete_details?.reason ?? answer.status;
    if (!calls.length) return { text: answer.output_text, thoughts, end };
  }
}

async function completions(prompt) {
  const answer = await openai.completions.create({ model, prompt, stream: streamed });
  let text = "", end;
  for await (const { choices: [choice] } of streamed ? answer : [answer]) [text, end] = [text + choice.text, choice.finish_reason];
  return { text, end };
}

async function messages(prompt, run) {
  const loop = anthropic.beta.messages.toolRunner({
    model, max_tokens: 2000, stream: streamed, messages: [{ role: "user", content: prompt }],
    thinking: { type: "enabled", budget_tokens: 1024 },
    tools: names.map((name) => ({ name, description: name, input_schema: parameters, run: run(name), parse: (input) => input })),
  });
  const { content, stop_reason } = await loop.runUntilDone();
  const said = (field) => content.map((block) => block[field] ?? "").join("");
  return { text: said("text"), thoughts: said("thinking"), end: stop_reason };
}

// ---- Vercel's

async function vercel(prompt, run, model, providerOptions) {
  const tools = Object.fromEntries(names.map((name) => [name, tool({ inputSchema: jsonSchema(parameters), execute: run(name) })]));
  let failure;
  const asked = {
    model, prompt, tools, maxRetries: 0, stopWhen: stepCountIs(3), providerOptions, onError({ error }) { failure = error; },
  };
  const result = streamed ? streamText(asked) : await generateText(asked);
  if (streamed) await result.consumeStream({ onError(error) { failure ??= error; } });
  if (failure) throw failure;
  return { text: await result.text, thoughts: await result.reasoningText, end: await result.finishReason };
}

const settings = { baseURL, apiKey };
const reasons = { forceReasoning: true, reasoningEffort: "high", reasoningSummary: "auto" };
const sealed = { ...reasons, store: false, include: ["reasoning.encrypted_content"] };
const clients = {
  chat, responses, messages, completions,
  "vercel openai": (prompt, run) => vercel(prompt, run, createOpenAI(settings)(model), { openai: reasons }),
  "vercel openai, nothing stored": (prompt, run) => vercel(prompt, run, createOpenAI(settings)(model), { openai: sealed }),
  "vercel openai, chat": (prompt, run) => vercel(prompt, run, createOpenAI(settings).chat(model)),
  "vercel anthropic": (prompt, run) => vercel(prompt, run, createAnthropic(settings)(model),
    { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } }),
  "vercel compatible": (prompt, run) => vercel(prompt, run, createOpenAICompatible({ ...settings, name: "sparks", includeUsage: true })(model)),
};

async function found(prompt) {
  const ran = [];
  try {
    return { ...await clients[name](prompt, runner(ran)), ran };
  } catch (error) {
    return { error: [error.constructor.name, error.cause?.constructor.name, String(error.message)], ran };
  }
}

console.log(JSON.stringify({ result: await Promise.all(prompts.map(found)) }));
