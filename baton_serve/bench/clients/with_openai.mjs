// The official JavaScript client against a server: node with_openai.mjs http://127.0.0.1:8000/v1 [embedding URL]
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, embeddingUrl] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tell me about the red radio." }];
const common = { model, messages, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(common);
const text = whole.choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.ok(text);
assert.equal(streamed, text);

const helper = client.chat.completions.stream(common);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const tools = [{ type: "function", function: { name: "weather", parameters: {
  type: "object", properties: { city: { enum: ["Paris"] } }, required: ["city"], additionalProperties: false } } }];
const called = await client.chat.completions.create({ ...common, max_tokens: 100, tools, tool_choice: "required" });
assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { city: "Paris" });

const completion = await client.completions.create({ model, prompt: "The red", max_tokens: 8 });
assert.ok(completion.choices[0].text);

const response = await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 24 });
assert.equal(response.output_text, text);
let delta = "";
for await (const event of await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 24, stream: true })) {
  if (event.type === "response.output_text.delta") delta += event.delta;
}
assert.equal(delta, text);

await assert.rejects(client.chat.completions.create({ ...common, model: "no-such-model" }), OpenAI.NotFoundError);
console.log(`openai (npm): chat "${text}", streamed alike, a call of a tool, a completion, a response, an error`);

if (embeddingUrl) {
  const embedder = new OpenAI({ baseURL: embeddingUrl, apiKey: "none", maxRetries: 0 });
  const found = await embedder.embeddings.create({ model: "minilm", input: ["a", "b"] });
  assert.equal(found.data[1].embedding.length, 384);
  console.log("openai (npm): two embeddings");
}
