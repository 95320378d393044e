//! What the invariant checkers read: the event history from a number on, and the rows.

pub const EVENTS: &str =
    "SELECT seq, entity, entity_id, kind, from_status, to_status, is_final, actor, epoch,
    recorded_at FROM events WHERE seq > $1 ORDER BY seq";

pub const RUNS: &str = "SELECT id, status FROM runs ORDER BY submitted_at, id";

pub const JOBS: &str =
    "SELECT id, run_id, replica_num, job_num, submission_num, status, finished, instance_id, blocks,
    submitted_at, host_given_up FROM jobs ORDER BY run_id, replica_num, job_num, submission_num";

pub const INSTANCES: &str = "SELECT id, busy_blocks, coalesce(total_blocks, 1) FROM instances ORDER BY id";
