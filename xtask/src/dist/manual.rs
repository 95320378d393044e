//! Manual pages, made from the help of the programs. The programs therefore contain no generator.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::process;

/// Width of the help texts. Pages keep their line breaks.
const COLUMNS: &str = "80";

/// The help of every command, by its words: `windlass server backup`.
pub(super) type HelpTexts = BTreeMap<String, String>;

/// Runs `program --help`, and the same for each of its commands.
pub(super) fn read_help(program: &Path) -> Result<HelpTexts> {
    let name = program.file_name().and_then(|name| name.to_str()).context("the program has no name")?;
    let mut texts = BTreeMap::new();
    let mut todo = vec![Vec::new()];
    while let Some(words) = todo.pop() {
        let text = run_plain(program, words.iter().map(String::as_str).chain(["--help"]))?;
        for command in commands(&text) {
            todo.push(words.iter().cloned().chain([command.to_owned()]).collect());
        }
        let title = std::iter::once(name).chain(words.iter().map(String::as_str)).collect::<Vec<_>>();
        texts.insert(title.join(" "), text);
    }
    Ok(texts)
}

/// Runs a program without the variables of this process: help shows the current values of variables.
pub(super) fn run_plain<'a>(program: &Path, args: impl Iterator<Item = &'a str>) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args).env_clear().env("COLUMNS", COLUMNS).env("HOME", "/nonexistent");
    process::run_for_stdout(&mut command)
}

/// Returns the commands that a help text lists.
fn commands(help: &str) -> impl Iterator<Item = &str> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = lines.take_while(|line| line.starts_with("  ")).filter_map(|line| {
        let name = line.strip_prefix("  ")?;
        // A deeper line continues a description.
        if name.starts_with(' ') { None } else { name.split_whitespace().next() }
    });
    names.filter(|name| *name != "help")
}

/// Renders the page of one command.
pub(super) fn page(title: &str, help: &str, version: &str) -> String {
    let name = title.replace(' ', "-");
    let mut lines = help.trim_end().lines();
    let about: Vec<&str> = lines.by_ref().take_while(|line| !line.trim().is_empty()).collect();
    let mut page = format!(
        ".TH \"{}\" 1 \"\" \"windlass {version}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n",
        escape(&name.to_uppercase()),
        escape(&name),
        escape(&about.join(" ")),
    );
    let mut is_open = false;
    let mut close = |page: &mut String, open: bool| {
        if std::mem::replace(&mut is_open, open) {
            page.push_str(".fi\n");
        }
    };
    let mut is_section = false;
    for line in lines {
        let heading = line.strip_prefix("Usage: ").map(|usage| ("SYNOPSIS", usage)).or_else(|| {
            let is_heading = !line.starts_with(' ') && line.ends_with(':') && !line.contains(". ");
            is_heading.then(|| (line.trim_end_matches(':'), ""))
        });
        if let Some((heading, rest)) = heading {
            close(&mut page, true);
            page.push_str(&format!(".SH {}\n.nf\n", escape(&heading.to_uppercase())));
            if !rest.is_empty() {
                page.push_str(&format!("{}\n", text_line(rest)));
            }
            is_section = true;
        } else if !line.starts_with(' ') && !line.is_empty() && is_section {
            // Text after the last section.
            close(&mut page, true);
            page.push_str(&format!(".SH NOTES\n.nf\n{}\n", text_line(line)));
            is_section = false;
        } else {
            let line = line
                .strip_prefix("       windlass")
                .map_or(line.to_owned(), |rest| format!("windlass{rest}"));
            page.push_str(&format!("{}\n", text_line(line.trim_end())));
        }
    }
    close(&mut page, false);
    let related: Vec<String> = commands(help).map(|command| format!("{name}-{command}")).collect();
    let parent = title.rsplit_once(' ').map(|(parent, _)| parent.replace(' ', "-"));
    let related: Vec<String> =
        parent.into_iter().chain(related).map(|name| format!(".BR {} (1)", escape(&name))).collect();
    if !related.is_empty() {
        page.push_str(&format!(".SH SEE ALSO\n{}\n", related.join(",\n")));
    }
    page
}

fn text_line(line: &str) -> String {
    let escaped = escape(line);
    if escaped.starts_with(['.', '\'']) { format!("\\&{escaped}") } else { escaped }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
Run a server

Usage: windlass server [OPTIONS]
       windlass server [OPTIONS] <COMMAND>

Commands:
  start        Start the server of this machine in the background, unless it
               is running
  help         Print help

Options:
      --port <PORT>
          Port to listen on
          
          [env: WINDLASS_SERVER_PORT=]

Examples:
  windlass server --port 3000

Jobs survive.
'quoted' text
";

    #[test]
    fn commands_are_read_from_help_without_continued_lines() {
        assert_eq!(commands(HELP).collect::<Vec<_>>(), ["start"]);
        assert_eq!(commands("no commands here").count(), 0);
    }

    #[test]
    fn a_manual_page_has_the_sections_of_the_help() {
        let page = page("windlass server", HELP, "1.2.3");
        let headings: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix(".SH ")).collect();
        assert_eq!(headings, ["NAME", "SYNOPSIS", "COMMANDS", "OPTIONS", "EXAMPLES", "NOTES", "SEE ALSO"]);
        assert!(page.contains("windlass\\-server \\- Run a server\n"), "{page}");
        assert!(page.contains("\nwindlass server [OPTIONS] <COMMAND>\n"), "{page}");
        assert!(page.contains("      \\-\\-port <PORT>\n"), "{page}");
        assert!(page.contains("\n\\&'quoted' text\n"), "{page}");
        assert!(page.contains(".BR windlass (1),\n.BR windlass\\-server\\-start (1)\n"), "{page}");
        assert_eq!(page.matches(".nf\n").count(), page.matches(".fi\n").count(), "{page}");
    }
}
