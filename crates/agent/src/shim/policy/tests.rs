use windlass_api::agent::shim::{InstanceMount, VolumeMount};

use super::{super::mounts::MountSource, *};

fn spec() -> TaskSpec {
    let json = r#"{"id":"00000000-0000-0000-0000-000000000001","name":"t","image_name":"debian:12"}"#;
    serde_json::from_str(json).unwrap()
}

fn policy(yaml: &str) -> Policy {
    let rules = parse("policy.yml", yaml.as_bytes()).unwrap();
    let home = PathBuf::from("/mnt/windlass");
    Policy { agents: vec![home], ..Policy::new(Path::new("/etc/windlass/policy.yml"), rules) }
}

/// Returns the policy's problems with a change of the minimal specification; mounts resolve to their own path.
fn problems(yaml: &str, change: impl FnOnce(&mut TaskSpec)) -> Vec<String> {
    let mut spec = spec();
    change(&mut spec);
    let real = |path: &String| MountSource { real: PathBuf::from(path), missing: Vec::new() };
    let seen = ResolvedPaths {
        mounts: spec.instance_mounts.iter().map(|mount| Ok(real(&mount.instance_path))).collect(),
        devices: spec
            .gpu_devices
            .iter()
            .map(|device| (device.path_on_host.clone(), Ok(PathBuf::from(&device.path_on_host))))
            .collect(),
        image: spec.image_name.strip_prefix("oci:").map(|path| Ok(PathBuf::from(path))),
    };
    policy(yaml).decide(&spec, &seen).problems.into_iter().map(|problem| problem.what).collect()
}

fn mount(path: &str) -> InstanceMount {
    InstanceMount { instance_path: path.to_owned(), path: "/in".to_owned(), optional: false }
}

#[track_caller]
fn may_mount(yaml: &str, path: &str) {
    assert_eq!(problems(yaml, |spec| spec.instance_mounts.push(mount(path))), [""; 0]);
}

#[track_caller]
fn may_not_mount(yaml: &str, path: &str) {
    assert_ne!(problems(yaml, |spec| spec.instance_mounts.push(mount(path))), [""; 0], "{path} is given");
}

#[test]
fn a_plain_task_is_allowed_and_gets_the_defaults() {
    assert_eq!(problems("", |_| {}), [""; 0]);
    let limits = policy("").limits(&spec());
    assert_eq!((limits.pids, limits.new_privileges), (PIDS_DEFAULT, false));
    assert!(limits.capabilities.contains(&"SETUID".to_owned()));
    assert!(!limits.capabilities.contains(&"SYS_ADMIN".to_owned()));
}

#[test]
fn x9_privileged_tasks_are_forbidden_unless_the_policy_allows_them() {
    let privileged = |spec: &mut TaskSpec| spec.privileged = true;
    assert_eq!(problems("", privileged), ["privileged: not allowed"]);
    assert_eq!(problems("privileged: true", privileged), [""; 0]);
}

#[test]
fn x9_the_policy_can_forbid_the_host_network() {
    assert_eq!(problems("host_network: false", |_| {}), ["network_mode host: not allowed"]);
    let bridge = |spec: &mut TaskSpec| spec.network_mode = NetworkMode::Bridge;
    assert_eq!(problems("host_network: false", bridge), [""; 0]);
}

#[test]
fn x9_only_paths_below_a_policy_entry_can_be_mounted() {
    for path in ["/mnt/cache", "/srv", "/data/set/1", "/scratch/x", "/opt"] {
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
fn x9_a_mount_can_be_reserved_for_projects() {
    let yaml = "mounts: [/data, {path: /data/vision, projects: [vision, audio]}, {path: /etc/ssl, projects: [audio]}]";
    let refused = |project: &str, path: &str| {
        problems(yaml, |spec| {
            spec.project = project.to_owned();
            spec.instance_mounts.push(mount(path));
        })
    };
    for (project, path) in [
        ("vision", "/data"),
        ("vision", "/data/vision"),
        ("audio", "/data/vision/set"),
        ("text", "/data/text"),
        ("", "/data/text"),
        ("audio", "/etc/ssl"),
    ] {
        assert_eq!(refused(project, path), [""; 0], "{project} {path}");
    }
    // Neither the directory nor what is below it, nor a directory that contains it; a task without a project has none.
    for (project, path) in [
        ("text", "/data/vision"),
        ("text", "/data/vision/set"),
        ("text", "/data"),
        ("", "/data/vision"),
        ("vision", "/etc/ssl"),
    ] {
        let message = refused(project, path);
        assert!(message.len() == 1 && message[0].ends_with("which is for other projects"), "{message:?}");
    }
    assert!(parse("policy.yml", b"mounts: [{projects: [a]}]").unwrap_err().contains("needs a `path`"));
    assert!(parse("policy.yml", b"mounts: [{path: data}]").is_err());
    assert!(parse("policy.yml", b"mounts: [{path: /data, project: a}]").is_err());
}

#[test]
fn x9_sensitive_host_paths_need_an_exact_policy_entry() {
    let all = "mounts: [/]";
    for path in ["/etc", "/etc/ssl", "/proc/1", "/sys", "/dev/sda", "/root/.ssh", "/run/windlass"] {
        may_not_mount(all, path);
    }
    for path in ["/run/docker.sock", "/run", "/var", "/var/lib/docker/volumes", "/mnt", "/mnt/windlass/tasks"]
    {
        may_not_mount(all, path);
    }
    may_mount(all, "/opt");
    // No entry permits the agent's home, here /mnt/windlass, or its parents.
    for path in ["/mnt/windlass", "/mnt/windlass/tasks", "/mnt", "/"] {
        may_not_mount(&format!("mounts: [{path}]"), path);
    }
    may_mount("mounts: [/etc/ssl/certs]", "/etc/ssl/certs");
    may_not_mount("mounts: [/etc/ssl]", "/etc/ssl/certs");
    may_not_mount("mounts: [/etc/ssl/certs]", "/etc/ssl");
}

#[test]
fn an_image_on_this_host_must_be_below_an_allowed_path() {
    let image = |yaml: &str| problems(yaml, |spec| spec.image_name = "oci:/images/a".to_owned());
    assert_eq!(image("mounts: [/images]"), Vec::<String>::new());
    assert_eq!(image("mounts: [/images]\nregistries: [ghcr.io]"), Vec::<String>::new());
    assert_eq!(image("mounts: [/data]"), ["image oci:/images/a: /images/a is not below an allowed path"]);
    assert_eq!(image("").len(), 1);
}

#[test]
fn a_forbidden_optional_mount_is_skipped() {
    let mut spec = spec();
    spec.instance_mounts = vec![mount("/etc"), mount("/mnt/a")];
    spec.instance_mounts[0].optional = true;
    let source = |path: &str| Ok(MountSource { real: PathBuf::from(path), missing: Vec::new() });
    let seen = ResolvedPaths { mounts: vec![source("/etc"), source("/mnt/a")], ..ResolvedPaths::default() };
    spec.instance_mounts[1].path = "/other".to_owned();
    let policy = policy("mounts: [/mnt/a]");
    assert_eq!(policy.decide(&spec, &seen), PolicyDecision { problems: Vec::new(), left_out: vec![0] });
}

#[test]
fn mounts_over_agent_or_kernel_paths_are_refused() {
    for target in ["/", "in", "/a/../b", "/proc/x", "/sys", "/windlass/run", "/a:b", "//"] {
        let reported = problems("", |spec| {
            spec.volume_mounts.push(VolumeMount { name: "v".to_owned(), path: target.to_owned() });
        });
        assert_eq!(reported.len(), 1, "{target}: {reported:?}");
    }
    let some = "mounts: [/mnt/a, /mnt/b]";
    let twice = problems(some, |spec| spec.instance_mounts = vec![mount("/mnt/a"), mount("/mnt/b")]);
    assert_eq!(twice, ["mount at /in: two mounts have this target"]);
}

#[test]
fn only_images_from_allowed_registries_are_accepted() {
    let image = |name: &str| {
        let name = name.to_owned();
        move |spec: &mut TaskSpec| spec.image_name = name
    };
    let yaml = "registries: [docker.io/library, ghcr.io/team, localhost:5000]";
    for name in ["debian:12", "docker.io/library/debian", "ghcr.io/team/x@sha256:00", "localhost:5000/a/b"] {
        assert_eq!(problems(yaml, image(name)), [""; 0], "{name}");
    }
    for name in ["user/x", "ghcr.io/teammate/x", "ghcr.io/other", "evil.example/ghcr.io/team/x"] {
        assert_eq!(problems(yaml, image(name)).len(), 1, "{name}");
    }
    assert_eq!(problems("registries: []", image("debian")).len(), 1);
}

#[test]
fn limits_and_mirrors_of_images_are_read_from_the_policy() {
    let rules = parse(
        "policy.yml",
        b"plain_http_registries: [m:5000]\nimages: {mirrors: {docker.io: [m:5000]}, max_size: 2GB, max_age: 3d}\n",
    )
    .unwrap();
    let policy = Policy::new(Path::new("policy.yml"), rules);
    let mut settings = crate::image::StoreSettings::default();
    settings.apply(&policy);
    assert_eq!((settings.bytes_max, settings.age_max.as_secs()), (Some(2 << 30), 3 * 86_400));
    assert_eq!(settings.registry.mirrors["docker.io"], ["m:5000"]);
    assert_eq!(settings.registry.plain_http, ["m:5000"]);
    let mut unchanged = crate::image::StoreSettings::default();
    unchanged.apply(&Policy::new(Path::new("policy.yml"), PolicyRules::default()));
    assert_eq!((unchanged.bytes_max, unchanged.age_max.as_secs()), (None, 30 * 86_400));
    let reported = parse("policy.yml", b"images: {mirror: {}, max_size: lots}\n").unwrap_err();
    assert!(reported.contains("mirror") && reported.contains("max_size"), "{reported}");
}

#[test]
fn the_policy_limits_devices_users_and_pids() {
    let device = |path: &str| {
        let device = format!(r#"[{{"path_on_host":"{path}","path_in_container":"/dev/x"}}]"#);
        move |spec: &mut TaskSpec| spec.gpu_devices = serde_json::from_str(&device).unwrap()
    };
    assert_eq!(problems("", device("/dev/nvidia0")), [""; 0]);
    assert_eq!(problems("", device("/dev/dri/renderD128")), [""; 0]);
    assert_eq!(problems("", device("/dev/sda")), ["device /dev/sda: not an allowed device"]);
    assert_eq!(problems("", device("/dev/nvidia/../sda")).len(), 1);
    assert_eq!(problems("devices: [/etc]", device("/etc/shadow")), ["device /etc/shadow: not below /dev"]);
    let keys = |user: &'static str| {
        move |spec: &mut TaskSpec| {
            spec.host_ssh_keys = vec!["k".to_owned()];
            spec.host_ssh_user = user.to_owned();
        }
    };
    assert_eq!(problems("", keys("ubuntu")), [""; 0]);
    assert_eq!(problems("", keys("root")), [""; 0]);
    assert_eq!(problems("host_ssh_users: []", keys("root")), ["host_ssh_keys for root: user not allowed"]);
    assert_eq!(problems("host_ssh_users: [root]", keys("root")), [""; 0]);
    assert_eq!(problems("host_ssh_users: [root]", keys("ubuntu")).len(), 1);
    assert_eq!(problems("pids: 10", |spec| spec.pids = 11), ["pids 11: at most 10"]);
}

#[test]
fn a_refusal_lists_every_problem_and_the_policy_lines_that_would_allow_it() {
    let policy = policy("");
    let mut spec = spec();
    spec.privileged = true;
    spec.instance_mounts.push(mount("/etc\n"));
    let seen = ResolvedPaths { mounts: vec![Err("does not exist".to_owned())], ..ResolvedPaths::default() };
    let text = policy.render(&policy.decide(&spec, &seen).problems);
    assert!(text.contains("- privileged: not allowed\n"), "{text}");
    assert!(text.contains("hint: to allow it, set `privileged: true` in /etc/windlass/policy.yml"), "{text}");
    assert!(text.contains("- mount /etc\\n: does not exist"), "{text}");
    spec.instance_mounts = vec![mount("/opt/nope")];
    let real = MountSource { real: "/opt/nope".into(), missing: Vec::new() };
    let seen = ResolvedPaths { mounts: vec![Ok(real)], ..ResolvedPaths::default() };
    let text = policy.render(&policy.decide(&spec, &seen).problems);
    assert!(text.contains("hint: to allow it, add `/opt/nope` to `mounts` in"), "{text}");
    assert!(!text.contains('['), "brackets are markup for a dstack server: {text}");
}

#[test]
fn no_policy_entry_allows_mounts_of_agent_directories() {
    let dir = windlass_testkit::temp_dir("policy").unwrap();
    let rules = parse("policy.yml", b"mounts: [/var, /]").unwrap();
    let policy = Policy::new(Path::new("/policy.yml"), rules).with_agent_dirs([dir.path().to_owned()]);
    let mut policy = policy;
    policy.agents.push("/var/lib/windlass".into());
    let real = fs::canonicalize(dir.path()).unwrap();
    for path in ["/var", "/var/lib/windlass/agent", "/var/lib/windlass/home/enrolment.json", "/"] {
        let why = policy.mount_refusal(Path::new(path), "").unwrap();
        assert!(why.0.contains("which is the agent's") && why.1.is_none(), "{path}: {why:?}");
    }
    assert!(policy.mount_refusal(&real.join("tasks"), "").is_some());
    assert_eq!(policy.mount_refusal(Path::new("/var/cache"), ""), None);
}

#[test]
fn the_policy_file_sets_the_mode_and_users_of_plain_processes() {
    let rules = |yaml: &str| parse("policy.yml", yaml.as_bytes());
    let policy = |yaml: &str| Policy::new(Path::new("/p"), rules(yaml).unwrap());
    let mode = |yaml: &str| policy(yaml).processes(ProcessMode::Own, Vec::new()).mode;
    assert_eq!((mode(""), mode("processes: refused")), (ProcessMode::Own, ProcessMode::Refused));
    let all =
        policy("{users: [nobody, ubuntu], user_ids: 5000-5999}").processes(ProcessMode::Confined, Vec::new());
    assert_eq!((all.users.len(), all.user_ids.first, all.user_ids.last), (2, 5000, 5999));
    for bad in ["processes: free", "users: [root]", "users: ['0']", "user_ids: 1-2", "user_ids: 5000"] {
        assert!(rules(bad).is_err(), "{bad}");
    }
}

#[test]
fn an_error_in_the_policy_file_is_reported_with_its_position() {
    let reported = parse("policy.yml", b"privilged: true\nmounts: [etc]\npids: 0\n").unwrap_err();
    for part in
        ["policy.yml:1:1", "did you mean `privileged`?", "`etc` is not an absolute path", "policy.yml:3:7"]
    {
        assert!(reported.contains(part), "{part} is not in {reported}");
    }
    assert!(parse("policy.yml", b"- a\n").is_err());
    assert_eq!(parse("policy.yml", b"# nothing\n").unwrap(), PolicyRules::default());
    let json = br#"{"capabilities": ["cap_sys_nice"], "registries": null}"#;
    let rules = parse("policy.yml", json).unwrap();
    assert_eq!((rules.capabilities, rules.registries), (vec!["SYS_NICE".to_owned()], None));
}
