-- Who takes containers from the queue, and what they could run, as they said last.
CREATE TABLE dispatchers (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    token_uuid TEXT NOT NULL,
    -- A list of kinds of machines, JSON.
    nodes TEXT NOT NULL,
    seen_at BIGINT NOT NULL
);
