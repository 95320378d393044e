//! Clocks that are changed.
//!
//! These rows change the database's clock, which determines all locks and times. Clocks of servers are irrelevant by
//! rule (L5); `db/src/clock.rs` tests SQLite's clock against jumps of the wall clock.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;

use super::{servers::check_all_done, submit_load::SubmitLoad};
use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::{
    replicas::{ReplicaOptions, Replicas},
    test_hosts::{HostRuntime, empty_job},
};
use windlass_testkit::postgres::Postgres;

pub(super) const ROWS: &[FaultRow] = &[FaultRow {
    id: "F19",
    injection: "the database's clock jumps 10 min forward, 10 min back and to the correct time, under load",
    expected: "no run lost, started twice or ended early",
    bound: "progress ≤ 30 s after each jump",
    proves: "L5 R11 R18",
    play: RowTest::Now(|trial| Box::pin(jumped(trial))),
}];

const PROGRESS_BOUND: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(120);

/// A clock that can be set, for programs that are started with it.
struct FakeClock {
    library: PathBuf,
    file: PathBuf,
}

impl FakeClock {
    /// Compiled by the compiler that links everything else here.
    fn new(dir: &Path) -> Self {
        let (source, library, file) = (dir.join("clock.c"), dir.join("clock.so"), dir.join("clock"));
        std::fs::write(&source, include_str!("clock.c")).unwrap();
        std::fs::write(&file, 0_i64.to_ne_bytes()).unwrap();
        let made =
            Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).output();
        let made = made.expect("a C compiler is missing: `apt-get install gcc`");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self { library, file }
    }

    fn environment(&self) -> Vec<(String, String)> {
        let pairs = [("LD_PRELOAD", &self.library), ("WINDLASS_TEST_CLOCK", &self.file)];
        pairs.map(|(name, path)| (name.to_owned(), path.display().to_string())).to_vec()
    }

    /// Writes in place: the file is mapped, and must never be empty.
    fn set(&self, ahead: i64) {
        let file = std::fs::File::options().write(true).open(&self.file).unwrap();
        file.write_all_at(&ahead.to_ne_bytes(), 0).unwrap();
    }
}

/// Offset of the database's clock from the local one, in seconds.
#[expect(clippy::disallowed_methods, reason = "this is what the database's clock is held against")]
async fn database_clock_offset(postgres: &Postgres) -> i64 {
    let theirs = postgres.count("SELECT floor(extract(epoch FROM clock_timestamp()))::BIGINT").await.unwrap();
    let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    theirs - i64::try_from(ours).unwrap()
}

fn short_job(name: &str) -> Value {
    let mut job = empty_job(name);
    job["env"]["SIMULATED_RUN_MS"] = "300".into();
    job
}

async fn jumped(trial: &mut Trial) {
    let clock = FakeClock::new(trial.dir());
    let name = format!("f19-{}", trial.seed);
    let postgres = Postgres::start_with(&format!("pg-{name}"), &[], clock.environment()).await.unwrap();
    let plan =
        ReplicaOptions { name: &name, servers: 2, hosts: 2, blocks: 8, runtime: HostRuntime::Simulated };
    let mut replicas = Replicas::start_on(postgres, plan).await.unwrap();
    // A job that runs throughout.
    let mut long = empty_job("long");
    long["env"]["SIMULATED_RUN_MS"] = "3600000".into();
    replicas.apply(0, &long).await.unwrap();
    replicas.reaches(0, "long", &["running"]).await.unwrap();
    let load = SubmitLoad::start(replicas.addresses(), usize::MAX, short_job);
    let jumps = [(600, "set forward"), (-600, "set back"), (0, "set to the correct time")];
    for (seconds, what) in jumps {
        trial.pause(500, 2000).await;
        clock.set(seconds);
        let seen = database_clock_offset(&replicas.postgres).await;
        assert!((seen - seconds).abs() < 5, "the database is {seen} s ahead, wanted are {seconds}");
        trial.fired(what);
        let (had, began) = (count_done_runs(&replicas).await, Instant::now());
        while count_done_runs(&replicas).await < had + 3 {
            assert!(
                began.elapsed() < TIMEOUT,
                "nothing goes on after it was {what}\n{}",
                replicas.log_tail(0)
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        trial.within("progress", PROGRESS_BOUND, began.elapsed());
    }
    let acknowledged = load.stop().await;
    let long = replicas.run(1, "long").await.unwrap();
    assert_eq!(long["status"], "running", "it was ended early: {long:#}");
    let stop = serde_json::json!({"runs_names": ["long"], "abort": true});
    replicas.post(1, "/api/project/main/runs/stop", &stop).await.unwrap();
    replicas.wait_until_no_active_runs(TIMEOUT).await.unwrap();
    check_all_done(trial, &replicas, &acknowledged).await;
    super::servers::stop_and_check(trial, &mut replicas, 0).await;
}

async fn count_done_runs(replicas: &Replicas) -> i64 {
    replicas.postgres.count("SELECT count(*) FROM runs WHERE status = 'done'").await.unwrap()
}
