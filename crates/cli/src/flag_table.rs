//! No silent flag: every flag of the command line has a test. `docs/reference/flags.md` is the table of them.
//!
//! `flag_table.txt` is maintained manually: `# COMMAND` begins a command, and a line is `FLAG [FLAG …] | TEST`. The
//! effect of a flag is its help. A flag without a line fails, and so does a line without a flag. A flag that no
//! test covers has `-`, which fails.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use clap::{Arg, Command, CommandFactory as _};

use crate::cli::Cli;

/// Flags that all commands share.
const SHARED_FLAGS: [(&str, &str); 5] = [
    ("--output", "every_json_list_is_documented"),
    ("--project", "commands_use_the_default_project"),
    ("--url", "server_flags_are_accepted_before_the_command"),
    ("--token", "environment_variables_override_the_stored_login"),
    ("--server-cert", "login_stores_the_certificate_of_a_tls_server_and_trusts_only_it"),
];
const UNTESTED: &str = "-";

struct Flag {
    name: String,
    help: String,
}

/// Returns the visible flags of each command, without those that all commands share.
fn flags(command: &Command, path: &str, all: &mut BTreeMap<String, Vec<Flag>>) {
    let is_shared = |name: &str| SHARED_FLAGS.iter().any(|(shared, _)| *shared == name);
    let flag = |arg: &Arg| {
        let name = format!("--{}", arg.get_long()?);
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let is_counted =
            !arg.is_hide_set() && !is_shared(&name) && !["--help", "--version"].contains(&&*name);
        is_counted.then_some(Flag { name, help })
    };
    all.insert(path.to_owned(), command.get_arguments().filter_map(flag).collect());
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        let path = format!("{path} {}", inner.get_name());
        flags(inner, path.trim_start(), all);
    }
}

fn known_flags() -> BTreeMap<String, Vec<Flag>> {
    let mut all = BTreeMap::new();
    flags(&Cli::command(), "", &mut all);
    all.retain(|_, flags| !flags.is_empty());
    all
}

/// Returns the test of each `COMMAND --FLAG`.
fn tests_of_flags() -> BTreeMap<String, &'static str> {
    let mut all = BTreeMap::new();
    let mut command = "";
    for line in include_str!("flag_table.txt").lines() {
        if let Some(name) = line.strip_prefix("# ") {
            command = name;
            continue;
        }
        let Some((flags, test)) = line.split_once(" | ") else { panic!("not two columns: {line}") };
        for flag in flags.split(' ') {
            let key = format!("{command} {flag}");
            assert!(all.insert(key.clone(), test).is_none(), "{key} is there twice");
        }
    }
    all
}

#[test]
fn every_flag_has_an_entry_and_every_entry_a_flag() {
    let known: BTreeSet<String> = known_flags()
        .iter()
        .flat_map(|(command, flags)| flags.iter().map(move |flag| format!("{command} {}", flag.name)))
        .collect();
    let listed: BTreeSet<String> = tests_of_flags().into_keys().collect();
    let silent: Vec<&String> = known.difference(&listed).collect();
    assert!(silent.is_empty(), "these flags have no entry in flag_table.txt: {silent:#?}");
    let gone: Vec<&String> = listed.difference(&known).collect();
    assert!(gone.is_empty(), "these entries of flag_table.txt are about no flag: {gone:#?}");
    let untested = tests_of_flags().values().filter(|test| **test == UNTESTED).count();
    assert_eq!(untested, 0, "every flag needs a test");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(dir: &Path, all: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_of_a_flag_exists() {
    let mut text = String::new();
    sources(&root().join("crates"), &mut text);
    let named: BTreeSet<&str> =
        tests_of_flags().into_values().chain(SHARED_FLAGS.map(|(_, test)| test)).collect();
    let is_missing = |test: &&str| *test != UNTESTED && !text.contains(&format!("fn {test}("));
    let missing: Vec<&str> = named.into_iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "tests that flag_table.txt names and that do not exist: {missing:#?}");
}

fn rendered() -> String {
    let mut out = "# Flags\n\n\
        Every flag of `windlass`, its effect, and the test that shows it. The settings of `windlass server` are flags, \
        environment variables and keys of `config.yml` alike. This page is generated from the help texts and from \
        `crates/cli/src/flag_table.txt`.\n\n## Every command\n\n| flag | effect | test |\n| --- | --- | --- |\n"
        .to_owned();
    let tests = tests_of_flags();
    let shared = Cli::command();
    let help_of = |name: &str| {
        let mut commands = shared.get_subcommands().flat_map(Command::get_arguments);
        let found = commands.find(|arg| arg.get_long().is_some_and(|long| format!("--{long}") == name));
        found.and_then(Arg::get_help).map(ToString::to_string).unwrap_or_default()
    };
    for (name, test) in SHARED_FLAGS {
        let _ = writeln!(out, "| `{name}` | {} | `{test}` |", help_of(name));
    }
    for (command, flags) in known_flags() {
        let _ = write!(out, "\n## {command}\n\n| flag | effect | test |\n| --- | --- | --- |\n");
        for Flag { name, help } in flags {
            let test = tests.get(&format!("{command} {name}")).copied().unwrap_or(UNTESTED);
            let test = if test == UNTESTED { "none yet".to_owned() } else { format!("`{test}`") };
            let _ = writeln!(out, "| `{name}` | {} | {test} |", help.replace('|', "\\|").replace('\n', " "));
        }
    }
    out
}

#[test]
fn the_committed_flag_reference_matches_the_generated_one() {
    let path = root().join("docs/reference/flags.md");
    let text = rendered();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "docs/reference/flags.md is stale: run the tests with UPDATE=1");
}
