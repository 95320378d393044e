//! Managed jobs on the command line, against a server without instances.

use crate::{cli_env::CliEnv, snapshot::CliSnapshot};

#[test]
fn managed_job_commands_print_clear_results_and_errors() {
    let env = CliEnv::new();
    env.file("good.yaml", "name: good\nresources:\n  disk_tier: best\nrun: echo hi\n");
    env.file("wrong.yaml", "name: wrong\nrnu: echo hi\n");
    env.file("service.yaml", "service:\n  replicas: 1\nrun: echo hi\n");
    env.file("secret.yaml", "secrets:\n  TOKEN: null\nrun: echo hi\n");
    env.file("circle.yaml", "name: a\ndepends_on: [b]\nrun: a\n---\nname: b\ndepends_on: [a]\nrun: b\n");
    let mut transcript = CliSnapshot::new("jobs", &env);
    transcript.run(&["jobs"]);
    transcript.run(&["jobs", "queue", "-o", "json"]);
    for file in ["wrong.yaml", "service.yaml", "circle.yaml", "none.yaml"] {
        transcript.run(&["jobs", "launch", "-y", file]);
    }
    transcript.run(&["jobs", "launch", "-y", "-d", "secret.yaml"]);
    transcript.run(&["jobs", "launch", "-y", "-d", "--secret", "NOWHERE_TO_BE_FOUND", "secret.yaml"]);
    transcript.run(&["jobs", "launch", "good.yaml"]);
    transcript.run(&["jobs", "launch", "-y", "-d", "good.yaml"]);
    transcript.run(&["jobs", "launch", "-y", "-d", "-n", "many", "--num-jobs", "3", "good.yaml"]);
    transcript.run(&["jobs", "launch", "-y", "-d", "-o", "name", "echo hi"]);
    transcript.run(&["jobs", "queue", "-s", "RUNING"]);
    transcript.run(&["jobs", "logs", "77"]);
    transcript.run(&["jobs", "logs", "1", "nothing"]);
    transcript.run(&["jobs", "cancel"]);
    transcript.run(&["jobs", "cancel", "-y", "77"]);
    transcript.run(&["jobs", "cancel", "1"]);
    transcript.end();
    for name in ["1", "good"] {
        let why = env.windlass(&["why", name]).ok().stdout;
        assert!(why.starts_with("good: managed job 1, FAILED_PRECHECKS, DONE (launched "), "{why}");
        assert!(why.contains("\n  why:  no fleet can run it\n"), "{why}");
        assert!(why.contains("\n  to make it fit:\n    create a fleet\n"), "{why}");
    }
    let table = env.windlass(&["jobs", "queue", "-a"]).ok().stdout;
    assert!(table.contains("REASON") && table.contains("FAILED_PRECHECKS  no fleet can run it"), "{table}");
    for command in ["cancel", "logs", "resume"] {
        let refused = env.windlass(&["jobs", command, "good"]);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        refused.says("expected the number of a job, as `windlass jobs queue` shows it");
    }
    let why = env.windlass(&["why", "1", "-o", "json"]).ok().json();
    let queue = env.windlass(&["jobs", "queue", "-a", "-o", "json"]).ok().json();
    let of_queue = queue["jobs"].as_array().unwrap().iter().find(|job| job["job_id"] == 1).unwrap();
    let task = &why["managed_job"]["tasks"][0];
    assert_eq!((&why["sentence"], &task["reason"]), (&of_queue["reason"], &of_queue["reason"]));
}
