//! `windlass server backup` and `restore`.

use std::{
    path::Path,
    process::{Command, Output},
};

use crate::{TestDir, server::start};

const TOKEN: &str = "a-token-that-nobody-may-find-0123456789";
const CANARY: &str = "canary-7f1d0c55-in-a-secret";

fn windlass(data: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["server", "--data-dir"])
        .arg(data)
        .args(args)
        .env_remove("WINDLASS_SERVER_DATABASE_URL")
        .output()
        .unwrap()
}

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn path_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Names of files next to the database that do not belong to the server.
fn leftover_files(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter(|name| name.contains("new-") || name.contains("before")).collect();
    names.sort();
    names
}

#[test]
fn a_backup_of_a_running_server_restores_the_earlier_state() {
    let (dir, elsewhere) = (TestDir::new(), TestDir::new());
    let server = start(dir.path(), &["--admin-token", TOKEN]);
    let project = |name: &str| format!(r#"{{"project_name": "{name}"}}"#);
    assert!(server.post("/api/projects/create", TOKEN, &project("kept")).contains("200 OK"));
    let copy = elsewhere.path().join("copy.db");
    let made = windlass(dir.path(), &["backup", path_str(&copy)]);
    assert!(made.status.success(), "{}", output_text(&made));
    assert!(output_text(&made).contains("copy.db"), "{}", output_text(&made));
    assert!(server.post("/api/projects/create", TOKEN, &project("later")).contains("200 OK"));

    let again = windlass(dir.path(), &["backup", path_str(&copy)]);
    assert_eq!(again.status.code(), Some(1));
    assert!(output_text(&again).contains("already exists"), "{}", output_text(&again));
    let refused = windlass(dir.path(), &["restore", path_str(&copy)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        output_text(&refused).contains("another server") && output_text(&refused).contains("server stop"),
        "{}",
        output_text(&refused)
    );
    assert!(server.post("/api/projects/list", TOKEN, "{}").contains("later"), "nothing was changed");
    assert_eq!(server.stop("-TERM").0, Some(0));

    let restored = windlass(dir.path(), &["restore", path_str(&copy)]);
    assert!(restored.status.success(), "{}", output_text(&restored));
    assert_eq!(leftover_files(dir.path()), ["windlass.db.before-restore-1"]);
    assert_eq!(leftover_files(elsewhere.path()), [""; 0]);
    let server = start(dir.path(), &[]);
    let projects = server.post("/api/projects/list", TOKEN, "{}");
    assert!(projects.contains("kept") && !projects.contains("later"), "{projects}");
    assert_eq!(server.stop("-TERM").0, Some(0));
    // The replaced database can be restored as well.
    let aside = dir.path().join("windlass.db.before-restore-1");
    assert!(windlass(dir.path(), &["restore", path_str(&aside)]).status.success());
    let server = start(dir.path(), &[]);
    assert!(server.post("/api/projects/list", TOKEN, "{}").contains("later"));
    assert_eq!(server.stop("-TERM").0, Some(0));
}

#[test]
fn x3_a_backup_has_no_secret_in_it() {
    let (dir, elsewhere) = (TestDir::new(), TestDir::new());
    let server = start(dir.path(), &["--admin-token", TOKEN]);
    let secret = format!(r#"{{"name": "key", "value": "{CANARY}"}}"#);
    let answer = server.post("/api/project/main/secrets/create_or_update", TOKEN, &secret);
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(server.post("/api/users/get_my_user", TOKEN, "").contains("BEGIN OPENSSH PRIVATE KEY"));
    let copy = elsewhere.path().join("copy.db");
    let made = windlass(dir.path(), &["backup", path_str(&copy)]);
    assert!(made.status.success(), "{}", output_text(&made));
    let bytes = std::fs::read(&copy).unwrap();
    let has = |word: &str| bytes.windows(word.len()).any(|window| window == word.as_bytes());
    assert!(has("create_project") || has("main"), "the copy holds what is no secret");
    for word in [CANARY, TOKEN, "PRIVATE KEY"] {
        assert!(!has(word), "{word} is in the backup");
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&copy).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(server.stop("-TERM").0, Some(0));
}

#[test]
fn restore_refuses_an_invalid_backup_and_changes_nothing() {
    let (dir, elsewhere) = (TestDir::new(), TestDir::new());
    assert_eq!(start(dir.path(), &["--admin-token", TOKEN]).stop("-TERM").0, Some(0));
    let before = std::fs::read(dir.path().join("windlass.db")).unwrap();
    let copy = elsewhere.path().join("copy.db");
    assert!(windlass(dir.path(), &["backup", path_str(&copy)]).status.success());
    let mut bytes = std::fs::read(&copy).unwrap();
    // In the middle of a page that is not the first.
    let middle = bytes.len() / 2;
    bytes[middle..middle + 4096].fill(0xa5);
    let damaged = elsewhere.path().join("damaged.db");
    std::fs::write(&damaged, &bytes).unwrap();
    let foreign = elsewhere.path().join("foreign.db");
    std::fs::write(&foreign, "a shopping list, and long enough to be taken for the header of a database")
        .unwrap();
    let absent = elsewhere.path().join("absent.db");
    for file in [&damaged, &foreign, &absent] {
        let refused = windlass(dir.path(), &["restore", path_str(file)]);
        assert_eq!(refused.status.code(), Some(1), "{}", output_text(&refused));
        assert!(output_text(&refused).contains(path_str(file)), "{}", output_text(&refused));
    }
    assert_eq!(std::fs::read(dir.path().join("windlass.db")).unwrap(), before);
    assert_eq!(leftover_files(dir.path()), [""; 0]);
}

#[test]
fn backup_and_restore_of_postgres_name_pg_dump_and_pg_restore() {
    let dir = TestDir::new();
    let url = "postgres://windlass:hidden@db.example/windlass";
    for (action, tool) in [("backup", "pg_dump"), ("restore", "pg_restore")] {
        let refused = windlass(dir.path(), &["--database-url", url, action, "/tmp/none.db"]);
        assert_eq!(refused.status.code(), Some(1));
        let message = output_text(&refused);
        assert!(
            message.contains(tool) && message.contains("postgres://windlass@db.example/windlass"),
            "{message}"
        );
        assert!(!message.contains("hidden"), "{message}");
    }
}
