-- The container queue. `uuid` is what clients see; `doc` is the whole record as JSON; columns beside it are those
-- that are looked for. Every write of a row is guarded by its `revision`, which grows by one.
CREATE TABLE containers (
    id TEXT PRIMARY KEY,
    uuid TEXT NOT NULL,
    revision BIGINT NOT NULL,
    owner_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    priority BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    modified_at BIGINT NOT NULL,
    locked_by_uuid TEXT,
    identity TEXT NOT NULL,
    doc TEXT NOT NULL,
    secrets_sealed BYTEA
);
CREATE UNIQUE INDEX containers_uuid_key ON containers (uuid);
CREATE INDEX containers_queue ON containers (state, priority);
CREATE INDEX containers_holder ON containers (locked_by_uuid, state);
CREATE INDEX containers_identity ON containers (owner_uuid, identity);
CREATE INDEX containers_time ON containers (created_at, uuid);
CREATE INDEX containers_owner ON containers (owner_uuid, created_at);

CREATE TABLE container_requests (
    id TEXT PRIMARY KEY,
    uuid TEXT NOT NULL,
    revision BIGINT NOT NULL,
    owner_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    priority BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    modified_at BIGINT NOT NULL,
    container_uuid TEXT,
    requesting_container_uuid TEXT,
    -- Which call made it: the same call again makes no second one.
    made_by TEXT,
    made_of TEXT,
    doc TEXT NOT NULL,
    secrets_sealed BYTEA
);
CREATE UNIQUE INDEX container_requests_uuid_key ON container_requests (uuid);
CREATE INDEX container_requests_container ON container_requests (container_uuid);
CREATE INDEX container_requests_requesting ON container_requests (requesting_container_uuid);
CREATE INDEX container_requests_time ON container_requests (created_at, uuid);
CREATE INDEX container_requests_owner ON container_requests (owner_uuid, created_at);
CREATE INDEX container_requests_made ON container_requests (made_by);

-- Tokens of dispatchers, of executors and of the programs in containers. `secret_sealed` only where it must be
-- shown again.
CREATE TABLE queue_tokens (
    id TEXT PRIMARY KEY,
    uuid TEXT NOT NULL,
    kind TEXT NOT NULL,
    hash TEXT NOT NULL,
    secret_sealed BYTEA,
    user_id TEXT NOT NULL REFERENCES users (id),
    container_uuid TEXT,
    attempt BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
CREATE UNIQUE INDEX queue_tokens_uuid_key ON queue_tokens (uuid);
CREATE UNIQUE INDEX queue_tokens_hash_key ON queue_tokens (hash);
CREATE INDEX queue_tokens_container ON queue_tokens (container_uuid) WHERE revoked_at IS NULL;

-- sqlite
CREATE TABLE queue_logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
-- postgres
CREATE TABLE queue_logs (
    id BIGINT PRIMARY KEY,
-- both
    uuid TEXT NOT NULL,
    object_uuid TEXT NOT NULL,
    object_owner_uuid TEXT NOT NULL,
    event_type TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    summary TEXT NOT NULL,
    doc TEXT NOT NULL
);
CREATE UNIQUE INDEX queue_logs_uuid_key ON queue_logs (uuid);
CREATE INDEX queue_logs_object ON queue_logs (object_uuid, id);
CREATE INDEX queue_logs_owner ON queue_logs (object_owner_uuid, id);
CREATE INDEX queue_logs_time ON queue_logs (created_at, id);

-- postgres
-- Readers go on from the highest id they saw, so ids must become visible in order: whoever draws one keeps others
-- from drawing until the commit.
CREATE SEQUENCE queue_logs_ids;
CREATE FUNCTION number_queue_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(7728001);
    NEW.id := nextval('queue_logs_ids');
    RETURN NEW;
END $$;
CREATE TRIGGER queue_logs_number BEFORE INSERT ON queue_logs FOR EACH ROW EXECUTE FUNCTION number_queue_log();
-- both

-- What containers wrote, byte for byte, in pieces that follow each other.
CREATE TABLE container_output (
    container_uuid TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    stream TEXT NOT NULL,
    starts_at BIGINT NOT NULL,
    ends_at BIGINT NOT NULL,
    bytes BYTEA NOT NULL,
    PRIMARY KEY (container_uuid, attempt, stream, starts_at)
);
