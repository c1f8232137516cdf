// OpenAI's client for node.
import {OpenAI} from "openai";

import {ASKED, ENOUGH, PARTS, RESULT, SCHEMA, SHAPES, TOOL, TOO_HOT, TURNS, call, errorOf, found, joined, tell} from "./asked.mjs";

const client = new OpenAI({baseURL: ASKED.base_url, apiKey: ASKED.key, maxRetries: 0});
const few = {model: ASKED.model, temperature: 0};
const short = {...few, max_tokens: ASKED.tokens};
const chats = client.chat.completions;
const whole = async (body) => (await chats.create(body)).choices[0].message;

found("chat", "whole", (await whole({...short, messages: TURNS})).content);
const chunks = await chats.create({...short, messages: TURNS, stream: true});
found("chat", "stream", await joined(chunks, (chunk) => chunk.choices[0]?.delta?.content));
found("chat", "helper", await chats.stream({...short, messages: TURNS}).finalContent());
found("picture", "whole", (await whole({...short, messages: [{role: "user", content: PARTS}]})).content);

const calling = {...few, messages: TURNS, tools: [TOOL], tool_choice: "required", max_tokens: ENOUGH};
const message = await whole(calling);
const [made] = message.tool_calls;
found("call", "whole", call(made.function.name, made.function.arguments));
const [streamed] = (await chats.stream(calling).finalMessage()).tool_calls;
found("call", "stream", call(streamed.function.name, streamed.function.arguments));
const turns = [...TURNS, message, {role: "tool", tool_call_id: made.id, content: RESULT}];
found("answer", "whole", (await whole({...short, tools: [TOOL], messages: turns})).content);

const form = {type: "json_schema", json_schema: {name: "shape", schema: SCHEMA, strict: true}};
const formed = {...few, max_tokens: ENOUGH, messages: TURNS, response_format: form};
found("json", "whole", (await whole(formed)).content);
const parsed = await chats.parse(formed);
found("json", "parse", JSON.stringify(parsed.choices[0].message.parsed));

const asked = {...few, input: ASKED.question, max_output_tokens: ASKED.tokens};
found("chat", "responses", (await client.responses.create(asked)).output_text);
const events = client.responses.stream(asked);
found("chat", "responses stream", await joined(events, (event) => (event.type === "response.output_text.delta" ? event.delta : "")));
const tool = {type: "function", name: "count", parameters: SHAPES, strict: true};
const response = await client.responses.create({...few, input: ASKED.question, tools: [tool], tool_choice: "required", max_output_tokens: ENOUGH});
const [item] = response.output;
found("call", "responses", call(item.name, item.arguments));
const result = {type: "function_call_output", call_id: item.call_id, output: RESULT};
const answered = await client.responses.create({...asked, input: [result], previous_response_id: response.id, tools: [tool]});
found("answer", "responses", answered.output_text);

const listed = [];
for await (const one of client.models.list()) listed.push(one.id);
found("models", "list", listed);
const other = new OpenAI({baseURL: ASKED.vectors_base_url, apiKey: ASKED.key, maxRetries: 0});
const vectors = await other.embeddings.create({model: ASKED.vectors_model, input: ASKED.question});
found("vector", "base64", vectors.data[0].embedding);

const hot = {...few, temperature: TOO_HOT};
found("refused", "chat", await errorOf(() => chats.create({...hot, messages: TURNS})));
found("refused", "stream", await errorOf(() => chats.stream({...hot, messages: TURNS}).finalContent()));
found("refused", "responses", await errorOf(() => client.responses.create({...hot, input: ASKED.question})));
found("unknown", "chat", await errorOf(() => chats.create({model: "another", messages: TURNS})));
const denied = new OpenAI({baseURL: ASKED.base_url, apiKey: "wrong", maxRetries: 0});
found("denied", "chat", await errorOf(() => denied.chat.completions.create({...short, messages: TURNS})));
tell();
