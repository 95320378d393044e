//! The database: restarted, disconnected around a commit, slow, out of connections, full, read-only.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use super::{
    POLL_INTERVAL, TIMEOUT,
    servers::{check_all_done, small_task, start_pair, stop_and_check},
    submit_load::SubmitLoad,
    wait_until,
};
use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::{
    replicas::Replicas,
    server::{Server, ServerOptions, binary_path, call_api, submission},
};
use windlass_testkit::rng::Rng;
use windlass_testkit::{
    fault_proxy::{ConnectionFaults, FaultProxy},
    postgres::{self, SOCKET, ShutdownMode},
};

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F7",
        injection: "Postgres restart, fast and immediate, under load",
        expected: "503 with `Retry-After`, no run fails because of it",
        bound: "503 ≤ 5 s, recovery ≤ 10 s",
        proves: "R1 R2 M8",
        play: RowTest::Now(|trial| Box::pin(restarted(trial))),
    },
    FaultRow {
        id: "F8",
        injection: "connection cut around COMMIT: before it arrives, and after it is applied",
        expected: "outcome read again, never applied twice",
        bound: "next cycle",
        proves: "A1 L1",
        play: RowTest::Now(|trial| Box::pin(cut_around_commits(trial))),
    },
    FaultRow {
        id: "F9",
        injection: "each database response delayed by 1 s; no free connection; deadlocks",
        expected: "no lock lost, no panic, recovery without restart",
        bound: "during the fault; recovery ≤ 10 s",
        proves: "L4 L9 L15",
        play: RowTest::Now(|trial| Box::pin(degraded_database(trial))),
    },
    FaultRow {
        id: "F10",
        injection: "disk of SQLite full; Postgres read-only",
        expected: "writes fail with 507 or 503, reads work, recovery without restart",
        bound: "≤ 10 s after the fault ends",
        proves: "R1",
        play: RowTest::Now(|trial| Box::pin(no_writes(trial))),
    },
];

const REFUSAL_BOUND: Duration = Duration::from_secs(5);
const RECOVERY_BOUND: Duration = Duration::from_secs(10);

/// Waits until submissions are acknowledged again, and one of them is done.
async fn wait_until_normal(trial: &mut Trial, replicas: &Replicas, load: &SubmitLoad) {
    let had = load.acknowledged();
    let took = wait_until("submits go on", async || load.acknowledged() > had + 1).await;
    trial.within("recovery", RECOVERY_BOUND, took);
    assert_eq!(load.silent(), 0, "a refusal without Retry-After");
    let failed = failed_runs(replicas).await;
    assert!(
        failed.is_empty(),
        "M8: a run failed because of the database:\n{}\nserver 0:\n{}\nserver 1:\n{}",
        failed.join("\n"),
        replicas.log_tail(0),
        replicas.log_tail(1)
    );
}

/// Failed runs with the end of each job, and their events.
async fn failed_runs(replicas: &Replicas) -> Vec<String> {
    let jobs = "SELECT concat_ws(' ', r.name, r.status, r.termination_reason, j.submission_num, j.status, \
                j.termination_reason, j.termination_message) \
                FROM runs r LEFT JOIN jobs j ON j.run_id = r.id WHERE r.status = 'failed'";
    let events = "SELECT concat_ws(' ', e.recorded_at, e.message) FROM events e \
                  JOIN event_targets t ON t.event_id = e.id \
                  JOIN runs r ON r.id = t.target_id WHERE r.status = 'failed' ORDER BY e.seq";
    let mut lines = Vec::new();
    for query in [jobs, events] {
        lines.extend(replicas.postgres.run(query).await.unwrap().into_iter().flatten());
    }
    lines
}

async fn finish_and_check(trial: &mut Trial, mut replicas: Replicas, load: SubmitLoad) {
    let acknowledged = load.stop().await;
    replicas.wait_until_no_active_runs(TIMEOUT).await.unwrap();
    check_all_done(trial, &replicas, &acknowledged).await;
    for number in 0..2 {
        let log = replicas.log(number);
        assert!(!log.contains("panicked"), "server {number} panicked:\n{}", replicas.log_tail(number));
    }
    stop_and_check(trial, &mut replicas, 2).await;
}

async fn restarted(trial: &mut Trial) {
    let mut replicas = start_pair(trial, "f7").await;
    let load = SubmitLoad::start(replicas.addresses(), usize::MAX, small_task);
    for (how, what) in [(ShutdownMode::Fast, "fast restart"), (ShutdownMode::Immediate, "immediate restart")]
    {
        trial.pause(300, 2000).await;
        let had = load.refused();
        replicas.postgres.down(how).unwrap();
        trial.fired(what);
        let took = wait_until("a submit is refused", async || load.refused() > had).await;
        trial.within("503", REFUSAL_BOUND, took.max(load.slowest_refusal()));
        trial.pause(0, 3000).await;
        replicas.postgres.up().await.unwrap();
        wait_until_normal(trial, &replicas, &load).await;
    }
    finish_and_check(trial, replicas, load).await;
}

/// A socket in front of Postgres that loses commits, and responses to commits.
struct CommitCutter {
    lost_commits: AtomicU64,
    lost_answers: AtomicU64,
    /// Percentage of commits with a fault.
    percent: AtomicU64,
    rng: parking_lot::Mutex<Rng>,
}

#[derive(Clone, Copy)]
enum CommitFault {
    NoFault,
    LosesCommit,
    LosesAnswer,
}

impl CommitCutter {
    fn fault(&self) -> CommitFault {
        let mut rng = self.rng.lock();
        if !rng.chance(self.percent.load(Ordering::Relaxed)) {
            return CommitFault::NoFault;
        }
        if rng.chance(50) { CommitFault::LosesCommit } else { CommitFault::LosesAnswer }
    }

    async fn serve(self: Arc<Self>, listener: UnixListener, real: PathBuf) {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = UnixStream::connect(&real).await else { continue };
            tokio::spawn(Arc::clone(&self).proxy_connection(client, server));
        }
    }

    async fn proxy_connection(self: Arc<Self>, mut client: UnixStream, mut server: UnixStream) {
        let (mut requested, mut answered) = (vec![0; 65536], vec![0; 65536]);
        loop {
            tokio::select! {
                read = client.read(&mut requested) => {
                    let Ok(read @ 1..) = read else { return };
                    let is_commit = requested[..read].windows(7).any(|text| text == b"COMMIT\0");
                    let fault = if is_commit { self.fault() } else { CommitFault::NoFault };
                    if matches!(fault, CommitFault::LosesCommit) {
                        self.lost_commits.fetch_add(1, Ordering::Relaxed);
                        return;
                    }
                    if server.write_all(&requested[..read]).await.is_err() {
                        return;
                    }
                    if matches!(fault, CommitFault::LosesAnswer) {
                        // A response proves that the commit is done; the client does not receive it.
                        let _ = server.read(&mut answered).await;
                        self.lost_answers.fetch_add(1, Ordering::Relaxed);
                        return;
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
}

/// Restarts both servers with a proxy socket in `dir`.
async fn restart_behind_proxy(replicas: &mut Replicas, dir: &Path) {
    replicas.use_database(postgres::url(dir));
    for number in 0..2 {
        replicas.stop(number).await.unwrap();
        replicas.raise(number).await.unwrap();
    }
}

async fn cut_around_commits(trial: &mut Trial) {
    let mut replicas = start_pair(trial, "f8").await;
    let dir = trial.dir().join("front");
    std::fs::create_dir_all(&dir).unwrap();
    let listener = UnixListener::bind(dir.join(SOCKET)).unwrap();
    let cutter = Arc::new(CommitCutter {
        lost_commits: AtomicU64::new(0),
        lost_answers: AtomicU64::new(0),
        percent: AtomicU64::new(0),
        rng: parking_lot::Mutex::new(trial.rng.fork()),
    });
    tokio::spawn(Arc::clone(&cutter).serve(listener, replicas.postgres.sockets().join(SOCKET)));
    restart_behind_proxy(&mut replicas, &dir).await;
    let load = SubmitLoad::start(replicas.addresses(), usize::MAX, small_task);
    cutter.percent.store(5, Ordering::Relaxed);
    let (commits, answers) = (&cutter.lost_commits, &cutter.lost_answers);
    let enough = || commits.load(Ordering::Relaxed) >= 3 && answers.load(Ordering::Relaxed) >= 3;
    wait_until("commits are lost", async || enough() && load.acknowledged() > 20).await;
    cutter.percent.store(0, Ordering::Relaxed);
    trial.record_faults("commit request lost", commits.load(Ordering::Relaxed));
    trial.record_faults("commit response lost", answers.load(Ordering::Relaxed));
    wait_until_normal(trial, &replicas, &load).await;
    finish_and_check(trial, replicas, load).await;
}

async fn degraded_database(trial: &mut Trial) {
    let mut replicas = start_pair(trial, "f9").await;
    let dir = trial.dir().join("front");
    std::fs::create_dir_all(&dir).unwrap();
    let real = replicas.postgres.sockets().join(SOCKET);
    let proxy = FaultProxy::unix(&dir.join(SOCKET), &real, trial.seed).unwrap();
    restart_behind_proxy(&mut replicas, &dir).await;
    let load = SubmitLoad::start(replicas.addresses(), usize::MAX, small_task);
    trial.pause(300, 1000).await;

    // Half a second in each direction.
    proxy.set(ConnectionFaults { latency: Duration::from_millis(500), ..ConnectionFaults::default() });
    let slow = if trial.is_long { 60 } else { 20 };
    tokio::time::sleep(Duration::from_secs(slow)).await;
    proxy.set(ConnectionFaults::default());
    trial.record_faults("database responses delayed", proxy.counts().delayed.load(Ordering::Relaxed));
    for number in 0..2 {
        let lost = replicas.total(number, "lost").await.unwrap();
        assert_eq!(lost, 0, "L9: server {number} lost locks that nobody else wanted");
    }
    wait_until_normal(trial, &replicas, &load).await;
    crowded(trial, &replicas, &load).await;
    deadlocked(trial, &replicas, &load).await;
    finish_and_check(trial, replicas, load).await;
}

/// Another client opens all available connections.
async fn crowded(trial: &mut Trial, replicas: &Replicas, load: &SubmitLoad) {
    let watcher = replicas.postgres.session().await.unwrap();
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'windlass'";
    let mut crowd = Vec::new();
    let had = load.refused();
    let began = Instant::now();
    loop {
        while let Ok(session) = replicas.postgres.session().await {
            crowd.push(session);
        }
        let ended = watcher.query(end, &[]).await.unwrap().len();
        while let Ok(session) = replicas.postgres.session().await {
            crowd.push(session);
        }
        if ended == 0 {
            break;
        }
        assert!(began.elapsed() < TIMEOUT, "the servers do not let go");
    }
    wait_until("a submit is refused", async || load.refused() > had).await;
    trial.fired("no free connection");
    drop(crowd);
    wait_until_normal(trial, replicas, load).await;
}

/// Another client locks the same rows in another order, with a long deadlock timeout. The servers give up before
/// Postgres would detect the deadlock, so that each is observed while it lasts.
async fn deadlocked(trial: &mut Trial, replicas: &Replicas, load: &SubmitLoad) {
    let (other, watcher) =
        (replicas.postgres.session().await.unwrap(), replicas.postgres.session().await.unwrap());
    other.batch_execute("SET deadlock_timeout = '60s'").await.unwrap();
    let pid: i32 = other.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let cycle =
        "SELECT 1 FROM unnest(pg_blocking_pids($1)) AS holder WHERE $1 = ANY (pg_blocking_pids(holder))";
    let began = Instant::now();
    let mut seen = 0;
    while seen == 0 {
        let locks = "BEGIN; SELECT 1 FROM instances FOR UPDATE; SELECT pg_sleep(0.3); \
                     SELECT 1 FROM jobs WHERE NOT finished FOR UPDATE; COMMIT";
        let mut locking = std::pin::pin!(other.batch_execute(locks));
        let ended = loop {
            tokio::select! {
                ended = &mut locking => break ended,
                () = tokio::time::sleep(Duration::from_millis(5)) => {
                    seen += watcher.query(cycle, &[&pid]).await.unwrap().len();
                }
            }
        };
        // The client may become the victim as well.
        if ended.is_err() {
            other.batch_execute("ROLLBACK").await.unwrap();
        }
        assert!(began.elapsed() < TIMEOUT, "no deadlock comes about");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    trial.fired("deadlock");
    wait_until_normal(trial, replicas, load).await;
}

/// A small disk in memory.
struct MemoryDisk(PathBuf);

impl MemoryDisk {
    fn mount(at: &Path, megabytes: u32) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={megabytes}m");
        let made =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "windlass"]).arg(at).status().unwrap();
        assert!(made.success(), "mount a small disk");
        Self(at.to_owned())
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

async fn no_writes(trial: &mut Trial) {
    full(trial).await;
    read_only(trial).await;
}

const APPLY: &str = "/api/project/main/runs/apply";
const LIST: &str = "/api/runs/list";

async fn full(trial: &mut Trial) {
    let data = trial.dir().join("small");
    // Declared before the server, so that the server is dropped first.
    let disk = MemoryDisk::mount(&data, 48);
    let options = ServerOptions {
        binary: &binary_path("windlass").unwrap(),
        data: &data,
        database: None,
        core: None,
        local: false,
        env: Vec::new(),
        log: Some(&trial.dir().join("server.log")),
    };
    let server = Server::start(&options).await.unwrap();
    let submit =
        async |name: &str| call_api(server.address(), APPLY, &submission(&small_task(name))).await.unwrap();
    assert_eq!(submit("before").await.status, 200);
    let filler = disk.0.join("filler");
    let block = vec![0_u8; 1 << 16];
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &block).is_ok() {}
    while std::io::Write::write_all(&mut file, b"0").is_ok() {}
    let (mut acknowledged, mut refused) = (vec!["before".to_owned()], 0);
    for number in 0..200 {
        let name = format!("full-{number}");
        let answer = submit(&name).await;
        match answer.status {
            200 => acknowledged.push(name),
            503 | 507 => refused += 1,
            other => panic!("{other}: {answer:?}"),
        }
        if refused >= 5 {
            break;
        }
    }
    assert!(refused >= 5, "the disk is not full");
    trial.record_faults("write refused by a full disk", refused);
    let read = call_api(server.address(), LIST, &json!({"project_name": "main", "limit": 1})).await.unwrap();
    assert_eq!(read.status, 200, "reads work: {read:?}");
    // The space is free only after the file is closed.
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let took = wait_until("writes work", async || submit("after").await.status == 200).await;
    trial.within("writes after space was freed", RECOVERY_BOUND, took);
    for name in acknowledged {
        let run = call_api(server.address(), "/api/project/main/runs/get", &json!({"run_name": name}))
            .await
            .unwrap();
        assert_eq!(run.status, 200, "R1: {name} was acknowledged");
    }
    drop(server);
}

/// Simulates a fail-over: the connected database no longer accepts writes.
async fn read_only(trial: &mut Trial) {
    let replicas = start_pair(trial, "f10").await;
    let load = SubmitLoad::start(replicas.addresses(), usize::MAX, small_task);
    trial.pause(300, 1000).await;
    let had = load.refused();
    replicas.postgres.admin("ALTER DATABASE windlass SET default_transaction_read_only = on").await.unwrap();
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'windlass'";
    replicas.postgres.run(end).await.unwrap();
    wait_until("a submit is refused", async || load.refused() > had + 3).await;
    trial.record_faults("write refused by a read-only database", load.refused() - had);
    let read = replicas.request(0, LIST, &json!({"project_name": "main", "limit": 1})).await.unwrap();
    assert_eq!(read.status, 200, "reads work: {read:?}");
    replicas.postgres.admin("ALTER DATABASE windlass RESET default_transaction_read_only").await.unwrap();
    wait_until_normal(trial, &replicas, &load).await;
    finish_and_check(trial, replicas, load).await;
}
