// What sanitised HTML gets beside: buttons, colours of code, formulas.
import { t } from "../text/text";
import { setHtml } from "./html";

export function decorate(root: HTMLElement): void {
  for (const table of root.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of root.querySelectorAll<HTMLElement>("pre > code")) frameCode(code);
  const formulas = [...root.querySelectorAll<HTMLElement>(".formula[data-tex]")];
  if (formulas.length) void import("./math").then(({ drawFormula }) => formulas.forEach(drawFormula));
}

function frameCode(code: HTMLElement): void {
  const pre = code.parentElement!;
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1]?.toLowerCase() ?? "";
  const frame = document.createElement("div");
  frame.className = "code";
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language || t("wrapCode");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "small";
  copy.textContent = t("copy");
  const text = code.textContent ?? "";
  copy.onclick = () => void copyText(text).then(() => confirm(copy));
  head.append(name, copy);
  pre.tabIndex = 0; // scrolled by keys
  pre.replaceWith(frame);
  frame.append(head, pre);
  if (language) {
    void import("./code").then(({ highlighted }) => {
      const html = highlighted(text, language);
      if (html) setHtml(code, html);
    });
  }
}

function confirm(button: HTMLButtonElement): void {
  const before = button.textContent;
  button.textContent = t("copied");
  window.setTimeout(() => (button.textContent = before), 1500);
}

/** Also where the page is not a secure context, as over plain HTTP. */
export async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.className = "offscreen";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
