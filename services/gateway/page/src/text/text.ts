// Texts of the pages in the language of the reader.
import { computed, effect } from "@preact/signals";
import { settings } from "../state/settings";
import { en, type Texts } from "./en";
import { zh } from "./zh";

export const language = computed<"en" | "zh">(() => {
  const chosen = settings.value.language;
  if (chosen !== "auto") return chosen;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
});

effect(() => {
  document.documentElement.lang = language.value === "zh" ? "zh-CN" : "en";
});

/** The text of a name, with `{values}` put in. */
export function t(name: keyof Texts, values: Record<string, string | number> = {}): string {
  const text = (language.value === "zh" ? zh : en)[name];
  return text.replace(/\{(\w+)\}/g, (whole, key: string) => String(values[key] ?? whole));
}

export function bytes(size: number): string {
  const units = ["B", "KB", "MB", "GB"];
  let at = 0;
  for (; size >= 1000 && at < units.length - 1; at += 1) size /= 1000;
  return `${at && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[at]}`;
}

export function number(value: number): string {
  return value.toLocaleString(language.value === "zh" ? "zh-CN" : "en");
}

export function duration(ms: number): string {
  if (ms > 0 && ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}
