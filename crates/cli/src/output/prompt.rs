//! Prompts on a terminal. Without one, the error names the flag to use instead.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use super::{print_message, printable};
use crate::{
    error::{CliError, ErrorCode},
    exit::Exit,
};

/// Returns whether a user can answer a prompt.
pub(crate) fn can_prompt() -> bool {
    std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Asks for confirmation unless `-y` was given.
pub(crate) fn confirm(yes: bool, question: &str) -> Result<bool, CliError> {
    if yes {
        return Ok(true);
    }
    if !can_prompt() {
        return Err(CliError::usage("confirmation needed")
            .code(ErrorCode::ConfirmationRequired)
            .why(question)
            .hint("pass `-y`: there is no terminal to ask on"));
    }
    Ok(prompt_yes_no(question))
}

/// Asks for confirmation to delete `what`, unless `-y` was given.
pub(crate) fn confirm_delete(yes: bool, what: &str) -> Result<bool, CliError> {
    let agreed = confirm(yes, &format!("Delete {what}?"))?;
    if !agreed {
        print_message("Nothing was deleted.");
    }
    Ok(agreed)
}

/// Deletes resources by name. Deletes nothing unless all of them exist and the user confirms. `done` is the verb for
/// the message.
pub(crate) async fn delete<T>(
    names: &[String],
    yes: bool,
    done: &str,
    find: impl AsyncFn(&str) -> Result<T, CliError>,
    delete: impl AsyncFnOnce() -> Result<(), CliError>,
) -> Result<Exit, CliError> {
    for name in names {
        find(name).await?;
    }
    let what = names.join(", ");
    if !confirm_delete(yes, &what)? {
        return Ok(Exit::Failed);
    }
    delete().await?;
    print_message(&format!("{done} {what}."));
    Ok(Exit::Done)
}

/// Prompts for a secret without echo. `flag` is the alternative for scripts, named in the error.
pub(crate) fn prompt_secret(what: &str, flag: &str) -> Result<String, CliError> {
    if !can_prompt() {
        return Err(CliError::usage("there is no terminal to ask on")
            .code(ErrorCode::ConfirmationRequired)
            .why(format!("{what}?"))
            .hint(format!("use `{flag}` to read it from standard input")));
    }
    let mut answer = String::new();
    {
        let _hidden = EchoOff::new();
        let mut out = std::io::stderr().lock();
        let _ = write!(out, "{what}: ").and_then(|()| out.flush());
        let read = std::io::stdin().lock().read_line(&mut answer);
        let _ = writeln!(out);
        read.map_err(|error| CliError::from_error("failed to read the answer", &error))?;
    }
    let answer = answer.trim().to_owned();
    if answer.is_empty() {
        return Err(CliError::usage("the answer is empty").why(format!("{what}?")));
    }
    Ok(answer)
}

/// Guard that disables terminal echo.
struct EchoOff(Option<Termios>);

impl EchoOff {
    fn new() -> Self {
        let before = tcgetattr(std::io::stdin()).ok();
        if let Some(before) = &before {
            let mut quiet = before.clone();
            quiet.local_modes.remove(LocalModes::ECHO);
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &quiet);
        }
        Self(before)
    }
}

impl Drop for EchoOff {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Repeats the prompt until the answer is yes or no. The end of the input is no.
fn prompt_yes_no(question: &str) -> bool {
    loop {
        {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "{} [y/n] ", printable(question)).and_then(|()| out.flush());
        }
        let mut answer = String::new();
        match std::io::stdin().lock().read_line(&mut answer) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => return true,
            "n" | "no" => return false,
            _ => {}
        }
    }
}
