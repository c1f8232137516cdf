import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, stopAll, writing } from "../state/answering";
import { current, path, shown } from "../state/chat";
import { wordsOf } from "../state/messages";
import { model, mostTokens, takes, takesVideos } from "../state/server";
import { settings } from "../state/settings";
import { getMedia } from "../state/store";
import type { Attachment } from "../state/types";
import { ACCEPT } from "../media/kinds";
import { countPrompt, Files, type Pending } from "../media/pending";
import { bytes, number, t } from "../text/text";
import { CameraDialog, useCamera } from "./camera";
import { Icon } from "./icons";
import { Preview } from "./media";

const COUNT_MS = 600; // of rest before a prompt is counted

/** The composer that files which are dropped or pasted anywhere go to. */
let target: Files | null = null;
export const putFiles = (files: Iterable<File>) => target?.add(files);
let putQuestion: ((text: string) => void) | null = null;
/** Sends a question with files at once. */
export function example(text: string, files: File[]): void {
  if (files.length) putFiles(files);
  putQuestion?.(text);
}

function File_({ one, onRemove }: { one: Pending; onRemove: () => void }) {
  const { attachment } = one;
  return (
    <li class="file">
      {attachment ? <Preview kind={attachment.kind} url={one.url} name={one.name} /> : <span class="no-preview spin" />}
      <span class="about">
        <span class="file-name">{one.name}</span>
        <span class="quiet">
          {attachment ? bytes(one.size) : t("reading")}
          {attachment?.tokens !== undefined && ` · ${t("tokens", { n: number(attachment.tokens) })}`}
        </span>
      </span>
      <button type="button" class="bare tiny" aria-label={t("removeFile", { name: one.name })} onClick={onRemove}>
        <Icon name="close" />
      </button>
    </li>
  );
}

interface Props {
  /** Of a question that is edited; it is sent as another branch. */
  edited?: { text: string; attachments: readonly Attachment[]; parent: string | null; onDone: () => void };
}

export function Composer({ edited }: Props) {
  const [text, setText] = useState(edited?.text ?? "");
  const [busy, setBusy] = useState(false);
  const [camera, setCamera] = useState(false);
  const hasCamera = useCamera();
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const files = useMemo(() => new Files((more) => setText((before) => (before ? `${before.trimEnd()}\n\n${more}` : more))), []);
  const isWriting = writing.value.size > 0 && !edited;

  useEffect(() => {
    const before = target;
    target = files;
    if (edited) void files.restore(edited.attachments, getMedia);
    return () => {
      target = before === files ? null : before;
    };
  }, []);
  useLayoutEffect(() => {
    const box = area.current!;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, window.innerHeight * 0.4)}px`;
  }, [text]);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches || edited) area.current?.focus();
  }, [current.value?.id]);

  const send = async (question: string) => {
    if (busy || (!question.trim() && !files.list.value.length)) return;
    setBusy(true);
    const attachments = await files.take(); // waits for files that are being read
    setBusy(false);
    if (files.refusals.value.length && !question.trim() && !attachments.length) return;
    const parent = edited ? edited.parent : (shown.value.at(-1) ?? null);
    setText("");
    edited?.onDone();
    ask(question.trim(), attachments, parent);
  };
  if (!edited) putQuestion = (question) => void send(question);

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!isWriting) void send(text);
    }
    if (event.key === "Escape" && edited) {
      event.stopPropagation();
      edited.onDone();
    }
  };

  const isWide = matchMedia("(pointer: fine)").matches;
  const withMedia = takes("image") || takes("video");
  return (
    <form
      class={edited ? "composer inline" : "composer"}
      onSubmit={(event) => {
        event.preventDefault();
        if (isWriting) stopAll();
        else void send(text);
      }}
    >
      {files.refusals.value.map((why) => (
        <p class="warning" role="alert" key={why}>
          {why}
        </p>
      ))}
      {files.list.value.length > 0 && (
        <ul class="files">
          {files.list.value.map((one) => (
            <File_ key={one.id} one={one} onRemove={() => files.remove(one.id)} />
          ))}
        </ul>
      )}
      <textarea
        id={edited ? undefined : "question"}
        ref={area}
        rows={1}
        aria-label={t("message")}
        placeholder={t(!isWide || !withMedia ? "placeholderText" : takesVideos.value ? "placeholderVideos" : "placeholder")}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      <div class="row">
        <button type="button" class="bare" aria-label={t("attach")} title={t("attach")} onClick={() => picker.current?.click()}>
          <Icon name="clip" />
        </button>
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          aria-hidden="true"
          tabIndex={-1}
          accept={ACCEPT}
          onChange={(event) => {
            files.add([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = "";
            area.current?.focus();
          }}
        />
        {hasCamera && withMedia && (
          <button type="button" class="bare" aria-label={t("camera")} title={t("camera")} onClick={() => setCamera(true)}>
            <Icon name="camera" />
          </button>
        )}
        <TokenCount text={text} list={files.list.value} parent={edited ? edited.parent : (shown.value.at(-1) ?? null)} />
        {edited && (
          <button type="button" onClick={edited.onDone}>
            {t("cancel")}
          </button>
        )}
        <button class="primary round" aria-label={t(isWriting ? "stop" : "send")} title={t(isWriting ? "stop" : "send")} disabled={busy}>
          <Icon name={isWriting ? "stop" : "send"} />
        </button>
      </div>
      {camera && <CameraDialog onFile={(file) => files.add([file])} onClose={() => setCamera(false)} />}
    </form>
  );
}

function TokenCount({ text, list, parent }: { text: string; list: readonly Pending[]; parent: string | null }) {
  const [count, setCount] = useState<number | null>(null);
  const isWriting = writing.value.size > 0;
  const media = list.reduce((sum, one) => sum + (one.attachment?.tokens ?? 0), 0);
  const system = settings.value.system;
  useEffect(() => {
    if (isWriting || !model.value || (!text.trim() && !list.length)) return setCount(null);
    const control = new AbortController();
    const timer = window.setTimeout(() => {
      const open = current.value;
      const before = open ? path(open, parent) : [];
      const earlier = before.flatMap((node) => node.attachments ?? []).reduce((sum, one) => sum + (one.tokens ?? 0), 0);
      countPrompt(wordsOf(before, text), control.signal).then(
        (words) => setCount(words + earlier),
        () => setCount(null),
      );
    }, COUNT_MS);
    return () => {
      window.clearTimeout(timer);
      control.abort();
    };
  }, [text, list.length, parent, isWriting, system, model.value?.id]);
  if (count === null) return <span class="count" />;
  const all = count + media;
  const tooLong = mostTokens.value > 0 && all >= mostTokens.value;
  return (
    <span class={tooLong ? "count warning" : "count quiet"}>
      {t(tooLong ? "tooLong" : "promptTokens", { n: number(all), most: number(mostTokens.value) })}
    </span>
  );
}
