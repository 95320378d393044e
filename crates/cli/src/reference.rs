//! Pages of `docs/reference` that the command line determines: every command with its help, and the settings of the
//! server.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use clap::{Arg, Command, CommandFactory as _};
use windlass_server::config::SettingsSource;

use crate::cli::Cli;

const WIDTH: usize = 100;

/// Flags that all commands share; `flags.md` describes them once.
const SHARED_FLAGS: [&str; 5] = ["output", "project", "url", "token", "server-cert"];

fn is_shared(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| SHARED_FLAGS.contains(&long))
}

/// Compares a page with the generated text, or writes it.
fn compare(name: &str, rendered: &str) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, rendered).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == rendered, "docs/reference/{name} is stale: run the tests with UPDATE=1");
}

fn add_help(command: &Command, out: &mut String) {
    let hide = |arg: Arg| {
        let hidden = is_shared(&arg) || ["help", "version"].contains(&arg.get_id().as_str());
        arg.hide_env_values(true).hide(hidden)
    };
    let mut shown = command.clone().term_width(WIDTH).mut_args(hide);
    let path = shown.get_bin_name().unwrap_or_default().to_owned();
    let help: Vec<String> =
        shown.render_long_help().to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    let _ = write!(out, "\n## {path}\n\n```text\n{}\n```\n", help.join("\n").trim());
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
    {
        add_help(inner, out);
    }
}

#[test]
fn the_committed_command_reference_matches_the_help() {
    let mut out = "# Commands\n\nThe help of every command, generated from the program. The flags that every command accepts \
        (`--output`, `--project`, `--url`, `--token`, `--server-cert`) are described [once](flags.md#every-command). \
        [Command line](../cli.md) describes the behaviour that all commands share.\n"
        .to_owned();
    let mut cli = Cli::command();
    cli.build();
    for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
        add_help(command, &mut out);
    }
    compare("commands.md", &out);
}

/// Returns whether `config.yml` may have this key: the reader names an unknown one.
fn is_key(key: &str) -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{key}: x\n")).unwrap();
    match SettingsSource::from_file(file.path()) {
        Ok(_) => true,
        Err(error) => !error.to_string().contains("unknown setting"),
    }
}

#[test]
fn the_committed_reference_of_settings_matches_the_server() {
    let mut out = "# Settings of the server\n\nThe server reads a setting from its flag, otherwise from its environment variable, \
        otherwise from `config.yml` in its data directory. The files of the Debian package in `/etc/windlass` set the variables. \
        [Run a permanent server](../server.md#settings) explains the most important ones. `projects`, a key of `config.yml` alone, \
        sets up [backends](../backends.md). This page is generated from the program.\n\n| flag | variable | key in `config.yml` | meaning |\n| --- | --- | --- | --- |\n"
        .to_owned();
    let cli = Cli::command();
    let server = cli.find_subcommand("server").unwrap();
    let settings = server.get_arguments().filter(|arg| !arg.is_hide_set() && !is_shared(arg));
    for arg in settings {
        let Some(long) = arg.get_long().filter(|long| *long != "help") else { continue };
        let env = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
        let key = long.replace('-', "_");
        let key = if is_key(&key) { format!("`{key}`") } else { String::new() };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.replace('|', "\\|").replace('\n', " ");
        let _ = writeln!(out, "| `--{long}` | {env} | {key} | {help} |");
    }
    compare("settings.md", &out);
}

/// Splits a line of a shell into the words of its first command; comments, pipes and redirections end it, and so does
/// wide space, which separates an explanation.
fn split_words(line: &str) -> Vec<String> {
    let line = line.split("   ").next().unwrap_or_default();
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(end), _) if letter == end => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '|' | '>' | '<' | '&' | ';' | ')') => break,
            (None, '#') if word.is_none() => break,
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Returns the lines of the shell blocks of a page that call `windlass`.
fn commands_of_page(page: &str) -> Vec<String> {
    // The kind of the block that is open.
    let (mut found, mut block) = (Vec::new(), None::<String>);
    for line in page.replace("\\\n", " ").lines() {
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            block = if block.is_some() { None } else { Some(kind.trim().to_owned()) };
        } else if block.as_deref().is_some_and(|kind| ["sh", "", "console"].contains(&kind)) {
            let line = line.trim_start_matches("$ ").trim_start_matches("(umask 077; ");
            found.extend(line.starts_with("windlass ").then(|| line.to_owned()));
        }
    }
    found
}

fn pages(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|end| end == "md") {
            found.push(path);
        }
    }
}

#[test]
fn every_command_in_the_documentation_is_accepted_by_the_parser() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut found);
    let (mut wrong, mut number) = (Vec::new(), 0);
    for path in found {
        for line in commands_of_page(&std::fs::read_to_string(&path).unwrap()) {
            number += 1;
            if let Err(error) = Cli::command().try_get_matches_from(split_words(&line))
                && error.use_stderr()
            {
                let reason = error.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                wrong.push(format!("{}: `{line}`: {reason}", path.file_name().unwrap().display()));
            }
        }
    }
    assert!(number > 50, "only {number} commands were found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
