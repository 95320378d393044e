//! Runs on this machine, from submit to end: attached and not, followed, stopped, aborted, changed, refused.

use std::fs;

use windlass_testkit::story::Story;

use super::person::{Person, SMALL};
use crate::{
    containers::{IMAGE, image},
    stage::{Machines, Stage},
};

/// A task that says `up`, waits to be let go, and ends with a status.
fn waits(person: &Person, name: &str, more: &str, code: u8) {
    let go = person.home().join(format!("{name}.go"));
    let wait = format!("until [ -e {} ]; do sleep 0.1; done", go.display());
    let text = format!(
        "type: task\nname: {name}\n{more}commands:\n  - echo up\n  - {wait}\n  - echo down\n  - exit {code}\n{SMALL}"
    );
    person.file(&format!("{name}.yml"), &text);
}

fn let_go(person: &Person, name: &str) {
    fs::write(person.home().join(format!("{name}.go")), "").unwrap();
}

/// Attached from the submit to the job's last word.
fn attached(story: &mut Story<'_, Person>, person: &Person, name: &str) {
    let file = format!("{name}.yml");
    let args = ["apply", "-f", &file, "-y"];
    let going = person.start(&args);
    going.says("up\n");
    let_go(person, name);
    story.add(&args, &going.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_follows_a_task_to_its_end() {
    let stage = Stage::new(Machines::Processes).await;
    let person = Person::of_project(&stage);
    let mut story = Story::new("dstack-attached", &person);
    waits(&person, "good", "image: none\n", 0);
    attached(&mut story, &person, "good");
    waits(&person, "bad", "image: none\n", 3);
    attached(&mut story, &person, "bad");
    story.run(&["ps", "-a"]);
    story.run(&["ps", "-a", "-v"]);
    story.run(&["logs", "good"]);
    story.run(&["logs", "bad"]);
    story.run(&["logs", "ugly"]);
    story.run(&["attach", "bad"]);
    story.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_watches_stops_and_replaces_what_runs() {
    let mut stage = Stage::new(Machines::Processes).await;
    let person = Person::of_project(&stage);
    let mut story = Story::new("dstack-detached", &person);
    waits(&person, "job", "image: none\n", 0);
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    stage.says("job", "up").await;
    story.run(&["ps"]);
    story.run(&["ps", "-v"]);
    let shown = person.run(&["run", "get", "job", "--json"]).ok().json();
    assert_eq!((&shown["status"], &shown["id"]), (&"running".into(), &stage.run("job").await["id"]));
    let listed = person.run(&["ps", "--json"]).ok().json();
    assert_eq!(listed["runs"][0]["id"], shown["id"]);
    story.run(&["logs", "job"]);

    // Nothing has changed; then something that the run would have to end for.
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    waits(&person, "job", "image: none\nenv: [LEVEL=2]\n", 0);
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    stage.says("job", "up").await;

    let args = ["attach", "job", "--logs"];
    let going = person.start(&args);
    going.says("up\n");
    let_go(&person, "job");
    story.add(&args, &going.end());

    fs::remove_file(person.home().join("job.go")).unwrap();
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    stage.says("job", "up").await;
    story.run(&["stop", "job", "-y"]);
    stage.reaches("job", &["terminated"]).await;
    story.run(&["apply", "-f", "job.yml", "-y", "-d"]);
    stage.says("job", "up").await;
    story.run(&["stop", "job", "-x", "-y"]);
    stage.reaches("job", &["terminated"]).await;
    story.run(&["stop", "job", "-y"]);
    story.run(&["stop", "nothing", "-y"]);
    story.run(&["ps", "-n", "1"]);
    story.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_opens_a_dev_environment_and_tells_its_story() {
    let mut stage = Stage::new(Machines::Processes).await;
    let person = Person::of_project(&stage);
    let mut story = Story::new("dstack-dev", &person);
    person.file("dev.yml", &format!("type: dev-environment\nname: dev\nimage: none\nide: vscode\n{SMALL}"));
    let args = ["apply", "-f", "dev.yml", "-y"];
    let going = person.start(&args);
    going.says("To connect");
    going.interrupt();
    story.add(&args, &going.end());
    stage.reaches("dev", &["running"]).await;
    let metrics = person.until(&["metrics", "dev"], |ran| ran.stdout.contains("cpu"));
    assert!(metrics.stdout.contains("MEMORY") && metrics.code == Some(0), "{metrics:#?}");
    story.run(&["stop", "dev", "-y"]);
    stage.reaches("dev", &["terminated"]).await;
    story.run(&["event", "--target-run", "dev"]);
    story.run(&["event", "--within-run", "dev"]);
    story.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_follows_a_docker_task_to_its_end() {
    image();
    let stage = Stage::new(Machines::Containers).await;
    let person = Person::of_project(&stage);
    let mut story = Story::new("dstack-docker", &person);
    // Let go by whoever is attached: nothing of this machine is seen in there.
    let text = format!(
        "type: task\nname: boxed\nimage: {IMAGE}\nports: [7007]\ncommands:\n  - echo up\n  \
         - busybox mkdir -p /tmp/page && echo pong > /tmp/page/index.html\n  \
         - busybox httpd -p 127.0.0.1:7007 -h /tmp/page\n  \
         - until [ -e /tmp/go ]; do sleep 0.1; done\n  - echo down\n{SMALL}"
    );
    person.file("boxed.yml", &text);
    let args = ["apply", "-f", "boxed.yml", "-y"];
    let going = person.start(&args);
    going.says("up\n");
    let shell = person.shell("boxed", "cat /tmp/page/index.html; busybox touch /tmp/go");
    assert_eq!((shell.stdout.as_str(), shell.code), ("pong\n", Some(0)), "{shell:?}");
    story.add(&args, &going.end());
    story.run(&["logs", "boxed"]);
    story.end();
}
