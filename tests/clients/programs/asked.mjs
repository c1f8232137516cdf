// What a program for a client for node is given, what it asks, and how it tells what came of it: as asked.py has it.
export const ASKED = JSON.parse(process.argv[2]);
export const PICTURE = ASKED.picture.slice(ASKED.picture.indexOf(",") + 1);
export const ENOUGH = 400; // tokens for a call and for JSON
export const TOO_HOT = 9; // a temperature
const CITY = {type: "object", properties: {city: {type: "string"}}, required: ["city"]};
export const WEATHER = {type: "function", function: {name: "get_weather", parameters: CITY}};
export const RESULT = "3"; // what the tool gives
export const TURNS = [{role: "user", content: ASKED.question}];
export const PARTS = [
  {type: "image_url", image_url: {url: ASKED.picture}},
  {type: "text", text: ASKED.question},
];
export const SHAPES = {
  type: "object",
  properties: {shape: {type: "string", enum: ["circle", "square"]}},
  required: ["shape"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: {name: "count", description: "How many there are.", parameters: SHAPES},
};
export const SCHEMA = {
  type: "object",
  properties: {colour: {type: "string", enum: ["red", "blue"]}, round: {type: "boolean"}},
  required: ["colour", "round"],
  additionalProperties: false,
};
const kept = {};

// Keeps what one way to ask has given; `kind` says what it is.
export function found(kind, how, value) {
  (kept[kind] ??= {})[how] = value;
}

// A call as `found` takes it; arguments as a text of JSON or as an object.
export function call(name, given) {
  return {name, arguments: typeof given === "string" ? JSON.parse(given) : given};
}

// What a loop of calls and results has come to; calls as arguments.
export function agent(calls, text) {
  return {calls, text};
}

// The class and text of the error that a function throws, as a program would print it.
export async function errorOf(ask) {
  try {
    await ask();
  } catch (error) {
    return `${error?.name}: ${error?.message ?? error}`;
  }
  return "";
}

// The texts of a stream as one.
export async function joined(stream, textOf) {
  let text = "";
  for await (const part of stream) text += textOf(part) ?? "";
  return text;
}

// Prints all that was found, as the last line.
export function tell() {
  console.log(JSON.stringify(kept));
}
