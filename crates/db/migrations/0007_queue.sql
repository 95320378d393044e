-- The line of jobs that wait for a seat: whoever frees one finds the first of them without reading those that run.
CREATE INDEX jobs_waiting ON jobs (project_id, priority DESC, submitted_at) WHERE NOT finished AND status = 'submitted';

-- What a pipeline may claim: by its own statuses first, so that it does not read past what others wait for. A row
-- without a due time is due since ever.
DROP INDEX runs_unlocked;
DROP INDEX runs_due;
DROP INDEX runs_locked;
CREATE INDEX runs_queue ON runs (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX runs_held ON runs (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
DROP INDEX jobs_unlocked;
DROP INDEX jobs_due;
DROP INDEX jobs_locked;
CREATE INDEX jobs_queue ON jobs (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX jobs_held ON jobs (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
DROP INDEX instances_unlocked;
DROP INDEX instances_due;
DROP INDEX instances_locked;
CREATE INDEX instances_queue ON instances (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX instances_held ON instances (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
DROP INDEX fleets_unlocked;
DROP INDEX fleets_due;
DROP INDEX fleets_locked;
CREATE INDEX fleets_queue ON fleets (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX fleets_held ON fleets (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
DROP INDEX volumes_unlocked;
DROP INDEX volumes_due;
DROP INDEX volumes_locked;
CREATE INDEX volumes_queue ON volumes (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX volumes_held ON volumes (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
DROP INDEX gateways_unlocked;
DROP INDEX gateways_due;
DROP INDEX gateways_locked;
CREATE INDEX gateways_queue ON gateways (status, coalesce(due_at, 0)) WHERE lock_token IS NULL AND NOT finished;
CREATE INDEX gateways_held ON gateways (lock_expires_at) WHERE lock_token IS NOT NULL AND NOT finished;
