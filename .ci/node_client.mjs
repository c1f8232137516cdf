// Asks a server in every way that OpenAI's client for node has and is offered here; prints what it gave as JSON.
// Run by node_client.py, with the client's folder, the base URL and the model.
import {createRequire} from "node:module";

const [folder, baseURL, model] = process.argv.slice(2);
const {OpenAI} = createRequire(`${folder}/`)("openai");
const client = new OpenAI({baseURL, apiKey: "none", maxRetries: 0});
const messages = [{role: "user", content: "What is in the picture?"}];
const asked = {model, messages, max_tokens: 16, temperature: 0};

const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({...asked, stream: true})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const helper = await client.chat.completions.stream(asked).finalContent();
const response = await client.responses.create({model, input: messages[0].content, max_output_tokens: 16, temperature: 0});
let events = "";
for await (const event of client.responses.stream({model, input: messages[0].content, max_output_tokens: 16, temperature: 0})) {
  if (event.type === "response.output_text.delta") events += event.delta;
}
let refused = {};
try {
  await client.chat.completions.create({...asked, temperature: 9});
} catch (error) {
  refused = {status: error.status, param: error.param, kind: error.constructor.name};
}
const listed = [];
for await (const one of client.models.list()) listed.push(one.id);
const texts = {whole: whole.choices[0].message.content, streamed, helper, response: response.output_text, events};
console.log(JSON.stringify({texts, refused, listed}));
