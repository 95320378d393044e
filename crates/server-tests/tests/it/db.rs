//! Tests of every function of `db/`, on both databases.

use windlass_server::db::{DatabaseUrl, Db};
use windlass_testkit::{TempDir, temp_dir};

use crate::postgres;

/// A database for one test, removed with it.
pub(crate) enum DbFixture {
    Sqlite { db: Db, _dir: TempDir },
    Postgres(postgres::TestDb),
}

impl DbFixture {
    pub(crate) async fn sqlite() -> Self {
        let dir = temp_dir("db").unwrap();
        let db = Db::open(&DatabaseUrl::Sqlite(dir.path().join("windlass.db"))).await.unwrap();
        Self::Sqlite { db, _dir: dir }
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

/// Defines `sqlite::NAME` and `postgres::NAME` for each `async fn NAME(db: &Db)` in the module.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let home = crate::db::DbFixture::sqlite().await;
                    super::$name(home.db()).await;
                    home.db().close().await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let home = crate::db::DbFixture::postgres().await;
                    super::$name(home.db()).await;
                    home.db().close().await;
                }
            )*
        }
    };
}

pub(crate) use on_both;
