//! Queries of the invariant checkers: the event history from a number on, and the rows.

pub mod pool_watch;
pub mod slot_watch;

pub const EVENTS: &str =
    "SELECT seq, entity, entity_id, kind, from_status, to_status, is_final, actor, epoch,
    recorded_at, reason FROM events WHERE seq > $1 ORDER BY seq";

pub const RUNS: &str =
    "SELECT id, status, managed_job_id, name, submitted_at FROM runs ORDER BY submitted_at, id";

pub const MANAGED_JOBS: &str = "SELECT id, number, plan, status, schedule, claimed, finished, cancel_asked_at
    FROM managed_jobs ORDER BY number";

pub const MANAGED_TASKS: &str =
    "SELECT id, job_id, status, schedule, record FROM managed_job_tasks ORDER BY job_id, task";

/// Unfinished runs of managed jobs.
pub const ATTEMPTS: &str =
    "SELECT id FROM runs WHERE managed_job_id IS NOT NULL AND NOT finished ORDER BY submitted_at, id";

pub const JOBS: &str =
    "SELECT id, run_id, replica_num, job_num, submission_num, status, finished, instance_id, blocks,
    submitted_at, host_given_up FROM jobs ORDER BY run_id, replica_num, job_num, submission_num";

/// Jobs of a run that have an instance.
pub const PLACED_JOBS: &str = "SELECT id FROM jobs WHERE run_id = $1 AND instance_id IS NOT NULL";

pub const INSTANCES: &str = "SELECT id, busy_blocks, coalesce(total_blocks, 1), status, finished, fleet_id,
    termination_reason FROM instances ORDER BY id";

pub const FLEETS: &str = "SELECT id, status, finished, spec FROM fleets ORDER BY id";

pub const VOLUMES: &str = "SELECT id, deleted, delete_asked_at FROM volumes ORDER BY id";

pub const ATTACHMENTS: &str =
    "SELECT volume_id, instance_id FROM volume_attachments ORDER BY volume_id, instance_id";

pub const HELD_BY_FINISHED: &str = "SELECT j.id FROM jobs j WHERE j.finished AND (EXISTS
    (SELECT 1 FROM volume_holds h WHERE h.job_id = j.id) OR EXISTS
    (SELECT 1 FROM volume_attachments a WHERE a.ends_for = j.id)) ORDER BY j.id";

/// Classes of waiting jobs in which all are parked.
pub const HEADLESS_CLASSES: &str =
    "SELECT wait_class FROM jobs WHERE wait_class IS NOT NULL GROUP BY wait_class
    HAVING min(CASE WHEN parked THEN 1 ELSE 0 END) = 1 ORDER BY wait_class";

/// Jobs of a class that do not wait.
pub const LEFT_IN_CLASS: &str = "SELECT id FROM jobs WHERE (wait_class IS NOT NULL OR parked)
    AND (finished OR status <> 'submitted' OR instance_id IS NOT NULL) ORDER BY id";

/// Writes a whole SQLite database to a new file.
pub const VACUUM_INTO: &str = "VACUUM INTO $1";
