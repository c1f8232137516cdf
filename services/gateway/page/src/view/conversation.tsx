import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { writing } from "../state/answering";
import { current, shown, type Open } from "../state/chat";
import { model, takes, takesVideos, trouble } from "../state/server";
import { draw, drawnFile, examplesFor, type Example } from "../media/examples";
import { language, t } from "../text/text";
import { example } from "./composer";
import { Message } from "./message";

const NEAR = 120; // pixels from the end, within which the view follows the text

function Welcome() {
  const card = model.value;
  const examples = card ? examplesFor(card.id, takes("image")) : [];
  return (
    <section class="welcome">
      <h1>{t("hello")}</h1>
      <p class="quiet">{trouble.value || (takesVideos.value ? t("helloVideos") : takes("image") ? t("helloMedia") : "")}</p>
      {examples.length > 0 && (
        <>
          <h2 class="quiet">{t("examples")}</h2>
          <div class="examples">
            {examples.map((one) => (
              <ExampleButton key={one.id} one={one} />
            ))}
          </div>
        </>
      )}
    </section>
  );
}

function ExampleButton({ one }: { one: Example }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    if (canvas.current) draw(canvas.current, one);
  }, []);
  const question = t(one.question);
  const send = async () => example(question, one.draw ? [await drawnFile(one)] : []);
  const other = one.question === "exChinese" ? (language.value === "zh" ? "en" : "zh-CN") : undefined;
  return (
    <button type="button" class="example" onClick={() => void send()}>
      {one.draw && <canvas ref={canvas} aria-hidden="true" />}
      <span lang={other}>{question}</span>
    </button>
  );
}

export function ConversationView() {
  const open = current.value;
  return open ? <Turns open={open} key={open.id} /> : <div class="scroll"><Welcome /></div>;
}

function Turns({ open }: { open: Open }) {
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const ids = shown.value;
  const last = ids.at(-1);
  useLayoutEffect(() => {
    follows.current = true;
    box.current!.scrollTop = box.current!.scrollHeight;
  }, [last]);
  useEffect(() => {
    const element = box.current!;
    const end = new ResizeObserver(() => {
      if (follows.current) element.scrollTop = element.scrollHeight;
    });
    end.observe(element.firstElementChild!);
    return () => end.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current!;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  const isWriting = last !== undefined && writing.value.has(last);
  return (
    <div class="scroll" ref={box} onScroll={onScroll}>
      <div class="turns">
        <h1 class="offscreen">{open.title.value}</h1>
        {ids.map((id) => (
          <Message key={id} open={open} id={id} last={id === last} />
        ))}
      </div>
      <p class="offscreen" role="status">
        {isWriting ? t("writing") : last ? t("answered") : ""}
      </p>
    </div>
  );
}
