//! What every function of `db/` does, on both databases alike.

use std::path::PathBuf;

use windlass_server::db::{DatabaseUrl, Db};

use crate::postgres;

/// A database for one test, removed with it.
pub(crate) enum Home {
    Sqlite { db: Db, dir: PathBuf },
    Postgres(postgres::TestDb),
}

impl Home {
    pub(crate) async fn sqlite() -> Self {
        let dir = scratch();
        let db = Db::open(&DatabaseUrl::Sqlite(dir.join("windlass.db"))).await.unwrap();
        Self::Sqlite { db, dir }
    }

    pub(crate) async fn postgres() -> Self {
        Self::Postgres(postgres::TestDb::open().await)
    }

    pub(crate) fn db(&self) -> &Db {
        match self {
            Self::Sqlite { db, .. } => db,
            Self::Postgres(test) => &test.db,
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Self::Sqlite { dir, .. } = self {
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}

/// An empty directory of this test's own.
pub(crate) fn scratch() -> PathBuf {
    let mut bytes = [0_u8; 8];
    getrandom::fill(&mut bytes).unwrap();
    let dir = std::env::temp_dir().join(format!("windlass-db-{:016x}", u64::from_be_bytes(bytes)));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Defines `sqlite::NAME` and `postgres::NAME` for each `async fn NAME(db: &Db)` beside it.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let home = crate::db::Home::sqlite().await;
                    super::$name(home.db()).await;
                    home.db().close().await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let home = crate::db::Home::postgres().await;
                    super::$name(home.db()).await;
                    home.db().close().await;
                }
            )*
        }
    };
}

pub(crate) use on_both;
