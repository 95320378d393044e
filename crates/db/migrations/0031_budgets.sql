-- Budgets: what the jobs of a project, or of one of its members, may cost or use in a period.
CREATE TABLE budgets (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    -- The member whose jobs it counts; without one, all jobs of the project.
    user_id TEXT REFERENCES users (id),
    -- `cost` (millionths of a dollar) or `gpu-hours` (milliseconds of GPUs).
    unit TEXT NOT NULL,
    -- `day`, `week` or `month`, in UTC.
    period TEXT NOT NULL,
    -- Amount from which a warning is recorded, and the amount at which jobs no longer start; one of them at least.
    warn_amount BIGINT,
    cap_amount BIGINT,
    -- First day of the period for which an event was recorded, and which: 1 for the warning, 2 for the cap.
    noted_day BIGINT NOT NULL DEFAULT 0,
    noted_level BIGINT NOT NULL DEFAULT 0,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX budgets_key ON budgets (project_id, coalesce(user_id, ''), unit, period);
