//! Contents mounted or copied into a container: volumes, host directories, files, a repository.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{Ctx, Decode, check_keys, excerpt, is_map, optional_field, required_field, text},
    error::{Code, Diagnosis},
    name::ResourceReference,
    quantities::OneOrMany,
    yaml::Node,
};

/// A mount point: a volume by name, or a directory of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Mount {
    Volume(VolumeMount),
    Instance(InstanceMount),
}

/// Returns whether instances can clone from a URL: not from local files, and not without encryption.
pub fn is_clonable(url: &str) -> bool {
    match url.split_once("://") {
        Some((scheme, _)) => matches!(scheme.to_ascii_lowercase().as_str(), "https" | "ssh" | "git"),
        // `login@host:path`
        None => url.split_once(':').is_some_and(|(login, _)| !login.contains('/') && !login.is_empty()),
    }
}

/// Returns the last component of a URL, without `.git`.
pub fn repository_name(url: &str) -> &str {
    let last = url.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or_default();
    let name = last.strip_suffix(".git").unwrap_or(last);
    if name.is_empty() { "repo" } else { name }
}

/// A volume to mount. Several names are alternatives: the first usable one is mounted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeMount {
    pub name: OneOrMany,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstanceMount {
    pub instance_path: String,
    pub path: String,
    /// True if the job may also run on a host that cannot mount the directory.
    pub optional: bool,
}

impl Mount {
    pub fn path(&self) -> &str {
        match self {
            Self::Volume(mount) => &mount.path,
            Self::Instance(mount) => &mount.path,
        }
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let Some((source, path)) = text.rsplit_once(':') else {
            return Err(format!("`{}` is not of the form `name:/path` or `/host/path:/path`", excerpt(text)));
        };
        check_path(path)?;
        let (source, path) = (source.to_owned(), path.to_owned());
        // `project/name` is a volume of another project.
        let is_volume = |named: ResourceReference| {
            named.name != ".." && !named.project.is_some_and(|project| project.starts_with(['.', '~']))
        };
        if source.contains('/') && !ResourceReference::parse(&source).is_some_and(is_volume) {
            check_path(&source)?;
            return Ok(Self::Instance(InstanceMount { instance_path: source, path, optional: false }));
        }
        if source.is_empty() || source.contains(':') {
            return Err(format!("`{}` is not of the form `name:/path` or `/host/path:/path`", excerpt(text)));
        }
        Ok(Self::Volume(VolumeMount { name: OneOrMany::One(source), path }))
    }
}

fn check_path(path: &str) -> Result<(), String> {
    let reason = if !path.starts_with('/') {
        "is not absolute"
    } else if path.split('/').any(|part| part == "..") {
        "contains `..`"
    } else if path.ends_with('/') {
        "ends with `/`"
    } else if path.contains('\0') {
        "contains a NUL character"
    } else {
        return Ok(());
    };
    Err(format!("path `{}` {reason}", excerpt(path)))
}

/// A path that is valid as a mount point.
struct MountPath(String);

impl Decode for MountPath {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let path = text(node, cx)?;
        match check_path(path) {
            Ok(()) => Some(Self(path.to_owned())),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

impl Decode for Mount {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !is_map(node) {
            return match Self::parse(text(node, cx)?) {
                Ok(mount) => Some(mount),
                Err(reason) => cx.invalid(node, reason),
            };
        }
        if node.entry("instance_path").is_some() {
            check_keys(node, &["instance_path", "path", "optional"], cx);
            let instance_path: Option<MountPath> = required_field(node, "instance_path", cx);
            let path: Option<MountPath> = required_field(node, "path", cx);
            let optional = optional_field(node, "optional", cx, || false);
            return Some(Self::Instance(InstanceMount {
                instance_path: instance_path?.0,
                path: path?.0,
                optional: optional?,
            }));
        }
        check_keys(node, &["name", "path"], cx);
        let name = required_field(node, "name", cx);
        let path: Option<MountPath> = required_field(node, "path", cx);
        Some(Self::Volume(VolumeMount { name: name?, path: path?.0 }))
    }
}

/// A local file or directory and its target: relative to the working directory unless absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileMapping {
    pub local_path: String,
    pub path: String,
}

impl FileMapping {
    pub fn parse(text: &str) -> Result<Self, String> {
        // A single letter before the colon is a Windows drive.
        let from = if text.as_bytes().get(1) == Some(&b':') && text.as_bytes()[0].is_ascii_alphabetic() {
            2
        } else {
            0
        };
        let (local, path) = match text[from..].find(':') {
            None => (text, text),
            Some(at) => (&text[..from + at], &text[from + at + 1..]),
        };
        if local.is_empty() || path.is_empty() || path.contains(':') && from == 0 {
            return Err(format!("`{}` is not of the form `local` or `local:container`", excerpt(text)));
        }
        Ok(Self { local_path: local.to_owned(), path: path.to_owned() })
    }
}

impl Decode for FileMapping {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !is_map(node) {
            return match Self::parse(text(node, cx)?) {
                Ok(mapping) => Some(mapping),
                Err(reason) => cx.invalid(node, reason),
            };
        }
        check_keys(node, &["local_path", "path"], cx);
        let local_path = required_field(node, "local_path", cx);
        let path = required_field(node, "path", cx);
        Some(Self { local_path: local_path?, path: path? })
    }
}

words! {
    /// Behaviour if the target directory of a repository is not empty.
    pub enum RepoExists {
        Error = "error",
        Skip = "skip",
    }
}

table! {
    /// A Git repository that is cloned before the first command.
    pub struct RepoSpec {
        /// A directory inside a clone on the client's machine.
        pub local_path: Option<String> = None,
        /// URL to clone from.
        pub url: Option<String> = None,
        /// Branch to check out; only with `url`.
        pub branch: Option<String> = None,
        /// Commit to check out; only with `url`.
        pub hash: Option<String> = None,
        /// Target directory: relative to the working directory unless absolute.
        pub path: String = ".".to_owned(),
        /// Behaviour if `path` is not empty.
        pub if_exists: RepoExists = RepoExists::Error,
    }
    check = Self::check;
    title = "RepoObject";
}

impl RepoSpec {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.local_path.is_some() == self.url.is_some() {
            let message = "a repository requires either `local_path` or `url`, not both";
            cx.problem(Diagnosis::new(Code::Conflict, node.span, message));
        }
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let bad =
            || format!("`{}` is not of the form `path`, `url`, `path:/dir` or `url:/dir`", excerpt(text));
        // Length of the prefix in which a colon belongs to the URL and does not separate the path.
        let prefix = if let Some(at) = text.find("://") {
            at + 3 + text[at + 3..].find('/').unwrap_or(text.len() - at - 3)
        } else if text.split('/').next().is_some_and(|head| head.contains('@') && head.contains(':')) {
            text.find(':').map_or(0, |at| at + 1)
        } else if text.as_bytes().get(1) == Some(&b':') && text.as_bytes()[0].is_ascii_alphabetic() {
            2
        } else {
            0
        };
        let is_url = prefix > 2;
        let (source, path) = match text[prefix..].find(':') {
            None => (text, "."),
            Some(at) => (&text[..prefix + at], &text[prefix + at + 1..]),
        };
        if source.is_empty() || path.is_empty() || path.contains(':') {
            return Err(bad());
        }
        let (local_path, url) = if is_url { (None, Some(source)) } else { (Some(source), None) };
        Ok(Self {
            local_path: local_path.map(str::to_owned),
            url: url.map(str::to_owned),
            branch: None,
            hash: None,
            path: path.to_owned(),
            if_exists: RepoExists::Error,
        })
    }
}

/// A repository in the short or the long syntax.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Repo(pub RepoSpec);

impl Decode for Repo {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            return RepoSpec::decode(node, cx).map(Self);
        }
        match RepoSpec::parse(text(node, cx)?) {
            Ok(spec) => Some(Self(spec)),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

deserialize_by_decoding!(Mount, FileMapping, Repo);

schema_literal! {
    Mount, "Mount" => _g { "anyOf": [
        { "type": "string", "pattern": "^.+:/.*[^/]$" },
        { "type": "object", "required": ["name", "path"], "additionalProperties": false, "properties": {
            "name": { "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] },
            "path": { "type": "string", "pattern": "^/" } } },
        { "type": "object", "required": ["instance_path", "path"], "additionalProperties": false, "properties": {
            "instance_path": { "type": "string", "pattern": "^/" },
            "path": { "type": "string", "pattern": "^/" },
            "optional": { "type": "boolean", "default": false } } },
    ] };
    FileMapping, "File" => _g { "anyOf": [
        { "type": "string", "minLength": 1 },
        { "type": "object", "required": ["local_path", "path"], "additionalProperties": false, "properties": {
            "local_path": { "type": "string" }, "path": { "type": "string" } } },
    ] };
    Repo, "Repo" => generator { "anyOf": [
        { "type": "string", "minLength": 1 },
        super::schema::subschema::<RepoSpec>(generator),
    ] };
}
