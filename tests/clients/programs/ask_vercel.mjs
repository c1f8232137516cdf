// Vercel's AI SDK, with its providers for servers of OpenAI's chats, OpenAI's responses and Anthropic's messages.
import {createAnthropic} from "@ai-sdk/anthropic";
import {createOpenAI} from "@ai-sdk/openai";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {Output, embed, generateText, isStepCount, jsonSchema, streamText, tool} from "ai";

import {ASKED, ENOUGH, PICTURE, RESULT, SCHEMA, SHAPES, TOO_HOT, agent, call, errorOf, found, joined, tell} from "./asked.mjs";

function providers(url, apiKey) {
  const baseURL = `${url}/v1`;
  const chats = createOpenAICompatible({name: "tessera", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true});
  return {chat: chats, responses: createOpenAI({baseURL, apiKey}), anthropic: createAnthropic({baseURL, apiKey})};
}

const count = tool({description: "How many there are.", inputSchema: jsonSchema(SHAPES), execute: () => RESULT});
const CITY = {type: "object", properties: {city: {type: "string"}}, required: ["city"], additionalProperties: false};
const agents = providers(ASKED.agent_url, ASKED.key);
const denied = providers(ASKED.url, "wrong");
for (const [name, provider] of Object.entries(providers(ASKED.url, ASKED.key))) {
  const few = {model: provider(ASKED.model), temperature: 0, maxRetries: 0, prompt: ASKED.question};
  const short = {...few, maxOutputTokens: ASKED.tokens};
  const longer = {...few, maxOutputTokens: ENOUGH};
  found("chat", name, (await generateText(short)).text);
  found("chat", `${name} stream`, await joined(streamText(short).textStream, (text) => text));
  const parts = [{type: "file", data: PICTURE, mediaType: "image/png"}, {type: "text", text: ASKED.question}];
  const {prompt, ...rest} = short;
  found("picture", name, (await generateText({...rest, messages: [{role: "user", content: parts}]})).text);

  const calling = {...longer, tools: {count}, toolChoice: "required"};
  const made = await generateText(calling);
  found("call", name, call(made.toolCalls[0].toolName, made.toolCalls[0].input));
  const [streamed] = await streamText(calling).toolCalls;
  found("call", `${name} stream`, call(streamed.toolName, streamed.input));
  const messages = [{role: "user", content: ASKED.question}, ...(made.responseMessages ?? made.response.messages)];
  found("answer", name, (await generateText({...rest, tools: {count}, messages})).text);

  let calls = [];
  const weather = tool({inputSchema: jsonSchema(CITY), execute: (given) => (calls.push(given), RESULT)});
  const loop = {model: agents[name](ASKED.agent_model), maxOutputTokens: 50, maxRetries: 0, prompt, tools: {get_weather: weather}, stopWhen: isStepCount(5)};
  const ended = (await generateText(loop)).text;
  found("agent", name, agent(calls, ended));
  calls = [];
  const text = await streamText(loop).text;
  found("agent", `${name} stream`, agent(calls, text));

  const formed = {...longer, output: Output.object({schema: jsonSchema(SCHEMA)})};
  found("json", name, JSON.stringify((await generateText(formed)).output));
  found("json", `${name} stream`, JSON.stringify(await streamText(formed).output));
  // It lowers a temperature itself for Anthropic's API.
  const hot = name === "anthropic" ? {...short, topK: -7} : {...short, temperature: TOO_HOT};
  found("refused", name, await errorOf(() => generateText(hot)));
  const errors = [];
  await streamText({...hot, onError: ({error}) => errors.push(`${error.name}: ${error.message}`)}).consumeStream();
  found("refused", `${name} stream`, errors.join());
  found("denied", name, await errorOf(() => generateText({...short, model: denied[name](ASKED.model)})));
}
const vectors = createOpenAICompatible({name: "tessera", baseURL: ASKED.vectors_base_url, apiKey: ASKED.key});
const {embedding} = await embed({model: vectors.embeddingModel(ASKED.vectors_model), value: ASKED.question});
found("vector", "chat", embedding);
tell();
