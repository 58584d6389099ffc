// Vercel's AI SDK against a server: node with_ai_sdk.mjs http://127.0.0.1:8000/v1
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "baton", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const model = provider("baton-demo");
const prompt = "Tell me about the red radio.";
const common = { model, prompt, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

const whole = await generateText(common);
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens > 0);
const streaming = streamText(common);
let streamed = "";
for await (const piece of streaming.textStream) streamed += piece;
assert.equal(streamed, whole.text);
assert.equal((await streaming.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await streaming.finishReason, whole.finishReason);

const schema = z.object({ color: z.enum(["red", "blue"]), rooms: z.union([z.literal(1), z.literal(2)]) });
const formed = await generateObject({ ...common, schema });
const forming = streamObject({ ...common, schema });
let parts = 0;
for await (const _ of forming.partialObjectStream) parts += 1;
assert.deepEqual(await forming.object, formed.object);

const cities = [];
const tools = { weather: tool({
  description: "The weather in a city", inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => { cities.push(city); return "sunny"; } }) };
const toolChoice = { type: "tool", toolName: "weather" };
const called = await generateText({ ...common, tools, toolChoice });
const calling = streamText({ ...common, tools, toolChoice });
await calling.consumeStream();
assert.deepEqual(called.toolCalls.map((call) => call.input), (await calling.toolCalls).map((call) => call.input));
assert.equal(cities.length, 2);
const required = await generateText({ ...common, tools, toolChoice: "required" });
assert.ok(required.toolCalls.length >= 1 && required.text === "", required.text);

const completion = await generateText({ ...common, model: provider.completionModel("baton-demo"), prompt: "The red" });
assert.ok(completion.text);
await assert.rejects(generateText({ ...common, model: provider("no-such-model") }),
  (error) => APICallError.isInstance(error) && error.statusCode === 404 && /no-such-model/.test(error.message));
console.log(`ai: chat "${whole.text}", streamed alike, ${JSON.stringify(formed.object)} in ${parts} parts, `
  + `weather in ${cities}, a completion, an error`);
