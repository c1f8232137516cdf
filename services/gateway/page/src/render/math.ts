// Formulas as MathML, which browsers draw themselves; loaded when the first answer has one.
import temml from "temml";
import { cleanMath, setHtml } from "./html";

const LONGEST = 5000; // characters
const STYLES = new Set(["color", "text-align", "padding", "padding-left", "padding-right", "border-top", "border-bottom", "width"]);

/** Draws the formula of an element into it; leaves its text where it is none. */
export function drawFormula(element: HTMLElement): void {
  const tex = element.dataset["tex"] ?? "";
  if (tex.length > LONGEST) return;
  const displayMode = element.dataset["display"] === "true";
  let html: string;
  try {
    html = temml.renderToString(tex, { displayMode, throwOnError: true, trust: false, maxExpand: 200, strict: false });
  } catch {
    return; // half a formula of a growing answer, or none at all
  }
  setHtml(element, cleanMath(html.replaceAll(' style="', ' data-style="')));
  element.classList.toggle("display", displayMode);
  // The page's policy lets no markup bring styles: the few that matter are set one by one.
  for (const part of element.querySelectorAll<HTMLElement>("[data-style]")) {
    for (const one of (part.dataset["style"] ?? "").split(";")) {
      const [name, value] = one.split(":").map((text) => text.trim());
      if (name && value && STYLES.has(name) && !/url|expression/i.test(value)) part.style.setProperty(name, value);
    }
    part.removeAttribute("data-style");
  }
}
