/**
 * The contract between the web UI and the server: every type and every call that the UI uses.
 *
 * Conventions
 * - Paths, methods and bodies are as in `crates/api/src/operations.rs`; routes that are new there are marked NEW.
 * - A call is `POST` with a JSON body unless it says otherwise. Fields are snake_case.
 * - `Time` is RFC 3339 in UTC. `as_of` is the database clock in microseconds at which rows were read.
 * - Every call sends `X-Windlass-UI: 1`; calls that change something send an `Idempotency-Key`.
 * - Refusals are `{detail}` as in `crates/api/src/error.rs`; 429 and 503 carry `Retry-After`.
 */
import { call, query, type CallOptions } from '../lib/call';

/** A moment, RFC 3339 in UTC. */
export type Time = string;
/** A UUID. */
export type Id = string;
/** A document whose shape belongs to the configuration reference, shown as it is. */
export type Document = Record<string, unknown>;

// ---------------------------------------------------------------------------------------------- session (NEW)

export type ProjectRole = 'user' | 'manager' | 'admin';

/** A project of the caller, as the session knows it. */
export interface SessionProject {
  /** Id of the project, for filters of `events/list`. */
  id: Id;
  /** Name of the project, as in paths. */
  name: string;
  /** The caller's role in it; global admins have `admin` everywhere. */
  role: ProjectRole;
}

/** Who is logged in and what they may see. */
export interface Session {
  /** The caller. */
  user: { id: Id; username: string; email: string | null; global_role: 'admin' | 'user' };
  /** Projects the caller may see, by name. */
  projects: SessionProject[];
  /** When the session began. */
  opened_at: Time;
  /** When it ends at the latest. */
  expires_at: Time;
  /** Whether the connection is neither TLS nor loopback; the UI shows a warning band. */
  insecure: boolean;
  /** Version of the server. */
  server_version: string;
  /** Time of the server, from which the page takes the offset of its own clock. */
  now: Time;
}

/** One session of the caller. */
export interface SessionInfo {
  id: Id;
  /** Address of the last call. */
  address: string;
  /** Browser in words, from `User-Agent`. */
  browser: string;
  opened_at: Time;
  last_seen_at: Time;
  expires_at: Time;
  /** Whether it is the session that asks. */
  current: boolean;
}

export const session = {
  /** NEW `/api/session/open`: logs in with a token, or with a single-use code of `windlass ui`; sets the cookie. */
  open: (body: { token: string } | { code: string }) => call<Session>('/api/session/open', body, { quiet: true }),
  /** `/api/session/methods`: how users log in, besides tokens and codes. */
  methods: () => call<{ oidc: { name: string } | null }>('/api/session/methods', {}, { quiet: true }),
  /** `/api/session/oidc/start`: begins a login with the identity provider, whose page the browser opens next. */
  startOidc: () => call<{ url: string }>('/api/session/oidc/start', {}, { quiet: true }),
  /** `/api/session/oidc/finish`: opens the session once the provider has sent the browser back to `/ui/login`. */
  finishOidc: (body: { code: string; state: string }) => call<Session>('/api/session/oidc/finish', body, { quiet: true }),
  /** NEW `/api/session/get`: the session of the cookie; 401 without one. */
  get: () => call<Session>('/api/session/get', {}, { quiet: true }),
  /** NEW `/api/session/close`: ends the session and clears the cookie. */
  close: () => call<null>('/api/session/close', {}),
  /** NEW `/api/session/list`: sessions of the caller, the latest first. */
  list: () => call<{ sessions: SessionInfo[] }>('/api/session/list', {}),
  /** NEW `/api/session/revoke`: ends sessions of the caller. */
  revoke: (ids: Id[]) => call<null>('/api/session/revoke', { ids }, change()),
};

// ---------------------------------------------------------------------------------------------- feed (NEW)

/** What a change is about. */
export type Kind = 'run' | 'job' | 'instance' | 'fleet' | 'volume' | 'gateway' | 'managed-job' | 'container';

/** Event `hello`: the first of every connection. */
export interface FeedHello {
  /** Position of the feed now. */
  seq: number;
  /** Version of the server. */
  server_version: string;
  /** Name of the entry script of the UI that the server carries; another one than the page's means: reload. */
  ui_version: string;
  /** Time of the server. */
  now: Time;
}

/** Event `change`; its SSE `id` is `seq`. */
export interface FeedChange {
  /** Position in the feed: `events.seq`, or that of the last event for a change without one. */
  seq: number;
  /** Database clock in microseconds when `row` was read; the larger one is newer. */
  as_of: number;
  kind: Kind;
  id: Id;
  project: string;
  name: string;
  /** Status before, where an event told it. */
  from: string | null;
  /** Status after. */
  to: string | null;
  /** Reason word, as in `events.reason`. */
  reason: string | null;
  /** The sentence of the event; null for changes without an event (busy blocks, pull progress, readiness). */
  message: string | null;
  /** The row of section "rows" for run, managed-job, instance and container; null for the other kinds. */
  row: RunRow | ManagedJobRow | InstanceRow | ContainerRow | null;
}

/** Event `gone`: the row was deleted, or the caller lost the right to see it. */
export interface FeedGone {
  seq: number;
  as_of: number;
  kind: Kind;
  id: Id;
}

/**
 * NEW `GET /api/changes/stream?projects=a,b&kinds=run,job&since=SEQ` (SSE).
 * Events: `hello`, `change`, `gone`, `counts` (a `Summary` without `attention` and `pipelines`, at most once a
 * second), `resync` (ask for the lists again). A comment line every 5 s shows that the connection lives.
 */
export const changesPath = (since: number | null) => query('/api/changes/stream', { since });

// ---------------------------------------------------------------------------------------------- rows (NEW)

export type RunType = 'task' | 'service' | 'dev-environment';
export type RunStatus =
  | 'pending' | 'submitted' | 'provisioning' | 'running' | 'terminating' | 'terminated' | 'failed' | 'done';

/** One run in a list; about 400 bytes, since fields that are null may be left out. */
export interface RunRow {
  id: Id;
  project: string;
  name: string;
  type: RunType;
  user: string;
  status: RunStatus;
  /** `status_message` of the run: the status in words where it differs, for example `pulling 42 %`. */
  message: string | null;
  /** One line: the nearest miss while it waits, the reason of its end afterwards. */
  reason: string | null;
  /** Reason word of its end, as in `termination_reason`. */
  termination_reason: string | null;
  /** Runs in front of it in the queue; null when it does not wait for an instance. */
  queue_position: number | null;
  /** Fleet it runs in or ran in. */
  fleet: string | null;
  /** Instance of its first job, with `+N` for more. */
  instance: string | null;
  /** What it asks for, in words: `8 CPU, 64 GB, 4 x H100 80 GB`. */
  resources: string;
  /** GPU name, null without GPUs. */
  gpu: string | null;
  /** GPUs it asks for, all nodes together. */
  gpus: number;
  /** Jobs or replicas that run (a service: that are ready). */
  ready: number;
  /** Jobs or replicas that there shall be. */
  wanted: number;
  /** Submissions of its most-tried job. */
  attempts: number;
  /** Dollars so far. */
  cost: number;
  /** Dollars an hour now; 0 when nothing of it runs. */
  price: number;
  /** Id of the newest submission of job 0, replica 0: where its log is; null before the first. */
  submission_id: Id | null;
  /** Managed job it is an attempt of. */
  managed_job: number | null;
  submitted_at: Time;
  /** When its first job began to run. */
  started_at: Time | null;
  finished_at: Time | null;
}

/** One task of a managed job in a list. */
export interface ManagedJobRow {
  /** `JOB_ID/TASK_ID`: unique in its project. */
  id: string;
  /** Id of the managed job. */
  uuid: Id;
  /** Number people call it by. */
  job_id: number;
  task_id: number;
  /** Tasks of the job. */
  tasks: number;
  project: string;
  /** Name of the job. */
  name: string;
  /** Name of the task. */
  task: string;
  user: string;
  /** As in `docs/transitions/managed-job.txt`: `PENDING`, `RUNNING`, `RECOVERING`, `SUCCEEDED`, … */
  status: string;
  /** As in `docs/transitions/managed-job-schedule.txt`. */
  schedule_state: string;
  /** What it waits for, or why it ended. */
  reason: string | null;
  /** Newest attempt; 0 before the first. */
  attempt: number;
  recoveries: number;
  /** Market of the newest attempt. */
  market: 'spot' | 'on-demand' | null;
  /** Where the newest attempt runs. */
  placement: string | null;
  /** What it asks for, in words. */
  resources: string;
  /** Deadline, if the task has one. */
  deadline: Time | null;
  /** Seconds ahead of the deadline's line; negative is behind. */
  slack_seconds: number | null;
  cost: number;
  submitted_at: Time;
  started_at: Time | null;
  finished_at: Time | null;
}

/** One instance in a list. */
export interface InstanceRow {
  id: Id;
  project: string;
  name: string;
  fleet: string | null;
  /** Number in its fleet, for `fleets/delete_instances`. */
  instance_num: number;
  /** `ssh`, `local`, `slurm`, `aws`, … */
  backend: string;
  region: string | null;
  status: 'pending' | 'provisioning' | 'idle' | 'busy' | 'terminating' | 'terminated';
  /** Where it stands on its way, or what is wrong with it. */
  message: string | null;
  health: 'healthy' | 'warning' | 'failure';
  /** Since when its agent does not answer; null when it does. */
  unreachable_since: Time | null;
  /** Whether it takes no new jobs. */
  draining: boolean;
  /** What it has, in words. */
  resources: string;
  gpu: string | null;
  gpus: number;
  cpus: number;
  memory_mib: number;
  blocks_total: number;
  blocks_busy: number;
  market: 'spot' | 'on-demand' | null;
  /** Dollars an hour. */
  price: number;
  /** Jobs on it. */
  jobs: { run: string; project: string; run_id: Id; job: string; blocks: number }[];
  /** Used now, 0 to 1; null where it is not known. */
  used: { cpu: number | null; memory: number | null; gpu: number | null };
  created_at: Time;
  finished_at: Time | null;
}

/** One container of the queue in a list. */
export interface ContainerRow {
  /** Id in the feed; equals `uuid`. */
  id: string;
  /** Arvados UUID. */
  uuid: string;
  /** Name of the newest request for it. */
  name: string;
  state: 'Queued' | 'Locked' | 'Running' | 'Complete' | 'Cancelled';
  priority: number;
  /** Name of the dispatcher that holds it. */
  dispatcher: string | null;
  /** What the dispatcher said last (`scheduling_status`). */
  said: string | null;
  attempt: number;
  owner: string;
  /** What it asks for, in words. */
  resources: string;
  exit_code: number | null;
  cost: number;
  created_at: Time;
  started_at: Time | null;
  finished_at: Time | null;
}

/** Request of every `rows` route. Empty or absent lists do not filter. */
export interface RowsRequest {
  projects?: string[];
  users?: string[];
  statuses?: string[];
  /** Run types; `backend`s for instances; schedule states for managed jobs; dispatchers for containers. */
  types?: string[];
  fleets?: string[];
  /** Part of name, user, reason or message, without regard to case. */
  text?: string;
  /** Submitted (created) at or after. */
  since?: Time;
  /** Submitted (created) before. */
  until?: Time;
  /** A column of `RunSort` and the like; a leading `-` is descending. */
  sort?: string;
  /** Opaque, from `next` or `prev`. */
  cursor?: string;
  /** 0 to 500; 0 answers counts and total alone. */
  limit?: number;
}

/** Columns that runs can be sorted by. */
export const RUN_SORTS = ['submitted_at', 'name', 'status', 'user', 'cost', 'duration'] as const;

/** Answer of every `rows` route. */
export interface Rows<Row> {
  rows: Row[];
  /** Cursor of the rows after these; null at the end. */
  next: string | null;
  /** Cursor of the rows before these; null at the beginning. */
  prev: string | null;
  /** Rows by status, for the same filter without its `statuses`. */
  counts: Record<string, number>;
  /** Rows of the filter, exact to 10,000. */
  total: number;
  /** Whether there are more than `total`. */
  more: boolean;
  /** Database clock in microseconds at which the rows were read. */
  as_of: number;
}

/** Fields of rows that may be absent on the wire, to keep rows short; absent means null. */
const NULLABLE: Partial<Record<Kind, readonly string[]>> = {
  run: ['message', 'reason', 'termination_reason', 'queue_position', 'fleet', 'instance', 'gpu', 'submission_id', 'managed_job', 'started_at', 'finished_at'],
  'managed-job': ['reason', 'market', 'placement', 'deadline', 'slack_seconds', 'started_at', 'finished_at'],
  instance: ['fleet', 'region', 'message', 'unreachable_since', 'gpu', 'market', 'finished_at'],
  container: ['dispatcher', 'said', 'exit_code', 'started_at', 'finished_at'],
};

/** The row with every field that was left out set to null. */
export function completeRow<Row>(kind: Kind, row: Row): Row {
  const fields = row as Record<string, unknown>;
  for (const name of NULLABLE[kind] ?? []) fields[name] ??= null;
  return row;
}

async function fetchRows<Row>(path: string, kind: Kind, body: RowsRequest, o?: CallOptions): Promise<Rows<Row>> {
  const answer = await call<Rows<Row>>(path, body, o);
  for (const row of answer.rows) completeRow(kind, row);
  return answer;
}

export const rows = {
  /** NEW `/api/runs/rows` */
  runs: (body: RowsRequest, o?: CallOptions) => fetchRows<RunRow>('/api/runs/rows', 'run', body, o),
  /** NEW `/api/jobs/rows`: managed jobs, one row per task. */
  jobs: (body: RowsRequest, o?: CallOptions) => fetchRows<ManagedJobRow>('/api/jobs/rows', 'managed-job', body, o),
  /** NEW `/api/instances/rows` */
  instances: (body: RowsRequest, o?: CallOptions) => fetchRows<InstanceRow>('/api/instances/rows', 'instance', body, o),
  /** NEW `/api/containers/rows` */
  containers: (body: RowsRequest, o?: CallOptions) => fetchRows<ContainerRow>('/api/containers/rows', 'container', body, o),
};

/** Nodes of one kind that a dispatcher announced. */
export interface DispatcherNodes {
  partition: string;
  cpus: number;
  memory_mib: number;
  gpus: number;
  gpu_type: string;
  count: number;
}

/** A process that takes containers from the queue. */
export interface Dispatcher {
  /** Null: it works without a name. */
  name: string | null;
  kind: string | null;
  online: boolean;
  /** Last time at which it announced its nodes. */
  seen_at: Time | null;
  /** Global admins only, like `process`. */
  held_until: Time | null;
  /** Machine and process id. */
  process: string | null;
  nodes: DispatcherNodes[];
  /** Containers that the caller may see. */
  locked: number;
  running: number;
}

export interface DispatcherList {
  as_of: number;
  dispatchers: Dispatcher[];
  /** Containers that no dispatcher has locked. */
  queued: number;
}

export const dispatchers = {
  /** NEW `/api/dispatchers/list` */
  list: (o?: CallOptions) => call<DispatcherList>('/api/dispatchers/list', {}, o),
};

// ---------------------------------------------------------------------------------------------- overview, search (NEW)

/** Something that needs attention. */
export interface Attention {
  what: 'failed' | 'waiting' | 'unreachable' | 'unhealthy' | 'pipeline';
  kind: Kind | 'server';
  id: string;
  project: string | null;
  name: string;
  /** One sentence. */
  reason: string;
  since: Time;
}

/** Counts of runs at the end of each step; `failed` are those within each. */
export interface RunHistory {
  step_seconds: number;
  running: number[];
  waiting: number[];
  failed: number[];
}

/** State of everything the caller may see. */
export interface Summary {
  as_of: number;
  /** Rows by status, of each kind. Final statuses count those of the last 24 hours. */
  runs: Record<string, number>;
  managed_jobs: Record<string, number>;
  instances: Record<string, number>;
  containers: Record<string, number>;
  fleets: Record<string, number>;
  volumes: Record<string, number>;
  gateways: Record<string, number>;
  /** Blocks of instances that are idle or busy. `used` is 0 to `taken`: blocks weighted by their use. */
  blocks: { total: number; taken: number; used: number };
  gpus: { total: number; taken: number };
  queue: {
    /** Runs that wait for an instance. */
    length: number;
    /** Since when the oldest waits. */
    oldest: Time | null;
  };
  /** Runs that failed within 24 hours, by reason word, the most frequent first. */
  failures: { reason: string; count: number }[];
  /** Dollars: since midnight UTC, in 7 days, and an hour now. */
  cost: { today: number; week: number; per_hour: number };
  /** At most 10, the most urgent first. Not in the feed. */
  attention?: Attention[];
  /** Pipelines that lag: the oldest row waits longer than 5 s. Global admins only. Not in the feed. */
  pipelines?: { name: string; lag_seconds: number }[];
  /** Runs over the last hour, the oldest step first. Not in the feed. */
  history?: RunHistory;
}

/** One hit of a search over names and ids. */
export interface Hit {
  kind: Kind | 'project' | 'user';
  id: string;
  project: string | null;
  name: string;
  status: string | null;
  /** What tells it apart: type and owner. */
  hint: string | null;
}

export const overview = {
  /** NEW `/api/summary` */
  summary: (body: { projects?: string[] } = {}, o?: CallOptions) => call<Summary>('/api/summary', body, o),
  /** NEW `/api/search` */
  search: (body: { text: string; limit: number }, o?: CallOptions) => call<{ hits: Hit[] }>('/api/search', body, o),
};

// ---------------------------------------------------------------------------------------------- explanations (NEW)

/** A change of a configuration: path to value; null removes. For example `{"resources.gpu.count": 4}`. */
export type Patch = Record<string, string | number | boolean | null>;

/** One reason why something does not fit somewhere. `windlass_model::explain::Shortfall` with `patch` added. */
export interface Shortfall {
  /** Stable word: `busy`, `gpu_count`, `price`, … */
  kind: string;
  /** Clause with numbers: `needs at least 8 GPUs, has 4`. */
  message: string;
  /** Clause that says what would help. */
  cure: string;
  /** Whether waiting alone may cure it. */
  passes: boolean;
  /** The cure as a change of the configuration, where there is one. */
  patch: Patch | null;
}

/** A place, or several alike, that refused a job. */
export interface Refusal {
  /** Name of the place: an instance, `fleet NAME`, or `offers of BACKEND`. */
  place: string;
  /** Id of the instance or fleet; null for offers. */
  place_id: Id | null;
  place_kind: 'instance' | 'fleet' | 'offer';
  /** Places that it stands for. */
  count: number;
  shortfalls: Shortfall[];
}

/** A change that would help, over all places. */
export interface Cure {
  /** A clause: `lower the GPU count to 4`. */
  message: string;
  patch: Patch | null;
  /** Places where nothing else is missing. */
  fits: number;
  /** Whether it would start at once there. */
  starts_now: boolean;
}

/** Somebody in front in the queue. Names are null where the caller may not see them. */
export interface RunInFront {
  position: number;
  project: string | null;
  run: string | null;
  /** What it asks for, in words. */
  wants: string;
  /** Rule that puts it there: `class`, `share`, `usage`, `priority` or `age`. */
  rule: string;
  waits_since: Time;
}

/** Where a waiting run is in its queue, as far as pages show it. */
export interface QueueTurn {
  /** `urgent`, `normal` or `idle`. */
  class: string;
  /** Start if all jobs last until their time limits; null if that depends on a job without one. */
  starts_at: Time | null;
  /** All of it in sentences. */
  sentences: string[];
}

/** One job of an explanation. */
export interface WhyJob {
  replica: number;
  rank: number;
  submission_id: Id | null;
  status: string;
  /** Jobs in front of it; null when it does not wait for an instance. */
  position: number | null;
  in_front: RunInFront[];
  /** Nearest miss first. */
  refusals: Refusal[];
  /** Places that are not listed. */
  left_out: number;
}

/** Why something is as it is. */
export interface Why {
  /** One sentence that answers the question. */
  sentence: string;
  /** Further sentences, the most important first. */
  reasons: string[];
  jobs: WhyJob[];
  /** The best first. */
  cures: Cure[];
  deployment: DeploymentState | null;
  scaling: { group: string; desired: number; message: string | null }[];
  /** Replicas of a service and their probes. */
  probes: { replica: number; ready: boolean; success_streak: number; message: string | null }[];
  /** When the server looks again; null when nothing is due. */
  next_look_at: Time | null;
  /** Expected time of the first to end of those it waits for, by their limits. */
  expected: { run: string | null; ends_at: Time } | null;
  /** What to read or do next. */
  hint: string | null;
  /** The command line that says the same. */
  command: string;
  /** Its place in the queue, while it waits for an instance. */
  turn: QueueTurn | null;
  /** Its preemption, until it runs again. */
  preempted: { at: Time; rule: string; sentences: string[] } | null;
}

/** How the newest deployment of a service stands (`runs::Deployment`). */
export interface DeploymentState {
  num: number;
  state: 'rolling' | 'complete' | 'failed' | 'asleep';
  ready: number;
  wanted: number;
  old: number;
  message: string | null;
  rolled_back: { num: number; message: string } | null;
}

/** One entry of the queue of instances. */
export interface QueueEntry {
  /** Number of its queue in this list, from 0: projects that share fleets have one queue. */
  queue: number;
  /** Runs in front of it in its queue; positions repeat in the list where there are several queues. */
  position: number;
  /** Null where the caller may not see it: shown as "another project". */
  project: string | null;
  run: string | null;
  run_id: Id | null;
  user: string | null;
  type: RunType | null;
  /** Whether it is the caller's. */
  mine: boolean;
  /** What it wants, in words. */
  wants: string;
  waits_since: Time;
  /** Nearest miss. */
  nearest: { place: string; message: string; cure: string; patch: Patch | null } | null;
  /** Whether waiting is enough. */
  passes: boolean;
  /** Runs that hold what it waits for, at most 3. */
  blocked_by: { project: string | null; run: string | null; place: string; ends_at: Time | null }[];
  /** `urgent`, `normal` or `idle`. */
  class: string;
  /** Rule that puts it after the run before it in its queue; null for the first. */
  rule: string | null;
  /** Null where the caller may not see its project. */
  turn: QueueTurn | null;
}

/** Slots of managed jobs. */
export interface Slots {
  launching: number;
  launching_max: number;
  alive: number;
  alive_max: number;
}

export interface QueueList {
  as_of: number;
  entries: QueueEntry[];
  slots: Slots;
  /** The next to end by their limits, the earliest first, at most 5. */
  next_free: { project: string | null; run: string | null; place: string; ends_at: Time }[];
}

export interface Variant {
  label: string;
  patch: Patch;
}

/** What would become of one variant. */
export interface VariantResult {
  label: string;
  patch: Patch;
  starts_now: boolean;
  /** Whether waiting is enough when it does not start now. */
  passes: boolean;
  offers: Offer[];
  total_offers: number;
  /** Dollars an hour of the cheapest offer. */
  cheapest: number | null;
  refusals: Refusal[];
  left_out: number;
}

export const why = {
  /** NEW `/api/project/{p}/runs/why` */
  run: (p: string, body: { run_name?: string; id?: Id }, o?: CallOptions) => call<Why>(`/api/project/${e(p)}/runs/why`, body, o),
  /** NEW `/api/project/{p}/jobs/why` */
  job: (p: string, body: { job_id: number }, o?: CallOptions) => call<Why>(`/api/project/${e(p)}/jobs/why`, body, o),
  /** NEW `/api/project/{p}/instances/why`: why it is idle, kept, unreachable, draining; `next_look_at` is when it goes. */
  instance: (p: string, body: { id: Id }, o?: CallOptions) => call<Why>(`/api/project/${e(p)}/instances/why`, body, o),
  /** NEW `/api/queue/list` */
  queue: (o?: CallOptions) => call<QueueList>('/api/queue/list', {}, o),
  /** NEW `/api/project/{p}/runs/what_if`: of a run that exists (`run_name`) or of a `run_spec`. */
  whatIf: (p: string, body: { run_name?: string; run_spec?: Document; variants: Variant[] }, o?: CallOptions) =>
    call<{ variants: VariantResult[] }>(`/api/project/${e(p)}/runs/what_if`, body, o),
};

// ---------------------------------------------------------------------------------------------- events, timeline

export interface EventTarget {
  type: string;
  project_id: Id | null;
  project_name: string | null;
  id: Id;
  name: string;
}

/** `events::Event`; the fields below the line are NEW on the wire. */
export interface Event {
  id: Id;
  message: string;
  recorded_at: Time;
  /** Null is the system. */
  actor_user: string | null;
  targets: EventTarget[];
  // ------
  seq: number;
  /** What happened: `run.status_changed`, `instance.unreachable`, … */
  kind: string;
  /** Kind of the row it happened to. */
  entity: Kind | 'project' | 'user' | 'secret' | 'session';
  from: string | null;
  to: string | null;
  reason: string | null;
  /** Whether the row ended with it. */
  is_final: boolean;
  /** Component that acted: a pipeline, `api`, `shim`. */
  actor: string | null;
  /** `seq` of the event that caused it, where the server knows. */
  cause: number | null;
}

/** `events::ListRequest`; the fields below the line are NEW. */
export interface EventsRequest {
  target_runs?: Id[];
  target_fleets?: Id[];
  target_instances?: Id[];
  target_volumes?: Id[];
  target_gateways?: Id[];
  target_managed_jobs?: Id[];
  within_projects?: Id[];
  within_runs?: Id[];
  within_fleets?: Id[];
  prev_recorded_at?: Time;
  prev_id?: Id;
  limit?: number;
  ascending?: boolean;
  // ------
  reasons?: string[];
  kinds?: string[];
  entities?: string[];
  since?: Time;
  until?: Time;
  text?: string;
}

export type Phase = 'queue' | 'machine' | 'image' | 'start' | 'run' | 'stop' | 'drain';

/** A time in which one submission of one job was in one phase. */
export interface Span {
  replica: number;
  rank: number;
  submission: number;
  submission_id: Id;
  /** Attempt of the managed job; 0 for plain runs. */
  attempt: number;
  phase: Phase;
  from: Time;
  /** Null: it lasts. */
  to: Time | null;
  instance: string | null;
  market: 'spot' | 'on-demand' | null;
  /** Why it ended, where that was no ordinary step to the next phase. */
  reason: string | null;
}

export interface Mark {
  at: Time;
  what: 'ready' | 'deployment' | 'scale' | 'recovery' | 'preemption' | 'probe' | 'stop';
  message: string;
  replica: number | null;
  rank: number | null;
}

export interface Timeline {
  spans: Span[];
  marks: Mark[];
  /** The last ten runs of this name before it, the newest first; seconds by phase of job 0, replica 0. */
  previous: { id: Id; submitted_at: Time; status: RunStatus; phases: Partial<Record<Phase, number>> }[];
}

/** One deployment of a service. */
export interface Deployment {
  num: number;
  at: Time;
  user: string | null;
  state: 'rolling' | 'complete' | 'failed' | 'superseded' | 'asleep';
  reason: string | null;
  /** Configuration as YAML. */
  text: string;
  current: boolean;
}

export const story = {
  /** `/api/events/list`, newest first unless `ascending`. */
  events: (body: EventsRequest, o?: CallOptions) => call<Event[]>('/api/events/list', body, o),
  /** NEW `/api/project/{p}/runs/timeline`; with `job_id` of a managed job: over all its attempts. */
  timeline: (p: string, body: { id?: Id; job_id?: number }, o?: CallOptions) =>
    call<Timeline>(`/api/project/${e(p)}/runs/timeline`, body, o),
  /** NEW `/api/project/{p}/runs/deployments`, newest first. */
  deployments: (p: string, body: { run_name: string }, o?: CallOptions) =>
    call<{ deployments: Deployment[]; state: DeploymentState | null }>(`/api/project/${e(p)}/runs/deployments`, body, o),
  /** NEW `/api/project/{p}/runs/redeploy`: applies the specification of an earlier deployment. */
  redeploy: (p: string, body: { run_name: string; num: number }) =>
    call<null>(`/api/project/${e(p)}/runs/redeploy`, body, change()),
};

// ---------------------------------------------------------------------------------------------- runs

export interface JobSubmission {
  id: Id;
  submission_num: number;
  deployment_num: number;
  submitted_at: Time;
  last_processed_at: Time;
  finished_at: Time | null;
  status: string;
  status_message: string;
  termination_reason: string | null;
  termination_reason_message: string | null;
  exit_status: number | null;
  error: string | null;
  job_provisioning_data: Document | null;
  job_runtime_data: Document | null;
  probes: { success_streak: number }[];
  queue_position?: number | null;
}

export interface Job {
  /** Has `job_name`, `replica_num`, `job_num`, `requirements` and more. */
  job_spec: Document;
  job_submissions: JobSubmission[];
}

/** `runs::Run`. */
export interface Run {
  id: Id;
  project_name: string;
  user: string;
  fleet: { id: Id; name: string } | null;
  submitted_at: Time;
  last_processed_at: Time;
  status: RunStatus;
  status_message: string;
  termination_reason: string | null;
  /** Has `configuration`, and NEW `configuration_text`: the YAML that was applied, secrets left out. */
  run_spec: Document;
  jobs: Job[];
  cost: number;
  /** `{url, model, options}` of a service. */
  service: Document | null;
  deployment_num: number;
  error: string | null;
  next_triggered_at: Time | null;
  reason?: string | null;
  deployment?: DeploymentState | null;
  scaling?: { group: string; desired: number; message: string | null }[];
  /** NEW, only where one run is read: its row as in `runs/rows`. */
  row: RunRow;
  /** NEW, only where one run is read: clock at which `row` was read. */
  as_of: number;
}

export interface Offer {
  backend: string;
  instance: {
    name: string;
    resources: {
      cpus: number;
      memory_mib: number;
      gpus: { name: string; memory_mib: number; vendor: string | null }[];
      spot: boolean;
      disk: { size_mib: number } | null;
      description: string;
    };
  };
  region: string;
  price: number;
  availability: 'unknown' | 'available' | 'not_available' | 'no_quota' | 'no_balance' | 'idle' | 'busy';
  blocks: number;
  total_blocks: number;
}

export const runs = {
  /** `/api/project/{p}/runs/get` */
  get: async (p: string, body: { run_name?: string; id?: Id }, o?: CallOptions) => {
    const run = await call<Run>(`/api/project/${e(p)}/runs/get`, body, o);
    completeRow('run', run.row);
    return run;
  },
  /** `/api/project/{p}/runs/stop` */
  stop: (p: string, body: { runs_names: string[]; abort: boolean }) => call<null>(`/api/project/${e(p)}/runs/stop`, body, change()),
  /** `/api/project/{p}/runs/delete` */
  remove: (p: string, body: { runs_names: string[] }) => call<null>(`/api/project/${e(p)}/runs/delete`, body, change()),
  /** `/api/project/{p}/runs/apply`; `run_spec` and `current_resource` come from `configurations/plan`. */
  apply: (p: string, body: { plan: { run_spec: Document; current_resource?: Document | null }; force: boolean }) =>
    call<Pick<Run, 'id' | 'project_name' | 'run_spec'>>(`/api/project/${e(p)}/runs/apply`, body, change()),
};

// ---------------------------------------------------------------------------------------------- logs

/** Which log: of one submission, or the runner's own (`diagnose`). */
export interface LogRef {
  project: string;
  run_name: string;
  job_submission_id: Id;
  diagnose: boolean;
}

/** A hit of a search in a log; data of the event `hit`. */
export interface LogHit {
  /** Offset of the first byte of the match. */
  offset: number;
  /** Length of the match in bytes. */
  length: number;
  /** Offset of the first byte of its line. */
  line: number;
  /** When that line was written. */
  timestamp: Time | null;
  /** The line, cut to 512 bytes around the match, invalid UTF-8 replaced. */
  text: string;
  /** Lines before and after, as many as `context` asked for, each cut to 512 bytes. */
  before: string[];
  after: string[];
}

export interface LogMarks {
  /** Bytes of the log now. */
  size: number;
  /** First byte that is kept; more than 0 when the beginning was dropped. */
  first: number;
  /** Offset and time, ascending, at most 1,000. */
  marks: [number, Time][];
  /** Things that happened to the job, for the ruler. */
  events: { at: Time; offset: number; message: string }[];
}

export const logs = {
  /**
   * NEW `GET /api/project/{p}/logs/raw`: bytes with `X-Log-Size` and `X-Log-First`. `download=1` answers an attachment
   * and is the one route that accepts the cookie without `X-Windlass-UI`, because a link cannot send it; it only reads.
   */
  rawPath: (log: LogRef, args: { offset?: number; limit?: number; download?: 1 }) =>
    query(`/api/project/${e(log.project)}/logs/raw`, {
      run_name: log.run_name, job_submission_id: log.job_submission_id, diagnose: log.diagnose || undefined, ...args,
    }),
  /** `GET /api/project/{p}/logs/stream` (SSE `log`, `end`). */
  streamPath: (log: LogRef, args: { offset: number; follow?: boolean }) =>
    query(`/api/project/${e(log.project)}/logs/stream`, {
      run_name: log.run_name, job_submission_id: log.job_submission_id, diagnose: log.diagnose || undefined, ...args,
    }),
  /** NEW `GET /api/project/{p}/logs/search` (SSE `hit`: LogHit, `progress`: {scanned, size}, `end`: {hits, more}). */
  searchPath: (log: LogRef, args: { q: string; regex?: boolean; ignore_case?: boolean; from?: number; limit?: number; context?: number }) =>
    query(`/api/project/${e(log.project)}/logs/search`, {
      run_name: log.run_name, job_submission_id: log.job_submission_id, diagnose: log.diagnose || undefined, ...args,
    }),
  /** NEW `/api/project/{p}/logs/marks` */
  marks: (log: LogRef, o?: CallOptions) =>
    call<LogMarks>(`/api/project/${e(log.project)}/logs/marks`, {
      run_name: log.run_name, job_submission_id: log.job_submission_id, diagnose: log.diagnose,
    }, o),
};

// ---------------------------------------------------------------------------------------------- metrics (NEW)

export type MetricOf = 'job' | 'instance' | 'fleet' | 'service' | 'server';

export interface MetricsRequest {
  of: MetricOf;
  /** Submission ids for jobs, row ids otherwise; `PROJECT/RUN` for services. At most 50. */
  ids: string[];
  /**
   * job, instance, fleet: `cpu` (cores), `memory` (bytes), `gpu` (0 to 1 per device), `gpu_memory` (bytes per device).
   * service: `requests`, `errors` (a second), `p50`, `p99` (ms), `in_flight`, `waiting`. server: `writes`, `passes` (a second).
   */
  names: string[];
  from: Time;
  to: Time;
  /** At most 500. */
  points: number;
}

/** One series; `mean[i]` belongs to `times[i]`, null where nothing was measured. */
export interface Series {
  id: string;
  name: string;
  /** Number of the GPU, null for what is not per device. */
  device: number | null;
  /** What was asked for or there is at most, in the same unit; null where there is none. */
  limit: number | null;
  min: (number | null)[];
  mean: (number | null)[];
  max: (number | null)[];
}

export interface Metrics {
  /** Seconds since 1970, ascending, in even steps. */
  times: number[];
  step_seconds: number;
  series: Series[];
}

/** One block of an instance. */
export interface Block {
  state: 'free' | 'taken' | 'reserved';
  /** Who sits there; names null where the caller may not see them. */
  job: { project: string | null; run: string | null; rank: number } | null;
  /** Used, 0 to 1: GPU where the block has one, else CPU. */
  used: number | null;
}

/** Event `sample` of the metrics stream. */
export interface BlockSample {
  at: Time;
  instances: { id: Id; blocks: Block[] }[];
}

export const metrics = {
  /** NEW `/api/metrics/query` */
  query: (body: MetricsRequest, o?: CallOptions) => call<Metrics>('/api/metrics/query', body, o),
  /** NEW `GET /api/metrics/stream?fleets=ID,ID` (SSE `sample`: BlockSample, at once and then every 5 s). */
  streamPath: (fleets?: Id[]) => query('/api/metrics/stream', { fleets: fleets?.join(',') }),
};

// ---------------------------------------------------------------------------------------------- costs

export interface Costs {
  since: Time;
  until: Time;
  items: { id: Id; name: string; user?: string; count: number; hours: number; cost: number }[];
  total: { count: number; hours: number; cost: number };
  /** NEW, with `every`: dollars in each step, for the items with the largest cost and the rest together. */
  series?: { times: Time[]; items: { name: string; costs: number[] }[] };
  /** NEW: dollars by market, and what the spot part would have cost on demand. */
  markets?: { spot: number; on_demand: number; spot_at_on_demand: number | null };
}

export const costs = {
  /** `/api/project/{p}/costs/list`; `every` is NEW. */
  list: (p: string, body: { by: 'run' | 'user' | 'fleet'; since?: Time; until?: Time; limit?: number; every?: 'hour' | 'day' }, o?: CallOptions) =>
    call<Costs>(`/api/project/${e(p)}/costs/list`, body, o),
};

// ---------------------------------------------------------------------------------------------- managed jobs

/** One attempt of a task; NEW. */
export interface Attempt {
  attempt: number;
  run: string;
  /** Null after the run was deleted. */
  run_id: Id | null;
  market: 'spot' | 'on-demand' | null;
  placement: string | null;
  from: Time;
  to: Time | null;
  /** How it ended. */
  reason: string | null;
  cost: number;
}

export interface ManagedTask {
  task_id: number;
  name: string;
  resources: string;
  status: string;
  schedule_state: string;
  pending_kind: string | null;
  reason: string | null;
  last_failure: string | null;
  submitted_at: Time | null;
  start_at: Time | null;
  end_at: Time | null;
  next_retry_at: Time | null;
  job_duration: number;
  recovery_count: number;
  restarts_on_errors: number;
  placement: string | null;
  attempt: number;
  runs: string[];
  /** NEW: attempts with times, market and place, the first first. */
  attempts: Attempt[];
  /** NEW: `task_id`s that must end before it. */
  after: number[];
}

/** `managed_jobs::ManagedJob`. */
export interface ManagedJob {
  id: Id;
  job_id: number;
  name: string;
  project_name: string;
  user: string;
  shape: 'single' | 'pipeline' | 'dag' | 'group';
  priority: number;
  rank: number;
  num_jobs: number;
  status: string;
  schedule_state: string;
  reason: string | null;
  cancel_asked: boolean;
  created_at: Time;
  submitted_at: Time | null;
  end_at: Time | null;
  total_duration: number | null;
  job_duration: number;
  recovery_count: number;
  tasks: ManagedTask[];
  /** NEW: the plan of the job as YAML, secrets left out. */
  text: string;
}

/** What a spot policy saved. */
export interface Savings {
  spent: number;
  /** The same time on demand; null where a price is not known. */
  on_demand: number | null;
  saved: number | null;
  changeovers: number;
  /** Work in seconds; null without a deadline. */
  deadline: { from: Time; to: Time; work_seconds: number } | null;
  /** Time and work done in seconds, ascending. */
  progress: [Time, number][];
  /** Why it went where: changes of market and place, with the rule that decided. */
  decisions: { at: Time; market: 'spot' | 'on-demand' | null; message: string }[];
}

export const jobs = {
  /** `/api/project/{p}/jobs/get` */
  get: (p: string, job_id: number, o?: CallOptions) => call<ManagedJob>(`/api/project/${e(p)}/jobs/get`, { job_id }, o),
  /** `/api/project/{p}/jobs/cancel` */
  cancel: (p: string, body: { job_ids: number[] }) => call<{ job_ids: number[] }>(`/api/project/${e(p)}/jobs/cancel`, body, change()),
  /** `/api/project/{p}/jobs/launch` */
  launch: (p: string, body: { text: string; envs?: Record<string, string> }) =>
    call<{ jobs: { id: Id; job_id: number; name: string }[]; warnings: string[] }>(`/api/project/${e(p)}/jobs/launch`, body, change()),
  /** NEW `/api/project/{p}/jobs/savings` */
  savings: (p: string, job_id: number, o?: CallOptions) => call<Savings>(`/api/project/${e(p)}/jobs/savings`, { job_id }, o),
};

// ---------------------------------------------------------------------------------------------- configurations (NEW)

/** One problem of a file, as `windlass check -o json` prints it. */
export interface Problem {
  code: string;
  severity: 'error' | 'warning';
  message: string;
  /** 1-based; `end_column` is exclusive. */
  line: number;
  column: number;
  end_line: number;
  end_column: number;
  hint: string | null;
}

/** What applying a text would do. */
export interface ConfigurationPlan {
  problems: Problem[];
  /** Null when there are errors. */
  plan: {
    /** `task`, `service`, `dev-environment`, or `managed-job` for a task file. */
    type: string;
    name: string;
    action: 'create' | 'update';
    run_spec: Document;
    /** For `runs/apply`; null for a new run. */
    current_resource: Document | null;
    offers: Offer[];
    total_offers: number;
    max_price: number | null;
    starts_now: boolean;
    refusals: Refusal[];
    left_out: number;
    /** `a container of image debian:12`. */
    runs_in: string[];
    /** Configuration that runs now, as YAML; null for a new run. */
    current_text: string | null;
    /** With defaults, as YAML. */
    effective_text: string;
  } | null;
}

export interface ErrorPage {
  code: string;
  title: string;
  /** Markdown of `docs/errors`, shown as text. */
  text: string;
}

export interface Template {
  type: string;
  name: string;
  title: string;
  description: string | null;
  /** NEW: the configuration as YAML text. */
  text: string;
}

export const configurations = {
  /** NEW `/api/project/{p}/configurations/check` */
  check: (p: string, text: string, o?: CallOptions) => call<{ problems: Problem[] }>(`/api/project/${e(p)}/configurations/check`, { text }, o),
  /** NEW `/api/project/{p}/configurations/plan` */
  plan: (p: string, body: { text: string; env: Record<string, string> }, o?: CallOptions) =>
    call<ConfigurationPlan>(`/api/project/${e(p)}/configurations/plan`, body, o),
  /** NEW `/api/schemas/get`: the JSON Schemas of `schema/`. */
  schema: (name: 'windlass' | 'profiles') => call<Document>('/api/schemas/get', { name }),
  /** NEW `/api/errors/get` */
  error: (code: string) => call<ErrorPage>('/api/errors/get', { code }),
  /** `/api/project/{p}/templates/list` */
  templates: (p: string) => call<Template[]>(`/api/project/${e(p)}/templates/list`, {}),
};

// ---------------------------------------------------------------------------------------------- saved views (NEW)

export interface View {
  id: Id;
  name: string;
  /** Page: `runs`, `jobs`, `instances`, `containers`, `events`. */
  page: string;
  /** Query string of the page without `?`. */
  query: string;
  /** Null: the caller's own; else shared with the members of a project. */
  project: string | null;
  user: string;
}

export const views = {
  /** NEW `/api/views/list` */
  list: () => call<{ views: View[] }>('/api/views/list', {}),
  /** NEW `/api/views/set`: creates, or replaces the one with the same page, name and project. */
  set: (body: { name: string; page: string; query: string; project: string | null }) => call<View>('/api/views/set', body, change()),
  /** NEW `/api/views/delete` */
  remove: (id: Id) => call<null>('/api/views/delete', { id }, change()),
};

// ---------------------------------------------------------------------------------------------- fleets, instances

/** `fleets::Fleet`; `instances` are taken from `instances/rows`. */
export interface Fleet {
  id: Id;
  name: string;
  project_name: string;
  /** Has `configuration`: nodes, placement, resources, backends, idle_duration, blocks. */
  spec: Document;
  created_at: Time;
  status: 'submitted' | 'active' | 'terminating' | 'terminated' | 'failed';
  status_message: string | null;
}

export interface HealthCheck {
  collected_at: Time;
  status: 'healthy' | 'warning' | 'failure';
  events: { timestamp: Time; status: string; message: string }[];
}

export const fleets = {
  /** `/api/fleets/list` */
  list: (o?: CallOptions) => call<Fleet[]>('/api/fleets/list', { only_active: true }, o),
  /** `/api/project/{p}/fleets/get` */
  get: (p: string, name: string, o?: CallOptions) => call<Fleet>(`/api/project/${e(p)}/fleets/get`, { name }, o),
  /** `/api/project/{p}/fleets/delete` */
  remove: (p: string, names: string[]) => call<null>(`/api/project/${e(p)}/fleets/delete`, { names, force: false }, change()),
  /** `/api/project/{p}/fleets/delete_instances` */
  removeInstances: (p: string, name: string, instance_nums: number[]) =>
    call<null>(`/api/project/${e(p)}/fleets/delete_instances`, { name, instance_nums }, change()),
  /** `/api/project/{p}/instances/get_instance_health_checks` */
  health: (p: string, fleet_name: string, instance_num: number, o?: CallOptions) =>
    call<{ health_checks: HealthCheck[] }>(`/api/project/${e(p)}/instances/get_instance_health_checks`, { fleet_name, instance_num, limit: 200 }, o),
  /** NEW `/api/project/{p}/instances/history`: jobs that ran on an instance, newest first, at most 100. */
  history: (p: string, id: Id, o?: CallOptions) =>
    call<{ jobs: { run: string; run_id: Id; job: string; user: string; from: Time; to: Time | null; status: string; reason: string | null }[] }>(
      `/api/project/${e(p)}/instances/history`, { id }, o),
};

// ---------------------------------------------------------------------------------------------- volumes, gateways

/** `volumes::Volume`. */
export interface Volume {
  id: Id;
  name: string;
  user: string;
  project_name: string;
  configuration: Document;
  created_at: Time;
  status: 'submitted' | 'provisioning' | 'active' | 'failed';
  status_message: string | null;
  deleted: boolean;
  cost: number;
  attachments: { instance: { name: string; fleet_name: string | null } }[] | null;
}

/** `gateways::Gateway`. */
export interface Gateway {
  id: Id;
  name: string;
  project_name: string;
  configuration: Document;
  created_at: Time;
  status: 'submitted' | 'provisioning' | 'running' | 'failed';
  status_message: string | null;
  default: boolean;
  hostname: string | null;
  wildcard_domain: string | null;
  backend: string | null;
  region: string | null;
  replicas: { replica_num: number; hostname: string | null; status: string; status_message: string | null; created_at: Time }[];
}

export const storage = {
  /** `/api/volumes/list` */
  volumes: (o?: CallOptions) => call<Volume[]>('/api/volumes/list', { only_active: true }, o),
  /** `/api/project/{p}/volumes/delete` */
  removeVolumes: (p: string, names: string[]) => call<null>(`/api/project/${e(p)}/volumes/delete`, { names }, change()),
  /** `/api/project/{p}/gateways/list` */
  gateways: (p: string, o?: CallOptions) => call<Gateway[]>(`/api/project/${e(p)}/gateways/list`, {}, o),
};

// ---------------------------------------------------------------------------------------------- projects, users, server

export interface User {
  id: Id;
  username: string;
  created_at: Time | null;
  global_role: 'admin' | 'user';
  email: string | null;
  active: boolean;
}

export interface Project {
  project_id: Id;
  project_name: string;
  owner: User;
  created_at: Time | null;
  backends: { name: string }[];
  members: { user: User; project_role: ProjectRole }[];
  is_public: boolean;
  templates_repo: string | null;
}

export interface Secret {
  id: Id;
  name: string;
  value: string | null;
}

export interface PublicKey {
  id: Id;
  added_at: Time;
  name: string;
  type: string;
  fingerprint: string;
}

export interface Pipeline {
  name: string;
  queued: number;
  in_work: number;
  oldest_seconds: number | null;
  applied_last_minute: number;
  claimed: number;
  applied: number;
  stale: number;
  reset: number;
  lost: number;
  errors: number;
}

/** `users::NamedToken`. */
export interface NamedToken {
  name: string;
  scope: TokenScope;
  /** Its first characters; empty if it is too short to show any. */
  prefix: string;
  created_at: Time;
  expires_at: Time | null;
  last_used_at: Time | null;
}
export type TokenScope = 'all' | 'read' | 'submit' | 'services';

export const tokens = {
  /** `/api/users/tokens/list`: of the caller. */
  list: (o?: CallOptions) => call<NamedToken[]>('/api/users/tokens/list', {}, o),
  /** `/api/users/tokens/create`: the answer holds the token, which is never shown again. Without `expires_in` (seconds) the server's default holds. */
  create: (body: { name: string; scope: TokenScope; expires_in: number | null }) => call<NamedToken & { token: string }>('/api/users/tokens/create', body, change()),
  /** `/api/users/tokens/revoke` */
  revoke: (names: string[]) => call<null>('/api/users/tokens/revoke', { names }, change()),
};

/** `quotas::Quota`: what jobs hold at once. */
export interface Quota {
  /** Null: all jobs of the project. */
  username?: string | null;
  /** `gpu`, `gpu:NAME`, `cpu`, `memory` (GB) or `price` (dollars an hour). */
  resource: string;
  max?: number | null;
  share?: number | null;
  used: number;
}

/** `budgets::Budget`: what jobs use in a period. */
export interface Budget {
  username?: string | null;
  unit: 'cost' | 'gpu-hours';
  period: 'day' | 'week' | 'month';
  warn?: number | null;
  cap?: number | null;
  spent: number;
  state: 'within' | 'warning' | 'exhausted';
  ends_at: Time;
}

export const limits = {
  /** `/api/project/{p}/quotas/list` */
  quotas: (p: string, o?: CallOptions) => call<{ quotas: Quota[] }>(`/api/project/${e(p)}/quotas/list`, {}, o),
  /** `/api/project/{p}/quotas/set` */
  setQuota: (p: string, body: { username: string | null; resource: string; max: number | null; share: number | null }) => call<{ quotas: Quota[] }>(`/api/project/${e(p)}/quotas/set`, body, change()),
  /** `/api/project/{p}/quotas/delete` */
  removeQuota: (p: string, body: { username: string | null; resource: string }) => call<{ quotas: Quota[] }>(`/api/project/${e(p)}/quotas/delete`, body, change()),
  /** `/api/project/{p}/budgets/list` */
  budgets: (p: string, o?: CallOptions) => call<{ budgets: Budget[] }>(`/api/project/${e(p)}/budgets/list`, {}, o),
  /** `/api/project/{p}/budgets/set` */
  setBudget: (p: string, body: { username: string | null; unit: string; period: string; warn: number | null; cap: number | null }) => call<{ budgets: Budget[] }>(`/api/project/${e(p)}/budgets/set`, body, change()),
  /** `/api/project/{p}/budgets/delete` */
  removeBudget: (p: string, body: { username: string | null; unit: string; period: string }) => call<{ budgets: Budget[] }>(`/api/project/${e(p)}/budgets/delete`, body, change()),
};

interface Named {
  id: Id;
  name: string;
}

/** `exports::Export`: fleets and gateways that other projects may use. */
export interface Export {
  id: Id;
  name: string;
  is_global?: boolean;
  imports: { project_name: string }[];
  exported_fleets: Named[];
  exported_gateways?: Named[];
}

/** `exports::Import`: an export of another project that this one may use. */
export interface Import {
  id: Id;
  export: { id: Id; name: string; project_name: string; exported_fleets: Named[]; exported_gateways?: Named[] };
}

export const sharing = {
  /** `/api/project/{p}/exports/list` */
  exports: (p: string, o?: CallOptions) => call<{ exports: Export[] }>(`/api/project/${e(p)}/exports/list`, {}, o),
  /** `/api/project/{p}/exports/create` */
  create: (p: string, body: { name: string; is_global: boolean; importer_projects: string[]; exported_fleets: string[]; exported_gateways: string[] }) => call<Export>(`/api/project/${e(p)}/exports/create`, body, change()),
  /** `/api/project/{p}/exports/update` */
  update: (p: string, body: { name: string; set_global: boolean; unset_global: boolean; add_importer_projects: string[]; remove_importer_projects: string[]; add_exported_fleets: string[]; remove_exported_fleets: string[]; add_exported_gateways: string[]; remove_exported_gateways: string[] }) =>
    call<Export>(`/api/project/${e(p)}/exports/update`, body, change()),
  /** `/api/project/{p}/exports/delete` */
  remove: (p: string, name: string) => call<null>(`/api/project/${e(p)}/exports/delete`, { name }, change()),
  /** `/api/project/{p}/imports/list` */
  imports: (p: string, o?: CallOptions) => call<{ imports: Import[] }>(`/api/project/${e(p)}/imports/list`, {}, o),
  /** `/api/project/{p}/imports/delete` */
  removeImport: (p: string, export_project_name: string, export_name: string) => call<null>(`/api/project/${e(p)}/imports/delete`, { export_project_name, export_name }, change()),
};

/** `usage::Row`: what jobs held, times how long. */
export interface UsageRow {
  from?: Time | null;
  project?: string | null;
  user?: string | null;
  class?: string | null;
  jobs: number;
  gpu_hours: number;
  cpu_hours: number;
  cost: number;
}
export type UsageBy = 'project' | 'user' | 'class' | 'day' | 'week' | 'month';

export const usage = {
  /** `/api/usage/list`: of projects that the caller may see. */
  list: (body: { projects: string[]; by: UsageBy[]; since: Time }, o?: CallOptions) => call<{ since: Time; until: Time; rows: UsageRow[]; total: UsageRow }>('/api/usage/list', body, o),
};

export const backends = {
  /** `/api/backends/list` (global admins) */
  list: (o?: CallOptions) => call<{ name: string; projects: string[] }[]>('/api/backends/list', {}, o),
  /** `/api/backends/check` (global admins): what its instances need, and what of it is missing. */
  check: (backend: string) => call<{ what: string; problem?: string | null }[]>('/api/backends/check', { backend }),
  /** `/api/backends/grant` (global admins) */
  grant: (project_name: string, backend: string) => call<Project>('/api/backends/grant', { project_name, backend }, change()),
  /** `/api/backends/revoke` (global admins) */
  revoke: (project_name: string, backend: string) => call<Project>('/api/backends/revoke', { project_name, backend }, change()),
};

export const admin = {
  /** `/api/projects/create` */
  createProject: (project_name: string, is_public: boolean) => call<Project>('/api/projects/create', { project_name, is_public }, change()),
  /** `/api/projects/{p}/add_members` */
  addMembers: (p: string, members: { username: string; project_role: ProjectRole }[]) => call<Project>(`/api/projects/${e(p)}/add_members`, { members }, change()),
  /** `/api/projects/{p}/get` */
  project: (p: string, o?: CallOptions) => call<Project>(`/api/projects/${e(p)}/get`, {}, o),
  /** `/api/projects/{p}/set_members` */
  setMembers: (p: string, members: { username: string; project_role: ProjectRole }[]) =>
    call<Project>(`/api/projects/${e(p)}/set_members`, { members }, change()),
  /** `/api/project/{p}/secrets/list` */
  secrets: (p: string, o?: CallOptions) => call<Secret[]>(`/api/project/${e(p)}/secrets/list`, {}, o),
  /** `/api/project/{p}/secrets/get`: one value; the server records who asked. */
  secret: (p: string, name: string) => call<Secret>(`/api/project/${e(p)}/secrets/get`, { name }),
  /** `/api/project/{p}/secrets/create_or_update` */
  setSecret: (p: string, name: string, value: string) => call<Secret>(`/api/project/${e(p)}/secrets/create_or_update`, { name, value }, change()),
  /** `/api/project/{p}/secrets/delete` */
  removeSecrets: (p: string, secrets_names: string[]) => call<null>(`/api/project/${e(p)}/secrets/delete`, { secrets_names }, change()),
  /** `/api/project/{p}/repos/list` */
  repos: (p: string, o?: CallOptions) => call<{ repo_id: string; repo_info: Document }[]>(`/api/project/${e(p)}/repos/list`, {}, o),
  /** `/api/users/list` */
  users: (o?: CallOptions) => call<User[]>('/api/users/list', {}, o),
  /** `/api/users/create`: the answer holds the token, which is never shown again. */
  createUser: (body: { username: string; global_role: 'admin' | 'user'; email: string | null }) =>
    call<User & { creds: { token: string } }>('/api/users/create', { ...body, active: true }, change()),
  /** `/api/users/update` */
  updateUser: (body: { username: string; global_role: 'admin' | 'user'; email: string | null; active: boolean }) =>
    call<User>('/api/users/update', body, change()),
  /** `/api/users/refresh_token` */
  refreshToken: (username: string) => call<User & { creds: { token: string } }>('/api/users/refresh_token', { username }, change()),
  /** `/api/users/public_keys/list` */
  keys: (o?: CallOptions) => call<PublicKey[]>('/api/users/public_keys/list', {}, o),
  /** `/api/users/public_keys/add` */
  addKey: (key: string, name: string | null) => call<PublicKey>('/api/users/public_keys/add', { key, name }, change()),
  /** `/api/users/public_keys/delete` */
  removeKeys: (ids: Id[]) => call<null>('/api/users/public_keys/delete', { ids }, change()),
  /** `/api/server/pipelines` */
  pipelines: (o?: CallOptions) => call<Pipeline[]>('/api/server/pipelines', {}, o),
  /** NEW `/api/server/settings` (global admins): of the replica that answers; nothing secret. */
  settings: (o?: CallOptions) => call<{ settings: { name: string; value: string }[] }>('/api/server/settings', {}, o),
};

// ---------------------------------------------------------------------------------------------- terminal (NEW)

/**
 * NEW `GET /api/project/{p}/runs/terminal?run_name&job_submission_id` (WebSocket, protocol `windlass.terminal.v1`).
 * Binary frames are bytes in both directions. Text frames are JSON: to the server `{"type":"resize","columns","rows"}`;
 * from it `{"type":"exit","status"}` and `{"type":"alive"}`. Close code 4403: the right ended.
 */
export const terminalPath = (p: string, args: { run_name: string; job_submission_id: Id }) =>
  query(`/api/project/${e(p)}/runs/terminal`, args);

/** One path segment. */
function e(text: string): string {
  return encodeURIComponent(text);
}

/** Options of a call that changes something. */
function change(): CallOptions {
  return { idempotent: true };
}
