// Ollama's client for JavaScript.
import {Ollama} from "ollama";

import {ASKED, ENOUGH, PICTURE, RESULT, SCHEMA, TOO_HOT, TURNS, WEATHER, errorOf, found, joined, tell} from "./asked.mjs";

const made = (host, key = ASKED.key) => new Ollama({host, headers: {Authorization: `Bearer ${key}`}});
const client = made(ASKED.url);
const options = {temperature: 0, num_predict: ASKED.tokens};
const short = {model: ASKED.model, messages: TURNS, options};
found("chat", "chat", (await client.chat(short)).message.content);
found("chat", "chat stream", await joined(await client.chat({...short, stream: true}), (part) => part.message.content));
const {messages, ...rest} = short;
found("chat", "generate", (await client.generate({...rest, prompt: ASKED.question})).response);
const parts = await client.generate({...rest, prompt: ASKED.question, stream: true});
found("chat", "generate stream", await joined(parts, (part) => part.response));
const seen = [{...TURNS[0], images: [PICTURE]}];
found("picture", "chat", (await client.chat({...short, messages: seen})).message.content);
const formed = await client.chat({...short, options: {...options, num_predict: ENOUGH}, format: SCHEMA});
found("json", "chat", formed.message.content);
found("models", "list", (await client.list()).models.map((one) => one.model));
const calling = made(ASKED.agent_url);
const asking = {model: ASKED.agent_model, tools: [WEATHER], options: {temperature: 0}};
const {message} = await calling.chat({...asking, messages: TURNS});
const turns = [...TURNS, message, {role: "tool", tool_name: "get_weather", content: RESULT}];
const told = await calling.chat({...asking, messages: turns});
const calls = message.tool_calls.map((one) => one.function.arguments);
found("agent", "whole", {calls, text: told.message.content});
const vectors = await made(ASKED.vectors_url).embed({model: ASKED.vectors_model, input: ASKED.question});
found("vector", "embed", vectors.embeddings[0]);
const hot = {...short, options: {temperature: TOO_HOT}};
found("refused", "chat", await errorOf(() => client.chat(hot)));
found("refused", "stream", await errorOf(() => client.chat({...hot, stream: true})));
found("unknown", "chat", await errorOf(() => client.chat({...short, model: "another"})));
found("denied", "chat", await errorOf(() => made(ASKED.url, "wrong").chat(short)));
tell();
