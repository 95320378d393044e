//! Colours, for terminals that want them. Everything reads the same without.

use std::io::IsTerminal as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    None,
    Dim,
    Green,
    Yellow,
    Red,
    Bold,
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
        }
    }

    /// How a status of anything looks.
    pub(crate) fn of_status(status: &str) -> Self {
        let first = status.split([' ', '(']).next().unwrap_or_default();
        match first {
            "running" | "active" | "idle" | "busy" => Self::Green,
            "done" | "terminated" | "stopped" | "exited" => Self::Dim,
            "failed" | "error" | "aborted" | "unreachable" => Self::Red,
            _ => Self::Yellow,
        }
    }
}

/// Where colours may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    on: bool,
}

impl Style {
    pub(crate) fn stdout() -> Self {
        Self { on: std::io::stdout().is_terminal() && wanted() }
    }

    pub(crate) fn stderr() -> Self {
        Self { on: std::io::stderr().is_terminal() && wanted() }
    }

    #[cfg(test)]
    pub(crate) const fn plain() -> Self {
        Self { on: false }
    }

    pub(crate) fn paint(self, colour: Colour, text: &str) -> String {
        if self.on && colour != Colour::None && !text.is_empty() {
            format!("\u{1b}[{}m{text}\u{1b}[0m", colour.code())
        } else {
            text.to_owned()
        }
    }
}

/// `NO_COLOR` with any value, and terminals that cannot.
fn wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
