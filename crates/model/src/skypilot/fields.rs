//! One document of a task file: the fields of a task.

use std::collections::BTreeMap;

use super::{
    CommandLineValues, ParseNotes, SecretValue, config_overrides,
    recovery::{self, DurationSeconds},
    resources::{self, TaskResources},
    script::SCRIPT_BYTES_MAX,
    service::{self, ServiceSection},
    substitute,
};
use crate::{
    config::{
        self,
        decode::{Ctx, Decode, Int, check_keys, excerpt, expect_map, is_map, optional_field, scalar, text},
        env::is_env_name,
        error::{Code, Diagnosis, SourceSpan},
        mounts::{FileMapping, Mount, VolumeMount, is_clonable},
        quantities::{OneOrMany, parse_duration},
        unsupported,
        yaml::{Entry, Node, Value},
        yaml_scalars::ScalarValue,
    },
    managed_job::plan::{Candidate, Deadline, RecoveryPolicy, Script, TaskBody, TaskPlan, WORKDIR, Workdir},
};

pub(super) const KEYS: [&str; 21] = [
    "name",
    "run",
    "setup",
    "num_nodes",
    "envs",
    "secrets",
    "workdir",
    "file_mounts",
    "resources",
    "depends_on",
    "deadline",
    "max_duration",
    "volumes",
    "service",
    "pool",
    "event_callback",
    "config",
    "experimental",
    "inputs",
    "outputs",
    "api_server_access",
];

pub(super) const WORKDIR_KEYS: [&str; 2] = ["url", "ref"];
pub(super) const DEADLINE_KEYS: [&str; 3] = ["within", "work", "changeover"];

/// Fields of a managed job that are allowed in a task of `windlass apply`.
const MANAGED_JOB_KEYS: [&str; 3] = ["depends_on", "deadline", "job_recovery"];

/// Those of the fields of a task file that configurations of `windlass apply` have as well.
const SHARED_KEYS: [&str; 6] = ["name", "resources", "depends_on", "deadline", "max_duration", "volumes"];
/// Field of the header of a task file.
const HEADER_KEY: &str = "execution";

/// Maximum number of nodes of one task.
const NODES_MAX: i64 = 10_000;
/// Default time that a new node costs for a deadline, in seconds.
pub(super) const DEFAULT_CHANGEOVER: i64 = 300;

/// Kind of a document.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DocumentRole {
    Task,
    Service,
    Pool,
}

/// A valid document.
pub(super) struct TaskDocument {
    pub(super) task: TaskPlan,
    pub(super) role: DocumentRole,
    /// Present in a service that can run here.
    pub(super) service: Option<ServiceSection>,
    pub(super) priority: Option<i32>,
    pub(super) depends_on: Vec<(String, SourceSpan)>,
    pub(super) secrets: BTreeMap<String, SecretValue>,
}

/// Returns whether a single document belongs to a task file.
pub(super) fn is_task(node: &Node) -> bool {
    let Value::Map(entries) = &node.value else { return false };
    let mut keys = entries.iter().map(|entry| entry.key.as_str());
    if let Some(kind) = node.field("type") {
        return scalar(kind).is_some_and(|word| word.text == "task")
            && keys.any(|key| MANAGED_JOB_KEYS.contains(&key));
    }
    let is_of_task_files = |key: &str| KEYS.contains(&key) && !SHARED_KEYS.contains(&key);
    keys.clone().any(|key| key == HEADER_KEY || is_of_task_files(key)) || keys.all(|key| KEYS.contains(&key))
}

pub(super) fn decode(
    node: &Node,
    given: &CommandLineValues,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<TaskDocument> {
    expect_map(node, cx)?;
    let kind = node.field("type").and_then(scalar).map(|word| word.text.as_str());
    if kind.is_some_and(|kind| config::KINDS.contains(&kind)) {
        return configuration(node, given, cx, notes);
    }
    check_keys(node, &KEYS, cx);
    report_ignored_fields(node, notes);
    let overrides = config_overrides::decode(node, notes);
    let role = match (node.field("service").is_some(), node.field("pool").is_some()) {
        (true, _) => DocumentRole::Service,
        (false, true) => DocumentRole::Pool,
        (false, false) => DocumentRole::Task,
    };
    let (envs, secrets) = (envs(node, given, cx), secrets(node, given, role, cx, notes));
    let name: Option<Option<String>> = optional_field(node, "name", cx, || None);
    let setup: Option<Option<String>> = optional_field(node, "setup", cx, || None);
    let run: Option<Option<String>> = optional_field(node, "run", cx, || None);
    let nodes: Option<Option<Int<1, NODES_MAX>>> = optional_field(node, "num_nodes", cx, || None);
    let resources = match node.field("resources") {
        None => Some(TaskResources { candidates: vec![Candidate::default()], ..TaskResources::default() }),
        Some(value) => cx.under("resources", |cx| resources::decode(value, cx, notes)),
    };
    let vars = envs.clone().unwrap_or_default();
    let workdir = workdir(node, &vars, cx, notes);
    let files = files(node, &vars, cx, notes);
    let volumes = volumes(node, &vars, cx, notes);
    let depends_on = depends_on(node, cx);
    let max_duration: Option<Option<DurationSeconds>> = optional_field(node, "max_duration", cx, || None);
    let max_duration = max_duration?.map(|duration| duration.0);
    let deadline = deadline(node, max_duration, cx, notes);
    let (resources, secrets) = (resources?, secrets?);
    let script = Script {
        setup: setup?,
        run: run?,
        envs: envs?,
        secrets: secrets.names,
        workdir: workdir?,
        files: files?,
        volumes: volumes?,
        shm_size: overrides.shm_size,
    };
    bound(&script, node, notes);
    let service = match role {
        DocumentRole::Service => service::decode(node, &vars, &resources, cx, notes),
        DocumentRole::Task | DocumentRole::Pool => None,
    };
    let task = TaskPlan {
        name: name?,
        body: TaskBody::Script(script),
        nodes: nodes?.and_then(|n| u32::try_from(n.get()).ok()).unwrap_or(1),
        candidates: resources.candidates,
        cheapest_first: resources.cheapest_first,
        recovery: resources.recovery,
        after: vec![],
        deadline: deadline?,
        max_duration,
    };
    Some(TaskDocument {
        task,
        role,
        service,
        priority: resources.priority,
        depends_on: depends_on?,
        secrets: secrets.values,
    })
}

/// Reports fields without effect, and fields that are not supported.
fn report_ignored_fields(node: &Node, notes: &mut ParseNotes) {
    let tolerated = [
        ("inputs", "the size and location of data are not considered when nodes are chosen"),
        ("outputs", "the size and location of data are not considered when nodes are chosen"),
        ("api_server_access", "jobs do not receive a token of the server"),
        ("event_callback", "use `windlass event` to follow changes"),
    ];
    for (key, why) in tolerated {
        if node.field(key).is_some() {
            notes.warn(node.key_span(key), key, format!("`{key}` has no effect: {why}"));
        }
    }
}

fn bound(script: &Script, node: &Node, notes: &mut ParseNotes) {
    let parts = [("setup", &script.setup), ("run", &script.run)];
    for (key, text) in parts {
        if text.as_ref().is_some_and(|text| text.len() > SCRIPT_BYTES_MAX) {
            let message = format!("`{key}` has more than {SCRIPT_BYTES_MAX} bytes");
            let hint = "put the script into a file in `workdir`, and call it".to_owned();
            notes.refuse(node.key_span(key), key, message, Some(hint));
        }
    }
}

/// Returns the entries of a mapping of variables.
fn variables<'a>(node: &'a Node, key: &'static str, cx: &mut Ctx) -> Option<Vec<&'a Entry>> {
    let Some(value) = node.field(key) else { return Some(vec![]) };
    let Value::Map(entries) = &value.value else {
        return cx.under(key, |cx| cx.wrong_type(value, "a mapping"));
    };
    for entry in entries {
        if !is_env_name(&entry.key) {
            let message = format!("`{}` in `{key}` is not a valid variable name", excerpt(&entry.key));
            let hint = "names consist of letters, digits and `_`, and do not start with a digit";
            return cx.fail(Diagnosis::new(Code::InvalidValue, entry.key_span, message).at(key).hint(hint));
        }
    }
    Some(entries.iter().collect())
}

/// Returns the value of a variable as its author meant it; `None` is null.
fn variable(entry: &Entry, key: &'static str, cx: &mut Ctx) -> Option<Option<String>> {
    match &entry.value.value {
        Value::Null => Some(None),
        Value::Scalar(word) => Some(Some(match word.meaning() {
            // The reader that these files were written for prints booleans in this form.
            ScalarValue::Bool(true) => "True".to_owned(),
            ScalarValue::Bool(false) => "False".to_owned(),
            ScalarValue::Null | ScalarValue::Int(_) | ScalarValue::Float(_) | ScalarValue::Str => {
                word.text.clone()
            }
        })),
        Value::Seq(_) | Value::Map(_) => {
            cx.under(key, |cx| cx.under(entry.key.clone(), |cx| cx.wrong_type(&entry.value, "a string")))
        }
    }
}

fn envs(node: &Node, given: &CommandLineValues, cx: &mut Ctx) -> Option<BTreeMap<String, String>> {
    let mut envs = BTreeMap::new();
    let mut valid = true;
    for entry in variables(node, "envs", cx)? {
        let value = match given.envs.get(&entry.key) {
            Some(value) => Some(value.clone()),
            None => variable(entry, "envs", cx)?,
        };
        match value {
            Some(value) => {
                envs.insert(entry.key.clone(), value);
            }
            None => {
                valid = false;
                let message = format!("variable `{}` has no value", entry.key);
                let hint = format!("set it with `--env {}=…`", entry.key);
                let diagnosis = Diagnosis::new(Code::MissingField, entry.key_span, message);
                cx.problem(diagnosis.at(format!("envs.{}", entry.key)).hint(hint));
            }
        }
    }
    for (name, value) in &given.envs {
        envs.entry(name.clone()).or_insert_with(|| value.clone());
    }
    valid.then_some(envs)
}

struct DeclaredSecrets {
    names: Vec<String>,
    values: BTreeMap<String, SecretValue>,
}

/// Returns the secrets of the file and of the command line. One without a value parses, and cannot be launched, unless
/// it belongs to a service: there it refers to the secret of the project.
fn secrets(
    node: &Node,
    given: &CommandLineValues,
    role: DocumentRole,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<DeclaredSecrets> {
    let mut values = given.secrets.clone();
    let mut names: Vec<String> = values.keys().cloned().collect();
    for entry in variables(node, "secrets", cx)? {
        if values.contains_key(&entry.key) {
            continue;
        }
        names.push(entry.key.clone());
        match variable(entry, "secrets", cx)? {
            Some(value) => {
                values.insert(entry.key.clone(), SecretValue(value));
            }
            None if role == DocumentRole::Service => {}
            None => {
                let message = format!("secret `{}` has no value", entry.key);
                let hint = format!("set it with `--secret {}=…`", entry.key);
                notes.refuse(entry.key_span, format!("secrets.{}", entry.key), message, Some(hint));
            }
        }
    }
    names.sort();
    Some(DeclaredSecrets { names, values })
}

fn workdir(
    node: &Node,
    vars: &BTreeMap<String, String>,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<Option<Workdir>> {
    let Some(value) = node.field("workdir") else { return Some(None) };
    let value = substitute::substitute_tree(value, vars);
    cx.under("workdir", |cx| {
        if !is_map(&value) {
            return text(&value, cx).map(|path| Some(Workdir::Local(path.to_owned())));
        }
        check_keys(&value, &WORKDIR_KEYS, cx);
        let url: Option<Option<String>> = optional_field(&value, "url", cx, || None);
        let reference: Option<Option<String>> = optional_field(&value, "ref", cx, || None);
        match url? {
            Some(url) if !is_clonable(&url) => {
                let message = format!("nodes cannot clone the repository `{}`", excerpt(&url));
                let hint = "use an `https:`, `ssh:` or `git:` URL, or a local directory".to_owned();
                notes.refuse(value.key_span("url"), "workdir.url", message, Some(hint));
                Some(None)
            }
            Some(url) => Some(Some(Workdir::Git { url, reference: reference? })),
            None => cx.fail(
                Diagnosis::new(Code::MissingField, value.span, "a repository requires `url`").at("url"),
            ),
        }
    })
}

/// Returns the files to copy. A file from a bucket parses, and cannot be launched.
fn files(
    node: &Node,
    vars: &BTreeMap<String, String>,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<Vec<FileMapping>> {
    let Some(value) = node.field("file_mounts") else { return Some(vec![]) };
    let value = substitute::substitute_tree(value, vars);
    let Value::Map(entries) = &value.value else {
        return cx.under("file_mounts", |cx| cx.wrong_type(&value, "a mapping"));
    };
    let mut files = Vec::new();
    for entry in entries {
        let mut store = |what: String| {
            let hint = "mount a volume, or copy the data in `setup`".to_owned();
            notes.refuse(entry.key_span, format!("file_mounts.{}", entry.key), what, Some(hint));
        };
        let named = excerpt(&entry.key);
        if is_map(&entry.value) {
            store(format!("`file_mounts` entry `{named}` is an object store, which is not supported"));
            continue;
        }
        let source =
            cx.under("file_mounts", |cx| cx.under(entry.key.clone(), |cx| text(&entry.value, cx)))?;
        if source.contains("://") {
            store(format!(
                "`file_mounts` entry `{named}` comes from `{}`, but object stores are not supported",
                excerpt(source)
            ));
            continue;
        }
        files.push(FileMapping { local_path: source.to_owned(), path: mount_path(&entry.key) });
    }
    Some(files)
}

/// Returns the target of a file: a relative one is in the directory that the task starts in.
fn mount_path(path: &str) -> String {
    if path.starts_with(['/', '~']) {
        return path.to_owned();
    }
    let mut below = path;
    while let Some(rest) = below.strip_prefix("./") {
        below = rest.trim_start_matches('/');
    }
    match below.trim_end_matches('/') {
        "" | "." => WORKDIR.to_owned(),
        below => format!("{WORKDIR}/{below}"),
    }
}

/// Returns the volumes by name. A volume that would have to be created on demand parses, and cannot be launched.
fn volumes(
    node: &Node,
    vars: &BTreeMap<String, String>,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<Vec<Mount>> {
    let Some(value) = node.field("volumes") else { return Some(vec![]) };
    let value = substitute::substitute_tree(value, vars);
    let Value::Map(entries) = &value.value else {
        return cx.under("volumes", |cx| cx.wrong_type(&value, "a mapping of paths to volumes"));
    };
    let mut mounts = Vec::new();
    for entry in entries {
        let whole = is_map(&entry.value)
            && entry.value.entry("name").is_some()
            && matches!(&entry.value.value, Value::Map(fields) if fields.len() == 1);
        let name = if whole { entry.value.field("name").and_then(scalar) } else { scalar(&entry.value) };
        let Some(name) = name else {
            let message =
                format!("`volumes` entry `{}` does not name an existing volume", excerpt(&entry.key));
            let hint = "create the volume with `windlass apply`, and use its name here".to_owned();
            notes.refuse(entry.key_span, format!("volumes.{}", entry.key), message, Some(hint));
            continue;
        };
        let mount = VolumeMount { name: OneOrMany::One(name.text.clone()), path: entry.key.clone() };
        mounts.push(Mount::Volume(mount));
    }
    Some(mounts)
}

fn depends_on(node: &Node, cx: &mut Ctx) -> Option<Vec<(String, SourceSpan)>> {
    let Some(value) = node.field("depends_on") else { return Some(vec![]) };
    let items: Vec<&Node> = match &value.value {
        Value::Seq(items) => items.iter().collect(),
        Value::Null | Value::Scalar(_) | Value::Map(_) => vec![value],
    };
    cx.under("depends_on", |cx| {
        items.into_iter().map(|item| text(item, cx).map(|name| (name.to_owned(), item.span))).collect()
    })
}

/// Decodes `48h`, or `{within: 48h, work: 30h, changeover: 10m}`.
fn deadline(
    node: &Node,
    max_duration: Option<i64>,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<Option<Deadline>> {
    let Some(value) = node.field("deadline") else { return Some(None) };
    let found = cx.under("deadline", |cx| {
        let (within, work, changeover) = if is_map(value) {
            check_keys(value, &DEADLINE_KEYS, cx);
            let within: Option<Option<DurationSeconds>> = optional_field(value, "within", cx, || None);
            let work: Option<Option<DurationSeconds>> = optional_field(value, "work", cx, || None);
            let changeover: Option<Option<DurationSeconds>> =
                optional_field(value, "changeover", cx, || None);
            let Some(within) = within? else {
                let message = "`deadline` requires `within`: the time in which the task must finish";
                return cx.fail(Diagnosis::new(Code::MissingField, value.span, message).at("within"));
            };
            (within.0, work?.map(|work| work.0), changeover?.map(|changeover| changeover.0))
        } else {
            match parse_duration(text(value, cx)?) {
                Ok(within) => (within, None, None),
                Err(reason) => return cx.invalid(value, reason),
            }
        };
        let Some(work) = work.or(max_duration) else {
            let message = "`deadline` requires `work`: how long the task runs without interruptions";
            let hint = "for example `deadline: {within: 48h, work: 30h}`";
            return cx.fail(Diagnosis::new(Code::MissingField, value.span, message).at("work").hint(hint));
        };
        if within <= 0 || work <= 0 {
            return cx.invalid(value, "`within` and `work` must be greater than 0");
        }
        Some(Deadline { within, work, changeover: changeover.unwrap_or(DEFAULT_CHANGEOVER) })
    })?;
    if found.work > found.within {
        let message = "`deadline` cannot be met even without interruptions: only on-demand nodes are used";
        notes.warn(node.key_span("deadline"), "deadline", message);
    }
    Some(Some(found))
}

/// Decodes a task in the format of `windlass apply`, with the additional fields of managed jobs.
fn configuration(
    node: &Node,
    given: &CommandLineValues,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<TaskDocument> {
    let kind = node.field("type").and_then(scalar).map(|word| word.text.as_str()).unwrap_or_default();
    if kind != "task" {
        let message = format!("`type: {kind}` cannot be part of a managed job");
        let hint = "a managed job consists of tasks; use `windlass apply` for other types";
        let span = node.field("type").map_or(node.span, |value| value.span);
        return cx.fail(Diagnosis::new(Code::Unsupported, span, message).at("type").hint(hint));
    }
    let Value::Map(entries) = &node.value else { return None };
    let own =
        entries.iter().filter(|entry| !MANAGED_JOB_KEYS.contains(&entry.key.as_str())).cloned().collect();
    let task = config::task::Task::decode(&Node { value: Value::Map(own), span: node.span }, cx);
    let recovery = match node.field("job_recovery") {
        None => Some(RecoveryPolicy::default()),
        Some(value) => cx.under("job_recovery", |cx| recovery::decode(value, cx, notes)),
    };
    let depends_on = depends_on(node, cx);
    let deadline = deadline(node, None, cx, notes);
    let mut task = task?;
    let whole = config::Configuration::Task(Box::new(task.clone()));
    let context = unsupported::ReviewContext { node: Some(node), ..unsupported::ReviewContext::default() };
    for warning in unsupported::review(&whole, context).warnings {
        notes.warn(warning.span, warning.path, warning.message);
    }
    for (name, value) in &given.envs {
        task.run.env.set(name, value);
    }
    if let Some(name) = task.run.env.unresolved().first() {
        let message = format!("variable `{name}` has no value");
        let hint = format!("set it with `--env {name}=…`");
        return cx
            .fail(Diagnosis::new(Code::MissingField, node.key_span("env"), message).at("env").hint(hint));
    }
    let priority = task.run.priority.and_then(|priority| i32::try_from(priority.get()).ok());
    let task = TaskPlan {
        name: task.run.name.as_ref().map(|name| name.0.clone()),
        nodes: u32::try_from(task.nodes_total()).unwrap_or(u32::MAX),
        body: TaskBody::Configuration(Box::new(task)),
        candidates: vec![Candidate::default()],
        cheapest_first: false,
        recovery: recovery?,
        after: vec![],
        deadline: deadline?,
        max_duration: None,
    };
    let secrets = given.secrets.clone();
    Some(TaskDocument {
        task,
        role: DocumentRole::Task,
        service: None,
        priority,
        depends_on: depends_on?,
        secrets,
    })
}
