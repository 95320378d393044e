//! Resolution of the mounts of a specification to paths of the host, with every link followed before the decision.
//!
//! [`look`] only reads; [`resolve`] applies the policy, creates missing directories and returns the binds. Both are
//! called: the first when a task is submitted, so that the response can be a refusal; the second right before the
//! container is created, because a link may have changed meanwhile.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use windlass_api::agent::shim::TaskSpec;
use windlass_registry::local::LocalName;

use super::{
    policy::{Policy, PolicyProblem},
    runtime::BindMount,
};

/// Present target of a host path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSource {
    /// Without links; `missing` is its last part.
    pub real: PathBuf,
    /// Names below the deepest directory that exists.
    pub missing: Vec<String>,
}

/// Targets of the paths of a specification; an `Err` is the reason why a path has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedPaths {
    /// Targets in the order of `instance_mounts`.
    pub mounts: Vec<Result<MountSource, String>>,
    /// The requested path, and its target.
    pub devices: Vec<(String, Result<PathBuf, String>)>,
    /// Path of an image that is a directory or a file of this host.
    pub image: Option<Result<PathBuf, String>>,
}

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("{text}")]
    Forbidden { problems: Vec<PolicyProblem>, text: String },
    #[error("failed to create {path}")]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("volume {name} is not listed in `volumes` of the task")]
    NoVolume { name: String },
}

/// Follows every link. Changes nothing.
pub fn resolve_paths(spec: &TaskSpec) -> ResolvedPaths {
    let existing = |path: &str| {
        let found = follow_links(path)?;
        if found.missing.is_empty() { Ok(found.real) } else { Err("does not exist".to_owned()) }
    };
    let image = LocalName::parse(&spec.image_name).map(|name| {
        let name = name.map_err(|error| error.to_string())?;
        existing(&name.path.to_string_lossy())
    });
    ResolvedPaths {
        image,
        mounts: spec.instance_mounts.iter().map(|mount| follow_links(&mount.instance_path)).collect(),
        devices: spec
            .gpu_devices
            .iter()
            .map(|device| (device.path_on_host.clone(), existing(&device.path_on_host)))
            .collect(),
    }
}

/// Checks whether the policy allows the task at this time, without changing anything.
pub fn check_policy(spec: &TaskSpec, policy: &Policy) -> Result<(), MountError> {
    let verdict = policy.decide(spec, &resolve_paths(spec));
    if verdict.problems.is_empty() { Ok(()) } else { Err(forbidden_error(policy, verdict.problems)) }
}

/// Returns the binds of the task: instance mounts that the policy allows, and volumes from the mount points that
/// `volume` returns. Creates missing directories. Idempotent.
pub fn resolve_binds(
    spec: &TaskSpec,
    policy: &Policy,
    volume: impl Fn(&str) -> Option<PathBuf>,
) -> Result<Vec<BindMount>, MountError> {
    let seen = resolve_paths(spec);
    let verdict = policy.decide(spec, &seen);
    if !verdict.problems.is_empty() {
        return Err(forbidden_error(policy, verdict.problems));
    }
    let mut binds = Vec::new();
    for (index, (requested, found)) in spec.instance_mounts.iter().zip(&seen.mounts).enumerate() {
        let Ok(source) = found else { continue };
        if verdict.left_out.contains(&index) {
            continue;
        }
        let made = create_missing(source);
        if made.is_err() && requested.optional {
            continue;
        }
        made.map_err(|error| MountError::Make { path: source.real.clone(), source: error })?;
        binds.push(BindMount {
            source: source.real.clone(),
            target: requested.path.clone(),
            read_only: false,
        });
    }
    for mount in &spec.volume_mounts {
        let source = volume(&mount.name).ok_or_else(|| MountError::NoVolume { name: mount.name.clone() })?;
        let source = fs::canonicalize(&source).unwrap_or(source);
        binds.push(BindMount { source, target: mount.path.clone(), read_only: false });
    }
    Ok(binds)
}

fn forbidden_error(policy: &Policy, problems: Vec<PolicyProblem>) -> MountError {
    let text = policy.render(&problems);
    MountError::Forbidden { problems, text }
}

/// Returns the existing part of the path without links, and the rest.
fn follow_links(requested: &str) -> Result<MountSource, String> {
    let path = Path::new(requested);
    if !path.is_absolute() || requested.contains('\0') {
        return Err("not an absolute path".to_owned());
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err("contains `..`".to_owned());
    }
    // Engines parse a bind as `source:target`.
    if requested.contains(':') {
        return Err("contains a colon".to_owned());
    }
    let mut missing = Vec::new();
    let mut existing: PathBuf = path.components().collect();
    loop {
        match fs::canonicalize(&existing) {
            Ok(real) => {
                missing.reverse();
                let real = missing.iter().fold(real, |path, name: &String| path.join(name));
                return Ok(MountSource { real, missing });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if fs::symlink_metadata(&existing).is_ok() {
                    return Err(format!("{} is a dangling symbolic link", existing.display()));
                }
                let (Some(parent), Some(name)) = (existing.parent(), existing.file_name()) else {
                    return Err("does not exist".to_owned());
                };
                let name = name.to_str().ok_or("not UTF-8")?.to_owned();
                missing.push(name);
                existing = parent.to_owned();
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Creates the missing directories, each below a handle on its parent: a link inserted meanwhile is not followed.
fn create_missing(source: &MountSource) -> io::Result<()> {
    let depth = source.missing.len();
    let existing = source.real.ancestors().nth(depth).unwrap_or(Path::new("/"));
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let mut at: OwnedFd =
        rustix::fs::openat2(rustix::fs::CWD, existing, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    for name in &source.missing {
        match rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o755)) {
            Err(rustix::io::Errno::EXIST) => {}
            made => made?,
        }
        at = rustix::fs::openat(&at, name, flags | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use windlass_testkit::{TempDir, temp_dir};

    use super::{
        super::policy::{MountRule, PolicyRules},
        *,
    };

    struct TestDir {
        path: PathBuf,
        _dir: TempDir,
    }

    impl TestDir {
        fn new() -> Self {
            let dir = temp_dir("mounts").unwrap();
            fs::create_dir(dir.path().join("data")).unwrap();
            Self { path: fs::canonicalize(dir.path()).unwrap(), _dir: dir }
        }

        fn policy(&self) -> Policy {
            let rule = MountRule { path: self.path.join("data"), projects: None };
            let rules = PolicyRules { mounts: vec![rule], ..PolicyRules::default() };
            Policy::new(Path::new("/policy.yml"), rules)
        }
    }

    fn spec(mounts: &[(&Path, bool)]) -> TaskSpec {
        let mounts: Vec<_> = mounts
            .iter()
            .enumerate()
            .map(|(n, (path, optional))| {
                serde_json::json!({"instance_path": path, "path": format!("/in/{n}"), "optional": optional})
            })
            .collect();
        serde_json::from_value(serde_json::json!({
            "id": "00000000-0000-0000-0000-000000000001", "name": "t", "image_name": "i",
            "instance_mounts": mounts, "volumes": null,
        }))
        .unwrap()
    }

    fn sources(spec: &TaskSpec, policy: &Policy) -> Result<Vec<PathBuf>, MountError> {
        Ok(resolve_binds(spec, policy, |_| None)?.into_iter().map(|bind| bind.source).collect())
    }

    #[test]
    fn missing_mount_sources_are_created_only_below_an_allowed_path() {
        let scratch = TestDir::new();
        let inside = scratch.path.join("data/new/deep");
        assert!(check_policy(&spec(&[(&inside, false)]), &scratch.policy()).is_ok());
        assert!(!inside.exists(), "a look makes nothing");
        assert_eq!(sources(&spec(&[(&inside, false)]), &scratch.policy()).unwrap(), [inside.as_path()]);
        assert!(inside.is_dir());
        let outside = scratch.path.join("other/new");
        assert!(sources(&spec(&[(&outside, false)]), &scratch.policy()).is_err());
        assert!(!scratch.path.join("other").exists());
        assert_eq!(
            sources(&spec(&[(&outside, true)]), &scratch.policy()).unwrap(),
            [""; 0].map(PathBuf::from)
        );
    }

    #[test]
    fn x9_symlinks_are_resolved_before_the_policy_check() {
        let scratch = TestDir::new();
        let (link, dangling) = (scratch.path.join("data/link"), scratch.path.join("data/dangling"));
        symlink("/etc", &link).unwrap();
        symlink("/nonexistent-windlass", &dangling).unwrap();
        for path in [link.clone(), link.join("ssl"), link.join("new"), dangling.clone(), dangling.join("x")] {
            assert!(sources(&spec(&[(&path, false)]), &scratch.policy()).is_err(), "{}", path.display());
        }
        assert!(!Path::new("/etc/new").exists());
        // A link to an allowed path is permitted, and the bind uses the target of the link.
        let good = scratch.path.join("good");
        symlink(scratch.path.join("data"), &good).unwrap();
        assert_eq!(
            sources(&spec(&[(&good.join("a"), false)]), &scratch.policy()).unwrap(),
            [scratch.path.join("data/a")]
        );
    }

    #[test]
    fn x9_mount_paths_that_are_relative_or_contain_dot_dot_are_refused() {
        let scratch = TestDir::new();
        for path in
            [scratch.path.join("data/../data/x"), scratch.path.join("data/x/../../../etc"), "data".into()]
        {
            assert!(sources(&spec(&[(&path, false)]), &scratch.policy()).is_err(), "{}", path.display());
        }
    }

    #[test]
    fn a_symlink_created_after_the_check_is_not_followed() {
        let scratch = TestDir::new();
        let inside = scratch.path.join("data/a/b");
        let source = follow_links(inside.to_str().unwrap()).unwrap();
        symlink("/etc", scratch.path.join("data/a")).unwrap();
        assert!(create_missing(&source).is_err());
    }

    #[test]
    fn a_volume_mount_needs_its_volume() {
        let scratch = TestDir::new();
        let mut spec = spec(&[]);
        spec.volume_mounts = serde_json::from_str(r#"[{"name":"v","path":"/v"}]"#).unwrap();
        assert!(matches!(sources(&spec, &scratch.policy()), Err(MountError::NoVolume { .. })));
        let binds = resolve_binds(&spec, &scratch.policy(), |_| Some("/somewhere".into())).unwrap();
        assert_eq!(binds[0].source, Path::new("/somewhere"));
    }
}
