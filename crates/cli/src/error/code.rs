//! Error codes of the command line. Those of configurations are `C…`, in the model.
//!
//! Codes are stable: they are printed, linked and matched by scripts. A retired code is not reused. Each has a page in
//! `docs/errors/`, which `windlass explain CODE` shows.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorCode {
    /// A local problem: a file, a directory, a process.
    Failed,
    Usage,
    ConfirmationRequired,
    Unreachable,
    Address,
    UnknownToken,
    NoToken,
    NotAllowed,
    Refused,
    ProtocolError,
    LocalServer,
    Untrusted,
    UnknownProject,
    UnknownName,
    TooLarge,
    Repository,
    UnsetVariable,
    ImmutableField,
    UnusableKey,
}

impl ErrorCode {
    #[cfg(test)]
    pub(crate) const ALL: [Self; 19] = [
        Self::Failed,
        Self::Usage,
        Self::ConfirmationRequired,
        Self::Unreachable,
        Self::Address,
        Self::UnknownToken,
        Self::NoToken,
        Self::NotAllowed,
        Self::Refused,
        Self::ProtocolError,
        Self::LocalServer,
        Self::Untrusted,
        Self::UnknownProject,
        Self::UnknownName,
        Self::TooLarge,
        Self::Repository,
        Self::UnsetVariable,
        Self::ImmutableField,
        Self::UnusableKey,
    ];

    /// `W010`, as printed and matched.
    pub(crate) const fn id(self) -> &'static str {
        match self {
            Self::Failed => "W001",
            Self::Usage => "W002",
            Self::ConfirmationRequired => "W003",
            Self::Unreachable => "W010",
            Self::Address => "W011",
            Self::UnknownToken => "W012",
            Self::NoToken => "W013",
            Self::NotAllowed => "W014",
            Self::Refused => "W015",
            Self::ProtocolError => "W016",
            Self::LocalServer => "W017",
            Self::Untrusted => "W018",
            Self::UnknownProject => "W020",
            Self::UnknownName => "W021",
            Self::TooLarge => "W030",
            Self::Repository => "W031",
            Self::UnsetVariable => "W032",
            Self::ImmutableField => "W033",
            Self::UnusableKey => "W034",
        }
    }

    /// `unreachable`: the name in the heading of its page.
    #[cfg(test)]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::ConfirmationRequired => "no-confirmation",
            Self::Unreachable => "unreachable",
            Self::Address => "address",
            Self::UnknownToken => "unknown-token",
            Self::NoToken => "no-token",
            Self::NotAllowed => "not-allowed",
            Self::Refused => "refused",
            Self::ProtocolError => "protocol-error",
            Self::LocalServer => "local-server",
            Self::Untrusted => "untrusted",
            Self::UnknownProject => "unknown-project",
            Self::UnknownName => "unknown-name",
            Self::TooLarge => "too-large",
            Self::Repository => "repository",
            Self::UnsetVariable => "unset-variable",
            Self::ImmutableField => "immutable-field",
            Self::UnusableKey => "unusable-key",
        }
    }
}
