-- Managed jobs: work that outlives its machines. A job is a row that its pipeline moves, and each attempt of each of its
-- tasks is a run.
CREATE TABLE managed_jobs (
    id TEXT PRIMARY KEY,
    -- What people call it by; it grows with the age of the server.
    number BIGINT NOT NULL,
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    plan TEXT NOT NULL,
    files TEXT NOT NULL,
    secrets_sealed BYTEA,
    rank BIGINT NOT NULL,
    copies BIGINT NOT NULL,
    priority BIGINT NOT NULL,
    schedule TEXT NOT NULL,
    claimed BOOLEAN NOT NULL DEFAULT FALSE,
    cancel_asked_at BIGINT,
    cancel_by_user_id TEXT,
    cancel_graceful_us BIGINT,
    idempotency_key TEXT,
    idempotency_hash TEXT,
    submitted_at BIGINT NOT NULL,
    finished_at BIGINT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX managed_jobs_number_key ON managed_jobs (number);
CREATE UNIQUE INDEX managed_jobs_idempotency_key ON managed_jobs (project_id, user_id, idempotency_key);
CREATE INDEX managed_jobs_list ON managed_jobs (project_id, number DESC);
CREATE INDEX managed_jobs_list_active ON managed_jobs (project_id, number DESC) WHERE NOT finished;
CREATE INDEX managed_jobs_claimed ON managed_jobs (id) WHERE claimed AND NOT finished;
CREATE INDEX managed_jobs_backoff ON managed_jobs (project_id) WHERE schedule = 'ALIVE_BACKOFF' AND NOT finished;
CREATE INDEX managed_jobs_queue ON managed_jobs (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX managed_jobs_held ON managed_jobs (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;

CREATE TABLE managed_job_tasks (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES managed_jobs (id),
    task BIGINT NOT NULL,
    status TEXT NOT NULL,
    schedule TEXT NOT NULL,
    record TEXT NOT NULL,
    -- It waits for a launch slot; whoever counts slots grants one, and the job's pipeline takes it.
    wants_slot BOOLEAN NOT NULL DEFAULT FALSE,
    granted BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE UNIQUE INDEX managed_job_tasks_key ON managed_job_tasks (job_id, task);
CREATE INDEX managed_job_tasks_launching ON managed_job_tasks (job_id) WHERE schedule = 'LAUNCHING' OR granted;
CREATE INDEX managed_job_tasks_waiting ON managed_job_tasks (job_id) WHERE wants_slot AND NOT granted;

-- One row: whoever counts slots or gives numbers holds it until the end of the transaction.
CREATE TABLE managed_job_slots (
    id BIGINT PRIMARY KEY,
    last_number BIGINT NOT NULL
);
INSERT INTO managed_job_slots (id, last_number) VALUES (1, 0);

-- The job whose attempt a run is, and the places that it stays away from or seeks.
ALTER TABLE runs ADD COLUMN managed_job_id TEXT REFERENCES managed_jobs (id);
ALTER TABLE runs ADD COLUMN places TEXT;
CREATE INDEX runs_managed_job ON runs (managed_job_id) WHERE managed_job_id IS NOT NULL;
