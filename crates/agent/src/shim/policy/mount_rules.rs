//! Entries of `mounts`: directories of the host that tasks may mount, all tasks or those of certain projects.

use std::path::{Component, Path, PathBuf};

use windlass_model::config::{
    decode::{self, Ctx, Decode},
    yaml::{Node, Value},
};

/// A path or a mapping in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountRule {
    pub path: PathBuf,
    /// Projects whose tasks may mount it; `None`: all.
    pub projects: Option<Vec<String>>,
}

impl MountRule {
    fn admits(&self, project: &str) -> bool {
        self.projects.as_ref().is_none_or(|projects| projects.iter().any(|one| one == project))
    }
}

impl Decode for MountRule {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !matches!(node.value, Value::Map(_)) {
            return Some(Self { path: decode_path(node, cx)?, projects: None });
        }
        decode::check_keys(node, &["path", "projects"], cx);
        let path = match node.entry("path") {
            Some(entry) => cx.under("path", |cx| decode_path(&entry.value, cx)),
            None => {
                cx.missing(node, "path", "a mount needs a `path`");
                None
            }
        };
        let projects = decode::optional_field(node, "projects", cx, || None);
        Some(Self { path: path?, projects: projects? })
    }
}

fn decode_path(node: &Node, cx: &mut Ctx) -> Option<PathBuf> {
    let text = String::decode(node, cx)?;
    let path = Path::new(&text);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return cx.invalid(node, format!("`{text}` is not an absolute path without `..`"));
    }
    // Rebuilt from its components, so that `/mnt/` and `/mnt` are the same.
    Some(path.components().collect())
}

/// Decision of the entries about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MountDecision<'a> {
    /// An entry is exactly this path.
    Exact,
    /// The path is below that of an entry.
    Below,
    /// This path, which is the requested one, above it or below it, is for other projects.
    OtherProjects(&'a Path),
    NotListed,
}

/// Decides about a path for a task of a project. The entry with the longest path applies, and no mount exposes a
/// directory below it that is for other projects.
pub(super) fn decide<'a>(rules: &'a [MountRule], path: &Path, project: &str) -> MountDecision<'a> {
    let is_admitted = |entry: &Path| rules.iter().any(|rule| rule.path == entry && rule.admits(project));
    let mut inside = rules.iter().filter(|rule| rule.path != path && rule.path.starts_with(path));
    if let Some(other) = inside.find(|rule| !is_admitted(&rule.path)) {
        return MountDecision::OtherProjects(&other.path);
    }
    let above = rules.iter().filter(|rule| path.starts_with(&rule.path));
    match above.max_by_key(|rule| rule.path.components().count()) {
        None => MountDecision::NotListed,
        Some(rule) if !is_admitted(&rule.path) => MountDecision::OtherProjects(&rule.path),
        Some(rule) if rule.path == path => MountDecision::Exact,
        Some(_) => MountDecision::Below,
    }
}
