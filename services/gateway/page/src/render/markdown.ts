// Markdown with formulas, cut into blocks so that a growing answer renders its last block alone.
import { Marked, type TokenizerAndRendererExtension, type Tokens } from "marked";
import { cleanHtml } from "./html";

function escape(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

function formula(tex: string, display: boolean): string {
  const text = escape(tex.trim());
  return `<span class="formula" data-tex="${text}" data-display="${display}">${text}</span>`;
}

function extension(name: string, level: "block" | "inline", start: RegExp, rules: RegExp[], display: boolean): TokenizerAndRendererExtension {
  return {
    name,
    level,
    start: (source) => start.exec(source)?.index,
    tokenizer(source) {
      for (const rule of rules) {
        const match = rule.exec(source);
        if (match?.[1]?.trim()) return { type: name, raw: match[0], text: match[1] };
      }
      return undefined;
    },
    renderer: (token) => formula((token as Tokens.Generic)["text"] as string, display),
  };
}

const DISPLAY = [/^\$\$([\s\S]+?)\$\$/, /^\\\[([\s\S]+?)\\\]/];
const INLINE = [/^\\\(([\s\S]+?)\\\)/, /^\$(?!\s)((?:[^$\n\\]|\\.)+?)(?<!\s)\$(?!\d)/];

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: [
    extension("blockFormula", "block", /\$\$|\\\[/, DISPLAY.map((rule) => new RegExp(rule.source + "[ \\t]*(?:\\n|$)")), true),
    extension("displayFormula", "inline", /\$\$|\\\[/, DISPLAY, true),
    extension("inlineFormula", "inline", /\$|\\\(/, INLINE, false),
  ],
  renderer: {
    // A picture from elsewhere would tell its server who reads: it is a link.
    image({ href, text }) {
      if (/^data:image\//i.test(href)) return `<img src="${escape(href)}" alt="${escape(text)}">`;
      return `<a href="${escape(href)}">${escape(text || href)}</a>`;
    },
    // HTML within Markdown is shown as text, but for a few harmless elements.
    html({ text }) {
      return /^<\/?(br|sub|sup|u|kbd|mark|details|summary)\s*\/?>$/i.test(text.trim()) ? text : escape(text);
    },
  },
});

export interface Block {
  key: string;
  html: TrustedHTML;
}

const cache = new Map<string, TrustedHTML>();
const MOST_CACHED = 2000;

/** The blocks of a text; those that were seen before are not rendered again. */
export function blocksOf(text: string): Block[] {
  const tokens = marked.lexer(text);
  const blocks: Block[] = [];
  for (const token of tokens) {
    if (token.type === "space" || token.type === "def") continue;
    let html = cache.get(token.raw);
    if (html === undefined) {
      html = cleanHtml(marked.parser([token]));
      if (cache.size > MOST_CACHED) cache.clear();
      cache.set(token.raw, html);
    }
    blocks.push({ key: String(blocks.length), html });
  }
  return blocks;
}

/** A text that is a JSON object or list as a whole, in many lines; null for any other. */
export function jsonOf(text: string): string | null {
  const trimmed = text.trim();
  if (!/^[[{]/.test(trimmed)) return null;
  try {
    return JSON.stringify(JSON.parse(trimmed), null, 2);
  } catch {
    return null;
  }
}
