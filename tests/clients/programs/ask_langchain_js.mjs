// langchain for JavaScript, over OpenAI's chats and responses.
import {HumanMessage, ToolMessage} from "@langchain/core/messages";
import {ChatOpenAI, OpenAIEmbeddings} from "@langchain/openai";

import {ASKED, ENOUGH, PARTS, RESULT, SCHEMA, TOOL, TOO_HOT, call, errorOf, found, joined, tell} from "./asked.mjs";

const configuration = {baseURL: ASKED.base_url};
const common = {model: ASKED.model, apiKey: ASKED.key, maxRetries: 0, configuration, temperature: 0};
const question = new HumanMessage(ASKED.question);
for (const [name, more] of Object.entries({chat: {}, responses: {useResponsesApi: true}})) {
  const made = (maxTokens, others = {}) => new ChatOpenAI({...common, ...more, maxTokens, ...others});
  const [short, longer] = [made(ASKED.tokens), made(ENOUGH)];
  found("chat", name, (await short.invoke([question])).text);
  found("chat", `${name} stream`, await joined(await short.stream([question]), (chunk) => chunk.text));
  found("picture", name, (await short.invoke([new HumanMessage({content: PARTS})])).text);
  // For responses it leaves "required" out of what it sends.
  const tools = longer.bindTools([TOOL], {tool_choice: name === "chat" ? "required" : "count"});
  const message = await tools.invoke([question]);
  const [one] = message.tool_calls;
  found("call", name, call(one.name, one.args));
  let whole;
  for await (const chunk of await tools.stream([question])) whole = whole ? whole.concat(chunk) : chunk;
  const [streamed] = whole.tool_calls;
  found("call", `${name} stream`, call(streamed.name, streamed.args));
  const turns = [question, message, new ToolMessage({content: RESULT, tool_call_id: one.id})];
  found("answer", name, (await short.bindTools([TOOL]).invoke(turns)).text);
  for (const method of ["jsonSchema", "functionCalling"]) {
    const formed = longer.withStructuredOutput(SCHEMA, {name: "shape", method});
    found("json", `${name} ${method}`, JSON.stringify(await formed.invoke([question])));
  }
  found("refused", name, await errorOf(() => made(5, {temperature: TOO_HOT}).invoke([question])));
  found("denied", name, await errorOf(() => made(5, {apiKey: "wrong"}).invoke([question])));
}
const vectors = new OpenAIEmbeddings({model: ASKED.vectors_model, apiKey: ASKED.key, configuration: {baseURL: ASKED.vectors_base_url}});
found("vector", "query", await vectors.embedQuery(ASKED.question));
tell();
