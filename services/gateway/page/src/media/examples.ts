// Pictures that are drawn here, with questions about them.
import type { Texts } from "../text/en";

type Draw = (c: CanvasRenderingContext2D) => void;

export interface Example {
  id: string;
  question: keyof Texts;
  draw?: Draw;
}

const SIZE = 288;
const RED = "#d8322f";
const BLUE = "#2b59c3";
const GREEN = "#2f9e44";
const YELLOW = "#f2c037";

function ground(c: CanvasRenderingContext2D, colour: string): void {
  c.fillStyle = colour;
  c.fillRect(0, 0, SIZE, SIZE);
}

function circle(c: CanvasRenderingContext2D, x: number, y: number, r: number, colour: string): void {
  c.fillStyle = colour;
  c.beginPath();
  c.arc(x, y, r, 0, 2 * Math.PI);
  c.fill();
}

function polygon(c: CanvasRenderingContext2D, points: number[][], colour: string): void {
  c.fillStyle = colour;
  c.beginPath();
  for (const [x, y] of points) c.lineTo(x!, y!);
  c.fill();
}

function shapes(c: CanvasRenderingContext2D): void {
  ground(c, "#ffffff");
  circle(c, 72, 76, 44, RED);
  c.fillStyle = BLUE;
  c.fillRect(176, 34, 82, 82);
  polygon(c, [[144, 168], [196, 258], [92, 258]], GREEN);
}

function circles(c: CanvasRenderingContext2D): void {
  ground(c, "#ffffff");
  circle(c, 70, 72, 42, BLUE);
  circle(c, 212, 76, 42, YELLOW);
  c.fillStyle = RED;
  c.fillRect(104, 176, 82, 82);
}

function digits(c: CanvasRenderingContext2D): void {
  ground(c, "#ffffff");
  c.fillStyle = "#111111";
  c.font = "bold 150px 'DejaVu Sans', Arial, sans-serif";
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.fillText("42", SIZE / 2, SIZE / 2);
}

const ABOUT_SHAPES: Example[] = [
  { id: "shapes", question: "exTriangles", draw: shapes },
  { id: "circles", question: "exCount", draw: circles },
  { id: "digits", question: "exNumber", draw: digits },
  { id: "again", question: "exChinese", draw: shapes },
];
const OTHERS: Example[] = [
  { id: "haiku", question: "exHaiku" },
  { id: "explain", question: "exExplain" },
  { id: "table", question: "exTable" },
];

/** Examples that a model can answer: the demo model knows shapes, colours and numbers. */
export function examplesFor(model: string, takesPictures: boolean): Example[] {
  if (model === "tessera-demo") return ABOUT_SHAPES;
  return takesPictures ? [{ id: "describe", question: "exDescribe", draw: shapes }, ...OTHERS] : OTHERS;
}

export function draw(canvas: HTMLCanvasElement, example: Example): void {
  canvas.width = canvas.height = SIZE;
  const context = canvas.getContext("2d");
  if (context) example.draw?.(context);
}

export function drawnFile(example: Example): Promise<File> {
  const canvas = document.createElement("canvas");
  draw(canvas, example);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => {
      if (blob) resolve(new File([blob], `${example.id}.png`, { type: "image/png" }));
      else reject(new Error("no picture"));
    }, "image/png");
  });
}
