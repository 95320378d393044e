//! Counts of the work that this process asks of its database: the cost of a run is a count, which a test can hold.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

#[derive(Debug, Default)]
pub(super) struct Counters {
    statements: AtomicU64,
    rows: AtomicU64,
    commits: AtomicU64,
    polls: AtomicU64,
    claimed: AtomicU64,
    notifications: AtomicU64,
    busy_us: AtomicU64,
}

/// Counts since the database was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DbCounts {
    /// Statements that were run. On Postgres a bulk statement for many rows counts once.
    pub statements: u64,
    /// Rows that statements returned.
    pub rows: u64,
    /// Transactions of the writer.
    pub commits: u64,
    /// Polls of pipelines for rows that are due.
    pub polls: u64,
    /// Rows that pipelines claimed.
    pub claimed: u64,
    /// Notifications to other replicas.
    pub notifications: u64,
    /// Time that the threads of SQLite were busy; Postgres has its own statistics.
    pub busy: Duration,
}

impl Counters {
    pub(super) fn count_statements(&self, number: usize, rows: usize) {
        self.statements.fetch_add(number as u64, Ordering::Relaxed);
        self.rows.fetch_add(rows as u64, Ordering::Relaxed);
    }

    pub(super) fn count_commit(&self) {
        self.commits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_poll(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_claim(&self, rows: usize) {
        self.claimed.fetch_add(rows as u64, Ordering::Relaxed);
    }

    pub(super) fn count_notification(&self) {
        self.notifications.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_busy(&self, took: Duration) {
        self.busy_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> DbCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DbCounts {
            statements: read(&self.statements),
            rows: read(&self.rows),
            commits: read(&self.commits),
            polls: read(&self.polls),
            claimed: read(&self.claimed),
            notifications: read(&self.notifications),
            busy: Duration::from_micros(read(&self.busy_us)),
        }
    }
}

impl DbCounts {
    /// Renders the Prometheus text.
    pub fn prometheus(&self) -> String {
        let counts = [
            ("statements", "Statements run in the database", self.statements as f64),
            ("rows", "Rows returned by the database", self.rows as f64),
            ("commits", "Transactions committed by the writer", self.commits as f64),
            ("polls", "Polls for rows that are due", self.polls as f64),
            ("claimed_rows", "Rows claimed by pipelines", self.claimed as f64),
            ("notifications", "Notifications sent to other replicas", self.notifications as f64),
            ("busy_seconds", "Time the threads of SQLite were busy", self.busy.as_secs_f64()),
        ];
        let text = counts.map(|(name, help, value)| {
            let name = format!("windlass_database_{name}");
            format!("# HELP {name} {help}.\n# TYPE {name} counter\n{name}_total {value}\n")
        });
        text.concat()
    }
}
