-- Waiting jobs that placement cannot tell apart form a class: a hash of the request. Only the first of a class is
-- evaluated while it waits; the others are parked until it leaves.
ALTER TABLE jobs ADD COLUMN wait_class TEXT;
ALTER TABLE jobs ADD COLUMN parked BOOLEAN NOT NULL DEFAULT FALSE;
-- The members of a class in the order of the queue, those that are evaluated first.
CREATE INDEX jobs_wait_class ON jobs (wait_class, parked, submitted_at, run_id, replica_num) WHERE wait_class IS NOT NULL;
-- The jobs that are woken when capacity becomes free.
CREATE INDEX jobs_evaluated ON jobs (project_id, priority DESC, submitted_at) WHERE NOT finished AND status = 'submitted' AND NOT parked;
