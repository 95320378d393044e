//! Several servers on one Postgres, and connections that break at the worst moment.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use windlass_engine::{Held, LeaseStore, Queue};
use windlass_server::{
    db::{Db, DbError, Unit},
    params,
};

use crate::{
    db::{on_both, scratch},
    db_rows::{made, run},
    postgres::TestDb,
};

on_both! {
    a_changed_migration_is_refused
    a_database_of_a_newer_version_is_refused
}

const QUEUE: Queue = Queue { pipeline: "runs", table: "runs", statuses: &["submitted"] };

/// Opening again is what a restarted server does; here the journal was tampered with before.
async fn reopened(db: &Db, tamper: &'static str) -> DbError {
    db.write(Unit::new().exec(tamper, vec![])).await.unwrap();
    db.migrate_again().await.unwrap_err()
}

async fn a_changed_migration_is_refused(db: &Db) {
    db.migrate_again().await.expect("nothing is left to do");
    let error = reopened(db, "UPDATE migrations SET checksum = 'other' WHERE number = 1").await;
    let said = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(said.contains("`0001_core.sql` was changed"), "{said}");
}

async fn a_database_of_a_newer_version_is_refused(db: &Db) {
    let newer =
        "INSERT INTO migrations (number, name, checksum, applied_at) VALUES (9999, '9999_x.sql', 'x', 0)";
    let error = reopened(db, newer).await;
    let said = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(said.contains("newer version") && said.contains("9999"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_replicas_that_start_at_once_migrate_once() {
    let (first, others) = TestDb::open_by_many(4).await;
    let made = made(&first.db).await;
    for replica in &others {
        run(replica, &made, &format!("run-{}", replica.new_id().unwrap())).await;
    }
    let rows = first.db.query("SELECT count(*), max(number) FROM migrations", vec![]).await.unwrap();
    assert_eq!(rows[0].int(0).unwrap(), rows[0].int(1).unwrap());
    assert_eq!(first.db.query("SELECT id FROM runs", vec![]).await.unwrap().len(), 3);
}

/// Applies, heartbeats and claims over the same rows, from two replicas, in all orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_replicas_never_deadlock_over_the_same_rows() {
    let test = TestDb::open().await;
    let other = test.replica().await;
    let made = made(&test.db).await;
    for number in 0..40 {
        run(&test.db, &made, &format!("run-{number}")).await;
    }
    let ttl = Duration::from_secs(60);
    let held: Vec<Held> =
        test.db.claim(&QUEUE, 40, ttl).await.unwrap().leases.iter().map(|lease| lease.held()).collect();
    let mut tasks = Vec::new();
    for round in 0..6_usize {
        for db in [&test.db, &other] {
            let mut mine = held.clone();
            mine.rotate_left(round * 7);
            if round % 2 == 0 {
                mine.reverse();
            }
            let (db, beats) = (db.clone(), mine.clone());
            let heart = db.clone();
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    assert_eq!(heart.extend(&QUEUE, &beats, ttl).await.unwrap().len(), 40);
                }
            }));
            tasks.push(tokio::spawn(async move {
                let writes = mine.iter().map(|held| {
                    let unit = Unit::guarded("runs", *held, vec![("priority", 1_i64.into())]).exec(
                        "UPDATE runs SET retry_count = retry_count + 1 WHERE id = $1 AND lock_token = $2",
                        params![held.id, held.token],
                    );
                    db.write(unit)
                });
                for written in futures_util::future::join_all(writes).await {
                    assert!(written.unwrap().is_done());
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let counted = test.db.query("SELECT DISTINCT retry_count FROM runs", vec![]).await.unwrap();
    assert_eq!((counted.len(), counted[0].int(0).unwrap()), (1, 12), "each write once");
    let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(test.db.query(sql, vec![]).await.unwrap()[0].int(0).unwrap(), 0);
    other.close().await;
}

const CALM: u8 = 0;
const LOSE_THE_COMMIT: u8 = 1;
const LOSE_THE_ANSWER: u8 = 2;

/// A socket in front of Postgres's that breaks the connection around the next COMMIT.
async fn proxy(real: PathBuf, dir: &Path, mood: Arc<AtomicU8>) {
    let listener = UnixListener::bind(dir.join(".s.PGSQL.5432")).unwrap();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let server = UnixStream::connect(&real).await.unwrap();
        tokio::spawn(forward(client, server, Arc::clone(&mood)));
    }
}

async fn forward(mut client: UnixStream, mut server: UnixStream, mood: Arc<AtomicU8>) {
    let (mut asked, mut answered) = (vec![0; 65536], vec![0; 65536]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(read @ 1..) = read else { return };
                let is_commit = asked[..read].windows(7).any(|text| text == b"COMMIT\0");
                match if is_commit { mood.swap(CALM, Ordering::SeqCst) } else { CALM } {
                    LOSE_THE_COMMIT => return,
                    LOSE_THE_ANSWER => {
                        server.write_all(&asked[..read]).await.unwrap();
                        // Something comes back, so it is done; the client does not get to see it.
                        let _ = server.read(&mut answered).await;
                        return;
                    }
                    _ => server.write_all(&asked[..read]).await.unwrap(),
                }
            }
            read = server.read(&mut answered) => {
                let Ok(read @ 1..) = read else { return };
                if client.write_all(&answered[..read]).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_lost_during_the_commit_leaves_the_outcome_unknown() {
    let test = TestDb::open().await;
    let made = made(&test.db).await;
    let dir = scratch();
    let mood = Arc::new(AtomicU8::new(CALM));
    let real = test.sockets().join(".s.PGSQL.5432");
    let (at, moods) = (dir.clone(), Arc::clone(&mood));
    let front = tokio::spawn(async move { proxy(real, &at, moods).await });
    while !dir.join(".s.PGSQL.5432").exists() {
        tokio::task::yield_now().await;
    }
    let db = Db::open(&test.url_through(&dir)).await.unwrap();
    for (next, kept) in [(LOSE_THE_ANSWER, 1), (LOSE_THE_COMMIT, 1), (LOSE_THE_ANSWER, 2)] {
        mood.store(next, Ordering::SeqCst);
        let id = db.new_id().unwrap();
        let unit = Unit::new().insert("runs", crate::db_rows::run_values(&made, id, &format!("run-{id}")));
        let error = db.write(unit).await.unwrap_err();
        assert!(matches!(error, DbError::Unknown { .. }), "{error:?}");
        // Asked directly: what was committed is there, and nothing was written twice.
        let rows = test.db.query("SELECT id FROM runs", vec![]).await.unwrap();
        assert_eq!(rows.len(), kept);
    }
    run(&db, &made, "after").await;
    db.close().await;
    front.abort();
    std::fs::remove_dir_all(dir).unwrap();
}
