//! SSH fleets with the dstack client: hosts, a task on one of them, a login, and their removal.

use std::{fs, os::unix::fs::PermissionsExt as _};

use windlass_testkit::{
    cli_snapshot::{CliSnapshot, SnapshotEnv as _},
    lab::{Lab, WORKER},
};

use super::dstack_user::{DstackUser, SMALL};
use crate::test_env::{HostMode, TestEnv};

/// Writes the configuration of a fleet, with the key next to it.
fn describe(person: &DstackUser, lab: &Lab) {
    let key = person.home().join("lab.key");
    fs::copy(lab.key_file(), &key).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let hosts: String = lab.hosts().iter().map(|host| format!("    - {}\n", host.addr())).collect();
    let text = format!(
        "type: fleet\nname: lab\nplacement: cluster\nssh_config:\n  user: {WORKER}\n  identity_file: {}\n  \
         network: {}\n  hosts:\n{hosts}",
        key.display(),
        lab.network()
    );
    person.file("lab.yml", &text);
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_creates_uses_and_deletes_an_ssh_fleet() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    let person = DstackUser::with_project(&env);
    let mut transcript = CliSnapshot::new("dstack-fleet", &person);
    for (host, mask) in lab.hosts().iter().zip(["[HOST 1]", "[HOST 2]"]) {
        transcript.mask_patterns(&host.addr().to_string(), mask);
    }
    describe(&person, &lab);
    transcript.run(&["apply", "-f", "lab.yml", "-y"]);
    env.wait_for_hosts("lab", 2).await;
    transcript.run(&["fleet"]);

    let text = format!(
        "type: task\nname: away\nimage: none\ncommands:\n  - echo up\n  \
         - until [ -e /var/tmp/go ]; do sleep 0.1; done\n  - echo down\n{SMALL}"
    );
    person.file("away.yml", &text);
    let args = ["apply", "-f", "away.yml", "-y"];
    let going = person.start(&args);
    going.says("up\n");
    // Through the host, as configured by the client.
    let shell = person.shell("away", "hostname");
    let known: Vec<String> = lab.hosts().iter().map(|host| format!("{}\n", host.name())).collect();
    assert!(known.contains(&shell.stdout), "{shell:?} is none of {known:?}");
    for host in lab.hosts() {
        host.run("touch /var/tmp/go").unwrap();
    }
    transcript.add(&args, &going.end());
    transcript.run(&["logs", "away"]);

    transcript.run(&["fleet", "delete", "lab", "-y"]);
    // It is listed until its hosts are free.
    person.until(&["fleet"], |ran| !ran.stdout.contains("lab"));
    transcript.run(&["fleet"]);
    env.eventually("no agent is left", || {
        let is_ours = |host: &windlass_testkit::lab::LabHost| {
            host.processes().unwrap().iter().any(|process| process.command.contains("windlass-agent"))
        };
        !lab.hosts().iter().any(is_ours)
    });
    transcript.end();
}
