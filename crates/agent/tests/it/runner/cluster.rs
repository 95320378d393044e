//! Environment of the nodes of a replica.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::{Value, json};

use crate::support::{
    TempDir,
    runner::{Runner, RunnerSetup, job},
    temp_dir,
};

const USER: u32 = 64001;

/// Starts a runner in a separate mount namespace where a user has a home in the scratch directory.
fn start(scratch: &TempDir) -> Runner {
    let home = scratch.path().join("home");
    std::fs::create_dir_all(home.join(".ssh")).unwrap();
    std::fs::write(home.join(".ssh/config"), "ServerAliveInterval 5\n").unwrap();
    for made in [home.clone(), home.join(".ssh"), home.join(".ssh/config")] {
        std::os::unix::fs::chown(made, Some(USER), Some(USER)).unwrap();
    }
    let passwd = scratch.path().join("passwd");
    let text = format!("root:x:0:0:root:/root:/bin/sh\nrower:x:{USER}:{USER}::{}:/bin/sh\n", home.display());
    std::fs::write(&passwd, text).unwrap();
    let mut setting = RunnerSetup::new();
    let bind = format!("mount --make-rprivate / && mount --bind '{}' /etc/passwd", passwd.display());
    setting.wrapper =
        Some(format!("exec unshare --mount /bin/sh -c '{}; exec \"$@\"' sh \"$@\"", bind.replace('\'', "")));
    setting.start()
}

fn submit(script: &str) -> Value {
    let mut submit = job(json!({
        "commands": ["/bin/sh", "-c", script],
        "user": { "username": "rower" }, "working_dir": "~", "job_num": 1, "jobs_per_replica": 2,
        "ssh_key": { "private": "PRIVATE\n", "public": "ssh-ed25519 PUBLIC" },
    }));
    submit["cluster_info"] = json!({
        "job_ips": ["10.4.0.7", "10.4.0.8"], "master_job_ip": "10.4.0.7", "gpus_per_job": 8, "gpus_per_node": [8, 0],
    });
    submit
}

#[test]
fn the_nodes_of_a_replica_find_each_other_and_leave_no_key_behind() {
    let scratch = temp_dir("cluster").unwrap();
    let runner = start(&scratch);
    let ssh = scratch.path().join("home/.ssh");
    runner.go(&submit(
        "key=$(ls ~/.ssh/windlass_job_* | grep -v pub$); cp $key copy; stat -c '%u %a' $key ~/.ssh/config; \
         cat \"$DSTACK_MPI_HOSTFILE\"; echo $WINDLASS_NODE_RANK $DSTACK_GPUS_NUM $DSTACK_GPUS_PER_NODE; \
         echo \"$DSTACK_NODES_IPS\"; cat ~/.ssh/config",
    ));
    assert_eq!(runner.ended().state, "done", "{}", runner.log_text());
    let log = runner.log_text();
    let facts = format!("{USER} 600\n{USER} 600\n10.4.0.7 slots=8\n10.4.0.8\n1 8 0\n10.4.0.7\n10.4.0.8\n");
    assert!(log.starts_with(&facts), "{log}");
    let config = &log[facts.len()..];
    assert!(config.contains("Host 10.4.0.8\n    Port 10022\n    User rower\n"), "{config}");
    assert!(config.ends_with("end\nServerAliveInterval 5\n"), "{config}");
    assert_eq!(std::fs::read_to_string(scratch.path().join("home/copy")).unwrap(), "PRIVATE\n");
    // Only the original files are left.
    let left: Vec<_> = std::fs::read_dir(&ssh).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["config"]);
    assert_eq!(std::fs::read_to_string(ssh.join("config")).unwrap(), "ServerAliveInterval 5\n");
    assert!(!runner.run_dir().join("hostfile").exists());
}

#[test]
fn the_runner_does_not_follow_a_symlink_in_the_home_of_the_user() {
    let scratch = temp_dir("cluster").unwrap();
    let runner = start(&scratch);
    let target = scratch.path().join("roots");
    std::fs::write(&target, "root's own").unwrap();
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o644)).unwrap();
    let config = scratch.path().join("home/.ssh/config");
    std::fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink(&target, &config).unwrap();
    let end = runner.run_to_end(&submit("true"));
    assert_eq!((end.state.as_str(), end.termination_reason.as_str()), ("failed", "executor_error"));
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "root's own");
    assert_eq!(std::fs::metadata(&target).unwrap().uid(), 0);
}
