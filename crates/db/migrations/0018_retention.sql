-- When an upload was last brought, asked for or named by a new run. Absent on those that were there before.
ALTER TABLE codes ADD COLUMN used_at BIGINT;
ALTER TABLE archives ADD COLUMN used_at BIGINT;
CREATE INDEX codes_used ON codes (coalesce(used_at, created_at));
CREATE INDEX archives_used ON archives (coalesce(used_at, created_at));

-- Runs that may be too old.
CREATE INDEX runs_ended ON runs (finished_at) WHERE finished;
