//! What this host lets a task have, whoever asks: root's own file, read once at the start.
//!
//! ```yaml
//! # /etc/windlass/policy.yml; everything has a default
//! privileged: false
//! host_network: true
//! mounts: [/data, /scratch]                 # these and what is below; `/etc` and its like by their exact path only. Default none
//! devices: [/dev/nvidia*, /dev/dri]         # an entry may end in `*`
//! registries: [docker.io, ghcr.io/team]     # absent: any
//! new_privileges: false                     # true lets set-user-id programs work
//! capabilities: [CHOWN, SETUID]             # kept; everything else is dropped
//! pids: 16384                               # default and ceiling
//! host_ssh_users: [ubuntu]                  # whose account may carry keys of users; absent: any
//! processes: confined                       # tasks without an image; or `own`, `refused`. Wins over the shim's flag
//! users: [nobody]                           # accounts that a plain process may ask for; default none, never root
//! user_ids: 1900000000-1900065535           # users of confined tasks, one each
//! ```
//!
//! The decision is pure: what the links of a path lead to was looked up before (`mounts::look`).

use std::{
    fmt::Write as _,
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use windlass_api::agent::shim::{NetworkMode, ProcessMode, TaskSpec};
use windlass_model::config::{
    decode::{self, Ctx, Decode, Mode},
    yaml::{self, Node},
};

use super::{mounts::Seen, process, runtime::Limits};
use crate::isolation::user_ids::{DEFAULT_RANGE, Range};

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
/// Enough to install packages and to become another user.
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
/// Whoever holds one of these holds the host. Neither they nor what contains them nor what is below them is
/// given by an entry for something larger.
const SENSITIVE: [&str; 24] = [
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
/// The agent's own, beside its home: nobody gets it by any entry.
const AGENTS: [&str; 1] = ["/var/lib/windlass"];
/// Where nothing may be put inside a container: the agent's own place and the kernel's.
const TARGETS_TAKEN: [&str; 3] = ["/windlass", "/proc", "/sys"];

/// What the file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub privileged: bool,
    pub host_network: bool,
    pub mounts: Vec<PathBuf>,
    pub devices: Vec<String>,
    pub registries: Option<Vec<String>>,
    pub new_privileges: bool,
    pub capabilities: Vec<String>,
    pub pids: i64,
    pub host_ssh_users: Option<Vec<String>>,
    /// Absent: as the shim was started.
    pub processes: Option<ProcessMode>,
    pub users: Vec<String>,
    pub user_ids: Range,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    file: PathBuf,
    rules: Rules,
    /// Of this host, beside the well-known ones.
    sensitive: Vec<PathBuf>,
    /// Directories of the agent and of the server beside it.
    agents: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} belongs to user {uid}; a policy must belong to root")]
    Owner { path: PathBuf, uid: u32 },
    #[error("{path} has mode {mode:03o}; nobody but its owner may write a policy")]
    Writable { path: PathBuf, mode: u32 },
    /// Every problem, as a person reads them.
    #[error("{0}")]
    Content(String),
}

/// One thing the policy forbids, and what would allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub what: String,
    /// What would allow it, as an imperative; without brackets, which a dstack server takes for markup of its log.
    pub line: Option<String>,
}

/// What the policy says to a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Empty: allowed.
    pub problems: Vec<Problem>,
    /// Positions of optional instance mounts that are not given.
    pub left_out: Vec<usize>,
}

impl Default for Rules {
    fn default() -> Self {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Self {
            privileged: false,
            host_network: true,
            mounts: Vec::new(),
            devices: owned(&DEVICES_DEFAULT),
            registries: None,
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
    pub fn new(file: &Path, rules: Rules) -> Self {
        Self { file: file.to_owned(), rules, sensitive: Vec::new(), agents: Vec::new() }
    }

    /// Reads the file; an absent one is all defaults. One that others could write is refused.
    pub fn load(path: &Path) -> Result<Self, PolicyError> {
        let failed = |source| PolicyError::Read { path: path.to_owned(), source };
        let file = match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self::new(path, Rules::default()));
            }
            opened => opened.map_err(failed)?,
        };
        let meta = file.metadata().map_err(failed)?;
        // A shim without root's rights could write its own policy anyway.
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

    /// Adds directories of the agent that no entry gives away, those above them included: its home, the server's data.
    #[must_use]
    pub fn keeping(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let known = AGENTS.iter().map(PathBuf::from).filter(|path| path.exists());
        for path in paths.into_iter().chain(known) {
            self.agents.push(fs::canonicalize(&path).unwrap_or(path));
        }
        self
    }

    /// What it says about plain processes; the mode is the shim's where the file names none.
    pub fn processes(&self, mode: ProcessMode, hidden: Vec<PathBuf>) -> process::Rules {
        process::Rules {
            mode: self.rules.processes.unwrap_or(mode),
            user_ids: self.rules.user_ids,
            users: self.rules.users.clone(),
            hidden,
        }
    }

    /// Adds what only this host knows to be sensitive: the engine's socket.
    #[must_use]
    pub fn guarding(mut self, paths: impl IntoIterator<Item = PathBuf>) -> Self {
        for path in paths {
            self.sensitive.push(fs::canonicalize(&path).unwrap_or(path));
        }
        self
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether images must come from certain registries.
    pub fn limits_registries(&self) -> bool {
        self.rules.registries.is_some()
    }

    pub fn limits(&self, spec: &TaskSpec) -> Limits {
        Limits {
            pids: if spec.pids > 0 { spec.pids.min(self.rules.pids) } else { self.rules.pids },
            new_privileges: self.rules.new_privileges,
            capabilities: self.rules.capabilities.clone(),
        }
    }

    /// Decides over a whole specification, and tells everything that is wrong with it at once.
    pub fn decide(&self, spec: &TaskSpec, seen: &Seen) -> Verdict {
        let mut verdict = Verdict { problems: Vec::new(), left_out: Vec::new() };
        let rules = &self.rules;
        if spec.privileged && !rules.privileged {
            verdict.forbid("privileged: not on this host", Some(say("privileged: true")));
        }
        if spec.network_mode == NetworkMode::Host && !rules.host_network {
            verdict.forbid("network_mode host: not on this host", Some(say("host_network: true")));
        }
        if spec.pids > rules.pids {
            let what = format!("pids {}: at most {}", spec.pids, rules.pids);
            verdict.forbid(what, Some(say(&format!("pids: {}", spec.pids))));
        }
        self.decide_image(spec, &mut verdict);
        self.decide_mounts(spec, seen, &mut verdict);
        self.decide_devices(seen, &mut verdict);
        self.decide_keys(spec, &mut verdict);
        verdict
    }

    fn decide_image(&self, spec: &TaskSpec, verdict: &mut Verdict) {
        let Some(registries) = &self.rules.registries else { return };
        let image = full_image_name(&spec.image_name);
        let is_below = |entry: &String| {
            let entry = entry.trim_end_matches('/');
            image.strip_prefix(entry).is_some_and(|rest| rest.starts_with(['/', ':', '@']))
        };
        if !registries.iter().any(is_below) {
            let registry = image.split('/').next().unwrap_or_default();
            let what = format!("image {}: not from an allowed registry", shown(&spec.image_name));
            verdict.forbid(what, Some(add(registry, "registries")));
        }
    }

    fn decide_mounts(&self, spec: &TaskSpec, seen: &Seen, verdict: &mut Verdict) {
        for (index, (asked, found)) in spec.instance_mounts.iter().zip(&seen.mounts).enumerate() {
            let refused = match found {
                Err(why) => Some((why.clone(), None)),
                Ok(source) => self.why_not_mount(&source.real),
            };
            match refused {
                None => {}
                Some(_) if asked.optional => verdict.left_out.push(index),
                Some((why, line)) => {
                    verdict.forbid(format!("mount {}: {why}", shown(&asked.instance_path)), line);
                }
            }
        }
        let mut taken: Vec<&str> = Vec::new();
        let instance = spec.instance_mounts.iter().map(|mount| mount.path.as_str());
        for target in instance.chain(spec.volume_mounts.iter().map(|mount| mount.path.as_str())) {
            if let Some(why) = why_not_target(target) {
                verdict.forbid(format!("mount at {}: {why}", shown(target)), None);
            } else if taken.contains(&target) {
                verdict.forbid(format!("mount at {}: two mounts want the same place", shown(target)), None);
            }
            taken.push(target);
        }
    }

    /// Why a resolved path is not given, and the entry that would give it.
    fn why_not_mount(&self, real: &Path) -> Option<(String, Option<String>)> {
        let touches = |path: &&PathBuf| real.starts_with(path) || path.starts_with(real);
        if let Some(own) = self.agents.iter().find(touches) {
            let real = shown(&real.to_string_lossy());
            return Some((format!("{real} touches {}, which is the agent's", own.display()), None));
        }
        if self.rules.mounts.iter().any(|entry| entry == real) {
            return None;
        }
        let line = Some(add(&real.to_string_lossy(), "mounts"));
        let known = SENSITIVE.iter().map(Path::new).chain(self.sensitive.iter().map(PathBuf::as_path));
        if let Some(sensitive) = { known }.find(|path| real.starts_with(path) || path.starts_with(real)) {
            let (real, sensitive) = (shown(&real.to_string_lossy()), sensitive.display());
            return Some((format!("{real} touches {sensitive} and needs an entry of its own"), line));
        }
        if self.rules.mounts.iter().any(|entry| real.starts_with(entry)) {
            return None;
        }
        Some((format!("{} is below no allowed path", shown(&real.to_string_lossy())), line))
    }

    fn decide_devices(&self, seen: &Seen, verdict: &mut Verdict) {
        for (asked, found) in &seen.devices {
            let why = match found {
                Err(why) => Some(why.clone()),
                Ok(real) if !real.starts_with("/dev") => Some("not below /dev".to_owned()),
                Ok(real) if self.rules.devices.iter().any(|entry| matches_device(entry, real)) => None,
                Ok(_) => Some("not an allowed device".to_owned()),
            };
            if let Some(why) = why {
                let line = add(asked, "devices");
                verdict.forbid(format!("device {}: {why}", shown(asked)), Some(line));
            }
        }
    }

    fn decide_keys(&self, spec: &TaskSpec, verdict: &mut Verdict) {
        let user = spec.host_ssh_user.as_str();
        if spec.host_ssh_keys.is_empty() || user.is_empty() {
            return;
        }
        let allowed = match &self.rules.host_ssh_users {
            Some(users) => users.iter().any(|allowed| allowed == user),
            // A key in an account opens ports of tasks and nothing else, whoever the account belongs to.
            None => true,
        };
        if !allowed {
            let what = format!("host_ssh_keys for {}: not this user", shown(user));
            verdict.forbid(what, Some(add(user, "host_ssh_users")));
        }
    }

    /// A refusal as a person reads it: everything that is wrong, and the lines that would allow it.
    pub fn render(&self, problems: &[Problem]) -> String {
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

impl Verdict {
    fn forbid(&mut self, what: impl Into<String>, line: Option<String>) {
        self.problems.push(Problem { what: what.into(), line });
    }
}

fn say(setting: &str) -> String {
    format!("say `{setting}`")
}

fn add(entry: &str, list: &str) -> String {
    format!("add `{}` to `{list}`", shown(entry))
}

/// Names come from the network and end in answers and logs.
fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect()
}

/// `debian` is `docker.io/library/debian`; a first word with a dot or a port is a registry.
fn full_image_name(image: &str) -> String {
    match image.split_once('/') {
        None => format!("docker.io/library/{image}:"),
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => format!("{image}:"),
        Some(_) => format!("docker.io/{image}:"),
    }
}

fn why_not_target(target: &str) -> Option<&'static str> {
    let path = Path::new(target);
    if !path.is_absolute() || target.contains('\0') {
        return Some("not an absolute path");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Some("leads upwards");
    }
    if path.components().count() < 2 {
        return Some("the root of the container");
    }
    // Engines take a bind as `source:target`.
    if target.contains(':') {
        return Some("contains a colon");
    }
    TARGETS_TAKEN.iter().any(|taken| path.starts_with(taken)).then_some("a place of the agent or the kernel")
}

/// An entry means itself and what is below; one that ends in `*`, every name that begins so.
fn matches_device(entry: &str, real: &Path) -> bool {
    match entry.strip_suffix('*') {
        None => real.starts_with(entry),
        Some(start) => {
            real.to_str().and_then(|real| real.strip_prefix(start)).is_some_and(|rest| !rest.contains('/'))
        }
    }
}

/// Reads the text, or tells everything that is wrong with it.
fn parse(file: &str, bytes: &[u8]) -> Result<Rules, String> {
    let (text, node) = yaml::read_bytes(bytes).map_err(|problem| problem.render(file, ""))?;
    if node.value == yaml::Value::Null {
        return Ok(Rules::default());
    }
    decode::decode(&node, Mode::Strict).map_err(|problems| {
        problems.iter().map(|problem| problem.render(file, text)).collect::<Vec<_>>().join("\n")
    })
}

const KEYS: [&str; 12] = [
    "privileged",
    "host_network",
    "mounts",
    "devices",
    "registries",
    "new_privileges",
    "capabilities",
    "pids",
    "host_ssh_users",
    "processes",
    "users",
    "user_ids",
];

impl Decode for Rules {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode::expect_map(node, cx)?;
        decode::check_keys(node, &KEYS, cx);
        let default = Self::default();
        // Every field is read before any is missed: one pass tells all.
        let privileged = decode::optional_field(node, "privileged", cx, || default.privileged);
        let host_network = decode::optional_field(node, "host_network", cx, || default.host_network);
        let mounts = match node.entry("mounts") {
            None => Some(default.mounts),
            Some(entry) => cx.under("mounts", |cx| absolute_paths(&entry.value, cx)),
        };
        let devices = decode::optional_field(node, "devices", cx, || default.devices);
        let registries = decode::optional_field(node, "registries", cx, || default.registries);
        let new_privileges = decode::optional_field(node, "new_privileges", cx, || default.new_privileges);
        let capabilities = decode::optional_field(node, "capabilities", cx, || default.capabilities);
        let pids = decode::optional_field::<decode::Int<1, { i32::MAX as i64 }>>(node, "pids", cx, || {
            decode::Int(default.pids)
        });
        let host_ssh_users = decode::optional_field(node, "host_ssh_users", cx, || default.host_ssh_users);
        let processes = match node.entry("processes") {
            None => Some(default.processes),
            Some(entry) => cx.under("processes", |cx| mode(&entry.value, cx)).map(Some),
        };
        let users = match node.entry("users") {
            None => Some(default.users),
            Some(entry) => cx.under("users", |cx| accounts(&entry.value, cx)),
        };
        let user_ids = match node.entry("user_ids") {
            None => Some(default.user_ids),
            Some(entry) => cx.under("user_ids", |cx| range(&entry.value, cx)),
        };
        Some(Self {
            privileged: privileged?,
            host_network: host_network?,
            mounts: mounts?,
            devices: devices?,
            registries: registries?,
            new_privileges: new_privileges?,
            capabilities: capabilities?.iter().map(|name| capability(name)).collect(),
            pids: pids?.get(),
            host_ssh_users: host_ssh_users?,
            processes: processes?,
            users: users?,
            user_ids: user_ids?,
        })
    }
}

fn mode(node: &Node, cx: &mut Ctx) -> Option<ProcessMode> {
    let text = String::decode(node, cx)?;
    match text.as_str() {
        "confined" => Some(ProcessMode::Confined),
        "own" => Some(ProcessMode::Own),
        "refused" => Some(ProcessMode::Refused),
        _ => cx.invalid(node, format!("`{text}` is none of `confined`, `own` and `refused`")),
    }
}

fn accounts(node: &Node, cx: &mut Ctx) -> Option<Vec<String>> {
    let names: Vec<String> = Decode::decode(node, cx)?;
    if names.iter().any(|name| name == "root" || name.parse() == Ok(0)) {
        return cx.invalid(node, "a plain process is never root: `root` cannot be listed");
    }
    Some(names)
}

fn range(node: &Node, cx: &mut Ctx) -> Option<Range> {
    let text = String::decode(node, cx)?;
    match Range::parse(&text) {
        Some(range) => Some(range),
        None => cx.invalid(node, format!("`{text}` is not `FIRST-LAST`, from 1000 to 4294967293")),
    }
}

/// `CAP_SYS_NICE`, `sys_nice`: one name.
fn capability(name: &str) -> String {
    let name = name.to_ascii_uppercase();
    name.strip_prefix("CAP_").unwrap_or(&name).to_owned()
}

fn absolute_paths(node: &Node, cx: &mut Ctx) -> Option<Vec<PathBuf>> {
    let texts: Vec<String> = Decode::decode(node, cx)?;
    let mut paths = Vec::new();
    for text in texts {
        let path = Path::new(&text);
        if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
            return cx.invalid(node, format!("`{text}` is not an absolute path without `..`"));
        }
        // Rebuilt from its parts, `/mnt/` and `/mnt` are the same.
        paths.push(path.components().collect());
    }
    Some(paths)
}

#[cfg(test)]
mod tests {
    use windlass_api::agent::shim::{InstanceMount, VolumeMount};

    use super::{super::mounts::Source, *};

    fn spec() -> TaskSpec {
        let json = r#"{"id":"00000000-0000-0000-0000-000000000001","name":"t","image_name":"debian:12"}"#;
        serde_json::from_str(json).unwrap()
    }

    fn policy(yaml: &str) -> Policy {
        let rules = parse("policy.yml", yaml.as_bytes()).unwrap();
        let home = PathBuf::from("/mnt/windlass");
        Policy { agents: vec![home], ..Policy::new(Path::new("/etc/windlass/policy.yml"), rules) }
    }

    /// What the policy says to a change of the plainest specification; mounts lead where they say.
    fn says(yaml: &str, change: impl FnOnce(&mut TaskSpec)) -> Vec<String> {
        let mut spec = spec();
        change(&mut spec);
        let real = |path: &String| Source { real: PathBuf::from(path), missing: Vec::new() };
        let seen = Seen {
            mounts: spec.instance_mounts.iter().map(|mount| Ok(real(&mount.instance_path))).collect(),
            devices: spec
                .gpu_devices
                .iter()
                .map(|device| (device.path_on_host.clone(), Ok(PathBuf::from(&device.path_on_host))))
                .collect(),
        };
        policy(yaml).decide(&spec, &seen).problems.into_iter().map(|problem| problem.what).collect()
    }

    fn mount(path: &str) -> InstanceMount {
        InstanceMount { instance_path: path.to_owned(), path: "/in".to_owned(), optional: false }
    }

    #[track_caller]
    fn may_mount(yaml: &str, path: &str) {
        assert_eq!(says(yaml, |spec| spec.instance_mounts.push(mount(path))), [""; 0]);
    }

    #[track_caller]
    fn may_not_mount(yaml: &str, path: &str) {
        assert_ne!(says(yaml, |spec| spec.instance_mounts.push(mount(path))), [""; 0], "{path} is given");
    }

    #[test]
    fn a_plain_task_is_allowed_and_gets_the_defaults() {
        assert_eq!(says("", |_| {}), [""; 0]);
        let limits = policy("").limits(&spec());
        assert_eq!((limits.pids, limits.new_privileges), (PIDS_DEFAULT, false));
        assert!(limits.capabilities.contains(&"SETUID".to_owned()));
        assert!(!limits.capabilities.contains(&"SYS_ADMIN".to_owned()));
    }

    #[test]
    fn x9_privileged_is_forbidden_until_the_file_says_otherwise() {
        let privileged = |spec: &mut TaskSpec| spec.privileged = true;
        assert_eq!(says("", privileged), ["privileged: not on this host"]);
        assert_eq!(says("privileged: true", privileged), [""; 0]);
    }

    #[test]
    fn x9_the_hosts_network_can_be_forbidden() {
        assert_eq!(says("host_network: false", |_| {}), ["network_mode host: not on this host"]);
        let bridge = |spec: &mut TaskSpec| spec.network_mode = NetworkMode::Bridge;
        assert_eq!(says("host_network: false", bridge), [""; 0]);
    }

    #[test]
    fn x9_only_what_is_below_an_entry_is_mounted() {
        for path in ["/mnt/cache", "/srv/x", "/data/set/1", "/scratch/x", "/opt"] {
            may_not_mount("", path);
        }
        let some = "mounts: [/mnt/sets, /data]";
        for path in ["/mnt/sets/cache", "/data/set/1"] {
            may_mount(some, path);
        }
        for path in ["/var/tmp", "/opt", "/mnt/setsx", "/tmp/a"] {
            may_not_mount(some, path);
        }
        may_mount("mounts: [/opt/sets/]", "/opt/sets");
        may_not_mount("mounts: [/opt/sets]", "/mnt/cache");
    }

    #[test]
    fn x9_what_gives_the_host_away_needs_its_exact_entry() {
        let all = "mounts: [/]";
        for path in ["/etc", "/etc/ssl", "/proc/1", "/sys", "/dev/sda", "/root/.ssh", "/run/windlass"] {
            may_not_mount(all, path);
        }
        for path in
            ["/run/docker.sock", "/run", "/var", "/var/lib/docker/volumes", "/mnt", "/mnt/windlass/tasks"]
        {
            may_not_mount(all, path);
        }
        may_mount(all, "/opt");
        // The agent's home, /mnt/windlass here, is given by no entry, nor is what contains it.
        for path in ["/mnt/windlass", "/mnt/windlass/tasks", "/mnt", "/"] {
            may_not_mount(&format!("mounts: [{path}]"), path);
        }
        may_mount("mounts: [/etc/ssl/certs]", "/etc/ssl/certs");
        may_not_mount("mounts: [/etc/ssl]", "/etc/ssl/certs");
        may_not_mount("mounts: [/etc/ssl/certs]", "/etc/ssl");
    }

    #[test]
    fn an_optional_mount_that_is_forbidden_is_left_out() {
        let mut spec = spec();
        spec.instance_mounts = vec![mount("/etc"), mount("/mnt/a")];
        spec.instance_mounts[0].optional = true;
        let source = |path: &str| Ok(Source { real: PathBuf::from(path), missing: Vec::new() });
        let seen = Seen { mounts: vec![source("/etc"), source("/mnt/a")], devices: Vec::new() };
        spec.instance_mounts[1].path = "/other".to_owned();
        let policy = policy("mounts: [/mnt/a]");
        assert_eq!(policy.decide(&spec, &seen), Verdict { problems: Vec::new(), left_out: vec![0] });
    }

    #[test]
    fn nothing_is_mounted_over_the_agent_or_the_kernel() {
        for target in ["/", "in", "/a/../b", "/proc/x", "/sys", "/windlass/run", "/a:b", "//"] {
            let told = says("", |spec| {
                spec.volume_mounts.push(VolumeMount { name: "v".to_owned(), path: target.to_owned() });
            });
            assert_eq!(told.len(), 1, "{target}: {told:?}");
        }
        let some = "mounts: [/mnt/a, /mnt/b]";
        let twice = says(some, |spec| spec.instance_mounts = vec![mount("/mnt/a"), mount("/mnt/b")]);
        assert_eq!(twice, ["mount at /in: two mounts want the same place"]);
    }

    #[test]
    fn images_come_from_allowed_registries() {
        let image = |name: &str| {
            let name = name.to_owned();
            move |spec: &mut TaskSpec| spec.image_name = name
        };
        let yaml = "registries: [docker.io/library, ghcr.io/team, localhost:5000]";
        for name in
            ["debian:12", "docker.io/library/debian", "ghcr.io/team/x@sha256:00", "localhost:5000/a/b"]
        {
            assert_eq!(says(yaml, image(name)), [""; 0], "{name}");
        }
        for name in ["user/x", "ghcr.io/teammate/x", "ghcr.io/other", "evil.example/ghcr.io/team/x"] {
            assert_eq!(says(yaml, image(name)).len(), 1, "{name}");
        }
        assert_eq!(says("registries: []", image("debian")).len(), 1);
    }

    #[test]
    fn devices_and_users_and_pids_have_their_lists() {
        let device = |path: &str| {
            let device = format!(r#"[{{"path_on_host":"{path}","path_in_container":"/dev/x"}}]"#);
            move |spec: &mut TaskSpec| spec.gpu_devices = serde_json::from_str(&device).unwrap()
        };
        assert_eq!(says("", device("/dev/nvidia0")), [""; 0]);
        assert_eq!(says("", device("/dev/dri/renderD128")), [""; 0]);
        assert_eq!(says("", device("/dev/sda")), ["device /dev/sda: not an allowed device"]);
        assert_eq!(says("", device("/dev/nvidia/../sda")).len(), 1);
        assert_eq!(says("devices: [/etc]", device("/etc/shadow")), ["device /etc/shadow: not below /dev"]);
        let keys = |user: &'static str| {
            move |spec: &mut TaskSpec| {
                spec.host_ssh_keys = vec!["k".to_owned()];
                spec.host_ssh_user = user.to_owned();
            }
        };
        assert_eq!(says("", keys("ubuntu")), [""; 0]);
        assert_eq!(says("", keys("root")), [""; 0]);
        assert_eq!(says("host_ssh_users: []", keys("root")), ["host_ssh_keys for root: not this user"]);
        assert_eq!(says("host_ssh_users: [root]", keys("root")), [""; 0]);
        assert_eq!(says("host_ssh_users: [root]", keys("ubuntu")).len(), 1);
        assert_eq!(says("pids: 10", |spec| spec.pids = 11), ["pids 11: at most 10"]);
    }

    #[test]
    fn a_refusal_tells_everything_and_names_the_lines_that_help() {
        let policy = policy("");
        let mut spec = spec();
        spec.privileged = true;
        spec.instance_mounts.push(mount("/etc\n"));
        let seen = Seen { mounts: vec![Err("does not exist".to_owned())], devices: Vec::new() };
        let text = policy.render(&policy.decide(&spec, &seen).problems);
        assert!(text.contains("- privileged: not on this host\n"), "{text}");
        assert!(
            text.contains("hint: to allow it, say `privileged: true` in /etc/windlass/policy.yml"),
            "{text}"
        );
        assert!(text.contains("- mount /etc\\n: does not exist"), "{text}");
        spec.instance_mounts = vec![mount("/opt/nope")];
        let real = Source { real: "/opt/nope".into(), missing: Vec::new() };
        let seen = Seen { mounts: vec![Ok(real)], devices: Vec::new() };
        let text = policy.render(&policy.decide(&spec, &seen).problems);
        assert!(text.contains("hint: to allow it, add `/opt/nope` to `mounts` in"), "{text}");
        assert!(!text.contains('['), "brackets are markup for a dstack server: {text}");
    }

    #[test]
    fn the_agents_own_directories_are_given_by_no_entry() {
        let dir = windlass_testkit::temp_dir("policy").unwrap();
        let rules = parse("policy.yml", b"mounts: [/var, /]").unwrap();
        let policy = Policy::new(Path::new("/policy.yml"), rules).keeping([dir.path().to_owned()]);
        let mut policy = policy;
        policy.agents.push("/var/lib/windlass".into());
        let real = fs::canonicalize(dir.path()).unwrap();
        for path in ["/var", "/var/lib/windlass/agent", "/var/lib/windlass/home/enrolment.json", "/"] {
            let why = policy.why_not_mount(Path::new(path)).unwrap();
            assert!(why.0.contains("which is the agent's") && why.1.is_none(), "{path}: {why:?}");
        }
        assert!(policy.why_not_mount(&real.join("tasks")).is_some());
        assert_eq!(policy.why_not_mount(Path::new("/var/cache")), None);
    }

    #[test]
    fn the_file_says_what_plain_processes_are() {
        let rules = |yaml: &str| parse("policy.yml", yaml.as_bytes());
        let policy = |yaml: &str| Policy::new(Path::new("/p"), rules(yaml).unwrap());
        let mode = |yaml: &str| policy(yaml).processes(ProcessMode::Own, Vec::new()).mode;
        assert_eq!((mode(""), mode("processes: refused")), (ProcessMode::Own, ProcessMode::Refused));
        let all = policy("{users: [nobody, ubuntu], user_ids: 5000-5999}")
            .processes(ProcessMode::Confined, Vec::new());
        assert_eq!((all.users.len(), all.user_ids.first, all.user_ids.last), (2, 5000, 5999));
        for bad in ["processes: free", "users: [root]", "users: ['0']", "user_ids: 1-2", "user_ids: 5000"] {
            assert!(rules(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mistake_in_the_file_is_told_with_its_place() {
        let told = parse("policy.yml", b"privilged: true\nmounts: [etc]\npids: 0\n").unwrap_err();
        for part in [
            "policy.yml:1:1",
            "did you mean `privileged`?",
            "`etc` is not an absolute path",
            "policy.yml:3:7",
        ] {
            assert!(told.contains(part), "{part} is not in {told}");
        }
        assert!(parse("policy.yml", b"- a\n").is_err());
        assert_eq!(parse("policy.yml", b"# nothing\n").unwrap(), Rules::default());
        let json = br#"{"capabilities": ["cap_sys_nice"], "registries": null}"#;
        let rules = parse("policy.yml", json).unwrap();
        assert_eq!((rules.capabilities, rules.registries), (vec!["SYS_NICE".to_owned()], None));
    }
}
