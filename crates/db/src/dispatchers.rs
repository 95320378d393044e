//! Table `dispatchers`: the processes that pull containers from the queue, and the capacity that they have.

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

record! {
    /// The process that works with a token, or did last.
    pub struct DispatcherLease {
        pub token_uuid: String,
        pub described: String,
        pub expires_at: Timestamp,
    }
}

/// Number of containers in a state that one token has locked, or that nothing has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldContainers {
    pub token_uuid: Option<String>,
    pub state: String,
    pub count: i64,
}

statements! {
    /// A name belongs to the token that used it last, unless a dispatcher with another token is online under it.
    HEARTBEAT = "INSERT INTO dispatchers (name, kind, token_uuid, nodes, seen_at) VALUES ($1, $2, $3, $4, now_us()) \
            ON CONFLICT (name) DO UPDATE SET kind = $2, token_uuid = $3, nodes = $4, seen_at = now_us() \
            WHERE dispatchers.token_uuid = $3 OR dispatchers.seen_at < now_us() - $5";
    /// Acquires or renews the lease if it is free or held by this process.
    HOLD = "INSERT INTO dispatcher_leases (token_uuid, holder, described, expires_at) \
            VALUES ($1, $2, $3, now_us() + $4) \
            ON CONFLICT (token_uuid) DO UPDATE SET holder = $2, described = $3, expires_at = now_us() + $4 \
            WHERE dispatcher_leases.holder = $2 OR dispatcher_leases.expires_at <= now_us()";
    HOLDER = "SELECT described FROM dispatcher_leases WHERE token_uuid = $1";
    LEASES = "SELECT {} FROM dispatcher_leases l WHERE l.expires_at > $1 OR EXISTS \
              (SELECT 1 FROM dispatchers d WHERE d.token_uuid = l.token_uuid)", DispatcherLease::columns("l");
    HELD = "SELECT c.locked_by_uuid, c.state, count(*) FROM containers c WHERE c.state IN ('Queued', 'Locked', 'Running') \
            AND (c.state <> 'Queued' OR c.priority > 0) AND (CAST($1 AS TEXT) IS NULL OR c.owner_uuid = $1) GROUP BY c.locked_by_uuid, c.state";
    LIST = "SELECT {} FROM dispatchers d ORDER BY d.name", Dispatcher::columns("d");
}

/// Stale if another dispatcher is online under this name.
pub fn record_heartbeat(name: &str, kind: &str, token: &str, nodes: &str, silent_us: i64) -> Change {
    Change::Exec {
        sql: HEARTBEAT.as_str().into(),
        params: params![name, kind, token, nodes, silent_us],
        expect: Expect::One,
    }
}

/// Stale if another process holds the token's lease.
pub fn claim_lease(token: &str, holder: &str, described: &str, for_us: i64) -> Change {
    Change::Exec {
        sql: HOLD.as_str().into(),
        params: params![token, holder, described, for_us],
        expect: Expect::One,
    }
}

/// Description of the process that holds, or last held, a token's lease.
pub async fn lease_holder(db: &Db, token: &str) -> Result<Option<String>, DbError> {
    db.query_opt(HOLDER.as_str(), params![token]).await?.map(|row| row.text(0)).transpose()
}

pub async fn list(db: &Db) -> Result<Vec<Dispatcher>, DbError> {
    db.query(LIST.as_str(), params![]).await?.into_iter().map(Dispatcher::read).collect()
}

/// Leases of named dispatchers, and those of others that ended at this time or later.
pub async fn leases(db: &Db, since: Timestamp) -> Result<Vec<DispatcherLease>, DbError> {
    db.query(LEASES.as_str(), params![since]).await?.into_iter().map(DispatcherLease::read).collect()
}

/// Active containers by holder and state; `owner` limits them to those of a user of the queue.
pub async fn held_containers(db: &Db, owner: Option<&str>) -> Result<Vec<HeldContainers>, DbError> {
    let rows = db.query(HELD.as_str(), params![owner.map(str::to_owned)]).await?;
    let read = |row: &super::Row| {
        Ok(HeldContainers { token_uuid: row.opt_text(0)?, state: row.text(1)?, count: row.int(2)? })
    };
    rows.iter().map(read).collect()
}
