// OpenAI's Node SDK against a gateway: does what its arguments name, and prints what came of it as one line of JSON.
//
//     SPARKS_BASE_URL=… SPARKS_API_KEY=… node oracle.mjs CASE [fields of the request as JSON]
import OpenAI from "openai";

const [, , name, given = "{}"] = process.argv;
const client = new OpenAI({
  baseURL: process.env.SPARKS_BASE_URL, apiKey: process.env.SPARKS_API_KEY, timeout: 20_000,
  maxRetries: Number(process.env.RETRIES ?? 0),
});
const request = { model: "GLM-5.3-Flash-EXL3", messages: [{ role: "user", content: "Hello" }], ...JSON.parse(given) };

const cases = {
  async chat() {
    return await client.chat.completions.create(request);
  },

  async stream() {
    const chunks = [];
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) chunks.push(chunk);
    return { chunks };
  },

  // The helper that adds up a stream, tool calls included.
  async helper() {
    const events = [];
    const stream = client.chat.completions.stream(request);
    stream.on("content", (delta) => events.push(["content", delta]));
    stream.on("tool_calls.function.arguments.done", ({ index, name, arguments: json }) => {
      events.push(["call", index, name, json]);
    });
    const message = await stream.finalMessage();
    const completion = await stream.finalChatCompletion();
    return { message, events, finish: completion.choices[0].finish_reason, usage: await stream.totalUsage() };
  },

  // The helper that also runs the tools and sends their results back.
  async runner() {
    const ran = [];
    const weather = (input) => { ran.push(input); return `sunny in ${input.city}`; };
    const runner = client.chat.completions.runTools({
      ...request, stream: true,
      tools: [{
        type: "function",
        function: { name: "get_weather", function: weather, parse: JSON.parse, parameters: { type: "object" } },
      }],
    });
    return { content: await runner.finalContent(), ran, messages: runner.messages };
  },

  // Reads the first token and leaves.
  async leave() {
    const stream = await client.chat.completions.create({ ...request, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
    return {};
  },

  async models() {
    const list = [];
    for await (const model of client.models.list()) list.push(model);
    return { list, one: await client.models.retrieve(list[0].id) };
  },
};

try {
  console.log(JSON.stringify({ result: await cases[name]() }));
} catch (error) {
  const { status, code, type, param, message, requestID } = error;
  const kind = error.constructor.name;
  console.log(JSON.stringify({ error: { kind, status, code, type, param, message, requestID } }));
}
