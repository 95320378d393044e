//! What an operation is: a name, a place, who may call it, what goes in and what comes out.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, de::DeserializeOwned};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

/// Who may call an operation. The router checks it before the handler runs; handlers may only narrow
/// it further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nobody has to say who they are.
    Open,
    /// Any valid token. Handlers narrow the answer to what the caller may see.
    Token,
    /// The user named in the body, or a global admin. Checked by the handler, which reads the body.
    SelfOrAdmin,
    GlobalAdmin,
    /// A member of the project in the path, or anybody with a token if that project is public.
    ProjectPublic,
    /// Any member of the project in the path.
    ProjectUser,
    /// Any member, for what they made themselves; managers for what others made. The handler finds the creator.
    ProjectOwnerOrManager,
    /// Managers; others may only add or remove themselves. Checked by the handler.
    ProjectSelfOrManager,
    ProjectManager,
    ProjectAdmin,
    /// The process of a gateway, by the gateway's own token. No user's token will do.
    Gateway,
}

impl Access {
    pub const ALL: [Self; 11] = [
        Self::Open,
        Self::Token,
        Self::SelfOrAdmin,
        Self::GlobalAdmin,
        Self::ProjectPublic,
        Self::ProjectUser,
        Self::ProjectOwnerOrManager,
        Self::ProjectSelfOrManager,
        Self::ProjectManager,
        Self::ProjectAdmin,
        Self::Gateway,
    ];

    /// The word written as `x-access` in the OpenAPI document.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Token => "token",
            Self::SelfOrAdmin => "self-or-admin",
            Self::GlobalAdmin => "global-admin",
            Self::ProjectPublic => "project-public",
            Self::ProjectUser => "project-user",
            Self::ProjectOwnerOrManager => "project-owner-or-manager",
            Self::ProjectSelfOrManager => "project-self-or-manager",
            Self::ProjectManager => "project-manager",
            Self::ProjectAdmin => "project-admin",
            Self::Gateway => "gateway",
        }
    }

    /// True where the path names a project whose members decide.
    pub const fn in_project(self) -> bool {
        match self {
            Self::Open | Self::Token | Self::SelfOrAdmin | Self::GlobalAdmin | Self::Gateway => false,
            Self::ProjectPublic
            | Self::ProjectUser
            | Self::ProjectOwnerOrManager
            | Self::ProjectSelfOrManager
            | Self::ProjectManager
            | Self::ProjectAdmin => true,
        }
    }

    /// Whether a caller with this role may apply the operation to their own object, or to one of another user. The
    /// server's checks and `docs/reference/rights.md` both read this. A public project admits more callers to
    /// `project-public` and `project-self-or-manager`.
    pub fn admits(self, role: CallerRole, object: Ownership) -> bool {
        let foreign = object == Ownership::Foreign;
        let least = match self {
            Self::Open => CallerRole::Anonymous,
            Self::Token => CallerRole::Outsider,
            Self::SelfOrAdmin => {
                if foreign {
                    CallerRole::GlobalAdmin
                } else {
                    CallerRole::Outsider
                }
            }
            Self::GlobalAdmin => CallerRole::GlobalAdmin,
            Self::ProjectPublic | Self::ProjectUser => CallerRole::User,
            Self::ProjectOwnerOrManager | Self::ProjectSelfOrManager => {
                if foreign {
                    CallerRole::Manager
                } else {
                    CallerRole::User
                }
            }
            Self::ProjectManager => CallerRole::Manager,
            Self::ProjectAdmin => CallerRole::ProjectAdmin,
            // Gateways have tokens of their own, and no user has one of them.
            Self::Gateway => return false,
        };
        role >= least
    }

    /// Whether it makes a difference who made the object.
    pub const fn depends_on_owner(self) -> bool {
        matches!(self, Self::SelfOrAdmin | Self::ProjectOwnerOrManager | Self::ProjectSelfOrManager)
    }
}

/// What a caller is, in the project that the operation is about. Each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallerRole {
    /// Without a token.
    Anonymous,
    /// A user who is no member of the project.
    Outsider,
    User,
    Manager,
    ProjectAdmin,
    GlobalAdmin,
}

impl CallerRole {
    pub const ALL: [Self; 6] =
        [Self::Anonymous, Self::Outsider, Self::User, Self::Manager, Self::ProjectAdmin, Self::GlobalAdmin];
}

/// Who made the object of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// The caller.
    Own,
    /// Another user.
    Foreign,
}

/// How the request travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A JSON object. An empty body means every default.
    Json,
    /// `multipart/form-data` with one part `file`; the request type is read from the query.
    File,
    /// No body: the request type is read from the query.
    Query,
    /// As `Query`, and the answer is plain text instead of JSON.
    Text,
    /// As `Query`, and the answer is a stream of events that lasts; the response type is one of them.
    Events,
    /// As `Query`, asked for with `Upgrade: tcp`: the connection becomes a stream of bytes both ways.
    Stream,
}

pub trait Operation: 'static {
    /// `verb_noun`; unique.
    const ID: &'static str;
    const SUMMARY: &'static str;
    const METHOD: Method;
    /// With `{name}` for each parameter.
    const PATH: &'static str;
    const ACCESS: Access;
    const BODY: Body;
    type Request: Serialize + DeserializeOwned + JsonSchema + Send + 'static;
    type Response: Serialize + DeserializeOwned + JsonSchema + Send + 'static;
}

/// One row of the operation table, with types turned into values.
#[derive(Clone, Copy)]
pub struct Entry {
    pub id: &'static str,
    pub summary: &'static str,
    pub method: Method,
    pub path: &'static str,
    pub access: Access,
    pub body: Body,
    pub request: fn(&mut SchemaGenerator) -> Schema,
    pub response: fn(&mut SchemaGenerator) -> Schema,
}

impl Entry {
    pub fn of<O: Operation>() -> Self {
        Self {
            id: O::ID,
            summary: O::SUMMARY,
            method: O::METHOD,
            path: O::PATH,
            access: O::ACCESS,
            body: O::BODY,
            request: |schemas| schemas.subschema_for::<O::Request>(),
            response: |schemas| schemas.subschema_for::<O::Response>(),
        }
    }

    /// The names in braces, in order.
    pub fn parameters(&self) -> impl Iterator<Item = &'static str> {
        self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }
}

/// Declares operations and the table of all of them.
macro_rules! operations {
    ($( #[doc = $summary:literal] $name:ident = $id:literal:
        $method:ident $body:ident $path:literal $access:ident ($request:ty) -> $response:ty; )*) => {
        $(
            #[doc = $summary]
            #[derive(Clone, Copy, Debug)]
            pub enum $name {}

            impl $crate::operation::Operation for $name {
                const ID: &'static str = $id;
                const SUMMARY: &'static str = $summary;
                const METHOD: $crate::operation::Method = $crate::operation::Method::$method;
                const PATH: &'static str = $path;
                const ACCESS: $crate::operation::Access = $crate::operation::Access::$access;
                const BODY: $crate::operation::Body = $crate::operation::Body::$body;
                type Request = $request;
                type Response = $response;
            }
        )*

        /// Every operation there is, in the order of the source.
        pub fn table() -> Vec<$crate::operation::Entry> {
            vec![$( $crate::operation::Entry::of::<$name>(), )*]
        }
    };
}
pub(crate) use operations;
