//! Rules for the systemd units and their settings files: every flag and variable exists in the packaged programs.

use anyhow::{Context, Result, bail};

use super::manual::HelpTexts;

/// Variables that a unit's command line expands; no program reads them.
const ARGUMENT_VARIABLES: &[&str] =
    &["WINDLASS_GATEWAY_ARGS", "WINDLASS_DISPATCH_ARGS", "WINDLASS_SHIM_ARGS"];

/// The value of a key in a unit. Units have each key that is read here once.
pub(super) fn value<'a>(unit: &'a str, key: &str) -> Option<&'a str> {
    unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

/// A command of a program with the flags that it is given.
#[derive(Debug, PartialEq, Eq)]
struct CommandLine<'a> {
    /// Such as `windlass gateway serve`.
    title: String,
    flags: Vec<&'a str>,
}

/// Splits a command line into the command and its flags.
fn parse(line: &str) -> Result<CommandLine<'_>> {
    let mut words = line.split_whitespace();
    let program = words.next().context("the command line is empty")?;
    let program =
        program.strip_prefix("/usr/bin/").with_context(|| format!("`{program}` is not in /usr/bin"))?;
    let is_command = |word: &&str| word.starts_with(|char: char| char.is_ascii_lowercase());
    let rest: Vec<&str> = words.collect();
    let commands = rest.iter().copied().take_while(is_command);
    let title = std::iter::once(program).chain(commands).collect::<Vec<_>>().join(" ");
    Ok(CommandLine { title, flags: flags(&rest) })
}

fn flags<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let flags = words.iter().filter(|word| word.starts_with("--"));
    flags.map(|word| word.split_once('=').map_or(*word, |(flag, _)| flag)).collect()
}

/// Checks a unit, and its settings file if it has one, against the help of the programs.
pub(super) fn check(name: &str, unit: &str, settings: Option<&str>, help: &HelpTexts) -> Result<()> {
    let mut problems = Vec::new();
    let start = value(unit, "ExecStart").with_context(|| format!("`{name}` has no ExecStart"))?;
    let command = parse(start).with_context(|| format!("invalid ExecStart in `{name}`"))?;
    let Some(text) = help.get(&command.title) else {
        bail!("`{name}` starts `{}`, which is not a command", command.title);
    };
    // Help is wrapped: `[env:` may be the end of a line.
    let text = &text.split_whitespace().collect::<Vec<_>>().join(" ");
    problems.extend(missing_flags(&command.flags, text).map(|flag| format!("`{name}` uses `{flag}`")));
    for (variable, value) in settings.into_iter().flat_map(variables) {
        if ARGUMENT_VARIABLES.contains(&variable) {
            let words: Vec<&str> = value.split_whitespace().collect();
            problems
                .extend(missing_flags(&flags(&words), text).map(|flag| format!("its settings use `{flag}`")));
            if !start.contains(&format!("${variable}")) {
                problems.push(format!("`{name}` does not expand `{variable}`"));
            }
        } else if !text.contains(&format!("[env: {variable}")) {
            problems.push(format!("its settings use `{variable}`"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!("`{}` does not have what `{name}` uses: {}", command.title, problems.join("; "))
}

fn missing_flags<'a>(flags: &[&'a str], help: &str) -> impl Iterator<Item = &'a str> {
    let has = |flag: &str| {
        let mut words = help.split(|char: char| char.is_whitespace() || ",[]`".contains(char));
        words.any(|word| word == flag)
    };
    flags.iter().copied().filter(move |flag| !has(flag)).collect::<Vec<_>>().into_iter()
}

/// Returns the variables of a settings file, also those in comments.
fn variables(settings: &str) -> impl Iterator<Item = (&str, &str)> {
    let assignments = settings.lines().filter_map(|line| line.trim_start_matches('#').split_once('='));
    let is_name = |name: &str| name.chars().all(|char| char.is_ascii_uppercase() || char == '_');
    assignments.filter(move |(name, _)| !name.is_empty() && is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help() -> HelpTexts {
        let text = "Run a gateway\n\n      --token-file <FILE>\n  -u, --url <URL>\n          [env:\n          WINDLASS_URL=]\n";
        HelpTexts::from([("windlass gateway serve".to_owned(), text.to_owned())])
    }

    const UNIT: &str = "[Service]\nExecStart=/usr/bin/windlass gateway serve %i --token-file %d/token $WINDLASS_GATEWAY_ARGS\n";

    #[test]
    fn a_unit_with_existing_flags_and_variables_is_accepted() {
        let settings = "# Text = more\n#WINDLASS_URL=http://x\nWINDLASS_GATEWAY_ARGS=--url x\n";
        check("gateway", UNIT, Some(settings), &help()).unwrap();
    }

    #[test]
    fn unknown_flags_variables_and_commands_of_units_are_rejected() {
        let error = |unit: &str, settings: &str| {
            check("gateway", unit, Some(settings), &help()).unwrap_err().to_string()
        };
        assert!(error(&UNIT.replace("--token-file", "--token"), "").contains("`--token`"));
        assert!(error(&UNIT.replace("serve", "run"), "").contains("not a command"));
        assert!(error(UNIT, "#WINDLASS_URI=x\n").contains("`WINDLASS_URI`"));
        assert!(error(UNIT, "#WINDLASS_GATEWAY_ARGS=--none\n").contains("`--none`"));
        assert!(error(UNIT, "#WINDLASS_SHIM_ARGS=--url\n").contains("does not expand"));
    }
}
