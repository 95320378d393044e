//! A fleet of hosts over SSH, made, used and deleted with dstack's command line.
//!
//! The client reaches a job as it always does: through the SSH server of the host, with a key that the agent lets
//! pass for the life of the job, to the SSH server in the job. Hosts refuse that for `root`, so the account is another.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
};

use windlass_testkit::{
    lab::{Lab, WORKER},
    story::{Ground as _, Story},
};

use super::person::{Person, SMALL};
use crate::stage::{Machines, Stage};

#[tokio::test(flavor = "multi_thread")]
async fn dstack_makes_a_fleet_of_hosts_runs_on_it_goes_in_and_deletes_it() {
    let lab = Lab::start(1).unwrap();
    let mut stage = Stage::new(Machines::None).await;
    let person = Person::of_project(&stage);
    let mut story = Story::new("dstack-remote", &person);
    let address = lab.host(1).addr().to_string();
    story.mask(&address, "[HOST]");
    fs::copy(lab.key_file(), person.home().join("key")).unwrap();
    let key = person.home().join("key");
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let hosts = format!(
        "type: fleet\nname: lab\nssh_config:\n  user: {WORKER}\n  identity_file: {}\n  hosts: [{address}]\n",
        key.display()
    );
    person.file("fleet.yml", &hosts);
    story.run(&["apply", "-f", "fleet.yml", "-y"]);
    story.run(&["fleet", "-v"]);

    let page = "busybox mkdir -p /tmp/page && echo pong > /tmp/page/index.html && \
                busybox httpd -p 127.0.0.1:7007 -h /tmp/page";
    let wait = "until [ -e /var/tmp/go ]; do sleep 0.1; done";
    let task = format!(
        "type: task\nname: far\nimage: none\nports: ['*:7007']\ncommands:\n  - {page}\n  - echo up\n  - {wait}\n  - echo down\n{SMALL}"
    );
    person.file("far.yml", &task);
    let apply = ["apply", "-f", "far.yml", "-y"];
    let going = person.start(&apply);
    going.says("up\n");
    let shell = person.shell("far", "cat /tmp/page/index.html; id -un");
    assert_eq!((shell.stdout.as_str(), shell.code), ("pong\nroot\n", Some(0)), "{shell:?}");
    // Whoever goes away leaves the run alone.
    going.interrupt();
    story.add(&apply, &going.end());

    let attach = ["attach", "far", "-p", "*:7007"];
    let going = person.start(&attach);
    going.says("Press Ctrl+C");
    let port = going.text_between("localhost:", " -> 7007");
    assert!(page_at(&port).ends_with("pong\n"), "{}", page_at(&port));
    going.interrupt();
    story.mask(&format!("localhost:{port}"), "localhost:[PORT]");
    story.add(&attach, &going.end());

    let attach = ["attach", "far", "--logs"];
    let going = person.start(&attach);
    going.says("up\n");
    lab.host(1).run("touch /var/tmp/go").unwrap();
    story.add(&attach, &going.end());
    stage.reaches("far", &["done"]).await;
    stage.eventually("the person's key is gone", || {
        let keys = lab.host(1).run(&format!("cat /home/{WORKER}/.ssh/authorized_keys")).unwrap();
        !String::from_utf8_lossy(&keys.stdout).contains("windlass-task=")
    });

    story.run(&["fleet", "delete", "lab", "-y"]);
    story.run(&["fleet"]);
    story.run(&["apply", "-f", "far.yml", "-y", "-d"]);
    story.end();
}

fn page_at(port: &str) -> String {
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
