//! The engine's lease suite on both databases, and on that of the simulation.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use uuid::Uuid;
use windlass_engine::conformance::{Harness, Row};
use windlass_model::id::UserId;
use windlass_server::{
    db::{Db, Unit, Val},
    params,
};

use crate::{
    db::DbFixture,
    db_fixtures::{TestOwner, create_owner},
};

/// The harnesses differ only in the location of the database.
macro_rules! harness {
    ($name:ident, $home:ty, $open:expr, $db:expr) => {
        pub(crate) struct $name {
            home: $home,
            store: Arc<Db>,
            made: TestOwner,
        }

        impl Harness for $name {
            type Store = Db;
            const MAIN: &'static str = "runs";
            const RELATED: &'static str = "volumes";
            const CLAIMED: &'static [&'static str] = &["submitted", "running"];
            const UNCLAIMED: &'static str = "terminating";

            async fn open() -> Self {
                let home = $open.await;
                let store: Arc<Db> = Arc::new($db(&home));
                let made = create_owner(&store).await;
                Self { home, store, made }
            }

            fn store(&self) -> Arc<Db> {
                let _ = &self.home;
                Arc::clone(&self.store)
            }

            async fn insert(&self, table: &'static str, row: Row) {
                insert(&self.store, &self.made, table, row).await;
            }

            async fn row(&self, table: &'static str, id: Uuid) -> Row {
                read(&self.store, table, id).await
            }

            async fn now(&self) -> i64 {
                self.store.query("SELECT now_us()", vec![]).await.unwrap()[0].int(0).unwrap()
            }

            async fn advance_time(&self, table: &'static str, by: Duration) {
                let by = i64::try_from(by.as_micros()).unwrap();
                let sql = format!(
                    "UPDATE {table} SET lock_expires_at = lock_expires_at - $1, due_at = due_at - $1"
                );
                self.store.write(Unit::new().exec(sql, params![by])).await.unwrap();
            }
        }
    };
}

async fn insert(db: &Db, made: &TestOwner, table: &'static str, row: Row) {
    let UserId(user) = made.user;
    let mut values = vec![
        ("id", Val::from(row.id)),
        ("project_id", made.project.into()),
        ("user_id", user.into()),
        ("name", row.id.into()),
        ("status", row.status.into()),
        ("last_processed_at", row.last_processed_at.into()),
        ("due_at", row.due_at.into()),
        ("lock_token", row.lock_token.into()),
        ("lock_expires_at", row.lock_expires_at.into()),
        ("lock_owner", row.lock_owner.into()),
        ("lock_epoch", row.lock_epoch.into()),
    ];
    values.extend(match table {
        "runs" => [("spec", "{}".into()), ("submitted_at", Val::Now)],
        _ => [("configuration", "{}".into()), ("created_at", Val::Now)],
    });
    db.write(Unit::new().insert(table, values)).await.unwrap().done().unwrap();
}

async fn read(db: &Db, table: &'static str, id: Uuid) -> Row {
    let sql = format!(
        "SELECT id, status, last_processed_at, due_at, lock_token, lock_expires_at, lock_owner, lock_epoch \
         FROM {table} WHERE id = $1"
    );
    let rows = db.query(sql, params![id]).await.unwrap();
    let row = &rows[0];
    Row {
        id: row.uuid(0).unwrap(),
        status: row.text(1).unwrap(),
        last_processed_at: row.int(2).unwrap(),
        due_at: row.opt_int(3).unwrap(),
        lock_token: row.opt_uuid(4).unwrap(),
        lock_expires_at: row.opt_int(5).unwrap(),
        lock_owner: row.opt_text(6).unwrap(),
        lock_epoch: row.int(7).unwrap(),
    }
}

/// A clock that advances by a microsecond with each read: time passes, and is reproducible.
async fn inline() -> Db {
    let ticks = AtomicI64::new(1_700_000_000_000_000);
    Db::open_inline(Arc::new(move || ticks.fetch_add(1, Ordering::Relaxed)), 7).unwrap()
}

harness!(OnSqlite, DbFixture, DbFixture::sqlite(), |home: &DbFixture| home.db().clone());
harness!(OnPostgres, DbFixture, DbFixture::postgres(), |home: &DbFixture| home.db().clone());
harness!(Inline, Db, inline(), Db::clone);

mod sqlite {
    windlass_engine::lease_conformance!(super::OnSqlite);
}

mod postgres {
    windlass_engine::lease_conformance!(super::OnPostgres);
}

mod inline {
    windlass_engine::lease_conformance!(super::Inline);
}
