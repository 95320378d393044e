//! Schedulers below the queue: a real Slurm with faulty commands and a controller that restarts.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::json;
use windlass_sim::invariants::containers::find_violations;
use windlass_testkit::slurm::{NodeSize, SlurmCluster};

use super::{POLL_INTERVAL, wait_until};
use crate::{FaultRow, RowTest, Trial};
use windlass_testenv::queue_env::{QueueEnv, RequestedContainer};

pub(super) const ROWS: &[FaultRow] = &[FaultRow {
    id: "F26",
    injection: "Slurm: responses of sbatch lost; squeue empty; scancel ignored; slurmctld restarted; jobs purged",
    expected: "jobs found by name, never submitted twice; cancelled until gone",
    bound: "cancelled ≤ 30 s after scancel works again, all ended ≤ 120 s",
    proves: "C4 C6 C12 R13",
    play: RowTest::Now(|trial| Box::pin(faulty_scheduler(trial))),
}];

const SIZE: NodeSize = NodeSize { cpus: 4, memory_mib: 4000, gpus: 0, gpu_type: None };
const CONTAINERS: usize = 12;
const CANCELLED_CONTAINERS: usize = 3;
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// Replacements of Slurm's commands, controlled by files next to them.
struct FaultyCommands {
    dir: PathBuf,
}

impl FaultyCommands {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).unwrap();
        let at = dir.display();
        let scripts = [
            // Every second response is lost, after the job was accepted.
            (
                "sbatch",
                format!(
                    "for word; do case $word in --job-name=*) echo \"${{word#*=}}\" >> {at}/submitted;; esac; done\n\
                     said=$(/usr/bin/sbatch \"$@\") || exit\n\
                     echo x >> {at}/asked\n\
                     if [ $(($(wc -l < {at}/asked) % 2)) = 0 ]; then\n\
                       echo x >> {at}/lost; echo 'sbatch: error: Socket timed out' >&2; exit 1\n\
                     fi\n\
                     echo \"$said\""
                ),
            ),
            (
                "squeue",
                format!(
                    "if [ -e {at}/empty ]; then echo x >> {at}/emptied; exit 0; fi\nexec /usr/bin/squeue \"$@\""
                ),
            ),
            (
                "scancel",
                format!(
                    "if [ -e {at}/deaf ]; then echo x >> {at}/ignored; exit 0; fi\nexec /usr/bin/scancel \"$@\""
                ),
            ),
        ];
        for (name, script) in scripts {
            fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { dir }
    }

    fn read_lines(&self, name: &str) -> Vec<String> {
        lines(&self.dir.join(name))
    }

    fn count(&self, name: &str) -> u64 {
        self.read_lines(name).len() as u64
    }

    /// Enables a fault for a while, at least until a command has been called.
    async fn inject_fault(&self, how: &str, reported: &str, at_least: Duration) {
        fs::write(self.dir.join(how), "").unwrap();
        let since = Instant::now();
        while self.count(reported) == 0 || since.elapsed() < at_least {
            assert!(since.elapsed() < END_TIMEOUT, "nobody asked while `{how}`");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        fs::remove_file(self.dir.join(how)).unwrap();
    }
}

fn lines(file: &Path) -> Vec<String> {
    fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

async fn faulty_scheduler(trial: &mut Trial) {
    let mut cluster = SlurmCluster::start(&[SIZE; 2]);
    let mut ground = QueueEnv::start(&format!("f26-{}", trial.seed)).await;
    let liars = FaultyCommands::new(trial.dir().join("liars"));
    let path = std::env::var("PATH").unwrap();
    ground.env.push(("PATH", format!("{}:{path}", liars.dir.display())));
    let token = ground.token("token").await;
    ground.start_slurm_dispatcher(&token, &cluster.config(), &["--lost-after", "15"]);
    let (starts, gate) = (ground.shared("starts"), ground.dir.join("gate"));
    let mut all: Vec<RequestedContainer> = Vec::new();
    for number in 0..CONTAINERS {
        let script = format!(
            "echo {number} >> {}; n=0; until [ -e {} ] || [ $n -ge 1500 ]; do n=$((n+1)); sleep 0.2; done",
            starts.display(),
            gate.display()
        );
        all.push(ground.request(&["sh", "-c", &script], json!({})).await);
    }
    // More jobs than the cluster can run at once: some wait there.
    wait_until("as many run as fit", async || lines(&starts).len() >= 8).await;
    let lasts = trial.rng.millis(1_000, 4_000);
    liars.inject_fault("empty", "emptied", lasts).await;

    for requested in &all[..CANCELLED_CONTAINERS] {
        ground.weigh(requested, 0).await;
    }
    let lasts = trial.rng.millis(500, 2_000);
    liars.inject_fault("deaf", "ignored", lasts).await;
    let began = Instant::now();
    for requested in &all[..CANCELLED_CONTAINERS] {
        let record = ground.ended(&requested.container).await;
        assert_eq!(record["state"], "Cancelled", "{record}");
    }
    trial.within("cancelled", CANCEL_TIMEOUT, began.elapsed());

    // The next controller forgets jobs soon after their end.
    let config = fs::read_to_string(cluster.config()).unwrap();
    fs::write(cluster.config(), config.replace("MinJobAge=60", "MinJobAge=2")).unwrap();
    cluster.stop_controller();
    trial.fired("controller restarted");
    trial.pause(0, 3_000).await;
    cluster.start_controller();

    let began = Instant::now();
    fs::write(&gate, "").unwrap();
    for requested in &all[CANCELLED_CONTAINERS..] {
        let record = ground.ended(&requested.container).await;
        assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    }
    trial.within("all ended", END_TIMEOUT, began.elapsed());
    wait_until("they are forgotten", async || cluster.say("squeue", &["-h", "-t", "all"]).is_empty()).await;
    trial.fired("jobs purged");
    for (what, file) in
        [("sbatch responses lost", "lost"), ("squeue empty", "emptied"), ("scancel ignored", "ignored")]
    {
        trial.record_faults(what, liars.count(file));
    }
    check_no_duplicates(trial, "C6: submitted", &liars.read_lines("submitted"));
    check_no_duplicates(trial, "R13: started", &lines(&starts));
    for wrong in find_violations(&ground.history().await, &ground.containers().await) {
        trial.violation(&wrong);
    }
    // Dispatchers stop first, so that they submit no more.
    ground.kill_dispatchers();
    drop(cluster);
}

fn check_no_duplicates(trial: &mut Trial, what: &str, all: &[String]) {
    let mut seen = BTreeSet::new();
    for one in all.iter().filter(|one| !seen.insert(*one)) {
        trial.violation(&format!("{what} twice: {one}"));
    }
}
