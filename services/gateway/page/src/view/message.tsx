import { useState } from "preact/hooks";
import { answer, notices, sendResults, stop, writing } from "../state/answering";
import { select, siblings, type Open } from "../state/chat";
import type { Node, ToolCall } from "../state/types";
import { copyText } from "../render/decorate";
import { jsonOf } from "../render/markdown";
import { t } from "../text/text";
import { Composer } from "./composer";
import { FiguresRow } from "./figures";
import { Icon } from "./icons";
import { Markdown } from "./markdown";
import { Sent } from "./media";

export function Message({ open, id, last }: { open: Open; id: string; last: boolean }) {
  const node = open.nodes.value.get(id)?.value;
  if (!node) return null;
  if (node.role === "user") return <Question open={open} node={node} />;
  if (node.role === "tool") return <Results open={open} node={node} />;
  return <Answer open={open} node={node} last={last} />;
}

function Branches({ open, node }: { open: Open; node: Node }) {
  const all = siblings(open, node);
  if (all.length < 2) return null;
  const at = all.findIndex((one) => one.id === node.id);
  const go = (step: number) => select(open, all[at + step]!);
  const n = { n: at + 1, all: all.length };
  return (
    <span class="branches" role="group" aria-label={t("branch", n)}>
      <button type="button" class="bare tiny" aria-label={t("previousBranch")} disabled={at === 0} onClick={() => go(-1)}>
        <Icon name="left" />
      </button>
      <span>
        {n.n}/{n.all}
      </span>
      <button type="button" class="bare tiny" aria-label={t("nextBranch")} disabled={at === all.length - 1} onClick={() => go(1)}>
        <Icon name="right" />
      </button>
    </span>
  );
}

export function CopyButton({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  const copy = () =>
    void copyText(text).then(() => {
      setDone(true);
      window.setTimeout(() => setDone(false), 1500);
    });
  return (
    <button type="button" class="bare tiny" aria-label={t("copy")} title={t("copy")} onClick={copy}>
      <Icon name="copy" />
      {done && (
        <span class="tiny-text" role="status">
          {t("copied")}
        </span>
      )}
    </button>
  );
}

function Question({ open, node }: { open: Open; node: Node }) {
  const [editing, setEditing] = useState(false);
  if (editing) {
    const edited = { text: node.text, attachments: node.attachments ?? [], parent: node.parent, onDone: () => setEditing(false) };
    return (
      <article class="message user editing">
        <Composer edited={edited} />
      </article>
    );
  }
  return (
    <article class="message user" aria-label={t("you")}>
      {node.attachments && (
        <div class="gallery">
          {node.attachments.map((one) => (
            <Sent key={one.id} attachment={one} />
          ))}
        </div>
      )}
      {node.text && <div class="bubble">{node.text}</div>}
      <div class="row-tools">
        <Branches open={open} node={node} />
        <button type="button" class="bare tiny" aria-label={t("edit")} title={t("edit")} onClick={() => setEditing(true)}>
          <Icon name="edit" />
        </button>
        <CopyButton text={node.text} />
      </div>
    </article>
  );
}

function Results({ open, node }: { open: Open; node: Node }) {
  const calls = node.parent ? open.nodes.value.get(node.parent)?.value.calls : undefined;
  return (
    <article class="message tool">
      {(node.results ?? []).map((result) => {
        const name = calls?.find((call) => call.id === result.callId)?.name ?? "";
        return (
          <div class="call" key={result.callId}>
            <div class="call-head">
              <Icon name="tool" />
              {t("toolResult", { name })}
            </div>
            <Markdown text={"```json\n" + (jsonOf(result.text) ?? result.text) + "\n```"} whole={false} />
          </div>
        );
      })}
    </article>
  );
}

function Answer({ open, node, last }: { open: Open; node: Node; last: boolean }) {
  const isWriting = writing.value.has(node.id);
  const notice = notices.value[node.id];
  const empty = !node.text && !node.reasoning && !node.calls?.length;
  return (
    <article class="message answer" aria-label={t("assistant")} aria-busy={isWriting}>
      {node.reasoning && (
        <details class="reasoning">
          <summary>{t(isWriting && !node.text ? "thinking" : "reasoning")}</summary>
          <Markdown text={node.reasoning} whole={false} />
        </details>
      )}
      {node.text && <Markdown text={node.text} whole={!isWriting} />}
      {node.calls?.map((call, index) => <Call key={index} call={call} />)}
      {isWriting && !notice && empty && <span class="dots" aria-hidden="true" />}
      {notice && (
        <p class="note" role="status">
          {notice}
        </p>
      )}
      {node.status === "stopped" && !isWriting && <p class="note">{t("stopped")}</p>}
      {node.finish === "length" && <p class="note">{t("lengthReached")}</p>}
      {!!node.resumed && <p class="note resumed">{t("resumed")}</p>}
      {node.error && (
        <p class="warning" role="alert">
          {node.error}
        </p>
      )}
      {last && !isWriting && !!node.calls?.length && node.status === "done" && <GiveResults open={open} node={node} calls={node.calls} />}
      <div class="row-tools">
        <Branches open={open} node={node} />
        {isWriting ? (
          <button type="button" class="bare tiny" aria-label={t("stop")} title={t("stop")} onClick={() => stop(node.id)}>
            <Icon name="stop" />
          </button>
        ) : (
          <>
            {node.text && <CopyButton text={node.text} />}
            <Again open={open} node={node} />
          </>
        )}
        <FiguresRow node={node} />
      </div>
    </article>
  );
}

function Again({ open, node }: { open: Open; node: Node }) {
  const failed = node.status === "failed";
  const label = t(failed ? "goOn" : "regenerate");
  return (
    <button type="button" class="bare tiny" aria-label={label} title={label} onClick={() => node.parent && answer(open, node.parent)}>
      <Icon name="again" />
      {failed && <span class="tiny-text">{label}</span>}
    </button>
  );
}

function Call({ call }: { call: ToolCall }) {
  return (
    <div class="call">
      <div class="call-head">
        <Icon name="tool" />
        {t("toolCall", { name: call.name })}
      </div>
      <Markdown text={"```json\n" + (jsonOf(call.arguments) ?? call.arguments) + "\n```"} whole={false} />
    </div>
  );
}

function GiveResults({ open, node, calls }: { open: Open; node: Node; calls: readonly ToolCall[] }) {
  const [texts, setTexts] = useState<Record<string, string>>({});
  return (
    <form
      class="results"
      onSubmit={(event) => {
        event.preventDefault();
        sendResults(open, node.id, calls.map((call) => ({ callId: call.id, text: texts[call.id] ?? "" })));
      }}
    >
      {calls.map((call) => (
        <label class="field wide" key={call.id}>
          {t("giveResult", { name: call.name })}
          <input type="text" value={texts[call.id] ?? ""} onInput={(e) => setTexts({ ...texts, [call.id]: e.currentTarget.value })} />
        </label>
      ))}
      <button>{t("sendResult")}</button>
    </form>
  );
}
