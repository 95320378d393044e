//! Configurations: the YAML that users write and the JSON that clients send.
//!
//! `yaml` parses text into a tree with positions, `decode` converts trees to types and collects every problem, `table`
//! generates each type's reader, printer and schema from one list of fields, `error` renders problems. There is one
//! file for each kind of configuration, and for each short syntax inside them.

mod config_macros;
pub mod decode;
pub mod dev_environment;
pub mod effective;
pub mod env;
pub mod error;
pub mod fleet;
pub mod fleet_limits;
pub mod gateway;
pub mod interpolate;
pub mod job_spec;
pub mod job_spec_builder;
pub mod mounts;
pub mod name;
pub mod ports;
pub mod profile;
pub mod quantities;
pub mod references;
pub mod resources;
pub mod run;
mod schema;
pub mod service;
pub mod serving;
pub mod shell;
pub mod task;
pub mod traffic;
pub mod unsupported;
pub mod volume;
pub mod yaml;
pub mod yaml_scalars;

use serde::{Serialize, Serializer};

pub use self::schema::{profiles_schema, schema};
use self::{
    config_macros::deserialize_by_decoding,
    decode::{Ctx, Decode, DecodeMode, closest, scalar},
    dev_environment::DevEnvironment,
    error::{Code, Diagnosis},
    fleet::Fleet,
    gateway::Gateway,
    profile::Profiles,
    service::Service,
    task::Task,
    volume::Volume,
    yaml::{Node, Value},
};

/// A configuration of any kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Configuration {
    Task(Box<Task>),
    Service(Box<Service>),
    DevEnvironment(Box<DevEnvironment>),
    Fleet(Box<Fleet>),
    Gateway(Box<Gateway>),
    Volume(Box<Volume>),
}

/// Kinds of configuration, as values of `type`.
pub const KINDS: [&str; 6] = ["task", "service", "dev-environment", "fleet", "gateway", "volume"];

impl Configuration {
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Task(_) => "task",
            Self::Service(_) => "service",
            Self::DevEnvironment(_) => "dev-environment",
            Self::Fleet(_) => "fleet",
            Self::Gateway(_) => "gateway",
            Self::Volume(_) => "volume",
        }
    }

    pub fn name(&self) -> Option<&str> {
        let name = match self {
            Self::Task(task) => &task.run.name,
            Self::Service(service) => &service.run.name,
            Self::DevEnvironment(dev) => &dev.run.name,
            Self::Fleet(fleet) => &fleet.name,
            Self::Gateway(gateway) => &gateway.name,
            Self::Volume(volume) => &volume.shared().name,
        };
        name.as_ref().map(name::Name::as_str)
    }

    /// Returns the properties that tasks, services and dev environments share; `None` for other kinds.
    pub fn run(&self) -> Option<&run::Run> {
        match self {
            Self::Task(task) => Some(&task.run),
            Self::Service(service) => Some(&service.run),
            Self::DevEnvironment(dev) => Some(&dev.run),
            Self::Fleet(_) | Self::Gateway(_) | Self::Volume(_) => None,
        }
    }

    pub fn run_mut(&mut self) -> Option<&mut run::Run> {
        match self {
            Self::Task(task) => Some(&mut task.run),
            Self::Service(service) => Some(&mut service.0.run),
            Self::DevEnvironment(dev) => Some(&mut dev.run),
            Self::Fleet(_) | Self::Gateway(_) | Self::Volume(_) => None,
        }
    }

    /// Returns the profile properties of a run configuration.
    pub fn profile(&self) -> Option<&profile::ProfileProperties> {
        match self {
            Self::Task(task) => Some(&task.profile),
            Self::Service(service) => Some(&service.profile),
            Self::DevEnvironment(dev) => Some(&dev.profile),
            Self::Fleet(_) | Self::Gateway(_) | Self::Volume(_) => None,
        }
    }

    /// Fills in profile properties that the configuration does not set.
    pub fn merge_profile(&mut self, base: &profile::ProfileProperties) {
        match self {
            Self::Task(task) => task.profile = task.profile.or(base),
            Self::Service(service) => service.0.profile = service.0.profile.or(base),
            Self::DevEnvironment(dev) => dev.profile = dev.profile.or(base),
            Self::Fleet(_) | Self::Gateway(_) | Self::Volume(_) => {}
        }
    }

    /// Decodes JSON from a client. Unknown keys are ignored: the client may be newer.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, Vec<Diagnosis>> {
        decode::decode(&Node::from_json(json), DecodeMode::Lenient)
    }
}

impl Decode for Configuration {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode::expect_map(node, cx)?;
        match kind_of(node) {
            Err(diagnosis) => cx.fail(diagnosis),
            Ok("task") => Decode::decode(node, cx).map(Box::new).map(Self::Task),
            Ok("service") => Decode::decode(node, cx).map(Box::new).map(Self::Service),
            Ok("dev-environment") => Decode::decode(node, cx).map(Box::new).map(Self::DevEnvironment),
            Ok("fleet") => Decode::decode(node, cx).map(Box::new).map(Self::Fleet),
            Ok("gateway") => Decode::decode(node, cx).map(Box::new).map(Self::Gateway),
            Ok(_) => Decode::decode(node, cx).map(Box::new).map(Self::Volume),
        }
    }
}

/// Reads `type` first, since it determines the meaning of the other keys.
fn kind_of(node: &Node) -> Result<&'static str, Diagnosis> {
    let known = format!("known types: {}", KINDS.join(", "));
    let Some(entry) = node.entry("type") else {
        return Err(Diagnosis::new(Code::UnknownType, node.span, "missing field `type`")
            .at("type")
            .hint(known));
    };
    let Some(word) = scalar(&entry.value) else {
        let message = "`type` must be a string";
        return Err(Diagnosis::new(Code::UnknownType, entry.key_span, message).at("type").hint(known));
    };
    let text = word.text.as_str();
    if let Some(kind) = KINDS.iter().find(|kind| **kind == text) {
        return Ok(kind);
    }
    if text == "preset" {
        let message = "`type: preset` is not supported: windlass runs models but does not tune them";
        return Err(Diagnosis::new(Code::Unsupported, entry.value.span, message).at("type").hint(known));
    }
    let message = format!("unknown type `{}`", decode::excerpt(text));
    let hint = closest(text, KINDS).map_or(known, |kind| format!("did you mean `{kind}`?"));
    Err(Diagnosis::new(Code::UnknownType, entry.value.span, message).at("type").hint(hint))
}

impl Serialize for Configuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Task(task) => task.serialize(serializer),
            Self::Service(service) => service.serialize(serializer),
            Self::DevEnvironment(dev) => dev.serialize(serializer),
            Self::Fleet(fleet) => fleet.serialize(serializer),
            Self::Gateway(gateway) => gateway.serialize(serializer),
            Self::Volume(volume) => volume.serialize(serializer),
        }
    }
}

deserialize_by_decoding!(Configuration);

/// A configuration parsed from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedConfiguration {
    pub configuration: Configuration,
    /// Tree that it was parsed from, for callers that report further problems by position.
    pub node: Node,
}

/// Parses a file that a user wrote, and returns all of its problems.
pub fn parse(text: &str) -> Result<ParsedConfiguration, Vec<Diagnosis>> {
    let node = yaml::read(text).map_err(|diagnosis| vec![diagnosis])?;
    if node.value == Value::Null {
        let message = "the file is empty; a configuration requires `type`";
        let known = format!("known types: {}", KINDS.join(", "));
        return Err(vec![Diagnosis::new(Code::UnknownType, node.span, message).at("type").hint(known)]);
    }
    let configuration = decode::decode(&node, DecodeMode::Strict)?;
    Ok(ParsedConfiguration { configuration, node })
}

/// Parses `profiles.yml`.
pub fn parse_profiles(text: &str) -> Result<Profiles, Vec<Diagnosis>> {
    let node = yaml::read(text).map_err(|diagnosis| vec![diagnosis])?;
    decode::decode(&node, DecodeMode::Strict)
}

/// Renders all problems of a file for a terminal.
pub fn render(problems: &[Diagnosis], file: &str, source: &str) -> String {
    problems.iter().map(|problem| problem.render(file, source)).collect::<Vec<_>>().join("\n")
}
