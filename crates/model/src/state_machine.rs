//! State machines: statuses and events as enums, steps, and the rendering of tables.
//!
//! Each machine is a total function `step(status, event)` in a separate file. A new status or event does not compile
//! until every pair is decided, and the rendered table in `docs/transitions/` is what a reviewer reads.

use std::fmt::{self, Write as _};

/// Effect of an event on a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<S> {
    To(S),
    /// Accepted without a change: a late or repeated event.
    Stay,
    /// Must not happen here. The caller writes nothing and reports it.
    Refuse,
}

impl<S: Copy> Step<S> {
    /// Returns the status afterwards, unless the event was refused.
    pub fn status_after(self, before: S) -> Option<S> {
        match self {
            Self::To(status) => Some(status),
            Self::Stay => Some(before),
            Self::Refuse => None,
        }
    }
}

/// An enum whose variants have fixed names in the API, in the database and in tables.
pub trait StrEnum: Copy + Eq + Ord + fmt::Debug + 'static {
    const ALL: &'static [Self];
    fn as_str(self) -> &'static str;
    /// Returns one clause of explanation: the variant's doc comment.
    fn about(self) -> &'static str;
}

/// A value that a row's status column may hold.
pub trait Status: StrEnum {
    /// Returns whether the status is final: it never changes again.
    fn is_final(self) -> bool;
}

/// A name that no variant of an enum has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{word}`")]
pub struct UnknownValue {
    pub what: &'static str,
    pub word: String,
}

/// Declares an enum with fixed names: the doc comment of a variant is its explanation, the string its name in the API.
macro_rules! words {
    ($(
        $(#[doc = $doc:literal])*
        pub enum $name:ident: $what:literal {
            $($(#[doc = $about:literal])* $variant:ident = $word:literal,)*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[doc = $about])* $variant,)*
        }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Returns the name in the API.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl $crate::state_machine::StrEnum for $name {
            const ALL: &'static [Self] = Self::ALL;
            fn as_str(self) -> &'static str {
                Self::as_str(self)
            }
            fn about(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!("", $($about),*).trim_ascii(),)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::state_machine::UnknownValue;
            fn from_str(word: &str) -> Result<Self, Self::Err> {
                match word {
                    $($word => Ok(Self::$variant),)*
                    _ => Err($crate::state_machine::UnknownValue { what: $what, word: word.to_owned() }),
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                word.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

/// Defines the final statuses of a status enum, as methods and as the trait.
macro_rules! final_statuses {
    ($name:ident: $($variant:ident)|+ ; active: $($active:ident)|+) => {
        impl $name {
            /// Returns whether the status is final: it never changes again.
            pub const fn is_final(self) -> bool {
                match self {
                    $(Self::$variant)|+ => true,
                    $(Self::$active)|+ => false,
                }
            }
            pub const fn is_active(self) -> bool {
                !self.is_final()
            }
        }

        impl $crate::state_machine::Status for $name {
            fn is_final(self) -> bool {
                Self::is_final(self)
            }
        }
    };
}

pub(crate) use {final_statuses, words};

/// A state machine, as far as needed to render its table and for the common tests.
pub trait StateMachine {
    type Status: Status;
    type Event: StrEnum;

    /// File name and title of the table.
    const NAME: &'static str;
    /// Description for the head of the table.
    const ABOUT: &'static str;
    /// Statuses that a row may be created with.
    const START: &'static [Self::Status];
    /// Events that no active status may refuse.
    const STOP: &'static [Self::Event];

    fn step(status: Self::Status, event: Self::Event) -> Step<Self::Status>;
}

/// Renders the whole table: one block per status, one line per accepted event.
pub fn render_table<M: StateMachine>() -> String {
    let start: Vec<_> = M::START.iter().map(|s| s.as_str()).collect();
    let mut text = format!("{}\n{}\n\n", M::NAME, M::ABOUT);
    text.push_str("Generated from the code by a test; do not edit.\n");
    push_line(&mut text, format_args!("Initial status: {}.", start.join(", ")));
    for &status in M::Status::ALL {
        text.push('\n');
        let mark = if status.is_final() { " (final)" } else { "" };
        push_line(&mut text, format_args!("{}{mark}: {}", status.as_str(), status.about()));
        render_status::<M>(&mut text, status);
    }
    text
}

fn render_status<M: StateMachine>(text: &mut String, status: M::Status) {
    let mut refused = Vec::new();
    let width = M::Event::ALL.iter().map(|e| e.as_str().len()).max().unwrap_or(0);
    let target_width = M::Status::ALL.iter().map(|s| s.as_str().len()).max().unwrap_or(0) + 3;
    for &event in M::Event::ALL {
        let target = match M::step(status, event) {
            Step::To(to) => format!("-> {}", to.as_str()),
            Step::Stay => "stays".to_owned(),
            Step::Refuse => {
                refused.push(event.as_str());
                continue;
            }
        };
        let (word, about) = (event.as_str(), event.about());
        push_line(text, format_args!("    {word:width$}  {target:target_width$}  {about}"));
    }
    if refused.len() == M::Event::ALL.len() {
        text.push_str("    refused: everything\n");
    } else if status.is_final() {
        text.push_str("    refused: everything else\n");
    } else if !refused.is_empty() {
        push_line(text, format_args!("    refused: {}", refused.join(", ")));
    }
}

fn push_line(text: &mut String, line: fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{line}");
}
