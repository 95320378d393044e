-- A project with twice the weight may use twice as much before others come first.
ALTER TABLE projects ADD COLUMN usage_weight BIGINT NOT NULL DEFAULT 1;

-- Since when a job holds its part of an instance, in which thousandths of units, and their growth-weighted seconds up to
-- that time (`plan/usage.rs`): with these, the usage of all jobs that run is a sum.
ALTER TABLE jobs ADD COLUMN held_at BIGINT;
ALTER TABLE jobs ADD COLUMN held_units BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN held_weighted DOUBLE PRECISION NOT NULL DEFAULT 0;

-- Usage of ended jobs by day (UTC, days since 1970). Rows are only added to.
CREATE TABLE usage_days (
    day BIGINT NOT NULL,
    project_id TEXT NOT NULL REFERENCES projects (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    class TEXT NOT NULL,
    jobs BIGINT NOT NULL,
    -- Milliseconds of GPUs and of CPUs, and millionths of a dollar.
    gpu_ms BIGINT NOT NULL,
    cpu_ms BIGINT NOT NULL,
    cost BIGINT NOT NULL,
    -- Growth-weighted seconds of thousandths of units.
    weighted DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (project_id, day, user_id, class)
);
