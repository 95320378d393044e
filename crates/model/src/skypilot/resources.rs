//! `resources`: alternatives for each node of a task.
//!
//! `any_of` and `ordered` list alternatives that inherit the fields next to them; several accelerators are alternatives
//! too. All of it becomes one flat list of candidates: the cheapest first, unless the file specifies an order.

use std::collections::BTreeMap;

use super::{
    ParseNotes,
    recovery::{self, OptionalRecovery},
    run_spec::is_tag,
};
use crate::{
    config::{
        decode::{Ctx, Decode, Int, check_keys, excerpt, expect_map, is_map, optional_field, scalar, text},
        error::{Code, Diagnosis},
        quantities::PositiveNumber,
        yaml::{Entry, Node, Value},
    },
    managed_job::plan::{Accelerator, Candidate, RecoveryPolicy, RequestedAmount},
};

/// Fields that are parsed and have no effect, each with the reported reason.
const IGNORED_FIELDS: [(&str, &str); 5] = [
    ("disk_tier", "the disk of a node is fixed"),
    ("network_tier", "the network of a node is fixed"),
    ("local_disk", "the disk of a node is fixed"),
    ("autostop", "nodes of a job are released when its task ends"),
    ("priority_class", "use `priority`"),
];

pub(super) const KEYS: [&str; 27] = [
    "cpus",
    "memory",
    "accelerators",
    "gpus",
    "use_spot",
    "any_of",
    "ordered",
    "job_recovery",
    "spot_recovery",
    "priority",
    "ports",
    "labels",
    "image_id",
    "infra",
    "accelerator_args",
    "disk_size",
    "disk_tier",
    "network_tier",
    "local_disk",
    "instance_type",
    "autostop",
    "max_hourly_cost",
    "cloud",
    "region",
    "zone",
    "volumes",
    "priority_class",
];

/// Maximum number of ports that one task may open.
const PORTS_MAX: usize = 1_000;
/// Maximum number of alternatives of one task.
const CANDIDATES_MAX: usize = 1_000;

/// Contents of `resources`.
#[derive(Default)]
pub(super) struct TaskResources {
    pub(super) candidates: Vec<Candidate>,
    /// The file lists alternatives without an order.
    pub(super) cheapest_first: bool,
    pub(super) recovery: RecoveryPolicy,
    pub(super) priority: Option<i32>,
}

/// One mapping of fields, including alternatives by accelerator.
struct ResourceMapping {
    candidates: Vec<Candidate>,
    recovery: OptionalRecovery,
    priority: Option<i32>,
}

pub(super) fn decode(node: &Node, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<TaskResources> {
    expect_map(node, cx)?;
    check_keys(node, &KEYS, cx);
    report_ignored_fields(node, "resources", notes);
    let outer = decode_mapping(node, "resources", cx, notes);
    let lists: Vec<&'static str> =
        ["any_of", "ordered"].into_iter().filter(|key| node.field(key).is_some()).collect();
    let (outer, key) = match lists.as_slice() {
        [] => {
            let outer = outer?;
            let recovery = outer.recovery.unwrap_or_default();
            // A list of accelerators is ordered, a mapping or a set of them is not.
            let gpus = node.field("accelerators").or_else(|| node.field("gpus"));
            let cheapest_first = gpus.is_some_and(is_map) && outer.candidates.len() > 1;
            let (candidates, priority) = (outer.candidates, outer.priority);
            return Some(TaskResources { candidates, cheapest_first, recovery, priority });
        }
        [key] => (outer?, *key),
        [_, second, ..] => {
            cx.conflict(node, second, "`any_of` and `ordered` are mutually exclusive");
            return None;
        }
    };
    alternatives(node, key, &outer, cx, notes)
}

/// Returns the items of `any_of` or `ordered`, each with the fields around it as its defaults.
fn alternatives(
    node: &Node,
    key: &'static str,
    outer: &ResourceMapping,
    cx: &mut Ctx,
    notes: &mut ParseNotes,
) -> Option<TaskResources> {
    let list = node.field(key)?;
    let Value::Seq(items) = &list.value else {
        return cx.under(key, |cx| cx.wrong_type(list, "a list of mappings"));
    };
    let inner: Vec<&'static str> =
        KEYS.into_iter().filter(|key| !matches!(*key, "any_of" | "ordered")).collect();
    let mut found: Vec<ResourceMapping> = Vec::new();
    let mut valid = true;
    for (index, item) in items.iter().enumerate() {
        let path = format!("resources.{key}[{index}]");
        let each = cx.under(key, |cx| {
            cx.at_index(index, |cx| {
                expect_map(item, cx)?;
                check_keys(item, &inner, cx);
                report_ignored_fields(item, &path, notes);
                decode_mapping(&merge_mappings(node, item), &path, cx, notes)
            })
        });
        valid &= each.is_some();
        found.extend(each);
    }
    if !valid {
        return None;
    }
    let Some(first) = found.first() else {
        cx.conflict(node, key, format!("`{key}` must not be empty"));
        return None;
    };
    let recovery = first.recovery.clone();
    if found.iter().any(|one| one.recovery != recovery) {
        let message = format!("`job_recovery` must be the same in every entry of `{key}`");
        cx.problem(Diagnosis::new(Code::Conflict, list.span, message).at("job_recovery"));
        return None;
    }
    let priority = found.iter().filter_map(|one| one.priority).max().or(outer.priority);
    let candidates: Vec<Candidate> = found.into_iter().flat_map(|one| one.candidates).collect();
    if candidates.len() > CANDIDATES_MAX {
        let message =
            format!("`{key}` expands to {} alternatives; the limit is {CANDIDATES_MAX}", candidates.len());
        return cx.fail(Diagnosis::new(Code::TooLarge, list.span, message).at(key));
    }
    let cheapest_first = key == "any_of";
    Some(TaskResources { candidates, cheapest_first, recovery: recovery.unwrap_or_default(), priority })
}

/// Returns the entries of `inner`, and those of `outer` that it does not have.
fn merge_mappings(outer: &Node, inner: &Node) -> Node {
    let (Value::Map(outer_entries), Value::Map(inner_entries)) = (&outer.value, &inner.value) else {
        return inner.clone();
    };
    let mut entries = inner_entries.clone();
    // Either spelling of accelerators replaces the other.
    let gpus = entries.iter().any(|entry| matches!(entry.key.as_str(), "accelerators" | "gpus"));
    let inherits = |entry: &&Entry| match entry.key.as_str() {
        "any_of" | "ordered" => false,
        "accelerators" | "gpus" => !gpus,
        key => inner.entry(key).is_none(),
    };
    entries.extend(outer_entries.iter().filter(inherits).cloned());
    Node { value: Value::Map(entries), span: inner.span }
}

/// Reports fields without effect, and fields that are not supported.
fn report_ignored_fields(node: &Node, path: &str, notes: &mut ParseNotes) {
    for (key, why) in IGNORED_FIELDS {
        if node.field(key).is_some() {
            notes.warn(node.key_span(key), format!("{path}.{key}"), format!("`{key}` has no effect: {why}"));
        }
    }
    if node.field("accelerator_args").is_some() {
        let message =
            "`accelerator_args` is not supported: it applies to TPUs, which windlass does not support";
        notes.refuse(node.key_span("accelerator_args"), format!("{path}.accelerator_args"), message, None);
    }
    if node.field("volumes").is_some() {
        let message = "`volumes` in `resources` is not supported: a node has the disk that its instance has";
        let hint = "mount volumes with `volumes` of the task: `{PATH: NAME}`".to_owned();
        notes.refuse(node.key_span("volumes"), format!("{path}.volumes"), message, Some(hint));
    }
}

fn decode_mapping(node: &Node, path: &str, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<ResourceMapping> {
    let cpus: Option<Option<CpuCount>> = optional_field(node, "cpus", cx, || None);
    let memory: Option<Option<MemoryRequest>> = optional_field(node, "memory", cx, || None);
    let accelerators = accelerators(node, path, cx, notes);
    let spot: Option<Option<bool>> = optional_field(node, "use_spot", cx, || None);
    let ports: Option<Option<PortList>> = optional_field(node, "ports", cx, || None);
    let labels: Option<Option<BTreeMap<String, String>>> = optional_field(node, "labels", cx, || None);
    let priority: Option<Option<Int<-1000, 1000>>> = optional_field(node, "priority", cx, || None);
    let infra = infra(node, cx);
    let max_price: Option<Option<PositiveNumber>> = optional_field(node, "max_hourly_cost", cx, || None);
    let disk: Option<Option<DiskSize>> = optional_field(node, "disk_size", cx, || None);
    let instance_type: Option<Option<String>> = optional_field(node, "instance_type", cx, || None);
    warn_labels(node, path, labels.as_ref().and_then(Option::as_ref), notes);
    let image = image(node, path, cx, notes);
    let recovery = recovery::field(node, cx, notes);
    let cpus = cpus?.map(|cpus| cpus.0);
    let base = Candidate {
        cpus,
        memory: memory?.and_then(|memory| memory.resolve(cpus)),
        accelerator: None,
        spot: spot?,
        image: image?,
        infra: infra?,
        max_price: max_price?.map(|price| price.0),
        disk: disk?.map(|size| size.0),
        instance_type: instance_type?,
        ports: ports?.map(|ports| ports.0).unwrap_or_default(),
        labels: labels?.unwrap_or_default(),
    };
    let accelerators = accelerators?;
    let candidates = if accelerators.is_empty() {
        vec![base]
    } else {
        accelerators
            .into_iter()
            .map(|accelerator| Candidate { accelerator: Some(accelerator), ..base.clone() })
            .collect()
    };
    Some(ResourceMapping {
        candidates,
        recovery: recovery?,
        priority: priority?.and_then(|n| i32::try_from(n.get()).ok()),
    })
}

/// Decodes `infra`, or the older fields `cloud`, `region` and `zone`, which mean the same.
fn infra(node: &Node, cx: &mut Ctx) -> Option<Option<String>> {
    const PARTS: [&str; 3] = ["cloud", "region", "zone"];
    let infra: Option<String> = optional_field(node, "infra", cx, || None)?;
    if let (Some(_), Some(part)) = (&infra, PARTS.into_iter().find(|part| node.field(part).is_some())) {
        cx.conflict(
            node,
            part,
            format!("`infra` and `{part}` are mutually exclusive: write `infra: CLOUD/REGION/ZONE`"),
        );
        return None;
    }
    let mut parts = Vec::new();
    for part in PARTS {
        let value: Option<String> = optional_field(node, part, cx, || None)?;
        parts.push(value.unwrap_or_else(|| "*".to_owned()));
    }
    while parts.last().is_some_and(|part| part == "*") {
        parts.pop();
    }
    Some(infra.or_else(|| Some(parts.join("/"))).filter(|infra| !infra.is_empty() && infra != "*"))
}

/// Warns about labels that cannot become tags, which allow fewer characters.
fn warn_labels(node: &Node, path: &str, labels: Option<&BTreeMap<String, String>>, notes: &mut ParseNotes) {
    let left_out = |(key, value): &(&String, &String)| !is_tag(key, value);
    for (key, value) in labels.into_iter().flatten().filter(left_out) {
        let message = format!(
            "label `{}: {}` is ignored: a tag allows only letters, digits, `_` and `-`",
            excerpt(key),
            excerpt(value)
        );
        notes.warn(node.key_span("labels"), format!("{path}.labels"), message);
    }
}

/// Returns the image of a mapping by region, if it is the same in all regions.
fn image_of_all_regions(node: &Node) -> Option<&str> {
    let Value::Map(entries) = &node.value else { return None };
    let mut words = entries.iter().map(|entry| scalar(&entry.value).map(|word| word.text.as_str()));
    let first = words.next()??;
    words.all(|word| word == Some(first)).then_some(first)
}

/// Decodes `docker:IMAGE`, also as a mapping by region; anything else is a machine image, which parses and cannot be launched.
fn image(node: &Node, path: &str, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<Option<String>> {
    let Some(value) = node.field("image_id") else { return Some(None) };
    let word = match is_map(value) {
        true => image_of_all_regions(value),
        false => Some(cx.under("image_id", |cx| text(value, cx))?),
    };
    if let Some(image) = word.and_then(|word| word.strip_prefix("docker:")) {
        if image.is_empty() {
            return cx.under("image_id", |cx| cx.invalid(value, "expected an image after `docker:`"));
        }
        return Some(Some(image.to_owned()));
    }
    if is_map(value) && word.is_none() {
        let message = "`image_id` names different images by region; windlass supports one container image";
        let hint = "list the regions in `any_of`, each with its `image_id: docker:IMAGE`".to_owned();
        notes.refuse(node.key_span("image_id"), format!("{path}.image_id"), message, Some(hint));
        return Some(None);
    }
    let message = "`image_id` names a machine image; windlass supports only container images";
    let hint = "use `image_id: docker:IMAGE`".to_owned();
    notes.refuse(node.key_span("image_id"), format!("{path}.image_id"), message, Some(hint));
    Some(None)
}

/// Parses a positive number such as `4`, `4+`, `0.5`, and returns the rest of the text.
fn number(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let of: f64 = text[..end].parse().ok()?;
    (of.is_finite() && of > 0.0).then_some((of, text[end..].trim()))
}

struct CpuCount(RequestedAmount);

impl Decode for CpuCount {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        match number(word) {
            Some((of, "")) => Some(Self(RequestedAmount { of, or_more: false })),
            Some((of, "+")) => Some(Self(RequestedAmount { of, or_more: true })),
            Some(_) | None => {
                cx.invalid(node, format!("`{}` is not an amount such as 4 or 4+", excerpt(word)))
            }
        }
    }
}

enum MemoryRequest {
    Gb(RequestedAmount),
    /// `4x`: an amount per CPU.
    PerCpu(f64),
}

impl MemoryRequest {
    fn resolve(self, cpus: Option<RequestedAmount>) -> Option<RequestedAmount> {
        match self {
            Self::Gb(amount) => Some(amount),
            Self::PerCpu(factor) => cpus.map(|cpus| RequestedAmount { of: cpus.of * factor, or_more: true }),
        }
    }
}

impl Decode for MemoryRequest {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        let bad = |cx: &mut Ctx| {
            cx.invalid(node, format!("`{}` is not a size in GB such as 16, 16+ or 64GB", excerpt(word)))
        };
        let Some((of, rest)) = number(word) else { return bad(cx) };
        if rest == "x" {
            return Some(Self::PerCpu(of));
        }
        let (unit, or_more) = match rest.strip_suffix('+') {
            Some(unit) => (unit.trim(), true),
            None => (rest, false),
        };
        let Some(factor) = gigabytes_per(unit) else { return bad(cx) };
        Some(Self::Gb(RequestedAmount { of: of * factor, or_more }))
    }
}

/// Returns the factor of a unit; without a unit, sizes are in gigabytes.
fn gigabytes_per(unit: &str) -> Option<f64> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "g" | "gb" | "gi" | "gib" => Some(1.0),
        "m" | "mb" | "mi" | "mib" => Some(1.0 / 1024.0),
        "t" | "tb" | "ti" | "tib" => Some(1024.0),
        _ => None,
    }
}

/// Size of a disk in gigabytes.
struct DiskSize(f64);

impl Decode for DiskSize {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        match number(word).and_then(|(of, unit)| Some(of * gigabytes_per(unit)?)) {
            Some(size) => Some(Self(size)),
            None => cx.invalid(node, format!("`{}` is not a size in GB such as 100 or 100GB", excerpt(word))),
        }
    }
}

struct PortList(Vec<u16>);

impl Decode for PortList {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let items: Vec<&Node> = match &node.value {
            Value::Seq(items) => items.iter().collect(),
            Value::Null | Value::Scalar(_) | Value::Map(_) => vec![node],
        };
        let mut ports = Vec::new();
        for item in items {
            let word = text(item, cx)?;
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
            match (port(first), port(last)) {
                (Some(first), Some(last)) if first <= last => ports.extend(first..=last),
                (_, _) => {
                    return cx.invalid(
                        item,
                        format!("`{}` is not a port or a range such as 8000-8010", excerpt(word)),
                    );
                }
            }
            if ports.len() > PORTS_MAX {
                return cx.out_of_range(item, format!("opens more than {PORTS_MAX} ports"));
            }
        }
        Some(Self(ports))
    }
}

/// Returns all accelerators of `accelerators` or `gpus`; empty if there are none.
fn accelerators(node: &Node, path: &str, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<Vec<Accelerator>> {
    let key = match (node.field("accelerators"), node.field("gpus")) {
        (None, None) => return Some(vec![]),
        (Some(_), None) => "accelerators",
        (None, Some(_)) => "gpus",
        (Some(_), Some(_)) => {
            cx.conflict(node, "gpus", "`gpus` and `accelerators` mean the same; set only one of them");
            return None;
        }
    };
    let value = node.field(key)?;
    let found = cx.under(key, |cx| match &value.value {
        Value::Scalar(_) => accelerator(value, cx).map(|one| vec![one]),
        Value::Seq(items) => {
            items.iter().enumerate().map(|(i, item)| cx.at_index(i, |cx| accelerator(item, cx))).collect()
        }
        Value::Map(entries) => entries.iter().map(|entry| decode_keyed_accelerators(entry, cx)).collect(),
        Value::Null => Some(vec![]),
    })?;
    if let Some(tpu) = found.iter().find(|one| one.name.to_ascii_lowercase().starts_with("tpu")) {
        let message = format!("`{}` is a TPU, which windlass does not support", tpu.name);
        notes.refuse(node.key_span(key), format!("{path}.{key}"), message, None);
    }
    for part in found.iter().filter(|one| one.count.fract() != 0.0) {
        let message = format!("`{}:{}` uses a whole GPU: a GPU cannot be shared", part.name, part.count);
        notes.warn(node.key_span(key), format!("{path}.{key}"), message);
    }
    Some(found)
}

fn accelerator(node: &Node, cx: &mut Ctx) -> Option<Accelerator> {
    let word = text(node, cx)?;
    match parse_accelerator(word) {
        Some(one) => Some(one),
        None => cx.invalid(node, format!("`{}` is not an accelerator such as H100 or H100:8", excerpt(word))),
    }
}

/// Decodes `{A100: 8}`, or `{A100:8}`, which is a key without a value.
fn decode_keyed_accelerators(entry: &Entry, cx: &mut Ctx) -> Option<Accelerator> {
    let bad = |cx: &mut Ctx, what: &str| {
        let message = format!("invalid `{}`: {what}", cx.field());
        cx.fail(Diagnosis::new(Code::InvalidValue, entry.key_span, message))
    };
    let what = || format!("`{}` is not an accelerator such as H100 or H100:8", excerpt(&entry.key));
    match scalar(&entry.value) {
        None if entry.value.value == Value::Null => match parse_accelerator(&entry.key) {
            Some(one) => Some(one),
            None => bad(cx, &what()),
        },
        None => bad(cx, "the count must be a number"),
        Some(count) => match number(&count.text) {
            Some((count, "")) if is_accelerator_name(&entry.key) => {
                Some(Accelerator { name: entry.key.clone(), count })
            }
            Some(_) | None => bad(cx, &what()),
        },
    }
}

fn parse_accelerator(word: &str) -> Option<Accelerator> {
    let (name, count) = match word.trim().split_once(':') {
        None => (word.trim(), 1.0),
        Some((name, count)) => match number(count) {
            Some((count, "")) => (name.trim(), count),
            Some(_) | None => return None,
        },
    };
    is_accelerator_name(name).then(|| Accelerator { name: name.to_owned(), count })
}

fn is_accelerator_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}
