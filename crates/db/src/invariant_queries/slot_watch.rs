//! Triggers in SQLite, for the simulation: every write checks whether a limit of slots is exceeded, and whether a task
//! gets a second active attempt. A periodic check would miss short violations.

/// Observed violations: the invariant's id, and a description.
pub const VIOLATIONS: &str = "SELECT id, what FROM watched";

/// Creates the table and the triggers, for these limits of slots.
pub fn statements(max_launching: u32, max_alive: u32) -> Vec<String> {
    let launching = "(SELECT count(*) FROM managed_job_tasks t WHERE t.schedule = 'LAUNCHING' OR t.granted)";
    let alive = "((SELECT count(*) FROM managed_jobs m WHERE m.claimed AND NOT m.finished) + (SELECT count(DISTINCT \
                 t.job_id) FROM managed_job_tasks t JOIN managed_jobs m ON m.id = t.job_id WHERE t.granted AND NOT m.claimed))";
    let note = |count: &str, what: &str, most: u32| {
        format!(
            "INSERT INTO watched SELECT 'M5', {count} || ' {what}, at most {most} may be' WHERE {count} > {most};"
        )
    };
    let slots = note(launching, "tasks launch", max_launching) + &note(alive, "jobs are alive", max_alive);
    // The name of an attempt is that of its task and a number.
    let other = "SELECT r.name FROM runs r WHERE r.managed_job_id = NEW.managed_job_id AND r.id <> NEW.id \
                 AND NOT r.finished AND rtrim(r.name, '0123456789') = rtrim(NEW.name, '0123456789')";
    vec![
        "CREATE TABLE watched (id TEXT NOT NULL, what TEXT NOT NULL)".to_owned(),
        format!(
            "CREATE TRIGGER watched_tasks AFTER UPDATE OF schedule, granted ON managed_job_tasks \
             WHEN NEW.schedule = 'LAUNCHING' OR NEW.granted BEGIN {slots} END"
        ),
        format!(
            "CREATE TRIGGER watched_jobs AFTER UPDATE OF claimed, finished ON managed_jobs WHEN NEW.claimed BEGIN {slots} END"
        ),
        format!(
            "CREATE TRIGGER watched_runs AFTER INSERT ON runs WHEN NEW.managed_job_id IS NOT NULL BEGIN \
             INSERT INTO watched SELECT 'M6', NEW.name || ' is made while ' || o.name || ' is not over' FROM ({other}) o; END"
        ),
    ]
}
