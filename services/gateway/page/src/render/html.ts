// What a model has written is hostile: it becomes HTML through DOMPurify alone.
import DOMPurify from "dompurify";

const LINK = /^(https?|mailto):/i;
const PICTURE = /^data:image\/(png|jpeg|gif|webp);base64,/i;

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    const target = node.getAttribute("href") ?? "";
    if (LINK.test(target)) {
      node.setAttribute("target", "_blank");
      node.setAttribute("rel", "noopener noreferrer nofollow");
    } else node.removeAttribute("href");
  }
  if (node.nodeName === "IMG" && !PICTURE.test(node.getAttribute("src") ?? "")) node.removeAttribute("src");
});

/** HTML of an answer: no scripts, styles, forms, frames, ids or names, and nothing that is loaded from elsewhere. */
export function cleanHtml(html: string): TrustedHTML {
  return DOMPurify.sanitize(html, {
    RETURN_TRUSTED_TYPE: true,
    ALLOWED_TAGS: [
      ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i img input kbd li ol p pre s span strong sub sup".split(" "),
      ..."table tbody td th thead tr u ul details summary mark".split(" "),
    ],
    ALLOWED_ATTR: ["href", "title", "alt", "src", "align", "start", "class", "type", "checked", "disabled", "data-tex", "data-display"],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
  }) as unknown as TrustedHTML;
}

/** Spans of highlighted code. */
export function cleanCode(html: string): TrustedHTML {
  return DOMPurify.sanitize(html, {
    RETURN_TRUSTED_TYPE: true,
    ALLOWED_TAGS: ["span"],
    ALLOWED_ATTR: ["class"],
  }) as unknown as TrustedHTML;
}

/** MathML. `data-style` holds what `style` would. */
export function cleanMath(html: string): TrustedHTML {
  return DOMPurify.sanitize(html, {
    RETURN_TRUSTED_TYPE: true,
    USE_PROFILES: { mathMl: true },
    ADD_ATTR: ["data-style"],
    FORBID_ATTR: ["style", "href"],
  }) as unknown as TrustedHTML;
}

export function setHtml(element: Element, html: TrustedHTML): void {
  element.innerHTML = html as unknown as string;
}
