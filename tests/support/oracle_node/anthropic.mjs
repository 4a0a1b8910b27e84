// Anthropic's Node SDK against a gateway: does what its arguments name, and prints what came of it as one line of JSON.
//
//     SPARKS_BASE_URL=… SPARKS_API_KEY=… node anthropic.mjs CASE [fields of the request as JSON]
import Anthropic from "@anthropic-ai/sdk";

const [, , name, given = "{}"] = process.argv;
const client = new Anthropic({
  baseURL: process.env.SPARKS_BASE_URL, apiKey: process.env.SPARKS_API_KEY, timeout: 20_000,
  maxRetries: Number(process.env.RETRIES ?? 0),
});
const request = {
  model: "GLM-5.3-Flash-EXL3", max_tokens: 2000, messages: [{ role: "user", content: "Hello" }], ...JSON.parse(given),
};

const cases = {
  async message() {
    return await client.messages.create(request);
  },

  async stream() {
    const events = [];
    for await (const event of await client.messages.create({ ...request, stream: true })) events.push(event);
    return { events };
  },

  // The helper that adds up a stream.
  async helper() {
    const said = { text: "", thinking: "", inputs: [] };
    const stream = client.messages.stream(request);
    stream.on("text", (delta) => { said.text += delta; });
    stream.on("thinking", (delta) => { said.thinking += delta; });
    stream.on("contentBlock", (block) => { if (block.type === "tool_use") said.inputs.push([block.name, block.input]); });
    return { message: await stream.finalMessage(), said, requestID: stream.request_id };
  },

  // The helper that also runs the tools and sends their results back.
  async runner() {
    const ran = [];
    const weather = {
      name: "get_weather", description: "The weather", input_schema: { type: "object", properties: { city: { type: "string" } } },
      run: (input) => { ran.push(input); return `sunny in ${input.city}`; }, parse: (input) => input,
    };
    const message = await client.beta.messages.toolRunner({ ...request, tools: [weather] });
    return { message, ran };
  },

  // A conversation of three turns, of which the second one is streamed.
  async thread() {
    const thread = client.beta.messages.thread(request);
    const texts = [await thread.send()];
    texts.push(await thread.stream({ role: "user", content: "And then?" }).finalMessage());
    texts.push(await thread.send({ role: "user", content: "And at last?" }));
    return { texts: texts.map(({ content: [{ text }] }) => text) };
  },

  // Reads the first text and leaves.
  async leave() {
    const stream = await client.messages.create({ ...request, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    return {};
  },

  async count() {
    const { max_tokens, ...rest } = request;
    return await client.messages.countTokens(rest);
  },

  async models() {
    const list = [];
    for await (const model of client.models.list({ limit: 1 })) list.push(model);
    return { list, one: await client.models.retrieve("claude-haiku-4-5") };
  },
};

try {
  console.log(JSON.stringify({ result: await cases[name]() }));
} catch (error) {
  const { status, error: body, message, requestID, type } = error;
  console.log(JSON.stringify({ error: { kind: error.constructor.name, status, type, body, message, requestID } }));
}
