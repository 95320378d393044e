//! A cloud with errors, refusals, lost machines and preemptions.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{POLL_INTERVAL, TIMEOUT, wait_until};
use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::test_env::{self, HostMode, TestEnv, task_config};

pub(super) const ROWS: &[FaultRow] = &[FaultRow {
    id: "F27",
    injection: "stub cloud: 10 % create and delete errors, quota, rate limit, no capacity by type, instances that \
                are not visible yet, 503 midway, instances that die",
    expected: "200 jobs done, each by one submission at a time, 0 instances left, every fault counter > 0",
    bound: "progress every 5 s while jobs wait, except for those that wait for a retry",
    proves: "R2 R7 G7 C11",
    play: RowTest::OutsideCi("takes several minutes", |trial| Box::pin(bad_cloud(trial))),
}];

const JOBS: usize = 200;
/// With fewer remaining jobs, all of them may wait for the delay of their retry.
const REMAINING_MIN: usize = 20;
const MACHINES: usize = 6;
const PROGRESS_BOUND: Duration = Duration::from_secs(5);
const DONE_BOUND: Duration = Duration::from_secs(280);
/// Counters of the cloud, with their names in the table.
const FAULT_COUNTERS: &[(&str, &str)] = &[
    ("create error", "creation failed"),
    ("delete error", "deletion failed"),
    ("throttled", "too many requests"),
    ("half way", "503 midway"),
    ("stale", "not visible yet"),
    ("quota", "quota exceeded"),
    ("no capacity small east on-demand", "no capacity"),
];

/// State directory of the cloud.
struct CloudState(PathBuf);

impl CloudState {
    fn names(&self, of: &str, end: &str) -> Vec<String> {
        let found = fs::read_dir(self.0.join(of)).into_iter().flatten().flatten();
        let names = found.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| name.strip_suffix(end).map(str::to_owned)).collect()
    }

    fn machines(&self) -> Vec<String> {
        self.names("machines", ".json")
    }

    fn count(&self, what: &str) -> u64 {
        let text = fs::read_to_string(self.0.join("counts").join(format!("{what}.json")));
        text.ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// A failed row leaves no machine behind.
impl Drop for CloudState {
    fn drop(&mut self) {
        test_env::kill_processes_of(&self.0);
    }
}

fn script(seed: u64) -> String {
    let kind = |region: &str, price: f64, more: &str| {
        format!(
            "- {{instance_type: small, region: {region}, price: {price}, cpus: 2, memory_gb: 4, disk_gb: 100, boot_ms: 300{more}}}\n"
        )
    };
    format!(
        "runtime: process\nfaults: {{seed: {seed}, create_error: 10, delete_error: 10, throttled: 5, half_way: 20, \
         stale: 10, quota: {MACHINES}}}\noffers:\n{}{}",
        kind("east", 0.1, ", no_capacity: 5"),
        kind("west", 0.2, "")
    )
}

async fn bad_cloud(trial: &mut Trial) {
    let dir = trial.dir().join("cloud.yml");
    fs::write(&dir, script(trial.seed)).unwrap();
    let cloud_state = CloudState(trial.dir().join("cloud.yml.d"));
    let mut env = trial.env(HostMode::None).with_env("WINDLASS_MOCK_CLOUD", dir);
    env.start().await;
    let fleet = json!({"type": "fleet", "name": "cloud", "backends": ["mock"], "idle_duration": "2s",
        "nodes": {"min": 0, "target": 0, "max": MACHINES + 1}});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    env.project("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await;

    let written = trial.dir().join("done");
    let line = format!("sleep 0.3; echo $DSTACK_RUN_NAME >> {}", written.display());
    for number in 0..JOBS {
        let mut job = task_config(&format!("job-{number}"), &[&line]);
        job["resources"] = json!({"cpu": "1..", "memory": "0.1GB..", "disk": "1GB.."});
        job["retry"] = json!({"on_events": ["no-capacity", "interruption", "error"], "duration": "1h"});
        env.apply(&job).await;
    }
    let dead = preempt_until_done(trial, &cloud_state, &written).await;
    trial.record_faults("instance died", dead);
    assert_all_done(&mut env, &written).await;
    env.project("fleets/delete", &json!({"names": ["cloud"]})).await;
    wait_until("G7: the cloud is empty", async || cloud_state.machines().is_empty()).await;
    for (name, called) in FAULT_COUNTERS {
        let times = cloud_state.count(name);
        assert!(times > 0, "it never happened: {called}");
        trial.record_faults(called, times);
    }
    trial.evaluate(&mut env, &[]).await;
}

fn read_lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Preempts machines until the jobs have ended, and compares the longest time without progress with the bound. Returns
/// the number of preempted machines.
async fn preempt_until_done(trial: &mut Trial, cloud_state: &CloudState, written: &Path) -> u64 {
    let (began, mut last, mut seen) = (Instant::now(), Instant::now(), (0, 0, Vec::new()));
    let (mut silence, mut dead, mut next) = (Duration::ZERO, 0, Instant::now() + Duration::from_secs(3));
    loop {
        let names: std::collections::BTreeSet<String> = read_lines(written).into_iter().collect();
        let faults = FAULT_COUNTERS.iter().map(|(name, _)| cloud_state.count(name)).sum::<u64>();
        let now = (names.len(), faults, cloud_state.machines());
        if now != seen {
            (last, seen) = (Instant::now(), now);
        } else if names.len() + REMAINING_MIN < JOBS {
            silence = silence.max(last.elapsed());
        }
        if names.len() == JOBS {
            trial.within("time without progress", PROGRESS_BOUND, silence);
            return dead;
        }
        assert!(began.elapsed() < DONE_BOUND, "{} of {JOBS} are done", names.len());
        if Instant::now() >= next && !seen.2.is_empty() && names.len() + REMAINING_MIN < JOBS {
            let machine = trial.rng.pick(&seen.2).clone();
            test_env::preempt_machine(&cloud_state.0, &machine).unwrap();
            dead += 1;
            next = Instant::now() + trial.rng.millis(700, 2_000);
        }
        tokio::time::sleep(POLL_INTERVAL * 10).await;
    }
}

async fn assert_all_done(env: &mut TestEnv, written: &Path) {
    let times = read_lines(written);
    for number in 0..JOBS {
        let name = format!("job-{number}");
        let run = env.wait_for_status_within(&name, &["done"], TIMEOUT).await;
        let submissions = run["jobs"][0]["job_submissions"].as_array().unwrap().clone();
        let done = submissions.iter().filter(|one| one["status"] == "done").count();
        assert_eq!(done, 1, "R2: {name} was done {done} times: {run:#}");
        // A machine may die between the last action of a program and its report: then the program runs again, and a
        // submission records it.
        let again = submissions.iter().filter(|one: &&Value| one["status"] != "done").count();
        let message = times.iter().filter(|line| **line == name).count();
        assert!((1..=1 + again).contains(&message), "R7: {name} ran {message} times in {} tries", again + 1);
    }
}
