//! SkyPilot task files, and their conversion to a managed job.
//!
//! A file holds one task, a pipeline of several documents, or a group after a header. Parsing answers two separate
//! questions. Is the file valid? If not, there are problems, with line and hint. Can it run here? A valid but
//! unsupported feature (a service, a machine image, a bucket) is a refusal; one without effect is a warning. So a file
//! written for elsewhere is never reported as invalid, and never silently executed in part.

mod fields;
mod graph;
mod header;
mod infra;
mod overrides;
mod recovery;
mod resources;
mod run_spec;
mod script;
mod substitute;

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use self::{
    fields::{DocumentRole, TaskDocument},
    header::FileHeader,
};
pub use self::{
    infra::Infra,
    overrides::Overrides,
    run_spec::{AttemptRunSpec, Error, JobIdentity, ServerContext, task_id},
    script::{GATE_FILE, HOSTS_FILE, PHASE_FILE, PRIVATE_HOME, Phase},
};
use crate::{
    config::{
        decode::{Ctx, DecodeMode, closest},
        error::{Code, Diagnosis, SourceSpan},
        yaml::{self, Node},
    },
    managed_job::plan::{JobGroup, ManagedJobPlan, Shape, TASKS_MAX},
};

/// Values from the command line: `--env` and `--secret`.
#[derive(Clone, Debug, Default)]
pub struct CommandLineValues {
    pub envs: BTreeMap<String, String>,
    pub secrets: BTreeMap<String, SecretValue>,
}

/// Values of one task's secrets, by name.
pub type TaskSecrets = BTreeMap<String, SecretValue>;

/// A value that is never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretValue(pub String);

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskFileKind {
    Single,
    Pipeline,
    Dag,
    JobGroup,
    Service,
    Pool,
}

impl TaskFileKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Pipeline => "pipeline",
            Self::Dag => "dag",
            Self::JobGroup => "job-group",
            Self::Service => "service",
            Self::Pool => "pool",
        }
    }
}

/// A valid file.
#[derive(Clone, Debug)]
pub struct ParsedTaskFile {
    pub kind: TaskFileKind,
    pub plan: ManagedJobPlan,
    /// For each task: the values of its secrets, from the file or from [`Given`].
    pub secrets: Vec<TaskSecrets>,
    /// Settings without effect here.
    pub warnings: Vec<Diagnosis>,
    /// Reasons why it cannot run here.
    pub refusals: Vec<Diagnosis>,
}

/// A job that can be launched here.
#[derive(Clone, Debug)]
pub struct LaunchableJob {
    pub plan: ManagedJobPlan,
    /// For each task.
    pub secrets: Vec<TaskSecrets>,
    pub warnings: Vec<Diagnosis>,
}

impl ParsedTaskFile {
    /// Returns the job, unless something in the file is not supported here.
    pub fn into_launchable(self) -> Result<LaunchableJob, Vec<Diagnosis>> {
        let Self { kind: _, plan, secrets, warnings, refusals } = self;
        if refusals.is_empty() { Ok(LaunchableJob { plan, secrets, warnings }) } else { Err(refusals) }
    }
}

/// Warnings and refusals of a valid file.
#[derive(Default)]
struct ParseNotes {
    warnings: Vec<Diagnosis>,
    refusals: Vec<Diagnosis>,
}

impl ParseNotes {
    fn warn(&mut self, span: SourceSpan, path: impl Into<String>, message: impl Into<String>) {
        push_unique(&mut self.warnings, Diagnosis::new(Code::Unsupported, span, message).at(path));
    }

    fn refuse(
        &mut self,
        span: SourceSpan,
        path: impl Into<String>,
        message: impl Into<String>,
        hint: Option<String>,
    ) {
        let refusal = Diagnosis { hint, ..Diagnosis::new(Code::Unsupported, span, message).at(path) };
        push_unique(&mut self.refusals, refusal);
    }
}

/// Adds a diagnosis once: inherited fields are parsed once for each alternative.
fn push_unique(list: &mut Vec<Diagnosis>, diagnosis: Diagnosis) {
    let reported = |other: &Diagnosis| other.span == diagnosis.span && other.message == diagnosis.message;
    if !list.iter().any(reported) {
        list.push(diagnosis);
    }
}

/// Parses a task file, and returns all of its problems.
pub fn parse_task_file(text: &str, given: &CommandLineValues) -> Result<ParsedTaskFile, Vec<Diagnosis>> {
    let documents = yaml::read_all(text).map_err(|diagnosis| vec![diagnosis])?;
    if documents.len() > TASKS_MAX + 1 {
        let message =
            format!("the file has {} documents; a job has at most {TASKS_MAX} tasks", documents.len());
        return Err(vec![Diagnosis::new(Code::TooLarge, documents[TASKS_MAX].span, message)]);
    }
    let mut cx = Ctx::new(DecodeMode::Strict);
    let mut notes = ParseNotes::default();
    let parsed = decode_documents(&documents, given, &mut cx, &mut notes);
    let problems = cx.into_problems();
    match parsed {
        Some((kind, plan, secrets)) if problems.is_empty() => {
            Ok(ParsedTaskFile { kind, plan, secrets, warnings: notes.warnings, refusals: notes.refusals })
        }
        Some(_) | None => Err(problems),
    }
}

/// Returns whether a text is a task file and not a configuration of `windlass apply`: it has several documents, or
/// fields that only task files have. If a text is not YAML, the field `type` decides, at any position.
pub fn is_task_file(text: &str) -> bool {
    let Ok(documents) = yaml::read_all(text) else {
        return !text.lines().any(|line| line.starts_with("type:"));
    };
    match documents.as_slice() {
        [] => false,
        [only] => fields::is_task(only),
        [_, _, ..] => true,
    }
}

/// Returns every field that a file may have, as a path; fields of the header of a group begin with `group.`.
pub fn known_fields() -> Vec<String> {
    let parts: [(&str, &[&str]); 6] = [
        ("group.", &header::GROUP_KEYS),
        ("", &fields::KEYS),
        ("workdir.", &fields::WORKDIR_KEYS),
        ("deadline.", &fields::DEADLINE_KEYS),
        ("resources.", &resources::KEYS),
        ("resources.job_recovery.", &recovery::KEYS),
    ];
    parts.iter().flat_map(|(above, keys)| keys.iter().map(move |key| format!("{above}{key}"))).collect()
}

type DecodedJob = (TaskFileKind, ManagedJobPlan, Vec<TaskSecrets>);

fn decode_documents(
    documents: &[Node],
    given: &CommandLineValues,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<DecodedJob> {
    let Some(first) = documents.first() else {
        let message = "the file is empty; a task requires `run`";
        return cx.fail(Diagnosis::new(Code::MissingField, SourceSpan::NONE, message).at("run"));
    };
    let header = FileHeader::from_document(first, documents.len() > 1, cx)?;
    let bodies = if header.is_some() && documents.len() > 1 { &documents[1..] } else { documents };
    let parallel = header.as_ref().is_some_and(|header| header.group.is_some());
    if parallel && documents.len() == 1 {
        return cx.fail(Diagnosis::new(
            Code::MissingField,
            first.span,
            "a job group requires at least one task",
        ));
    }
    let tasks: Vec<Option<TaskDocument>> =
        bodies.iter().map(|node| fields::decode(node, given, cx, notes)).collect();
    let tasks: Vec<TaskDocument> = tasks.into_iter().collect::<Option<_>>()?;
    let (kind, shape, after) = job_shape(header.as_ref(), bodies, &tasks, cx, notes)?;
    if kind == TaskFileKind::Service || kind == TaskFileKind::Pool {
        refuse_kind(kind, bodies, notes);
    }
    let name = header.and_then(|header| header.name).or_else(|| match tasks.as_slice() {
        [only] => only.task.name.clone(),
        _ => None,
    });
    let priority = tasks.iter().filter_map(|task| task.priority).max().unwrap_or(0);
    let mut secrets = Vec::with_capacity(tasks.len());
    let mut plan = Vec::with_capacity(tasks.len());
    for (mut document, after) in tasks.into_iter().zip(after) {
        document.task.after = after.into_iter().filter_map(|task| u32::try_from(task).ok()).collect();
        secrets.push(document.secrets);
        plan.push(document.task);
    }
    let image_architectures = BTreeMap::new();
    Some((kind, ManagedJobPlan { name, shape, priority, tasks: plan, image_architectures }, secrets))
}

fn refuse_kind(kind: TaskFileKind, bodies: &[Node], notes: &mut ParseNotes) {
    let (key, message, hint) = if kind == TaskFileKind::Pool {
        (
            "pool",
            "`pool` is not supported in managed jobs",
            "create a fleet instead: `windlass apply -f FLEET.yml`",
        )
    } else {
        (
            "service",
            "`service` is not supported in managed jobs",
            "run services with `windlass apply -f SERVICE.yml`",
        )
    };
    for body in bodies.iter().filter(|body| body.entry(key).is_some()) {
        notes.refuse(body.key_span(key), key, message, Some(hint.to_owned()));
    }
}

type ShapedJob = (TaskFileKind, Shape, Vec<Vec<usize>>);

/// Returns the kind of the file, and the dependencies of the tasks.
fn job_shape(
    header: Option<&FileHeader>,
    bodies: &[Node],
    tasks: &[TaskDocument],
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<ShapedJob> {
    let alone = vec![vec![]; tasks.len()];
    if let Some(group) = header.and_then(|header| header.group.as_ref()) {
        let (group, name) = (header::decode_group(group, bodies, tasks, cx, notes)?, header?.name.clone());
        let name = name.unwrap_or_default();
        return Some((TaskFileKind::JobGroup, Shape::Group(JobGroup { name, ..group }), alone));
    }
    if tasks.iter().any(|task| task.role == DocumentRole::Service) {
        return Some((TaskFileKind::Service, Shape::Single, alone));
    }
    if tasks.iter().any(|task| task.role == DocumentRole::Pool) {
        return Some((TaskFileKind::Pool, Shape::Single, alone));
    }
    if tasks.iter().any(|task| !task.depends_on.is_empty()) {
        return Some((TaskFileKind::Dag, Shape::Dag, dependencies(tasks, cx)?));
    }
    if tasks.len() == 1 {
        return Some((TaskFileKind::Single, Shape::Single, alone));
    }
    let chain = (0..tasks.len()).map(|task: usize| task.checked_sub(1).into_iter().collect()).collect();
    Some((TaskFileKind::Pipeline, Shape::Pipeline, chain))
}

/// Returns `depends_on` as positions. An unknown name and a cycle are problems.
fn dependencies(tasks: &[TaskDocument], cx: &mut Ctx) -> Option<Vec<Vec<usize>>> {
    let known = graph::name_positions(tasks.iter().map(|task| task.task.name.as_deref()));
    let mut valid = true;
    let mut after = Vec::with_capacity(tasks.len());
    for task in tasks {
        let mut before = Vec::new();
        for (name, span) in &task.depends_on {
            let mut bad = |message: String, hint: Option<String>| {
                valid = false;
                let diagnosis = Diagnosis::new(Code::InvalidValue, *span, message).at("depends_on");
                cx.problem(Diagnosis { hint, ..diagnosis });
            };
            match known.get(name.as_str()) {
                Some(Some(position)) => before.push(*position),
                Some(None) => {
                    bad(format!("`depends_on` names `{name}`, but several tasks have this name"), None)
                }
                None => {
                    let hint =
                        closest(name, known.keys().copied()).map(|name| format!("did you mean `{name}`?"));
                    bad(format!("`depends_on` names `{name}`, but no task has this name"), hint);
                }
            }
        }
        before.sort_unstable();
        before.dedup();
        after.push(before);
    }
    if !valid {
        return None;
    }
    let Some(cycle) = graph::find_cycle(&after) else { return Some(after) };
    let name = |task: usize| tasks[task].task.name.clone().unwrap_or_else(|| task.to_string());
    let mut names: Vec<String> = cycle.iter().map(|task| name(*task)).collect();
    names.extend(cycle.first().map(|task| name(*task)));
    let span = cycle
        .first()
        .and_then(|task| tasks[*task].depends_on.first())
        .map_or(SourceSpan::NONE, |(_, span)| *span);
    let message = format!("`depends_on` contains a cycle: {}", names.join(" after "));
    cx.fail(Diagnosis::new(Code::Conflict, span, message).at("depends_on"))
}
