//! Conformance of the store in memory, which is the reference of the suite.

use std::{sync::Arc, time::Duration};

use uuid::Uuid;
use windlass_engine::{
    DbTime, MemoryStore,
    conformance::{Harness, Row},
    lease_conformance,
};

struct Memory(Arc<MemoryStore>);

impl Harness for Memory {
    type Store = MemoryStore;

    const MAIN: &'static str = "parents";
    const RELATED: &'static str = "children";
    const CLAIMED: &'static [&'static str] = &["submitted", "running"];
    const UNCLAIMED: &'static str = "done";

    async fn open() -> Self {
        Self(Arc::new(MemoryStore::new()))
    }

    fn store(&self) -> Arc<MemoryStore> {
        self.0.clone()
    }

    async fn insert(&self, table: &'static str, row: Row) {
        self.0.put(table, row);
    }

    async fn row(&self, table: &'static str, id: Uuid) -> Row {
        self.0.row(table, id).unwrap()
    }

    async fn now(&self) -> DbTime {
        self.0.now()
    }

    async fn advance_time(&self, table: &'static str, by: Duration) {
        let by = i64::try_from(by.as_micros()).unwrap();
        for mut row in self.0.rows(table) {
            row.lock_expires_at = row.lock_expires_at.map(|at| at - by);
            row.due_at = row.due_at.map(|at| at - by);
            self.0.put(table, row);
        }
    }
}

lease_conformance!(Memory);
