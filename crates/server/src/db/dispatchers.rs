//! Table `dispatchers`: who takes containers from the queue, and what they could run.

use windlass_model::time::Timestamp;

use super::{
    Change, Db, DbError, Expect,
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Dispatcher {
        pub name: String,
        pub kind: String,
        pub token_uuid: String,
        /// JSON.
        pub nodes: String,
        pub seen_at: Timestamp,
    }
}

statements! {
    /// A name belongs to who used it last, unless somebody else is heard under it.
    SEEN = "INSERT INTO dispatchers (name, kind, token_uuid, nodes, seen_at) VALUES ($1, $2, $3, $4, now_us()) \
            ON CONFLICT (name) DO UPDATE SET kind = $2, token_uuid = $3, nodes = $4, seen_at = now_us() \
            WHERE dispatchers.token_uuid = $3 OR dispatchers.seen_at < now_us() - $5";
    LIST = "SELECT {} FROM dispatchers d ORDER BY d.name", Dispatcher::columns("d");
}

/// Stale when another one is heard under this name.
pub fn seen(name: &str, kind: &str, token: &str, nodes: &str, silent_us: i64) -> Change {
    Change::Exec {
        sql: SEEN.as_str().into(),
        params: params![name, kind, token, nodes, silent_us],
        expect: Expect::One,
    }
}

pub async fn list(db: &Db) -> Result<Vec<Dispatcher>, DbError> {
    db.query(LIST.as_str(), params![]).await?.into_iter().map(Dispatcher::read).collect()
}
