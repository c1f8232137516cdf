// What a file is, by its first bytes; names and types of browsers are hints.

export type FileKind = { kind: "image" | "video"; type: string } | { kind: "text" } | { kind: "svg" } | { kind: "other" };

const IMAGES: [string, number[]][] = [
  ["image/png", [0x89, 0x50, 0x4e, 0x47]],
  ["image/jpeg", [0xff, 0xd8, 0xff]],
  ["image/gif", [0x47, 0x49, 0x46, 0x38]],
  ["image/bmp", [0x42, 0x4d]],
  ["image/tiff", [0x49, 0x49, 0x2a, 0x00]],
  ["image/tiff", [0x4d, 0x4d, 0x00, 0x2a]],
];
const TEXT = /\.(txt|md|markdown|csv|tsv|json|jsonl|log|xml|html?|css|ya?ml|toml|ini|py|js|ts|tsx|jsx|c|h|cc|cpp|hpp|rs|go|java|kt|rb|sh|sql|tex)$/i;

export const ACCEPT =
  "image/png,image/jpeg,image/webp,image/gif,image/bmp,image/tiff,video/mp4,video/webm,video/quicktime," +
  "video/x-matroska,video/x-msvideo,.mkv,.avi,text/plain,.txt,.md,.csv,.json,.log,.py,.js,.ts,.yaml";

export async function kindOf(file: File): Promise<FileKind> {
  const head = new Uint8Array(await file.slice(0, 64).arrayBuffer());
  if (file.type === "image/svg+xml" || /\.svgz?$/i.test(file.name)) return { kind: "svg" };
  for (const [type, mark] of IMAGES) if (mark.every((byte, at) => head[at] === byte)) return { kind: "image", type };
  const words = String.fromCharCode(...head);
  if (words.startsWith("RIFF")) {
    if (words.slice(8, 12) === "WEBP") return { kind: "image", type: "image/webp" };
    if (words.slice(8, 11) === "AVI") return { kind: "video", type: "video/x-msvideo" };
  }
  if (words.slice(4, 8) === "ftyp") {
    const brand = words.slice(8, 12);
    if (/^(heic|heix|mif1|avif)/.test(brand)) return { kind: "other" };
    return { kind: "video", type: brand.startsWith("qt") ? "video/quicktime" : "video/mp4" };
  }
  if (head[0] === 0x1a && head[1] === 0x45) {
    return { kind: "video", type: /\.mkv$/i.test(file.name) ? "video/x-matroska" : "video/webm" };
  }
  if (file.type.startsWith("text/") || TEXT.test(file.name)) return { kind: "text" };
  return { kind: "other" };
}
