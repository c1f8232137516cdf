// Conversations as they are kept.
import type { Usage } from "../api/types";

export interface Attachment {
  id: string; // of its bytes in the store of media
  kind: "image" | "video";
  name: string;
  type: string;
  size: number;
  tokens?: number; // what it costs in a prompt, once that is known
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface ToolResult {
  callId: string;
  text: string;
}

export interface Figures {
  usage?: Usage;
  firstMs?: number; // as this page saw it
  totalMs?: number;
  waitMs?: number; // from arrival until a scheduler took it, by the server's clock
  prefillMs?: number; // from there to the first token: encoding and prefill
  decodeMs?: number;
  attempts?: number;
  exact?: boolean;
}

export type Status = "running" | "done" | "stopped" | "failed";

export interface Node {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  created: number;
  text: string;
  attachments?: Attachment[]; // user
  results?: ToolResult[]; // tool
  // assistant
  reasoning?: string;
  calls?: ToolCall[];
  status?: Status;
  finish?: string;
  error?: string;
  model?: string;
  requestId?: string;
  resumed?: number; // how often it went on behind a break
  figures?: Figures;
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  nodes: Node[];
  choice: Record<string, string>; // of a node with several children the one that is shown; "" is above the roots
}
