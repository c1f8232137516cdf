import { useEffect, useState } from "preact/hooks";
import { getMedia } from "../state/store";
import type { Attachment } from "../state/types";
import { t } from "../text/text";
import { Dialog } from "./dialog";
import { Icon } from "./icons";

/** A picture or a video by an address within this page; what the browser cannot show is named. */
export function Preview({ kind, url, name, large }: { kind: Attachment["kind"]; url: string; name: string; large?: boolean }) {
  const [failed, setFailed] = useState(false);
  if (failed || !url) {
    return (
      <span class="no-preview">
        <Icon name="film" />
        <span>{name}</span>
      </span>
    );
  }
  if (kind === "image") return <img src={url} alt={name} onError={() => setFailed(true)} />;
  const video = <video src={url} muted playsInline controls={large ?? false} preload="metadata" aria-label={name} onError={() => setFailed(true)} />;
  if (large) return video;
  return (
    <span class="clip">
      {video}
      <span class="play">
        <Icon name="play" />
      </span>
    </span>
  );
}

function useMediaUrl(id: string): string {
  const [url, setUrl] = useState("");
  useEffect(() => {
    let made = "";
    let left = false;
    void getMedia(id).then((blob) => {
      if (!blob || left) return;
      made = URL.createObjectURL(blob);
      setUrl(made);
    });
    return () => {
      left = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [id]);
  return url;
}

export function Sent({ attachment }: { attachment: Attachment }) {
  const url = useMediaUrl(attachment.id);
  const [large, setLarge] = useState(false);
  return (
    <>
      <button type="button" class="sent" aria-label={t("openPicture", { name: attachment.name })} onClick={() => setLarge(true)}>
        <Preview kind={attachment.kind} url={url} name={attachment.name} />
      </button>
      {large && (
        <Dialog title={attachment.name} onClose={() => setLarge(false)} kind="picture">
          <Preview kind={attachment.kind} url={url} name={attachment.name} large />
        </Dialog>
      )}
    </>
  );
}
