//! Questions, for whoever sits at a terminal. A script is told which flag answers.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use super::{printable, say};
use crate::problem::{Code, Problem};

/// Whether somebody is there to answer a question.
pub(crate) fn can_ask() -> bool {
    std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Asks, unless `-y` has answered already.
pub(crate) fn confirm(yes: bool, question: &str) -> Result<bool, Problem> {
    if yes {
        return Ok(true);
    }
    if !can_ask() {
        return Err(Problem::misuse("nobody is there to answer")
            .code(Code::Unanswered)
            .why(question)
            .hint("`-y` says yes"));
    }
    Ok(ask(question))
}

/// Asks whether to delete `what`, unless `-y` has answered already.
pub(crate) fn confirm_delete(yes: bool, what: &str) -> Result<bool, Problem> {
    let agreed = confirm(yes, &format!("Delete {what}?"))?;
    if !agreed {
        say("Nothing was deleted.");
    }
    Ok(agreed)
}

/// Asks until the answer is yes or no. The end of the input is no.
pub(crate) fn ask(question: &str) -> bool {
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
