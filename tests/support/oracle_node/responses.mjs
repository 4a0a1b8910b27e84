// OpenAI's Node SDK and Vercel's AI SDK against POST /v1/responses: does what its argument names, and prints what came of it.
//
//     SPARKS_BASE_URL=… SPARKS_API_KEY=… node responses.mjs CASE [fields of the request as JSON]
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [, , name, given = "{}"] = process.argv;
const connection = { baseURL: process.env.SPARKS_BASE_URL, apiKey: process.env.SPARKS_API_KEY };
const client = new OpenAI({ ...connection, timeout: 20_000, maxRetries: 0 });
const { model = "GLM-5.3-Flash-EXL3", input = "Hello", ...fields } = JSON.parse(given);
const request = { model, input, ...fields };

// The AI SDK does not know this model's name, so it has to be told that it reasons.
const vercel = {
  model: createOpenAI(connection).responses(model), prompt: input, maxRetries: 0,
  providerOptions: { openai: {
    store: false, forceReasoning: true, reasoningEffort: "high", reasoningSummary: "auto", include: ["reasoning.encrypted_content"],
  } },
};
const weather = tool({
  description: "The weather", inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } } }),
  execute: ({ city }) => `sunny in ${city}`,
});

const cases = {
  async create() {
    return await client.responses.create(request);
  },

  async stream() {
    const events = [];
    for await (const event of await client.responses.create({ ...request, stream: true })) events.push(event);
    return { events };
  },

  // The helper that adds up a stream.
  async helper() {
    const deltas = [];
    const stream = client.responses.stream(request);
    stream.on("response.output_text.delta", (event) => deltas.push(event.snapshot));
    stream.on("response.function_call_arguments.delta", (event) => deltas.push(event.snapshot));
    return { deltas, final: await stream.finalResponse() };
  },

  async parse() {
    const format = zodTextFormat(z.object({ city: z.string() }), "place");
    return { parsed: (await client.responses.parse({ ...request, text: { format } })).output_parsed };
  },

  async vercel_text() {
    const { text, reasoningText, finishReason, usage } = await generateText(vercel);
    return { text, reasoningText, finishReason, usage };
  },

  async vercel_stream() {
    const result = streamText({ ...vercel, onError() {} });
    const parts = [];
    for await (const part of result.fullStream) parts.push(part.type === "error" ? { type: "error", text: String(part.error) } : part);
    return { parts: parts.map(({ type, text }) => ({ type, text })) };
  },

  // The loop that runs the tools and sends what they gave, with the sealed reasoning.
  async vercel_tools() {
    const { text, steps } = await generateText({ ...vercel, tools: { weather }, stopWhen: stepCountIs(3) });
    return { text, steps: steps.length, results: steps.flatMap((step) => step.toolResults.map((one) => one.output)) };
  },

  async vercel_object() {
    const { output } = await generateText({ ...vercel, output: Output.object({ schema: z.object({ city: z.string() }) }) });
    return { output };
  },
};

try {
  console.log(JSON.stringify({ result: await cases[name]() }));
} catch (error) {
  const { status, statusCode, code, param, message } = error;
  console.log(JSON.stringify({ error: { kind: error.constructor.name, status: status ?? statusCode, code, param, message } }));
}
