import { useEffect, useRef, useState } from "preact/hooks";
import { t } from "../text/text";
import { Dialog } from "./dialog";

/** Whether there is one; browsers tell secure pages alone. */
export function useCamera(): boolean {
  const [there, setThere] = useState(false);
  useEffect(() => {
    navigator.mediaDevices
      ?.enumerateDevices()
      .then((devices) => setThere(devices.some((device) => device.kind === "videoinput")))
      .catch(() => undefined);
  }, []);
  return there;
}

export function CameraDialog({ onFile, onClose }: { onFile: (file: File) => void; onClose: () => void }) {
  const video = useRef<HTMLVideoElement>(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    let stream: MediaStream | undefined;
    let left = false;
    navigator.mediaDevices
      .getUserMedia({ video: { facingMode: "environment" } })
      .then((found) => {
        stream = found;
        if (left) return release(found);
        video.current!.srcObject = found;
      })
      .catch((error: Error) => setTrouble(error.message || error.name));
    return () => {
      left = true;
      if (stream) release(stream);
    };
  }, []);
  const take = () => {
    const from = video.current!;
    const canvas = document.createElement("canvas");
    canvas.width = from.videoWidth;
    canvas.height = from.videoHeight;
    canvas.getContext("2d")?.drawImage(from, 0, 0);
    canvas.toBlob((blob) => {
      if (blob) onFile(new File([blob], "camera.jpg", { type: "image/jpeg" }));
      onClose();
    }, "image/jpeg", 0.92);
  };
  const [ready, setReady] = useState(false);
  return (
    <Dialog title={t("camera")} onClose={onClose}>
      {trouble ? <p class="warning">{t("cameraFailed", { why: trouble })}</p> : <video ref={video} autoplay playsInline muted class="camera" onLoadedData={() => setReady(true)} />}
      <div class="actions">
        <button type="button" onClick={onClose}>
          {t("cancel")}
        </button>
        <button type="button" class="primary" disabled={!ready} onClick={take}>
          {t("capture")}
        </button>
      </div>
    </Dialog>
  );
}

function release(stream: MediaStream): void {
  for (const track of stream.getTracks()) track.stop();
}
