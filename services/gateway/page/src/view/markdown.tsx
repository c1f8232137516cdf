import { memo } from "preact/compat";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { decorate } from "../render/decorate";
import { setHtml } from "../render/html";
import { blocksOf, jsonOf } from "../render/markdown";

const Block = memo(function Block({ html }: { html: TrustedHTML }) {
  const ref = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    setHtml(ref.current!, html);
    decorate(ref.current!);
  }, [html]);
  return <div class="block" ref={ref} />;
});

/** A text of the model: Markdown, or JSON as a whole. */
export function Markdown({ text, whole }: { text: string; whole: boolean }) {
  const blocks = useMemo(() => {
    const json = whole ? jsonOf(text) : null;
    return blocksOf(json === null ? text : "```json\n" + json + "\n```");
  }, [text, whole]);
  return (
    <div class="markdown">
      {blocks.map((block) => (
        <Block key={block.key} html={block.html} />
      ))}
    </div>
  );
}
