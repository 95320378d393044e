//! Header of a file with several documents, and the rules of groups.

use super::{ParseNotes, fields::TaskDocument};
use crate::{
    config::{
        decode::{Ctx, closest, excerpt, scalar, text},
        error::{Code, Diagnosis},
        quantities::parse_duration,
        yaml::{Node, Value},
    },
    managed_job::plan::JobGroup,
};

/// Settings of the first document that apply to the others.
pub(super) struct FileHeader {
    pub(super) name: Option<String>,
    /// The header itself, if it makes the tasks a group.
    pub(super) group: Option<Node>,
}

pub(super) const GROUP_KEYS: [&str; 5] =
    ["name", "execution", "primary_tasks", "termination_delay", "inter_connection"];

/// Returns whether the name has letters, digits, dashes and underscores: these names become host names.
fn is_group_identifier(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

impl FileHeader {
    /// Returns the header, if the first document is one.
    pub(super) fn from_document(first: &Node, more: bool, cx: &mut Ctx) -> Option<Option<Self>> {
        let Value::Map(entries) = &first.value else { return Some(None) };
        let only = |keys: &[&str]| entries.iter().all(|entry| keys.contains(&entry.key.as_str()));
        let name = || match first.field("name") {
            Some(value) => scalar_text(value),
            None => None,
        };
        let Some(execution) = first.field("execution") else {
            let is_header = more && first.entry("name").is_some() && only(&["name"]);
            return Some(is_header.then(|| Self { name: name(), group: None }));
        };
        match scalar(execution).map(|word| word.text.as_str()) {
            Some("parallel") => {
                let name = group_name(first, cx)?;
                Some(Some(Self { name: Some(name), group: Some(first.clone()) }))
            }
            // With other keys next to it this is a task, which has no such field.
            Some("serial") if only(&["name", "execution"]) => Some(Some(Self { name: name(), group: None })),
            Some("serial") => Some(None),
            Some(_) | None => {
                let word = scalar(execution).map(|word| excerpt(&word.text)).unwrap_or_default();
                let message = format!("`{word}` is not a valid value for `execution`");
                let hint = "use serial or parallel";
                cx.fail(
                    Diagnosis::new(Code::InvalidValue, execution.span, message).at("execution").hint(hint),
                )
            }
        }
    }
}

fn scalar_text(node: &Node) -> Option<String> {
    scalar(node).map(|word| word.text.clone())
}

fn group_name(first: &Node, cx: &mut Ctx) -> Option<String> {
    let Some(node) = first.field("name") else {
        cx.missing(first, "name", "a job group requires a `name`");
        return None;
    };
    let name = cx.under("name", |cx| text(node, cx))?;
    if is_group_identifier(name) {
        return Some(name.to_owned());
    }
    let message = format!("`{}` is not a valid `name` for a job group", excerpt(name));
    let hint = "use letters, digits, `_` and `-`: the name becomes part of host names";
    cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).at("name").hint(hint))
}

/// Returns the group of these tasks; the caller sets its name.
pub(super) fn decode_group(
    header: &Node,
    bodies: &[Node],
    tasks: &[TaskDocument],
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<JobGroup> {
    if let Value::Map(entries) = &header.value {
        for entry in entries.iter().filter(|entry| !GROUP_KEYS.contains(&entry.key.as_str())) {
            let hint = closest(&entry.key, GROUP_KEYS)
                .map_or(String::new(), |key| format!("; did you mean `{key}`?"));
            let message =
                format!("unknown field `{}` of a job group has no effect{hint}", excerpt(&entry.key));
            notes.warn(entry.key_span, entry.key.clone(), message);
        }
    }
    let names = check_task_names(bodies, tasks, cx)?;
    let primary = primary_tasks(header, &names, cx);
    let termination_delay = termination_delays(header, &names, cx);
    let inter_connection = match header.field("inter_connection") {
        None => Some(None),
        Some(node) => cx
            .under("inter_connection", |cx| <bool as crate::config::decode::Decode>::decode(node, cx))
            .map(Some),
    };
    for (task, body) in tasks.iter().zip(bodies) {
        if !task.depends_on.is_empty() {
            cx.conflict(body, "depends_on", "`depends_on` and `execution: parallel` are mutually exclusive");
            return None;
        }
    }
    Some(JobGroup {
        name: String::new(),
        primary: primary?,
        termination_delay: termination_delay?,
        inter_connection: inter_connection?,
    })
}

/// Checks that names of tasks in a group are present, unique, and valid as host names.
fn check_task_names<'a>(bodies: &[Node], tasks: &'a [TaskDocument], cx: &mut Ctx) -> Option<Vec<&'a str>> {
    let mut names: Vec<&str> = Vec::new();
    let mut valid = true;
    for (task, body) in tasks.iter().zip(bodies) {
        let span = body.key_span("name");
        let problem = match task.task.name.as_deref() {
            None => Some((Code::MissingField, "each task of a job group requires a `name`".to_owned())),
            Some(name) if names.contains(&name) => {
                Some((Code::Conflict, format!("two tasks have the `name` `{}`", excerpt(name))))
            }
            Some(name) if !is_group_identifier(name) => Some((
                Code::InvalidValue,
                format!("`{}` is not a valid `name` for a task of a job group", excerpt(name)),
            )),
            Some(name) => {
                names.push(name);
                None
            }
        };
        if let Some((code, message)) = problem {
            valid = false;
            cx.problem(Diagnosis::new(code, span, message).at("name"));
        }
    }
    valid.then_some(names)
}

fn position(names: &[&str], name: &str) -> Option<u32> {
    names.iter().position(|known| *known == name).and_then(|at| u32::try_from(at).ok())
}

/// Returns the primary tasks; all tasks if the list is absent or empty.
fn primary_tasks(header: &Node, names: &[&str], cx: &mut Ctx) -> Option<Vec<u32>> {
    let all = || (0..names.len()).filter_map(|task| u32::try_from(task).ok()).collect();
    let Some(node) = header.field("primary_tasks") else { return Some(all()) };
    let Value::Seq(items) = &node.value else {
        return cx.under("primary_tasks", |cx| cx.wrong_type(node, "a list of names"));
    };
    let mut primary = Vec::new();
    for item in items {
        let name = cx.under("primary_tasks", |cx| text(item, cx))?;
        match position(names, name) {
            Some(task) if primary.contains(&task) => {}
            Some(task) => primary.push(task),
            None => return cx.fail(unknown_task("primary_tasks", name, item, names)),
        }
    }
    Some(if primary.is_empty() { all() } else { primary })
}

fn unknown_task(key: &str, name: &str, at: &Node, names: &[&str]) -> Diagnosis {
    let message = format!("`{key}` names `{}`, but no task has this name", excerpt(name));
    let hint = match closest(name, names.iter().copied()) {
        Some(name) => format!("did you mean `{name}`?"),
        None => format!("tasks: {}", names.join(", ")),
    };
    Diagnosis::new(Code::InvalidValue, at.span, message).at(key).hint(hint)
}

/// Returns one delay for each task.
fn termination_delays(header: &Node, names: &[&str], cx: &mut Ctx) -> Option<Vec<i64>> {
    const KEY: &str = "termination_delay";
    let Some(node) = header.field(KEY) else { return Some(vec![0; names.len()]) };
    let Value::Map(entries) = &node.value else {
        return Some(vec![decode_delay(node, cx)?; names.len()]);
    };
    let mut default = 0;
    let mut own: Vec<Option<i64>> = vec![None; names.len()];
    for entry in entries {
        let seconds = decode_delay(&entry.value, cx)?;
        if entry.key == "default" {
            default = seconds;
            continue;
        }
        match names.iter().position(|name| *name == entry.key) {
            Some(task) => own[task] = Some(seconds),
            None => {
                let at = Node { value: Value::Null, span: entry.key_span };
                return cx.fail(unknown_task(KEY, &entry.key, &at, names));
            }
        }
    }
    Some(own.into_iter().map(|seconds| seconds.unwrap_or(default)).collect())
}

fn decode_delay(node: &Node, cx: &mut Ctx) -> Option<i64> {
    cx.under("termination_delay", |cx| match parse_duration(text(node, cx)?) {
        Ok(seconds) => Some(seconds),
        Err(reason) => cx.invalid(node, reason),
    })
}
