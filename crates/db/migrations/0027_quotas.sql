-- Limits and guarantees of what the jobs of a project, or of one of its members, hold at once.
CREATE TABLE quotas (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    -- The member whose jobs it limits; without one, all jobs of the project.
    user_id TEXT REFERENCES users (id),
    -- `gpu`, `gpu:NAME`, `cpu`, `memory` (MiB) or `price` (millionths of a dollar per hour).
    resource TEXT NOT NULL,
    -- The most that may be held, and what is guaranteed to the project; one of them at least.
    max_amount BIGINT,
    share_amount BIGINT,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX quotas_key ON quotas (project_id, coalesce(user_id, ''), resource);

-- The part of its instance that a job holds.
ALTER TABLE jobs ADD COLUMN held_gpus BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN held_gpu_name TEXT;
ALTER TABLE jobs ADD COLUMN held_cpus BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN held_memory_mib BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN held_price BIGINT NOT NULL DEFAULT 0;
