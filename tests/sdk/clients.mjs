// The clients that people use, against a running server: node clients.mjs URL MODULES
// MODULES is a folder with node_modules. Exits with 1 and a line for each failure.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(modules + "/"));
const load = async (name) => (await import(pathToFileURL(require.resolve(name)))).default;
const OpenAI = await load("openai");
const Anthropic = await load("@anthropic-ai/sdk");
const openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });

const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { type: "function", function: { name: "get_weather", description: "Get the weather of a city", parameters: schema } };
const SUM = "What is 17 + 25?", PARIS = "What is the weather in Paris?";
const user = (content) => [{ role: "user", content }];
const ENDLESS = 120_000;  // tokens; the context holds more, and nobody waits for the end
const common = { model: "plankton", temperature: 0 };

const tests = {
  async "openai: models"() {
    const ids = [];
    for await (const model of openai.models.list()) ids.push(model.id);
    assert.deepEqual(ids, ["plankton"]);
    assert.equal((await openai.models.retrieve("plankton")).id, "plankton");
  },
  async "openai: chat and its stream"() {
    const reply = await openai.chat.completions.create({ ...common, messages: user(SUM) });
    assert.match(reply.choices[0].message.content, /42/);
    assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
    let text = "", usage;
    const stream = await openai.chat.completions.create({ ...common, messages: user(SUM), stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, reply.choices[0].message.content);
    assert.equal(usage.completion_tokens, reply.usage.completion_tokens);
  },
  async "openai: the stream helper"() {
    const runner = openai.chat.completions.stream({ ...common, messages: user(SUM) });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    const final = await runner.finalChatCompletion();
    assert.equal(text, final.choices[0].message.content);
    assert.match(text, /42/);
  },
  async "openai: two turns of a tool"() {
    const messages = user(PARIS);
    const first = await openai.chat.completions.create({ ...common, messages, tools: [weather] });
    const call = first.choices[0].message.tool_calls[0];
    assert.equal(first.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "get_weather");
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "18 degrees, sunny" });
    const second = await openai.chat.completions.create({ ...common, messages, tools: [weather] });
    assert.match(second.choices[0].message.content, /18|sunny/);
    assert.ok(second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens);
  },
  async "openai: the tool runner"() {
    let asked;
    const runner = openai.chat.completions.runTools({
      ...common, messages: user(PARIS),
      tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse, function: (args) => { asked = args.city; return "18 degrees, sunny"; } } }],
    });
    assert.match(await runner.finalContent(), /18|sunny/);
    assert.equal(asked, "Paris");
  },
  async "openai: a schema"() {
    const wanted = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"], additionalProperties: false };
    for (const temperature of [0, 2]) {
      const reply = await openai.chat.completions.create({
        ...common, temperature, seed: 3, messages: user(SUM), reasoning_effort: "none",
        response_format: { type: "json_schema", json_schema: { name: "sum", strict: true, schema: wanted } },
      });
      assert.equal(typeof JSON.parse(reply.choices[0].message.content).answer, "number");
    }
    const response = await openai.responses.create({ ...common, input: SUM, reasoning: { effort: "none" },
      text: { format: { type: "json_schema", name: "sum", strict: true, schema: wanted } } });
    assert.equal(typeof JSON.parse(response.output_text).answer, "number");
  },
  async "openai: a call that is required"() {
    const reply = await openai.chat.completions.create({ ...common, messages: user("Hello."), tools: [weather], tool_choice: "required" });
    assert.equal(reply.choices[0].message.tool_calls[0].function.name, "get_weather");
    assert.equal(typeof JSON.parse(reply.choices[0].message.tool_calls[0].function.arguments).city, "string");
  },
  async "openai: stop, limits, log probabilities"() {
    const whole = await openai.chat.completions.create({ ...common, messages: user(SUM), reasoning_effort: "none", logprobs: true, top_logprobs: 2 });
    const text = whole.choices[0].message.content;
    assert.equal(whole.choices[0].logprobs.content.map((t) => t.token).join(""), text);
    const stop = text.slice(4, 7);
    const cut = await openai.chat.completions.create({ ...common, messages: user(SUM), reasoning_effort: "none", stop });
    assert.equal(cut.choices[0].message.content, text.slice(0, text.indexOf(stop)));
    const short = await openai.chat.completions.create({ ...common, messages: user(SUM), max_completion_tokens: 3 });
    assert.equal(short.choices[0].finish_reason, "length");
  },
  async "openai: completions"() {
    const reply = await openai.completions.create({ ...common, prompt: "def add(a, b):\n", max_tokens: 8 });
    assert.ok(reply.choices[0].text.length > 0);
    const many = await openai.completions.create({ ...common, prompt: Array(9).fill("def add(a, b):\n"), max_tokens: 8 });  // four slots
    assert.deepEqual(many.choices.map((c) => [c.index, c.text]), Array.from({ length: 9 }, (_, i) => [i, reply.choices[0].text]));
  },
  async "openai: responses, their stream and a tool"() {
    const tools = [{ type: "function", name: "get_weather", description: "Get the weather of a city", parameters: schema, strict: false }];
    const plain = await openai.responses.create({ ...common, input: SUM, instructions: "Be brief." });
    assert.match(plain.output_text, /42/);
    const stream = openai.responses.stream({ ...common, input: SUM, instructions: "Be brief." });
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    const final = await stream.finalResponse();
    assert.equal(text, plain.output_text);
    assert.equal(final.output_text, text);
    const first = await openai.responses.create({ ...common, input: PARIS, tools });
    const call = first.output.find((item) => item.type === "function_call");
    assert.equal(call.name, "get_weather");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    const second = await openai.responses.create({ ...common, tools, input: [
      { role: "user", content: PARIS }, ...first.output, { type: "function_call_output", call_id: call.call_id, output: "18 degrees, sunny" }] });
    assert.match(second.output_text, /18|sunny/);
  },
  async "openai: a stream of two answers with log probabilities"() {
    const stream = openai.chat.completions.stream({ ...common, messages: user(SUM), n: 2, logprobs: true, reasoning_effort: "none" });
    for (const choice of (await stream.finalChatCompletion()).choices)
      assert.equal(choice.logprobs.content.map((t) => t.token).join(""), choice.message.content);
  },
  async "openai: a call in a stream of responses"() {
    const stream = openai.responses.stream({ ...common, input: PARIS, tools: [{ type: "function", name: "get_weather", strict: true,
      parameters: { ...schema, additionalProperties: false } }] });
    let done;
    stream.on("response.function_call_arguments.done", (event) => (done = event));
    const call = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
    assert.deepEqual([done.arguments, done.item_id, JSON.parse(call.arguments)], [call.arguments, call.id, { city: "Paris" }]);
    const { input_tokens } = await openai.responses.inputTokens.count({ model: "plankton", input: SUM });
    assert.equal(input_tokens, (await openai.responses.create({ ...common, input: SUM })).usage.input_tokens);
  },
  async "openai: errors"() {
    await assert.rejects(openai.chat.completions.create({ ...common, messages: [] }), (e) => e instanceof OpenAI.BadRequestError && e.code === "invalid_value");
    await assert.rejects(openai.chat.completions.create({ ...common, messages: user("word ".repeat(150_000)) }), (e) => e.code === "context_length_exceeded");
    await assert.rejects(openai.models.retrieve("nothing"), (e) => e instanceof OpenAI.NotFoundError);
    await assert.rejects(openai.embeddings.create({ model: "plankton", input: "x" }), (e) => e.status === 501);
  },
  async "openai: abort"() {
    const stream = await openai.chat.completions.create({ ...common, messages: user("Write a long story."), max_tokens: ENDLESS, stream: true, ignore_eos: true });
    let n = 0;
    for await (const _ of stream) if (++n === 5) break;  // closes the connection
    await idle();
    const controller = new AbortController();
    const waiting = openai.chat.completions.create({ ...common, messages: user("Write a long story."), max_tokens: ENDLESS, ignore_eos: true }, { signal: controller.signal });
    setTimeout(() => controller.abort(), 200);  // milliseconds, of minutes
    await assert.rejects(waiting, (e) => e instanceof OpenAI.APIUserAbortError);
    await idle();
  },

  async "anthropic: messages and their stream"() {
    const body = { ...common, max_tokens: 300, messages: user(SUM), thinking: { type: "enabled", budget_tokens: 1024 } };
    const reply = await anthropic.messages.create(body);
    assert.deepEqual(reply.content.map((b) => b.type), ["thinking", "text"]);
    assert.match(reply.content[1].text, /42/);
    assert.equal(reply.stop_reason, "end_turn");
    const blocks = [];
    const stream = anthropic.messages.stream(body);
    stream.on("contentBlock", (block) => blocks.push(block));
    const final = await stream.finalMessage();
    assert.deepEqual(blocks.map((b) => b.type), final.content.map((b) => b.type));
    assert.equal(final.content[1].text, reply.content[1].text);
    assert.equal(final.usage.output_tokens, reply.usage.output_tokens);
  },
  async "anthropic: two turns of a tool"() {
    const tools = [{ name: "get_weather", description: "Get the weather of a city", input_schema: schema }];
    const body = { ...common, max_tokens: 300, tools, messages: user(PARIS) };
    const first = await anthropic.messages.stream(body).finalMessage();
    const use = first.content.find((b) => b.type === "tool_use");
    assert.equal(first.stop_reason, "tool_use");
    assert.deepEqual([use.name, use.input], ["get_weather", { city: "Paris" }]);
    const second = await anthropic.messages.create({ ...body, messages: [...body.messages, { role: "assistant", content: first.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "18 degrees, sunny" }] }] });
    assert.match(second.content.at(-1).text, /18|sunny/);
  },
  async "anthropic: the tool runner, a schema, documents, an answer that was begun"() {
    const body = { ...common, max_tokens: 300 };
    let asked;
    const runner = anthropic.beta.messages.toolRunner({ ...body, messages: user(PARIS), tools: [{ type: "custom", name: "get_weather",
      description: "Get the weather of a city", input_schema: schema, parse: (x) => x, run: (args) => { asked = args.city; return "18 degrees, sunny"; } }] });
    assert.equal((await runner.runUntilDone()).stop_reason, "end_turn");
    assert.equal(asked, "Paris");
    const wanted = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"], additionalProperties: false };
    const parsed = await anthropic.messages.parse({ ...body, messages: user(SUM), output_config: { format: { type: "json_schema", schema: wanted } } });
    assert.equal(typeof parsed.parsed_output.answer, "number");
    const paper = { type: "document", title: "A title", source: { type: "content", content: [{ type: "text", text: "What is" }] } };
    const { data, response } = await anthropic.messages.create({ ...body, messages: user([paper, { type: "text", text: " 17 + 25?" }]) }).withResponse();
    assert.match(data.content[0].text, /42/);
    assert.equal(response.headers.get("x-ignored-fields"), "messages[0].content[0].title");
    const begun = await anthropic.messages.create({ ...body, max_tokens: 8, messages: [{ role: "assistant", content: "The capital of France is" }] });
    assert.match(begun.content[0].text, /^ /);
    await assert.rejects(anthropic.messages.batches.list(), (e) => e instanceof Anthropic.NotFoundError && e.error.type === "error");
  },
  async "anthropic: count_tokens, stop, errors, abort, models"() {
    const body = { ...common, max_tokens: 100, messages: user(SUM) };
    const reply = await anthropic.messages.create(body);
    const { input_tokens } = await anthropic.messages.countTokens({ model: "plankton", messages: user(SUM) });
    assert.equal(input_tokens, reply.usage.input_tokens + reply.usage.cache_read_input_tokens);
    const stop = reply.content[0].text.slice(3, 6);
    const cut = await anthropic.messages.create({ ...body, stop_sequences: [stop] });
    assert.deepEqual([cut.stop_reason, cut.stop_sequence], ["stop_sequence", stop]);
    await assert.rejects(anthropic.messages.create({ ...body, messages: [] }), (e) => e instanceof Anthropic.BadRequestError);
    await assert.rejects(anthropic.messages.create({ ...body, messages: user("word ".repeat(150_000)) }), /prompt is too long: \d+ tokens > \d+ maximum/);
    const stream = anthropic.messages.stream({ ...body, max_tokens: ENDLESS, ignore_eos: true });
    stream.on("text", () => stream.abort());
    await assert.rejects(stream.finalMessage(), (e) => e instanceof Anthropic.APIUserAbortError);
    await idle();
    const models = [];
    for await (const model of anthropic.models.list()) models.push(model.id);
    assert.deepEqual(models, ["plankton"]);
  },
};

async function idle() {
  for (const end = Date.now() + 60_000; Date.now() < end; ) {
    const requests = await (await fetch(url + "/thermo/requests")).json();
    const slots = await (await fetch(url + "/slots")).json();
    if (requests.length === 0 && slots.every((slot) => !slot.is_processing)) return;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  assert.fail("the server is still busy");
}

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
    console.log("ok     " + name);
  } catch (error) {
    ++failed;
    console.log("FAILED " + name + "\n" + (error.stack ?? error));
  }
}
process.exit(failed ? 1 : 0);
