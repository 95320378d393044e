//! Command line options that override a file: the same values, parsed by the same rules.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{CommandLineValues, fields::DEFAULT_CHANGEOVER, parse_task_file};
use crate::{
    config::{
        error::{Code, Diagnosis, SourceSpan},
        quantities::parse_duration,
    },
    managed_job::plan::{Candidate, Deadline, ManagedJobPlan, TaskBody, TaskPlan},
};

/// Overrides for every task of a job. What is absent stays as in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overrides {
    pub gpus: Option<String>,
    pub cpus: Option<String>,
    pub memory: Option<String>,
    pub num_nodes: Option<u32>,
    pub use_spot: Option<bool>,
    pub infra: Option<String>,
    pub job_recovery: Option<String>,
    pub deadline: Option<String>,
}

impl Overrides {
    /// Changes the plan, or returns all problems and leaves it unchanged.
    pub fn apply(&self, plan: &mut ManagedJobPlan) -> Result<(), Vec<Diagnosis>> {
        if *self == Self::default() {
            return Ok(());
        }
        if plan.tasks.iter().any(|task| matches!(task.body, TaskBody::Configuration(_))) {
            let message = "options cannot change a task that is written for `windlass apply`";
            return Err(vec![invalid_option("resources", message).hint("set the values in the file")]);
        }
        let reason_text = self.parse_values()?;
        let mut changed = plan.tasks.clone();
        for task in &mut changed {
            task.candidates = self.candidates(&task.candidates, &reason_text.candidates);
            if self.num_nodes.is_some() {
                task.nodes = reason_text.nodes;
            }
            if self.job_recovery.is_some() {
                task.recovery.clone_from(&reason_text.recovery);
            }
            if let Some(text) = &self.deadline {
                task.deadline = Some(deadline(text, task, reason_text.deadline)?);
            }
        }
        plan.tasks = changed;
        Ok(())
    }

    /// Parses the options as a task that contains only them.
    fn parse_values(&self) -> Result<TaskPlan, Vec<Diagnosis>> {
        let resources = json!({
            "accelerators": self.gpus, "cpus": self.cpus, "memory": self.memory, "use_spot": self.use_spot,
            "infra": self.infra,
        });
        let mut lines = vec!["run: work".to_owned(), "resources:".to_owned()];
        let given = resources.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        lines.extend(given.map(|(key, value)| format!("  {key}: {value}")));
        // These two may be maps, written as in a file.
        let flow = |text: &str| text.replace(['\n', '\r'], " ");
        lines.extend(self.job_recovery.as_ref().map(|text| format!("  job_recovery: {}", flow(text))));
        if lines.len() == 2 {
            lines.pop();
        }
        lines.extend(self.num_nodes.map(|nodes| format!("num_nodes: {nodes}")));
        let map = self.deadline.as_ref().filter(|text| parse_duration(text).is_err());
        lines.extend(map.map(|text| format!("deadline: {}", flow(text))));
        let parsed = parse_task_file(&(lines.join("\n") + "\n"), &CommandLineValues::default());
        // Positions refer to a generated text, which the user has not seen.
        let nowhere = |problems: Vec<Diagnosis>| {
            problems.into_iter().map(|one| Diagnosis { span: SourceSpan::NONE, ..one }).collect::<Vec<_>>()
        };
        let mut plan = parsed.map_err(nowhere)?.plan;
        plan.tasks
            .pop()
            .ok_or_else(|| vec![invalid_option("resources", "the options do not describe a task")])
    }

    /// Returns each candidate of the file with the overrides; several alternative GPUs produce several of each.
    fn candidates(&self, own: &[Candidate], message: &[Candidate]) -> Vec<Candidate> {
        let mut all: Vec<Candidate> = Vec::new();
        let message = if self.gpus.is_some() { message } else { message.get(..1).unwrap_or_default() };
        for over in message {
            for one in own {
                let mut one = one.clone();
                if self.gpus.is_some() {
                    one.accelerator.clone_from(&over.accelerator);
                }
                if self.cpus.is_some() {
                    one.cpus = over.cpus;
                }
                if self.memory.is_some() {
                    one.memory = over.memory;
                }
                if self.use_spot.is_some() {
                    one.spot = over.spot;
                }
                if self.infra.is_some() {
                    one.infra.clone_from(&over.infra);
                }
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        all
    }
}

/// Parses a deadline; `48h` alone keeps the work that the file names.
fn deadline(text: &str, task: &TaskPlan, reason_text: Option<Deadline>) -> Result<Deadline, Vec<Diagnosis>> {
    if let Some(reason_text) = reason_text {
        return Ok(reason_text);
    }
    let within = parse_duration(text).map_err(|reason| vec![invalid_option("deadline", &reason)])?;
    if within <= 0 {
        return Err(vec![invalid_option("deadline", "`deadline` must be greater than 0")]);
    }
    let own = task.deadline.map(|own| Deadline { within, ..own });
    let of_bound = || task.max_duration.map(|work| Deadline { within, work, changeover: DEFAULT_CHANGEOVER });
    own.or_else(of_bound).ok_or_else(|| {
        let message = "`deadline` requires `work`: how long the task runs without interruptions";
        vec![invalid_option("deadline", message).hint("for example `--deadline '{within: 48h, work: 30h}'`")]
    })
}

fn invalid_option(path: &str, message: &str) -> Diagnosis {
    Diagnosis::new(Code::InvalidValue, SourceSpan::NONE, message).at(path)
}
