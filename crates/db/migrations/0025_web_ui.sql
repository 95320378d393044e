-- Sessions of browsers. The cookie is not stored, only its hash. A session is valid while the token that opened it is.
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    hash TEXT NOT NULL,
    token_id TEXT NOT NULL REFERENCES tokens (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    -- Of the last request.
    address TEXT NOT NULL,
    browser TEXT NOT NULL,
    opened_at BIGINT NOT NULL,
    last_seen_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX sessions_hash_key ON sessions (hash);
CREATE INDEX sessions_user ON sessions (user_id);
CREATE INDEX sessions_expiry ON sessions (expires_at);

-- Codes that open one session each: deleted when they are used.
CREATE TABLE login_codes (
    hash TEXT PRIMARY KEY,
    token_id TEXT NOT NULL REFERENCES tokens (id),
    expires_at BIGINT NOT NULL
);
CREATE INDEX login_codes_expiry ON login_codes (expires_at);

-- Counts of ended runs by status.
CREATE INDEX runs_ended_status ON runs (project_id, status) WHERE finished AND NOT deleted;
