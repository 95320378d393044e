//! Managed jobs of every shape: launched from files, cancelled, and their runs stopped.
//!
//! Every request of a job can be satisfied after the faults have stopped, or has a time limit. Every job must therefore
//! end by itself, and none is helped out of a wait.

use std::fmt::Write as _;

use anyhow::{Result, anyhow};
use windlass_model::{
    id::RunId,
    managed_job::plan::ManagedJobPlan,
    skypilot::{self, CommandLineValues},
    time::Span,
};
use windlass_server::{
    db::{
        Db, Unit, invariant_queries,
        managed_jobs::{self as rows, Query},
    },
    services::managed_jobs::NewJobs,
};

use super::Workload;
use crate::{cloud, rng::Rng};

/// Maximum number of managed jobs of one seed.
pub(super) const MANAGED_JOBS_MAX: u64 = 5;

/// Limit of the launches of projects that import the hosts, in seconds.
const IMPORTER_LAUNCH_WAIT_SECS: i64 = 900;

impl Workload {
    /// Performs one user action on managed jobs, and returns the pipelines to wake.
    pub(super) async fn act_on_managed(&mut self, rng: &mut Rng, db: &Db) -> Result<&'static [&'static str]> {
        let received: &[&'static str] = match rng.between(1, 10) {
            _ if self.managed.is_empty() => {
                self.launch(rng, db).await?;
                &["managed_jobs"]
            }
            1..=6 if self.managed.len() < self.managed_max => {
                self.launch(rng, db).await?;
                &["managed_jobs"]
            }
            7 => {
                self.cancel(rng, db).await?;
                &["managed_jobs"]
            }
            8 => {
                self.stop_attempt_run(rng, db).await?;
                &["runs"]
            }
            _ => &[],
        };
        Ok(received)
    }

    async fn launch(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let name = format!("managed-{}", self.managed.len());
        let (project, user) = self.submitter(rng);
        let mut plan = self.plan(rng)?;
        if project != self.project {
            // It has no fleets but those that it imports, and hosts that failed are not replaced.
            for task in &mut plan.tasks {
                task.recovery.max_launch_wait.get_or_insert(IMPORTER_LAUNCH_WAIT_SECS);
            }
        }
        plan.name = Some(name.clone());
        plan.priority = *rng.pick(&[0, 0, 5, -5]);
        let room = (self.managed_max - self.managed.len()) as u64;
        let copies = if rng.chance(15) { rng.between(1, room) } else { 1 };
        let made = NewJobs {
            db,
            keys: &self.keys,
            project,
            user,
            name: &name,
            plan: &plan,
            files: "{}".to_owned(),
            secrets: &[],
            copies: u32::try_from(copies)?,
            key: None,
        };
        let (ids, unit) = made.unit()?;
        let (_, answers) = db.write(unit).await?.done()?;
        let last = answers.first().and_then(|rows| rows.first()).map_or(Ok(0), |row| row.int(0))?;
        self.managed.extend((last + 1 - i64::try_from(ids.len())?)..=last);
        Ok(())
    }

    async fn cancel(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        let number = *rng.pick(&self.managed);
        let query = Query { project: Some(self.project), numbers: Some(vec![number]), ..Query::default() };
        let graceful =
            rng.chance(30).then(|| Span::secs(i64::try_from(rng.between(0, 60)).unwrap_or_default()));
        db.write(Unit::new().and([rows::request_cancel(&query, self.user, graceful)])).await?;
        Ok(())
    }

    /// Stops the run of an attempt directly, which cancels its task.
    async fn stop_attempt_run(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let rows = db.query(invariant_queries::ATTEMPTS, Vec::new()).await?;
        let runs = rows.iter().map(|row| Ok(RunId(row.uuid(0)?))).collect::<Result<Vec<_>>>()?;
        if !runs.is_empty() {
            let run = *rng.pick(&runs);
            self.stop(db, run, rng.chance(30)).await?;
        }
        Ok(())
    }

    fn plan(&self, rng: &mut Rng) -> Result<ManagedJobPlan> {
        let text = self.file(rng);
        let reported = |problems: Vec<windlass_model::config::error::Diagnosis>| {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            anyhow!("{}\n{text}", problems.join("; "))
        };
        let parsed = skypilot::parse_task_file(&text, &CommandLineValues::default()).map_err(reported)?;
        Ok(parsed.into_launchable().map_err(reported)?.plan)
    }

    /// Generates a task file.
    fn file(&self, rng: &mut Rng) -> String {
        match rng.between(1, 10) {
            1..=5 => self.task(rng, "alone", ""),
            6 | 7 => {
                let tasks: Vec<String> =
                    (0..rng.between(2, 3)).map(|n| self.task(rng, &format!("step-{n}"), "")).collect();
                format!("name: chain\n---\n{}", tasks.join("---\n"))
            }
            8 | 9 => {
                let delay = *rng.pick(&["0s", "20s", "2m"]);
                let primary = *rng.pick(&["[]", "[left]", "[left]"]);
                format!(
                    "name: group\nexecution: parallel\nprimary_tasks: {primary}\ntermination_delay: {delay}\n---\n{}---\n{}",
                    self.task(rng, "left", ""),
                    self.task(rng, "right", "")
                )
            }
            _ => {
                let (first, second) = (self.task(rng, "first", ""), self.task(rng, "second", ""));
                format!(
                    "{first}---\n{second}---\n{}",
                    self.task(rng, "last", "depends_on: [first, second]\n")
                )
            }
        }
    }

    fn task(&self, rng: &mut Rng, name: &str, more: &str) -> String {
        let mut text = format!("name: {name}\n{more}");
        // A task without a program ends without any node.
        if !rng.chance(4) {
            text.push_str("run: work\n");
        }
        // Several nodes need whole machines.
        let whole = self.hosts.iter().filter(|host| host.blocks == 1).count();
        if whole >= 2 && rng.chance(25) {
            text.push_str("num_nodes: 2\n");
        }
        let run_ms = rng.between(0, 240_000);
        let (fails, exit) = (*rng.pick(&[0, 0, 0, 1, 2]), *rng.pick(&[1, 7]));
        let log_rate = *rng.pick(&[0, 50]);
        let _ = writeln!(
            text,
            "envs: {{SIM_RUN_MS: \"{run_ms}\", SIM_FAILS: \"{fails}\", SIM_EXIT: \"{exit}\", SIM_LOG_RATE: \"{log_rate}\"}}"
        );
        let with_deadline = rng.chance(15);
        if with_deadline {
            let (within, work) = (rng.between(240, 900), run_ms / 1_000 + 1);
            let _ = writeln!(text, "deadline: {{within: {within}s, work: {work}s, changeover: 20s}}");
        }
        let image = rng.between(0, 10_000);
        let _ = write!(text, "resources:\n  cpus: 1+\n  image_id: docker:sim:pull-{image}\n");
        // A machine that is not divided is assigned as a whole.
        if rng.chance(30) {
            let _ = writeln!(text, "  accelerators: A100:{}", cloud::GPUS);
        }
        // Spot machines may never be available: jobs that request them have a time limit.
        let spot = rng.chance(35);
        if spot {
            text.push_str("  use_spot: true\n");
        }
        let strategy = *rng.pick(&["EAGER_NEXT_REGION", "EAGER_NEXT_REGION", "FAILOVER", "NONE"]);
        let restarts = *rng.pick(&[0, 0, 1, 2]);
        let _ = write!(
            text,
            "  job_recovery:\n    strategy: {strategy}\n    max_restarts_on_errors: {restarts}\n"
        );
        if rng.chance(30) {
            text.push_str("    recover_on_exit_codes: [7]\n");
        }
        if spot && !with_deadline || rng.chance(15) {
            let bound = rng.between(120, 600);
            let _ = writeln!(text, "    max_launch_wait: {bound}s");
        }
        if rng.chance(10) {
            let _ = writeln!(text, "    max_launch_tries: {}", rng.between(1, 4));
        }
        text
    }
}
