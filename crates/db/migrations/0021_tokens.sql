-- Tokens beside the first one of a user have a name. `scope` says what a token is good for: `user` is everything.
ALTER TABLE tokens ADD COLUMN name TEXT;
CREATE UNIQUE INDEX tokens_name_key ON tokens (user_id, name) WHERE name IS NOT NULL AND revoked_at IS NULL;

-- Passwords of registries that somebody wrote into a configuration. Specifications hold `sealed:ID` in their place.
CREATE TABLE registry_passwords (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    password_sealed BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE INDEX registry_passwords_user ON registry_passwords (project_id, user_id);

-- Work on rows of earlier versions that needs keys, and so is no migration: done once.
CREATE TABLE chores (
    name TEXT PRIMARY KEY,
    done_at BIGINT NOT NULL
);
