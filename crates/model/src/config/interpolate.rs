//! `${{ namespace.name }}` inside values: parsing, checking and substitution.
//!
//! Substitution is a single pass: an inserted value is never parsed again, so a secret whose value resembles a
//! reference stays text. `$$` is a literal `$`; `$X` and `${X}` belong to the shell and are left unchanged.

use std::fmt;

use super::{
    decode::{Ctx, scalar},
    error::{Code, Diagnosis, SourcePos, SourceSpan},
    yaml::{Node, Value},
};

/// A parsed reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// `run.args`, `env.X`, `secrets.X`, `dstack.node_rank`, `run.project_name`.
    Named { namespace: String, name: String },
    /// `groups[i].nodes[j].IP_ADDRESS` (tasks) or `groups[i].replicas[j].IP_ADDRESS` (services).
    Address { group: u32, member: u32, of: GroupMembers },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupMembers {
    Nodes,
    Replicas,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named { namespace, name } => write!(f, "{namespace}.{name}"),
            Self::Address { group, member, of: GroupMembers::Nodes } => {
                write!(f, "groups[{group}].nodes[{member}].IP_ADDRESS")
            }
            Self::Address { group, member, of: GroupMembers::Replicas } => {
                write!(f, "groups[{group}].replicas[{member}].IP_ADDRESS")
            }
        }
    }
}

/// A text that cannot be interpolated: the position (in bytes from its start) and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Error {
    pub at: usize,
    pub len: usize,
    pub reason: String,
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a str),
    /// `$$`.
    Dollar,
    Reference {
        reference: Reference,
        source: &'a str,
        at: usize,
    },
}

/// Splits a text into its parts.
pub fn split_pieces(text: &str) -> Result<Vec<Piece<'_>>, Error> {
    let mut pieces = Vec::new();
    let (mut from, mut at) = (0, 0);
    while let Some(found) = text[at..].find('$') {
        let dollar = at + found;
        let rest = &text[dollar..];
        if rest.starts_with("$$") {
            pieces.push(Piece::Text(&text[from..dollar]));
            pieces.push(Piece::Dollar);
            at = dollar + 2;
            from = at;
        } else if rest.starts_with("${{") {
            let Some(end) = rest.find("}}") else {
                return Err(Error { at: dollar, len: 3, reason: "`${{` has no closing `}}`".to_owned() });
            };
            let source = &rest[..end + 2];
            let fail = |reason| Error { at: dollar, len: source.len(), reason };
            let reference = parse(rest[3..end].trim()).map_err(fail)?;
            pieces.push(Piece::Text(&text[from..dollar]));
            pieces.push(Piece::Reference { reference, source, at: dollar });
            at = dollar + source.len();
            from = at;
        } else {
            at = dollar + 1;
        }
    }
    pieces.push(Piece::Text(&text[from..]));
    pieces.retain(|piece| *piece != Piece::Text(""));
    Ok(pieces)
}

/// Returns the references of a text, in order.
pub fn references(text: &str) -> Result<Vec<Reference>, Error> {
    let found = split_pieces(text)?.into_iter().filter_map(|piece| match piece {
        Piece::Reference { reference, .. } => Some(reference),
        Piece::Text(_) | Piece::Dollar => None,
    });
    Ok(found.collect())
}

/// Result of resolving a reference.
pub enum Substitution {
    Value(String),
    /// Not resolved in this pass: the reference stays in the text.
    Keep,
}

/// Treatment of `$$`: the first of two passes (client, then server) replaces it by one dollar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DollarEscape {
    Unescape,
    Keep,
}

/// Replaces every reference by the result of `resolve`; an error names the reference.
pub fn substitute(
    text: &str,
    dollars: DollarEscape,
    mut resolve: impl FnMut(&Reference) -> Result<Substitution, String>,
) -> Result<String, Error> {
    let mut out = String::with_capacity(text.len());
    for piece in split_pieces(text)? {
        match piece {
            Piece::Text(text) => out.push_str(text),
            Piece::Dollar => out.push_str(if dollars == DollarEscape::Unescape { "$" } else { "$$" }),
            Piece::Reference { reference, source, at } => match resolve(&reference) {
                Ok(Substitution::Value(value)) => out.push_str(&value),
                Ok(Substitution::Keep) => out.push_str(source),
                Err(reason) => return Err(Error { at, len: source.len(), reason }),
            },
        }
    }
    Ok(out)
}

/// Escapes a text so that it contains no references.
pub fn escape(text: &str) -> String {
    text.replace('$', "$$")
}

fn parse(inside: &str) -> Result<Reference, String> {
    if inside.starts_with("groups[") {
        return parse_address(inside).ok_or_else(|| {
            format!("`{inside}` is not of the form `groups[i].nodes[j].IP_ADDRESS` or `groups[i].replicas[j].IP_ADDRESS`")
        });
    }
    let word = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    match inside.split_once('.') {
        Some((namespace, name)) if word(namespace) && word(name) => {
            Ok(Reference::Named { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        Some(_) | None => Err(format!("`{inside}` is not of the form `namespace.name`")),
    }
}

fn parse_address(inside: &str) -> Option<Reference> {
    let index = |text: &str| -> Option<u32> {
        text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
    };
    let (group, rest) = inside.strip_prefix("groups[")?.split_once("].")?;
    let (of, rest) = match rest.strip_prefix("nodes[") {
        Some(rest) => (GroupMembers::Nodes, rest),
        None => (GroupMembers::Replicas, rest.strip_prefix("replicas[")?),
    };
    let member = rest.strip_suffix("].IP_ADDRESS")?;
    Some(Reference::Address { group: index(group)?, member: index(member)?, of })
}

/// Kind of configuration that is checked, with the sizes of its groups.
#[derive(Clone, Copy)]
pub enum ReferenceScope<'a> {
    Task(Option<&'a [i64]>),
    Service(Option<&'a [i64]>),
    DevEnvironment,
    Gateway,
}

/// References allowed in one field.
struct AllowedReferences<'a> {
    names: &'static [(&'static str, Option<&'static str>)],
    addresses: Option<(GroupMembers, Option<&'a [i64]>)>,
}

const SECRETS: (&str, Option<&str>) = ("secrets", None);
const ENV: (&str, Option<&str>) = ("env", None);

/// Checks the references of all interpolated fields, in files that users write.
pub(crate) fn check(node: &Node, place: ReferenceScope<'_>, cx: &mut Ctx) {
    if !cx.is_strict() {
        return;
    }
    let only = |names| AllowedReferences { names, addresses: None };
    if let ReferenceScope::Gateway = place {
        check_field(node, "domain", &only(&[("run", Some("project_name"))]), cx);
        return;
    }
    let addresses = match place {
        ReferenceScope::Task(sizes) => Some((GroupMembers::Nodes, sizes)),
        ReferenceScope::Service(sizes) => Some((GroupMembers::Replicas, sizes)),
        ReferenceScope::DevEnvironment | ReferenceScope::Gateway => None,
    };
    // Secrets in commands are not replaced; a shell receives them through the environment.
    let commands = AllowedReferences { names: &[("run", Some("args")), SECRETS], addresses };
    check_field(node, "commands", &commands, cx);
    if let Some(Value::Seq(groups)) = node.field("groups").map(|groups| &groups.value) {
        for (index, group) in groups.iter().enumerate() {
            cx.under("groups", |cx| cx.at_index(index, |cx| check_field(group, "commands", &commands, cx)));
        }
    }
    check_field(node, "env", &only(&[SECRETS]), cx);
    check_field(node, "registry_auth", &only(&[ENV, SECRETS]), cx);
    check_field(node, "probes", &only(&[ENV]), cx);
    let ranks = only(&[("dstack", Some("node_rank")), ("dstack", Some("job_num"))]);
    check_field(node, "volumes", &ranks, cx);
}

fn check_field(node: &Node, key: &'static str, allowed: &AllowedReferences<'_>, cx: &mut Ctx) {
    if let Some(value) = node.field(key) {
        cx.under(key, |cx| check_tree(value, allowed, cx));
    }
}

fn check_tree(node: &Node, allowed: &AllowedReferences<'_>, cx: &mut Ctx) {
    match &node.value {
        Value::Null => {}
        Value::Seq(items) => {
            for (index, item) in items.iter().enumerate() {
                cx.at_index(index, |cx| check_tree(item, allowed, cx));
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                cx.under(entry.key.clone(), |cx| check_tree(&entry.value, allowed, cx));
            }
        }
        Value::Scalar(word) => match split_pieces(&word.text) {
            Err(error) => report(node, error.at, error.len, &error.reason, cx),
            Ok(pieces) => {
                for piece in pieces {
                    if let Piece::Reference { reference, source, at } = piece
                        && !cx.is_full()
                        && let Err(reason) = allowed.check(&reference)
                    {
                        report(node, at, source.len(), &reason, cx);
                    }
                }
            }
        },
    }
}

fn report(node: &Node, at: usize, len: usize, reason: &str, cx: &mut Ctx) {
    cx.problem(Diagnosis::new(Code::Interpolation, span_within(node, at, len), reason));
}

/// Returns the position of a part of a one-line value. For folded and block values, returns the span of the whole
/// value.
fn span_within(node: &Node, at: usize, len: usize) -> SourceSpan {
    let (start, end) = (node.span.start, node.span.end);
    let Some(word) = scalar(node) else { return node.span };
    let chars = |bytes: usize| u32::try_from(word.text[..bytes].chars().count()).unwrap_or(0);
    let width = chars(word.text.len());
    let quotes = end.column.saturating_sub(start.column).saturating_sub(width);
    if start.line != end.line || quotes > 2 {
        return node.span;
    }
    let column = start.column + quotes / 2 + chars(at);
    let stop = start.column + quotes / 2 + chars(at + len);
    SourceSpan { start: SourcePos { column, ..start }, end: SourcePos { column: stop, ..start } }
}

impl AllowedReferences<'_> {
    fn check(&self, reference: &Reference) -> Result<(), String> {
        match reference {
            Reference::Named { namespace, name } => {
                let fits = |(space, only): &(&str, Option<&str>)| {
                    space == namespace && only.is_none_or(|only| only == name)
                };
                if self.names.iter().any(fits) {
                    return Ok(());
                }
                let known: Vec<String> = self
                    .names
                    .iter()
                    .map(|(space, name)| format!("`{space}.{}`", name.unwrap_or("NAME")))
                    .collect();
                Err(format!("`{reference}` is not available here; available names: {}", known.join(", ")))
            }
            Reference::Address { group, member, of } => self.check_address(*group, *member, *of),
        }
    }

    fn check_address(&self, group: u32, member: u32, of: GroupMembers) -> Result<(), String> {
        let (expected, sizes) = match self.addresses {
            None => return Err("addresses of groups can be used only in `commands`".to_owned()),
            Some((expected, sizes)) => (expected, sizes.unwrap_or(&[])),
        };
        if of != expected {
            let right = if expected == GroupMembers::Nodes { "nodes" } else { "replicas" };
            return Err(format!("use `{right}` for the members of these groups"));
        }
        match usize::try_from(group).ok().and_then(|group| sizes.get(group)) {
            None => Err(format!("group {group} does not exist; groups are numbered from 0")),
            Some(size) if i64::from(member) >= *size => {
                Err(format!("group {group} has no member {member}: it has at least {size}, numbered from 0"))
            }
            Some(_) => Ok(()),
        }
    }
}
