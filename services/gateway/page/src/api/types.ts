// What the gateway says, as far as these pages read it.

export interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
  completion_tokens_details?: { reasoning_tokens?: number } | null;
}

export interface Chunk {
  error?: { message: string; code?: string };
  choices?: {
    delta: { content?: string | null; reasoning_content?: string | null; tool_calls?: CallDelta[] };
    finish_reason: string | null;
  }[];
  usage?: Usage | null;
}

export interface ModelCard {
  id: string;
  max_model_len?: number;
  parent?: string | null;
  tasks?: string[];
}

export interface RequestState {
  id: string;
  status: string;
  attempts: number;
  exact: boolean;
  timeline: { arrived_ms: number; taken_ms: number | null; first_token_ms: number | null; ended_ms: number | null };
}

export interface StepTotals {
  steps: number;
  tokens: number;
  step_us: number;
  plan_us: number;
  transfer_us: number;
  prepare_us: number;
  forward_us: number;
  sample_us: number;
  predicted_us: number;
  target_us: number;
}

export interface DecoderState {
  id: string;
  scheduler: string;
  address: string;
  running: number;
  waiting: number;
  waiting_for_media: number;
  kv_blocks_used: number;
  kv_blocks_total: number;
  block_size: number;
  preemptions: number;
  prefix_queries: number;
  prefix_hits: number;
  adapters: string[];
  steps: StepTotals;
}

/** Of a gateway, preprocess or vision encoder: what it does at the moment, and sums since its start. */
export type Load = Readonly<Record<string, number>>;

export interface Replica {
  id: string;
  address: string;
  numerics: string;
  load: Load | null;
}

export interface RecentError {
  at_unix_s: number;
  gateway: string;
  status: number;
  code: string;
  path: string;
  request_id: string;
}

export interface SystemState {
  model: string;
  version: string;
  missing: string[];
  takes: string[];
  limits: { max_body_bytes: number; max_model_len: number };
  open_answers: number;
  now_unix_s: number;
  services: { service: string; replicas: Replica[] }[];
  decoders: DecoderState[];
  queue: { live: number; live_tokens: number; running: number; waiting: number };
  errors: RecentError[];
}
