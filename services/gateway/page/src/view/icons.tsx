// Drawn here: nothing is loaded for them.
const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 6h16M4 12h16M4 18h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11.5l-8.2 8.2a5 5 0 0 1-7-7l8.4-8.4a3.3 3.3 0 0 1 4.7 4.7l-8.2 8.2a1.6 1.6 0 0 1-2.3-2.3l7.3-7.3",
  camera: "M4 8h3.5L9 5.5h6L16.5 8H20v11H4zM12 16.5a3.3 3.3 0 1 0 0-6.6 3.3 3.3 0 0 0 0 6.6z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19z",
  again: "M20 12a8 8 0 1 1-2.5-5.8M20 4v5h-5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  gear: "M5 7h8M17 7h2M5 17h2M11 17h8M15 4.5v5M9 14.5v5",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  search: "M10.5 17a6.5 6.5 0 1 0 0-13 6.5 6.5 0 0 0 0 13zM15.5 15.5L20 20",
  pulse: "M3 12h4l2.5-7 5 14 2.5-7h4",
  tool: "M14 7a4 4 0 0 0 5 5l-8.5 8.5a2 2 0 0 1-3-3L16 9M14 7l3-3",
  play: "M8 5.5v13l10.5-6.5z",
  film: "M4 5h16v14H4zM8 5v14M16 5v14M4 12h16",
} as const;

export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

/** A mosaic of four stones. */
export function Logo() {
  return (
    <svg class="logo" viewBox="0 0 24 24" aria-hidden="true">
      <path class="stone-a" d="M2 3.2L10.8 2l.2 8.8L3 11z" />
      <path class="stone-b" d="M13 2l8.5 1.2L22 11l-9-.4z" />
      <path class="stone-c" d="M2.5 13l8.3-.2.2 9.2-8-1.2z" />
      <path class="stone-d" d="M13 12.8l8.8.4-.8 8-8 .8z" />
    </svg>
  );
}
