//! Colours, for terminals that support them. Output is equally readable without them.

use std::io::IsTerminal as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    None,
    Dim,
    Green,
    Yellow,
    Red,
    Bold,
    Blue,
    Magenta,
    Cyan,
}

impl Colour {
    const fn code(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Dim => "2",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "31",
            Self::Bold => "1",
            Self::Blue => "34",
            Self::Magenta => "35",
            Self::Cyan => "36",
        }
    }

    /// Colour of a status.
    pub(crate) fn for_status(status: &str) -> Self {
        let first = status.split([' ', '(']).next().unwrap_or_default();
        match first {
            "running" | "active" | "idle" | "busy" => Self::Green,
            "done" | "terminated" | "stopped" | "exited" => Self::Dim,
            "failed" | "error" | "aborted" | "unreachable" => Self::Red,
            _ => Self::Yellow,
        }
    }
}

/// Use of colours in an output stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    on: bool,
}

impl Style {
    pub(crate) fn stdout() -> Self {
        Self { on: are_colours_wanted(std::io::stdout().is_terminal()) }
    }

    pub(crate) fn stderr() -> Self {
        Self { on: are_colours_wanted(std::io::stderr().is_terminal()) }
    }

    /// Style without colours.
    pub(crate) const fn plain() -> Self {
        Self { on: false }
    }

    pub(crate) const fn is_enabled(self) -> bool {
        self.on
    }

    pub(crate) fn paint(self, colour: Colour, text: &str) -> String {
        if self.on && colour != Colour::None && !text.is_empty() {
            format!("\u{1b}[{}m{text}\u{1b}[0m", colour.code())
        } else {
            text.to_owned()
        }
    }
}

/// Colours are used on terminals that support them. `NO_COLOR` and `CLICOLOR=0` disable them, `CLICOLOR_FORCE` enables
/// them for pipes too; disabling takes precedence.
fn are_colours_wanted(terminal: bool) -> bool {
    decide_colours(terminal, |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

fn decide_colours(terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
    let says = |name: &str| variable(name).filter(|value| !value.is_empty());
    if says("NO_COLOR").is_some() {
        return false;
    }
    if says("CLICOLOR_FORCE").is_some_and(|value| value != "0") {
        return true;
    }
    let able = variable("TERM").is_none_or(|term| term != "dumb");
    terminal && able && says("CLICOLOR").is_none_or(|value| value != "0")
}

#[cfg(test)]
mod tests {
    use super::decide_colours;

    #[test]
    fn colours_default_to_terminals_and_environment_variables_override() {
        let check = |terminal: bool, name: &str, value: &str| {
            decide_colours(terminal, |requested| (requested == name).then(|| value.to_owned()))
        };
        assert!(check(true, "", "") && !check(false, "", ""));
        assert!(!check(true, "NO_COLOR", "1") && check(true, "NO_COLOR", ""));
        assert!(check(false, "CLICOLOR_FORCE", "1") && !check(false, "CLICOLOR_FORCE", "0"));
        assert!(!check(true, "CLICOLOR", "0") && !check(true, "TERM", "dumb"));
        assert!(!decide_colours(true, |_| Some("1".to_owned())), "NO_COLOR wins");
    }
}
