//! Names of runs, fleets and groups, references to other projects, tags, and users inside a container.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal},
    decode::{Ctx, Decode, check_keys, excerpt, is_map, optional_field, required_field, scalar, text},
    error::{Code, Diagnosis},
    yaml::{Node, Value},
};

/// Returns whether the name has lower case letters, digits and dashes, a letter first, and 2 to 41 characters.
pub fn is_resource_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    (2..=41).contains(&name.len())
        && bytes.next().is_some_and(|b| b.is_ascii_lowercase())
        && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Returns whether the name has lower case letters, digits and dashes, no dash first, and 1 to 40 characters.
pub fn is_group_name(name: &str) -> bool {
    (1..=40).contains(&name.len())
        && !name.starts_with('-')
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Name of a run, fleet, volume or gateway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Name(pub String);

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Decode for Name {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let name = text(node, cx)?;
        if is_resource_name(name) {
            return Some(Self(name.to_owned()));
        }
        let message = format!("`{}` is not a valid name", excerpt(name));
        let hint = "use 2 to 41 lowercase letters, digits and dashes, starting with a letter";
        cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).hint(hint))
    }
}

/// Name of a group of nodes or replicas.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct GroupName(pub String);

impl Decode for GroupName {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let name = text(node, cx)?;
        if is_group_name(name) {
            return Some(Self(name.to_owned()));
        }
        let message = format!("`{}` is not a valid group name", excerpt(name));
        let hint = "use 1 to 40 lowercase letters, digits and dashes, not starting with a dash";
        cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).hint(hint))
    }
}

/// A resource of this project (`gpus`) or of another one (`lab/gpus`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ResourceReference {
    pub project: Option<String>,
    pub name: String,
}

impl ResourceReference {
    pub fn parse(text: &str) -> Option<Self> {
        let (project, name) = match text.split_once('/') {
            None => (None, text),
            Some((project, name)) => (Some(project), name),
        };
        let valid = !name.is_empty() && !name.contains('/') && project != Some("");
        valid.then(|| Self { project: project.map(str::to_owned), name: name.to_owned() })
    }
}

/// Prints `name` or `project/name`.
impl fmt::Display for ResourceReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(project) = &self.project {
            write!(f, "{project}/")?;
        }
        f.write_str(&self.name)
    }
}

impl Decode for ResourceReference {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if is_map(node) {
            check_keys(node, &["project", "name"], cx);
            let project = optional_field(node, "project", cx, || None);
            let name = required_field(node, "name", cx);
            return Some(Self { project: project?, name: name? });
        }
        let word = text(node, cx)?;
        match Self::parse(word) {
            Some(reference) => Some(reference),
            None => {
                cx.invalid(node, format!("`{}` is not of the form `name` or `project/name`", excerpt(word)))
            }
        }
    }
}

/// Labels for billing and search, passed on to backends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Tags(pub BTreeMap<String, String>);

fn is_tag_key(key: &str) -> bool {
    (1..=60).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

fn is_tag_value(value: &str) -> bool {
    value.len() <= 256 && value.bytes().all(|b| b.is_ascii_alphanumeric() || b" .:/=_-+@".contains(&b))
}

impl Decode for Tags {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let tags = BTreeMap::<String, String>::decode(node, cx)?;
        let Value::Map(entries) = &node.value else { return None };
        let mut valid = true;
        for entry in entries {
            let value = &tags[&entry.key];
            let reason = if !is_tag_key(&entry.key) {
                "a tag key consists of 1 to 60 letters, digits, `_` and `-`"
            } else if !is_tag_value(value) {
                "a tag value consists of at most 256 letters, digits, spaces and `.:/=_-+@`"
            } else {
                continue;
            };
            valid = false;
            let message = format!("invalid tag `{}`: {reason}", excerpt(&entry.key));
            cx.problem(Diagnosis::new(Code::InvalidValue, entry.key_span, message).at(entry.key.clone()));
        }
        valid.then_some(Self(tags))
    }
}

/// A user inside a container: `name_or_id[:group_or_id]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct User(pub String);

/// A user inside a container, parsed, as agents receive it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(default)]
pub struct UnixUser {
    pub uid: Option<u32>,
    pub username: Option<String>,
    pub gid: Option<u32>,
    pub groupname: Option<String>,
}

impl UnixUser {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let (user, group) = (parts.next().unwrap_or_default(), parts.next());
        if parts.next().is_some() || user.trim().is_empty() || group.is_some_and(|g| g.trim().is_empty()) {
            return Err(format!("`{}` is not of the form `user` or `user:group`", excerpt(text)));
        }
        let split = |word: &str| -> Result<(Option<u32>, Option<String>), String> {
            let word = word.trim();
            if word.bytes().all(|b| b.is_ascii_digit()) {
                return word
                    .parse()
                    .map(|id| (Some(id), None))
                    .map_err(|_| format!("`{word}` is too large for a user or group ID"));
            }
            if word.starts_with('-') {
                return Err(format!("`{}` is not a valid user name", excerpt(word)));
            }
            Ok((None, Some(word.to_owned())))
        };
        let (uid, username) = split(user)?;
        let (gid, groupname) = group.map(split).transpose()?.unwrap_or_default();
        Ok(Self { uid, username, gid, groupname })
    }
}

impl Decode for User {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        match UnixUser::parse(word) {
            Ok(_) => Some(Self(word.to_owned())),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

/// Python version of the default image: `3.9` to `3.15`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct PythonVersion(pub String);

pub const PYTHON_VERSIONS: [&str; 7] = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"];

impl Decode for PythonVersion {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        // A YAML reader that parses 3.10 as a number passes on 3.1, which is not a supported version.
        let plain = scalar(node).is_some_and(|scalar| scalar.plain);
        let version = if plain && word == "3.1" { "3.10" } else { word };
        if PYTHON_VERSIONS.contains(&version) {
            return Some(Self(version.to_owned()));
        }
        let message = format!("`{}` is not a supported Python version", excerpt(word));
        let hint = format!("use one of {}", PYTHON_VERSIONS.join(", "));
        cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).hint(hint))
    }
}

deserialize_by_decoding!(Name, GroupName, ResourceReference, Tags, User, PythonVersion);

schema_literal! {
    Name, "Name" => _g { "type": "string", "pattern": "^[a-z][a-z0-9-]{1,40}$" };
    GroupName, "GroupName" => _g { "type": ["string", "integer"], "pattern": "^[a-z0-9][a-z0-9-]{0,39}$" };
    ResourceReference, "Reference" => _g { "anyOf": [
        { "type": "string", "pattern": "^([^/]+/)?[^/]+$" },
        { "type": "object", "properties": { "project": { "type": ["string", "null"] }, "name": { "type": "string" } },
          "required": ["name"], "additionalProperties": false },
    ] };
    Tags, "Tags" => _g { "type": "object",
        "additionalProperties": { "type": ["string", "number"], "pattern": "^[a-zA-Z0-9 .:/=_\\-+@]{0,256}$" },
        "propertyNames": { "pattern": "^[_\\-a-zA-Z0-9]{1,60}$" } };
    User, "User" => _g { "type": ["string", "integer"] };
    PythonVersion, "PythonVersion" => _g { "anyOf": [
        { "type": "string", "enum": PYTHON_VERSIONS },
        { "type": "number", "minimum": 3.1, "maximum": 3.9 },
    ] };
}
