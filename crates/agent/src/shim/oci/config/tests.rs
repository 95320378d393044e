use windlass_api::agent::shim::TaskSpec;
use windlass_model::id::SubmissionId;

use super::*;
use crate::{shim::runtime::PolicyLimits, task_dir::TaskDir};

fn prepared(change: impl FnOnce(&mut PreparedTask)) -> PreparedTask {
    let id: SubmissionId = "9c1f0000-0000-4000-8000-000000000001".parse().unwrap();
    let spec: TaskSpec =
        serde_json::from_value(json!({"id": id, "name": "train-1-0-0", "image_name": "a:1"})).unwrap();
    let mut task = PreparedTask {
        spec,
        dir: TaskDir::new(Path::new("/home"), id),
        gpus: Vec::new(),
        binds: Vec::new(),
        publish: Vec::new(),
        limits: PolicyLimits { pids: 100, new_privileges: false, capabilities: vec!["CHOWN".into()] },
        env: vec![("A".into(), "task".into())],
    };
    change(&mut task);
    task
}

fn build(task: &PreparedTask, account: &Account) -> Value {
    build_for(task, account, None)
}

fn build_for(task: &PreparedTask, account: &Account, rootless: Option<RootlessInputs>) -> Value {
    let device = DeviceNode {
        path: "/dev/dri/card0".into(),
        kind: 'c',
        major: 226,
        minor: 0,
        mode: 0o20660,
        uid: 0,
        gid: 44,
    };
    let gpus = GpuEdits {
        devices: vec![device],
        library_dir: Some("/libs"),
        groups: [44].into(),
        ..GpuEdits::default()
    };
    let inputs = ContainerInputs {
        entrypoint: &["/windlass/agent".to_owned()],
        agent: Path::new("/home/bin/00"),
        run_dir: Some(Path::new("/home/run")),
        git: Some(Path::new("/home/git/00")),
        image_env: &["A=image".to_owned(), "B=image".to_owned(), "PATH=/opt".to_owned()],
        working_dir: "",
        account,
        rootfs: Path::new("/home/rootfs"),
        files: Path::new("/home/files"),
        hostname: "node-1",
        cgroup: "/windlass/h/t/container",
        has_cgroup_v2: true,
        gpus: &gpus,
        open_files: 1024,
        has_infiniband: false,
        own_capabilities: &["CHOWN".to_owned(), "SYS_ADMIN".to_owned()],
        rootless,
        notices: &rootless.map(|_| "no limits".to_owned()).into_iter().collect::<Vec<_>>(),
        is_shared: &|path| path == Path::new("/shared"),
        locked_options: &|path| match rootless {
            Some(_) if path.starts_with("/locked") => vec!["nosuid", "noexec", "noatime"],
            Some(_) | None => Vec::new(),
        },
    };
    container_config(task, &inputs)
}

#[test]
fn a_container_has_the_limits_and_rights_of_its_task_only() {
    let config = build(
        &prepared(|task| {
            task.spec.cpu = 1.5;
            task.spec.memory = 1 << 30;
            task.spec.shm_size = 1 << 20;
        }),
        &Account::root(),
    );
    let process = &config["process"];
    assert_eq!(process["capabilities"]["bounding"], json!(["CAP_CHOWN"]));
    assert_eq!(process["capabilities"]["effective"], json!(["CAP_CHOWN"]));
    assert_eq!(process["noNewPrivileges"], true);
    assert_eq!((&process["cwd"], &process["terminal"]), (&json!("/"), &json!(false)));
    let resources = &config["linux"]["resources"];
    assert_eq!(resources["memory"], json!({"limit": 1 << 30, "swap": 1 << 30}));
    assert_eq!(resources["cpu"], json!({"quota": 150_000, "period": 100_000}));
    assert_eq!(resources["pids"], json!({"limit": 100}));
    assert_eq!(resources["devices"][0], json!({"allow": false, "access": "rwm"}));
    assert_eq!(resources["devices"][1]["major"], 226);
    let shm =
        config["mounts"].as_array().unwrap().iter().find(|one| one["destination"] == "/dev/shm").unwrap();
    assert_eq!(shm["options"], json!(["nosuid", "nodev", "exec", "mode=1777", "size=1048576"]));
    let kinds: Vec<&str> = config["linux"]["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["type"].as_str())
        .collect();
    assert_eq!(kinds, ["mount", "pid", "ipc", "uts", "cgroup"], "the network is that of the host");
    assert_eq!(config["linux"]["seccomp"]["defaultAction"], "SCMP_ACT_ERRNO");
}

#[test]
fn a_user_other_than_root_starts_without_capabilities() {
    let account = Account { uid: 1000, gid: 1000, groups: vec![1000, 2000], ..Account::root() };
    let config = build(&prepared(|_| {}), &account);
    assert_eq!(
        config["process"]["user"],
        json!({"uid": 1000, "gid": 1000, "additionalGids": [1000, 2000, 44]})
    );
    assert_eq!(config["process"]["capabilities"]["bounding"], json!(["CAP_CHOWN"]));
    assert_eq!(config["process"]["capabilities"]["effective"], json!([]));
}

#[test]
fn a_privileged_container_has_the_capabilities_of_the_agent_and_no_filter() {
    let config = build(&prepared(|task| task.spec.privileged = true), &Account::root());
    assert_eq!(config["process"]["capabilities"]["effective"], json!(["CAP_CHOWN", "CAP_SYS_ADMIN"]));
    assert_eq!(config["process"]["noNewPrivileges"], false);
    assert_eq!(config["linux"]["resources"]["devices"], json!([{"allow": true, "access": "rwm"}]));
    assert!(config["linux"]["seccomp"].is_null() && config["linux"]["maskedPaths"].is_null());
}

#[test]
fn variables_of_the_task_override_those_of_the_image() {
    let config = build(&prepared(|_| {}), &Account::root());
    let env: Vec<&str> =
        config["process"]["env"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let expected = [
        "HOSTNAME=node-1",
        "HOME=/root",
        "B=image",
        "PATH=/opt",
        "LD_LIBRARY_PATH=/libs",
        "A=task",
        "WINDLASS_TASK_ID=9c1f0000-0000-4000-8000-000000000001",
        "WINDLASS_DEVICE_GROUPS=44",
    ];
    assert_eq!(env, expected);
}

#[test]
fn binds_are_read_only_on_request_and_propagate_inwards_only() {
    let bind = |source: &str, target: &str, read_only| BindMount {
        source: source.into(),
        target: target.into(),
        read_only,
    };
    let config = build(
        &prepared(|task| {
            task.binds = vec![bind("/x", "/data/deep", true), bind("/shared", "/data", false)];
        }),
        &Account::root(),
    );
    let mounts = config["mounts"].as_array().unwrap();
    let last: Vec<(&str, &Value)> = mounts
        .iter()
        .rev()
        .take(2)
        .map(|one| (one["destination"].as_str().unwrap(), &one["options"]))
        .collect();
    assert_eq!(last[0], ("/data/deep", &json!(["bind", "ro", "rprivate", "nosuid", "nodev"])));
    assert_eq!(last[1], ("/data", &json!(["rbind", "rslave", "nosuid", "nodev"])));
}

#[test]
fn users_are_parsed_as_names_or_numbers_with_a_group() {
    let parsed = |text: &str| {
        let user = parse_user(text);
        (user.uid, user.username, user.gid, user.groupname)
    };
    let name = |text: &str| Some(text.to_owned());
    assert_eq!(parsed("1000"), (Some(1000), None, None, None));
    assert_eq!(parsed("app"), (None, name("app"), None, None));
    assert_eq!(parsed("app:staff"), (None, name("app"), None, name("staff")));
    assert_eq!(parsed("1:2"), (Some(1), None, Some(2), None));
}

#[test]
fn a_container_of_an_agent_without_root_requests_nothing_that_needs_root() {
    let find = |config: &Value, destination: &str| -> Value {
        let mounts = config["mounts"].as_array().unwrap().iter();
        mounts.rev().find(|one| one["destination"] == destination).cloned().unwrap_or_default()
    };
    for network in [NetworkMode::Host, NetworkMode::Bridge] {
        let task = prepared(|task| task.spec.network_mode = network);
        let config = build_for(&task, &Account::root(), Some(RootlessInputs { has_ids: false }));
        let linux = config["linux"].as_object().unwrap();
        assert!(!linux.contains_key("cgroupsPath") && !linux.contains_key("resources"), "{linux:?}");
        assert!(!config["process"].as_object().unwrap().contains_key("oomScoreAdj"));
        assert_eq!(config["process"]["user"]["additionalGids"], json!([]), "they do not exist");
        assert!(!find(&config, "/dev/pts")["options"].as_array().unwrap().contains(&json!("gid=5")));
        let kind = if network == NetworkMode::Host { "bind" } else { "sysfs" };
        assert_eq!(find(&config, "/sys")["type"], kind);
        assert_eq!(find(&config, "/sys/fs/cgroup")["type"], "tmpfs", "those of the host are hidden");
        let env = config["process"]["env"].as_array().unwrap();
        assert!(env.contains(&json!("WINDLASS_NOTICES=no limits")), "{env:?}");
        let as_root = build(&task, &Account::root());
        for same in ["maskedPaths", "readonlyPaths", "seccomp"] {
            assert_eq!(config["linux"][same], as_root["linux"][same]);
        }
        assert_eq!(config["process"]["capabilities"], as_root["process"]["capabilities"]);
    }
    let config = build_for(&prepared(|_| {}), &Account::root(), Some(RootlessInputs { has_ids: true }));
    assert_eq!(config["process"]["user"]["additionalGids"], json!([0, 44]));
}

#[test]
fn mounts_in_a_user_namespace_keep_the_locked_options_of_their_source() {
    let task = prepared(|task| {
        let bind = |source: &str, target: &str, read_only| BindMount {
            source: source.into(),
            target: target.into(),
            read_only,
        };
        task.binds = vec![bind("/locked/x", "/x", true), bind("/free", "/y", true)];
    });
    let options = |rootless| {
        let config = build_for(&task, &Account::root(), rootless);
        let mounts = config["mounts"].as_array().unwrap();
        { mounts.iter().rev().take(2).rev() }.map(|one| one["options"].clone()).collect::<Vec<_>>()
    };
    let free = json!(["bind", "ro", "rprivate", "nosuid", "nodev"]);
    let locked = json!(["bind", "ro", "rprivate", "nosuid", "nodev", "noexec", "noatime"]);
    assert_eq!(options(Some(RootlessInputs { has_ids: false })), [locked, free.clone()]);
    assert_eq!(options(None), [free.clone(), free], "root may change every option");
}
