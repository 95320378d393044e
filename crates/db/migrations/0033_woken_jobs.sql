-- Waiting jobs that were woken and that no round of placement has claimed yet: others are not placed before them.
CREATE INDEX jobs_woken ON jobs (project_id, priority, submitted_at) WHERE status = 'submitted' AND due_at IS NULL AND lock_token IS NULL AND shortfalls IS NOT NULL AND NOT parked AND NOT finished;
