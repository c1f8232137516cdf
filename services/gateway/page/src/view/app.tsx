import { useEffect, useState } from "preact/hooks";
import { stopAll } from "../state/answering";
import { begin } from "../state/chat";
import { t } from "../text/text";
import { Composer, putFiles } from "./composer";
import { ConversationView } from "./conversation";
import { Icon } from "./icons";
import { KeyDialog } from "./key-dialog";
import { ModelChoice, SettingsDialog } from "./settings-dialog";
import { Sidebar } from "./sidebar";

function useDrops(setOver: (over: boolean) => void): void {
  useEffect(() => {
    let depth = 0;
    const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    const enter = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      depth += 1;
      setOver(true);
    };
    const leave = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      depth = Math.max(0, depth - 1);
      if (!depth) setOver(false);
    };
    const over = (event: DragEvent) => hasFiles(event) && event.preventDefault();
    const drop = (event: DragEvent) => {
      depth = 0;
      setOver(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      putFiles([...(event.dataTransfer?.files ?? [])]);
    };
    const paste = (event: ClipboardEvent) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      putFiles(files);
    };
    const key = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]") && stopAll()) event.preventDefault();
    };
    const all: [string, (event: never) => void][] = [
      ["dragenter", enter],
      ["dragleave", leave],
      ["dragover", over],
      ["drop", drop],
      ["paste", paste],
      ["keydown", key],
    ];
    for (const [name, listener] of all) document.addEventListener(name, listener as EventListener);
    return () => {
      for (const [name, listener] of all) document.removeEventListener(name, listener as EventListener);
    };
  }, []);
}

export function App() {
  const [menu, setMenu] = useState(false);
  const [settingsOpen, setSettingsOpen] = useState(false);
  const [over, setOver] = useState(false);
  useDrops(setOver);
  return (
    <div class={menu ? "app menu-open" : "app"}>
      <Sidebar onOpen={() => setMenu(false)} onSettings={() => setSettingsOpen(true)} />
      {menu && <button type="button" class="shade" aria-label={t("closeMenu")} onClick={() => setMenu(false)} />}
      <main>
        <header class="top">
          <button type="button" class="bare menu" aria-label={t("menu")} aria-expanded={menu} onClick={() => setMenu(!menu)}>
            <Icon name="menu" />
          </button>
          <ModelChoice />
          <button type="button" class="bare menu" aria-label={t("newChat")} onClick={begin}>
            <Icon name="plus" />
          </button>
        </header>
        <ConversationView />
        <div class="dock">
          <Composer />
        </div>
      </main>
      {over && <div class="drop">{t("dropHere")}</div>}
      {settingsOpen && <SettingsDialog onClose={() => setSettingsOpen(false)} />}
      <KeyDialog />
    </div>
  );
}
