// What is sent along with each question, and how the page looks. Kept in this browser.
import { effect, signal } from "@preact/signals";

export interface Settings {
  model: string;
  system: string;
  maxTokens: string;
  temperature: string;
  topP: string;
  topK: string;
  minP: string;
  repetition: string;
  presence: string;
  frequency: string;
  seed: string;
  stop: string;
  schema: string;
  tools: string;
  theme: "auto" | "light" | "dark";
  language: "auto" | "en" | "zh";
}

export const DEFAULTS: Settings = {
  model: "",
  system: "",
  maxTokens: "",
  temperature: "",
  topP: "",
  topK: "",
  minP: "",
  repetition: "",
  presence: "",
  frequency: "",
  seed: "",
  stop: "",
  schema: "",
  tools: "",
  theme: "auto",
  language: "auto",
};

const NAME = "tessera.settings";

function stored(): Settings {
  try {
    return { ...DEFAULTS, ...(JSON.parse(localStorage.getItem(NAME) ?? "{}") as Partial<Settings>) };
  } catch {
    return { ...DEFAULTS };
  }
}

export const settings = signal<Settings>(stored());

export function change(part: Partial<Settings>): void {
  settings.value = { ...settings.value, ...part };
}

effect(() => {
  const text = JSON.stringify(settings.value);
  try {
    localStorage.setItem(NAME, text);
  } catch {
    // a browser that keeps nothing
  }
});

effect(() => {
  const { theme } = settings.value;
  if (theme === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
});

/** The fields of a request. Throws SyntaxError, whose message names the setting, for JSON that is none. */
export function fieldsOf(s: Settings): Record<string, unknown> {
  const fields: Record<string, unknown> = {};
  const numbers: [keyof Settings, string][] = [
    ["maxTokens", "max_tokens"],
    ["temperature", "temperature"],
    ["topP", "top_p"],
    ["topK", "top_k"],
    ["minP", "min_p"],
    ["repetition", "repetition_penalty"],
    ["presence", "presence_penalty"],
    ["frequency", "frequency_penalty"],
    ["seed", "seed"],
  ];
  for (const [from, to] of numbers) if (s[from].trim() !== "") fields[to] = Number(s[from]);
  const stops = s.stop.split("\n").filter(Boolean);
  if (stops.length) fields["stop"] = stops;
  if (s.schema.trim()) {
    const schema: unknown = JSON.parse(s.schema);
    fields["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (s.tools.trim()) fields["tools"] = JSON.parse(s.tools);
  return fields;
}

/** Whether a text is JSON of the wanted kind, or nothing. */
export function isJson(text: string, kind: "object" | "array"): boolean {
  if (!text.trim()) return true;
  try {
    const value: unknown = JSON.parse(text);
    return kind === "array" ? Array.isArray(value) : typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}
