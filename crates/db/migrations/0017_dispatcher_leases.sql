-- Which process dispatches with a token. Another one waits until it is gone.
CREATE TABLE dispatcher_leases (
    token_uuid TEXT PRIMARY KEY,
    -- Drawn by the process when it starts.
    holder TEXT NOT NULL,
    -- Where the process is, for people.
    described TEXT NOT NULL,
    expires_at BIGINT NOT NULL
);
