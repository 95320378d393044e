//! Managed jobs with real programs on machines that a cloud preempts.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{JobsClient, JobsPlan, POLL_INTERVAL, TIMEOUT};
use crate::{open_loop::ConnectionPool, results::BenchResults, runs::Binaries};
use windlass_testenv::{
    server::{Server, ServerOptions},
    test_env,
};

/// Two regions, because a job leaves the region in which it was preempted.
const CLOUD_SCRIPT: &str = "runtime: process\noffers:\n\
    - {instance_type: small, region: east, price: 0.1, spot: true, cpus: 2, memory_gb: 4, disk_gb: 100}\n\
    - {instance_type: small, region: west, price: 0.2, spot: true, cpus: 2, memory_gb: 4, disk_gb: 100}\n";
const MACHINES: usize = 8;

struct PreemptingCloud {
    jobs: JobsClient,
    home: PathBuf,
    /// Directory of the mock cloud's state and machines.
    cloud_state: PathBuf,
}

pub(super) async fn run(
    binaries: &Binaries<'_>,
    home: &Path,
    plan: &JobsPlan,
    sheet: &mut BenchResults,
) -> Result<()> {
    let (data, script) = (home.join("server"), home.join("cloud.yml"));
    std::fs::create_dir_all(&data)?;
    std::fs::write(&script, CLOUD_SCRIPT)?;
    let log = home.join("server.log");
    let options = ServerOptions {
        env: vec![("WINDLASS_AGENT", binaries.agent.to_owned()), ("WINDLASS_MOCK_CLOUD", script)],
        log: Some(&log),
        ..binaries.server(&data)
    };
    let server = Server::start(&options).await?;
    let jobs = JobsClient { pool: ConnectionPool::new(server.address()) };
    let fleet = json!({"type": "fleet", "name": "cloud", "backends": ["mock"], "spot_policy": "spot",
        "nodes": {"min": 0, "target": 0, "max": MACHINES}});
    let spec = json!({"configuration": fleet, "profile": {"name": "default"}});
    jobs.call("fleets/apply", &json!({"plan": {"spec": spec}, "force": false})).await?;
    let cloud = PreemptingCloud { jobs, home: home.to_owned(), cloud_state: home.join("cloud.yml.d") };
    sheet.say("processes on instances of a mock cloud, SQLite")?;
    sheet.about("cloud");
    let measured = async {
        cloud.ends(plan, sheet).await?;
        cloud.measure_losses(plan, sheet).await
    };
    let measured = measured.await;
    // Its machines outlive the server, as in a real cloud.
    drop(server);
    test_env::kill_processes_of(home);
    sheet.about("");
    measured
}

impl PreemptingCloud {
    fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.home.join(name);
        if path.exists() {
            std::fs::remove_file(&path)?;
        }
        Ok(path)
    }

    /// Waits for a file that a program creates.
    async fn wait_for_file(&self, path: &Path) -> Result<()> {
        let began = Instant::now();
        while !path.exists() {
            ensure!(began.elapsed() < TIMEOUT, "{} was not created in time", path.display());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Measures the time from the last action of a program to SUCCEEDED, and from the launch to RUNNING.
    async fn ends(&self, plan: &JobsPlan, sheet: &mut BenchResults) -> Result<()> {
        let (mut running, mut noticed) = (Vec::new(), Vec::new());
        for time in 0..=plan.times {
            let (begun, go, end) = (self.file("begun")?, self.file("go")?, self.file("end")?);
            let text = format!(
                "resources: {{use_spot: true}}\nrun: |\n  touch {}\n  until [ -e {} ]; do sleep 0.01; done\n  touch {}\n",
                begun.display(),
                go.display(),
                end.display()
            );
            let start = Instant::now();
            let id = *self.jobs.launch("end", &text, 1).await?.first().context("no job")?;
            self.jobs.wait_until(id, "running", |job| job.status == "RUNNING").await?;
            let ran = start.elapsed();
            self.wait_for_file(&begun).await?;
            std::fs::write(&go, "")?;
            self.jobs.wait_until(id, "succeeded", |job| job.status == "SUCCEEDED").await?;
            // By the modification time of the program's last file.
            let after = std::fs::metadata(&end)?.modified()?.elapsed()?;
            // The first one had to wait for its machine.
            if time > 0 {
                running.push(ran);
                noticed.push(after);
            }
        }
        sheet.times("running", "launch to RUNNING, on an existing instance", &mut running)?;
        sheet.spread("end", "end of the program to SUCCEEDED", &mut noticed)
    }

    /// Measures the time from the loss of a machine to RECOVERING, and to RUNNING on another.
    async fn measure_losses(&self, plan: &JobsPlan, sheet: &mut BenchResults) -> Result<()> {
        let (mut noticed, mut again) = (Vec::new(), Vec::new());
        for _ in 0..plan.times {
            let begun = self.file("begun")?;
            let text =
                format!("resources: {{use_spot: true}}\nrun: |\n  touch {}\n  sleep 3600\n", begun.display());
            let id = *self.jobs.launch("loss", &text, 1).await?.first().context("no job")?;
            let job = self.jobs.wait_until(id, "running", |job| job.status == "RUNNING").await?;
            self.wait_for_file(&begun).await?;
            let run = job.tasks.first().and_then(|task| task.runs.last()).context("no run")?;
            let instance = self.instance(run).await?;
            let lost = Instant::now();
            test_env::preempt_machine(&self.cloud_state, &instance)?;
            let is_noticed = |job: &windlass_api::managed_jobs::ManagedJob| {
                job.status != "RUNNING" || job.recovery_count > 0
            };
            self.jobs.wait_until(id, "noticed", is_noticed).await?;
            noticed.push(lost.elapsed());
            self.jobs
                .wait_until(id, "running again", |job| job.status == "RUNNING" && job.recovery_count > 0)
                .await?;
            again.push(lost.elapsed());
            self.jobs.cancel("loss").await?;
            self.jobs.wait_until_none("loss", &[], TIMEOUT).await?;
        }
        sheet.figure("loss_mean_ms", "instance lost to detected, mean", mean_ms(&noticed), "ms")?;
        sheet.spread("loss", "– spread", &mut noticed)?;
        sheet.figure("again_mean_ms", "instance lost to RUNNING again, mean", mean_ms(&again), "ms")?;
        sheet.spread("again", "– spread", &mut again)
    }

    /// ID of a run's instance.
    async fn instance(&self, run: &str) -> Result<String> {
        let run = self.jobs.call("runs/get", &json!({"run_name": run})).await?;
        let submission =
            run["jobs"][0]["job_submissions"].as_array().and_then(|all| all.last()).context("no job")?;
        let name = &submission["job_provisioning_data"]["instance_id"];
        let fleet = self.jobs.call("fleets/get", &json!({"name": "cloud"})).await?;
        let instances = fleet["instances"].as_array().context("no instances")?;
        let found = instances.iter().find(|one| one["name"] == *name).context("no such instance")?;
        Ok(found["id"].as_str().context("no id")?.to_owned())
    }
}

fn mean_ms(taken: &[Duration]) -> f64 {
    taken.iter().sum::<Duration>().as_secs_f64() * 1e3 / taken.len().max(1) as f64
}
