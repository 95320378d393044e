-- What this installation proves itself with, once for all replicas: the seed of an Ed25519 key for each purpose.
CREATE TABLE signing_keys (
    id TEXT PRIMARY KEY,
    purpose TEXT NOT NULL,
    seed_sealed BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX signing_keys_purpose_key ON signing_keys (purpose);
