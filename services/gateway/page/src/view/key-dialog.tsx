import { useState } from "preact/hooks";
import { asking, giveKey, hasKey, refuseKey } from "../state/key";
import { t } from "../text/text";
import { Dialog } from "./dialog";

/** Asks for the API key where the server wants one. */
export function KeyDialog() {
  const [key, setKey] = useState("");
  const [remember, setRemember] = useState(false);
  if (!asking.value) return null;
  return (
    <Dialog title={t("keyTitle")} onClose={refuseKey}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (key.trim()) giveKey(key, remember);
          setKey("");
        }}
      >
        {hasKey.value && <p class="warning">{t("wrongKey")}</p>}
        <label class="field">
          {t("apiKey")}
          <input type="password" autocomplete="off" autofocus value={key} onInput={(e) => setKey(e.currentTarget.value)} />
        </label>
        <label class="check">
          <input type="checkbox" checked={remember} onChange={(e) => setRemember(e.currentTarget.checked)} />
          {t("keyRemember")}
        </label>
        <p class="quiet">{t("keyHint")}</p>
        <div class="actions">
          <button type="button" onClick={refuseKey}>
            {t("cancel")}
          </button>
          <button class="primary">{t("useKey")}</button>
        </div>
      </form>
    </Dialog>
  );
}
