//! SkyPilot task files, and their conversion to a managed job or a service.
//!
//! A file holds one task, a pipeline of several documents, or a group after a header. Parsing answers two separate
//! questions. Is the file valid? If not, there are problems, with line and hint. Can it run here? A valid but
//! unsupported feature (a pool, a machine image, a bucket) is a refusal; one without effect is a warning. So a file
//! written for elsewhere is never reported as invalid, and never silently executed in part.

mod config_overrides;
mod fields;
mod graph;
mod header;
mod infra;
mod overrides;
mod recovery;
mod resources;
mod run_spec;
mod script;
mod service;
mod service_spec;
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
    service::{Balance, ReadinessProbe, ServiceSection, TargetQps},
    service_spec::{
        Error as ServiceError, SECRETS_VERSION, ServiceAlternative, ServiceAlternatives, ServiceFile,
        ServiceSettings, UpdateMode, stored_secret_name, stored_secret_prefix,
    },
};
use crate::{
    config::{
        decode::{Ctx, DecodeMode, closest},
        error::{Code, Diagnosis, SourceSpan},
        yaml::{self, Node},
    },
    managed_job::plan::{JobGroup, ManagedJobPlan, Shape, TASKS_MAX, TaskBody},
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
    /// The service of a service file, unless a refusal says why it cannot run here.
    service: Option<ServiceSection>,
    /// Reason why the file is not a job, although it can run here: the command that runs it.
    job_refusal: Option<Diagnosis>,
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
        let Self { kind: _, plan, secrets, warnings, refusals, service: _, job_refusal } = self;
        if let Some(refusal) = job_refusal {
            return Err(vec![refusal]);
        }
        if refusals.is_empty() { Ok(LaunchableJob { plan, secrets, warnings }) } else { Err(refusals) }
    }

    /// Returns the service, unless something in the file is not supported here or it contains no service.
    pub fn into_service(self) -> Result<ServiceFile, Vec<Diagnosis>> {
        let Self { kind, plan, mut secrets, warnings, mut refusals, service, job_refusal: _ } = self;
        let ManagedJobPlan { name, mut tasks, .. } = plan;
        let (task, secrets) = (tasks.pop(), secrets.pop().unwrap_or_default());
        let task = task.map(|task| (task.body, task.candidates, task.cheapest_first, task.name));
        match (service, task) {
            (Some(section), Some((TaskBody::Script(script), candidates, is_cheapest_first, own)))
                if refusals.is_empty() =>
            {
                let name = name.or(own);
                Ok(ServiceFile { name, section, script, candidates, is_cheapest_first, secrets, warnings })
            }
            (_, _) => {
                if kind != TaskFileKind::Service {
                    let message = "the file contains no `service`";
                    let refusal = Diagnosis::new(Code::MissingField, SourceSpan::NONE, message).at("service");
                    refusals.push(refusal.hint("launch jobs with `windlass jobs launch`"));
                }
                Err(refusals)
            }
        }
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
        Some(DecodedJob { kind, plan, secrets, service, job_refusal }) if problems.is_empty() => {
            let ParseNotes { warnings, refusals } = notes;
            Ok(ParsedTaskFile { kind, plan, secrets, warnings, refusals, service, job_refusal })
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

/// Returns whether a text is a task file with a service, which `windlass apply` accepts.
pub fn is_service_file(text: &str) -> bool {
    let documents = yaml::read_all(text).unwrap_or_default();
    documents.iter().any(|node| node.field("service").is_some() && node.entry("type").is_none())
}

/// Returns every field that a file may have, as a path; fields of the header of a group begin with `group.`.
pub fn known_fields() -> Vec<String> {
    let parts: [(&str, &[&str]); 10] = [
        ("group.", &header::GROUP_KEYS),
        ("", &fields::KEYS),
        ("workdir.", &fields::WORKDIR_KEYS),
        ("deadline.", &fields::DEADLINE_KEYS),
        ("resources.", &resources::KEYS),
        ("resources.job_recovery.", &recovery::KEYS),
        ("service.", &service::KEYS),
        ("service.readiness_probe.", &service::PROBE_KEYS),
        ("service.replica_policy.", &service::POLICY_KEYS),
        ("service.tls.", &service::TLS_KEYS),
    ];
    parts.iter().flat_map(|(above, keys)| keys.iter().map(move |key| format!("{above}{key}"))).collect()
}

struct DecodedJob {
    kind: TaskFileKind,
    plan: ManagedJobPlan,
    secrets: Vec<TaskSecrets>,
    service: Option<ServiceSection>,
    job_refusal: Option<Diagnosis>,
}

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
    let job_refusal = match kind {
        TaskFileKind::Service => refuse_service(bodies, &tasks, notes),
        TaskFileKind::Pool => {
            refuse_pool(bodies, notes);
            None
        }
        TaskFileKind::Single | TaskFileKind::Pipeline | TaskFileKind::Dag | TaskFileKind::JobGroup => None,
    };
    let name = header.and_then(|header| header.name).or_else(|| match tasks.as_slice() {
        [only] => only.task.name.clone(),
        _ => None,
    });
    let priority = tasks.iter().filter_map(|task| task.priority).max().unwrap_or(0);
    let mut secrets = Vec::with_capacity(tasks.len());
    let mut plan = Vec::with_capacity(tasks.len());
    let mut service = None;
    for (mut document, after) in tasks.into_iter().zip(after) {
        document.task.after = after.into_iter().filter_map(|task| u32::try_from(task).ok()).collect();
        secrets.push(document.secrets);
        service = service.or(document.service);
        plan.push(document.task);
    }
    let image_architectures = BTreeMap::new();
    let plan = ManagedJobPlan { name, shape, priority, tasks: plan, image_architectures };
    Some(DecodedJob { kind, plan, secrets, service, job_refusal })
}

/// Refuses files with several documents and replicas with several nodes. Returns the reason why a service is no job.
fn refuse_service(bodies: &[Node], tasks: &[TaskDocument], notes: &mut ParseNotes) -> Option<Diagnosis> {
    let body = bodies.iter().find(|body| body.field("service").is_some())?;
    if bodies.len() > 1 {
        let message = "a file with a `service` has one document";
        let hint = "write each service into a separate file".to_owned();
        notes.refuse(body.key_span("service"), "service", message, Some(hint));
    }
    if tasks.iter().any(|task| task.task.nodes > 1) {
        let message = "`num_nodes` is not supported in a service: a replica has one node";
        notes.refuse(body.key_span("num_nodes"), "num_nodes", message, None);
    }
    if tasks.iter().any(|task| task.task.body.is_empty()) {
        let message = "a service requires `run`";
        notes.refuse(body.key_span("service"), "run", message, None);
    }
    let message = "a `service` is not a managed job";
    let refusal = Diagnosis::new(Code::Unsupported, body.key_span("service"), message).at("service");
    Some(refusal.hint("start it with `windlass serve up FILE`, or with `windlass apply -f FILE`"))
}

fn refuse_pool(bodies: &[Node], notes: &mut ParseNotes) {
    let hint = "create a fleet instead, whose instances stay: `windlass apply -f FLEET.yml`".to_owned();
    for body in bodies.iter().filter(|body| body.field("pool").is_some()) {
        let message = "`pool` is not supported in managed jobs";
        notes.refuse(body.key_span("pool"), "pool", message, Some(hint.clone()));
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
