//! Schedules on virtual time: the real pipelines, without real waits.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;
use windlass_model::id::RunId;

use super::{EPOCH_US, FaultBias, RunSim, Tenancy, virtual_time_runtime};

const MINUTE_US: i64 = 60_000_000;

fn minutely() -> Value {
    json!({
        "run_name": "minutely", "repo_id": "none", "repo_data": {"repo_type": "virtual"},
        "configuration": {
            "type": "task", "name": "minutely", "image": "sim:pull-0", "user": "root", "commands": ["work"],
            "env": {"SIM_RUN_MS": "1000", "SIM_FAILS": "0", "SIM_LOG_RATE": "0"},
            "schedule": {"cron": ["* * * * *"]},
            "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 1.0}, "disk": null},
        },
        "profile": {"name": "default"}, "ssh_key_pub": "ssh-ed25519 AAAA sim",
    })
}

/// Returns the status of a run, and those of its submissions, each with the minute in which it was created.
async fn observe_run(sim: &mut RunSim, run: RunId) -> (String, Vec<(i64, String)>) {
    sim.read().await.unwrap();
    let status = sim.history.runs.iter().find(|row| row.id == run.0).unwrap().status.clone();
    let jobs = sim.history.jobs.iter().filter(|job| job.run_id == run.0);
    let minute = |at: i64| (at - EPOCH_US).div_euclid(MINUTE_US);
    let mut jobs: Vec<_> = jobs.map(|job| (minute(job.submitted_at), job.status.clone())).collect();
    jobs.sort();
    (status, jobs)
}

#[test]
fn a_minutely_schedule_starts_one_execution_per_minute() {
    let played = async {
        let mut sim = RunSim::begin(1, FaultBias::Mixed, Tenancy::Single).unwrap();
        sim.prepare().await.unwrap();
        for replica in &mut sim.replicas {
            replica.start();
        }
        sleep(Duration::from_secs(20)).await;
        let run = sim.workload.submit_as(&sim.db, "minutely", &minutely()).await.unwrap();
        sleep(Duration::from_secs(35)).await;
        assert_eq!(observe_run(&mut sim, run).await, ("pending".to_owned(), vec![]), "before the first slot");
        sleep(Duration::from_secs(60)).await;
        let once = (1, "done".to_owned());
        assert_eq!(
            observe_run(&mut sim, run).await,
            ("pending".to_owned(), vec![once.clone()]),
            "between the slots"
        );
        sleep(Duration::from_secs(60)).await;
        let twice = vec![once, (2, "done".to_owned())];
        assert_eq!(
            observe_run(&mut sim, run).await,
            ("pending".to_owned(), twice.clone()),
            "after the second slot"
        );
        sim.workload.stop_schedules(&sim.db).await.unwrap();
        sleep(Duration::from_secs(300)).await;
        assert_eq!(observe_run(&mut sim, run).await, ("terminated".to_owned(), twice), "stopped");
    };
    virtual_time_runtime().unwrap().block_on(played);
}
