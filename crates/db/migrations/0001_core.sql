-- Portable types: ids and JSON documents are TEXT, times BIGINT microseconds since 1970.
--
-- A row that a pipeline owns carries the lock columns. `finished` is set with the final status and
-- takes the row out of the indexes that claims walk. Those indexes ask for `lock_token`, not for
-- `lock_expires_at`: a heartbeat changes the expiry alone, and on Postgres touches no index then.

-- postgres
CREATE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql STABLE AS
    $$ SELECT (extract(epoch FROM now()) * 1000000)::BIGINT $$;
CREATE FUNCTION new_uuid() RETURNS TEXT LANGUAGE sql VOLATILE AS
    $$ SELECT gen_random_uuid()::TEXT $$;
-- The list form that SQLite has built in.
CREATE FUNCTION json_each(list TEXT) RETURNS TABLE (value TEXT) LANGUAGE sql IMMUTABLE ROWS 20 AS
    $$ SELECT json_array_elements_text(list::JSON) $$;

-- both
CREATE TABLE users (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    global_role TEXT NOT NULL,
    email TEXT,
    active BOOLEAN NOT NULL DEFAULT TRUE,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    ssh_public_key TEXT,
    ssh_private_key_sealed BYTEA,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX users_name_key ON users (name) WHERE NOT deleted;

-- Only hashes; `prefix` is what people see in lists.
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    hash TEXT NOT NULL,
    prefix TEXT NOT NULL,
    scope TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    last_used_at BIGINT,
    revoked_at BIGINT
);
CREATE UNIQUE INDEX tokens_hash_key ON tokens (hash);
CREATE INDEX tokens_user ON tokens (user_id);

CREATE TABLE public_keys (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX public_keys_fingerprint_key ON public_keys (user_id, fingerprint);

CREATE TABLE projects (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    owner_id TEXT NOT NULL REFERENCES users (id),
    is_public BOOLEAN NOT NULL DEFAULT FALSE,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    default_gateway_id TEXT,
    templates_repo TEXT,
    ssh_public_key TEXT,
    ssh_private_key_sealed BYTEA,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX projects_name_key ON projects (name) WHERE NOT deleted;
CREATE INDEX projects_owner ON projects (owner_id);

CREATE TABLE members (
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    role TEXT NOT NULL,
    can_manage_ssh_fleets BOOLEAN NOT NULL DEFAULT FALSE,
    can_manage_secrets BOOLEAN NOT NULL DEFAULT FALSE,
    position BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (project_id, user_id)
);
CREATE INDEX members_user ON members (user_id);

-- Every value ever set, sealed; the newest version that is not deleted counts.
CREATE TABLE secrets (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    sealed BYTEA NOT NULL,
    key_id TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX secrets_name_key ON secrets (project_id, name);

-- The ids of sealing keys, never the keys: tells which of them are still needed.
CREATE TABLE sealing_keys (
    id TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL,
    retired_at BIGINT
);

-- sqlite
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
-- postgres
CREATE TABLE events (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
-- both
    id TEXT NOT NULL,
    entity TEXT NOT NULL,
    entity_id TEXT NOT NULL,
    project_id TEXT,
    kind TEXT NOT NULL,
    from_status TEXT,
    to_status TEXT,
    is_final BOOLEAN NOT NULL DEFAULT FALSE,
    reason TEXT,
    message TEXT NOT NULL,
    actor TEXT NOT NULL,
    actor_user_id TEXT,
    lock_token TEXT,
    epoch BIGINT,
    recorded_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX events_id_key ON events (id);
CREATE INDEX events_entity ON events (entity_id, seq);
CREATE INDEX events_time ON events (recorded_at, id);
CREATE INDEX events_project ON events (project_id, recorded_at, id);

CREATE TABLE event_targets (
    event_id TEXT NOT NULL,
    type TEXT NOT NULL,
    target_id TEXT NOT NULL,
    name TEXT NOT NULL,
    project_id TEXT,
    PRIMARY KEY (event_id, target_id)
);
CREATE INDEX event_targets_target ON event_targets (target_id, event_id);

CREATE TABLE repos (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    info TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX repos_name_key ON repos (project_id, name);

CREATE TABLE repo_creds (
    repo_id TEXT NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
    user_id TEXT NOT NULL REFERENCES users (id),
    sealed BYTEA NOT NULL,
    PRIMARY KEY (repo_id, user_id)
);

CREATE TABLE codes (
    id TEXT PRIMARY KEY,
    repo_id TEXT NOT NULL REFERENCES repos (id) ON DELETE CASCADE,
    hash TEXT NOT NULL,
    blob BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX codes_hash_key ON codes (repo_id, hash);

CREATE TABLE archives (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    hash TEXT NOT NULL,
    blob BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX archives_hash_key ON archives (user_id, hash);

CREATE TABLE backends (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    kind TEXT NOT NULL,
    config TEXT NOT NULL,
    auth_sealed BYTEA,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX backends_kind_key ON backends (project_id, kind);

CREATE TABLE fleets (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    spec_sealed BYTEA,
    status_message TEXT,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    deleted_at BIGINT,
    created_at BIGINT NOT NULL,
    auto_created BOOLEAN NOT NULL DEFAULT FALSE,
    current_master_instance_id TEXT,
    consolidation_attempt BIGINT NOT NULL DEFAULT 0,
    last_consolidated_at BIGINT,
    termination_asked_at BIGINT,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX fleets_name_key ON fleets (project_id, name) WHERE NOT deleted;
CREATE INDEX fleets_list ON fleets (project_id, created_at DESC, id);
CREATE INDEX fleets_unlocked ON fleets (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX fleets_due ON fleets (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX fleets_locked ON fleets (last_processed_at, status) WHERE lock_token IS NOT NULL;

CREATE TABLE instances (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    fleet_id TEXT REFERENCES fleets (id),
    name TEXT NOT NULL,
    instance_num BIGINT NOT NULL,
    backend TEXT,
    region TEXT,
    availability_zone TEXT,
    hostname TEXT,
    price DOUBLE PRECISION,
    spot BOOLEAN NOT NULL DEFAULT FALSE,
    instance_type TEXT,
    offer TEXT,
    provisioning TEXT,
    ssh TEXT,
    ssh_sealed BYTEA,
    gpu_driver TEXT,
    requirements TEXT,
    profile TEXT,
    total_blocks BIGINT,
    busy_blocks BIGINT NOT NULL DEFAULT 0,
    health TEXT NOT NULL DEFAULT 'healthy',
    health_message TEXT,
    unreachable BOOLEAN NOT NULL DEFAULT FALSE,
    termination_reason TEXT,
    termination_message TEXT,
    idle_seconds_max BIGINT,
    agent_credential_sealed BYTEA,
    agent_version TEXT,
    host_key TEXT,
    created_at BIGINT NOT NULL,
    started_at BIGINT,
    idle_since BIGINT,
    seen_at BIGINT,
    unreachable_since BIGINT,
    first_attempt_at BIGINT,
    last_attempt_at BIGINT,
    termination_asked_at BIGINT,
    termination_deadline_at BIGINT,
    finished_at BIGINT,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX instances_num_key ON instances (fleet_id, instance_num) WHERE NOT finished;
CREATE INDEX instances_fleet ON instances (fleet_id, instance_num);
CREATE INDEX instances_list ON instances (project_id, created_at DESC, id);
CREATE INDEX instances_unlocked ON instances (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX instances_due ON instances (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX instances_locked ON instances (last_processed_at, status) WHERE lock_token IS NOT NULL;

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    repo_id TEXT,
    fleet_id TEXT,
    gateway_id TEXT,
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    service TEXT,
    status_message TEXT,
    termination_reason TEXT,
    termination_message TEXT,
    stop_asked_at BIGINT,
    stop_by_user_id TEXT,
    abort_asked BOOLEAN NOT NULL DEFAULT FALSE,
    deployment_num BIGINT NOT NULL DEFAULT 0,
    desired_replicas BIGINT NOT NULL DEFAULT 1,
    scaled_at BIGINT,
    priority BIGINT NOT NULL DEFAULT 0,
    submitted_at BIGINT NOT NULL,
    next_triggered_at BIGINT,
    retry_since BIGINT,
    retry_count BIGINT NOT NULL DEFAULT 0,
    finished_at BIGINT,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    idempotency_key TEXT,
    idempotency_hash TEXT,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX runs_name_key ON runs (project_id, name) WHERE NOT deleted;
CREATE UNIQUE INDEX runs_idempotency_key ON runs (project_id, user_id, idempotency_key);
CREATE INDEX runs_list ON runs (project_id, submitted_at DESC, id) WHERE NOT deleted;
CREATE INDEX runs_list_active ON runs (project_id, submitted_at DESC, id) WHERE NOT deleted AND NOT finished;
CREATE INDEX runs_list_all ON runs (submitted_at DESC, id) WHERE NOT deleted;
CREATE INDEX runs_list_user ON runs (user_id, submitted_at DESC, id) WHERE NOT deleted;
CREATE INDEX runs_unlocked ON runs (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX runs_due ON runs (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX runs_locked ON runs (last_processed_at, status) WHERE lock_token IS NOT NULL;

-- One row per submission: a retry of a job is a new row with a new id.
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (id),
    project_id TEXT NOT NULL,
    job_name TEXT NOT NULL,
    replica_num BIGINT NOT NULL,
    job_num BIGINT NOT NULL,
    submission_num BIGINT NOT NULL,
    deployment_num BIGINT NOT NULL DEFAULT 0,
    replica_group TEXT,
    status_message TEXT,
    termination_reason TEXT,
    termination_message TEXT,
    termination_detail TEXT,
    exit_status BIGINT,
    -- What the run's pipeline asked for; the job's own pipelines honour it.
    end_asked TEXT,
    end_message TEXT,
    host_given_up BOOLEAN NOT NULL DEFAULT FALSE,
    job_spec TEXT NOT NULL,
    secrets_sealed BYTEA,
    provisioning TEXT,
    runtime TEXT,
    connection_info TEXT,
    probes TEXT,
    pull_progress TEXT,
    shortfalls TEXT,
    instance_id TEXT REFERENCES instances (id),
    fleet_id TEXT,
    instance_assigned BOOLEAN NOT NULL DEFAULT FALSE,
    blocks BIGINT NOT NULL DEFAULT 0,
    priority BIGINT NOT NULL DEFAULT 0,
    skip_min_processing BOOLEAN NOT NULL DEFAULT FALSE,
    replica_registered BOOLEAN NOT NULL DEFAULT FALSE,
    volumes_detached_at BIGINT,
    submitted_at BIGINT NOT NULL,
    provisioned_at BIGINT,
    pulling_at BIGINT,
    running_at BIGINT,
    terminating_at BIGINT,
    inactive_since BIGINT,
    disconnected_at BIGINT,
    seen_at BIGINT,
    start_deadline_at BIGINT,
    run_deadline_at BIGINT,
    stop_deadline_at BIGINT,
    remove_at BIGINT,
    finished_at BIGINT,
    logs_offset BIGINT NOT NULL DEFAULT 0,
    runner_offset BIGINT NOT NULL DEFAULT 0,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
-- R6: at most one active submission of a job, and numbers without repeats.
CREATE UNIQUE INDEX jobs_active_key ON jobs (run_id, replica_num, job_num) WHERE NOT finished;
CREATE UNIQUE INDEX jobs_submission_key ON jobs (run_id, replica_num, job_num, submission_num);
CREATE INDEX jobs_instance ON jobs (instance_id) WHERE NOT finished;
CREATE INDEX jobs_project_active ON jobs (project_id, priority DESC, submitted_at) WHERE NOT finished;
CREATE INDEX jobs_unlocked ON jobs (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX jobs_due ON jobs (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX jobs_locked ON jobs (last_processed_at, status) WHERE lock_token IS NOT NULL;

CREATE TABLE volumes (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    configuration TEXT NOT NULL,
    external BOOLEAN NOT NULL DEFAULT FALSE,
    status_message TEXT,
    volume_id TEXT,
    provisioning TEXT,
    delete_asked_at BIGINT,
    last_job_processed_at BIGINT,
    created_at BIGINT NOT NULL,
    finished_at BIGINT,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    deleted_at BIGINT,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX volumes_name_key ON volumes (project_id, name) WHERE NOT deleted;
CREATE INDEX volumes_list ON volumes (project_id, created_at DESC, id);
CREATE INDEX volumes_unlocked ON volumes (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX volumes_due ON volumes (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX volumes_locked ON volumes (last_processed_at, status) WHERE lock_token IS NOT NULL;

CREATE TABLE volume_attachments (
    volume_id TEXT NOT NULL REFERENCES volumes (id),
    instance_id TEXT NOT NULL REFERENCES instances (id),
    data TEXT,
    attached_at BIGINT NOT NULL,
    PRIMARY KEY (volume_id, instance_id)
);
CREATE INDEX volume_attachments_instance ON volume_attachments (instance_id);

CREATE TABLE gateways (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    backend TEXT,
    region TEXT,
    configuration TEXT NOT NULL,
    wildcard_domain TEXT,
    status_message TEXT,
    instance_id TEXT,
    hostname TEXT,
    ip_address TEXT,
    provisioning TEXT,
    ssh_private_key_sealed BYTEA,
    delete_asked_at BIGINT,
    created_at BIGINT NOT NULL,
    finished_at BIGINT,
    deleted BOOLEAN NOT NULL DEFAULT FALSE,
    tracking TEXT,
    status TEXT NOT NULL,
    finished BOOLEAN NOT NULL DEFAULT FALSE,
    last_processed_at BIGINT NOT NULL,
    due_at BIGINT,
    lock_token TEXT,
    lock_expires_at BIGINT,
    lock_owner TEXT,
    lock_epoch BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX gateways_name_key ON gateways (project_id, name) WHERE NOT deleted;
CREATE INDEX gateways_list ON gateways (project_id, created_at DESC, id);
CREATE INDEX gateways_unlocked ON gateways (last_processed_at, status, due_at) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX gateways_due ON gateways (due_at, status) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX gateways_locked ON gateways (last_processed_at, status) WHERE lock_token IS NOT NULL;

-- postgres
ALTER TABLE runs SET (fillfactor = 70);
ALTER TABLE jobs SET (fillfactor = 70);
ALTER TABLE instances SET (fillfactor = 70);
ALTER TABLE fleets SET (fillfactor = 70);
ALTER TABLE volumes SET (fillfactor = 70);
ALTER TABLE gateways SET (fillfactor = 70);
