//! Triggers in SQLite, for the simulation of shared fleets: every write that assigns or preempts a job is checked against
//! the quotas, the blocks that are kept for others and the job that it is for. Each preemption is recorded with what all
//! jobs held at that moment. Violations are added to the table of `slot_watch`.

use crate::quotas::held_amount;

/// From now on quotas and exports do not change and no host fails: blocks that are kept are kept from all others.
pub const CALM: &str = "INSERT INTO watched_calm VALUES (now_us())";

/// Beginning of that time.
pub const CALM_SINCE: &str = "SELECT min(since) FROM watched_calm";

/// Replicas at each preemption: those that hold instances, those that end, and the one that waits.
pub const HELD: &str = "SELECT h.waiting, h.recorded_at, h.role, h.project_id, h.priority, h.run_id, h.replica_num, h.held_gpus, \
                        h.held_cpus, h.held_memory_mib FROM watched_held h ORDER BY h.recorded_at, h.waiting, h.run_id, h.job";

/// Shares of projects at each preemption.
pub const SHARES: &str =
    "SELECT s.waiting, s.recorded_at, s.project_id, s.resource, s.amount FROM watched_shares s";

/// The jobs for which others were preempted.
pub const WAITING: &str = "SELECT w.waiting, w.recorded_at, j.provisioned_at, j.finished, j.termination_reason, w.until \
                           FROM watched_preemptions w JOIN jobs j ON j.id = w.waiting ORDER BY w.recorded_at";

/// Creates the tables and the triggers.
pub fn statements() -> Vec<String> {
    let held = "SELECT NEW.preempted_for, NEW.preempted_at, j.id, \
                CASE WHEN j.id = NEW.preempted_for THEN 'waiting' WHEN j.preempted_at IS NULL THEN 'held' ELSE 'victim' END, \
                j.project_id, j.priority, j.run_id, j.replica_num, j.held_gpus, j.held_cpus, j.held_memory_mib FROM jobs j \
                WHERE NOT j.finished AND (j.id = NEW.preempted_for OR (j.instance_id IS NOT NULL AND (j.preempted_at IS NULL \
                OR (j.preempted_for = NEW.preempted_for AND j.preempted_at = NEW.preempted_at))))";
    let shares = "SELECT NEW.preempted_for, NEW.preempted_at, q.project_id, q.resource, q.share_amount FROM quotas q \
                  WHERE q.user_id IS NULL AND q.share_amount IS NOT NULL";
    let clear = |table: &str| {
        format!("DELETE FROM {table} WHERE waiting = NEW.preempted_for AND recorded_at = NEW.preempted_at;")
    };
    let over_quota = format!(
        "INSERT INTO watched SELECT 'Q1', 'job ' || NEW.id || ' exceeds the quota of ' || q.max_amount || ' ' || q.resource \
         FROM quotas q JOIN runs nr ON nr.id = NEW.run_id WHERE q.project_id = NEW.project_id \
         AND (q.user_id IS NULL OR q.user_id = nr.user_id) AND {} > 0 AND q.max_amount < (SELECT sum({}) FROM jobs j \
         JOIN runs r ON r.id = j.run_id WHERE j.project_id = q.project_id AND NOT j.finished AND j.instance_id IS NOT NULL \
         AND (q.user_id IS NULL OR r.user_id = q.user_id));",
        held_amount("NEW"),
        held_amount("j")
    );
    let slipped_in = "INSERT INTO watched SELECT 'P4', 'job ' || NEW.id || ' holds blocks of ' || i.id || ' that are kept for another' \
                      FROM instances i WHERE i.id = NEW.instance_id AND EXISTS (SELECT 1 FROM watched_calm) \
                      AND coalesce(i.total_blocks, 1) < (SELECT coalesce(sum(j.blocks), 0) FROM jobs j \
                      WHERE j.instance_id = i.id AND NOT j.finished AND j.preempted_at IS NULL) \
                      + (SELECT coalesce(sum(json_extract(p.value, '$.blocks')), 0) FROM jobs w, json_each(w.promised) p \
                      WHERE w.promised_until > now_us() AND NOT w.finished AND w.status = 'submitted' AND w.instance_id IS NULL \
                      AND json_extract(p.value, '$.instance') = i.id \
                      AND (w.run_id <> NEW.run_id OR w.replica_num <> NEW.replica_num));";
    let nobody_waits = "INSERT INTO watched SELECT 'P1', 'job ' || NEW.id || ' is preempted, but nothing is kept for ' \
                        || NEW.preempted_for WHERE NOT EXISTS (SELECT 1 FROM jobs w WHERE w.id = NEW.preempted_for \
                        AND w.status = 'submitted' AND w.instance_id IS NULL AND NOT w.finished AND w.promised IS NOT NULL \
                        AND w.promised_until > now_us());";
    vec![
        "CREATE TABLE watched_calm (since BIGINT NOT NULL)".to_owned(),
        "CREATE TABLE watched_preemptions (waiting TEXT NOT NULL, recorded_at BIGINT NOT NULL, until BIGINT)".to_owned(),
        "CREATE TABLE watched_shares (waiting TEXT NOT NULL, recorded_at BIGINT NOT NULL, project_id TEXT NOT NULL, \
         resource TEXT NOT NULL, amount BIGINT NOT NULL)"
            .to_owned(),
        "CREATE TABLE watched_held (waiting TEXT NOT NULL, recorded_at BIGINT NOT NULL, job TEXT NOT NULL, role TEXT NOT NULL, \
         project_id TEXT NOT NULL, priority BIGINT NOT NULL, run_id TEXT NOT NULL, replica_num BIGINT NOT NULL, \
         held_gpus BIGINT NOT NULL, held_cpus BIGINT NOT NULL, held_memory_mib BIGINT NOT NULL)"
            .to_owned(),
        format!(
            "CREATE TRIGGER watched_seats AFTER UPDATE OF instance_id ON jobs \
             WHEN NEW.instance_id IS NOT NULL AND OLD.instance_id IS NULL BEGIN {over_quota} {slipped_in} END"
        ),
        format!(
            "CREATE TRIGGER watched_victims AFTER UPDATE OF preempted_at ON jobs \
             WHEN NEW.preempted_at IS NOT NULL AND OLD.preempted_at IS NULL BEGIN {nobody_waits} {} {} {} \
             INSERT INTO watched_preemptions SELECT NEW.preempted_for, NEW.preempted_at, w.promised_until FROM jobs w \
             WHERE w.id = NEW.preempted_for; INSERT INTO watched_held {held}; INSERT INTO watched_shares {shares}; END",
            clear("watched_preemptions"),
            clear("watched_held"),
            clear("watched_shares")
        ),
    ]
}
