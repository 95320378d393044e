-- The job of a run that a container is. NULL: a user requested it.
ALTER TABLE containers ADD COLUMN job_id TEXT;
-- Thousandths of units that a container holds while it is locked or runs, and, while it runs, their growth-weighted
-- seconds up to its start (`plan/usage.rs`).
ALTER TABLE containers ADD COLUMN held_units BIGINT NOT NULL DEFAULT 0;
ALTER TABLE containers ADD COLUMN held_weighted DOUBLE PRECISION;
CREATE INDEX containers_held ON containers (owner_uuid) WHERE held_units > 0;

-- Growth-weighted seconds of thousandths of units that ended containers of users held. Rows are only added to.
CREATE TABLE queue_usage (
    owner_uuid TEXT PRIMARY KEY,
    weighted DOUBLE PRECISION NOT NULL
);
