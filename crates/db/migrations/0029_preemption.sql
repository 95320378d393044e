-- Whether the scheduler may end a job so that another can start: `never`, `borrowed` (what its project holds beyond its
-- share) or `always`; and how often that happened before.
ALTER TABLE jobs ADD COLUMN preemptible TEXT NOT NULL DEFAULT 'never';
ALTER TABLE jobs ADD COLUMN preempted_before BIGINT NOT NULL DEFAULT 0;
-- Since when it waits, if it keeps its place from before it was preempted.
ALTER TABLE jobs ADD COLUMN queued_at BIGINT;
-- Request of the scheduler to end it, for which job, and the rule (JSON).
ALTER TABLE jobs ADD COLUMN preempted_at BIGINT;
ALTER TABLE jobs ADD COLUMN preempted_for TEXT;
ALTER TABLE jobs ADD COLUMN preemption TEXT;
CREATE INDEX jobs_preempted ON jobs (preempted_at) WHERE preempted_at IS NOT NULL;
CREATE INDEX jobs_preempted_for ON jobs (preempted_for) WHERE preempted_for IS NOT NULL;

-- Blocks that are kept for a waiting job for which others were preempted (JSON), and until when.
ALTER TABLE jobs ADD COLUMN promised TEXT;
ALTER TABLE jobs ADD COLUMN promised_until BIGINT;
CREATE INDEX jobs_promised ON jobs (promised_until) WHERE promised_until IS NOT NULL;

-- Increases with each promise of blocks: a server that read the instance before cannot assign them to others.
ALTER TABLE instances ADD COLUMN promise_num BIGINT NOT NULL DEFAULT 0;
