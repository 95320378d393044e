//! Policy of this host: the permissions of tasks, independent of the server. Owned by root, read once at the start.
//!
//! ```yaml
//! # /etc/windlass/policy.yml; everything has a default
//! privileged: false
//! host_network: true
//! mounts:                                   # with everything below; `/etc` etc. by exact path only. Default none
//!   - /scratch
//!   - {path: /data/vision, projects: [vision]}
//! devices: [/dev/nvidia*, /dev/dri]         # an entry may end in `*`
//! registries: [docker.io, ghcr.io/team]     # absent: any
//! plain_http_registries: [registry:5000]    # without TLS, where the agent itself pulls images; default none
//! images: {mirrors: {docker.io: [mirror:5000]}, max_size: 200GB, max_age: 30d}   # where the agent itself pulls images
//! new_privileges: false                     # true permits set-user-id programs
//! capabilities: [CHOWN, SETUID]             # kept; everything else is dropped
//! pids: 16384                               # default and maximum
//! host_ssh_users: [ubuntu]                  # accounts that may hold keys of users; absent: any
//! processes: confined                       # tasks without an image; or `own`, `refused`. Overrides the shim's flag
//! users: [nobody]                           # accounts that a plain process may request; default none, never root
//! user_ids: 1900000000-1900065535           # users of confined tasks, one each
//! ```
//!
//! The decision is pure: the links of a path are resolved beforehand (`mounts::look`).

mod image_rules;
mod mount_rules;

use std::{
    fmt::Write as _,
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use windlass_api::agent::shim::{NetworkMode, ProcessMode, TaskSpec};
use windlass_model::config::{
    decode::{self, Ctx, Decode, DecodeMode},
    yaml::{self, Node},
};

use self::mount_rules::MountDecision;
pub use self::{image_rules::ImageRules, mount_rules::MountRule};
use super::{mounts::ResolvedPaths, process, runtime::PolicyLimits};
use crate::isolation::user_ids::{DEFAULT_RANGE, UserIdRange};

pub const DEFAULT_FILE: &str = "/etc/windlass/policy.yml";
const PIDS_DEFAULT: i64 = 16_384;
const DEVICES_DEFAULT: [&str; 8] = [
    "/dev/nvidia*",
    "/dev/dri",
    "/dev/kfd",
    "/dev/infiniband",
    "/dev/accel",
    "/dev/tenstorrent",
    "/dev/habanalabs*",
    "/dev/vfio",
];
/// Sufficient to install packages and to switch to another user.
const CAPABILITIES_DEFAULT: [&str; 10] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
];
/// Paths whose owner controls the host. An entry for a larger directory permits neither these paths nor their parents
/// nor their contents.
const SENSITIVE_PATHS: [&str; 24] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/proc",
    "/root",
    "/run/containerd",
    "/run/crio",
    "/run/docker.sock",
    "/run/dbus",
    "/run/podman",
    "/run/systemd",
    "/run/user",
    "/run/windlass",
    "/sbin",
    "/sys",
    "/usr",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/kubelet",
    "/var/spool",
];
/// Directories of the agent in addition to its home: no entry permits them.
const AGENT_DIRS: [&str; 1] = ["/var/lib/windlass"];
/// Paths inside a container where nothing may be mounted: those of the agent and of the kernel.
const RESERVED_TARGETS: [&str; 3] = ["/windlass", "/proc", "/sys"];

/// Contents of the policy file.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyRules {
    pub privileged: bool,
    pub host_network: bool,
    pub mounts: Vec<MountRule>,
    pub devices: Vec<String>,
    pub registries: Option<Vec<String>>,
    /// Registries without TLS. Applies where the agent itself pulls images.
    pub plain_http_registries: Vec<String>,
    pub images: ImageRules,
    pub new_privileges: bool,
    pub capabilities: Vec<String>,
    pub pids: i64,
    pub host_ssh_users: Option<Vec<String>>,
    /// `None`: the shim's flag decides.
    pub processes: Option<ProcessMode>,
    pub users: Vec<String>,
    pub user_ids: UserIdRange,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    file: PathBuf,
    rules: PolicyRules,
    /// Sensitive paths of this host, in addition to the well-known ones.
    sensitive: Vec<PathBuf>,
    /// Directories of the agent and of the server on the same host.
    agents: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("failed to read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} belongs to user {uid}; a policy must belong to root")]
    Owner { path: PathBuf, uid: u32 },
    #[error("{path} has mode {mode:03o}; a policy must be writable by its owner only")]
    Writable { path: PathBuf, mode: u32 },
    /// All problems, as text for people.
    #[error("{0}")]
    Content(String),
}

/// One violation of the policy, and the change that would allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyProblem {
    pub what: String,
    /// Change that would allow it, as an imperative; without brackets, which a dstack server interprets as markup of
    /// its log.
    pub line: Option<String>,
}

/// Decision of the policy about a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// Empty: allowed.
    pub problems: Vec<PolicyProblem>,
    /// Indices of optional instance mounts that are not permitted.
    pub left_out: Vec<usize>,
}

impl Default for PolicyRules {
    fn default() -> Self {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Self {
            privileged: false,
            host_network: true,
            mounts: Vec::new(),
            devices: owned(&DEVICES_DEFAULT),
            registries: None,
            plain_http_registries: Vec::new(),
            images: ImageRules::default(),
            new_privileges: false,
            capabilities: owned(&CAPABILITIES_DEFAULT),
            pids: PIDS_DEFAULT,
            host_ssh_users: None,
            processes: None,
            users: Vec::new(),
            user_ids: DEFAULT_RANGE,
        }
    }
}

impl Policy {
    pub fn new(file: &Path, rules: PolicyRules) -> Self {
        Self { file: file.to_owned(), rules, sensitive: Vec::new(), agents: Vec::new() }
    }

    /// Reads the file; if it is absent, all defaults apply. Refuses a file that others can write.
    pub fn load(path: &Path) -> Result<Self, PolicyError> {
        let failed = |source| PolicyError::Read { path: path.to_owned(), source };
        let file = match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self::new(path, PolicyRules::default()));
            }
            opened => opened.map_err(failed)?,
        };
        let meta = file.metadata().map_err(failed)?;
        // A shim without root's rights could write its policy itself anyway.
        let own = rustix::process::geteuid().as_raw();
        if meta.uid() != 0 && meta.uid() != own {
            return Err(PolicyError::Owner { path: path.to_owned(), uid: meta.uid() });
        }
        if meta.mode() & 0o022 != 0 {
            return Err(PolicyError::Writable { path: path.to_owned(), mode: meta.mode() & 0o777 });
        }
        let mut bytes = Vec::new();
        file.take(yaml::BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        let rules = parse(&path.to_string_lossy(), &bytes).map_err(PolicyError::Content)?;
        Ok(Self::new(path, rules))
    }

    /// Adds directories of the agent that no entry permits, including their parents: its home, the server's data.
    #[must_use]
    pub fn with_agent_dirs(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let known = AGENT_DIRS.iter().map(PathBuf::from).filter(|path| path.exists());
        for path in paths.into_iter().chain(known) {
            self.agents.push(fs::canonicalize(&path).unwrap_or(path));
        }
        self
    }

    /// Returns the rules of plain processes; the mode is that of the shim if the file specifies none.
    pub fn processes(&self, mode: ProcessMode, hidden: Vec<PathBuf>) -> process::ProcessRules {
        process::ProcessRules {
            mode: self.rules.processes.unwrap_or(mode),
            user_ids: self.rules.user_ids,
            users: self.rules.users.clone(),
            hidden,
        }
    }

    /// Adds sensitive paths that are specific to this host: the engine's socket.
    #[must_use]
    pub fn with_sensitive_paths(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Self {
        for path in paths {
            self.sensitive.push(fs::canonicalize(&path).unwrap_or(path));
        }
        self
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    pub fn restricts_registries(&self) -> bool {
        self.rules.registries.is_some()
    }

    /// Registries that the agent contacts without TLS.
    pub fn plain_http_registries(&self) -> &[String] {
        &self.rules.plain_http_registries
    }

    pub fn images(&self) -> &ImageRules {
        &self.rules.images
    }

    pub fn limits(&self, spec: &TaskSpec) -> PolicyLimits {
        PolicyLimits {
            pids: if spec.pids > 0 { spec.pids.min(self.rules.pids) } else { self.rules.pids },
            new_privileges: self.rules.new_privileges,
            capabilities: self.rules.capabilities.clone(),
        }
    }

    /// Decides on a whole specification, and reports all violations at once.
    pub fn decide(&self, spec: &TaskSpec, seen: &ResolvedPaths) -> PolicyDecision {
        let mut verdict = PolicyDecision { problems: Vec::new(), left_out: Vec::new() };
        let rules = &self.rules;
        if spec.privileged && !rules.privileged {
            verdict.forbid("privileged: not allowed", Some(set_hint("privileged: true")));
        }
        if spec.network_mode == NetworkMode::Host && !rules.host_network {
            verdict.forbid("network_mode host: not allowed", Some(set_hint("host_network: true")));
        }
        if spec.pids > rules.pids {
            let what = format!("pids {}: at most {}", spec.pids, rules.pids);
            verdict.forbid(what, Some(set_hint(&format!("pids: {}", spec.pids))));
        }
        self.decide_image(spec, seen, &mut verdict);
        self.decide_mounts(spec, seen, &mut verdict);
        self.decide_devices(seen, &mut verdict);
        self.decide_keys(spec, &mut verdict);
        verdict
    }

    fn decide_image(&self, spec: &TaskSpec, seen: &ResolvedPaths, verdict: &mut PolicyDecision) {
        if let Some(found) = &seen.image {
            // The agent reads it with the rights of root.
            let refused = match found {
                Err(why) => Some((why.clone(), None)),
                Ok(real) => self.mount_refusal(real, &spec.project),
            };
            if let Some((why, line)) = refused {
                verdict.forbid(format!("image {}: {why}", escape_name(&spec.image_name)), line);
            }
            return;
        }
        let Some(registries) = &self.rules.registries else { return };
        let image = full_image_name(&spec.image_name);
        let is_below = |entry: &String| {
            let entry = entry.trim_end_matches('/');
            image.strip_prefix(entry).is_some_and(|rest| rest.starts_with(['/', ':', '@']))
        };
        if !registries.iter().any(is_below) {
            let registry = image.split('/').next().unwrap_or_default();
            let what = format!("image {}: not from an allowed registry", escape_name(&spec.image_name));
            verdict.forbid(what, Some(add_hint(registry, "registries")));
        }
    }

    fn decide_mounts(&self, spec: &TaskSpec, seen: &ResolvedPaths, verdict: &mut PolicyDecision) {
        for (index, (requested, found)) in spec.instance_mounts.iter().zip(&seen.mounts).enumerate() {
            let refused = match found {
                Err(why) => Some((why.clone(), None)),
                Ok(source) => self.mount_refusal(&source.real, &spec.project),
            };
            match refused {
                None => {}
                Some(_) if requested.optional => verdict.left_out.push(index),
                Some((why, line)) => {
                    verdict.forbid(format!("mount {}: {why}", escape_name(&requested.instance_path)), line);
                }
            }
        }
        let mut taken: Vec<&str> = Vec::new();
        let instance = spec.instance_mounts.iter().map(|mount| mount.path.as_str());
        for target in instance.chain(spec.volume_mounts.iter().map(|mount| mount.path.as_str())) {
            if let Some(why) = target_refusal(target) {
                verdict.forbid(format!("mount at {}: {why}", escape_name(target)), None);
            } else if taken.contains(&target) {
                verdict
                    .forbid(format!("mount at {}: two mounts have this target", escape_name(target)), None);
            }
            taken.push(target);
        }
    }

    /// Returns the reason why a resolved path is refused, and the entry that would permit it.
    fn mount_refusal(&self, real: &Path, project: &str) -> Option<(String, Option<String>)> {
        let touches = |path: &&PathBuf| real.starts_with(path) || path.starts_with(real);
        if let Some(own) = self.agents.iter().find(touches) {
            let real = escape_name(&real.to_string_lossy());
            return Some((format!("{real} overlaps {}, which is the agent's", own.display()), None));
        }
        let listed = mount_rules::decide(&self.rules.mounts, real, project);
        match listed {
            MountDecision::Exact => return None,
            MountDecision::OtherProjects(path) => {
                let real = escape_name(&real.to_string_lossy());
                return Some((
                    format!("{real} overlaps {}, which is for other projects", path.display()),
                    None,
                ));
            }
            MountDecision::Below | MountDecision::NotListed => {}
        }
        let line = Some(add_hint(&real.to_string_lossy(), "mounts"));
        let known = SENSITIVE_PATHS.iter().map(Path::new).chain(self.sensitive.iter().map(PathBuf::as_path));
        if let Some(sensitive) = { known }.find(|path| real.starts_with(path) || path.starts_with(real)) {
            let (real, sensitive) = (escape_name(&real.to_string_lossy()), sensitive.display());
            return Some((format!("{real} overlaps {sensitive} and requires an exact entry"), line));
        }
        if listed == MountDecision::Below {
            return None;
        }
        Some((format!("{} is not below an allowed path", escape_name(&real.to_string_lossy())), line))
    }

    fn decide_devices(&self, seen: &ResolvedPaths, verdict: &mut PolicyDecision) {
        for (requested, found) in &seen.devices {
            let why = match found {
                Err(why) => Some(why.clone()),
                Ok(real) if !real.starts_with("/dev") => Some("not below /dev".to_owned()),
                Ok(real) if self.rules.devices.iter().any(|entry| matches_device(entry, real)) => None,
                Ok(_) => Some("not an allowed device".to_owned()),
            };
            if let Some(why) = why {
                let line = add_hint(requested, "devices");
                verdict.forbid(format!("device {}: {why}", escape_name(requested)), Some(line));
            }
        }
    }

    fn decide_keys(&self, spec: &TaskSpec, verdict: &mut PolicyDecision) {
        let user = spec.host_ssh_user.as_str();
        if spec.host_ssh_keys.is_empty() || user.is_empty() {
            return;
        }
        if !self.allows_keys_for(user) {
            let what = format!("host_ssh_keys for {}: user not allowed", escape_name(user));
            verdict.forbid(what, Some(add_hint(user, "host_ssh_users")));
        }
    }

    /// Returns whether this account may hold keys of users and gateways.
    pub fn allows_keys_for(&self, user: &str) -> bool {
        // A key permits only ports of tasks, whatever the account.
        self.rules.host_ssh_users.as_ref().is_none_or(|users| users.iter().any(|allowed| allowed == user))
    }

    /// Formats a refusal for people: all violations, and the lines that would allow them.
    pub fn render(&self, problems: &[PolicyProblem]) -> String {
        let mut text = String::from("the policy of this host forbids the task:\n");
        for problem in problems {
            let _ = writeln!(text, "- {}", problem.what);
            if let Some(line) = &problem.line {
                let _ = writeln!(text, "  hint: to allow it, {line} in {}", self.file.display());
            }
        }
        text
    }
}

impl PolicyDecision {
    fn forbid(&mut self, what: impl Into<String>, line: Option<String>) {
        self.problems.push(PolicyProblem { what: what.into(), line });
    }
}

fn set_hint(setting: &str) -> String {
    format!("set `{setting}`")
}

fn add_hint(entry: &str, list: &str) -> String {
    format!("add `{}` to `{list}`", escape_name(entry))
}

/// Escapes names, which come from the network and appear in responses and logs.
fn escape_name(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect()
}

/// Completes an image name: `debian` is `docker.io/library/debian`; a first part with a dot or a port is a registry.
fn full_image_name(image: &str) -> String {
    match image.split_once('/') {
        None => format!("docker.io/library/{image}:"),
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => format!("{image}:"),
        Some(_) => format!("docker.io/{image}:"),
    }
}

fn target_refusal(target: &str) -> Option<&'static str> {
    let path = Path::new(target);
    if !path.is_absolute() || target.contains('\0') {
        return Some("not an absolute path");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Some("contains `..`");
    }
    if path.components().count() < 2 {
        return Some("cannot replace the root of the container");
    }
    // Engines parse a bind as `source:target`.
    if target.contains(':') {
        return Some("contains a colon");
    }
    RESERVED_TARGETS
        .iter()
        .any(|taken| path.starts_with(taken))
        .then_some("reserved for the agent or the kernel")
}

/// Returns whether an entry matches: the path itself and everything below; with a final `*`, every name with that
/// prefix.
fn matches_device(entry: &str, real: &Path) -> bool {
    match entry.strip_suffix('*') {
        None => real.starts_with(entry),
        Some(start) => {
            real.to_str().and_then(|real| real.strip_prefix(start)).is_some_and(|rest| !rest.contains('/'))
        }
    }
}

/// Parses the text, or returns all errors in it.
fn parse(file: &str, bytes: &[u8]) -> Result<PolicyRules, String> {
    let (text, node) = yaml::read_bytes(bytes).map_err(|problem| problem.render(file, ""))?;
    if node.value == yaml::Value::Null {
        return Ok(PolicyRules::default());
    }
    decode::decode(&node, DecodeMode::Strict).map_err(|problems| {
        problems.iter().map(|problem| problem.render(file, text)).collect::<Vec<_>>().join("\n")
    })
}

const POLICY_KEYS: [&str; 14] = [
    "privileged",
    "host_network",
    "mounts",
    "devices",
    "registries",
    "plain_http_registries",
    "images",
    "new_privileges",
    "capabilities",
    "pids",
    "host_ssh_users",
    "processes",
    "users",
    "user_ids",
];

impl Decode for PolicyRules {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode::expect_map(node, cx)?;
        decode::check_keys(node, &POLICY_KEYS, cx);
        let default = Self::default();
        // Every field is read before a missing one is reported, so that one pass reports everything.
        let privileged = decode::optional_field(node, "privileged", cx, || default.privileged);
        let host_network = decode::optional_field(node, "host_network", cx, || default.host_network);
        let mounts = decode::optional_field(node, "mounts", cx, || default.mounts);
        let devices = decode::optional_field(node, "devices", cx, || default.devices);
        let registries = decode::optional_field(node, "registries", cx, || default.registries);
        let plain_http_registries =
            decode::optional_field(node, "plain_http_registries", cx, || default.plain_http_registries);
        let images = decode::optional_field(node, "images", cx, || default.images);
        let new_privileges = decode::optional_field(node, "new_privileges", cx, || default.new_privileges);
        let capabilities = decode::optional_field(node, "capabilities", cx, || default.capabilities);
        let pids = decode::optional_field::<decode::Int<1, { i32::MAX as i64 }>>(node, "pids", cx, || {
            decode::Int(default.pids)
        });
        let host_ssh_users = decode::optional_field(node, "host_ssh_users", cx, || default.host_ssh_users);
        let processes = match node.entry("processes") {
            None => Some(default.processes),
            Some(entry) => cx.under("processes", |cx| decode_mode(&entry.value, cx)).map(Some),
        };
        let users = match node.entry("users") {
            None => Some(default.users),
            Some(entry) => cx.under("users", |cx| decode_users(&entry.value, cx)),
        };
        let user_ids = match node.entry("user_ids") {
            None => Some(default.user_ids),
            Some(entry) => cx.under("user_ids", |cx| decode_range(&entry.value, cx)),
        };
        Some(Self {
            privileged: privileged?,
            host_network: host_network?,
            mounts: mounts?,
            devices: devices?,
            registries: registries?,
            plain_http_registries: plain_http_registries?,
            images: images?,
            new_privileges: new_privileges?,
            capabilities: capabilities?.iter().map(|name| normalize_capability(name)).collect(),
            pids: pids?.get(),
            host_ssh_users: host_ssh_users?,
            processes: processes?,
            users: users?,
            user_ids: user_ids?,
        })
    }
}

fn decode_mode(node: &Node, cx: &mut Ctx) -> Option<ProcessMode> {
    let text = String::decode(node, cx)?;
    match text.as_str() {
        "confined" => Some(ProcessMode::Confined),
        "own" => Some(ProcessMode::Own),
        "refused" => Some(ProcessMode::Refused),
        _ => cx.invalid(node, format!("expected `confined`, `own` or `refused`, not `{text}`")),
    }
}

fn decode_users(node: &Node, cx: &mut Ctx) -> Option<Vec<String>> {
    let names: Vec<String> = Decode::decode(node, cx)?;
    if names.iter().any(|name| name == "root" || name.parse() == Ok(0)) {
        return cx.invalid(node, "`root` is not allowed: a plain process never runs as root");
    }
    Some(names)
}

fn decode_range(node: &Node, cx: &mut Ctx) -> Option<UserIdRange> {
    let text = String::decode(node, cx)?;
    match UserIdRange::parse(&text) {
        Some(range) => Some(range),
        None => cx.invalid(node, format!("expected `FIRST-LAST` from 1000 to 4294967293, not `{text}`")),
    }
}

/// Normalizes a name: `CAP_SYS_NICE` and `sys_nice` are the same.
fn normalize_capability(name: &str) -> String {
    let name = name.to_ascii_uppercase();
    name.strip_prefix("CAP_").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests;
