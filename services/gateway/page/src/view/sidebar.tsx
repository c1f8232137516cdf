import { useState } from "preact/hooks";
import { goOn } from "../state/answering";
import { begin, current, forget, list, matches, rename, show } from "../state/chat";
import { exportJson, exportMarkdown } from "../state/export";
import type { Conversation } from "../state/types";
import { t } from "../text/text";
import { Icon, Logo } from "./icons";

function Entry({ kept, onOpen }: { kept: Conversation; onOpen: () => void }) {
  const [naming, setNaming] = useState(false);
  const isCurrent = current.value?.id === kept.id;
  if (naming) {
    const finish = (text: string) => {
      rename(kept, text);
      setNaming(false);
    };
    return (
      <li class="entry current">
        <input
          class="name"
          aria-label={t("rename")}
          autofocus
          ref={(input) => input?.select()}
          defaultValue={kept.title}
          onBlur={(event) => finish(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter") finish(event.currentTarget.value);
            if (event.key === "Escape") setNaming(false);
            event.stopPropagation();
          }}
        />
      </li>
    );
  }
  const open = async () => {
    const opened = await show(kept.id);
    if (opened) goOn(opened);
    onOpen();
  };
  return (
    <li class={isCurrent ? "entry current" : "entry"}>
      <button type="button" class="title" aria-current={isCurrent ? "page" : undefined} onClick={open}>
        {kept.title}
      </button>
      {isCurrent && (
        <span class="tools">
          <IconButton name="edit" label={t("rename")} onClick={() => setNaming(true)} />
          <IconButton name="save" label={`${t("exportAs")} ${t("exportMarkdown")}`} onClick={() => exportMarkdown(kept)} text="MD" />
          <IconButton name="save" label={`${t("exportAs")} ${t("exportJson")}`} onClick={() => void exportJson(kept)} text="JSON" />
          <IconButton
            name="trash"
            label={t("remove")}
            onClick={() => confirm(t("removeSure", { title: kept.title })) && void forget(kept)}
          />
        </span>
      )}
    </li>
  );
}

function IconButton({ name, label, onClick, text }: { name: "edit" | "save" | "trash"; label: string; onClick: () => void; text?: string }) {
  return (
    <button type="button" class="bare tiny" aria-label={label} title={label} onClick={onClick}>
      <Icon name={name} />
      {text && <span class="tiny-text">{text}</span>}
    </button>
  );
}

interface Props {
  onOpen: () => void;
  onSettings: () => void;
}

export function Sidebar({ onOpen, onSettings }: Props) {
  const [words, setWords] = useState("");
  const found = list.value.filter((kept) => matches(kept, words));
  const fresh = () => {
    begin();
    onOpen();
    document.querySelector<HTMLTextAreaElement>("#question")?.focus();
  };
  return (
    <nav class="sidebar" aria-label={t("menu")}>
      <div class="brand">
        <Logo />
        <span>Tessera</span>
      </div>
      <button type="button" class="new" onClick={fresh}>
        <Icon name="plus" />
        {t("newChat")}
      </button>
      <label class="search">
        <Icon name="search" />
        <input type="search" placeholder={t("search")} aria-label={t("search")} value={words} onInput={(e) => setWords(e.currentTarget.value)} />
      </label>
      <ul class="entries">
        {found.map((kept) => (
          <Entry key={kept.id} kept={kept} onOpen={onOpen} />
        ))}
      </ul>
      {!found.length && <p class="quiet pad">{words ? t("noneFound") : t("noneYet")}</p>}
      <div class="foot">
        <button type="button" class="bare" onClick={onSettings}>
          <Icon name="gear" />
          {t("settings")}
        </button>
        <a href="system">
          <Icon name="pulse" />
          {t("system")}
        </a>
        <a href="docs">{t("api")}</a>
      </div>
    </nav>
  );
}
